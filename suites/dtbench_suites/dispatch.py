"""Host latency of one op on a DTensor: the time that the calling thread spends in dispatch.

7 of the 8 ranks are simulated by torch's fake process group, so communication takes no time. A local tensor has 16
elements, so arithmetic takes hardly any.

    core     dtbench_core
    torch    torch.distributed.tensor
    local    the same op on the plain local tensors: the floor
    wrapped  the minimum for a tensor subclass written in Python: `__torch_function__`, the plain op, and one wrapper
             per output tensor. The time of `core` minus that of `wrapped` is what could still be saved in Python.
             If autograd records the call, the minimum is: `__torch_function__`, torch's autograd kernel,
             `__torch_dispatch__` of each op below it, the plain op, the wrappers. A subclass with its own
             autograd.Function can be faster than that: `core` has one for `linear_3d`

**forward** calls take tensors that do not require gradients. **forward+requires_grad** calls are recorded by autograd,
as in a training step. **forward+backward** calls also compute the gradients.

**cached** calls reuse the decision of an earlier call. A **first** call has new shapes, so the decision must be made.
A **second** call repeats a first one, so its decisions should be in the cache. The counter `decisions` of a second call
is the number of sharding decisions that were made again. Times do not show it: after a first call the CPU's caches are
cold, and a single call takes 1.2 to 8 times as long as the mean of ten cached ones.
**busy** calls (on a GPU) are cached calls while the stream still executes earlier work, as in a training step. All
other calls start with an idle stream. On the 2x4 mesh, a tensor has the same placement on both mesh dims: S(0) means
[Shard(0), Shard(0)], so the local tensors are those of the 1-D mesh of 8.

**repeated** calls are steps of AdamW in a row, with new gradients in each. Counters tell the Python objects and the
bytes that a step keeps in each quarter of the steps, and the types whose objects become more. `late_over_early` is the
median time of the last 20 steps over that of the first 20.

Counters measure memory: `bytes_per_tensor` in the cases of `from_local`, `bytes_per_decision` in the first calls of
`add` unless the run is quick.

The cases `dtensor_dispatch_*` are the eight of pytorch's own benchmarks (benchmarks/dynamo/pr_time_benchmarks), with
their names, shapes, placements and work, on a mesh of 256 simulated ranks. Their counter `instructions` is the number
of instructions of one call, the least of nine. It exists if the machine lets torch read a hardware counter: on Linux,
with a kernel.perf_event_paranoid of at most 2, and seldom in a virtual machine. Their floor is the same call on
plain local tensors; the cases that convert or communicate have none.
"""

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtbench.stats.dispatch_headline import is_headline
from dtbench.suite import Case, Param, RunOptions, Skip, Workload, World, suite
from dtbench_core import cache_info
from dtbench_core.op_types import Args, Call, Value
from dtbench_core.torch_compat import DisableTorchFunction, kernel_of
from dtbench_suites import SUITES
from dtbench_suites.data import BEFORE_213, Place, shard_of, silence_torch
from dtbench_suites.dispatch_programs import (
    BACKWARD,
    EVERY_PASS,
    FORWARD,
    PROGRAMS,
    PYTORCH_PROGRAMS,
    PYTORCH_RANKS,
    REQUIRES_GRAD,
    RTOL,
    WORLD,
    TimedProgram,
    build_program,
)
from dtbench_suites.memory import memory_per_call

