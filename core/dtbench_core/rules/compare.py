"""Ops whose answer is a Python value, which must be the same on every rank."""

from __future__ import annotations

import torch

from dtbench_core import comm
from dtbench_core.layout.local_shards import holds_shards
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Value
from dtbench_core.rules.base import OpCall, Strategy, aten, decomposition, rule


@rule(aten._local_scalar_dense.default, aten.equal.default, aten._linalg_check_errors.default)
def whole_tensors(call: OpCall) -> Strategy:
    """Read whole, so that all ranks answer, or raise."""
    return Strategy([])


@decomposition(aten.equal.default)
def equal(input: Value, other: object) -> Value:
    """Every rank compares what it holds, and they agree by one flag. Two tensors placed otherwise move."""
    if not isinstance(input, Wrapper) or not isinstance(other, Wrapper):
        return NotImplemented
    spec, as_well = input._spec, other._spec
    matching = spec is as_well or (
        spec.info is as_well.info
        and (spec.placements, spec.shape, spec.dtype) == (as_well.placements, as_well.shape, as_well.dtype)
    )
    if not matching or spec.has_partial() or spec.info.coordinate is None:
        return NotImplemented
    ours, theirs = input._local_tensor, other._local_tensor
    if ours.__class__ is torch.Tensor or holds_shards(ours):
        constant = torch.ones if torch.equal(ours, theirs) else torch.zeros
        same = constant((), dtype=torch.int32, device=ours.device)
    else:  # of simulated ranks, each has its own answer
        same = (ours == theirs).all().int()
    for placement, group in zip(spec.placements, spec.info.groups, strict=True):
        if not placement.is_replicate():
            comm.all_reduce(same, group, "min")
    return bool(same.item())


@rule(aten.is_same_size.default)
def metadata(call: OpCall) -> Strategy:
    """Global shapes answer; the shards need not move."""
    same = call.inputs[0].shape == call.inputs[1].shape
    stay = tuple(spec.placements for spec in call.inputs), ()
    return Strategy([], local_op=lambda *_: same, exact_placements=stay)
