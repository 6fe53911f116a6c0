"""torch.compile over DTensors: values and gradients are those of plain tensors, in one graph."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.tests.compiling import (
    RANKS,
    Pairs,
    assert_close,
    compiled,
    mesh_in_graphs,
    placed,
    quiet,
    ranks_for,
    whole,
)
from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.placing import place
from core.tests.torch_version import BEFORE_213
from dtbench_core import DTensor, Partial, Placement, Replicate, Shard, local_map
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
    moves = [lambda t, p=p: t.redistribute(placements=both(p)) * 2 for p in (Replicate(), Shard(1))]
    pairs += [(compiled(fn, backend=backend)(rows), x * 2) for fn in moves]
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
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _block(backend: str, sequence: bool = False) -> Pairs:
    """A block's loss and gradients, two steps of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh, plain = mesh_of((RANKS,)), _Block(8)
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
    pairs += [
        (whole(got.grad), expected.grad)
        for got, expected in zip(parts.parameters(), plain.parameters(), strict=True)
        if isinstance(got.grad, DTensor)
    ]
    assert len(pairs) >= 6
    return pairs


# ---- from_local and to_local ----


Wrap = Callable[[torch.Tensor], DTensor]


def _moved(tensor: Any, placement: Placement) -> Any:
    """A DTensor placed otherwise; plain tensors are moved nowhere."""
    return tensor.redistribute(placements=[placement]) if isinstance(tensor, DTensor) else tensor


# A DTensor that from_local made.
INSIDE: dict[str, Callable[[Any], Any]] = {
    "square": lambda d: d * d + 2,
    "layer norm": lambda d: F.layer_norm(d.t(), d.shape[:1]),
    "pending": lambda d: d @ d.t(),
    "view": lambda d: d[1:].t(),
    "write": lambda d: (d * 2).mul_(3),
    "moved": lambda d: F.layer_norm(_moved(d.exp(), Shard(1)), (4,)),
    "whole": lambda d: _moved(d * 2, Replicate()).sum(0),
}


def _input(full: torch.Tensor, placement: Placement) -> tuple[torch.Tensor, Wrap, Wrap]:
    """This rank's part, a leaf; what wraps it, and what wraps its gradient."""
    local = placed(full.detach(), placement).to_local().clone().requires_grad_()
    mesh, shape, stride = mesh_of((RANKS,)), full.shape, full.stride()

    def wrap(part: torch.Tensor, placed: Placement = placement) -> DTensor:
        return DTensor.from_local(part, mesh, [placed], shape=shape, stride=stride)

    of_term = Replicate() if placement.is_partial() else placement
    return local, wrap, lambda grad: wrap(grad, of_term)


def _inputs(backend: str, names: list[str], leaf: bool, rows: int) -> Pairs:
    """from_local of a leaf returns an autograd view; from_local of another tensor does not."""
    pairs: Pairs = []
    for name in names:
        for placement in (Shard(0), Replicate(), Partial()):
            torch._dynamo.reset()
            plain, fn = torch.randn(rows, 4, requires_grad=True), INSIDE[name]
            local, wrap, wrap_grad = _input(plain, placement)
            got = compiled(fn, backend=backend, fullgraph=True)(wrap(local if leaf else local * 1))
            expected = fn(plain)
            got.sin().sum().backward()
            expected.sin().sum().backward()
            pairs += [(whole(got), expected.detach()), (whole(wrap_grad(local.grad)), plain.grad)]
    return pairs


def _from_to_local(backend: str) -> Pairs:
    """In a graph: the way in, a move and the way out; and a graph of what to_local gave outside."""
    pairs: Pairs = []
    for placement in (Shard(0), Shard(1), Partial()):
        torch._dynamo.reset()
        plain = torch.randn(5, 4, requires_grad=True)
        local, wrap, wrap_grad = _input(plain, placement)

        def inside(part: torch.Tensor, wrap: Wrap = wrap) -> torch.Tensor:
            return wrap(part).softmax(0).redistribute(placements=[Replicate()]).to_local() + 1

        got, expected = compiled(inside, backend=backend, fullgraph=True)(local), plain.softmax(0) + 1
        got.sin().sum().backward()
        expected.sin().sum().backward()
        pairs += [(got.detach(), expected.detach()), (whole(wrap_grad(local.grad)), plain.grad)]
        x = placed(plain, Replicate())
        outside = compiled(lambda t: t.softmax(0), backend=backend, fullgraph=True)((x * 2).to_local())
        outside.sin().sum().backward()
        plain.grad = None
        (plain * 2).softmax(0).sin().sum().backward()
        pairs.append((whole(x.grad), plain.grad))
    return pairs


