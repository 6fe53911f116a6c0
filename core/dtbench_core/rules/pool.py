"""Pooling, resizing, padding and sampling: batch and channels may be sharded, spatial dims may not.

Indices of maxima count within a plane, so they are valid on a shard. max_unpool, which rejects indices by value, and
fractional_max_pool stay replicated.
"""

from __future__ import annotations

import re

from dtbench_core.layout.placement import Partial, Shard
from dtbench_core.op_types import Value
from dtbench_core.rules.base import (
    OpCall,
    PlacementRow,
    Strategy,
    aten,
    linear_rows,
    ops_named,
    pending_rows,
    rule,
    shard_rows_except,
)
from dtbench_core.rules.labels import batch_rows, label_rows

AVERAGES = "avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d"
PADS = """
    reflection_pad1d reflection_pad2d reflection_pad3d
    replication_pad1d replication_pad2d replication_pad3d
"""
RESIZES = """
    upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
    upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa
"""
MAXIMA = "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d"


def _dims_before_spatial(call: OpCall) -> int:
    """Returns the number of dims before the spatial ones, whose number is in the name of the op."""
    spatial = re.search(r"\dd", call.op._schema.name)
    assert spatial is not None
    return call.inputs[0].ndim - int(spatial[0][0])


@rule(*ops_named(MAXIMA))
def maxima(call: OpCall) -> Strategy:
    """Returns (maxima, their indices in the plane)."""
    return Strategy(batch_rows(call, _dims_before_spatial(call)))


@rule(*ops_named(AVERAGES + PADS + RESIZES))
@rule(*ops_named(f"{AVERAGES} {MAXIMA} {PADS}", "_backward"))
def linear_in_first_input(call: OpCall) -> Strategy:
    """Each result is a weighted sum over the plane. In the backward: (grad, input, indices?), linear in `grad`."""
    return Strategy([*batch_rows(call, _dims_before_spatial(call)), *pending_rows(call, (0,))])


@rule(*ops_named(RESIZES, "_backward"))
def resize_backward(call: OpCall) -> Strategy:
    """(grad) -> gradient of the input, whose global size is an argument."""
    op = call.op
    place = list(call.arguments()).index("input_size")
    count = _dims_before_spatial(call)

    def local_op(grad: Value, *args: Value, **kwargs: Value) -> Value:
        local_args = list(args)
        local_args[place - 1] = [*grad.shape[:count], *local_args[place - 1][count:]]
        return op(grad, *local_args, **kwargs)

    if len(call.args) <= place:
        return Strategy([])
    return Strategy([*batch_rows(call, count), *linear_rows(call, 1)], local_op=local_op, any_lengths=True)


@rule(aten.constant_pad_nd.default)
def constant_pad(call: OpCall) -> Strategy:
    """Dims without padding may be sharded. Padding with zeros is linear."""
    pad, ndim = call["pad"], call.inputs[0].ndim
    padded = {ndim - 1 - i // 2 for i, width in enumerate(pad) if width != 0}
    return Strategy([*shard_rows_except(call, padded), *(linear_rows(call, 1) if call["value"] == 0 else [])])


# ---- from planes to columns and back ----


@rule(aten.im2col.default)
def im2col(call: OpCall) -> Strategy:
    """[n?, c, h, w] -> [n?, c * kernel, positions]."""
    batch = "n" * (call.inputs[0].ndim - 3)
    dims = [batch + "chw"], [batch + "ck"]
    return Strategy([*label_rows(batch, *dims), *label_rows("c", *dims, even=True), *linear_rows(call, 1)])


@rule(aten.col2im.default)
def col2im(call: OpCall) -> Strategy:
    """[n?, c * kernel, positions] -> [n?, c, h, w]."""
    batch = "n" * (call.inputs[0].ndim - 2)
    channels = Shard(len(batch))
    return Strategy(
        [
            *label_rows(batch, [batch + "ck"], [batch + "chw"]),
            PlacementRow((channels,), (channels,), even=((-1, len(batch)),)),
            *linear_rows(call, 1),
        ]
    )


# ---- sampling at given points ----


def _points(call: OpCall) -> tuple[str, str, str, str]:
    """Returns (spatial labels of the points, labels of input, of grid, of output)."""
    points = "xyz"[: call.inputs[0].ndim - 2]
    return points, "nc" + "." * len(points), "n" + points + ".", "nc" + points


@rule(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default)
def grid_sampler(call: OpCall) -> Strategy:
    """(input [n, c, ...], grid [n, points..., 2 or 3]) -> [n, c, points...]. Linear in the input."""
    points, data, grid, output = _points(call)
    return Strategy(
        [*label_rows("nc" + points, (data, grid), (output,), nonempty=True), *pending_rows(call, (0,))]
    )


@rule(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(call: OpCall) -> Strategy:
    """(grad [n, c, points...], input, grid) -> (gradient of input, gradient of grid).

    They are sums over the points and over the channels. Linear in `grad`.
    """
    points, data, grid, output = _points(call)
    return Strategy(
        [
            *label_rows("nc" + points, (output, data, grid), (data, grid), Partial(), nonempty=True),
            *pending_rows(call, (0,)),
        ]
    )
