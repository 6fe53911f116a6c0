"""`torch.autograd.grad` of DTensors, without the checks that a spec answers at once.

torch compares every output with its cotangent through symbolic shapes, and comes here only after it has
sorted its arguments once already. Where each cotangent is a DTensor of its output's shape and dtype there
is nothing left to check, and the engine can be asked directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.torch_compat import run_backward


def grad(
    outputs: Sequence[Any],
    inputs: Sequence[Any],
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor | None, ...]:
    """As torch.autograd.grad, which calls it with the outputs and inputs as tuples."""
    given = grad_outputs if grad_outputs.__class__ in (list, tuple) else (grad_outputs,)
    if any(others[name] for name in others if name != "only_inputs") or not _fit(outputs, given):
        return torch.autograd.grad(
            outputs, inputs, grad_outputs, retain_graph, create_graph, allow_unused=allow_unused, **others
        )
    kept = create_graph if retain_graph is None else retain_graph
    return run_backward(
        outputs, tuple(given), kept, create_graph, inputs, bool(allow_unused), accumulate_grad=False
    )


def _fit(outputs: Sequence[Any], cotangents: Sequence[Any]) -> bool:
    """Whether every output has a cotangent of its shape and dtype, all of them DTensors."""
    if len(outputs) != len(cotangents):
        return False
    for output, cotangent in zip(outputs, cotangents, strict=True):
        if not (isinstance(output, Wrapper) and isinstance(cotangent, Wrapper)):
            return False
        one, other = output._spec, cotangent._spec
        if one is not other and (one.shape != other.shape or one.dtype != other.dtype):
            return False
    return True