MESHES: tuple[tuple[int, ...], ...] = ((8,), (2, 4))
ROWS = 4  # rows and columns of the local tensor in cached calls
# A sample must be long compared with a clock reading (0.05 us) and short compared with a scheduler tick
# (milliseconds). A cached call takes 5 to 50 us, with its backward 20 to 200 us.
CALLS_PER_SAMPLE = {FORWARD: 10, REQUIRES_GRAD: 10, BACKWARD: 4}
# Python, the allocator and torch's caches reach a steady state after about 10 calls.
WARMUP_CALLS = 20
# Ops that are also measured with a busy stream: two pointwise kernels, a view (no kernel), a matmul, a reduction.
BUSY = frozenset({"add", "relu", "view", "mm", "sum_dim0"})
# The values of the param `call`.
CACHED, FIRST, SECOND, BUSY_CALL, REPEATED = "cached", "first", "second", "busy", "repeated"
# A first call takes milliseconds, and its shape can be used only once.
FIRST_SAMPLES, FIRST_SAMPLES_QUICK, FIRST_WARMUP_CALLS = 7, 5, 2
# Passes over the ops of a report's headline, which take some seconds in all. With one pass, one of eight runs on two
# busy cores was 40 % off.
HEADLINE_PASSES = 3

Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class TimedOp:
    """An op and the placements of its inputs.

    Attributes:
        placements: one per input, separated by commas; "0-dim" is a plain tensor without dims.
        shapes: k -> shapes of the full inputs whose local tensors have k rows.
        result: the placement of the outputs.
        floor: placements for the inputs of the impl "local", if they differ from `placements`.
        backward: whether the op is also measured with gradients.
    """

    name: str
    placements: str
    shapes: Callable[[int], Shapes]
    fn: Callable[..., Any]
    result: str
    floor: str = ""
    backward: bool = True

    def input_placements(self, impl: str) -> list[str]:
        """Returns the placement of each input for `impl`."""
        return ((self.floor if impl == "local" else "") or self.placements).split(",")


def rows(inputs: int = 1) -> Callable[[int], Shapes]:
    """Returns the `shapes` of an op with that many inputs of shape (8k, 4)."""
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
    # inputs: bias, x, weight
    TimedOp("addmm", "R,S(0),R", lambda k: ((4,), (WORLD * k, 4), (4, 4)), torch.addmm, "S(0)"),
    # inputs: x, weight, bias. Sharded by batch as in data parallelism, then by output features as in ColwiseParallel
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
    # Conversions from and to local tensors. Their floor is a view of the same tensor.
    TimedOp("from_local", "S(0)", rows(), lambda x: x.view_as(x), "S(0)"),
    TimedOp("to_local", "S(0)", rows(), lambda x: x.view_as(x), "S(0)"),
)


