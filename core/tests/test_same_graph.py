"""The compilers of all ranks keep the same collectives in the same order, although the shards differ."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from core.tests.torch_version import needs_213
from dtbench_core import Partial, Placement, Replicate, Shard, distribute_tensor

WORLD = 4
Calls = list[tuple[object, ...]]
Programs = dict[str, Callable[[Any], Any]]
Layouts = list[tuple[tuple[int, int], tuple[Placement, Placement]]]

PROGRAMS: Programs = {
    "attention with itself": lambda t: F.scaled_dot_product_attention(*[t[None, None]] * 3),
    "views": lambda t: t.reshape(-1)[3:].sum() + t.flip(0)[1:].t().reshape(-1).cumsum(0),
    "cat and pad": lambda t: F.pad(torch.cat([t, t.sin()], 0), (1, 2, 1, 1)).roll(1, 0),
    "topk and sort": lambda t: t.topk(2, 0).values + t.sort(0).values[:2] + t.argsort(1)[:2],
    "products": lambda t: (t @ t.t()).softmax(0) @ t + F.normalize(t, dim=0) * t.sum(0),
    "indices": lambda t: t[[0, 2]] + t.gather(0, t.argsort(0))[:2] + t[[1, 1]],
}
# Of 2 x 2 ranks: some without a part, some with less than others, terms of a sum.
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


def _slow(*row: Any, id: str) -> Any:
    return pytest.param(*row, marks=pytest.mark.slow, id=id)


@needs_213("Dynamo takes no mesh into a graph")
@pytest.mark.parametrize(
    ("programs", "layouts", "backend", "budget"),
    [
        (CHECKPOINTED, WITHOUT_COLUMNS, _aot_eager, 1.0),
        _slow(PROGRAMS, LAYOUTS, _aot_eager, 0.5, id="budget"),
        _slow(PROGRAMS, LAYOUTS, _inductor, 1.0, id="inductor"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # of torch's tracers
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
    for name, calls in least.items():
        assert calls == most[name], name
