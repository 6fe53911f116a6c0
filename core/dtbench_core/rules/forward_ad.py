"""What forward AD asks when a tensor gets a tangent: whether it lies as the tensor does, and memory that does."""

from __future__ import annotations

from typing import Any

import torch

from dtbench_core.errors import NoRuleError
from dtbench_core.layout.placement import permuted
from dtbench_core.layout.spec import contiguous_stride
from dtbench_core.layout.wrapper import Wrapper, held_by
from dtbench_core.op_types import Value
from dtbench_core.rules.base import OpCall, Strategy, aten, decomposition, rule
from dtbench_core.torch_compat import active_tracer, is_functional, traced_value


@decomposition(aten._has_same_storage_numel.default)
def same_placements(tensor: Value, tangent: Any) -> bool:
    """(tensor, tangent): where not, torch copies the tangent into what the op below gives.

    Raises:
        NoRuleError: while a graph is traced of which the tensor is no input.
    """
    tracer = active_tracer()
    # AOTAutograd traces what wrappers hold.
    unknown = isinstance(tensor, Wrapper) and not is_functional(held_by(tensor))
    if tracer is not None and unknown and traced_value(tensor, tracer) is tensor:
        raise NoRuleError(
            f"a graph is traced of tangents of {tensor._spec}, which is no input of it, as torch.func.linearize does; "
            "the graph would hold the values of today: use torch.func.jvp, or trace a function of both"
        )
    return isinstance(tensor, Wrapper) and isinstance(tangent, Wrapper) and tensor._spec is tangent._spec


@rule(aten._new_zeros_with_same_feature_meta.default)
def tangent_like(call: OpCall) -> Strategy:
    """(tangent, tensor) -> zeros of the batch dims of the tangent and the shape of the tensor, placed like the tensor.
    Nothing is read."""
    tangent, tensor = call.inputs
    batch = tuple(tangent.shape[: call["self_num_batch_dims"]])
    lead = len(batch)
    placed = permuted(tensor.placements, range(lead, lead + tensor.ndim))

    def local_op(_: torch.Tensor, local: torch.Tensor, **__: object) -> torch.Tensor:
        if not lead:
            return torch.zeros_like(local)
        stride = *(step * local.numel() for step in contiguous_stride(batch)), *local.stride()
        return local.new_empty_strided((*batch, *local.shape), stride).zero_()

    return Strategy(
        [], local_op=local_op, exact_placements=((tangent.placements, tensor.placements), (placed,))
    )
