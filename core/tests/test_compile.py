"""torch.compile and tracers over DTensors: values and gradients are those of plain tensors, in one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.tests.compiling import RANKS, Pairs, assert_close, compiled, placed, quiet, ranks_for, whole
from core.tests.gloo_world import mesh_of
from core.tests.placing import place
from core.tests.torch_version import BEFORE_213
from dtbench_core import DTensor, Partial, Replicate, Shard
from dtbench_core.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module


def _ops(backend: str) -> Pairs:
    torch._dynamo.reset()
    x, y = torch.randn(8, 4), torch.randn(4, 8)
    shape = (2, 2) if torch.distributed.get_world_size() == 4 else (RANKS,)

    def put(full: torch.Tensor, placement: Any) -> DTensor:
        return place(full, *both(placement), mesh=shape).requires_grad_(full.requires_grad)

    def both(placement: Any) -> list[Any]:
        return [placement, Replicate()][: len(shape)]

    rows, columns = put(x, Shard(0)), put(y, Shard(1))
    of_rows = (
        lambda t: t.softmax(0),
        lambda t: F.layer_norm(t.t(), (8,)),
        lambda t: t + t.sum(0),
        lambda t: t.cumsum(0),
    )
    pairs = [(compiled(fn, backend=backend, fullgraph=True)(rows), fn(x)) for fn in of_rows]
    pairs.append((compiled(torch.matmul, backend=backend, fullgraph=True)(rows, columns), x @ y))
    for moved in (both(Replicate()), both(Shard(1))):
        fn = compiled(lambda t, p=moved: t.redistribute(placements=p) * 2, backend=backend)
        pairs.append((fn(rows), x * 2))
    pairs.append((compiled(lambda t: t.full_tensor() + 1, backend=backend)(rows), x + 1))

    p, q = x.clone().requires_grad_(), y.clone().requires_grad_()
    a, b = put(p.detach(), Shard(0)).requires_grad_(), put(q.detach(), Shard(0)).requires_grad_()
    compiled(lambda t, u: (t @ u).softmax(0).pow(2), backend=backend)(a, b).sum().backward()
    (p @ q).softmax(0).pow(2).sum().backward()
    pairs += [(a.grad, p.grad), (b.grad, q.grad)]
    return [(whole(got), expected) for got, expected in pairs]


def _methods(backend: str) -> Pairs:
    """Entering, leaving and moving inside a graph; what is read of a DTensor there."""
    torch._dynamo.reset()
    mesh, x = mesh_of((RANKS,)), torch.arange(12.0).view(4, 3)
    mine, sharded = x.chunk(RANKS)[mesh.get_local_rank()], placed(x)
    programs: list[tuple[Callable[[Any], Any], torch.Tensor, torch.Tensor]] = [
        (lambda t: (DTensor.from_local(t, mesh, [Shard(0)]) * 2).to_local(), mine, mine * 2),
        (lambda t: DTensor.from_local(t, mesh, [Partial()]) + 1, x, RANKS * x + 1),
        (lambda t: DTensor.from_local(t, mesh, [Shard(0)], run_check=False), mine, x),
        (lambda t: t.redistribute(mesh, [Shard(1)]) + 1, sharded, x + 1),
        (lambda t: t.redistribute(t.device_mesh, [Replicate()]).to_local() + 1, sharded, x + 1),
        (lambda t: t.full_tensor() + 1, sharded, x + 1),
        (lambda t: t + t.placements[0].dim if t.placements[0].is_shard() else t, sharded, x),
        (lambda t: t * t.device_mesh.size(), sharded, x * RANKS),
    ]
    pairs = [(compiled(fn, backend=backend, fullgraph=True)(value), want) for fn, value, want in programs]
    again = compiled(lambda t: t.sum(0), backend=backend, fullgraph=True)
    # Placed otherwise, it is traced anew.
    pairs += [(again(placed(x, placement)), x.sum(0)) for placement in (Shard(0), Shard(1), Replicate())]
    leaf = mine.clone().requires_grad_()
    out = compiled(
        lambda t: DTensor.from_local(t, mesh, [Shard(0)]).pow(2).sum().full_tensor(),
        backend=backend,
        fullgraph=True,
    )(leaf)
    out.backward()
    pairs += [(out, x.pow(2).sum()), (leaf.grad, 2 * mine)]
    return [(whole(got), expected) for got, expected in pairs]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _block(backend: str, sequence: bool = False) -> Pairs:
    """A block's loss and gradients, two steps of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh, plain = mesh_of((RANKS,)), _Block()
    parts, cut = copy.deepcopy(plain), Shard(1)
    styles: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if sequence:
        styles = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=cut),
            "down": RowwiseParallel(output_layouts=cut),
        }
    parallelize_module(parts, mesh, styles)
    step, pairs = compiled(parts, backend=backend, fullgraph=True), []
    for _ in range(2):
        x = torch.randn(2, 4, 8)
        mine, expected = x, plain(x)
        expected.pow(2).sum().backward()
        if sequence:
            mine, expected = (t.chunk(RANKS, 1)[mesh.get_local_rank()] for t in (x, expected))
        got = step(mine)
        got.pow(2).sum().backward()
        pairs.append((got.detach(), expected.detach()))
    for one, other in zip(parts.parameters(), plain.parameters(), strict=True):
        if isinstance(one.grad, DTensor):
            pairs.append((whole(one.grad), other.grad))
    assert len(pairs) >= 6
    return pairs


def _sequence_parallel_block(backend: str) -> Pairs:
    return _block(backend, sequence=True)


def _slow(*row: Any) -> Any:
    return pytest.param(*row, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("fn", "world_size", "backend"),
    [
        (_block, 2, "aot_eager"),
        (_methods, 2, "aot_eager"),
        *(_slow(fn, n, "aot_eager") for fn, n in ((_ops, 2), (_ops, 4), (_sequence_parallel_block, 2))),
        # Each rank has a C++ compiler build each graph: seconds apiece on a busy machine without a cache.
        *(_slow(fn, 2, "inductor") for fn in (_ops, _methods, _block)),
    ],
)
@quiet
def test_compiled(
    request: pytest.FixtureRequest, fn: Callable[..., Pairs], world_size: int, backend: str
) -> None:
    if BEFORE_213 and fn is not _ops:
        pytest.skip("before torch 2.13 Dynamo takes no mesh into a graph")
    tolerances = {"rtol": 1e-4, "atol": 1e-5} if backend == "inductor" else {}
    assert_close(
        ranks_for(request, backend)(fn, backend, world_size=world_size, timeout_s=240.0), **tolerances
    )
