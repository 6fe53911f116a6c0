"""Plans: how one op runs for one combination of specs and static arguments.

make_plan.py builds a plan once and dispatch keeps it. Each kind of plan implements one way in which an op treats its
arguments (`plan_of_kind` chooses it), so that `run` only looks at what can change from call to call.

    Functional, SeveralResults   the op makes new tensors
    View, Views, CopiedViews     the results are views of the first argument; CopiedViews where they had to be copied
    InPlace, Out, InPlaceLists   the op writes to an argument and returns it; or writes to lists and returns nothing
    Moving, LocalShape           wrap another plan: redistribute inputs, replace a global shape by the local one
    Storing                      wraps a write to copied views: afterwards copies the new values to the views' bases
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from dtbench_core.dispatch import contexts
from dtbench_core.dispatch.metadata import sorted_by_name, written_by
from dtbench_core.dispatch.op_info import OpInfo
from dtbench_core.dispatch.overlap import KnownRefusals, may_share_memory, refuse_overlap
from dtbench_core.layout.placement import Placements
from dtbench_core.layout.shard_layout import with_local_stride
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import (
    SharedMemory,
    Wrapper,
    count_write,
    share_memory,
    shares_memory,
    stored_local,
    wrap,
)
from dtbench_core.op_types import Args, Call, Kwargs, Value
from dtbench_core.redistribute.autograd import redistributed_local
from dtbench_core.redistribute.copied_view import Gathered, copied_view, refuse_writes, store_to_base
from dtbench_core.redistribute.routes import Route, run_route
from dtbench_core.torch_compat import (
    DisableTorchFunction,
    counting,
    increment_version,
    is_inference_mode_enabled,
)


class Move(NamedTuple):
    """A redistribution of one input before the op runs.

    Attributes:
        position: position among the call's tensors.
        route: the steps of the redistribution.
        spec: spec of the input.
        placements: placements that the op needs.
    """

    position: int
    route: Route
    spec: DTensorSpec
    placements: Placements


class OpPlan:
    """Base class of all plans.

    Attributes:
        info: the op.
        kernel: the function that runs on the shards.
        out: spec of the result; for several results a list, with None for a result that is not a tensor; None if the op
            returns a Python value.
        functional: whether the op makes new tensors and runs unchanged on the shards.
        counts: whether the plan increments the version counters of the tensors that it writes to. If not, torch does.
        even: whether all ranks hold equally many elements of the written or viewed tensors; None: not checked yet.
        returned: position, or name, of the written argument that is the result.
    """

    __slots__ = ("counts", "even", "functional", "info", "kernel", "out", "returned")
    moves: tuple[Move, ...] = ()
    writes = False  # whether this kind of plan writes to an argument

    def __init__(
        self, info: OpInfo, kernel: Call, out: Value, functional: bool, counts: bool = False
    ) -> None:
        self.info, self.kernel, self.out, self.functional = info, kernel, out, functional
        self.counts = counts
        self.even: bool | None = None
        self.returned = info.returned

    def run(
        self,
        cls: type[Wrapper],
        call: Call,
        args: Args,
        options: Kwargs,
        locals_: list[Value],
        kwargs: Kwargs,
    ) -> Value:
        """Runs the call on the shards and wraps the result as `cls`.

        Args:
            call: the op, or a Python function whose only op is this one.
            args, options: the arguments of the call, with DTensors.
            locals_, kwargs: the same arguments, with shards in place of DTensors.
        """
        raise NotImplementedError

    def for_function(self) -> OpPlan:
        """Returns this plan for calls that do not pass through torch: it increments the version counters itself."""
        return (
            self.__class__(self.info, self.kernel, self.out, self.functional, counts=True)
            if self.writes
            else self
        )

    def for_result(self, index: int) -> OpPlan:
        """Returns this plan for a function that returns only result `index` of the op."""
        return Functional(self.info, self.kernel, self.out[index], self.functional)

    def as_copied_views(self) -> OpPlan:
        """Returns the plan of the same view op for a rank on which the local op returned a copy instead of a view."""
        plan = CopiedViews(self.info, self.kernel, self.out, self.functional)
        plan.placements, plan.offsets = None, getattr(self, "offsets", ())
        return plan

    def with_spec_strides(self) -> OpPlan:
        """Returns this plan for a local op whose results differ in strides from their specs."""
        kernel, out = self.kernel, self.out

        def run(*args: object, **kwargs: object) -> Value:
            result = kernel(*args, **kwargs)
            if out.__class__ is DTensorSpec:
                return with_spec_strides(result, out)
            return result.__class__(
                local if spec is None else with_spec_strides(local, spec)
                for local, spec in zip(result, out, strict=True)
            )

        return self.__class__(self.info, run, out, False)


def with_spec_strides(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Returns `local` if its strides match the spec, else a copy with the strides of the spec."""
    return local if spec.matches_strides(local) else with_local_stride(local, spec)


