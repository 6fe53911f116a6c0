"""torch.compile with DTensors: host time of a compiled call, and compile time.

    core    dtbench_core
    torch   torch.distributed.tensor
    local   compiled plain torch on this rank's shards, without communication: the floor

A **cached** call runs an existing graph. A **first** call compiles: Dynamo is reset before each, and the graph caches
(FX, AOTAutograd, inductor) are off. Kernels that the C++ compiler has already built stay on disk, because its time does
not depend on the library. A **recompiled** call finds the graph of another placement (ops) or another batch size
(from_to_local and blocks) and compiles again. With a backward pass, both graphs are compiled.

Counters describe the graphs that AOTAutograd passes to a backend: `graph_breaks`, `graphs` (forward and backward) and
`collectives`. Shards are small, so a call's time is host time plus the latency of the collectives. Outputs and
gradients are compared with plain torch on full tensors.
"""

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

from dtbench.suite import Case, RunOptions, Skip, Workload, World, suite
from dtbench_suites import SUITES
from dtbench_suites.data import (
    BEFORE_213,
    Place,
    dims_with_several_ranks,
    silence_torch,
    skip_cuda_gathers_on_gloo,
)
from dtbench_suites.tensor_parallel import (
    FORWARD,
    FORWARD_BACKWARD,
    MODELS,
    compare,
    parallelize,
    result_names,
    run_pass,
)

BACKENDS = ("aot_eager", "inductor")
CACHED, FIRST, RECOMPILED = "cached", "first", "recompiled"
# Chosen as in the dispatch suite.
CALLS_PER_SAMPLE = 10
WARMUP_CALLS = 10
# Samples of first and recompiled calls, which take tenths of a second to seconds.
COMPILE_SAMPLES, COMPILE_SAMPLES_QUICK = 5, 2
# float32; the arithmetic is the same, but in another order and, with inductor, fused.
RTOL = 1e-4
# Cases of a quick run: an op without communication, one with, from_local and to_local, and a block.
QUICK = (("add", "S(0),S(0)"), ("redistribute", "S(0)->R"), ("from_to_local", "S(0)"), ("mlp", ""))

# ---- compiled programs: ops on DTensors, and parallel blocks of a transformer ----

# Shape of each rank's shard: small, so that arithmetic takes hardly any time.
ROWS, COLS = 4, 8
# Batch, positions, and width per rank: one head each
BATCH, SEQ, WIDTH = 2, 8, 16

Shapes = tuple[tuple[int, ...], ...]
Function = Callable[..., Any]


@dataclass(frozen=True)
class CompiledOp:
    """A function to compile, with its inputs.

    Attributes:
        placements: of the inputs; after "->" that of the output, if needed to distinguish cases.
        shapes: (ranks, rows per shard) -> shapes of the full inputs.
        make: place -> the function.
        plain: the function on full tensors.
        compiled_before: the placements that it is compiled for before a recompilation.
        converts: whether it takes and returns plain local tensors, with the placement of the first input.
    """

    name: str
    placements: str
    shapes: Callable[[int, int], Shapes]
    make: Callable[[Place], Function]
    plain: Function
    compiled_before: str
    converts: bool = False


def by_rows(inputs: int) -> Callable[[int, int], Shapes]:
    return lambda n, k: ((n * k, n * COLS),) * inputs


def plain_function(fn: Function) -> tuple[Callable[[Place], Function], Function]:
    return lambda place: fn, fn


def chain(x: Tensor) -> Tensor:
    return (((x * 2 + 1) * x).sin() * x + x) * 0.5


def make_reduced_product(place: Place) -> Function:
    """Returns a matrix product whose Partial result is redistributed to Replicate."""
    replicate = make_redistribute("R", place)
    return lambda x, y: replicate(x @ y)


def make_redistribute(text: str, place: Place) -> Function:
    """Returns a redistribution to the placement `text`; for the impl "local", a copy."""
    if place.impl == "local":
        return torch.clone
    placements = place.placements(text)  # made outside the compiled function
    return lambda x: x.redistribute(placements=placements)


