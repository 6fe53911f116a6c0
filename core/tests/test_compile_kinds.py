"""Compiled programs whose graphs depend on values, on sizes that change, or differ between ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from core.tests.compiling import (
    Pairs,
    assert_close,
    assert_equal,
    compiled,
    mesh_in_graphs,
    numbers,
    placed,
    quiet,
    whole,
)
from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.local_world import ThreadWorlds
from dtbench_core import (
    CoreError,
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    local_map,
    torch_compat,
)

pytestmark = quiet
slow = pytest.mark.slow
S0, S1, R = Shard(0), Shard(1), Replicate()
Program = Callable[..., Any]
Inputs = tuple[tuple[torch.Tensor, Placement], ...]


def _compared(fn: Program, *calls: Inputs, **options: Any) -> Pairs:
    """Values and gradients of the compiled `fn` in each of the calls, and those of plain tensors."""
    torch._dynamo.reset()
    fast, pairs = compiled(fn, fullgraph=True, **options), []
    for inputs in calls:
        plain = [full.clone().requires_grad_(full.is_floating_point()) for full, _ in inputs]
        parts = [placed(full, placement) for full, (_, placement) in zip(plain, inputs, strict=True)]
        torch.manual_seed(0)
        expected = fn(*plain)
        torch.manual_seed(0)
        got = fast(*parts)
        expected.sin().sum().backward()
        got.sin().sum().backward()
        pairs.append((whole(got), expected.detach()))
        for one, other in zip(parts, plain, strict=True):
            if other.grad is not None:
                assert isinstance(one.grad, DTensor)
                pairs.append((whole(one.grad), other.grad))
    return pairs


def _rows(*counts: int, columns: int = 4) -> list[Inputs]:
    """A call with so many rows each, sharded by rows."""
    return [((torch.randn(n, columns), S0),) for n in counts]


def _alone_without_a_part() -> Pairs:
    """Rank 1 holds nothing of some of what a collective gives, and must issue it all the same."""
    return [
        *_compared(lambda t: t.amax(0), *_rows(8)),
        *_compared(lambda t: (t * 2).sum(0) + t, *_rows(1)),
        *_compared(lambda t: t.softmax(0) * t.cumsum(1), *_rows(1)),
    ]


def _other_sizes() -> Pairs:
    weight = torch.randn(6, 4), S1
    return [
        *_compared(lambda t: t.softmax(0) - t.sum(0), *_rows(8, 12, 7), dynamic=True),
        *_compared(lambda t: (t * 2).softmax(0), *_rows(8, 12, 16)),  # recognised as dynamic at the second
        *_compared(
            lambda t: t.view(t.shape[0], 2, 3).transpose(1, 2).reshape(-1, 3, 2)[1:],
            *_rows(8, 12, columns=6),
            dynamic=True,
        ),
        *_compared(
            lambda t, w: (t @ w).relu(),
            *((*inputs, weight) for inputs in _rows(8, 12, columns=6)),
            dynamic=True,
        ),
    ]


def _asking_for_values() -> Pairs:
    """In eager mode these look at values first: whether every rank's kernel takes them."""
    logits, target, query = torch.randn(8, 6), torch.randint(6, (8,)), torch.randn(2, 4, 6, 8)
    calls = [((logits, S0), (target, S0)), ((logits, S1), (target, R))]
    return [
        *(
            pair
            for call in calls
            for pair in _compared(lambda t, c: F.cross_entropy(t, c, label_smoothing=0.1), call)
        ),
        *_compared(lambda t, c: F.embedding(c, t), ((logits, S0), (target, R))),
        *_compared(lambda q: F.scaled_dot_product_attention(q, q, q), ((query, S1),)),
    ]


def _in_pieces() -> Pairs:
    """Graph breaks, between which the library runs while Dynamo looks for frames to compile; numbers; local_map."""
    x = torch.randn(8, 4)
    outside: Any = torch._dynamo.disable(lambda t: t.cumsum(0))
    mapped = local_map(lambda t: t.exp() * 2, out_placements=[S0], in_placements=([S0],))

    def pieces(t: Any) -> Any:
        a = outside(t.sin() * 2)
        return a + 1 if a.sum().item() > -1e9 else a

    torch._dynamo.reset()
    part, scaled = placed(x), compiled(lambda t, n: t * n + n, fullgraph=True)
    pairs = [
        (compiled(pieces)(part), pieces(x)),
        (compiled(torch.sin, fullgraph=True)(part[3:6]), x[3:6].sin()),  # rows that had to be gathered
        (compiled(lambda t: mapped(t), fullgraph=True)(part), x.exp() * 2),
        *((scaled(part, n), x * n + n) for n in (1, 2, 3, 0.5, 0.25)),
    ]
    return [(whole(one), whole(other)) for one, other in pairs]


