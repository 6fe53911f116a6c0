"""Ops that return a Python value, which must be the same on every rank, and ops that forward AD calls."""

from __future__ import annotations

from typing import Any

import torch

from dtbench_core import comm
from dtbench_core.errors import NoRuleError
from dtbench_core.layout.local_shards import holds_shards
from dtbench_core.layout.placement import permuted
from dtbench_core.layout.spec import contiguous_stride
from dtbench_core.layout.wrapper import Wrapper, stored_local
from dtbench_core.op_types import Value
from dtbench_core.rules.base import OpCall, Strategy, aten, decomposition, rule
from dtbench_core.torch_compat import active_tracer, is_functional, traced_value


@rule(aten._local_scalar_dense.default, aten.equal.default, aten._linalg_check_errors.default)
def replicated_inputs(call: OpCall) -> Strategy:
    """Inputs are replicated, so that all ranks return the same value, or all raise."""
    return Strategy([])


@decomposition(aten.equal.default)
def equal(input: Value, other: object) -> Value:
    """Each rank compares its shards, and an all-reduce combines the results. Differently placed tensors are moved."""
    if not isinstance(input, Wrapper) or not isinstance(other, Wrapper):
        return NotImplemented
    spec, other_spec = input._spec, other._spec
    matching = spec is other_spec or (
        spec.info is other_spec.info
        and (spec.placements, spec.shape, spec.dtype)
        == (other_spec.placements, other_spec.shape, other_spec.dtype)
    )
    if not matching or spec.has_partial() or spec.info.coordinate is None:
        return NotImplemented
    input_local, other_local = input._local_tensor, other._local_tensor
    if input_local.__class__ is torch.Tensor or holds_shards(input_local):
        constant = torch.ones if torch.equal(input_local, other_local) else torch.zeros
        is_equal = constant((), dtype=torch.int32, device=input_local.device)
    else:  # simulated ranks, whose results differ
        is_equal = (input_local == other_local).all().int()
    for placement, group in zip(spec.placements, spec.info.groups, strict=True):
        if not placement.is_replicate():
            comm.all_reduce(is_equal, group, "min")
    return bool(is_equal.item())


@rule(aten.is_same_size.default)
def is_same_size(call: OpCall) -> Strategy:
    """Compares the global shapes without moving the tensors."""
    is_same_size = call.inputs[0].shape == call.inputs[1].shape
    unchanged = tuple(spec.placements for spec in call.inputs), ()
    return Strategy([], local_op=lambda *_: is_same_size, exact_placements=unchanged)


# ---- tangents of forward AD ----


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
