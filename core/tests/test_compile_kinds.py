"""Compiled programs whose graphs depend on values, on sizes that change, or differ between ranks."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.local_world import ThreadWorlds
from core.tests.torch_version import needs_213
from dtbench_core import (
    CoreError,
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    local_map,
    torch_compat,
)
from dtbench_core.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
Given = tuple[torch.Tensor, Placement]


def _compared(
    fn: Callable[..., torch.Tensor], backend: Any, *calls: tuple[Given, ...], **options: bool
) -> Pairs:
    """Values and gradients of the compiled `fn` in each of the calls, and those of plain tensors."""
    torch._dynamo.reset()
    compiled = torch.compile(fn, backend=backend, fullgraph=True, **options)
    mesh, found = mesh_of((2,)), []
    for given in calls:
        plain = [full.clone().requires_grad_(full.is_floating_point()) for full, _ in given]
        placed = [
            distribute_tensor(full, mesh, [placement], src_data_rank=None).requires_grad_(
                full.is_floating_point()
            )
            for full, placement in given
        ]
        torch.manual_seed(0)
        wanted = fn(*plain)
        torch.manual_seed(0)
        got = compiled(*placed)
        wanted.sin().sum().backward()
        got.sin().sum().backward()
        found.append((got.full_tensor().detach(), wanted.detach()))
        for one, other in zip(placed, plain, strict=True):
            if other.grad is not None:
                assert isinstance(one.grad, DTensor)
                found.append((one.grad.full_tensor(), other.grad))
    return found


def _alone_without_a_part() -> Pairs:
    """Rank 1 holds nothing of some of what a collective gives, and must issue it all the same."""
    return [
        *_compared(lambda t: t.amax(0), "aot_eager", ((torch.randn(8, 4), Shard(0)),)),
        *_compared(lambda t: (t * 2).sum(0) + t, "aot_eager", ((torch.randn(1, 5), Shard(0)),)),
        *_compared(lambda t: t.softmax(0) * t.cumsum(1), "aot_eager", ((torch.randn(1, 5), Shard(0)),)),
    ]


def _split_by_cost() -> Pairs:
    """Forward and backward halves as inductor chooses them, by the sizes of what is kept, without its code."""
    backend = aot_autograd(
        fw_compiler=boxed_nop,
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
        decompositions=select_decomp_table,
    )
    found = []
    for fn in (lambda t: t.amax(0), lambda t: t.std(0), lambda t: t.norm(3, 0), lambda t: t.t() @ t):
        found += _compared(fn, backend, *(((torch.randn(n, 4), Shard(0)),) for n in (3, 7)))
    return found


def _other_sizes() -> Pairs:
    def sized(*rows: int) -> list[tuple[Given, ...]]:
        return [((torch.randn(n, 6), Shard(0)),) for n in rows]

    weight = torch.randn(6, 4), Shard(1)
    return [
        *_compared(lambda t: t.softmax(0) - t.sum(0), "aot_eager", *sized(8, 12, 7), dynamic=True),
        # Found dynamic at the second.
        *_compared(lambda t: (t * 2).softmax(0), "aot_eager", *sized(8, 12, 16)),
        *_compared(
            lambda t: t.view(t.shape[0], 2, 3).transpose(1, 2).reshape(-1, 3, 2)[1:],
            "aot_eager",
            *sized(8, 12),
            dynamic=True,
        ),
        *_compared(
            lambda t, w: (t @ w).relu(),
            "aot_eager",
            *((*given, weight) for given in sized(8, 12)),
            dynamic=True,
        ),
    ]


def _asking_for_values() -> Pairs:
    """In eager mode these look at values first: whether every rank's kernel takes them."""
    logits, target = torch.randn(8, 6), torch.randint(6, (8,))
    found = []
    for placement, of_target in ((Shard(0), Shard(0)), (Shard(1), Replicate())):
        call = (logits, placement), (target, of_target)
        found += _compared(lambda t, c: F.cross_entropy(t, c, label_smoothing=0.1), "aot_eager", call)
    found += _compared(
        lambda t, c: F.embedding(c, t), "aot_eager", ((logits, Shard(0)), (target, Replicate()))
    )
    query = torch.randn(2, 4, 6, 8), Shard(1)
    found += _compared(lambda q: F.scaled_dot_product_attention(q, q, q), "aot_eager", (query,))
    return found


@pytest.mark.parametrize(
    "programs", [_alone_without_a_part, _split_by_cost, _other_sizes, _asking_for_values]
)
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
def test_ranks_compile_alike(ranks: ThreadWorlds, programs: Callable[[], Pairs]) -> None:
    for pairs in ranks(programs, world_size=2):
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted)


