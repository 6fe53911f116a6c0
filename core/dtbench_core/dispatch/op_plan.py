"""A plan: how one op runs for one combination of specs and static arguments (make_plan.py makes it).

A kind of plan per way in which an op treats its arguments, chosen once (`plan_of_kind`). What may change from
call to call is all that `run` looks at.

    Functional, SeveralResults   new tensors
    View, Views, CopiedViews     windows on the first argument's memory; copies, where that cannot be
    InPlace, Out, InPlaceLists   a written argument is the result; lists are written and nothing is returned
    Moving, LocalShape           around another: inputs are redistributed, a global shape is made local
    Storing                      around a write: what copied views got is stored to their bases
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
from dtbench_core.dispatch.overlap import Known, met_twice, refuse_overlap
from dtbench_core.layout.placement import Placements
from dtbench_core.layout.shard_layout import laid_out
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import (
    SharedMemory,
    Wrapper,
    count_write,
    held_by,
    share_memory,
    shares_memory,
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
    """An input that must be placed otherwise: which of the tensors, how, what it is, what it becomes."""

    at: int
    steps: Route
    spec: DTensorSpec
    placements: Placements


class OpPlan:
    """kernel: what runs on the shards. out: the spec of the result; a list of specs, and Nones where the op gives
    none or a number; None for a Python value. functional: whether the op makes new tensors and runs as it is. even:
    whether all ranks hold equally much of what is written or viewed; None: not checked.
    """

    __slots__ = ("at", "counts", "even", "functional", "info", "kernel", "out")
    moves: tuple[Move, ...] = ()
    writes = False  # whether this kind of plan writes to an argument

    def __init__(
        self, info: OpInfo, kernel: Call, out: Value, functional: bool, counts: bool = False
    ) -> None:
        self.info, self.kernel, self.out, self.functional = info, kernel, out, functional
        self.counts = counts  # whether it tells autograd of its writes itself
        self.even: bool | None = None
        self.at = info.returned  # position, or name, of the written argument that is the result

    def run(
        self,
        cls: type[Wrapper],
        call: Call,
        args: Args,
        options: Kwargs,
        locals_: list[Value],
        kwargs: Kwargs,
    ) -> Value:
        """`call` (the op, or the function that became it) on the shards; the result as `cls`.

        args, options: the call's own arguments; locals_, kwargs: the same with shards for DTensors.
        """
        raise NotImplementedError

    def for_function(self) -> OpPlan:
        """This plan for calls that do not pass through torch, which would count the writes."""
        kind = self.__class__
        return kind(self.info, self.kernel, self.out, self.functional, counts=True) if self.writes else self

    def showing(self, index: int) -> OpPlan:
        """This plan for a function that gives out result `index` of the op alone."""
        return Functional(self.info, self.kernel, self.out[index], self.functional)

    def copying(self) -> OpPlan:
        """This plan of a view, where the local op turns out to copy."""
        plan = CopiedViews(self.info, self.kernel, self.out, self.functional)
        plan.placements, plan.offsets = None, getattr(self, "offsets", ())
        return plan

    def with_spec_strides(self) -> OpPlan:
        """This plan, where the local op leaves its results otherwise in memory than their specs say."""
        kernel, out = self.kernel, self.out

        def run(*args: object, **kwargs: object) -> Value:
            result = kernel(*args, **kwargs)
            if out.__class__ is DTensorSpec:
                return with_spec_strides(result, out)
            pairs = zip(result, out, strict=True)
            return result.__class__(
                one if spec is None else with_spec_strides(one, spec) for one, spec in pairs
            )

        return self.__class__(self.info, run, out, False)


def with_spec_strides(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """`local`, or a copy, so that it lies in memory as the spec says."""
    return local if spec.lays_out(local) else laid_out(local, spec)


def _counted(plan: OpPlan, call: Call, tensors: Sequence[Value], *, view: bool = False) -> Call:
    """`call` on the shards of `tensors` so that torch counts writes to them: compiled backward passes saved shards, and
    compare their counts. Where shards differ in length each rank saves what is small, and one alone must not refuse."""
    wrappers = [tensor for tensor in tensors if isinstance(tensor, Wrapper)]
    if plan.even is None:
        plan.even = all(wrapper._spec.is_even() for wrapper in wrappers)
    counts = plan.even and wrappers and held_by(wrappers[0]).__class__ is torch.Tensor
    return counting(call, view=view) if counts else call


# ---- new tensors ----


class Functional(OpPlan):
    """One new tensor."""

    __slots__ = ()

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        return wrap(cls, call(*locals_, **kwargs) if kwargs else call(*locals_), self.out)


class SeveralResults(OpPlan):
    """Several tensors, or a Python value. Among the ops are some that also write to an argument."""

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
    """One window on the memory of the first argument. offsets: of the results in it, in bytes."""

    __slots__ = ("offsets",)
    offsets: tuple[int, ...]

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        if SharedMemory.traced:
            call = _counted(self, call, args[:1], view=True)
        result, base = call(*locals_, **kwargs) if kwargs else call(*locals_), args[0]
        if is_inference_mode_enabled():
            return self._as_base_is(cls, result, base)
        wrapped = wrap(cls, result, self.out)
        share_memory(base, wrapped, self.offsets[0])
        return wrapped

    def _as_base_is(self, cls: type[Wrapper], result: Value, base: Any) -> Value:
        """A view is an inference tensor only if its base is: torch ties their versions."""
        with DisableTorchFunction():
            inference = base.is_inference()
        with torch.inference_mode(inference):
            return self._wrapped(cls, result, base)

    def _wrapped(self, cls: type[Wrapper], result: Value, base: Value) -> Value:
        wrapped = wrap(cls, result, self.out)
        share_memory(base, wrapped, self.offsets[0])
        return wrapped


class Views(View):
    """Several of them."""

    __slots__ = ()

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        if SharedMemory.traced:
            call = _counted(self, call, args[:1], view=True)
        result = call(*locals_, **kwargs) if kwargs else call(*locals_)
        if is_inference_mode_enabled():
            return self._as_base_is(cls, result, args[0])
        return self._wrapped(cls, result, args[0])

    def _wrapped(self, cls: type[Wrapper], result: Value, base: Value) -> Value:
        wrapped = [wrap(cls, r, spec) for r, spec in zip(result, self.out, strict=True)]
        for one, offset in zip(wrapped, self.offsets, strict=True):
            share_memory(base, one, offset)
        return wrapped if isinstance(result, list) else tuple(wrapped)


class CopiedViews(Views):
    """One or several whose values had to be copied (redistribute/copied_view.py). placements: what the first argument
    was moved to; None where the results are no windows on it."""

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

# Kernels refuse an input that overlaps what they write to where they can tell, which depends on the shape: that of a
# shard may tell where the whole's does not, and on one rank alone.
_OVERLAP = "some elements of the input tensor and the written-to tensor refer to a single memory location"


def _call_apart(
    error: RuntimeError, call: Call, locals_: Args, kwargs: Kwargs, written: Sequence[int]
) -> None:
    """The call that raised, with copies of all tensors but the written ones, if it refuses that these overlap."""
    if _OVERLAP not in str(error):
        raise error
    copied = tree_map_only(torch.Tensor, torch.Tensor.clone, list(locals_))
    call(*(x if index in written else copied[index] for index, x in enumerate(locals_)), **kwargs)


class InPlace(OpPlan):
    """The written argument is the result. overlaps: what is known of other arguments that share its memory; see
    overlap.py."""

    __slots__ = ("overlaps",)
    writes = True

    def __init__(
        self, info: OpInfo, kernel: Call, out: Value, functional: bool, counts: bool = False
    ) -> None:
        super().__init__(info, kernel, out, functional, counts)
        self.overlaps: Known = {}

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        written = args[self.at]
        shared = isinstance(written, Wrapper) and shares_memory(written)
        # Elementwise, over itself, is as good as apart.
        if (shared or not self.info.elementwise) and met_twice(args, options):
            refuse_overlap(self.info.op, (written,), args, options, self.overlaps)
        if SharedMemory.traced:
            call = _counted(self, call, (written,))
        try:
            call(*locals_, **kwargs)
        except RuntimeError as error:
            _call_apart(error, call, locals_, kwargs, (self.at,))
        if shared:
            count_write(written)
        if self.counts:
            increment_version((written,))
        return written


class Out(InPlace):
    """So is the one given as `out=`."""

    __slots__ = ()

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        written = options[self.at]
        shared = isinstance(written, Wrapper) and shares_memory(written)
        if (shared or not self.info.elementwise) and met_twice(args, options):
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
    """Lists are written, and nothing is returned. torch leaves their members out when it counts writes."""

    __slots__ = ("gives",)
    writes = True

    def __init__(
        self, info: OpInfo, kernel: Call, out: Value, functional: bool, counts: bool = False
    ) -> None:
        super().__init__(info, kernel, out, functional, counts)
        self.gives = counts and gives_list(info)

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        lists = [
            args[position] if position < len(args) else options.get(name)
            for position, name in self.info.mutated
        ]
        # Steps of a fused optimizer are plain.
        views = [one for each in lists for one in each if isinstance(one, Wrapper) and shares_memory(one)]
        if views and met_twice(args, options):
            refuse_overlap(self.info.op, [one for written in lists for one in written], args, options, {})
        if SharedMemory.traced:
            call = _counted(self, call, [one for each in lists for one in each])
        try:
            call(*locals_, **kwargs)
        except RuntimeError as error:
            _call_apart(error, call, locals_, kwargs, [position for position, _ in self.info.mutated])
        for written in lists:
            increment_version(written)
        for one in views:
            count_write(one)
        return args[0] if self.gives else None


def gives_list(info: OpInfo) -> bool:
    """Whether torch's function of an op that writes lists gives back the first: that of a fused step does not."""
    return info.op._schema.name.startswith("aten::_foreach_")