def _counted(plan: OpPlan, call: Call, tensors: Sequence[Value], *, view: bool = False) -> Call:
    """Returns `call` such that it increments the version counters of the shards of `tensors`.

    Compiled backward passes save shards and raise if a version has changed. If shards differ in length, nothing is
    counted: ranks may save different tensors, and one rank could raise alone.
    """
    wrappers = [tensor for tensor in tensors if isinstance(tensor, Wrapper)]
    if plan.even is None:
        plan.even = all(wrapper._spec.is_even() for wrapper in wrappers)
    counts = plan.even and wrappers and stored_local(wrappers[0]).__class__ is torch.Tensor
    return counting(call, view=view) if counts else call


# ---- new tensors ----


class Functional(OpPlan):
    """Plan of an op that makes one new tensor."""

    __slots__ = ()

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        return wrap(cls, call(*locals_, **kwargs) if kwargs else call(*locals_), self.out)


class SeveralResults(OpPlan):
    """Plan of an op that returns several tensors or a Python value. Some of these ops also write to an argument."""

    __slots__ = ()

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        result = call(*locals_, **kwargs) if kwargs else call(*locals_)
        if self.out is None:
            return result
        wrapped = [
            r if spec is None else wrap(cls, r, spec) for r, spec in zip(result, self.out, strict=True)
        ]
        return wrapped if isinstance(result, list) else tuple(wrapped)


# ---- views ----


class View(OpPlan):
    """Plan of an op whose result is a view of the first argument, sharing its memory.

    Attributes:
        offsets: byte offset of each result from the start of the first argument, in the global tensor.
    """

    __slots__ = ("offsets",)
    offsets: tuple[int, ...]

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        if SharedMemory.traced:
            call = _counted(self, call, args[:1], view=True)
        result, base = call(*locals_, **kwargs) if kwargs else call(*locals_), args[0]
        if is_inference_mode_enabled():
            return self._wrap_like_base(cls, result, base)
        wrapped = wrap(cls, result, self.out)
        share_memory(base, wrapped, self.offsets[0])
        return wrapped

    def _wrap_like_base(self, cls: type[Wrapper], result: Value, base: Any) -> Value:
        """Wraps the result as an inference tensor only if `base` is one: a view shares its base's version counter."""
        with DisableTorchFunction():
            inference = base.is_inference()
        with torch.inference_mode(inference):
            return self._wrapped(cls, result, base)

    def _wrapped(self, cls: type[Wrapper], result: Value, base: Value) -> Value:
        wrapped = wrap(cls, result, self.out)
        share_memory(base, wrapped, self.offsets[0])
        return wrapped


class Views(View):
    """Plan of an op that returns several views of the first argument."""

    __slots__ = ()

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        if SharedMemory.traced:
            call = _counted(self, call, args[:1], view=True)
        result = call(*locals_, **kwargs) if kwargs else call(*locals_)
        if is_inference_mode_enabled():
            return self._wrap_like_base(cls, result, args[0])
        return self._wrapped(cls, result, args[0])

    def _wrapped(self, cls: type[Wrapper], result: Value, base: Value) -> Value:
        wrapped = [wrap(cls, r, spec) for r, spec in zip(result, self.out, strict=True)]
        for view, offset in zip(wrapped, self.offsets, strict=True):
            share_memory(base, view, offset)
        return wrapped if isinstance(result, list) else tuple(wrapped)