def _in_pieces(backend: str) -> Pairs:
    """Graph breaks, between which the library runs while Dynamo looks for frames to compile; numbers; local_map."""
    mesh, x = mesh_of((2,)), torch.randn(8, 4)
    outside: Any = torch._dynamo.disable(lambda t: t.cumsum(0))
    mapped = local_map(lambda t: t.exp() * 2, out_placements=[Shard(0)], in_placements=([Shard(0)],))
    net = nn.Linear(4, 4)

    def trained(net: nn.Module, how: Callable[..., Any]) -> Pairs:
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)

        def step(t: Any) -> Any:
            loss = net(t).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        fn, placed = how(step), isinstance(next(net.parameters()), DTensor)
        given = distribute_tensor(x, mesh, [Replicate()], src_data_rank=None) if placed else x
        return [fn(given), fn(given), *(p.detach() for p in net.parameters())]

    def pieces(t: Any) -> Any:
        a = outside(t.sin() * 2)
        return a + 1 if a.sum().item() > -1e9 else a

    torch._dynamo.reset()
    compiled = functools.partial(torch.compile, backend=backend)
    placed = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
    scaled = compiled(lambda t, n: t * n + n, fullgraph=True)
    found = [
        (compiled(pieces)(placed), pieces(x)),
        (compiled(torch.sin, fullgraph=True)(placed[3:6]), x[3:6].sin()),  # rows that had to be gathered
        (compiled(lambda t: mapped(t), fullgraph=True)(placed), x.exp() * 2),
        *((scaled(placed, n), x * n + n) for n in (1, 2, 3, 0.5, 0.25)),
    ]

    def shard(name: str, module: nn.Module, mesh: Any) -> None:
        for of, p in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(p.detach(), mesh, [Shard(0)])
            module.register_parameter(of, nn.Parameter(part))

    parts = distribute_module(copy.deepcopy(net), mesh, shard)
    found += zip(trained(parts, compiled), trained(net, lambda step: step), strict=True)
    return [(one.full_tensor() if isinstance(one, DTensor) else one, plain) for one, plain in found]


@pytest.mark.filterwarnings("ignore")  # of torch's tracers
def test_graphs_in_pieces(ranks: ThreadWorlds) -> None:
    for pairs in ranks(_in_pieces, "aot_eager", world_size=2):
        for got, wanted in pairs:
            torch.testing.assert_close(got, wanted)


@pytest.mark.filterwarnings("ignore")  # of torch's tracers
def test_export_says_what_it_cannot_trace(fake_world: Callable[..., None]) -> None:
    fake_world(2)
    net = distribute_module(nn.Linear(4, 4), mesh_of((2,)), input_fn=_replicated)
    with pytest.raises(CoreError, match=r"torch\.export, which traces above autograd"):
        torch.export.export(net, (torch.ones(2, 4),), strict=False)


def _replicated(module: nn.Module, inputs: Any, mesh: Any) -> Any:
    return tuple(DTensor.from_local(t, mesh, [Replicate()]) for t in inputs)


