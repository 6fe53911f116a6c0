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
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtbench.suite import Case, Param, RunOptions, Skip, Workload, World, suite
from dtbench_suites import SUITES
from dtbench_suites.data import BEFORE_213, Place, hush_torch, refuse_gathers_of_cuda_on_gloo, shared_dims
from dtbench_suites.tensor_parallel import BOTH, FORWARD, MODELS, compare, names_of, one_pass, parallelize

BACKENDS = ("aot_eager", "inductor")
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

# ---- what is compiled: ops over DTensors, and the parts of a transformer cut by columns and rows ----

# Of each rank's part: no arithmetic worth speaking of, as the call is what is measured.
ROWS, COLS = 4, 8
# batch, positions, width for each rank: one head each
BATCH, SEQ, WIDTH = 2, 8, 16

Shapes = tuple[tuple[int, ...], ...]
Function = Callable[..., Any]


@dataclass(frozen=True)
class CompiledOp:
    """placements: of the inputs, and after "->" of what comes out where that tells it apart.

    shapes: of the full inputs for n ranks and so many rows in each part. make: the function for a place.
    plain: the same on full tensors. other: the placements that it is compiled for before a recompilation.
    crosses: plain parts go in and come out, placed as the first input.
    """

    name: str
    placements: str
    shapes: Callable[[int, int], Shapes]
    make: Callable[[Place], Function]
    plain: Function
    other: str
    crosses: bool = False


def by_rows(inputs: int) -> Callable[[int, int], Shapes]:
    return lambda n, k: ((n * k, n * COLS),) * inputs


def same(fn: Function) -> tuple[Callable[[Place], Function], Function]:
    return lambda place: fn, fn


def chain(x: Tensor) -> Tensor:
    return (((x * 2 + 1) * x).sin() * x + x) * 0.5


def reduced(place: Place) -> Function:
    """A product whose terms are pending, and then not."""
    to = mover("R", place)
    return lambda x, y: to(x @ y)


def mover(text: str, place: Place) -> Function:
    """A change of placement; of a plain part, a copy of it."""
    if place.impl == "local":
        return torch.clone
    placements = place.on_all(text)  # made outside of what is compiled
    return lambda x: x.redistribute(placements=placements)


def crossing(place: Place) -> Function:
    """from_local, then a chain of ops, then to_local."""
    if place.impl == "local":
        return chain
    from_local, mesh, placements = place.api.DTensor.from_local, place.mesh, place.on_all("S(0)")
    fn: Function = chain
    return lambda x: fn(from_local(x, mesh, placements, run_check=False)).to_local()


OPS = (
    CompiledOp("add", "S(0),S(0)", by_rows(2), *same(torch.add), "S(1),S(1)"),
    CompiledOp("mul_chain", "S(0)", by_rows(1), *same(chain), "S(1)"),
    CompiledOp("softmax", "S(0)", by_rows(1), *same(lambda x: x.softmax(1)), "R"),
    CompiledOp("softmax", "S(1)", by_rows(1), *same(lambda x: x.softmax(1)), "S(0)"),
    CompiledOp(
        "layer_norm",
        "S(0),R,R",
        lambda n, k: ((n * k, COLS), (COLS,), (COLS,)),
        *same(lambda x, weight, bias: F.layer_norm(x, (COLS,), weight, bias)),
        "R,R,R",
    ),
    CompiledOp("mm", "R,S(1)", lambda n, k: ((n * k, COLS), (COLS, n * COLS)), *same(torch.mm), "S(0),R"),
    CompiledOp(
        "linear",
        "R,S(0),S(0)",
        lambda n, k: ((2, n * k, COLS), (n * COLS, COLS), (n * COLS,)),
        *same(F.linear),
        "S(1),R,R",
    ),
    CompiledOp(
        "mm_reduced", "S(1),S(0)", lambda n, k: ((k, n * COLS), (n * COLS, COLS)), reduced, torch.mm, "R,R"
    ),
    CompiledOp("redistribute", "S(0)->R", by_rows(1), partial(mover, "R"), torch.clone, "S(1)"),
    CompiledOp("redistribute", "S(0)->S(1)", by_rows(1), partial(mover, "S(1)"), torch.clone, "R"),
    CompiledOp("from_to_local", "S(0)", by_rows(1), crossing, chain, "", crosses=True),
)
BLOCKS = ("mlp", "attention")
COLUMNS = ("up", "wq", "wk", "wv")  # the layers cut by columns; the others are by rows


