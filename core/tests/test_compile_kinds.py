"""Compiled programs whose graphs depend on values, on sizes that change, or differ between ranks."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

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
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    local_map,
    torch_compat,
)

pytestmark = quiet
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
    [_alone_without_a_part, _other_sizes, _asking_for_values, pytest.param(_in_pieces, marks=mesh_in_graphs)],
)
def test_ranks_compile_the_same_program(ranks: ThreadWorlds, programs: Callable[[], Pairs]) -> None:
    assert_close(ranks(programs, world_size=2))


def test_export_refuses_to_trace_above_autograd(fake_world: Callable[..., None]) -> None:
    fake_world(2)
    net = distribute_module(
        nn.Linear(4, 4),
        mesh_of((2,)),
        input_fn=lambda inputs, mesh: tuple(DTensor.from_local(t, mesh, [R]) for t in inputs),
    )
    with pytest.raises(CoreError, match=r"torch\.export, which traces above autograd"):
        torch.export.export(net, (torch.ones(2, 4),), strict=False)


def test_disk_cache_key_changes_with_the_library(
    fake_world: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_world(2)
    x = placed(torch.ones(4, 2))
    key = x._stable_hash_for_caching()
    sources = Path(torch_compat.__file__).parent.rglob("*.py")
    assert hashlib.sha256(b"".join(f.read_bytes() for f in sorted(sources))).hexdigest() in key
    assert x._stable_hash_for_caching() == key
    monkeypatch.setattr("dtbench_core.tensor.in_graphs.state_of_library", lambda: "another")
    assert x._stable_hash_for_caching() != key


@mesh_in_graphs
@on_ranks(world_size=2)
def test_results_of_unknown_size_break_the_graph() -> None:
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
        with pytest.raises(RuntimeError, match=r"result whose size depends on values.*fullgraph") as caught:
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


@mesh_in_graphs
@on_ranks(world_size=2)
def test_backward_handles_outputs_without_gradient() -> None:
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


@mesh_in_graphs
@on_ranks(world_size=2)
def test_compiled_jvp_equals_plain_torch() -> None:
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
            torch.testing.assert_close(tuple(t.full_tensor() for t in got), fn(*plain))


@mesh_in_graphs
def test_torch_cond_is_refused(fake_world: Callable[..., None]) -> None:
    fake_world(2)
    torch._dynamo.reset()
    branches = compiled(lambda t: torch.cond(t.sum() > 0, torch.sin, torch.cos, (t,)))
    with pytest.raises(RuntimeError, match=r"got DTensors in torch.cond.*expected Python's if"):
        branches(placed(torch.ones(4, 2)))


# ---- collectives of all ranks ----


WORLD = 4
Calls = list[tuple[object, ...]]
Programs = dict[str, Program]
Layouts = list[tuple[tuple[int, int], tuple[Placement, Placement]]]

PROGRAMS: Programs = {
    "attention with itself": lambda t: F.scaled_dot_product_attention(*[t[None, None]] * 3),
    "views": lambda t: t.reshape(-1)[3:].sum() + t.flip(0)[1:].t().reshape(-1).cumsum(0),
    "cat and pad": lambda t: F.pad(torch.cat([t, t.sin()], 0), (1, 2, 1, 1)).roll(1, 0),
    "topk and sort": lambda t: t.topk(2, 0).values + t.sort(0).values[:2] + t.argsort(1)[:2],
    "products": lambda t: (t @ t.t()).softmax(0) @ t + F.normalize(t, dim=0) * t.sum(0),
    "indices": lambda t: t[[0, 2]] + t.gather(0, t.argsort(0))[:2] + t[[1, 1]],
}
# On 2 x 2 ranks: shards that are empty or uneven, and terms of a sum.
LAYOUTS: Layouts = [
    ((5, 6), (Shard(0), Shard(0))),
    ((3, 5), (Shard(0), Shard(1))),
    ((3, 6), (Partial(), Shard(0))),
    ((3, 4), (Replicate(), Shard(0))),
]
# Rank 3 is left without columns, too, once they are spread.
CHECKPOINTED: Programs = {
    "softmax": lambda t: checkpoint(lambda u: u.sin().softmax(0), t, use_reentrant=False)
}
WITHOUT_COLUMNS: Layouts = [((3, 3), (Shard(0), Shard(0)))]


def _collectives(graph: fx.Graph) -> list[str]:
    """Returns the names of collectives. Ranks may differ in whether one reuses the memory of its input."""
    names = [str(node.target) for node in graph.nodes]
    return [n.replace("_.", ".") for n in names if "_c10d_functional" in n and "wait_tensor" not in n]


def _unexecuted(calls: Calls, graph: fx.GraphModule, half: str) -> Any:
    """Records the collectives of a compiled half; returns a function that gives zeros, so nothing is sent."""
    calls.append((half, *_collectives(graph.graph)))
    (output,) = graph.graph.find_nodes(op="output")

    def zeros(_: list[Any]) -> list[Any]:
        metas = [node.meta["val"] if isinstance(node, fx.Node) else node for node in output.args[0]]
        return [
            torch.empty_strided(m.shape, m.stride(), dtype=m.dtype).zero_()
            if isinstance(m, torch.Tensor)
            else m
            for m in metas
        ]

    zeros._boxed_call = True
    return zeros


def _aot_eager(calls: Calls) -> Any:
    compilers = {
        f"{half}_compiler": functools.partial(lambda half, graph, _: _unexecuted(calls, graph, half), half)
        for half in ("fw", "bw", "inference")
    }
    return aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)


def _inductor(calls: Calls) -> Any:
    """Runs inductor's passes over graphs, without generating code."""
    # These warn of what torch itself does, where tests fail by warnings.
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V

    def inner(graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
        view_to_reshape(graph)
        with V.set_fake_mode(detect_fake_mode(inputs)):
            post_grad_passes(graph, is_inference=bool(options.get("is_inference")))
        return _unexecuted(calls, graph, "bw" if options.get("is_backward") else "fw")

    return lambda graph, inputs: compile_fx(graph, inputs, inner_compile=inner)


def _graphs(
    rank: int, backend: Callable[[Calls], Any], programs: Programs, layouts: Layouts
) -> dict[str, Calls]:
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    try:
        mesh, graphs = init_device_mesh("cpu", (2, 2)), {}
        for name, fn in programs.items():
            for shape, placements in layouts:
                torch._dynamo.reset()
                calls: Calls = []
                full = torch.rand(shape, generator=torch.Generator().manual_seed(0))
                x = distribute_tensor(full, mesh, placements, src_data_rank=None).requires_grad_()
                torch.compile(fn, backend=backend(calls), fullgraph=True)(x).sum().backward()
                graphs[f"{name} of {shape} {placements}"] = calls
        return graphs
    finally:
        dist.destroy_process_group()


@mesh_in_graphs
@pytest.mark.parametrize(
    ("programs", "layouts", "backend", "budget"),
    [
        (CHECKPOINTED, WITHOUT_COLUMNS, _aot_eager, 1.0),
        (PROGRAMS, LAYOUTS, _aot_eager, 0.5),
        (PROGRAMS, LAYOUTS, _inductor, 1.0),
    ],
    ids=["checkpointed", "budget", "inductor"],
)
def test_ranks_keep_the_same_collectives(
    programs: Programs, layouts: Layouts, backend: Callable[[Calls], Any], budget: float
) -> None:
    """`budget`: of activation memory; below 1, more is recomputed.

    Rank 0 holds the most and rank 3 the least; the other ranks lie between them.
    """
    config: Any = torch._functorch.config
    with config.patch(activation_memory_budget=budget, enable_autograd_cache=False):
        most, least = (_graphs(rank, backend, programs, layouts) for rank in (0, WORLD - 1))
    assert all(len(calls) == 2 for calls in most.values())  # both halves
    assert sum(len(half) - 1 for calls in most.values() for half in calls) > len(most)
    assert least == most
