"""Ranks outside a mesh: the same program runs there, on nothing, with the right metadata."""

from __future__ import annotations

import contextlib
import copy
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

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.local_world import ThreadWorlds
from dtbench_core import (
    DTensor,
    ExplicitRedistributionContext,
    MeshError,
    Partial,
    RedistributionError,
    Replicate,
    Shard,
    comm,
    count_collectives,
    distribute_module,
    distribute_tensor,
    randn,
    sharding_text,
    zeros,
)

pytestmark = pytest.mark.filterwarnings("ignore::dtbench_core.dispatch.fallback.FallbackWarning")

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)
A = torch.arange(12.0).reshape(4, 3)


def _pair() -> Any:
    """A mesh of the first two of four ranks."""
    return mesh_of((2,))


def _member() -> bool:
    return _pair().get_coordinate() is not None


def _program() -> dict[str, Any]:
    """A little of everything; what each step gives, by its metadata and how much this rank holds."""
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
        local = tensor.to_local()
        full = tensor.detach().full_tensor()
        summary[name] = (
            tuple(tensor.shape),
            tensor.dtype,
            tensor.placements,
            local.numel(),
            tuple(full.shape),
        )
        assert local.shape == tensor._spec.local_shape
    summary["equal"] = torch.equal(x.detach(), x.detach())
    return summary


def test_the_same_program_runs_outside(ranks: ThreadWorlds) -> None:
    inside, _, outside, other = ranks(_program)
    assert outside == other
    for name, summary in inside.items():
        if name == "equal":
            assert summary is outside[name] is True
            continue
        shape, dtype, placements, held, full = summary
        nothing = (0, (0,)) if shape else (1, ())
        assert outside[name] == (shape, dtype, placements, *nothing), name
        assert held > 0 and full == shape


@on_ranks
def test_values_are_not_to_be_had_outside() -> None:
    x = distribute_tensor(A, _pair(), [S0])
    message = f"which rank {dist.get_rank()} is not in.*guard the call"
    for ask in (
        lambda: x.sum().item(),
        lambda: float(x[0, 0]),
        lambda: bool((x > 0).all()),
        lambda: x.nonzero(),
    ):
        with contextlib.nullcontext() if _member() else pytest.raises(MeshError, match=message):
            ask()


@on_ranks
def test_training_runs_outside() -> None:
    """A model on the pair, trained on every rank of the world; from_local under autograd."""
    torch.manual_seed(0)
    module = distribute_module(nn.Linear(3, 2), _pair())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    mine = torch.ones(2, 3, requires_grad=True)
    for _ in range(2):
        optimizer.zero_grad()
        x = DTensor.from_local(mine, _pair(), [S0])
        loss = module(x).pow(2).mean().to_local()
        loss.sum().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    assert mine.grad is not None and mine.grad.shape == (2, 3)
    twin = copy.deepcopy(module)
    twin.load_state_dict(pickle.loads(pickle.dumps(module.state_dict())))
    assert [p.to_local().numel() for p in twin.parameters()] == ([6, 2] if _member() else [0, 0])


@on_ranks
def test_nothing_is_sent_and_errors_are_alike() -> None:
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
    messages = comm.all_gather_objects(str(caught.value))
    assert len(set(messages)) == 1, messages


@on_ranks
def test_a_table_per_rank(tmp_path: Path) -> None:
    """Each on a mesh of that rank alone."""
    rank = dist.get_rank()
    state: dict[str, Any] = {}
    for owner in range(4):
        mesh = DeviceMesh("cpu", torch.tensor([owner]))
        held = torch.full((8, 16), float(rank)) if rank == owner else torch.empty(0)
        table = DTensor.from_local(held, mesh, [R], run_check=False, shape=(8, 16), stride=(16, 1))
        state[f"table{owner}"] = table
        assert (table.shape, table.stride()) == ((8, 16), (16, 1))
        assert table.to_local().numel() == (128 if owner == rank else 0)
        assert f"rank {owner}" in sharding_text(table)
    dcp.save(state, checkpoint_id=tmp_path)
    fresh = {name: table.clone().zero_() for name, table in state.items()}
    dcp.load(fresh, checkpoint_id=tmp_path)
    mine = fresh[f"table{rank}"].to_local()
    assert (mine == rank).all() and mine.numel() == 128