@dataclass(frozen=True)
class Ready:
    """A function, the tensors it is called with, those whose gradients are wanted, and the right answers.

    expected: the output and gradients on full tensors, or for plain parts on the parts. plain_part: how to read the
    placement of what is plain.
    """

    fn: Function
    inputs: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]
    expected: Callable[[bool], list[Tensor]]
    names: Sequence[str]
    plain_part: str = "R"


def values(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Tensor]:
    """Full tensors, the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def answers(fn: Function, inputs: Sequence[Tensor], wanted: Sequence[Tensor], backward: bool) -> list[Tensor]:
    """The output, and with a backward pass the gradients: of ones, whatever the output is placed as."""
    return one_pass(fn, inputs, wanted, (lambda out: torch.ones_like(out.detach())) if backward else None)


def op_ready(op: CompiledOp, place: Place, rows: int = ROWS, placements: str = "") -> Ready:
    full = values(op.shapes(place.mesh.size(), rows), place.device)
    texts = (placements or op.placements).split("->")[0].split(",")
    local = place.impl == "local"
    put = place.part if op.crosses else place.put
    inputs = [put(t, text).detach().requires_grad_() for t, text in zip(full, texts, strict=True)]
    whole = [t.requires_grad_() for t in ([t.detach().clone() for t in inputs] if local else full)]
    names = ("the output", *(f"the gradient of input {i}" for i in range(len(inputs))))
    expected = lambda backward: answers(op.plain, whole, whole, backward)  # noqa: E731
    part = texts[0] if op.crosses and not local else "R"
    return Ready(op.make(place), tuple(inputs), tuple(inputs), expected, names, part)


def block_ready(name: str, place: Place, batch: int = BATCH) -> Ready:
    """A block cut over the ranks; for "local" the part of each weight that this rank would hold, no communication."""
    n, device = place.mesh.size(), place.device
    with torch.random.fork_rng(devices=[]), device:
        torch.manual_seed(0)
        model, whole = (MODELS[name](n * WIDTH, n) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    (x,) = values([(batch, SEQ, n * WIDTH)], device)
    cut: nn.Module = model
    if place.impl == "local":
        keep_parts(model, place)
        keep_parts(whole, place)
    else:
        cut = parallelize(place.impl, model, place.mesh)
    own, reference = (x.clone().requires_grad_() for _ in range(2))
    expected = lambda backward: answers(whole, [reference], [reference, *whole.parameters()], backward)  # noqa: E731
    return Ready(lambda x: cut(x), (own,), (own, *cut.parameters()), expected, names_of(whole))


def keep_parts(model: nn.Module, place: Place) -> None:
    """Replaces each weight by this rank's part of it."""
    for name, module in model.named_children():
        for kind in ("weight", "bias") if name in COLUMNS else ("weight",):
            parameter = getattr(module, kind)
            if parameter is not None:
                part = place.part(parameter.detach(), "S(0)" if name in COLUMNS else "S(1)")
                setattr(module, kind, nn.Parameter(part))


# ---- compiling it ----


@dataclass
class Compilation:
    """A program compiled by `backend`, on this rank."""

    make: Callable[[bool], Ready]  # of whether it is the program that was compiled before
    backend: Any
    backward: bool
    place: Place
    compiled: Function = field(init=False)
    ready: Ready = field(init=False)

    def start(self, call: str) -> None:
        """Before a first call Dynamo forgets all that it knows; before a recompiled one it has the graph of the other
        placement or batch, and only that."""
        if call != CACHED:
            torch._dynamo.reset()
        before = self.make(call == RECOMPILED)
        self.ready = self.make(False) if call == RECOMPILED else before
        self.compiled = torch.compile(own_code(before.fn), backend=self.backend)
        if call == RECOMPILED:
            answers(self.compiled, before.inputs, before.wanted, self.backward)

    def call(self) -> list[Tensor]:
        return answers(self.compiled, self.ready.inputs, self.ready.wanted, self.backward)

    def check(self) -> str | None:
        part, want = self.ready.plain_part, self.ready.expected(self.backward)
        if part != "R":
            want = [self.place.part(whole, part) for whole in want]
        return compare(self.ready.names, self.call(), want, RTOL)


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