# The kinds that call the op themselves.
CALLING: tuple[type[OpPlan], ...] = (Functional, SeveralResults, View, InPlace, Out, InPlaceLists)


# ---- around another plan ----


class Around(OpPlan):
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

    def showing(self, index: int) -> OpPlan:
        return self._around(self.inner.showing(index))

    def copying(self) -> OpPlan:
        return self._around(self.inner.copying())

    def with_spec_strides(self) -> OpPlan:
        return self._around(self.inner.with_spec_strides())


class LocalShape(Around):
    """replaced: (argument position, local value) of global shapes."""

    __slots__ = ("replaced",)

    def __init__(self, inner: OpPlan, replaced: tuple[tuple[int, Any], ...]) -> None:
        super().__init__(inner)
        self.replaced, self.functional = replaced, False

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        for position, value in self.replaced:
            locals_[position] = value
        return self.inner.run(cls, call, args, options, locals_, kwargs)


class Storing(Around):
    """What is written to copied views reaches their bases."""

    __slots__ = ()
    writes = True

    def run(
        self, cls: type[Wrapper], call: Call, args: Value, options: Value, locals_: Value, kwargs: Value
    ) -> Value:
        written = written_by(self.info.mutated, args, options)
        refuse_writes(written)
        result = self.inner.run(cls, call, args, options, locals_, kwargs)
        for one in written:
            store_to_base(one)
        return result