@pytest.mark.parametrize(
    "programs",
    [
        _alone_without_a_part,
        *(pytest.param(p, marks=slow) for p in (_other_sizes, _asking_for_values, _in_pieces)),
    ],
)
def test_ranks_compile_the_same_program(ranks: ThreadWorlds, programs: Callable[[], Pairs]) -> None:
    assert_close(ranks(programs, world_size=2))


def test_export_says_what_it_cannot_trace(fake_world: Callable[..., None]) -> None:
    fake_world(2)
    net = distribute_module(
        nn.Linear(4, 4),
        mesh_of((2,)),
        input_fn=lambda inputs, mesh: tuple(DTensor.from_local(t, mesh, [R]) for t in inputs),
    )
    with pytest.raises(CoreError, match=r"torch\.export, which traces above autograd"):
        torch.export.export(net, (torch.ones(2, 4),), strict=False)


def test_caches_on_disk_are_of_this_state_of_the_library(
    fake_world: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(2)
    x = placed(torch.ones(4, 2))
    key = x._stable_hash_for_caching()
    assert x._stable_hash_for_caching() == key
    with monkeypatch.context() as patched:
        patched.setattr("dtbench_core.tensor.in_graphs.state_of_library", lambda: "another")
        assert x._stable_hash_for_caching() != key
    sources = Path(torch_compat.__file__).parent.rglob("*.py")
    assert hashlib.sha256(b"".join(f.read_bytes() for f in sorted(sources))).hexdigest() in key


@mesh_in_graphs
@on_ranks(world_size=2)
def test_results_of_unknown_size_break_a_graph_and_are_refused_in_one() -> None:
    functions: list[Program] = [
        lambda x: x.masked_select(x > 3) + 1,
        lambda x: x[x > 3] * 2,
        lambda x: x.nonzero() + 1,
        lambda x: x.unique(),
    ]
    plain = numbers()
    x = placed(plain)
    for fn in functions:
        torch._dynamo.reset()
        with pytest.raises(RuntimeError, match=r"whose size depends on values.*fullgraph") as caught:
            compiled(fn, fullgraph=True)(x)
        assert isinstance(caught.value.__cause__, CoreError)
        assert_equal([compiled(fn)(x)], [fn(plain)])


class _TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x.sum(0)

    @staticmethod
    def backward(ctx: Any, of_sin: torch.Tensor, of_sum: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return of_sin * x.cos() + of_sum


def _random(seed: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


@slow
@mesh_in_graphs
@on_ranks(world_size=2)
def test_gradients_pass_where_some_results_have_none() -> None:
    functions: list[Program] = [
        lambda x: (x.softmax(0), x.pow(2).mean()),
        lambda x: (x.sum(0), (x * 2)[1:].t(), x @ x.t(), x.exp()),
        lambda x: _TwoResults.apply(x * 2),
        lambda x: (None, _TwoResults.apply(x * 2)[0].sum()),
        lambda x: (None, _TwoResults.apply(x * 2)[1].sum()),
    ]
    for fn in functions:
        for placement in (S0, S1, R):
            torch._dynamo.reset()
            plain = _random(0).requires_grad_()
            x = placed(plain, placement)
            for leaf, run in ((x, compiled(fn, fullgraph=True)), (plain, fn)):
                run(leaf)[-1].sin().sum().backward()
            assert isinstance(x.grad, DTensor)
            torch.testing.assert_close(whole(x.grad), plain.grad)


@slow
@mesh_in_graphs
@on_ranks(world_size=2)
def test_forward_derivatives_in_a_graph() -> None:
    functions: list[Program] = [
        lambda x, t: torch.func.jvp(lambda a: a.softmax(0), (x,), (t,)),
        lambda x, t: torch.func.jvp(lambda a: (a @ a.t()).sum(0), (x * 2,), (t.sin(),)),
        lambda x, t: torch.func.jvp(lambda a, b: a * b.sum(0), (x, t), (t, x * 3)),
    ]
    plain = _random(0), _random(1)
    for fn in functions:
        for placement in (S0, S1, R):
            torch._dynamo.reset()
            got = compiled(fn, fullgraph=True)(*(placed(full, placement) for full in plain))
            for one, other in zip(got, fn(*plain), strict=True):
                torch.testing.assert_close(one.full_tensor(), other)


@mesh_in_graphs
def test_branches_of_a_graph_are_refused(fake_world: Callable[..., None]) -> None:
    fake_world(2)
    torch._dynamo.reset()
    branches = compiled(lambda t: torch.cond(t.sum() > 0, torch.sin, torch.cos, (t,)))
    with pytest.raises(RuntimeError, match=r"got DTensors in torch.cond.*expected Python's if"):
        branches(placed(torch.ones(4, 2)))
