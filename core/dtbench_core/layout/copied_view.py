"""Views that hold copied values, where plain torch gives a window on the memory of their base.

A view op cuts a dim. Where ranks hold parts of that dim it is gathered first, so that the result is a copy:
a write to it would not reach the base, nor one to the base show in it. Such a result is made as a tensor of
another class, which remembers where its values come from and is in one of these states:

    WINDOW  every other tensor: it shares its memory with its base, or is no view; it is read and written
    COPY    it has the values of its base: it is read, and a write to it is refused
    STALE   its base was written to since, which a window would show: reading it is refused too

Ops on a copied view give DTensors; its views are copied views. Plans are made for it apart: its class is in
their key.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, ClassVar, NamedTuple

import torch

from dtbench_core.errors import PlacementError
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import Wrapped, Wrapper, held_by, wrap
from dtbench_core.torch_compat import version_of


class ViewState(Enum):
    WINDOW = auto()  # for ever, or a COPY from the start
    COPY = auto()  # until its base, itself excluded, is written to
    STALE = auto()  # for ever


class Origin(NamedTuple):
    """Where a copied view has its values from.

    owner: the spec of its base. version: how often that had been written to by then; torch counts the writes
    to a tensor and to all its views together. None: it does not count, as of inference tensors.
    """

    owner: DTensorSpec
    version: int | None


class CopiedView:
    """Mixed into a class of DTensors, in front of it (`viewed`); that one names the result as its `copied_view`."""

    __slots__ = ()

    viewed: ClassVar[type[Wrapper]]
    # None: of a simulated rank's part, whose whole is asked before.
    _origin: Origin | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.viewed.__torch_function__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls.viewed.__torch_dispatch__(func, types, args, kwargs)

    @property
    def _local_tensor(self: Any) -> torch.Tensor:
        if state_of(self) is ViewState.STALE:
            raise PlacementError(
                f"got a view, {self._spec}, whose sharded dim had to be gathered before it could be cut, and "
                "whose base has been written to since: it shows the old values; take the view again after the write, "
                "or redistribute the base so that the dim is whole"
            )
        return held_by(self)

    @_local_tensor.setter
    def _local_tensor(self: Any, held: torch.Tensor) -> None:
        Wrapper.__dict__["_local_tensor"].__set__(self, held)

    def __deepcopy__(self: Any, memo: Any) -> Any:
        if self.is_leaf and id(self) not in memo:
            # The copy has no base, and may be written to.
            memo[id(self)] = self.detach().clone().requires_grad_(self.requires_grad)
        return self.viewed.__deepcopy__(self, memo)


def copied_view(cls: type[Wrapped], local: torch.Tensor, spec: DTensorSpec, base: Wrapper) -> Wrapped:
    """A view of `base`, which is a `cls`, whose values were copied to `local`."""
    made = wrap(cls.copied_view, local, spec)
    made._origin = Origin(base._spec, version_of(base))  # type: ignore[attr-defined]
    return made  # type: ignore[return-value]


def is_copied(tensor: object) -> bool:
    return isinstance(tensor, CopiedView)


def state_of(tensor: Any) -> ViewState:
    if not is_copied(tensor):
        return ViewState.WINDOW
    origin = tensor._origin
    if origin is None or origin.version is None or origin.version == version_of(tensor):
        return ViewState.COPY
    return ViewState.STALE


def refuse_write(tensor: Any) -> None:
    """Before an op writes to `tensor`.

    Raises:
        PlacementError: it is a copied view, so that the write would be lost.
    """
    if state_of(tensor) is not ViewState.WINDOW:
        owner = tensor._spec if tensor._origin is None else tensor._origin.owner
        raise PlacementError(
            f"got an in-place write to {tensor._spec}, a view of {owner}, whose sharded dim had to be gathered before "
            "it could be cut: the view is a copy and the write would be lost; redistribute the tensor so that the dim "
            "is whole, then take the view"
        )