class CopiedViews(Views):
    """Plan of a view op whose results had to be copied (redistribute/copied_view.py).

    Attributes:
        placements: placements that the first argument was gathered to. None if the results do not share memory with
            the gathered copy either.
    """

    __slots__ = ("placements",)
    placements: Placements | None

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        result = call(*locals_, **kwargs) if kwargs else call(*locals_)
        base, placements = args[0], self.placements
        gathered = None if placements is None else Gathered(locals_[0], placements)
        with DisableTorchFunction():
            inference = base.is_inference()
        with torch.inference_mode(inference) if is_inference_mode_enabled() else nullcontext():
            several = self.out.__class__ is not DTensorSpec
            pairs = zip(result, self.out, strict=True) if several else [(result, self.out)]
            triples = ((r, spec, offset) for (r, spec), offset in zip(pairs, self.offsets, strict=True))
            wrapped = [copied_view(cls, r, spec, base, gathered, offset) for r, spec, offset in triples]
        return (wrapped if isinstance(result, list) else tuple(wrapped)) if several else wrapped[0]


# ---- writes ----

# Kernels raise if an input overlaps the written tensor, as far as they can detect it. Detection depends on the shape:
# a kernel may raise for a shard though not for the global tensor, and on one rank alone.
_OVERLAP = "some elements of the input tensor and the written-to tensor refer to a single memory location"


def _retry_without_overlap(
    error: RuntimeError, call: Call, locals_: Args, kwargs: Kwargs, written: Sequence[int]
) -> None:
    """Repeats a call that raised because of overlap, with copies of the tensors that it does not write to.

    Raises:
        RuntimeError: `error`, if overlap is not its reason.
    """
    if _OVERLAP not in str(error):
        raise error
    copied = tree_map_only(torch.Tensor, torch.Tensor.clone, list(locals_))
    call(*(x if index in written else copied[index] for index, x in enumerate(locals_)), **kwargs)


class InPlace(OpPlan):
    """Plan of an op that writes to an argument and returns it.

    Attributes:
        overlaps: results of overlap checks for earlier calls (overlap.py).
    """

    __slots__ = ("overlaps",)
    writes = True

    def __init__(
        self, info: OpInfo, kernel: Call, out: Value, functional: bool, counts: bool = False
    ) -> None:
        super().__init__(info, kernel, out, functional, counts)
        self.overlaps: KnownRefusals = {}

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        written = args[self.returned]
        shared = isinstance(written, Wrapper) and shares_memory(written)
        # An elementwise op may read the tensor that it writes to.
        if (shared or not self.info.elementwise) and may_share_memory(args, options):
            refuse_overlap(self.info.op, (written,), args, options, self.overlaps)
        if SharedMemory.traced:
            call = _counted(self, call, (written,))
        try:
            call(*locals_, **kwargs)
        except RuntimeError as error:
            _retry_without_overlap(error, call, locals_, kwargs, (self.returned,))
        if shared:
            count_write(written)
        if self.counts:
            increment_version((written,))
        return written


class Out(InPlace):
    """Plan of an op that writes to its `out=` argument and returns it."""

    __slots__ = ()

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        written = options[self.returned]
        shared = isinstance(written, Wrapper) and shares_memory(written)
        if (shared or not self.info.elementwise) and may_share_memory(args, options):
            refuse_overlap(self.info.op, (written,), args, options, self.overlaps)
        if SharedMemory.traced:
            call = _counted(self, call, (written,))
        call(*locals_, **kwargs)
        if shared:
            count_write(written)
        if self.counts:
            increment_version((written,))
        return written


