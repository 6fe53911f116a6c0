"""torch.compile and tracers over DTensors: values and gradients are those of plain tensors, in one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.tests.gloo_world import Worlds, mesh_of
from core.tests.local_world import ThreadWorlds
from core.tests.torch_version import BEFORE_213
from dtbench_core import DTensor, Partial, Replicate, Shard, distribute_tensor
from dtbench_core.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

RANKS = 2


def _ops(backend: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch._dynamo.reset()
    x, y = torch.randn(8, 4), torch.randn(4, 8)
    mesh = mesh_of((2, 2)) if torch.distributed.get_world_size() == 4 else mesh_of((RANKS,))

    def place(full: torch.Tensor, *placements: object) -> DTensor:
        both = [*placements, Replicate()][: mesh.ndim]
        return distribute_tensor(full, mesh, both, src_data_rank=None)  # type: ignore[arg-type]

    def same(fn: Callable[..., torch.Tensor], *pairs: tuple[torch.Tensor, DTensor]) -> None:
        got = torch.compile(fn, backend=backend, fullgraph=True)(*(d for _, d in pairs))
        wanted = fn(*(p for p, _ in pairs))
        found.append((got.full_tensor() if isinstance(got, DTensor) else got, wanted))

    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    rows, columns = (x, place(x, Shard(0))), (y, place(y, Shard(1)))
    same(lambda t: t.softmax(0), rows)
    same(lambda t: F.layer_norm(t.t(), (8,)), rows)
    same(lambda t: t + t.sum(0), rows)
    same(lambda t, u: t @ u, rows, columns)
    same(lambda t: t.cumsum(0), rows)
    for move in ([Replicate()], [Shard(1)]):
        wanted_placements = [*move, Replicate()][: mesh.ndim]
        moved = torch.compile(
            lambda t, p=wanted_placements: t.redistribute(placements=p) * 2, backend=backend
        )
        found.append((moved(rows[1]).full_tensor(), x * 2))
    full = torch.compile(lambda t: t.full_tensor() + 1, backend=backend)
    found.append((full(rows[1]), x + 1))

    a, b = place(x, Shard(0)).requires_grad_(), place(y, Shard(0)).requires_grad_()
    p, q = x.clone().requires_grad_(), y.clone().requires_grad_()
    torch.compile(lambda t, u: (t @ u).softmax(0).pow(2), backend=backend)(a, b).sum().backward()
    (p @ q).softmax(0).pow(2).sum().backward()
    assert a.grad is not None and b.grad is not None and p.grad is not None and q.grad is not None
    return [*found, (a.grad.full_tensor(), p.grad), (b.grad.full_tensor(), q.grad)]  # type: ignore[attr-defined]


def _methods(backend: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Entering, leaving and moving inside a graph; what is read of a DTensor there."""
    torch._dynamo.reset()
    mesh = mesh_of((RANKS,))
    rank = mesh.get_local_rank()
    x = torch.arange(12.0).view(4, 3)
    mine = x.chunk(RANKS)[rank]
    sharded = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)

    def compiled(fn: Callable[..., torch.Tensor], given: torch.Tensor) -> torch.Tensor:
        got: torch.Tensor = torch.compile(fn, backend=backend, fullgraph=True)(given)
        return got.full_tensor() if isinstance(got, DTensor) else got

    found = [
        (compiled(lambda t: (DTensor.from_local(t, mesh, [Shard(0)]) * 2).to_local(), mine), mine * 2),
        (compiled(lambda t: DTensor.from_local(t, mesh, [Partial()]) + 1, x), RANKS * x + 1),
        (compiled(lambda t: DTensor.from_local(t, mesh, [Shard(0)], run_check=False), mine), x),
        (compiled(lambda t: t.redistribute(mesh, [Shard(1)]) + 1, sharded), x + 1),
        (compiled(lambda t: t.redistribute(t.device_mesh, [Replicate()]).to_local() + 1, sharded), x + 1),
        (compiled(lambda t: t.full_tensor() + 1, sharded), x + 1),
        (compiled(lambda t: t + t.placements[0].dim if t.placements[0].is_shard() else t, sharded), x),
        (compiled(lambda t: t * t.device_mesh.size(), sharded), x * RANKS),
    ]
    # Placed otherwise, it is traced anew.
    again = torch.compile(lambda t: t.sum(0), backend=backend, fullgraph=True)
    for placement in (Shard(0), Shard(1), Replicate()):
        given = distribute_tensor(x, mesh, [placement], src_data_rank=None)
        found.append((again(given).full_tensor(), x.sum(0)))
    leaf = mine.clone().requires_grad_()
    out = torch.compile(
        lambda t: DTensor.from_local(t, mesh, [Shard(0)]).pow(2).sum().full_tensor(),
        backend=backend,
        fullgraph=True,
    )(leaf)
    out.backward()
    assert leaf.grad is not None
    return [*found, (out.detach(), x.pow(2).sum()), (leaf.grad, 2 * mine)]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _parallel(backend: str, sequence: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A block's loss and gradients, two steps of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh, plain = mesh_of((RANKS,)), _Block()
    parts = copy.deepcopy(plain)
    if sequence:
        cut = Shard(1)
        styles = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=cut),
            "down": RowwiseParallel(output_layouts=cut),
        }
    else:
        styles = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(parts, mesh, styles)
    step = torch.compile(parts, backend=backend, fullgraph=True)
    found = []
    for _ in range(2):
        x = torch.randn(2, 4, 8)
        mine = x.chunk(RANKS, 1)[mesh.get_local_rank()] if sequence else x
        got, wanted = step(mine), plain(x)
        found.append((got.detach(), wanted.chunk(RANKS, 1)[mesh.get_local_rank()] if sequence else wanted))
        got.pow(2).sum().backward()
        wanted.pow(2).sum().backward()
    for one, other in zip(parts.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None and other.grad is not None
        if isinstance(one.grad, DTensor):
            found.append((one.grad.full_tensor(), other.grad))
    assert len(found) >= 6
    return found


@pytest.mark.parametrize(
    ("fn", "args", "world_size"),
    [(_ops, (), 2), (_ops, (), 4), (_methods, (), 2), (_parallel, (False,), 2), (_parallel, (True,), 2)],
    ids=["ops", "ops on a 2-D mesh", "methods", "block", "sequence parallel block"],
)
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
def test_compiled(
    ranks: ThreadWorlds, fn: Callable[..., Any], args: tuple[bool, ...], world_size: int
) -> None:
    if BEFORE_213 and fn is not _ops:
        pytest.skip("before torch 2.13 Dynamo takes no mesh into a graph")
    for pairs in ranks(fn, "aot_eager", *args, world_size=world_size):
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("fn", "args"),
    [(_ops, ()), (_methods, ()), (_parallel, (False,))],
    ids=["ops", "methods", "block"],
)
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
def test_inductor(gloo_ranks: Worlds, fn: Callable[..., Any], args: tuple[bool, ...]) -> None:
    # Each rank has a C++ compiler build each graph: seconds apiece on a busy machine without a cache.
    for pairs in gloo_ranks(fn, "inductor", *args, world_size=RANKS, timeout_s=240.0):
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
