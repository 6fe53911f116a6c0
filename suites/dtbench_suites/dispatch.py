"""Host latency of one op on a DTensor: what finding, running and wrapping it costs the calling thread.

The world has 8 ranks of which 7 are simulated (torch's fake process group), so no time passes in
communication, and a local tensor holds 16 values, so none passes in arithmetic.

    core     dtbench_core
    torch    torch.distributed.tensor
    local    the same op on the plain local tensors: the floor
    wrapped  the least that a tensor class written in Python can take: entering `__torch_function__`, the same plain op,
             a wrapper for each tensor that it gives; `core` less `wrapped` is what can still be saved in Python.
             Where autograd records the call: `__torch_function__`, torch's autograd kernel, `__torch_dispatch__` for
             each op below it, the plain op, the wrappers. A class with an autograd function of its own can be below
             that: `core` has one for `linear_3d`

**forward** calls are on tensors that need no gradient. **forward+requires_grad** are the same calls as a training step
makes them: autograd records them. **forward+backward** are such a call and its gradients.

**cached** calls find the decision of the call before; a **first** call sees shapes that were never seen,
so the decision has to be made. **busy**, on a GPU, are cached calls while the stream is still at earlier work, as in a
training step; the others begin with an idle one. On the 2x4 mesh both mesh dims hold a tensor the same way: S(0) there
means [Shard(0), Shard(0)], and the local tensors are those of the 1-D mesh of 8.

Counters say what is held in memory: `bytes_per_tensor` beside `from_local` of one local tensor, `bytes_per_decision`
beside the first calls of `add` in a run that is not quick.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import math
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtbench.stats.dispatch_headline import is_headline
from dtbench.suite import Case, Param, RunOptions, Skip, Workload, World, suite
from dtbench_core.op_types import Args, Call, Value
from dtbench_core.torch_compat import DisableTorchFunction, kernel_of
from dtbench_suites import SUITES
from dtbench_suites.data import BEFORE_213, Place, hush_torch, mismatch, shard_of
from dtbench_suites.dispatch_programs import (
    BACKWARD,
    EVERY_PASS,
    FORWARD,
    PROGRAMS,
    REQUIRES_GRAD,
    WORLD,
    TimedProgram,
    build_program,
)

MESHES: tuple[tuple[int, ...], ...] = ((8,), (2, 4))
ROWS = 4  # of the local tensor, cached calls; its other dim has 4 too
# A sample has to outlast the clock's reading (0.05 us) and stay below what the scheduler interrupts
# (milliseconds): 0.1 to 0.5 ms at the 5 to 50 us that a cached call takes, 20 to 200 us with its backward.
CALLS_PER_SAMPLE = {FORWARD: 10, REQUIRES_GRAD: 10, BACKWARD: 4}
# Python, the allocator and torch's own caches are steady after about 10 calls.
WARMUP_CALLS = 20
# Ops whose host latency is also measured behind a busy stream: one kernel, one with two inputs, a view (no kernel), a
# matmul, a reduction.
BUSY = frozenset({"add", "relu", "view", "mm", "sum_dim0"})
# A first call costs milliseconds and its shape can be used once only.
FIRST_SAMPLES, FIRST_SAMPLES_QUICK, FIRST_WARMUP_CALLS = 7, 5, 2
# Over the ops of a report's headline, some seconds together: of eight runs on two busy cores with one pass one was 40 %
# off.
HEADLINE_PASSES = 3
# Of the results' largest value; the same arithmetic on both sides, in float32.
RTOL = 1e-5

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TimedOp:
    """An op and the placements of its inputs.

    placements: of each input; "0-dim" is a plain tensor without dims. shapes: of the full inputs, for
    local tensors of k rows. result: the placement of what comes out. floor: the placements whose local
    tensors the plain op takes, where they are others.
    """

    name: str
    placements: str
    shapes: Callable[[int], Shapes]
    fn: Callable[..., Any]
    result: str
    floor: str = ""
    backward: bool = True

    def sources(self, impl: str) -> list[str]:
        """The placement of each input, as `impl` takes it."""
        return ((self.floor if impl == "local" else "") or self.placements).split(",")


def rows(inputs: int = 1) -> Callable[[int], Shapes]:
    """So many inputs of (8k, 4)."""
    return lambda k: ((WORLD * k, 4),) * inputs


def normed(k: int) -> Shapes:  # x, weight, bias
    return (WORLD * k, 4), (4,), (4,)


OPS = (
    TimedOp("add", "S(0),S(0)", rows(2), torch.add, "S(0)"),
    TimedOp("add", "S(0),R", rows(2), torch.add, "S(0)", floor="S(0),S(0)"),
    TimedOp("relu", "S(0)", rows(), torch.relu, "S(0)"),
    TimedOp("mul_scalar", "S(0)", rows(), lambda x: x * 2.0, "S(0)"),
    TimedOp("add_0dim", "S(0),0-dim", lambda k: ((WORLD * k, 4), ()), torch.add, "S(0)"),
    TimedOp("view", "S(0)", rows(), lambda x: x.view(-1, 2, 2), "S(0)"),
    TimedOp("transpose", "S(0)", rows(), lambda x: x.transpose(0, 1), "S(1)"),
    TimedOp("slice", "S(0)", rows(), lambda x: x[:, 1:3], "S(0)"),
    TimedOp("mm", "R,S(1)", lambda k: ((k, 4), (4, WORLD * 4)), torch.mm, "S(1)"),
    TimedOp("mm", "S(1),S(0)", lambda k: ((k, WORLD * 4), (WORLD * 4, 4)), torch.mm, "P"),
    # bias, x, weight
    TimedOp("addmm", "R,S(0),R", lambda k: ((4,), (WORLD * k, 4), (4, 4)), torch.addmm, "S(0)"),
    # x, weight, bias: shared by batch, as in data parallelism; by output features, as Colwise does
    TimedOp("linear_3d", "S(0),R,R", lambda k: ((WORLD * k, 2, 4), (4, 4), (4,)), F.linear, "S(0)"),
    TimedOp(
        "linear_3d", "R,S(0),S(0)", lambda k: ((k, 2, 4), (WORLD * 4, 4), (WORLD * 4,)), F.linear, "S(2)"
    ),
    TimedOp("sum_dim0", "S(0)", rows(), lambda x: x.sum(0), "P"),
    TimedOp("sum_dim1", "S(0)", rows(), lambda x: x.sum(1), "S(0)"),
    TimedOp("mean_dim0", "S(0)", rows(), lambda x: x.mean(0), "P(avg)"),
    TimedOp("mean_dim1", "S(0)", rows(), lambda x: x.mean(1), "S(0)"),
    TimedOp("softmax", "S(0)", rows(), lambda x: torch.softmax(x, 1), "S(0)"),
    TimedOp("layer_norm", "S(0),R,R", normed, lambda x, w, b: F.layer_norm(x, (4,), w, b), "S(0)"),
    TimedOp("cat", "S(0),S(0)", rows(2), lambda x, y: torch.cat((x, y), 1), "S(0)"),
    TimedOp("split", "S(0)", rows(), lambda x: torch.split(x, 2, 1), "S(0)"),
    TimedOp("add_", "S(0),S(0)", rows(2), lambda x, y: x.add_(y), "S(0)", backward=False),
    TimedOp("detach", "S(0)", rows(), lambda x: x.detach(), "S(0)", backward=False),
    # The way in and out. Their floor is another view of the same tensor.
    TimedOp("from_local", "S(0)", rows(), lambda x: x.view_as(x), "S(0)"),
    TimedOp("to_local", "S(0)", rows(), lambda x: x.view_as(x), "S(0)"),
)


@dataclass(frozen=True)
class PlacedOp:
    """An op ready to be called on rank 0."""

    op: TimedOp
    at: Place
    pass_: str

    def crosses(self, name: str) -> bool:
        """Whether this is from_local or to_local of a library: a plain tensor on the one side."""
        return self.at.impl != "local" and self.op.name == name

    def function(self) -> Callable[..., Any]:
        """What is timed; the inputs are its arguments."""
        if self.crosses("to_local"):
            return lambda x: x.to_local()
        if self.crosses("from_local"):
            from_local, mesh, placed = self.at.api.DTensor.from_local, self.at.mesh, self.at.on_all("S(0)")
            return lambda x: from_local(x, mesh, placed, run_check=False)
        return self.op.fn

    def full_inputs(self, k: int) -> list[Tensor]:
        """Small whole numbers, another run of them for each input."""
        results = []
        for i, shape in enumerate(self.op.shapes(k)):
            values = torch.arange(i, i + math.prod(shape), device=self.at.device, dtype=torch.float32)
            results.append((values % 7 - 3).view(shape))
        return results

    def call(self, k: int) -> Callable[[], Any]:
        """One call on inputs of its own, for local tensors of k rows; gives outputs, or (outputs, gradients)."""
        full = self.full_inputs(k)
        inputs = [self.at.put(t, text) for t, text in zip(full, self.op.sources(self.at.impl), strict=True)]
        if self.crosses("from_local"):
            inputs = [x.to_local() for x in inputs]
        function = self.function()
        if self.pass_ == FORWARD:
            return partial(function, *inputs)
        wanted = [x.requires_grad_() for x in inputs if x.ndim]
        if self.pass_ == REQUIRES_GRAD:
            return partial(function, *inputs)
        # An op whose result is Partial passes the gradient of the whole to each of its terms.
        text = "R" if self.op.result.startswith("P") else self.op.result
        cotangents = [self.at.put(torch.ones_like(t), text) for t in as_tuple(self.op.fn(*full))]
        if self.crosses("to_local"):
            cotangents = [c.to_local() for c in cotangents]

        def forward_backward() -> tuple[Any, Any]:
            out = function(*inputs)
            return out, torch.autograd.grad(out, wanted, cotangents)

        return forward_backward

    def check(self) -> str | None:
        """Compares rank 0's part of one call's results and gradients with plain torch on the full tensors."""
        called: Any = self.call(ROWS)()
        got, gradients = called if self.pass_ == BACKWARD else (called, ())
        inputs = [t.requires_grad_(self.pass_ != FORWARD and t.ndim > 0) for t in self.full_inputs(ROWS)]
        # An in-place op must not write to the leaf that its gradient would be asked of.
        want = as_tuple(self.op.fn(*inputs))
        terms: Sequence[Tensor] = ()  # of a Partial, rank 0's is the op on its local tensors
        if self.op.result.startswith("P"):
            sources = self.op.sources("local")
            parts = [shard_of(t, text, 0, WORLD) for t, text in zip(inputs, sources, strict=True)]
            terms = as_tuple(self.op.fn(*parts))
        for i, (g, w) in enumerate(zip(as_tuple(got), want, strict=True)):
            local = terms[i] if terms else shard_of(w, self.op.result, 0, WORLD)
            wrong = self.compare(g, w, local, self.op.result, f"output {i}")
            if g.requires_grad != w.requires_grad:
                wrong = f"output {i} has requires_grad={g.requires_grad}, expected {w.requires_grad}"
            if wrong:
                return wrong
        if self.pass_ == BACKWARD:
            wanted = [t for t in inputs if t.requires_grad]
            expected = torch.autograd.grad(want, wanted, [torch.ones_like(w) for w in want])
            return self.check_gradients(gradients, expected)
        return None

    def check_gradients(self, got: Sequence[Any], want: Sequence[Tensor]) -> str | None:
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            text = self.op.sources(self.at.impl)[i]
            if hasattr(g, "placements"):
                # A gradient may be placed otherwise than its tensor; a Partial one is not known by rank 0.
                first = g.placements[0]
                if any(p != first for p in g.placements) or first.is_partial():
                    continue
                text = f"S({first.dim})" if first.is_shard() else "R"
            elif self.at.impl == "local" and (self.op.result.startswith("P") or text == "R"):
                continue  # the floor's gradient is that of its own small problem, without the other ranks' terms
            wrong = self.compare(g, w, shard_of(w, text, 0, WORLD), text, f"gradient {i}")
            if wrong:
                return wrong
        return None

    def compare(self, got: Any, full: Tensor, local: Tensor, text: str, what: str) -> str | None:
        """Placements and global shape of a DTensor, and its local values."""
        if hasattr(got, "placements"):
            want = self.at.on_all(text)
            if list(got.placements) != want or got.shape != full.shape:
                return f"{what} is {got.placements} {tuple(got.shape)}, expected {want} {tuple(full.shape)}"
            got = got.to_local()
        elif self.at.impl != "local" and self.op.name not in ("to_local", "from_local"):
            return f"{what} is a plain {type(got).__name__}, expected a DTensor"
        return mismatch(got, local, what, RTOL)


class Least(Tensor):
    """What any class of tensors must do in Python: its own function is called, runs the op, wraps what comes out."""

    local: Call
    in_place: bool

    @classmethod
    def __torch_function__(cls, func: Call, types: Value, args: Args = (), kwargs: Value = None) -> Value:
        tensor = cls.local()
        if cls.in_place:
            return args[0]
        return tuple(map(cls.wrap, tensor)) if tensor.__class__ is tuple else cls.wrap(tensor)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Call, types: Value, args: Args = (), kwargs: Value = None
    ) -> Value:
        raise AssertionError(f"{func} got below __torch_function__: wrappers of this class hold nothing")

    @classmethod
    def wrap(cls, tensor: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, tensor.shape, tensor.stride())


_kernel_of = functools.cache(kernel_of)


class LeastRecorded(Tensor):
    """What any class must do in Python where autograd records the call: torch's kernels come back to its
    `__torch_dispatch__`, which runs each op on the tensors that the wrappers hold, and wraps what comes out."""

    __slots__ = ("held",)
    held: Tensor

    @classmethod
    def __torch_function__(cls, func: Call, types: Value, args: Args = (), kwargs: Value = None) -> Value:
        with DisableTorchFunction():
            return func(*args, **kwargs) if kwargs else func(*args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Value, types: Value, args: Args = (), kwargs: Value = None
    ) -> Value:
        held = [
            a.held
            if a.__class__ is cls
            else [t.held for t in a]
            if a.__class__ is list and a[0].__class__ is cls
            else a
            for a in args
        ]
        result = _kernel_of(op)(*held, **kwargs) if kwargs else _kernel_of(op)(*held)
        return tuple(map(cls.wrap, result)) if result.__class__ is tuple else cls.wrap(result)

    @classmethod
    def wrap(cls, tensor: Tensor, requires_grad: bool = False) -> Tensor:
        # By position, as it is fastest: storage offset, memory format, dtype, layout, device, pinned.
        placed = None, None, tensor.dtype, torch.strided, tensor.device, False
        wrapper: Any = Tensor._make_wrapper_subclass(
            cls, tensor.shape, tensor.stride(), *placed, requires_grad
        )
        wrapper.held = tensor
        return wrapper  # type: ignore[no-any-return]


def wrapped(setup: PlacedOp) -> Workload:
    """The call of `setup`, whose tensors are plain, through a class of tensors."""
    op, texts = setup.op, setup.op.sources("local")
    inputs = [setup.at.put(t, text) for t, text in zip(setup.full_inputs(ROWS), texts, strict=True)]
    local = partial(op.fn, *inputs)
    kind: type[Tensor] = LeastRecorded
    if setup.pass_ == FORWARD:
        kind = type("Least", (Least,), {"local": local, "in_place": op.name.endswith("_")})
        entered = [t.as_subclass(kind) for t in inputs]
    else:
        entered = [LeastRecorded.wrap(t, requires_grad=True) if t.ndim else t for t in inputs]

    def check() -> str | None:
        got, want = as_tuple(op.fn(*entered)), as_tuple(local())
        with DisableTorchFunction():
            shown = [(type(t), t.shape, t.requires_grad) for t in got]
        if shown != [(kind, t.shape, setup.pass_ != FORWARD) for t in want]:
            return f"gives {shown}, expected {[t.shape for t in want]}, each wrapped"
        return setup.check()

    return Workload(run=partial(op.fn, *entered), check=check)


def as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


# Rows of first calls, by impl and mesh: odd, so that flattening (k, 2, 4) to (2k, 4) meets no other op's.
_Fresh = defaultdict[tuple[str, tuple[int, ...]], Iterator[int]]
_fresh: _Fresh = defaultdict(lambda: itertools.count(ROWS + 1, 2))


def grown(make: Callable[[], object], count: int, name: str) -> dict[str, float]:
    """The resident bytes that each of `count` calls leaves, what it gives being kept.

    Memory that is free already would hide them: what Python's allocator has is taken by as many calls before, what
    glibc's has is given back (malloc_trim(3)). Other systems count nothing.
    """
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "malloc_trim"):
        return {}
    kept = [make() for _ in range(count)]
    gc.collect()
    libc.malloc_trim(0)
    before = resident_bytes()
    kept += [make() for _ in range(count)]
    gc.collect()
    after = resident_bytes()
    del kept
    return {name: (after - before) / count}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()  # proc_pid_statm(5)


def build_impl(
    op: TimedOp | TimedProgram,
    shape: tuple[int, ...],
    pass_: str,
    first: bool,
    quick: bool,
    impl: str,
    world: World,
) -> Workload:
    # Torch's DTensor had no strategy for the attention of CPUs, nor for a convolution that pads.
    lacking = ("conv2d", "attention") if world.device.type == "cpu" else ("conv2d",)
    if impl == "torch" and BEFORE_213 and op.name in lacking:
        raise Skip("before torch 2.13 torch's DTensor refuses it")
    hush_torch()
    at = Place("local" if impl == "wrapped" else impl, world.mesh_of(shape), world.device)
    if isinstance(op, TimedProgram):
        return build_program(op, at, pass_)
    setup = PlacedOp(op, at, pass_)
    if impl == "wrapped":
        return wrapped(setup)
    ready = setup.call(ROWS)
    weighed = len(shape) == 1 and pass_ == FORWARD
    if not first:
        # 0.5 KiB or more each: thousands of pages.
        counters = partial(grown, ready, 40_000, "bytes_per_tensor")
        weighed = weighed and op.name == "from_local"
        return Workload(ready, None, setup.check, counters if weighed else None)

    def before() -> None:
        nonlocal ready
        ready = setup.call(next(_fresh[impl, shape]))

    def decide() -> None:
        before()
        ready()

    # Torch takes three seconds for a thousand.
    counters = partial(grown, decide, 500, "bytes_per_decision")
    weighed = weighed and not quick and op.name == "add"
    return Workload(lambda: ready(), before, setup.check, counters if weighed else None)


def case_of(
    options: RunOptions,
    op: TimedOp | TimedProgram,
    shape: tuple[int, ...],
    pass_: str,
    call: str,
    floor: bool,
) -> Case:
    first = call == "first"
    build = partial(build_impl, op, shape, pass_, first, options.quick)
    impls = ["core", "torch", "local"][: 3 if floor else 2]
    if floor and pass_ != BACKWARD and isinstance(op, TimedOp) and op.name not in ("from_local", "to_local"):
        impls.append("wrapped")
    mesh = "x".join(map(str, shape))
    params: dict[str, Param] = {"placements": op.placements, "mesh": mesh, "pass": pass_, "call": call}
    return Case(
        name=op.name,
        params=params,
        build={impl: partial(build, impl) for impl in impls},
        clock="host",
        busy=call == "busy",
        calls_per_sample=1 if first else CALLS_PER_SAMPLE[pass_],
        samples=None if not first else FIRST_SAMPLES_QUICK if options.quick else FIRST_SAMPLES,
        warmup_calls=FIRST_WARMUP_CALLS if first else WARMUP_CALLS,
        passes=HEADLINE_PASSES if is_headline(op.name, params) else 1,
    )


def variants(options: RunOptions, shape: tuple[int, ...], op: TimedOp) -> list[tuple[str, str]]:
    """(pass, call) to measure. A first call that autograd records makes the decisions of one that it does not. A quick
    run leaves out what takes longest: on a 2-D mesh all but cached forward calls, and the first calls of backward
    passes."""
    passes = EVERY_PASS if op.backward else (FORWARD,)
    every = [(p, c) for p in passes for c in ("cached", "first") if (p, c) != (REQUIRES_GRAD, "first")]
    if options.device_type == "cuda" and len(shape) == 1 and op.name in BUSY:
        every.insert(1, (FORWARD, "busy"))
    if not options.quick:
        return every
    if len(shape) > 1:
        return [(FORWARD, "cached")]
    return [v for v in every if v != (BACKWARD, "first")]


# What a quick run leaves out takes torch half a minute, which under --budget the others have first.
SLOW = frozenset(program.name for program in PROGRAMS if not program.quick)


@suite(
    "dispatch",
    world="simulated",
    help=SUITES["dispatch"],
    impl_s=(0.07, 0.028),
    budget_priority=lambda case: case.name not in SLOW,
)
def dispatch(options: RunOptions) -> Iterator[Case]:
    for shape, program in itertools.product(MESHES, PROGRAMS):
        if (program.flat and len(shape) > 1) or (options.quick and not program.quick):
            continue
        # A quick run leaves the backward passes out; on a 2-D mesh, those that autograd records too.
        for pass_ in program.passes[: 3 - len(shape)] if options.quick else program.passes:
            yield case_of(options, program, shape, pass_, "cached", program.local)
    for shape, op in itertools.product(MESHES, OPS):
        for pass_, call in variants(options, shape, op):
            yield case_of(options, op, shape, pass_, call, call != "first")