def _training(backend: str) -> Pairs:
    """Steps, each compiled whole, of sharded parameters; of inputs whose gradients reach the local tensors."""

    def step(net: nn.Module, optimizer: Any, x: Any) -> Any:
        loss = net(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    pairs: Pairs = []
    for placement in (Shard(0), Partial()):
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain = _Block(4)
        parts = copy.deepcopy(plain)
        for module in parts.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(placed(p.detach())))
        fast = compiled(step, backend=backend)
        ours, theirs = (torch.optim.AdamW(net.parameters(), 0.05) for net in (parts, plain))
        for seed in range(2):
            full = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            local, wrap, wrap_grad = _input(full, placement)
            losses = whole(fast(parts, ours, wrap(local))), step(plain, theirs, full)
            pairs += [losses, (whole(wrap_grad(local.grad)), full.grad)]
        pairs += [
            (whole(got), expected.detach())
            for got, expected in zip(parts.parameters(), plain.parameters(), strict=True)
        ]
    return pairs


# name -> (function of a backend and of these arguments, the arguments)
PROGRAMS: dict[str, tuple[Callable[..., Pairs], tuple[Any, ...]]] = {
    "block": (_block, ()),
    "sequence parallel block": (_block, (True,)),
    "methods": (_methods, ()),
    "ops": (_ops, ()),
    "leaves": (_inputs, (list(INSIDE), True, 4)),
    "uneven leaves": (_inputs, (["layer norm", "moved"], True, 3)),
    "results": (_inputs, (["square", "layer norm"], False, 3)),
    "inside": (_from_to_local, ()),
    "training": (_training, ()),
}


@pytest.mark.parametrize(
    ("name", "world_size", "backend"),
    [
        *((name, RANKS, "aot_eager") for name in PROGRAMS),
        ("ops", 4, "aot_eager"),
        # Each rank has a C++ compiler build each graph: seconds apiece on a busy machine without a cache.
        *(
            (name, RANKS, "inductor")
            for name in ("block", "methods", "ops", "uneven leaves", "inside", "training")
        ),
    ],
)
@quiet
def test_compiled(request: pytest.FixtureRequest, name: str, world_size: int, backend: str) -> None:
    if BEFORE_213 and name != "ops":
        pytest.skip("before torch 2.13 Dynamo takes no mesh into a graph")
    fn, args = PROGRAMS[name]
    tolerances = {"rtol": 1e-4, "atol": 1e-5} if backend == "inductor" else {}
    pairs_by_rank = ranks_for(request, backend)(fn, backend, *args, world_size=world_size, timeout_s=240.0)
    assert_close(pairs_by_rank, **tolerances)


@mesh_in_graphs
@quiet
@on_ranks(world_size=RANKS)
def test_graphs_do_not_ask_other_ranks() -> None:
    mesh = mesh_of((RANKS,))
    ragged = torch.ones(3 if mesh.get_local_rank() == 0 else 1, 2)
    mapped = local_map(lambda t: t * 2, out_placements=[Shard(0)])

    def wrap(t: torch.Tensor) -> DTensor:
        return DTensor.from_local(t, mesh, [Shard(0)], shape=(4, 2), stride=(2, 1)) * 2

    for fn, value, message in (
        (wrap, ragged, "expected .2, 2. on this rank"),
        (mapped, placed(torch.ones(3, 2)), "outside the graph"),
    ):
        with pytest.raises(Exception, match=message):
            compiled(lambda t, fn=fn: fn(t), fullgraph=True)(value)