class InPlaceLists(OpPlan):
    """Plan of an op that writes to lists of tensors and returns nothing.

    torch does not increment the version counters of list members, so the plan does.
    """

    __slots__ = ("returns_argument",)
    writes = True

    def __init__(
        self, info: OpInfo, kernel: Call, out: Value, functional: bool, counts: bool = False
    ) -> None:
        super().__init__(info, kernel, out, functional, counts)
        self.returns_argument = counts and returns_list(info)

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        lists = [
            args[position] if position < len(args) else options.get(name)
            for position, name in self.info.mutated
        ]
        # The step counts of a fused optimizer are plain tensors.
        views = [
            tensor
            for tensors in lists
            for tensor in tensors
            if isinstance(tensor, Wrapper) and shares_memory(tensor)
        ]
        if views and may_share_memory(args, options):
            refuse_overlap(
                self.info.op, [tensor for written in lists for tensor in written], args, options, {}
            )
        if SharedMemory.traced:
            call = _counted(self, call, [tensor for tensors in lists for tensor in tensors])
        try:
            call(*locals_, **kwargs)
        except RuntimeError as error:
            _retry_without_overlap(
                error, call, locals_, kwargs, [position for position, _ in self.info.mutated]
            )
        for written in lists:
            increment_version(written)
        for tensor in views:
            count_write(tensor)
        return args[0] if self.returns_argument else None


def returns_list(info: OpInfo) -> bool:
    """Whether torch's Python function for an op that writes to lists returns the first list.

    Those of fused optimizer steps do not.
    """
    return info.op._schema.name.startswith("aten::_foreach_")


# The kinds of plans that call the op; the others wrap a plan.
DIRECT_KINDS: tuple[type[OpPlan], ...] = (Functional, SeveralResults, View, InPlace, Out, InPlaceLists)


# ---- around another plan ----


class Around(OpPlan):
    """A plan that wraps another one."""

    __slots__ = ("inner",)

    def __init__(self, inner: OpPlan) -> None:
        super().__init__(inner.info, inner.kernel, inner.out, inner.functional)
        self.inner = inner

    def _around(self, inner: OpPlan) -> OpPlan:
        plan = copy.copy(self)
        plan.inner, plan.out, plan.kernel = inner, inner.out, inner.kernel
        plan.functional = self.functional and inner.functional
        return plan

    def for_function(self) -> OpPlan:
        inner = self.inner.for_function()
        return self if inner is self.inner else self._around(inner)

    def for_result(self, index: int) -> OpPlan:
        return self._around(self.inner.for_result(index))

    def as_copied_views(self) -> OpPlan:
        return self._around(self.inner.as_copied_views())

    def with_spec_strides(self) -> OpPlan:
        return self._around(self.inner.with_spec_strides())


class LocalShape(Around):
    """Replaces global shapes among the arguments.

    Attributes:
        replaced: (argument position, local value) pairs.
    """

    __slots__ = ("replaced",)

    def __init__(self, inner: OpPlan, replaced: tuple[tuple[int, Any], ...]) -> None:
        super().__init__(inner)
        self.replaced, self.functional = replaced, False

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        for position, value in self.replaced:
            locals_[position] = value
        return self.inner.run(cls, call, args, options, locals_, kwargs)


class Storing(Around):
    """Wraps a plan that writes to copied views. After the op it copies the new values to the views' bases."""

    __slots__ = ()
    writes = True

    def run(
        self, cls: type[Wrapper], call: Call, args: Value, options: Value, locals_: Value, kwargs: Value
    ) -> Value:
        written = written_by(self.info.mutated, args, options)
        refuse_writes(written)
        result = self.inner.run(cls, call, args, options, locals_, kwargs)
        for tensor in written:
            store_to_base(tensor)
        return result


