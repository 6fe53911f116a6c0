"""Plain torch.distributed collectives on LocalTensors, against the maths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.tests.test_local_tensor import held
from dtbench_core import torch_compat
from dtbench_core.errors import SimulationError
from dtbench_core.simulate import LocalTensor, LocalTensorMode, declare_group, per_rank, tensor_map


@pytest.fixture
def mesh(mode: LocalTensorMode) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


FIBRES = {"inner": [[0, 1], [0, 1], [2, 3], [2, 3]], "outer": [[0, 2], [1, 3], [0, 2], [1, 3]]}


@pytest.mark.parametrize("which", FIBRES)
def test_a_collective_on_a_mesh_dim_meets_the_ranks_beside_it(mesh: DeviceMesh, which: str) -> None:
    """Each collective by itself, on the whole world: test_threads.py."""
    group, me = mesh.get_group(which), dist.get_rank()
    total, sent, part, moved = torch.ones(2) * me, torch.ones(2) * me, torch.zeros(1), torch.zeros(2)
    parts = [torch.zeros(1), torch.zeros(1)]
    dist.all_reduce(total, dist.ReduceOp.MAX, group=group)
    dist.broadcast(sent, group=group, group_src=1)
    dist.all_gather(parts, torch.ones(1) * me, group=group)
    torch_compat.reduce_scatter_single(part, torch.arange(2.0) + 10 * me, group=group)
    dist.all_to_all_single(moved, torch.arange(2.0) + 10 * me, group=group)
    for rank, ranks in enumerate(FIBRES[which]):
        at = ranks.index(rank)
        got = [t.shard(rank).tolist() for t in (total, sent, *parts, part, moved)]
        want = [[max(ranks)] * 2, [ranks[1]] * 2, *([r] for r in ranks), [10.0 * sum(ranks) + 2 * at]]
        assert got == [*want, [10.0 * r + at for r in ranks]], rank


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_functional_collectives_have_gradients(mesh: DeviceMesh) -> None:
    from torch.distributed import _functional_collectives as funcol

    x = (torch.ones(2) * dist.get_rank()).requires_grad_()
    (funcol.all_gather_tensor_autograd(x, 0, mesh["inner"]) * torch.arange(4.0)).sum().backward()
    assert held(x.grad) == [[0.0, 2.0], [4.0, 6.0]] * 2
    scattered = funcol.reduce_scatter_tensor(torch.arange(2.0) + x.detach(), "sum", 0, (mesh, 0))
    assert held(scattered + 0) == [[2.0], [4.0], [4.0], [6.0]]


def test_an_unknown_group_must_be_declared(mode: LocalTensorMode) -> None:
    group = dist.new_group([0, 1])
    x = torch.ones(1) * dist.get_rank()
    with pytest.raises(SimulationError, match=r"does not say what rank 2 does: .* declare_group"):
        dist.all_reduce(x, group=group)
    with pytest.raises(SimulationError, match="expected the ranks of all groups, including this one's"):
        declare_group(group, [[2, 3]])
    declare_group(group, [[0, 1], [2, 3]])
    dist.all_reduce(x, group=group)
    assert held(x) == [[1.0], [1.0], [5.0], [5.0]]
    lone = dist.new_group([0, 1])
    some = tensor_map(x, lambda rank, shard: shard if rank < 2 else None)
    dist.all_reduce(some, group=lone)
    assert held(some) == [[2.0], [2.0]]


def test_a_subset_of_ranks(fake_world: Callable[[int], None]) -> None:
    fake_world(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    with LocalTensorMode({2, 3}):
        x = torch.ones(1) * dist.get_rank()
        assert isinstance(x, LocalTensor) and x.ranks == (2, 3)
        dist.all_reduce(x, group=mesh.get_group("inner"))
        assert held(x) == [[5.0], [5.0]]
        with pytest.raises(
            SimulationError, match="of ranks 0, 2 needs rank 0 too, but only ranks 2, 3 take part"
        ):
            dist.all_reduce(x, group=mesh.get_group("outer"))


def test_a_mesh_over_some_ranks_in_another_order(fake_world: Callable[[int], None]) -> None:
    fake_world(8)
    with LocalTensorMode([0, 3, 5, 6]):
        mesh = DeviceMesh("cpu", [[6, 0], [3, 5]])
        x = torch.ones(1) * dist.get_rank()
        assert per_rank(mesh.get_coordinate(), (6, 0, 3, 5)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        out = torch.zeros(2)
        torch_compat.all_gather_single(out, x, group=mesh.get_group(1))
        assert [out.shard(r).tolist() for r in (0, 3, 5, 6)] == [
            [0.0, 6.0],  # by rank, as torch sorts the ranks of a group
            [3.0, 5.0],
            [3.0, 5.0],
            [0.0, 6.0],
        ]
