"""`backward` and `torch.autograd.grad` for DTensors, which call autograd's engine directly.

The engine calls back into user code, such as hooks and the second forward pass of a checkpoint. That code must run with
torch functions enabled, so the engine is called with them enabled.

torch's `grad` compares every output with its cotangent through symbolic shapes, which is slow. If each cotangent has
its output's class, shape and dtype, nothing remains to be checked.
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
    **options: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Implements torch.autograd.grad, which passes the outputs and inputs as tuples."""
    listed = grad_outputs if grad_outputs.__class__ in (list, tuple) else (grad_outputs,) * len(outputs)
    if any(options[name] for name in options if name != "only_inputs"):
        with DisableTorchFunction():
            return torch.autograd.grad(
                outputs,
                inputs,
                grad_outputs,
                retain_graph,
                create_graph,
                allow_unused=allow_unused,
                **options,
            )
    cotangents = tuple(listed) if _fit(outputs, listed) else _cotangents(outputs, listed)
    retain = create_graph if retain_graph is None else retain_graph
    return run_backward(
        outputs, cotangents, retain, create_graph, inputs, bool(allow_unused), accumulate_grad=False
    )


def backward(
    tensors: Sequence[Value],
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Implements torch.autograd.backward, which passes tuples."""
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
    """Implements Tensor.backward."""
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
    """Whether every output has a cotangent of its shape and dtype.

    The cotangent of a DTensor must be a DTensor, that of a plain tensor a plain tensor on the same device.
    """
    if len(outputs) != len(cotangents):
        return False
    expected: Any
    got: Any
    for output, cotangent in zip(outputs, cotangents, strict=True):
        if isinstance(output, Wrapper) and isinstance(cotangent, Wrapper):
            expected, got = output._spec, cotangent._spec
        elif output.__class__ is torch.Tensor and cotangent.__class__ is torch.Tensor:
            expected, got = output, cotangent
            if (
                expected.is_nested
                or got.is_nested
                or expected.layout != got.layout
                or expected.device != got.device
            ):
                return False
        else:
            return False
        if expected is not got and (expected.shape != got.shape or expected.dtype != got.dtype):
            return False
    return True
