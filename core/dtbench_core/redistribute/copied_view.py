"""Copied views: views that have copied values, where plain torch gives a view of the base's memory.

A view op may cut a sharded dim, which must be gathered first. The result then shares memory with the gathered copy, so
a write to it would not reach the base, and a write to the base would not show in it. Such a result is of a class of its
own and records its base and how it was gathered. It is in one of these states:

    COPY    it has the values of its base; what is written to it is stored to the base, each rank its own part
    STALE   its base was written to; it is gathered again when it is read

All other tensors are in the state WINDOW: they share memory with their base, or are no views.

If the gathered copy is not kept (conj, a reduced Partial), writes to the view are refused, and so is reading it when it
is stale. The same holds for copied views of an argument that a compiled graph returned, as a graph's results have no
reference to its arguments.

Ops on a copied view give DTensors, but its views are copied views. Its class is part of the key of a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple, cast

import torch

from dtbench_core.errors import PlacementError
from dtbench_core.layout.placement import Placements
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import (
    Crossing,
    SharedResults,
    Wrapped,
    Wrapper,
    borrow,
    count_by_storage,
    count_for_borrowers,
    share_memory,
    stored_local,
    wrap,
)
from dtbench_core.op_types import Value
from dtbench_core.redistribute.routes import cheapest_route, run_route
from dtbench_core.torch_compat import (
    functionalizing,
    in_backward_pass,
    is_fake,
    is_functional,
    share_storage_of,
    version_of,
)


class ViewState(Enum):
    WINDOW = auto()  # never changes
    COPY = auto()  # until the view or its base is written to
    STALE = auto()  # until the view is read


class Gathered(NamedTuple):
    """The local tensor that a copied view shares memory with: the base's values with other placements."""

    local: torch.Tensor
    placements: Placements


class Origin(NamedTuple):
    """Where the values of a copied view come from.

    Attributes:
        owner: its base.
        version: torch's count of writes to the base and its views when the values were copied. None for inference
            tensors, whose writes are not counted: their views are gathered at every read.
        writes: the count of `SharedMemory` at the same time, which includes writes to `.data`.
        gathered: None if the gathered tensor is not kept.
        spec, local: those of the base at the same time. The base may get another shape in place.
    """

    owner: Wrapper
    version: int | None
    writes: int
    gathered: Gathered | None
    spec: DTensorSpec
    local: torch.Tensor


class CopiedView:
    """Mixin in front of a class of DTensors (`viewed`), which refers to the resulting class as its `copied_view`."""

    __slots__ = ()

    viewed: ClassVar[type[Wrapper]]
    # None for a result of a graph, and for a simulated rank's part, whose writes are checked on the global tensor.
    _origin: Origin | None = None
    # Made by a backward pass that is being traced: a gradient owns its memory once the graph returns it.
    _of_backward = False

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return cls.viewed.__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.viewed.__torch_dispatch__(func, types, args, kwargs)

    @property
    def _local_tensor(self: Any) -> torch.Tensor:
        if state_of(self) is ViewState.STALE:
            _refresh(self)
        return stored_local(self)

    @_local_tensor.setter
    def _local_tensor(self: Any, local: torch.Tensor) -> None:
        Wrapper.__dict__["_local_tensor"].__set__(self, local)

    def __repr__(self: Any, **options: object) -> str:
        if state_of(self) is ViewState.STALE:  # nothing is sent, as one rank may print alone
            return f"DTensor({self._spec}, local=not gathered again since its base was written to)"
        return cast("str", self.viewed.__repr__(self, **options))

    def __deepcopy__(self: Any, memo: Any) -> Any:
        if not self.is_leaf or id(self) in memo:
            return self.viewed.__deepcopy__(self, memo)
        if (origin := reusable_origin(self)) is None or not origin.owner.is_leaf:
            copied = self.detach().clone().requires_grad_(self.requires_grad)  # without a base
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
        else:
            owner, local, gathered = deepcopy((origin.owner, stored_local(self), origin.gathered), memo)
            offset = self._memory[1] - origin.owner._memory[1]  # type: ignore[index]
            copied = copied_view(self.viewed, local, self._spec, owner, gathered, offset)
        memo[id(self)] = copied
        return copied


