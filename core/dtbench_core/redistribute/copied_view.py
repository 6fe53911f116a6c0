"""Views that hold copied values, where plain torch gives a window on the memory of their base.

A view op cuts a dim. Where ranks hold parts of that dim it is gathered first, so that the result is a window on
a copy: a write to it would not reach the base, nor one to the base show in it. Such a result is made as a tensor
of another class, which remembers where its values come from and is in one of these states:

    WINDOW  every other tensor: it shares its memory with its base, or is no view
    COPY    it has the values of its base; what is written to it is stored to the base, each rank its own part
    STALE   its base was written to since, which a window would show: the base is gathered again to read it

Where the copy is not kept (of conj, of a materialised pending reduction), writes and reading a stale one are refused;
so they are of a copied view of an input that a graph returned, which knows the input's storage alone.

Ops on a copied view give DTensors; its views are copied views. Plans are made for it apart: its class is in
their key.
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
    held_by,
    share_memory,
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
    WINDOW = auto()  # for ever, or a COPY from the start
    COPY = auto()  # until its base, or itself, is written to
    STALE = auto()  # until it is read


class Gathered(NamedTuple):
    """The local tensor on which a copied view is a window: its base's values at `placements`."""

    local: torch.Tensor
    placements: Placements


class Origin(NamedTuple):
    """Where a copied view has its values from.

    owner: its base. version, writes: how often that had been written to by then; torch counts the writes to a tensor
    and to all its views together, those to `.data` apart. None: it does not count, as of inference tensors: those are
    gathered at every reading. gathered: None where not kept. spec, local: of the base then, which may get another
    shape in place.
    """

    owner: Wrapper
    version: int | None
    writes: int
    gathered: Gathered | None
    spec: DTensorSpec
    local: torch.Tensor


class CopiedView:
    """Mixed into a class of DTensors, in front of it (`viewed`); that one names the result as its `copied_view`."""

    __slots__ = ()

    viewed: ClassVar[type[Wrapper]]
    # None: of a simulated rank's part, whose whole tensor is checked before.
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
            _gather_again(self)
        return held_by(self)

    @_local_tensor.setter
    def _local_tensor(self: Any, held: torch.Tensor) -> None:
        Wrapper.__dict__["_local_tensor"].__set__(self, held)

    def __repr__(self: Any, **options: object) -> str:
        if state_of(self) is ViewState.STALE:  # one rank may print alone: nothing is sent
            return f"DTensor({self._spec}, local=to be gathered again, as its base was written to)"
        return cast("str", self.viewed.__repr__(self, **options))

    def __deepcopy__(self: Any, memo: Any) -> Any:
        if not self.is_leaf or id(self) in memo:
            return self.viewed.__deepcopy__(self, memo)
        if (origin := kept_origin(self)) is None or not origin.owner.is_leaf:
            copied = self.detach().clone().requires_grad_(self.requires_grad)  # without a base
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
        else:
            owner, local, gathered = deepcopy((origin.owner, held_by(self), origin.gathered), memo)
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
    """A view of `base`, which is a `cls`, whose values were copied to `local`: a window on `gathered`, if given.
    offset: in bytes behind it."""
    view = wrap(cls.copied_view, local, spec)
    memory = share_memory(base, view, offset)
    count_by_storage(base, memory)
    view._origin = Origin(base, version_of(base), memory.count(), gathered, base._spec, held_by(base))  # type: ignore[attr-defined]
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
    """After `tensor` was given the local tensor and spec of `source` (`.data = source`): from then on it is the same
    view, if any, of the same memory."""
    share_memory(source, tensor, 0)
    origin = source._origin if is_copied(source) else None
    if is_copied(tensor) or origin is not None:
        tensor.__class__ = tensor.viewed if origin is None else tensor.viewed.copied_view
        # Its writes are counted apart from those of its base, which are counted in the memory.
        tensor._origin = origin and origin._replace(version=version_of(tensor))


def kept_origin(tensor: Value) -> Origin | None:
    """Where a view that had to be copied has its values from, if what is loaded or copied of it can be a view again: it
    then shares memory with its base as a plain one does."""
    if not is_copied(tensor) or tensor._origin is None or tensor.requires_grad:
        return None
    tensor._local_tensor  # noqa: B018 - read anew, if its base was written to since
    origin: Origin = tensor._origin
    kept = origin.gathered is not None and origin.owner._spec is origin.spec and origin.version is not None
    return origin if kept and origin.local is held_by(origin.owner) else None


def state_of(tensor: Value) -> ViewState:
    if not is_copied(tensor):
        return ViewState.WINDOW
    origin = tensor._origin
    if origin is None:
        returned_at = tensor._returned_at
        fresh = returned_at is None or returned_at == tensor._memory[0].count()
        return ViewState.COPY if fresh else ViewState.STALE
    if origin.version is None:  # writes are not counted, so there may have been some
        return ViewState.COPY if origin.gathered is None else ViewState.STALE
    seen = origin.version, origin.writes
    if seen != (version_of(tensor), tensor._memory[0].count()):
        return ViewState.STALE
    return state_of(origin.owner) if is_copied(origin.owner) else ViewState.COPY


def read_again(result: Any) -> None:
    """Of a graph that is traced: what a write made stale is gathered while that can be, before the result is taken
    apart."""
    if state_of(result) is ViewState.STALE:
        with functionalizing():
            _gather_again(result)


def _gather_again(view: Any) -> None:
    """Puts what the base holds now into the memory on which `view` is a window.

    Raises:
        PlacementError: that memory is not kept.
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
            f"got a view, {view._spec}, whose sharded dim had to be gathered before it could be cut, and "
            "whose base has been written to since: it shows the old values; take the view again after the write, "
            "or redistribute the base so that the dim is whole"
        )
    if state_of(origin.owner) is ViewState.STALE:
        _gather_again(origin.owner)
    if gathered.local is not origin.local:
        gathered.local.copy_(run_route(origin.local, cheapest_route(origin.spec, gathered.placements)))
    view._origin = origin._replace(version=version_of(view), writes=view._memory[0].count())


def store_to_base(view: Any) -> None:
    """After an op wrote to `view`: each rank stores its own part to the base, and the base to its own base.

    The view is stale from then on, by the count of writes that it shares with them.
    """
    while is_copied(view) and view._origin is not None:
        owner, _, _, gathered, spec, local = view._origin
        if gathered.local is not local:
            source = spec.with_placements(gathered.placements)
            local.copy_(run_route(gathered.local, cheapest_route(source, spec.placements)))
            count_for_borrowers(owner)
        view = owner


def refuse_writes(written: Sequence[object]) -> None:
    """Before an op writes to these tensors.

    Raises:
        PlacementError: a copied view whose base the write would not reach, or several tensors with one among them,
            of which one would be stored over the other.
    """
    if len(written) > 1 and any(map(is_copied, written)):
        raise PlacementError(
            "got an in-place write to several tensors at once, among them views whose sharded dim had to be gathered "
            "before it could be cut: one view is a copy and could be stored over another; write to one at a time"
        )
    for one in written:
        refuse_write(one)


def refuse_write(tensor: Any, *, restating: bool = False) -> None:
    """As `refuse_writes` of one tensor. restating: it would get another shape, as no view of its base has.

    Raises:
        PlacementError: it is a copied view, so that the write would be lost.
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
        "is whole, then take the view"
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