def make_conversion(place: Place) -> Function:
    """Returns from_local, a chain of ops, and to_local as one function."""
    if place.impl == "local":
        return chain
    from_local, mesh, placements = place.api.DTensor.from_local, place.mesh, place.placements("S(0)")
    fn: Function = chain
    return lambda x: fn(from_local(x, mesh, placements, run_check=False)).to_local()


OPS = (
    CompiledOp("add", "S(0),S(0)", by_rows(2), *plain_function(torch.add), "S(1),S(1)"),
    CompiledOp("mul_chain", "S(0)", by_rows(1), *plain_function(chain), "S(1)"),
    CompiledOp("softmax", "S(0)", by_rows(1), *plain_function(lambda x: x.softmax(1)), "R"),
    CompiledOp("softmax", "S(1)", by_rows(1), *plain_function(lambda x: x.softmax(1)), "S(0)"),
    CompiledOp(
        "layer_norm",
        "S(0),R,R",
        lambda n, k: ((n * k, COLS), (COLS,), (COLS,)),
        *plain_function(lambda x, weight, bias: F.layer_norm(x, (COLS,), weight, bias)),
        "R,R,R",
    ),
    CompiledOp(
        "mm", "R,S(1)", lambda n, k: ((n * k, COLS), (COLS, n * COLS)), *plain_function(torch.mm), "S(0),R"
    ),
    CompiledOp(
        "linear",
        "R,S(0),S(0)",
        lambda n, k: ((2, n * k, COLS), (n * COLS, COLS), (n * COLS,)),
        *plain_function(F.linear),
        "S(1),R,R",
    ),
    CompiledOp(
        "mm_reduced",
        "S(1),S(0)",
        lambda n, k: ((k, n * COLS), (n * COLS, COLS)),
        make_reduced_product,
        torch.mm,
        "R,R",
    ),
    CompiledOp("redistribute", "S(0)->R", by_rows(1), partial(make_redistribute, "R"), torch.clone, "S(1)"),
    CompiledOp(
        "redistribute", "S(0)->S(1)", by_rows(1), partial(make_redistribute, "S(1)"), torch.clone, "R"
    ),
    CompiledOp("from_to_local", "S(0)", by_rows(1), make_conversion, chain, "", converts=True),
)
BLOCKS = ("mlp", "attention")
COLUMNS = ("up_proj", "wq", "wk", "wv")  # layers with ColwiseParallel; all others have RowwiseParallel


@dataclass(frozen=True)
class PreparedCall:
    """A function to compile with its tensors and expected results.

    Attributes:
        leaves: the tensors to differentiate by.
        expected: (whether with gradients) -> output and gradients, of full tensors or, for "local", of the shards.
        names: the names of output and gradients, for messages.
        plain_part: the placement of plain tensors among the results.
    """

    fn: Function
    inputs: tuple[Tensor, ...]
    leaves: tuple[Tensor, ...]
    expected: Callable[[bool], list[Tensor]]
    names: Sequence[str]
    plain_part: str = "R"


