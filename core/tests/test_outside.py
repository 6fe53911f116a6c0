"""Meshes that leave out ranks, on which the same program runs without data; meshes whose ranks do not ascend."""

import contextlib
import copy
import itertools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from core.tests.gloo_world import mesh_in, mesh_of, on_ranks
from core.tests.local_world import ThreadWorlds
from dtbench_core import (
    DTensor,
    ExplicitRedistributionContext,
    MeshError,
    Partial,
    RaggedShard,
    RedistributionError,
    Replicate,
    Shard,
    StridedShard,
    comm,
    count_collectives,
    distribute_module,
    distribute_tensor,
    randn,
    sharding_text,
    zeros,
)
from dtbench_core.interop.collective_utils import mesh_broadcast, mesh_scatter, shard_dim_alltoall
from dtbench_core.layout.random import manual_seed

pytestmark = pytest.mark.filterwarnings("ignore::dtbench_core.dispatch.fallback.FallbackWarning")

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
A = torch.arange(12.0).reshape(4, 3)


def _pair() -> Any:
    """Returns the mesh of the first two of four ranks."""
    return mesh_of((2,))


def _member() -> bool:
    return _pair().get_coordinate() is not None


def _program() -> dict[str, Any]:
    """Runs many kinds of ops; returns the metadata of each result and the number of its local elements."""
    mesh = _pair()
    x = distribute_tensor(A.clone(), mesh, [S0]).requires_grad_()
    w = DTensor.from_local(
        torch.ones(3, 1) if _member() else torch.empty(0), mesh, [S1], shape=(3, 2), stride=(2, 1)
    )
    out: dict[str, Any] = {"x": x, "w": w}
    out["mm"] = x @ w
    out["moved"] = out["mm"].redistribute(placements=[S1])
    out["softmax"] = F.softmax(out["moved"], dim=-1)
    out["sum"] = out["softmax"].sum()
    out["max"], out["argmax"] = x.detach().max(dim=1)
    out["view"] = x.view(2, 2, 3).transpose(0, 1)
    out["list"] = torch.cat(x.detach().split(1))
    out["in place"] = x.detach().clone().add_(1).t_()
    out["out"] = torch.mul(x.detach(), 2, out=zeros(4, 3, device_mesh=mesh, placements=[S0]))
    out["product"] = torch.mm(x.detach(), w, out=zeros(4, 2, device_mesh=mesh, placements=[S0]))
    out["terms"] = DTensor.from_local(torch.ones(2), mesh, [P]).exp()
    out["made"] = randn(5, 2, device_mesh=mesh, placements=[S0])
    out["dropout"] = F.dropout(x.detach(), 0.5)
    out["no rule"] = torch.linalg.qr(x.detach())[0]
    (out["mm"] * 2).sum().backward()
    out["grad"] = x.grad
    summary = {}
    for name, tensor in out.items():
        local, full = tensor.to_local(), tensor.detach().full_tensor()
        summary[name] = tuple(tensor.shape), tensor.dtype, tensor.placements, local.numel(), tuple(full.shape)
        assert local.shape == tensor._spec.local_shape
    summary["equal"] = torch.equal(x.detach(), x.detach())
    return summary


def test_program_runs_on_ranks_outside_the_mesh(ranks: ThreadWorlds) -> None:
    inside, _, outside, other = ranks(_program)
    assert outside == other
    for name, summary in inside.items():
        if name == "equal":
            assert summary is outside[name] is True
            continue
        shape, dtype, placements, held, full = summary
        assert outside[name] == (shape, dtype, placements, *((0, (0,)) if shape else (1, ()))), name
        assert held > 0 and full == shape


@on_ranks
def test_values_are_not_available_outside_the_mesh() -> None:
    x = distribute_tensor(A, _pair(), [S0])
    message = f"but rank {dist.get_rank()} is not in.*guard the call"
    for ask in (
        lambda: x.sum().item(),
        lambda: float(x[0, 0]),
        lambda: bool((x > 0).all()),
        lambda: x.nonzero(),
    ):
        with contextlib.nullcontext() if _member() else pytest.raises(MeshError, match=message):
            ask()


@on_ranks
def test_training_runs_on_ranks_outside_the_mesh() -> None:
    """Every rank of the world trains a model that two ranks hold."""
    torch.manual_seed(0)
    module = distribute_module(nn.Linear(3, 2), _pair())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    mine = torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        optimizer.zero_grad()
        module(DTensor.from_local(mine, _pair(), [S0])).pow(2).mean().to_local().sum().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    assert mine.grad is not None and mine.grad.shape == (2, 3)
    twin = copy.deepcopy(module)
    twin.load_state_dict(pickle.loads(pickle.dumps(module.state_dict())))
    assert [p.to_local().numel() for p in twin.parameters()] == ([6, 2] if _member() else [0, 0])