@dataclass(frozen=True)
class PlacedOp:
    """An op with the place of its tensors and the pass to measure, called on rank 0."""

    op: TimedOp
    place: Place
    pass_: str

    def is_conversion(self, name: str) -> bool:
        """Returns whether the op is the library's conversion `name`: from_local or to_local."""
        return self.place.impl != "local" and self.op.name == name

    def function(self) -> Callable[..., Any]:
        """Returns the function to time, which takes the inputs as arguments."""
        if self.is_conversion("to_local"):
            return lambda x: x.to_local()
        if self.is_conversion("from_local"):
            from_local, mesh, placed = (
                self.place.api.DTensor.from_local,
                self.place.mesh,
                self.place.placements("S(0)"),
            )
            return lambda x: from_local(x, mesh, placed, run_check=False)
        return self.op.fn

    def full_inputs(self, k: int) -> list[Tensor]:
        """Returns full inputs of small integers, which differ between inputs."""
        options: dict[str, Any] = {"device": self.place.device, "dtype": torch.float32}
        return [
            (torch.arange(i, i + math.prod(shape), **options) % 7 - 3).view(shape)
            for i, shape in enumerate(self.op.shapes(k))
        ]

    def call(self, k: int) -> Callable[[], Any]:
        """Returns a call on new inputs whose local tensors have k rows.

        The call returns outputs or, in a forward+backward pass, (outputs, gradients).
        """
        full = self.full_inputs(k)
        inputs = [
            self.place.put(t, text)
            for t, text in zip(full, self.op.input_placements(self.place.impl), strict=True)
        ]
        if self.is_conversion("from_local"):
            inputs = [x.to_local() for x in inputs]
        function = self.function()
        if self.pass_ == FORWARD:
            return partial(function, *inputs)
        leaves = [x.requires_grad_() for x in inputs if x.ndim]
        if self.pass_ == REQUIRES_GRAD:
            return partial(function, *inputs)
        # The gradient of a Partial output is replicated: each of its terms has the gradient of the sum.
        text = "R" if self.op.result.startswith("P") else self.op.result
        cotangents = [self.place.put(torch.ones_like(t), text) for t in as_tuple(self.op.fn(*full))]
        if self.is_conversion("to_local"):
            cotangents = [c.to_local() for c in cotangents]

        def forward_backward() -> tuple[Any, Any]:
            out = function(*inputs)
            return out, torch.autograd.grad(out, leaves, cotangents)

        return forward_backward

    def check(self) -> str | None:
        """Compares rank 0's shards of results and gradients with plain torch on the full tensors."""
        called: Any = self.call(ROWS)()
        got, gradients = called if self.pass_ == BACKWARD else (called, ())
        inputs = [t.requires_grad_(self.pass_ != FORWARD and t.ndim > 0) for t in self.full_inputs(ROWS)]
        # In-place ops have no backward pass here: they must not write to a leaf that requires gradients.
        want = as_tuple(self.op.fn(*inputs))
        want_local = tuple(shard_of(w, self.op.result, 0, WORLD) for w in want)
        if self.op.result.startswith("P"):  # rank 0's terms of Partial outputs: the op on its local tensors
            placed = zip(inputs, self.op.input_placements("local"), strict=True)
            want_local = as_tuple(self.op.fn(*(shard_of(t, text, 0, WORLD) for t, text in placed)))
        for i, (g, w, local) in enumerate(zip(as_tuple(got), want, want_local, strict=True)):
            wrong = self.compare(g, w, local, self.op.result, f"output {i}")
            if g.requires_grad != w.requires_grad:
                wrong = f"output {i} has requires_grad={g.requires_grad}, expected {w.requires_grad}"
            if wrong:
                return wrong
        leaves, cotangents = [t for t in inputs if t.requires_grad], [torch.ones_like(w) for w in want]
        want_gradients = torch.autograd.grad(want, leaves, cotangents) if self.pass_ == BACKWARD else ()
        return self.check_gradients(gradients, want_gradients)

    def check_gradients(self, got: Sequence[Any], want: Sequence[Tensor]) -> str | None:
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            text = self.op.input_placements(self.place.impl)[i]
            if hasattr(g, "placements"):
                # A gradient may be placed unlike its tensor. Rank 0's term of a Partial gradient is not checked.
                first = g.placements[0]
                if any(p != first for p in g.placements) or first.is_partial():
                    continue
                text = f"S({first.dim})" if first.is_shard() else "R"
            elif self.place.impl == "local" and (self.op.result.startswith("P") or text == "R"):
                continue  # the gradient of plain local tensors lacks the terms of the other ranks
            if wrong := self.compare(g, w, shard_of(w, text, 0, WORLD), text, f"gradient {i}"):
                return wrong
        return None

    def compare(self, got: Any, full: Tensor, local: Tensor, text: str, name: str) -> str | None:
        """Compares the placements and global shape of a DTensor, and its local values."""
        return self.place.mismatch(
            got, text, full.shape, local, name, RTOL, may_be_plain=self.op.name in ("to_local", "from_local")
        )


class MinimalWrapper(Tensor):
    """The least work of a tensor subclass in Python: `__torch_function__` runs the plain op and wraps the outputs.

    Attributes:
        local: runs the op on the local tensors.
        in_place: whether the op returns its first argument.
    """

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
        raise AssertionError(
            f"{func} was not intercepted by __torch_function__: these wrappers hold no tensor"
        )

    @classmethod
    def wrap(cls, tensor: Tensor) -> Tensor:
        return Tensor._make_wrapper_subclass(cls, tensor.shape, tensor.stride())


_kernel_of = functools.cache(kernel_of)


class MinimalAutogradWrapper(Tensor):
    """The least work of a tensor subclass in Python if autograd records the call.

    torch's autograd kernels call `__torch_dispatch__`, which runs each op on the local tensors and wraps the outputs.
    """

    __slots__ = ("local",)
    local: Tensor

    @classmethod
    def __torch_function__(cls, func: Call, types: Value, args: Args = (), kwargs: Value = None) -> Value:
        with DisableTorchFunction():
            return func(*args, **kwargs) if kwargs else func(*args)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Value, types: Value, args: Args = (), kwargs: Value = None
    ) -> Value:
        local_args = [
            a.local
            if a.__class__ is cls
            else [t.local for t in a]
            if a.__class__ is list and a[0].__class__ is cls
            else a
            for a in args
        ]
        result = _kernel_of(op)(*local_args, **kwargs) if kwargs else _kernel_of(op)(*local_args)
        return tuple(map(cls.wrap, result)) if result.__class__ is tuple else cls.wrap(result)

    @classmethod
    def wrap(cls, tensor: Tensor, requires_grad: bool = False) -> Tensor:
        # By position, which is fastest: storage offset, memory format, dtype, layout, device, pinned.
        placed = None, None, tensor.dtype, torch.strided, tensor.device, False
        wrapper: Any = Tensor._make_wrapper_subclass(
            cls, tensor.shape, tensor.stride(), *placed, requires_grad
        )
        wrapper.local = tensor
        return wrapper  # type: ignore[no-any-return]


