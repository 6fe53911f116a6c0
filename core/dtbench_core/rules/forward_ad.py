"""Ops that forward AD calls when a tensor gets a tangent: whether their layouts match, and zeros of the same layout."""

from __future__ import annotations

from typing import Any

import torch

from dtbench_core.errors import NoRuleError
from dtbench_core.layout.placement import permuted
from dtbench_core.layout.spec import contiguous_stride
from dtbench_core.layout.wrapper import Wrapper, stored_local
from dtbench_core.op_types import Value
from dtbench_core.rules.base import OpCall, Strategy, aten, decomposition, rule
from dtbench_core.torch_compat import active_tracer, is_functional, traced_value


@decomposition(aten._has_same_storage_numel.default)
def same_placements(tensor: Value, tangent: Any) -> bool:
    """Whether tensor and tangent have the same spec. If not, torch copies the tangent into a result of `tangent_like`.

    Raises:
        NoRuleError: a graph is being traced, and the tensor is not one of its inputs.
    """
    tracer = active_tracer()
    # AOTAutograd traces the tensors inside wrappers.
    unknown = isinstance(tensor, Wrapper) and not is_functional(stored_local(tensor))
    if tracer is not None and unknown and traced_value(tensor, tracer) is tensor:
        raise NoRuleError(
            f"got a tangent of {tensor._spec} in a traced graph, expected this tensor to be an input of the graph "
            "(with torch.func.linearize it is not, and the graph would contain its current values): "
            "use torch.func.jvp, or trace a function that has tensor and tangent as inputs"
        )
    return isinstance(tensor, Wrapper) and isinstance(tangent, Wrapper) and tensor._spec is tangent._spec


@rule(aten._new_zeros_with_same_feature_meta.default)
def tangent_like(call: OpCall) -> Strategy:
    """(tangent, tensor) -> zeros with the batch dims of the tangent and the layout of the tensor. No input is read."""
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
