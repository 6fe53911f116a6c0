"""Views that contain copied values, where plain torch returns a window on the memory of the base.

A view op may cut a dim that is sharded. That dim is gathered first, so the result is a window on a copy. A write to the
result would not reach the base, and a write to the base would not be visible in the result. Such a result has another
class, which stores where its values come from. It is in one of these states:

    WINDOW  any other tensor: it shares memory with its base, or is not a view
    COPY    it has the values of its base; a write to it is stored to the base, by each rank for its own part
    STALE   its base was written to since; the base is gathered again before the view is read

If the gathered copy is not stored (for conj, and for reduced pending sums), writes and reads of a stale view raise.
Writes also raise on a copied view of an input that a compiled graph returned. It is linked to the input's storage, not
to the input.

Ops on a copied view return DTensors, and views of it are copied views. It has separate plans, because its class is part
of their keys.
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
    ReadOnlyReason,
    SharedResults,
    Wrapped,
    Wrapper,
    count_by_storage,
    count_for_copied_views,
    share_memory,
    stored_local,
    track_argument_writes,
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
    WINDOW = auto()  # never changes to another state
    COPY = auto()  # until the base or the view is written to
    STALE = auto()  # until it is read


class Gathered(NamedTuple):
    """The local tensor that a copied view is a window on: the values of its base at `placements`."""

    local: torch.Tensor
    placements: Placements


class Origin(NamedTuple):
    """The source of the values of a copied view.

    torch counts writes to a tensor and its views together, but writes to `.data` separately.

    Attributes:
        owner: the base.
        version: torch's version counter when the values were copied. None for tensors without one, such as
            inference tensors; such views are gathered at every read.
        writes: `SharedMemory.count()` at that time.
        gathered: the gathered copy; None if it is not stored.
        spec, local: spec and local tensor of the base at that time. The base may get another shape in place.
    """

    owner: Wrapper
    version: int | None
    writes: int
    gathered: Gathered | None
    spec: DTensorSpec
    local: torch.Tensor


class CopiedView:
    """Mixin for copied views: `class V(CopiedView, D)`. `V.viewed` is D, and `D.copied_view` is V."""

    __slots__ = ()

    viewed: ClassVar[type[Wrapper]]
    # None for a simulated rank's part of a copied view: the whole DTensor was checked before.
    _origin: Origin | None = None
    # Whether a traced backward made it. A gradient owns its memory once the graph returns it.
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
        if state_of(self) is ViewState.STALE:  # must not communicate, because one rank may print alone
            return f"DTensor({self._spec}, local=stale: gathered again when read, because its base was written to)"
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
    """Returns a view of `base` (of class `cls`) whose values were copied to `local`.

    Args:
        gathered: the gathered copy that the view is a window on, if it is stored.
        offset: bytes between the memory of `base` and of the view.
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
    """Makes `tensor` share the memory of `source`, after `.data = source` replaced its local tensor and spec."""
    share_memory(source, tensor, 0)
    origin = source._origin if is_copied(source) else None
    if is_copied(tensor) or origin is not None:
        tensor.__class__ = tensor.viewed if origin is None else tensor.viewed.copied_view
        # torch counts its writes separately from those of its base; `memory` counts the writes to the base.
        tensor._origin = origin and origin._replace(version=version_of(tensor))


def reusable_origin(tensor: Value) -> Origin | None:
    """Returns the origin of a copied view if a deepcopy or a loaded checkpoint of it can be a view again, else None."""
    if not is_copied(tensor) or tensor._origin is None or tensor.requires_grad:
        return None
    tensor._local_tensor  # noqa: B018 - gathers the base again if it was written to
    origin: Origin = tensor._origin
    is_current = (
        origin.gathered is not None and origin.owner._spec is origin.spec and origin.version is not None
    )
    return origin if is_current and origin.local is stored_local(origin.owner) else None


def state_of(tensor: Value) -> ViewState:
    if not is_copied(tensor):
        return ViewState.WINDOW
    if (origin := tensor._origin) is None:
        writes_at_return = tensor._writes_at_return
        is_current = writes_at_return is None or writes_at_return == tensor._memory[0].count()
        return ViewState.COPY if is_current else ViewState.STALE
    if origin.version is None:  # writes are not counted, so there may have been one
        return ViewState.COPY if origin.gathered is None else ViewState.STALE
    if (origin.version, origin.writes) != (version_of(tensor), tensor._memory[0].count()):
        return ViewState.STALE
    return state_of(origin.owner) if is_copied(origin.owner) else ViewState.COPY


def refresh_stale(result: Any) -> None:
    """Gathers a stale result of a traced graph while that is still possible, before the wrapper is removed."""
    if state_of(result) is ViewState.STALE:
        with functionalizing():
            _refresh(result)


