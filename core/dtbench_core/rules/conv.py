"""Convolutions: batch, output channels, input channels and groups may be sharded, spatial dims may not.

Sharding a spatial dim would require the borders of neighbouring shards, which needs more than one collective.
"""

from __future__ import annotations

from dataclasses import replace

from dtbench_core.layout.placement import REPLICATE, Partial, Placement, Shard
from dtbench_core.op_types import Call, Value
from dtbench_core.rules.base import OpCall, PlacementRow, Strategy, aten, pending_ops, pending_rows, rule
from dtbench_core.rules.labels import SUM, label_rows, splits_between_groups


def _labels(call: OpCall, first: int) -> tuple[str, str, str] | None:
    """Returns the labels of (input, weight, output), or None without a batch dim or with keyword arguments.

    Label `g` of a grouped convolution is the dim on which all its groups lie. A rank with complete groups needs no data
    of other groups.
    """
    ndim = call.inputs[first].ndim
    if call.inputs[first + 1].ndim != ndim or call.kwargs:
        return None
    space = "." * (ndim - 2)
    if call["groups"] > 1:
        return "ng" + space, "g." + space, "ng" + space
    return "ni" + space, ("io" if call["transposed"] else "oi") + space, "no" + space


def _channel_labels(call: OpCall) -> str:
    """Returns the channel labels that may be sharded."""
    if call["groups"] == 1:
        return "oi"
    return "g" if splits_between_groups(call, call["groups"]) else ""


@rule(aten.convolution.default)
def convolution(call: OpCall) -> Strategy:
    """(input [n, i, ...], weight [o, i, ...], or [i, o, ...] transposed, bias? [o]) -> [n, o, ...].

    If the result is a pending sum, the bias is one too, so that it is added only once.
    """
    if (labels := _labels(call, 0)) is None:
        return Strategy([])
    data, weight, output = labels
    rows = label_rows("n", (data, weight), (output,))
    rows += label_rows(_channel_labels(call), (data, weight), (output,), SUM, nonempty=True)
    if len(call.inputs) == 3:
        of_bias: dict[Placement, Placement] = {SUM: SUM, Shard(1): Shard(0)}
        rows = [replace(row, inputs=(*row.inputs, of_bias.get(row.outputs[0], REPLICATE))) for row in rows]
    return Strategy(
        [*rows, *pending_rows(call, (0, 2), (1, 2))],  # data or weight together with the bias, if present
        local_op=_local_groups(call, 0) if call["groups"] > 1 else None,
    )


@rule(aten.convolution_backward.default)
def convolution_backward(call: OpCall) -> Strategy:
    """(grad [n, o, ...], input [n, i, ...], weight) -> (grad of input, of weight, of bias [o])."""
    if (labels := _labels(call, 1)) is None:
        return Strategy([])
    data, weight, output = labels
    dims_in, dims_out = (output, data, weight), (data, weight, output[1])
    rows = label_rows("n", dims_in, dims_out, SUM)
    for label in _channel_labels(call):
        # A gradient is a sum over the label if both of its factors have it and the gradient does not. The gradient of
        # the bias has one factor.
        rows += label_rows(label, dims_in, dims_out, SUM if label in output else REPLICATE, nonempty=True)
    for op in pending_ops(call, ("sum", "avg")):
        term = Partial(op)
        rows += [
            PlacementRow((term, REPLICATE, REPLICATE), (term,) * 3),
            PlacementRow((REPLICATE, term, REPLICATE), (REPLICATE, term, REPLICATE)),
            PlacementRow((REPLICATE, REPLICATE, term), (term, REPLICATE, REPLICATE)),
        ]
    return Strategy(rows, local_op=_local_groups(call, 1))


def _local_groups(call: OpCall, first: int) -> Call:
    """Returns the op with the number of groups, and of bias gradients, of the local shards.

    On CPU, the backward of a transposed convolution over one spatial dim rejects some strided weights. Whether it does
    depends on the input's strides of dims of size 1, which differ between ranks. So the weight is made contiguous.
    """
    op, channels, groups = call.op, call.inputs[first].shape[1], call["groups"]

    def local_op(*args: Value) -> Value:
        local_args = list(args)
        if groups > 1:
            local_args[-1 - first] = groups * local_args[first].size(1) // channels
        if first and call["transposed"]:
            local_args[2] = local_args[2].contiguous()
        if first and local_args[3] is not None:
            local_args[3] = [local_args[0].size(1)]
        return op(*local_args)

    return local_op