def wrapped(setup: PlacedOp) -> Workload:
    """Builds the workload of the impl "wrapped". `setup`: the call on plain local tensors."""
    op, texts = setup.op, setup.op.input_placements("local")
    inputs = [setup.place.put(t, text) for t, text in zip(setup.full_inputs(ROWS), texts, strict=True)]
    local = partial(op.fn, *inputs)
    wrapper_class: type[Tensor] = MinimalAutogradWrapper
    if setup.pass_ == FORWARD:
        wrapper_class = type(
            "MinimalWrapper", (MinimalWrapper,), {"local": local, "in_place": op.name.endswith("_")}
        )
        wrapped_inputs = [t.as_subclass(wrapper_class) for t in inputs]
    else:
        wrapped_inputs = [MinimalAutogradWrapper.wrap(t, requires_grad=True) if t.ndim else t for t in inputs]

    def check() -> str | None:
        got, want = as_tuple(op.fn(*wrapped_inputs)), as_tuple(local())
        with DisableTorchFunction():
            described = [(type(t), t.shape, t.requires_grad) for t in got]
        if described != [(wrapper_class, t.shape, setup.pass_ != FORWARD) for t in want]:
            return f"got {described}, expected {[t.shape for t in want]}, each wrapped"
        return setup.check()

    return Workload(run=partial(op.fn, *wrapped_inputs), check=check)


def as_tuple(out: Any) -> tuple[Any, ...]:
    return tuple(out) if isinstance(out, tuple | list) else (out,)


# (impl, mesh) -> the rows of its first calls. They are odd: an op that flattens (k, 2, 4) to (2k, 4) thus never makes
# the decision of another op's first call.
_Rows = defaultdict[tuple[str, tuple[int, ...]], Iterator[int]]
_unused_rows: _Rows = defaultdict(lambda: itertools.count(ROWS + 1, 2))


def decisions_made(impl: str) -> int | None:
    """Returns the number of sharding decisions of this process so far; None if this version of torch hides its own.

    torch has one cache in C++, and one in Python for calls that have no key in C++.
    """
    if impl == "core":
        return cache_info()["misses"]
    propagator = torch.distributed.tensor.DTensor._op_dispatcher.sharding_propagator
    in_python = getattr(propagator.propagate_op_sharding, "cache_info", None)
    in_cpp = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", None)
    return None if in_python is None or in_cpp is None else in_python().misses + in_cpp()[1]


def build_impl(
    op: TimedOp | TimedProgram,
    shape: tuple[int, ...],
    pass_: str,
    call_kind: str,
    quick: bool,
    impl: str,
    world: World,
) -> Workload:
    # Before 2.13, torch's DTensor had no strategy for attention on CPUs, nor for a convolution with padding.
    lacking = ("conv2d", "attention") if world.device.type == "cpu" else ("conv2d",)
    if impl == "torch" and BEFORE_213 and op.name in lacking:
        raise Skip("torch's DTensor does not support this op before torch 2.13")
    silence_torch()
    place = Place("local" if impl == "wrapped" else impl, world.mesh_of(shape), world.device)
    if isinstance(op, TimedProgram):
        return build_program(op, place, pass_, quick)
    setup = PlacedOp(op, place, pass_)
    if impl == "wrapped":
        return wrapped(setup)
    call = setup.call(ROWS)
    counts_memory = len(shape) == 1 and pass_ == FORWARD
    if call_kind not in (FIRST, SECOND):
        # A tensor takes 0.5 KiB or more, so the growth is thousands of pages.
        counters = partial(memory_per_call, call, 40_000, "bytes_per_tensor")
        counts_memory = counts_memory and op.name == "from_local"
        return Workload(call, None, setup.check, counters if counts_memory else None)

    def prepare_first_call() -> None:
        nonlocal call
        call = setup.call(next(_unused_rows[impl, shape]))

    def run_first_call() -> None:
        prepare_first_call()
        call()

    def count_second_decisions() -> dict[str, float]:
        run_first_call()
        count_before = decisions_made(impl)
        call()
        return {} if count_before is None else {"decisions": (decisions_made(impl) or 0) - count_before}

    if call_kind == SECOND:
        return Workload(lambda: call(), run_first_call, setup.check, count_second_decisions)
    # torch takes three seconds for a thousand first calls.
    counters = partial(memory_per_call, run_first_call, 500, "bytes_per_decision")
    counts_memory = counts_memory and not quick and op.name == "add"
    return Workload(lambda: call(), prepare_first_call, setup.check, counters if counts_memory else None)