def copied_view(
    cls: type[Wrapped],
    local: torch.Tensor,
    spec: DTensorSpec,
    base: Wrapper,
    gathered: Gathered | None = None,
    offset: int = 0,
) -> Wrapped:
    """Returns a copied view of `base`.

    Args:
        cls: the class of `base`.
        local: the view's values, which share memory with `gathered`, if given.
        offset: where the view begins behind `base`, in bytes of the global tensor.
    """
    view = wrap(cls.copied_view, local, spec)
    memory = share_memory(base, view, offset)
    count_by_storage(base, memory)
    view._origin = Origin(base, version_of(base), memory.count(), gathered, base._spec, stored_local(base))  # type: ignore[attr-defined]
    if is_functional(local):
        view._of_backward = in_backward_pass()  # type: ignore[attr-defined]
        if memory.results is None:
            memory.results = SharedResults(memory.of_input)
    if is_fake(local):
        share_storage_of(base, view, local)
    return view  # type: ignore[return-value]


def is_copied(tensor: object) -> bool:
    return isinstance(tensor, CopiedView)


def take_memory(tensor: Value, source: Value) -> None:
    """Makes `tensor` share the memory of `source`, and be the same copied view if `source` is one.

    Called after `tensor` got the local tensor and spec of `source`, as by `.data = source`.
    """
    share_memory(source, tensor, 0)
    origin = source._origin if is_copied(source) else None
    if is_copied(tensor) or origin is not None:
        tensor.__class__ = tensor.viewed if origin is None else tensor.viewed.copied_view
        # The version of `tensor` is its own; writes to the base are counted by the memory.
        tensor._origin = origin and origin._replace(version=version_of(tensor))


def reusable_origin(tensor: Value) -> Origin | None:
    """Returns the origin of a copied view if a copy or file of it can also be a view of its base, else None."""
    if not is_copied(tensor) or tensor._origin is None or tensor.requires_grad:
        return None
    tensor._local_tensor  # noqa: B018 - gathers again if the base was written to
    origin: Origin = tensor._origin
    can_be_made_again = (
        origin.gathered is not None and origin.owner._spec is origin.spec and origin.version is not None
    )
    return origin if can_be_made_again and origin.local is stored_local(origin.owner) else None


def state_of(tensor: Value) -> ViewState:
    """Returns whether a tensor is a copied view, and whether its base was written to."""
    if not is_copied(tensor):
        return ViewState.WINDOW
    origin = tensor._origin
    if origin is None:
        returned_at = tensor._returned_at
        fresh = returned_at is None or returned_at == tensor._memory[0].count()
        return ViewState.COPY if fresh else ViewState.STALE
    if origin.version is None:  # writes are not counted, so the base may have changed
        return ViewState.COPY if origin.gathered is None else ViewState.STALE
    counts = origin.version, origin.writes
    if counts != (version_of(tensor), tensor._memory[0].count()):
        return ViewState.STALE
    return state_of(origin.owner) if is_copied(origin.owner) else ViewState.COPY


def refresh_result(result: Any) -> None:
    """Gathers a stale result of a graph that is being traced, before the result is split into inner tensors."""
    if state_of(result) is ViewState.STALE:
        with functionalizing():
            _refresh(result)


def _refresh(view: Any) -> None:
    """Copies the present values of the base to the gathered tensor that `view` shares memory with.

    Raises:
        PlacementError: that tensor is not kept.
    """
    origin: Origin | None = view._origin
    if origin is None:
        raise PlacementError(
            f"got {view._spec}, a view of its argument that a compiled function returned as a copy; the argument has "
            "been written to since, so that it shows the old values: take the view outside the function or again "
            "after the write, or return a clone() of it"
        )
    gathered = origin.gathered
    if gathered is None:
        raise PlacementError(
            f"got a view, {view._spec}, whose sharded dim had to be gathered before it could be cut, and whose base "
            "has been written to since: it shows the old values; take the view again after the write, or redistribute "
            "the base so that the dim is not sharded"
        )
    if state_of(origin.owner) is ViewState.STALE:
        _refresh(origin.owner)
    if gathered.local is not origin.local:
        gathered.local.copy_(run_route(origin.local, cheapest_route(origin.spec, gathered.placements)))
    view._origin = origin._replace(version=version_of(view), writes=view._memory[0].count())


