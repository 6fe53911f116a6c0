"""torch.compile over DTensors: what a compiled call costs the host, and what compiling costs.

    core    dtbench_core
    torch   torch.distributed.tensor
    local   plain torch on this rank's part, compiled too, without communication: the floor

A **cached** call runs a graph that is there. A **first** call compiles: Dynamo is reset before each, and the
caches of graphs (FX, AOTAutograd, inductor's) are off; what the C++ compiler has built of the same source stays on
disk, as its time is not the libraries'. A **recompiled** call finds the graph of another placement (ops) or
another batch (from_to_local and blocks), and compiles again. With a backward pass, both graphs count.

Each case counts, in `graph_breaks`, `graphs` (forward and backward) and `collectives`, what stands in the graphs as
AOTAutograd hands them to a backend. Parts are small, so a call is the host's time and, where a graph holds
collectives, that of their latency. Outputs and gradients are compared with plain torch's on full tensors.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtbench.suite import Case, RunOptions, Skip, Workload, World, suite
from dtbench_suites import SUITES
from dtbench_suites.compile_programs import (
    BATCH,
    BLOCKS,
    OPS,
    ROWS,
    Function,
    Op,
    Place,
    Ready,
    block_ready,
    cotangent_of,
    op_ready,
)
from dtbench_suites.data import BEFORE_213, hush_torch, mismatch, shard_of, shared_dims
from dtbench_suites.tensor_parallel import finished

BACKENDS = ("aot_eager", "inductor")
FORWARD, BOTH = "forward", "forward+backward"
CACHED, FIRST, RECOMPILED = "cached", "first", "recompiled"
# A sample outlasts the clock's reading and the scheduler's interruptions stay rare: see the dispatch suite.
CALLS_PER_SAMPLE = 10
WARMUP_CALLS = 10
# A first call takes from tenths of a second to seconds.
COMPILE_SAMPLES, COMPILE_SAMPLES_QUICK = 5, 2
# The same arithmetic in another order and, with inductor, fused; float32.
RTOL = 1e-4
# What a quick run has: an op without communication, one with, the way in and out, and a block.
QUICK = (("add", "S(0),S(0)"), ("redistribute", "S(0)->R"), ("from_to_local", "S(0)"), ("mlp", ""))


@dataclass
class Compiled:
    """A program compiled by `backend`, on this rank."""

    ready: Callable[[bool], Ready]  # given whether it is the one that was compiled before
    backend: Any
    backward: bool
    place: Place
    compiled: Function | None = None
    given: Ready = field(init=False)

    def start(self) -> None:
        """Forgets all that Dynamo knows."""
        torch._dynamo.reset()
        self.renew()

    def renew(self) -> None:
        self.given = self.ready(False)
        self.compiled = torch.compile(own_code(self.given.fn), backend=self.backend)

    def call(self) -> list[Tensor]:
        """The output, and with a backward pass the gradients."""
        assert self.compiled is not None
        return run_once(self.compiled, self.given, self.backward)

    def precompiled(self) -> None:
        """The graph of the other placement or batch is there, and only that."""
        torch._dynamo.reset()
        before = self.ready(True)
        self.given = self.ready(False)
        self.compiled = torch.compile(own_code(before.fn), backend=self.backend)
        run_once(self.compiled, before, self.backward)

    def check(self) -> str | None:
        got = self.call()
        # Every rank gathers every tensor, whatever it found before.
        wholes = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in got]
        wrong = None
        for name, g, w in zip(self.given.names, wholes, self.given.expected(self.backward), strict=False):
            if self.given.plain_part != "R":
                w = shard_of(w, self.given.plain_part, self.place.mesh.get_local_rank(), self.place.ranks)
            wrong = wrong or mismatch(g, w, name, RTOL)
        return wrong


def run_once(fn: Function, given: Ready, backward: bool) -> list[Tensor]:
    if not backward:
        with torch.no_grad():
            return [finished(fn(*given.inputs))]
    out = fn(*given.inputs)
    grads = torch.autograd.grad(out, given.wanted, cotangent_of(out))
    return [finished(out), *map(finished, grads)]


def own_code(fn: Function) -> Function:
    """`fn` with a code object of its own: Dynamo keeps its graphs and guards by that."""

    def called(*inputs: Tensor) -> Any:
        return fn(*inputs)

    code = called.__code__.replace()
    return types.FunctionType(code, called.__globals__, "called", None, called.__closure__)


class Counter:
    """A backend that counts what it is handed, and runs it as it is."""

    def __init__(self) -> None:
        self.graphs = self.collectives = 0

    def __call__(self, module: torch.fx.GraphModule, example: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func

        def take(graph: torch.fx.GraphModule, example: Sequence[Any]) -> Any:
            self.graphs += 1
            self.collectives += sum(map(is_collective, graph.graph.nodes))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=take, bw_compiler=take)(module, example)


def is_collective(node: torch.fx.Node) -> bool:
    """Any op of the two namespaces of collectives, but for waiting."""
    space, _, name = str(node.target).partition(".")
    return space in ("_c10d_functional", "c10d", "_dtensor") and not name.startswith("wait_tensor")


def counted(made: Compiled) -> dict[str, float]:
    """graph_breaks, graphs and collectives of one call, compiled anew; all ranks together."""
    counter = Counter()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with caches_off():
        run_once(torch.compile(own_code(made.given.fn), backend=counter), made.given, made.backward)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.reset()
    return {"graph_breaks": breaks, "graphs": counter.graphs, "collectives": counter.collectives}


@contextlib.contextmanager
def caches_off() -> Iterator[None]:
    """The caches of graphs off, and inductor without processes of its own, which ranks would multiply."""
    import torch._functorch.config as aot
    import torch._inductor.config as inductor

    with (
        torch._dynamo.config.patch(automatic_dynamic_local_pgo=False, automatic_dynamic_remote_pgo=False),
        aot.patch(enable_autograd_cache=False),
        inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1),
    ):
        yield


def ready_of(program: Op | str, place: Place, call: str, before: bool) -> Ready:
    """A program's tensors; `before`: those it is compiled for before a recompilation."""
    if isinstance(program, str):
        return block_ready(program, place, BATCH + 1 if before else BATCH)
    if before and (program.crosses or place.impl == "local"):
        return op_ready(program, place, ROWS + 1)
    return op_ready(program, place, placements=program.other if before else "")