def case_of(
    options: RunOptions,
    op: TimedOp | TimedProgram,
    shape: tuple[int, ...],
    pass_: str,
    call: str,
    floor: bool,
) -> Case:
    new_shapes = call in (FIRST, SECOND)
    impls = ["core", "torch", "local"][: 3 if floor else 2]
    if floor and pass_ != BACKWARD and isinstance(op, TimedOp) and op.name not in ("from_local", "to_local"):
        impls.append("wrapped")
    params: dict[str, Param] = {
        "placements": op.placements,
        "mesh": "x".join(map(str, shape)),
        "pass": pass_,
        "call": call,
    }
    return Case(
        name=op.name,
        params=params,
        build={impl: partial(build_impl, op, shape, pass_, call, options.quick, impl) for impl in impls},
        clock="host",
        busy=call == BUSY_CALL,
        calls_per_sample=1
        if new_shapes
        else getattr(op, "calls_per_sample", None) or CALLS_PER_SAMPLE[pass_],
        samples=None if not new_shapes else FIRST_SAMPLES_QUICK if options.quick else FIRST_SAMPLES,
        warmup_calls=FIRST_WARMUP_CALLS if new_shapes else WARMUP_CALLS,
        passes=HEADLINE_PASSES if is_headline(op.name, params) else 1,
    )


def variants(options: RunOptions, shape: tuple[int, ...], op: TimedOp) -> list[tuple[str, str]]:
    """Returns the (pass, call) pairs to measure.

    First and second calls of forward+requires_grad are left out: they make the same decisions as those of forward. So
    are second calls on the 2-D mesh, since a cache's key has all placements of a tensor. A quick run leaves out the
    slowest: first and second calls of forward+backward and, on the 2-D mesh, all but cached forward calls.
    """
    if options.quick and len(shape) > 1:
        return [(FORWARD, CACHED)]
    passes = EVERY_PASS if op.backward else (FORWARD,)
    calls = (CACHED, FIRST, SECOND) if len(shape) == 1 else (CACHED, FIRST)
    pairs = [(p, c) for p in passes for c in calls if p != REQUIRES_GRAD or c == CACHED]
    if options.device_type == "cuda" and len(shape) == 1 and op.name in BUSY:
        pairs.insert(1, (FORWARD, BUSY_CALL))
    return [(p, c) for p, c in pairs if not (options.quick and p == BACKWARD and c != CACHED)]


# Programs that quick runs leave out. torch takes half a minute for them, so under --budget they are measured last.
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
        # A quick run leaves out forward+backward and, on the 2-D mesh, forward+requires_grad.
        for pass_ in program.passes[: 3 - len(shape)] if options.quick else program.passes:
            yield case_of(
                options, program, shape, pass_, REPEATED if program.in_a_row else CACHED, program.local
            )
    for shape, op in itertools.product(MESHES, OPS):
        for pass_, call in variants(options, shape, op):
            yield case_of(options, op, shape, pass_, call, call not in (FIRST, SECOND))
    for program in PYTORCH_PROGRAMS:
        yield case_of(options, program, (PYTORCH_RANKS,), program.passes[0], CACHED, program.local)
