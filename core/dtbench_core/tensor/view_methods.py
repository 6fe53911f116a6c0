"""Tensor methods and attributes that call torch directly, without `__torch_function__`.

View methods must call torch, since torch tracks views and their versions. Calling `__torch_function__` first would cost
a microsecond and change nothing. Torch function modes still intercept the call.
"""

from __future__ import annotations

from typing import Any

import torch

from dtbench_core.layout.wrapper import Wrapped
from dtbench_core.op_types import Call
from dtbench_core.torch_compat import DisableTorchFunction, disabled_torch_function

# Methods that return views of one tensor, and `requires_grad_`.
METHODS = (
    *("chunk", "detach", "expand", "flatten", "movedim", "narrow", "permute", "select", "split", "squeeze"),
    *("swapaxes", "t", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view", "requires_grad_"),
)

# Read-only attributes that optimizers read for every parameter in every step.
GETTERS: tuple[str, ...] = ("device", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "layout")

_PLAIN_INDEX = (int, slice, type(None), type(Ellipsis))
_getitem = torch.Tensor.__getitem__


def _direct_method(name: str) -> Call:
    method = getattr(torch.Tensor, name)

    def call(self: torch.Tensor, *args: object, **kwargs: object) -> Any:
        with DisableTorchFunction():
            return method(self, *args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = method.__doc__
    return call


def _getter(name: str) -> property:
    get = getattr(torch.Tensor, name).__get__
    return property(
        lambda self: disabled_torch_function(get, (), (self,)), doc=getattr(torch.Tensor, name).__doc__
    )


def _accessor(name: str) -> property:
    attribute = getattr(torch.Tensor, name)

    def put(self: torch.Tensor, value: object) -> None:
        with DisableTorchFunction():
            attribute.__set__(self, value)

    def forget(self: torch.Tensor) -> None:
        with DisableTorchFunction():
            attribute.__delete__(self)

    return _getter(name).setter(put).deleter(forget)


def getitem(self: torch.Tensor, index: Any) -> Any:
    """Implements `x[index]`. Calls torch directly if the index is made of ints, slices, None and `...`, for a view."""
    for item in index if index.__class__ is tuple else (index,):
        if item.__class__ not in _PLAIN_INDEX:
            return _getitem(self, index)
    with DisableTorchFunction():
        return _getitem(self, index)


def direct_methods(cls: type[Wrapped]) -> type[Wrapped]:
    """Class decorator that gives `cls` the methods and attributes of this module."""
    for name in METHODS:
        setattr(cls, name, _direct_method(name))
    for name in GETTERS:
        setattr(cls, name, _getter(name))
    cls.grad = _accessor("grad")  # type: ignore[assignment]
    cls.__getitem__ = getitem  # type: ignore[method-assign, assignment]
    return cls