class Moving(Around):
    """moves: of the inputs that must be placed otherwise."""

    __slots__ = ("moves",)

    def __init__(self, inner: OpPlan, moves: tuple[Move, ...]) -> None:
        super().__init__(inner)
        self.moves = moves

    def run(self, cls: Any, call: Call, args: Value, options: Value, locals_: Value, kwargs: Value) -> Value:
        if _profiler_enabled():  # a trace says which op asked for the communication
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
        if places is None or self.moves[-1].at >= len(places):
            return self._moved_inside(args, options, locals_, kwargs)
        locals_ = list(locals_)
        for index, route, _, placements in self.moves:
            at = places[index]
            locals_[at] = _local_at(args[at], locals_[at], placements, route)
        return locals_, kwargs

    def _moved_inside(
        self, args: Args, options: Kwargs, locals_: list[Value], kwargs: Kwargs
    ) -> tuple[list[Value], Kwargs]:
        """The same where a tensor may lie in a list, or is given by name."""
        tensors = [
            leaf
            for leaf in tree_leaves((list(args), sorted_by_name(options)))
            if isinstance(leaf, torch.Tensor)
        ]
        leaves, tree = tree_flatten((locals_, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for index, route, _, placements in self.moves:
            at = places[index]
            leaves[at] = _local_at(tensors[index], leaves[at], placements, route)
        moved: tuple[list[Value], Kwargs] = tree_unflatten(leaves, tree)
        return moved


def _places(args: Args) -> list[int] | None:
    """Where the tensors are among the arguments; None if some may lie inside another argument."""
    places = []
    for at, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            places.append(at)
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
    of_copy: DTensorSpec | None = None,
    to_copy: bool = False,
    offsets: tuple[int, ...] = (),
) -> OpPlan:
    """The plan of an op that runs as itself, or as `local_op`. of_copy: of the first argument, if it is a copied view.
    to_copy: whether one is written to. offsets: of views, see `View`."""
    kind: type[OpPlan]
    if info.returned is not None:
        kind = Out if info.returned.__class__ is str else InPlace
    elif info.mutated and not info.op._schema.returns:
        kind = InPlaceLists
    elif info.aliases:
        kind = CopiedViews if moves or of_copy else View if out.__class__ is DTensorSpec else Views
    else:
        kind = Functional if out.__class__ is DTensorSpec else SeveralResults
    plan: OpPlan = kind(info, local_op or info.kernel, out, info.functional and local_op is None)
    if isinstance(plan, View):
        plan.offsets = offsets
    if isinstance(plan, CopiedViews):
        plan.placements = _kept_placements(moves, of_copy)
    if replaced:
        plan = LocalShape(plan, replaced)
    if moves:
        plan = Moving(plan, moves)
    return Storing(plan) if to_copy else plan


def _kept_placements(moves: tuple[Move, ...], of_copy: DTensorSpec | None) -> Placements | None:
    """Where the memory is placed on which a copied view is a window. None: of a pending reduction that moved, whose
    terms cannot be distinguished from the sum."""
    if not moves:
        return None if of_copy is None else of_copy.placements
    _, _, spec, placements = moves[0]
    pairs = zip(spec.placements, placements, strict=True)
    return None if any(have.is_partial() and have != want for have, want in pairs) else placements
