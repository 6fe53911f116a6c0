"""torch.compile of what enters by from_local and leaves by to_local: values and gradients as of plain tensors."""

from __future__ import annotations

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
from dtbench_core import DTensor, Partial, Placement, Replicate, Shard, local_map

pytestmark = [mesh_in_graphs, quiet]
Wrap = Callable[[torch.Tensor], DTensor]


def _moved(tensor: Any, placement: Placement) -> Any:
    """A DTensor placed otherwise; plain tensors are moved nowhere."""
    return tensor.redistribute(placements=[placement]) if isinstance(tensor, DTensor) else tensor


# Of a DTensor that from_local made.
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
    """Of a leaf from_local makes what autograd takes for a view; of others it does not."""
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


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


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
        plain = _Net()
        parts = copy.deepcopy(plain)
        for module in parts.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(placed(p.detach())))
        fast = compiled(step, backend=backend)
        ours, theirs = (torch.optim.AdamW(net.parameters(), 0.05) for net in (parts, plain))
        for seed in range(2):
            full = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            local, wrap, wrap_grad = _input(full, placement)
            pairs.append((whole(fast(parts, ours, wrap(local))), step(plain, theirs, full)))
            pairs.append((whole(wrap_grad(local.grad)), full.grad))
        trained = zip(parts.parameters(), plain.parameters(), strict=True)
        pairs += [(whole(one), other.detach()) for one, other in trained]
    return pairs


Program = tuple[Callable[..., Pairs], tuple[Any, ...]]
PROGRAMS: dict[str, Program] = {
    "leaves": (_inputs, (list(INSIDE), True, 4)),
    "uneven leaves": (_inputs, (["layer norm", "moved"], True, 3)),
    "results": (_inputs, (["square", "layer norm"], False, 3)),
    "inside": (_from_to_local, ()),
    "training": (_training, ()),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("uneven leaves", "aot_eager"),
        *(pytest.param(name, "aot_eager", marks=pytest.mark.slow) for name in PROGRAMS if name[0] != "u"),
        *(
            pytest.param(name, "inductor", marks=pytest.mark.slow)
            for name in ("uneven leaves", "inside", "training")
        ),
    ],
)
def test_what_from_local_makes_compiles(request: pytest.FixtureRequest, name: str, backend: str) -> None:
    fn, args = PROGRAMS[name]
    tolerances = {"rtol": 1e-4, "atol": 1e-5} if backend == "inductor" else {}
    assert_close(
        ranks_for(request, backend)(fn, backend, *args, world_size=RANKS, timeout_s=240.0), **tolerances
    )


@on_ranks(world_size=RANKS)
def test_graphs_refuse_on_all_ranks_what_they_would_have_to_ask_others() -> None:
    mesh = mesh_of((RANKS,))
    ragged = torch.ones(3 if mesh.get_local_rank() == 0 else 1, 2)
    mapped = local_map(lambda t: t * 2, out_placements=[Shard(0)])

    def wrap(t: torch.Tensor) -> DTensor:
        return DTensor.from_local(t, mesh, [Shard(0)], shape=(4, 2), stride=(2, 1)) * 2

    for fn, value, message in (
        (wrap, ragged, "expected .2, 2. on this rank"),
        (mapped, placed(torch.ones(3, 2)), "outside of it"),
    ):
        with pytest.raises(Exception, match=message):
            compiled(lambda t, fn=fn: fn(t), fullgraph=True)(value)