@on_ranks
def test_ranks_outside_send_nothing_and_raise_the_same_errors() -> None:
    x = distribute_tensor(A, _pair(), [S0])
    with count_collectives() as count:
        x.full_tensor()
        _ = x + x.redistribute(placements=[S1])
    assert bool(count.calls) == _member()
    other = distribute_tensor(A, _pair(), [S1])
    with (
        pytest.raises(RedistributionError, match="would redistribute") as caught,
        ExplicitRedistributionContext(),
    ):
        _ = x + other
    assert len(set(comm.all_gather_objects(str(caught.value)))) == 1


@on_ranks
def test_tables_on_meshes_of_one_rank_are_saved_and_loaded(tmp_path: Path) -> None:
    """The mesh of a table holds only its own rank."""
    rank = dist.get_rank()
    state: dict[str, Any] = {}
    for owner in range(4):
        mesh = DeviceMesh("cpu", torch.tensor([owner]))
        held = torch.full((8, 16), float(rank)) if rank == owner else torch.empty(0)
        table = DTensor.from_local(held, mesh, [R], run_check=False, shape=(8, 16), stride=(16, 1))
        state[f"table{owner}"] = table
        assert (table.shape, table.stride(), table.to_local().numel()) == (
            (8, 16),
            (16, 1),
            128 if owner == rank else 0,
        )
        assert f"rank {owner}" in sharding_text(table)
    dcp.save(state, checkpoint_id=tmp_path)
    fresh = {name: table.clone().zero_() for name, table in state.items()}
    dcp.load(fresh, checkpoint_id=tmp_path)
    mine = fresh[f"table{rank}"].to_local()
    assert (mine == rank).all() and mine.numel() == 128


# ---- meshes whose ranks do not ascend ----


MESHES = ([3, 2, 1, 0], [3, 1, 2, 0], [[3, 1], [2, 0]], [[0, 3], [2, 1]])


def _full(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("order", MESHES, ids=str)
@on_ranks
def test_ragged_and_checked_tensors_on_meshes_that_do_not_ascend(order: Any) -> None:
    mesh, full = mesh_in(order), _full(8, 6)
    more = [R] * (mesh.ndim - 1)
    size = mesh.size(0)
    counts = (1, 4, 0, 3)[:size] if size == 4 else (1, 7)
    for cut in (RaggedShard(0, counts), StridedShard(0, 2), StridedShard(1, 3)):
        x = distribute_tensor(full, mesh, [cut, *more], src_data_rank=None)
        for wanted in (R, Shard(0), Shard(1)):
            assert torch.equal(x.redistribute(placements=[wanted, *more]).full_tensor(), full), (cut, wanted)
    at = mesh.get_coordinate()
    start = sum(counts[: at[0]])
    local = full[start : start + counts[at[0]]]
    x = DTensor.from_local(local, mesh, [Shard(0), *more], shape=full.shape, stride=full.stride())
    assert x.placements[0] == RaggedShard(0, counts) and torch.equal(x.full_tensor(), full)
    checked = DTensor.from_local(full + sum(at), mesh, [R] * mesh.ndim, run_check=True)
    assert torch.equal(checked.to_local(), full)  # of the first rank by coordinate


@pytest.mark.parametrize("order", [MESHES[1], MESHES[3]], ids=str)
@on_ranks
def test_random_numbers_are_those_of_one_device(order: Any) -> None:
    mesh = mesh_in(order)
    full = _full(8, 4)
    for placed in itertools.product((R, S0, S1), repeat=mesh.ndim):
        x = distribute_tensor(full, mesh, placed, src_data_rank=None)
        manual_seed(7, mesh)
        got = [F.dropout(x), torch.rand_like(x), x.clone().normal_()]
        torch.manual_seed(7)
        wanted = [F.dropout(full), torch.rand_like(full), full.clone().normal_()]
        torch.testing.assert_close([one.full_tensor() for one in got], wanted)
    torch.manual_seed(mesh.get_rank())  # replicas agree even so
    drawn = torch.rand_like(distribute_tensor(full, mesh, src_data_rank=None)).to_local()
    assert all(torch.equal(draw, drawn) for draw in comm.all_gather_objects(drawn))


@pytest.mark.parametrize("order", MESHES, ids=str)
@on_ranks
def test_collectives_by_mesh_dim(order: Any) -> None:
    """Lists and source ranks refer to mesh coordinates."""
    mesh = mesh_in(order)
    at = mesh.get_coordinate()
    for dim in range(mesh.ndim):
        size, here = mesh.size(dim), at[dim]
        others = 10 * sum(at[:dim] + at[dim + 1 :])
        for source in range(size):
            sent = [torch.tensor([others + 100 * here + i]) for i in range(size)]
            output = torch.zeros(1, dtype=torch.int64)
            mesh_scatter(output, sent, mesh, dim, group_src=source)
            assert output.item() == others + 100 * source + here
            message = torch.tensor([others + here])
            mesh_broadcast(message, mesh, dim, group_src=source)
            assert message.item() == others + source
        full = torch.arange(32.0).view(8, 4) + others
        part = Shard(0).part(full, size, here)
        assert torch.equal(shard_dim_alltoall(part, 0, 1, mesh, dim), Shard(1).part(full, size, here))