def store_to_base(view: Any) -> None:
    """Stores what an op wrote to `view` to its base, each rank its own part, and so on to the base of the base.

    The view is stale afterwards, since it shares the count of writes with its base.
    """
    while is_copied(view) and view._origin is not None:
        owner, _, _, gathered, spec, local = view._origin
        if gathered.local is not local:
            source = spec.with_placements(gathered.placements)
            local.copy_(run_route(gathered.local, cheapest_route(source, spec.placements)))
            count_for_borrowers(owner)
        view = owner


def refuse_writes(written: Sequence[object]) -> None:
    """Raises before an op writes to these tensors if one of them is a copied view and the write would be lost.

    Raises:
        PlacementError: the write would not reach the base, or the op writes to several tensors, whose values could be
            stored over one another.
    """
    if len(written) > 1 and any(map(is_copied, written)):
        raise PlacementError(
            "got an in-place write to several tensors at once, among them views whose sharded dim had to be gathered "
            "before it could be cut: one view is a copy and could be stored over another; write to one at a time"
        )
    for tensor in written:
        refuse_write(tensor)


def refuse_write(tensor: Any, *, restating: bool = False) -> None:
    """Raises before an op writes to `tensor` if it is a copied view and the write would be lost.

    Args:
        restating: whether the op gives the tensor another shape, with which it is no view of its base.
    """
    root = tensor
    while is_copied(root) and (origin := root._origin) is not None:
        if restating or origin.gathered is None or origin.spec.overlaps_itself:
            break
        root = origin.owner
    if not is_copied(root):
        return
    if root._crossing is not None and root._origin is None:
        raise PlacementError(
            f"got an in-place write to {tensor._spec}, {_refusal_of_crossing(root._crossing)}"
        )
    owner = tensor._spec if tensor._origin is None else tensor._origin.owner._spec
    raise PlacementError(
        f"got an in-place write to {tensor._spec}, a view of {owner}, whose sharded dim had to be gathered before "
        "it could be cut: the view is a copy and the write would be lost; redistribute the tensor so that the dim "
        "is not sharded, then take the view"
    )


def _refusal_of_crossing(crossing: Crossing) -> str:
    if crossing == "argument":
        return (
            "a view whose sharded dim had to be gathered before it could be cut, inside a compiled function that got "
            "it as an argument: its base outside would not show the write; take the view inside the function, or pass "
            "a clone() of it"
        )
    if crossing.of_argument:
        return (
            "a view of its argument that a compiled function returned as a copy: the argument would not show the "
            "write; write to the argument itself, write inside the function, or return a clone() of the view"
        )
    return (
        "which shares memory with another result of the compiled function that returned it, and one of them is a "
        "copy: the other would not show the write; write inside the function, or return a clone()"
    )


def crossed(tensor: Wrapped, crossing: Crossing, source: torch.Tensor | None = None) -> Wrapped:
    """Returns a tensor that crosses the boundary of a compiled graph as one that refuses writes.

    Args:
        source: the local tensor of the argument whose values were copied.
    """
    local = tensor._local_tensor
    traced = is_fake(local) or is_functional(local)
    if not traced and crossing != "argument" and not crossing.of_argument and crossing.count == 1:
        return tensor  # nothing else that the graph returned shares its memory
    result = wrap(type(tensor).copied_view, local, tensor._spec, tensor.requires_grad)
    result._crossing = crossing
    if traced:
        result._source = source
    elif source is not None:
        borrow(result, source)
    return result  # type: ignore[return-value]