def random_tensors(shapes: Sequence[tuple[int, ...]], device: torch.device) -> list[Tensor]:
    """Returns full tensors, equal on all ranks."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def results_of(
    fn: Function, inputs: Sequence[Tensor], leaves: Sequence[Tensor], backward: bool
) -> list[Tensor]:
    """Returns the output and, with a backward pass, the gradients of its sum."""
    return run_pass(fn, inputs, leaves, (lambda out: torch.ones_like(out.detach())) if backward else None)


def prepare_op(op: CompiledOp, place: Place, rows: int = ROWS, placements: str = "") -> PreparedCall:
    full = random_tensors(op.shapes(place.mesh.size(), rows), place.device)
    texts = (placements or op.placements).split("->")[0].split(",")
    local = place.impl == "local"
    put = place.part if op.converts else place.put
    inputs = [put(t, text).detach().requires_grad_() for t, text in zip(full, texts, strict=True)]
    reference_inputs = [t.requires_grad_() for t in ([t.detach().clone() for t in inputs] if local else full)]
    return PreparedCall(
        op.make(place),
        tuple(inputs),
        tuple(inputs),
        expected=lambda backward: results_of(op.plain, reference_inputs, reference_inputs, backward),
        names=("the output", *(f"the gradient of input {i}" for i in range(len(inputs)))),
        plain_part=texts[0] if op.converts and not local else "R",
    )


def prepare_block(name: str, place: Place, batch: int = BATCH) -> PreparedCall:
    """Prepares a parallel block; for "local", a plain block with this rank's shard of each weight."""
    n, device = place.mesh.size(), place.device
    with torch.random.fork_rng(devices=[]), device:
        torch.manual_seed(0)
        model, reference = (MODELS[name](n * WIDTH, n) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    (x,) = random_tensors([(batch, SEQ, n * WIDTH)], device)
    parallel: nn.Module = model
    if place.impl == "local":
        keep_parts(model, place)
        keep_parts(reference, place)
    else:
        parallel = parallelize(place.impl, model, place.mesh)
    sharded_input, reference_input = (x.clone().requires_grad_() for _ in range(2))
    leaves = [reference_input, *reference.parameters()]
    return PreparedCall(
        lambda x: parallel(x),
        (sharded_input,),
        (sharded_input, *parallel.parameters()),
        expected=lambda backward: results_of(reference, [reference_input], leaves, backward),
        names=result_names(reference),
    )


def keep_parts(model: nn.Module, place: Place) -> None:
    """Replaces each weight by this rank's shard."""
    for name, module in model.named_children():
        for kind, parameter in [*module.named_parameters()]:
            if name in COLUMNS or kind == "weight":
                part = place.part(parameter.detach(), "S(0)" if name in COLUMNS else "S(1)")
                setattr(module, kind, nn.Parameter(part))


# ---- compilation ----


@dataclass
class Compilation:
    """A program compiled by `backend` on this rank.

    Attributes:
        make: returns the program; given True, the variant that is compiled before a recompilation.
        backward: whether gradients are computed, too.
    """

    make: Callable[[bool], PreparedCall]
    backend: Any
    backward: bool
    place: Place
    compiled: Function = field(init=False)
    prepared: PreparedCall = field(init=False)

    def start(self, call: str) -> None:
        """Prepares a call: for a first call, resets Dynamo; for a recompiled one, also compiles the other variant."""
        if call != CACHED:
            torch._dynamo.reset()
        first_program = self.make(call == RECOMPILED)
        self.prepared = self.make(False) if call == RECOMPILED else first_program
        self.compiled = torch.compile(with_own_code(first_program.fn), backend=self.backend)
        if call == RECOMPILED:
            results_of(self.compiled, first_program.inputs, first_program.leaves, self.backward)

    def call(self) -> list[Tensor]:
        return results_of(self.compiled, self.prepared.inputs, self.prepared.leaves, self.backward)

    def check(self) -> str | None:
        part, want = self.prepared.plain_part, self.prepared.expected(self.backward)
        if part != "R":
            want = [self.place.part(full, part) for full in want]
        return compare(self.prepared.names, self.call(), want, RTOL)


def with_own_code(fn: Function) -> Function:
    """Returns `fn` with a new code object, because Dynamo caches graphs and guards per code object."""

    def called(*inputs: Tensor) -> Any:
        return fn(*inputs)

    return types.FunctionType(
        called.__code__.replace(), called.__globals__, "called", None, called.__closure__
    )


class CountingBackend:
    """A backend that counts graphs and collectives, and runs the graphs unchanged."""

    def __init__(self) -> None:
        self.graphs = self.collectives = 0

    def __call__(self, module: torch.fx.GraphModule, example: Sequence[Any]) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch._aot_autograd.utils import make_boxed_func

        def count_graph(graph: torch.fx.GraphModule, example: Sequence[Any]) -> Any:
            self.graphs += 1
            self.collectives += sum(map(is_collective, graph.graph.nodes))
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=count_graph, bw_compiler=count_graph)(module, example)


def is_collective(node: torch.fx.Node) -> bool:
    """Returns whether a node of a graph is a collective; waiting for one does not count."""
    space, _, name = str(node.target).partition(".")
    return space in ("_c10d_functional", "c10d", "_dtensor") and not name.startswith("wait_tensor")


