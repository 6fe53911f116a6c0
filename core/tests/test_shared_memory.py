"""Where a DTensor and a plain tensor share memory: a write to the one is a write to the other for autograd too.

What plain torch answers with one tensor, a DTensor answers alike, or refuses: never a gradient of old values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from core.tests.gloo_world import Worlds, mesh_of
from dtbench_core import DTensor, Partial, Replicate, Shard, distribute_tensor, randn
from dtbench_core.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 2


def _x() -> torch.Tensor:
    return torch.arange(1.0, 9.0, dtype=torch.float64).view(4, 2)


def _sharded(full: torch.Tensor | None = None) -> DTensor:
    return distribute_tensor(
        _x() if full is None else full, mesh_of((RANKS,)), [Shard(0)], src_data_rank=None
    )


def _raises(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


# ---- what a local tensor was lent from, or was lent to ----


def _saved_and_written() -> list[str]:
    """(who saved, who is written to): each backward must notice."""
    said = []
    x = _sharded().requires_grad_()
    y = x * 2
    local, z = y.to_local(), (y * y).sum()
    with torch.no_grad():
        local.add_(1)
    said.append(_raises(z.backward))

    kept, w = _sharded(), _sharded().requires_grad_()  # kept requires no gradient, and is saved for that of w
    z = (kept * w).sum()
    kept.to_local().add_(1)
    said.append(_raises(z.backward))

    part = torch.ones(2, 2, dtype=torch.float64)
    z = (DTensor.from_local(part, mesh_of((RANKS,)), [Shard(0)]) * w).sum()
    part.add_(1)
    said.append(_raises(z.backward))

    part, plain = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    z = (part * plain).sum()
    DTensor.from_local(part, mesh_of((RANKS,)), [Shard(0)])[:, :1].mul_(2)
    said.append(_raises(z.backward))
    return said


def test_what_autograd_saved_and_somebody_wrote_to_is_noticed(ranks: Worlds) -> None:
    for said in ranks(_saved_and_written, world_size=RANKS):
        assert all("modified by an inplace operation" in text for text in said), said


def _written_under_autograd() -> list[str]:
    y = _sharded().requires_grad_() * 2
    leaf = torch.ones(2, 2, requires_grad=True)
    mesh = mesh_of((RANKS,))
    return [
        _raises(lambda: y.to_local().mul_(3)),
        _raises(lambda: DTensor.from_local(leaf * 2, mesh, [Shard(0)]).mul_(3)),
        _raises(lambda: DTensor.from_local(leaf * 2, mesh, [Shard(0)])[:, :1].mul_(3)),
        _raises(lambda: DTensor.from_local(leaf, mesh, [Shard(0)]).mul_(3)),
        "" if torch.equal(leaf.detach(), torch.ones(2, 2)) else "the leaf was written to",
    ]


def test_a_write_that_gradients_could_not_follow_is_refused(ranks: Worlds) -> None:
    for *said, leaf in ranks(_written_under_autograd, world_size=RANKS):
        assert all("is being modified inplace" in text for text in said), said
        assert not leaf


def _written_in_the_open() -> list[torch.Tensor]:
    """Writes without autograd reach whoever shares the memory, as between views of a plain tensor."""
    x = _sharded()
    x.to_local().mul_(2)
    part = torch.ones(2, 2, dtype=torch.float64)
    DTensor.from_local(part, mesh_of((RANKS,)), [Shard(0)]).mul_(5)
    same = _sharded()
    same.redistribute(placements=[Shard(0)]).mul_(3)
    whole = distribute_tensor(_x(), mesh_of((RANKS,)), [Replicate()], src_data_rank=None)
    whole.full_tensor().mul_(7)  # nobody else's
    return [x.full_tensor(), part, same.full_tensor(), whole.full_tensor()]


def test_writes_reach_who_shares_the_memory(ranks: Worlds) -> None:
    for x, part, same, whole in ranks(_written_in_the_open, world_size=RANKS):
        assert torch.equal(x, 2 * _x()) and torch.equal(part, torch.full_like(part, 5))
        assert torch.equal(same, 3 * _x()) and torch.equal(whole, _x())


def _gradient_through_the_same() -> torch.Tensor:
    x = _sharded().requires_grad_()
    h = x * 1
    h.redistribute(placements=[Shard(0)]).mul_(2)
    h.sum().backward()
    assert x.grad is not None
    return x.grad.full_tensor()


def test_a_redistribution_to_the_same_placements_is_the_tensor(ranks: Worlds) -> None:
    for gradient in ranks(_gradient_through_the_same, world_size=RANKS):
        assert torch.equal(gradient, torch.full_like(gradient, 2))


# ---- what training code does ----


def _mlp(inplace: bool, *, local: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 4)).double()
    parts = copy.deepcopy(plain)
    styles = {
        "0": ColwiseParallel(use_local_output=local),
        "2": RowwiseParallel(use_local_output=local),
    }
    return parallelize_module(parts, mesh_of((RANKS,)), styles), plain


def _trained(how: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    parts, plain = _mlp(how == "inplace", local=how == "inplace")
    x = torch.randn(3, 4, dtype=torch.float64)
    if how == "inplace":
        parts(x).pow(2).sum().backward()
    else:
        given = x.clone().requires_grad_(how == "reentrant")
        checkpoint(parts, given, use_reentrant=how == "reentrant").pow(2).sum().backward()
    plain(x).pow(2).sum().backward()
    return [
        (p.grad.full_tensor(), q.grad)
        for p, q in zip(parts.parameters(), plain.parameters(), strict=True)
        if isinstance(p.grad, DTensor) and q.grad is not None
    ]


@pytest.mark.parametrize("how", ["inplace", "reentrant", "checkpointed"])
def test_activations_in_place_and_checkpoints(ranks: Worlds, how: str) -> None:
    """A checkpoint computes again inside backward, on the same path as before."""
    for pairs in ranks(_trained, how, world_size=RANKS):
        assert len(pairs) == 4
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted)


def _drawn(rank_draws: bool) -> list[torch.Tensor]:
    """Replicas, after this rank seeded, or drew, as no other."""
    mesh = mesh_of((RANKS,))
    rank = mesh.get_local_rank()
    ones = distribute_tensor(torch.ones(64), mesh, [Replicate()], src_data_rank=None)
    F.dropout(ones)
    if rank_draws:
        torch.rand(rank)
    else:
        torch.manual_seed(rank)
    first = F.dropout(ones).to_local()
    if rank_draws and rank == 1:
        torch.rand(3)
    return [
        first,
        randn(8, 8, device_mesh=mesh, placements=[Replicate()]).to_local(),
        torch.rand_like(ones).to_local(),
    ]


@pytest.mark.parametrize("rank_draws", [True, False])
def test_replicas_are_drawn_alike_whatever_ranks_did_before(ranks: Worlds, rank_draws: bool) -> None:
    one, other = ranks(_drawn, rank_draws, world_size=RANKS)
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)
        assert len(mine.unique()) > 1


# ---- tools ----


def _counted() -> dict[str, int]:
    from torch.distributed.tensor.debug import CommDebugMode

    x = _sharded()
    term = DTensor.from_local(torch.ones(4, 2), mesh_of((RANKS,)), [Partial()])
    with CommDebugMode() as mode:
        moved = [x.redistribute(placements=[p]) for p in (Replicate(), Shard(1))]
        moved += [term.redistribute(placements=[p]) for p in (Replicate(), Shard(0))]
    assert torch.equal(moved[1].full_tensor(), _x()) and torch.equal(
        moved[2].to_local(), torch.full((4, 2), 2.0)
    )
    return {str(op).rpartition(".")[2]: n for op, n in mode.get_comm_counts().items()}


def test_tools_see_collectives_by_the_names_of_functional_ones(ranks: Worlds) -> None:
    for counts in ranks(_counted, world_size=RANKS):
        assert counts == dict.fromkeys(
            ("all_gather_into_tensor", "all_to_all_single", "all_reduce", "reduce_scatter_tensor"), 1
        )


def _seen_within_ops() -> tuple[str, int]:
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._debug_mode import DebugMode

    x = _sharded().requires_grad_()
    with DebugMode() as seen:
        x.softmax(0)
    with CommDebugMode() as counted:
        # To columns for the softmax, back to rows, and to columns for its gradient.
        x.softmax(0).redistribute(placements=[Shard(0)]).pow(2).sum().backward()
    assert x.grad is not None
    plain = _x().requires_grad_()
    plain.softmax(0).pow(2).sum().backward()
    assert plain.grad is not None
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
    return seen.debug_string(), counted.get_total_counts()


def test_tools_see_what_ops_run_and_send(ranks: Worlds) -> None:
    for seen, counted in ranks(_seen_within_ops, world_size=RANKS):
        assert "aten::_softmax" in seen and "_c10d_functional::all_to_all_single" in seen
        assert counted == 3
