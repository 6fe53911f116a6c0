"""Ops along one dim, which is whole: running sums and extrema, sorts, flips.

The other dims are a batch and keep their shards.
"""

from __future__ import annotations

from dtbench_core.layout.placement import REDUCE_OPS
from dtbench_core.rules.base import OpCall, Strategy, along_others, aten, linear_rows, rule


@rule(aten.cumprod.default, aten.cumprod_.default, aten.logcumsumexp.default, aten._logcumsumexp.default)
@rule(aten.cummax.default, aten.cummin.default)
@rule(aten.sort.default, aten.sort.stable, aten.topk.default)
def along_one_dim(call: OpCall) -> Strategy:
    return Strategy(along_others(call, [call.dim()], outs=len(call.outputs)))


@rule(aten.cumsum.default, aten.cumsum_.default)
def cumsum(call: OpCall) -> Strategy:
    """Linear, unless the sum is taken in integers: these cut each term."""
    source, meta = call.inputs[0].dtype, call.outputs[0]
    truncates = source.is_floating_point and meta is not None and not meta.dtype.is_floating_point
    return Strategy([*along_others(call, [call.dim()]), *([] if truncates else linear_rows(call, 1))])


@rule(aten.flip.default)
def flip(call: OpCall) -> Strategy:
    flipped = [d % max(call.inputs[0].ndim, 1) for d in call["dims"]]
    return Strategy([*along_others(call, flipped), *linear_rows(call, 1, ops=REDUCE_OPS)])