@contextlib.contextmanager
def caches_off() -> Iterator[None]:
    """Turns off the graph caches, and inductor's worker processes, of which each rank would start several."""
    import torch._functorch.config as aot
    import torch._inductor.config as inductor

    with (
        torch._dynamo.config.patch(automatic_dynamic_local_pgo=False, automatic_dynamic_remote_pgo=False),
        aot.patch(enable_autograd_cache=False),
        inductor.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1),
    ):
        yield


@caches_off()
def graph_counters(compilation: Compilation) -> dict[str, float]:
    """Compiles the call again and returns its counters. All ranks must call it together."""
    counter = CountingBackend()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    prepared = compilation.prepared
    compiled = torch.compile(with_own_code(prepared.fn), backend=counter)
    results_of(compiled, prepared.inputs, prepared.leaves, compilation.backward)
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.reset()
    return {"graph_breaks": breaks, "graphs": counter.graphs, "collectives": counter.collectives}


def prepare(program: CompiledOp | str, place: Place, first_version: bool) -> PreparedCall:
    """Prepares a program; with `first_version`, the variant that is compiled before a recompilation."""
    if isinstance(program, str):
        return prepare_block(program, place, BATCH + 1 if first_version else BATCH)
    if first_version and (program.converts or place.impl == "local"):
        return prepare_op(program, place, ROWS + 1)
    return prepare_op(program, place, placements=program.compiled_before if first_version else "")


def build_impl(
    program: CompiledOp | str, mesh_dim: str, passes: str, backend: str, call: str, impl: str, world: World
) -> Workload:
    import torch._dynamo.utils

    if impl == "core" and BEFORE_213 and (isinstance(program, str) or program.converts):
        raise Skip("Dynamo does not support a DeviceMesh of the core before torch 2.13")
    if impl != "local":
        skip_cuda_gathers_on_gloo(world.mesh[mesh_dim])
    silence_torch()
    place = Place(impl, world.mesh[mesh_dim], world.device)
    compilation = Compilation(partial(prepare, program, place), backend, passes == FORWARD_BACKWARD, place)
    counters = partial(graph_counters, compilation)

    @caches_off()
    def run() -> list[Tensor]:
        return compilation.call()

    reset = torch._dynamo.reset
    if call == CACHED:
        compilation.start(call)
        run()  # compiles, so that the timed calls do not
        return Workload(compilation.call, None, compilation.check, counters, close=reset)

    @caches_off()
    def reset_and_prepare() -> None:
        compilation.start(call)

    @caches_off()
    def check() -> str | None:
        reset_and_prepare()  # a sample of another impl may have reset Dynamo
        return compilation.check()

    return Workload(run, reset_and_prepare, check, counters, close=reset)


def variants(options: RunOptions, name: str) -> Iterator[tuple[str, str, str]]:
    """Yields (backend, pass, call). A quick run measures compile time of forward with aot_eager only."""
    for backend, passes, call in itertools.product(
        BACKENDS, (FORWARD, FORWARD_BACKWARD), (CACHED, FIRST, RECOMPILED)
    ):
        trained = passes == FORWARD or name == "mlp"
        if not options.quick or (trained and (call == CACHED or (backend, passes) == (BACKENDS[0], FORWARD))):
            yield backend, passes, call


@suite("compile", world="ranks", by_default=False, help=SUITES["compile"], impl_s=(2.3, 1.5))
def compiled(options: RunOptions) -> Iterator[Case]:
    programs: list[tuple[str, str, CompiledOp | str]] = [
        *((op.name, op.placements, op) for op in OPS),
        *((name, "", name) for name in BLOCKS),
    ]
    compile_samples = COMPILE_SAMPLES_QUICK if options.quick else COMPILE_SAMPLES
    for mesh_dim, n in dims_with_several_ranks(options):
        for name, placements, program in programs:
            if options.quick and (name, placements) not in QUICK:
                continue
            for backend, passes, call in variants(options, name):
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
                    build={
                        impl: partial(build_impl, program, mesh_dim, passes, backend, call, impl)
                        for impl in ("core", "torch", "local")
                    },
                    clock="host",
                    calls_per_sample=CALLS_PER_SAMPLE if call == CACHED else 1,
                    samples=None if call == CACHED else compile_samples,
                    warmup_calls=WARMUP_CALLS if call == CACHED else 1,
                )
