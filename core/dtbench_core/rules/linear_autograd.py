"""`F.linear` as one op forward and one backward, where torch makes views and products of it.

torch flattens the leading dims, multiplies and restores them: five ops forward and six backward, each
of which a DTensor has to plan, wrap and unwrap. Here the whole layer has one rule (rules/linear.py) and
one autograd node.
"""

from __future__ import annotations

from typing import Any

import torch

from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.rules.linear import linear_backward, linear_forward
from dtbench_core.torch_compat import is_grad_enabled


class Linear(torch.autograd.Function):
    """input [..., k], weight [o, k], bias [o] or None -> [..., o]."""

    @staticmethod
    def forward(ctx: Any, input: Wrapper, weight: Wrapper, bias: Wrapper | None) -> Any:
        ctx.save_for_backward(input, weight)
        ctx.bias_dtype = None if bias is None else bias._spec.dtype
        return run(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Wrapper) -> tuple[Any, Any, Any]:
        given, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        if is_grad_enabled():  # to be differentiated again
            return _differentiable_backward(grad, given, weight, needs)
        cls = type(grad)
        made = iter(cls.__torch_dispatch__(linear_backward, (), (grad, given, weight, *needs)))  # type: ignore[call-arg]
        return tuple(next(made) if need else None for need in needs)  # type: ignore[return-value]


def run(input: Wrapper, weight: Wrapper, bias: Wrapper | None) -> Any:
    """The layer's plan, below autograd."""
    args = (input, weight) if bias is None else (input, weight, bias)
    return type(input).__torch_dispatch__(linear_forward, (), args)  # type: ignore[call-arg]


def linear(input: Any, weight: Any, bias: Any = None, **others: Any) -> Any:
    """F.linear for DTensors without active modes; NotImplemented where it is not for it, as with `out=`."""
    if others:
        return NotImplemented
    cls = input.__class__
    for one in (weight, bias):
        if one is not None and one.__class__ is not cls:
            return NotImplemented
    if not issubclass(cls, Wrapper):
        return NotImplemented
    if is_grad_enabled():
        return Linear.apply(input, weight, bias)
    return run(input, weight, bias)


def _differentiable_backward(
    grad: Any, input: Any, weight: Any, needs: tuple[bool, bool, bool]
) -> tuple[Any, Any, Any]:
    flat = grad.reshape(-1, grad.shape[-1])
    return (
        grad.matmul(weight) if needs[0] else None,
        flat.t().mm(input.reshape(-1, input.shape[-1])) if needs[1] else None,
        flat.sum(0) if needs[2] else None,
    )