def _refresh(view: Any) -> None:
    """Copies the current values of the base to the memory that `view` is a window on.

    Raises:
        PlacementError: that memory is not stored.
    """
    origin: Origin | None = view._origin
    if origin is None:
        raise PlacementError(
            f"got {view._spec}, a view of an argument that a compiled function returned as a copy; the argument has "
            "been written to since, so the view has old values: take the view outside the function or again "
            "after the write, or return a clone() of it"
        )
    if (gathered := origin.gathered) is None:
        raise PlacementError(
            f"got a view, {view._spec}, whose sharded dim had to be gathered before it could be cut, and "
            "whose base has been written to since, so it has old values: take the view again after the write, "
            "or redistribute the base so that the dim is not sharded"
        )
    if state_of(origin.owner) is ViewState.STALE:
        _refresh(origin.owner)
    if gathered.local is not origin.local:
        gathered.local.copy_(run_route(origin.local, cheapest_route(origin.spec, gathered.placements)))
    view._origin = origin._replace(version=version_of(view), writes=view._memory[0].count())


def store_to_base(view: Any) -> None:
    """Stores a write to `view` to its base, and from there to the base of the base; each rank stores its own part.

    The shared version counter makes the view stale afterwards.
    """
    while is_copied(view) and view._origin is not None:
        owner, _, _, gathered, spec, local = view._origin
        if gathered.local is not local:
            local.copy_(
                run_route(
                    gathered.local, cheapest_route(spec.with_placements(gathered.placements), spec.placements)
                )
            )
            count_for_copied_views(owner)
        view = owner


def refuse_writes(written: Sequence[object]) -> None:
    """Raises if an op must not write to these tensors.

    Raises:
        PlacementError: one is a copied view and the write would not reach its base; or there are several tensors and
            one is a copied view, so that it could be stored over another.
    """
    if len(written) > 1 and any(map(is_copied, written)):
        raise PlacementError(
            "got an in-place write to several tensors at once, among them views whose sharded dim had to be gathered "
            "before it could be cut: one view is a copy and could be stored over another; write to one at a time"
        )
    for tensor in written:
        refuse_write(tensor)


def refuse_write(tensor: Any, *, changes_shape: bool = False) -> None:
    """Raises if an op must not write to `tensor`.

    Args:
        changes_shape: whether the write changes the shape, which a view of the base does not support.

    Raises:
        PlacementError: it is a copied view, and the write would be lost.
    """
    root = tensor
    while is_copied(root) and (origin := root._origin) is not None:
        if changes_shape or origin.gathered is None or origin.spec.overlaps_itself:
            break
        root = origin.owner
    if not is_copied(root):
        return
    if root._read_only_reason is not None and root._origin is None:
        raise PlacementError(
            f"got an in-place write to {tensor._spec}, {_read_only_message(root._read_only_reason)}"
        )
    owner = tensor._spec if tensor._origin is None else tensor._origin.owner._spec
    raise PlacementError(
        f"got an in-place write to {tensor._spec}, a view of {owner}, whose sharded dim had to be gathered before "
        "it could be cut: the view is a copy and the write would be lost; redistribute the tensor so that the dim "
        "is not sharded, then take the view"
    )


def _read_only_message(reason: ReadOnlyReason) -> str:
    if reason == "argument":
        return (
            "a view whose sharded dim had to be gathered before it could be cut, inside a compiled function that got "
            "it as an argument: its base outside would not show the write; take the view inside the function, or pass "
            "a clone() of it"
        )
    if reason.of_argument:
        return (
            "a view of its argument that a compiled function returned as a copy: the argument would not show the "
            "write; write to the argument itself, write inside the function, or return a clone() of the view"
        )
    return (
        "which shares memory with another result of the compiled function that returned it, and one of them is a "
        "copy: the other would not show the write; write inside the function, or return a clone()"
    )


def mark_read_only(tensor: Wrapped, reason: ReadOnlyReason, source: torch.Tensor | None = None) -> Wrapped:
    """Returns a tensor that crosses the boundary of a compiled graph, as one that refuses writes if necessary.

    Args:
        source: the local tensor of the argument whose values were copied.
    """
    local = tensor._local_tensor
    traced = is_fake(local) or is_functional(local)
    if not traced and reason != "argument" and not reason.of_argument and reason.count == 1:
        return tensor  # nothing else that the graph returned shares its memory
    result = wrap(type(tensor).copied_view, local, tensor._spec, tensor.requires_grad)
    result._read_only_reason = reason
    if traced:
        result._source = source
    elif source is not None:
        track_argument_writes(result, source)
    return result  # type: ignore[return-value]
