"""The core's DTensors in a LocalTensorMode: against plain torch, and what goes wrong there."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from core.tests.parallel_models import MLP, WIDTH
from core.tests.test_local_tensor import RANKS, held, uneven
from dtbench_core import (
    DTensor,
    FallbackWarning,
    Partial,
    Replicate,
    Shard,
    count_collectives,
    distribute_tensor,
    fallbacks,
    rand,
    zeros,
)
from dtbench_core.dispatch.fallback import clear_fallbacks
from dtbench_core.errors import RankDependentError, SimulationError
from dtbench_core.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtbench_core.simulate import LocalTensorMode, per_rank, rank_map

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def test_a_dtensor_shows_every_shard(mode: LocalTensorMode) -> None:
    x = distribute_tensor(torch.arange(5.0), init_device_mesh("cpu", (4,)), [S0])
    assert held(x.to_local()) == [[0.0, 1.0], [2.0, 3.0], [4.0], []]
    assert per_rank(x._spec.local_shape, RANKS) == [(2,), (2,), (1,), (0,)]
    assert per_rank(x._spec.local_offset, RANKS) == [(0,), (2,), (4,), (5,)]
    assert "{0-1: 2, 2: 1, 3: 0}] on ranks 0-3\n  0: tensor([0., 1.])" in repr(x)
    assert x.shape == (5,) and x.sum().full_tensor().reconcile().item() == 10.0


def test_uneven_parts_from_each_rank(mode: LocalTensorMode) -> None:
    mesh, x = init_device_mesh("cpu", (4,)), uneven().requires_grad_()
    full = DTensor.from_local(x, mesh, [S0], shape=(5, 3), stride=(3, 1)).full_tensor()
    assert full[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0, 3.0]
    (full * torch.arange(5.0).unsqueeze(1)).sum().backward()
    assert [rows[:1] for rows in held(x.grad[:, 0])] == [[0.0], [2.0], [4.0], []]
    # other lengths than torch.chunk's: the ranks tell each other theirs
    odd = rank_map(lambda rank: torch.full(((1, 0, 3, 1)[rank],), float(rank)))
    whole = DTensor.from_local(odd, mesh, [S0], shape=(5,), stride=(1,)).full_tensor()
    assert whole.tolist() == [0, 2, 2, 2, 3]
    with pytest.raises(RankDependentError, match=r"different sizes, .*pass shape= and stride="):
        DTensor.from_local(uneven(), mesh, [S0])


def test_writes_and_new_shapes(mode: LocalTensorMode) -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(6.0).view(2, 3), mesh, [S1])
    x[1:].mul_(-1)
    x.t_()
    assert x.placements == (S0,) and x.shape == (3, 2)
    assert x.full_tensor().tolist() == [[0, -3], [1, -4], [2, -5]]
    torch.add(x, 1, out=x)
    assert held(x.to_local()) == [[[1.0, -2.0]], [[2.0, -3.0]], [[3.0, -4.0]], []]
    # made of a plain tensor that all ranks share: each has its own from then on
    with mode.disable():
        plain = torch.zeros(4)
    y = DTensor.from_local(plain, mesh, [R])
    y.add_(1)
    assert y.to_local().tolist() == [1.0] * 4 and plain.tolist() == [0.0] * 4


def test_collectives_and_fallbacks_are_counted_once(mode: LocalTensorMode) -> None:
    x = distribute_tensor(torch.ones(8, 4), init_device_mesh("cpu", (4,)), [S0])
    clear_fallbacks()
    with count_collectives() as count, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        x.redistribute(placements=[R])
        x.redistribute(placements=[S1])
        torch.bincount(x[:, 0].to(torch.int64))
    assert count.calls == {"all_gather": 2, "all_to_all": 1} and count.bytes["all_to_all"] == 32
    assert sum(fallbacks().values()) == 1
    assert [w.category for w in seen] == [FallbackWarning]


def test_random_ops_draw_what_one_device_would(mode: LocalTensorMode) -> None:
    mesh = init_device_mesh("cpu", (4,))
    with mode.disable():
        torch.manual_seed(3)
        want = [F.dropout(torch.ones(5, 2)), torch.rand(7), torch.rand(2)]
    torch.manual_seed(3)
    x = distribute_tensor(torch.ones(5, 2), mesh, [S0], src_data_rank=None)
    drawn = F.dropout(x), rand(7, device_mesh=mesh, placements=[S0])
    got = [*(one.full_tensor() for one in drawn), torch.rand(2)]
    assert [t.tolist() for t in got] == [t.tolist() for t in want]


def test_ranks_seeded_apart_are_brought_in_step(mode: LocalTensorMode) -> None:
    mesh = init_device_mesh("cpu", (4,))
    with mode.disable():
        want = torch.rand(6, generator=torch.Generator().manual_seed(0)).tolist()
    torch.manual_seed(dist.get_rank())
    x = zeros(6, device_mesh=mesh, placements=[S0])
    x.uniform_()
    assert x.full_tensor().tolist() == want


def test_dtensors_of_one_rank_are_refused(fake_world: Callable[[int], None]) -> None:
    fake_world(4)
    mesh = init_device_mesh("cpu", (4,))
    outside = distribute_tensor(torch.ones(4), mesh, [S0], src_data_rank=None)
    with LocalTensorMode(4), pytest.raises(SimulationError, match="made outside this LocalTensorMode"):
        outside * 2
    assert (outside * 2).to_local().tolist() == [2.0]


def test_functions_of_a_rank_may_use_dtensors(mode: LocalTensorMode) -> None:
    mesh = init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.arange(5.0), mesh, [S0])

    def total(rank: int) -> tuple[torch.Tensor, DTensor]:
        mine = DTensor.from_local(torch.ones(2) * rank, mesh, [S0])
        return mine.sum().full_tensor(), mine.redistribute(placements=[R])

    summed, whole = rank_map(total)
    assert summed.tolist() == 12.0 and isinstance(whole, DTensor)
    assert (whole[:5] + x.redistribute(placements=[R])).to_local().tolist() == [0.0, 1.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((4, 4, 4), marks=pytest.mark.slow)], ids=str)
def test_training_step_of_a_parallel_mlp(fake_world: Callable[[int], None], shape: tuple[int, ...]) -> None:
    """Data over the outer mesh dim, the layers over the inner one: the loss and gradients of one device."""
    size = int(torch.tensor(shape).prod())
    fake_world(size)
    torch.manual_seed(0)
    plain, data = MLP(), torch.randn(2 * shape[0], WIDTH)
    loss = plain(data).square().sum()
    loss.backward()
    with LocalTensorMode(size):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp", "more")[: len(shape)])
        torch.manual_seed(0)
        model = parallelize_module(MLP(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mine = distribute_tensor(data, mesh["dp"], [S0], src_data_rank=None).to_local()
        got = model(mine).square().sum()
        got.backward()
        dist.all_reduce(got.detach(), group=mesh.get_group("dp"))
        assert got.detach().reconcile().item() == pytest.approx(loss.item(), rel=1e-5)
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            whole = gradient.full_tensor()
            dist.all_reduce(whole, group=mesh.get_group("dp"))
            want = plain.get_parameter(name).grad
            torch.testing.assert_close(whole.reconcile(), want, msg=name)
