"""Pooling, resizing, padding and sampling: the dims before the spatial ones may be sharded, batch and channels.

Indices of maxima count within a plane, so they hold on a shard. Left to replication: max_unpool, which
refuses indices by value, and fractional_max_pool.
"""

from __future__ import annotations

from typing import Any

from torch._ops import OpOverload

from dtbench_core.layout.placement import Partial, Shard
from dtbench_core.rules.base import OpCall, Row, Strategy, along_others, aten, linear_rows, pending_rows, rule
from dtbench_core.rules.labels import batch_rows, label_rows


def _ops(*names: str) -> list[OpOverload]:
    """The overloads so called that this torch has."""
    found = (getattr(aten, name, None) for name in names)
    return [packet.default for packet in found if packet is not None]


def _by_dims(pattern: str, *counts: int) -> dict[OpOverload, int]:
    """{op: spatial dims} of the ops called `pattern` for each count."""
    return {op: n for n in counts for op in _ops(pattern.format(n))}


# op -> how many spatial dims it has
LINEAR = {
    **_by_dims("avg_pool{}d", 2, 3),
    **_by_dims("_adaptive_avg_pool{}d", 2, 3),
    **_by_dims("reflection_pad{}d", 1, 2, 3),
    **_by_dims("replication_pad{}d", 1, 2, 3),
    **_by_dims("upsample_nearest{}d", 1, 2, 3),
    **_by_dims("_upsample_nearest_exact{}d", 1, 2, 3),
    **dict.fromkeys(_ops("upsample_linear1d"), 1),
    **dict.fromkeys(
        _ops(
            "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"
        ),
        2,
    ),
    **dict.fromkeys(_ops("_upsample_lanczos2d_aa"), 2),
    **dict.fromkeys(_ops("upsample_trilinear3d"), 3),
}
MAXIMA = {
    **_by_dims("max_pool{}d_with_indices", 2, 3),
    **_by_dims("adaptive_max_pool{}d", 2, 3),
}
BACKWARD = {
    **_by_dims("avg_pool{}d_backward", 2, 3),
    **_by_dims("_adaptive_avg_pool{}d_backward", 2, 3),
    **_by_dims("max_pool{}d_with_indices_backward", 2, 3),
    **_by_dims("adaptive_max_pool{}d_backward", 2, 3),
    **_by_dims("reflection_pad{}d_backward", 1, 2, 3),
    **_by_dims("replication_pad{}d_backward", 1, 2, 3),
}
RESIZE_BACKWARD = {
    **_by_dims("upsample_nearest{}d_backward", 1, 2, 3),
    **_by_dims("_upsample_nearest_exact{}d_backward", 1, 2, 3),
    **dict.fromkeys(_ops("upsample_linear1d_backward"), 1),
    **dict.fromkeys(_ops("upsample_bilinear2d_backward", "upsample_bicubic2d_backward"), 2),
    **dict.fromkeys(_ops("_upsample_bilinear2d_aa_backward", "_upsample_bicubic2d_aa_backward"), 2),
    **dict.fromkeys(_ops("_upsample_lanczos2d_aa_backward"), 2),
    **dict.fromkeys(_ops("upsample_trilinear3d_backward"), 3),
}


@rule(*LINEAR)
def linear(call: OpCall) -> Strategy:
    """Each result is a weighted sum of the plane."""
    return Strategy([*batch_rows(call, call.inputs[0].ndim - LINEAR[call.op]), *linear_rows(call, 1)])


@rule(*MAXIMA)
def maxima(call: OpCall) -> Strategy:
    """-> (maxima, where they lie in the plane)."""
    return Strategy(batch_rows(call, call.inputs[0].ndim - MAXIMA[call.op]))


@rule(*BACKWARD)
def backward(call: OpCall) -> Strategy:
    """(grad, input, indices?) -> gradient of the input. Linear in `grad`."""
    return Strategy([*batch_rows(call, call.inputs[0].ndim - BACKWARD[call.op]), *pending_rows(call, (0,))])


@rule(*RESIZE_BACKWARD)
def resize_backward(call: OpCall) -> Strategy:
    """grad -> gradient of the input, whose global size is an argument."""
    op = call.op
    place = [argument.name for argument in op._schema.arguments].index("input_size")
    count = call.inputs[0].ndim - RESIZE_BACKWARD[op]

    def local_op(grad: Any, *args: Any, **kwargs: Any) -> Any:
        given = list(args)
        given[place - 1] = [*grad.shape[:count], *given[place - 1][count:]]
        return op(grad, *given, **kwargs)

    if len(call.args) <= place:
        return Strategy([])
    return Strategy([*batch_rows(call, count), *linear_rows(call, 1)], local_op=local_op, any_lengths=True)


@rule(aten.constant_pad_nd.default)
def constant_pad(call: OpCall) -> Strategy:
    """Dims that are not padded may be sharded. Padding with zeros is linear."""
    pad, ndim = call["pad"], call.inputs[0].ndim
    padded = {ndim - 1 - i // 2 for i, width in enumerate(pad) if width != 0}
    rows = along_others(call, padded)
    return Strategy([*rows, *(linear_rows(call, 1) if call["value"] == 0 else [])])


# ---- planes to columns and back ----


@rule(aten.im2col.default)
def im2col(call: OpCall) -> Strategy:
    """[n?, c, h, w] -> [n?, c * kernel, positions]."""
    batch = "n" * (call.inputs[0].ndim - 3)
    rows = label_rows(batch, [batch + "chw"], [batch + "ck"])
    rows += label_rows("c", [batch + "chw"], [batch + "ck"], even=True)
    return Strategy([*rows, *linear_rows(call, 1)])


@rule(aten.col2im.default)
def col2im(call: OpCall) -> Strategy:
    """[n?, c * kernel, positions] -> [n?, c, h, w]."""
    batch = "n" * (call.inputs[0].ndim - 2)
    rows = label_rows(batch, [batch + "ck"], [batch + "chw"])
    channels = Shard(len(batch))
    rows.append(Row((channels,), (channels,), even=((-1, len(batch)),)))
    return Strategy([*rows, *linear_rows(call, 1)])


# ---- sampling at given points ----


def _points(call: OpCall) -> tuple[str, str, str, str]:
    """(spatial labels of the points, input, grid, output)."""
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
    """(grad [n, c, points...], input, grid) -> (grad of input, a sum over the points; of grid, one over the
    channels). Linear in `grad`."""
    points, data, grid, output = _points(call)
    rows = label_rows("nc" + points, (output, data, grid), (data, grid), Partial(), nonempty=True)
    return Strategy([*rows, *pending_rows(call, (0,))])