def build_impl(
    program: Op | str, mesh_dim: str, passes: str, backend: str, call: str, impl: str, world: World
) -> Workload:
    import torch._dynamo.utils

    if impl == "core" and BEFORE_213 and (isinstance(program, str) or program.crosses):
        raise Skip("before torch 2.13 Dynamo takes no mesh of the core into a graph")
    hush_torch()
    place = Place(impl, world.mesh[mesh_dim], world.device)
    made = Compiled(partial(ready_of, program, place, call), backend, passes == BOTH, place)

    counters = partial(counted, made)

    def run() -> list[Tensor]:
        with caches_off():
            return made.call()

    if call == CACHED:
        made.renew()
        run()  # compiles, and what is called later enters no compiler
        return Workload(run=made.call, check=made.check, counters=counters, close=torch._dynamo.reset)

    def before() -> None:
        with caches_off():
            made.start() if call == FIRST else made.precompiled()

    check = partial(checked, made, before)
    return Workload(run, before, check, counters, close=torch._dynamo.reset)


def checked(made: Compiled, before: Callable[[], None]) -> str | None:
    """Compiled anew: another impl's sample may have reset Dynamo since."""
    before()
    with caches_off():
        return made.check()


def variants(options: RunOptions, name: str) -> Iterator[tuple[str, str, str]]:
    """(backend, pass, call). A quick run times compiling with aot_eager and forward only."""
    for backend in BACKENDS:
        for passes in (FORWARD, BOTH):
            for call in (CACHED, FIRST, RECOMPILED):
                if options.quick and (
                    (passes == BOTH and name != "mlp")
                    or (call != CACHED and (backend, passes) != (BACKENDS[0], FORWARD))
                ):
                    continue
                yield backend, passes, call


@suite("compile", world="ranks", by_default=False, help=SUITES["compile"])
def compiled(options: RunOptions) -> Iterator[Case]:
    programs: list[tuple[str, str, Op | str]] = [(op.name, op.placements, op) for op in OPS]
    programs += [(name, "", name) for name in BLOCKS]
    for mesh_dim, n in shared_dims(options):
        for name, placements, program in programs:
            if options.quick and (name, placements) not in QUICK:
                continue
            for backend, passes, call in variants(options, name):
                build = partial(build_impl, program, mesh_dim, passes, backend, call)
                yield Case(
                    name=name,
                    params={
                        "placements": placements,
                        "mesh_dim": mesh_dim,
                        "ranks": n,
                        "backend": backend,
                        "pass": passes,
                        "call": call,
                    },
                    build={impl: partial(build, impl) for impl in ("core", "torch", "local")},
                    clock="host",
                    calls_per_sample=CALLS_PER_SAMPLE if call == CACHED else 1,
                    samples=None
                    if call == CACHED
                    else COMPILE_SAMPLES_QUICK
                    if options.quick
                    else COMPILE_SAMPLES,
                    warmup_calls=WARMUP_CALLS if call == CACHED else 1,
                )