class Moving(Around):
    """Redistributes inputs before the op runs.

    Attributes:
        moves: the redistributions, in the order of the call's tensors.
    """

    __slots__ = ("moves",)

    def __init__(self, inner: OpPlan, moves: tuple[Move, ...]) -> None:
        super().__init__(inner)
        self.moves = moves

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        if _profiler_enabled():  # the trace shows which op needed the communication
            with record_function(self.info.op.name()):
                locals_, kwargs = self._moved(args, options, locals_, kwargs)
        else:
            locals_, kwargs = self._moved(args, options, locals_, kwargs)
        return self.inner.run(cls, call, args, options, locals_, kwargs)

    def _moved(
        self, args: Args, options: Kwargs, locals_: list[Value], kwargs: Kwargs
    ) -> tuple[list[Value], Kwargs]:
        if (context := contexts.explicit_context()) is not None:
            for move in self.moves:
                context.observe(self.info.op, move.spec, move.placements)
        places = _places(args)
        if places is None or self.moves[-1].position >= len(places):
            return self._moved_inside(args, options, locals_, kwargs)
        locals_ = list(locals_)
        for index, route, _, placements in self.moves:
            position = places[index]
            locals_[position] = _local_at(args[position], locals_[position], placements, route)
        return locals_, kwargs

    def _moved_inside(
        self, args: Args, options: Kwargs, locals_: list[Value], kwargs: Kwargs
    ) -> tuple[list[Value], Kwargs]:
        """Same as `_moved`, for calls whose tensors may be in lists or keyword arguments."""
        tensors = [
            leaf
            for leaf in tree_leaves((list(args), sorted_by_name(options)))
            if isinstance(leaf, torch.Tensor)
        ]
        leaves, tree = tree_flatten((locals_, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for index, route, _, placements in self.moves:
            position = places[index]
            leaves[position] = _local_at(tensors[index], leaves[position], placements, route)
        moved: tuple[list[Value], Kwargs] = tree_unflatten(leaves, tree)
        return moved


def _places(args: Args) -> list[int] | None:
    """Returns the positions of the tensors among the arguments; None if other arguments may contain tensors."""
    places = []
    for position, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            places.append(position)
        elif isinstance(arg, (list, tuple, dict)) and not all(isinstance(x, (int, float)) for x in arg):
            return None
    return places


def _local_at(tensor: Value, local: torch.Tensor, placements: Placements, route: Route) -> torch.Tensor:
    if isinstance(tensor, Wrapper):
        return redistributed_local(tensor, placements, route)
    return run_route(local, route)


def plan_of_kind(
    info: OpInfo,
    local_op: Call | None,
    out: Value,
    moves: tuple[Move, ...] = (),
    replaced: tuple[tuple[int, Any], ...] = (),
    *,
    copied_spec: DTensorSpec | None = None,
    writes_copied: bool = False,
    offsets: tuple[int, ...] = (),
) -> OpPlan:
    """Returns the plan of an op.

    Args:
        local_op: runs on the shards in place of the op.
        out, offsets: see `OpPlan` and `View`.
        replaced: see `LocalShape`.
        copied_spec: spec of the first argument, if it is a copied view.
        writes_copied: whether the op writes to a copied view.
    """
    kind: type[OpPlan]
    if info.returned is not None:
        kind = Out if info.returned.__class__ is str else InPlace
    elif info.mutated and not info.op._schema.returns:
        kind = InPlaceLists
    elif info.aliases:
        kind = CopiedViews if moves or copied_spec else View if out.__class__ is DTensorSpec else Views
    else:
        kind = Functional if out.__class__ is DTensorSpec else SeveralResults
    plan: OpPlan = kind(info, local_op or info.kernel, out, info.functional and local_op is None)
    if isinstance(plan, View):
        plan.offsets = offsets
    if isinstance(plan, CopiedViews):
        plan.placements = _kept_placements(moves, copied_spec)
    if replaced:
        plan = LocalShape(plan, replaced)
    if moves:
        plan = Moving(plan, moves)
    return Storing(plan) if writes_copied else plan


def _kept_placements(moves: tuple[Move, ...], copied_spec: DTensorSpec | None) -> Placements | None:
    """Returns the placements of the gathered tensor that a copied view shares memory with.

    None if a pending reduction had to be reduced: a write to the sum cannot be stored in its terms.
    """
    if not moves:
        return None if copied_spec is None else copied_spec.placements
    _, _, spec, placements = moves[0]
    pairs = zip(spec.placements, placements, strict=True)
    return (
        None if any(current.is_partial() and current != needed for current, needed in pairs) else placements
    )