def counted(compilation: Compilation) -> dict[str, float]:
    """graph_breaks, graphs and collectives of one call, compiled anew; all ranks together."""
    counter = Counter()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    ready = compilation.ready
    with caches_off():
        compiled = torch.compile(own_code(ready.fn), backend=counter)
        answers(compiled, ready.inputs, ready.wanted, compilation.backward)
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


def ready_of(program: CompiledOp | str, place: Place, before: bool) -> Ready:
    """A program's tensors; `before`: those it is compiled for before a recompilation."""
    if isinstance(program, str):
        return block_ready(program, place, BATCH + 1 if before else BATCH)
    if before and (program.crosses or place.impl == "local"):
        return op_ready(program, place, ROWS + 1)
    return op_ready(program, place, placements=program.other if before else "")


def build_impl(
    program: CompiledOp | str, mesh_dim: str, passes: str, backend: str, call: str, impl: str, world: World
) -> Workload:
    import torch._dynamo.utils

    if impl == "core" and BEFORE_213 and (isinstance(program, str) or program.crosses):
        raise Skip("before torch 2.13 Dynamo takes no mesh of the core into a graph")
    if impl != "local":
        refuse_gathers_of_cuda_on_gloo(world.mesh[mesh_dim])
    hush_torch()
    place = Place(impl, world.mesh[mesh_dim], world.device)
    compilation = Compilation(partial(ready_of, program, place), backend, passes == BOTH, place)
    counters = partial(counted, compilation)

    def run() -> list[Tensor]:
        with caches_off():
            return compilation.call()

    reset = torch._dynamo.reset
    if call == CACHED:
        compilation.start(call)
        run()  # compiles, and what is called later enters no compiler
        return Workload(compilation.call, None, compilation.check, counters, close=reset)

    def before() -> None:
        with caches_off():
            compilation.start(call)

    def check() -> str | None:
        before()  # another impl's sample may have reset Dynamo since
        with caches_off():
            return compilation.check()

    return Workload(run, before, check, counters, close=reset)


def variants(options: RunOptions, name: str) -> Iterator[tuple[str, str, str]]:
    """(backend, pass, call). A quick run times compiling with aot_eager and forward only."""
    for at in itertools.product(BACKENDS, (FORWARD, BOTH), (CACHED, FIRST, RECOMPILED)):
        backend, passes, call = at
        trained = passes == FORWARD or name == "mlp"
        if not options.quick or (trained and (call == CACHED or (backend, passes) == (BACKENDS[0], FORWARD))):
            yield at


@suite("compile", world="ranks", by_default=False, help=SUITES["compile"], impl_s=(2.3, 1.5))
def compiled(options: RunOptions) -> Iterator[Case]:
    programs: list[tuple[str, str, CompiledOp | str]] = [(op.name, op.placements, op) for op in OPS]
    programs += [(name, "", name) for name in BLOCKS]
    compile_samples = COMPILE_SAMPLES_QUICK if options.quick else COMPILE_SAMPLES
    for mesh_dim, n in shared_dims(options):
        for name, placements, program in programs:
            if options.quick and (name, placements) not in QUICK:
                continue
            where: dict[str, Param] = {"placements": placements, "mesh_dim": mesh_dim, "ranks": n}
            for backend, passes, call in variants(options, name):
                build = partial(build_impl, program, mesh_dim, passes, backend, call)
                yield Case(
                    name=name,
                    params=where | {"backend": backend, "pass": passes, "call": call},
                    build={impl: partial(build, impl) for impl in ("core", "torch", "local")},
                    clock="host",
                    calls_per_sample=CALLS_PER_SAMPLE if call == CACHED else 1,
                    samples=None if call == CACHED else compile_samples,
                    warmup_calls=WARMUP_CALLS if call == CACHED else 1,
                )
