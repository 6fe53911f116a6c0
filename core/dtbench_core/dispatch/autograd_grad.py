"""The engine of autograd for DTensors: `backward`, and `torch.autograd.grad` without the checks that a spec answers.

What the engine calls back, such as hooks and a checkpoint's second forward, are calls of the user's: they run with
torch functions enabled, as the first forward did, so the engine is entered with them enabled.

In `grad` torch compares every output with its cotangent through symbolic shapes, and comes here only after it has
sorted its arguments once already. Where each cotangent has its output's class, shape and dtype there is nothing left to
check, and the engine can be called directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Value
from dtbench_core.torch_compat import DisableTorchFunction, make_grads, run_backward


def grad(
    outputs: Sequence[Value],
    inputs: Sequence[Value],
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor | None, ...]:
    """As torch.autograd.grad, which calls it with the outputs and inputs as tuples."""
    listed = grad_outputs if grad_outputs.__class__ in (list, tuple) else (grad_outputs,) * len(outputs)
    if any(others[name] for name in others if name != "only_inputs"):
        with DisableTorchFunction():
            return torch.autograd.grad(
                outputs, inputs, grad_outputs, retain_graph, create_graph, allow_unused=allow_unused, **others
            )
    cotangents = tuple(listed) if _fit(outputs, listed) else _cotangents(outputs, listed)
    kept = create_graph if retain_graph is None else retain_graph
    return run_backward(
        outputs, cotangents, kept, create_graph, inputs, bool(allow_unused), accumulate_grad=False
    )


def backward(
    tensors: Sequence[Value],
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """As torch.autograd.backward, which calls it with tuples."""
    cotangents = grad_tensors if isinstance(grad_tensors, Sequence) else [grad_tensors] * len(tensors)
    run_backward(
        tensors,
        _cotangents(tensors, cotangents),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        inputs or (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def backward_of(
    tensor: Value,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """As Tensor.backward."""
    if inputs is not None:
        leaves = inputs.values() if isinstance(inputs, dict) else inputs
        inputs = (leaves,) if isinstance(leaves, torch.Tensor) else tuple(leaves)
        if not inputs:
            raise RuntimeError("backward got inputs=[], expected tensors, or None for all leaves")
    backward((tensor,), (gradient,), retain_graph, create_graph, inputs)


def _cotangents(outputs: Sequence[Value], cotangents: Sequence[Value]) -> tuple[torch.Tensor | None, ...]:
    with DisableTorchFunction():
        return make_grads(outputs, cotangents, is_grads_batched=False)


def _fit(outputs: Sequence[Value], cotangents: Sequence[Value]) -> bool:
    """Whether every output has a cotangent of its shape and dtype: a DTensor for a DTensor, a plain tensor of its
    device for a plain one, such as what `to_local` gave."""
    if len(outputs) != len(cotangents):
        return False
    one: Any
    other: Any
    for output, cotangent in zip(outputs, cotangents, strict=True):
        if isinstance(output, Wrapper) and isinstance(cotangent, Wrapper):
            one, other = output._spec, cotangent._spec
        elif output.__class__ is torch.Tensor and cotangent.__class__ is torch.Tensor:
            one, other = output, cotangent
            if one.is_nested or other.is_nested or one.layout != other.layout or one.device != other.device:
                return False
        else:
            return False
        if one is not other and (one.shape != other.shape or one.dtype != other.dtype):
            return False
    return True