def test_caches_on_disk_are_of_this_state_of_the_library(
    fake_world: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(2)
    x = distribute_tensor(torch.ones(4, 2), mesh_of((2,)), [Shard(0)], src_data_rank=None)
    key = x._stable_hash_for_caching()
    assert x._stable_hash_for_caching() == key
    with monkeypatch.context() as patched:
        patched.setattr("dtbench_core.tensor.in_graphs.state_of_library", lambda: "another")
        assert x._stable_hash_for_caching() != key
    sources = Path(torch_compat.__file__).parent.rglob("*.py")
    assert hashlib.sha256(b"".join(f.read_bytes() for f in sorted(sources))).hexdigest() in key


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
def test_a_parallel_block_of_any_batch(fake_world: Callable[..., None]) -> None:
    fake_world(2)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(net, mesh_of((2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch._dynamo.reset()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    # In a world without transport the terms of others are missing, in eager mode as well.
    for rows in (2, 3, 5):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(compiled(x), net(x))


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=2)
def test_results_of_unknown_size_break_a_graph_and_are_refused_in_one() -> None:
    functions: list[Callable[[Any], Any]] = [
        lambda x: x.masked_select(x > 3) + 1,
        lambda x: x[x > 3] * 2,
        lambda x: x.nonzero() + 1,
        lambda x: x.unique(),
    ]
    plain = torch.arange(32.0).view(8, 4)
    x = distribute_tensor(plain, mesh_of((2,)), [Shard(0)], src_data_rank=None)
    for fn in functions:
        torch._dynamo.reset()
        with pytest.raises(
            RuntimeError, match=r"whose size depends on values.*fullgraph"
        ) as caught:  # of Dynamo
            torch.compile(fn, backend="aot_eager", fullgraph=True)(x)
        assert isinstance(caught.value.__cause__, CoreError)
        assert torch.equal(torch.compile(fn, backend="aot_eager")(x).full_tensor(), fn(plain))


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=2)
def test_dims_that_are_marked_dynamic_are_of_any_size() -> None:
    def fn(x: Any) -> Any:
        return (x @ x.t()).softmax(0).sum(1).view(-1) * x.shape[0]

    marks: list[Callable[[Any], None]] = [
        lambda x: torch._dynamo.mark_dynamic(x, 0),
        lambda x: torch._dynamo.mark_dynamic(x, [0, 1], min=2, max=64),
        lambda x: torch._dynamo.mark_dynamic(x, 0, hint_override=32),
        lambda x: torch._dynamo.maybe_mark_dynamic(x, 0),
    ]
    for mark in marks:
        for placement in (Shard(0), Replicate()):
            torch._dynamo.reset()
            fast = torch.compile(fn, backend="aot_eager", fullgraph=True)
            for rows in (8, 5):
                plain = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
                x = distribute_tensor(plain, mesh_of((2,)), [placement], src_data_rank=None)
                mark(x)
                torch.testing.assert_close(fast(x).full_tensor(), fn(plain))
                torch.testing.assert_close(fast(x * 1).full_tensor(), fn(plain))


class _TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x.sum(0)

    @staticmethod
    def backward(ctx: Any, of_sin: torch.Tensor, of_sum: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return of_sin * x.cos() + of_sum


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=2)
def test_gradients_pass_where_some_results_have_none() -> None:
    functions: list[Callable[[Any], Any]] = [
        lambda x: (x.softmax(0), x.pow(2).mean()),
        lambda x: (x.sum(0), (x * 2)[1:].t(), x @ x.t(), x.exp()),
        lambda x: _TwoResults.apply(x * 2),
        lambda x: (None, _TwoResults.apply(x * 2)[0].sum()),
        lambda x: (None, _TwoResults.apply(x * 2)[1].sum()),
    ]
    for fn in functions:
        for placement in (Shard(0), Shard(1), Replicate()):
            torch._dynamo.reset()
            plain = torch.randn(5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
            x = distribute_tensor(plain.detach(), mesh_of((2,)), [placement], src_data_rank=None)
            fast = torch.compile(fn, backend="aot_eager", fullgraph=True)
            for given, run in ((x.requires_grad_(), fast), (plain, fn)):
                run(given)[-1].sin().sum().backward()
            assert isinstance(x.grad, DTensor)
            torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
@on_ranks(world_size=2)
def test_forward_derivatives_in_a_graph() -> None:
    functions: list[Callable[[Any, Any], Any]] = [
        lambda x, t: torch.func.jvp(lambda a: a.softmax(0), (x,), (t,)),
        lambda x, t: torch.func.jvp(lambda a: (a @ a.t()).sum(0), (x * 2,), (t.sin(),)),
        lambda x, t: torch.func.jvp(lambda a, b: a * b.sum(0), (x, t), (t, x * 3)),
    ]
    plain, tangent = (torch.randn(5, 4, generator=torch.Generator().manual_seed(n)) for n in range(2))
    for fn in functions:
        for placement in (Shard(0), Shard(1), Replicate()):
            torch._dynamo.reset()
            x, t = (
                distribute_tensor(full, mesh_of((2,)), [placement], src_data_rank=None)
                for full in (plain, tangent)
            )
            got = torch.compile(fn, backend="aot_eager", fullgraph=True)(x, t)
            for one, other in zip(got, fn(plain, tangent), strict=True):
                torch.testing.assert_close(one.full_tensor(), other)


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
def test_branches_of_a_graph_are_refused(fake_world: Callable[..., None]) -> None:
    fake_world(2)
    x = distribute_tensor(torch.ones(4, 2), mesh_of((2,)), [Shard(0)], src_data_rank=None)
    torch._dynamo.reset()
    branches = torch.compile(
        lambda t: torch.cond(t.sum() > 0, torch.sin, torch.cos, (t,)), backend="aot_eager"
    )
    with pytest.raises(RuntimeError, match=r"got DTensors in torch.cond.*expected Python's if"):
        branches(x)
