"""Ops whose answer is a Python value: every rank needs the whole tensors to give the same answer."""

from __future__ import annotations

from dtbench_core.rules.base import OpCall, Strategy, aten, rule


@rule(aten._local_scalar_dense.default, aten.equal.default)
def whole_tensors(call: OpCall) -> Strategy:
    return Strategy([])


@rule(aten.is_same_size.default)
def metadata(call: OpCall) -> Strategy:
    """Global shapes answer; the shards need not move."""
    same = call.inputs[0].shape == call.inputs[1].shape
    return Strategy([], local_op=lambda *_: same)
