"""Ops that return a Python value, which must be the same on every rank."""

from __future__ import annotations

import torch

from dtbench_core import comm
from dtbench_core.layout.local_shards import holds_shards
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Value
from dtbench_core.rules.base import OpCall, Strategy, aten, decomposition, rule


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
