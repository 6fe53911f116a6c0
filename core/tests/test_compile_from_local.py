"""torch.compile of what enters by from_local and leaves by to_local: values and gradients as of plain tensors."""

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
from core.tests.torch_version import needs_213
from dtbench_core import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor, local_map

RANKS = 2
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
Wrap = Callable[[torch.Tensor], DTensor]

# Of a DTensor that from_local made; plain tensors are moved nowhere.
INSIDE: dict[str, Callable[[Any], Any]] = {
    "square": lambda d: d * d + 2,
    "layer norm": lambda d: F.layer_norm(d.t(), d.shape[:1]),
    "pending": lambda d: d @ d.t(),
    "view": lambda d: d[1:].t(),
    "write": lambda d: (d * 2).mul_(3),
    "moved": lambda d: F.layer_norm(_moved(d.exp(), Shard(1)), (4,)),
    "whole": lambda d: _moved(d * 2, Replicate()).sum(0),
}


def _moved(tensor: Any, placement: Placement) -> Any:
    return tensor.redistribute(placements=[placement]) if isinstance(tensor, DTensor) else tensor


def _input(full: torch.Tensor, placement: Placement) -> tuple[torch.Tensor, Wrap, Wrap]:
    """This rank's part, a leaf; what wraps it, and what wraps its gradient."""
    mesh = mesh_of((RANKS,))
    local = distribute_tensor(full, mesh, [placement], src_data_rank=None).to_local().clone().requires_grad_()
    shape, stride = full.shape, full.stride()

    def wrap(part: torch.Tensor, placed: Placement = placement) -> DTensor:
        return DTensor.from_local(part, mesh, [placed], shape=shape, stride=stride)

    of_term = Replicate() if placement.is_partial() else placement
    return local, wrap, lambda grad: wrap(grad, of_term)


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def _inputs(backend: str, names: list[str], leaf: bool, rows: int) -> Pairs:
    """Of a leaf from_local makes what autograd takes for a view; of others it does not."""
    found: Pairs = []
    for name in names:
        for placement in (Shard(0), Replicate(), Partial()):
            torch._dynamo.reset()
            full = torch.randn(rows, 4)
            plain = full.clone().requires_grad_()
            local, wrap, wrap_grad = _input(full, placement)
            fn = INSIDE[name]
            got = torch.compile(fn, backend=backend, fullgraph=True)(wrap(local if leaf else local * 1))
            wanted = fn(plain)
            got.sin().sum().backward()
            wanted.sin().sum().backward()
            assert local.grad is not None and plain.grad is not None
            found += [(_whole(got), wanted.detach()), (_whole(wrap_grad(local.grad)), plain.grad)]
    return found


def _from_to_local(backend: str) -> Pairs:
    """In a graph: the way in, a move and the way out; and a graph of what to_local gave outside."""
    found: Pairs = []
    for placement in (Shard(0), Shard(1), Partial()):
        torch._dynamo.reset()
        full = torch.randn(5, 4)
        plain = full.clone().requires_grad_()
        local, wrap, wrap_grad = _input(full, placement)

        def inside(part: torch.Tensor, wrap: Wrap = wrap) -> torch.Tensor:
            return wrap(part).softmax(0).redistribute(placements=[Replicate()]).to_local() + 1

        got = torch.compile(inside, backend=backend, fullgraph=True)(local)
        wanted = plain.softmax(0) + 1
        got.sin().sum().backward()
        wanted.sin().sum().backward()
        assert local.grad is not None and plain.grad is not None
        found += [(got.detach(), wanted.detach()), (_whole(wrap_grad(local.grad)), plain.grad)]
        x = distribute_tensor(full, mesh_of((RANKS,)), [Replicate()], src_data_rank=None).requires_grad_()
        outside = torch.compile(lambda t: t.softmax(0), backend=backend, fullgraph=True)((x * 2).to_local())
        outside.sin().sum().backward()
        plain.grad = None
        (plain * 2).softmax(0).sin().sum().backward()
        found.append((_whole(x.grad), plain.grad))
    return found


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _training(backend: str) -> Pairs:
    """Steps, each compiled whole, of sharded parameters; of inputs whose gradients reach the local tensors."""
    found: Pairs = []
    for placement in (Shard(0), Partial()):
        torch._dynamo.reset()
        torch.manual_seed(0)
        plain = _Net()
        parts = copy.deepcopy(plain)
        for module in parts.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                part = distribute_tensor(p.detach(), mesh_of((RANKS,)), [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(part))

        def step(net: nn.Module, optimizer: Any, x: Any) -> Any:
            loss = net(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        compiled = torch.compile(step, backend=backend)
        ours, theirs = (torch.optim.AdamW(net.parameters(), 0.05) for net in (parts, plain))
        for seed in range(2):
            full = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
            whole = full.clone().requires_grad_()
            local, wrap, wrap_grad = _input(full, placement)
            found.append((_whole(compiled(parts, ours, wrap(local))), step(plain, theirs, whole)))
            assert local.grad is not None and whole.grad is not None
            found.append((_whole(wrap_grad(local.grad)), whole.grad))
        trained = zip(parts.parameters(), plain.parameters(), strict=True)
        found += [(_whole(one), other.detach()) for one, other in trained]
    return found


def _lengths_of_others() -> None:
    """What a graph cannot ask the other ranks is refused on all of them."""
    mesh = mesh_of((RANKS,))
    ragged = torch.ones(3 if mesh.get_local_rank() == 0 else 1, 2)
    x = distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)], src_data_rank=None)
    mapped = local_map(lambda t: t * 2, out_placements=[Shard(0)])

    def wrap(t: torch.Tensor) -> DTensor:
        return DTensor.from_local(t, mesh, [Shard(0)], shape=(4, 2), stride=(2, 1)) * 2

    for fn, given, words in ((wrap, ragged, "expected .2, 2. on this rank"), (mapped, x, "outside of it")):
        with pytest.raises(Exception, match=words):
            torch.compile(lambda t, fn=fn: fn(t), backend="aot_eager", fullgraph=True)(given)


CASES: list[tuple[Callable[..., Pairs], tuple[Any, ...]]] = [
    (_inputs, (list(INSIDE), True, 4)),
    (_inputs, (["layer norm", "moved"], True, 3)),
    (_inputs, (["square", "layer norm"], False, 3)),
    (_from_to_local, ()),
    (_training, ()),
]
IDS = ["leaves", "uneven leaves", "results", "inside", "training"]


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.parametrize(("fn", "args"), CASES, ids=IDS)
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
def test_what_from_local_makes_compiles(
    ranks: ThreadWorlds, fn: Callable[..., Pairs], args: tuple[Any, ...]
) -> None:
    for pairs in ranks(fn, "aot_eager", *args, world_size=RANKS):
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted)


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.parametrize(("fn", "args"), [CASES[1], *CASES[3:]], ids=[IDS[1], *IDS[3:]])
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
def test_inductor_of_what_from_local_makes(
    gloo_ranks: Worlds, fn: Callable[..., Pairs], args: tuple[Any, ...]
) -> None:
    for pairs in gloo_ranks(fn, "inductor", *args, world_size=RANKS, timeout_s=240.0):
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
def test_graphs_do_not_ask_other_ranks(ranks: ThreadWorlds) -> None:
    ranks(_lengths_of_others, world_size=RANKS)
