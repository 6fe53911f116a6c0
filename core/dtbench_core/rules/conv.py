"""Convolutions: batch, output channels, input channels and groups may be sharded, the space may not.

Sharding the space would need the neighbours' borders, which no single collective here brings.
"""

from __future__ import annotations

from dataclasses import replace

from dtbench_core.layout.placement import REPLICATE, Partial, Placement, Shard
from dtbench_core.op_types import Call, Value
from dtbench_core.rules.base import OpCall, PlacementRow, Strategy, aten, pending_ops, pending_rows, rule
from dtbench_core.rules.labels import SUM, label_rows, splits_between_groups


def _labels(call: OpCall, first: int) -> tuple[str, str, str] | None:
    """Labels of (input, weight, output); None for inputs without a batch dim, or arguments by name.

    The `g` of a grouped convolution is the dim that all its groups lie on: a rank with whole groups needs
    nothing of the others.
    """
    ndim = call.inputs[first].ndim
    if call.inputs[first + 1].ndim != ndim or call.kwargs:
        return None
    space = "." * (ndim - 2)
    if call["groups"] > 1:
        return "ng" + space, "g." + space, "ng" + space
    return "ni" + space, ("io" if call["transposed"] else "oi") + space, "no" + space


def _channels(call: OpCall) -> str:
    """The channel labels that may be sharded."""
    if call["groups"] == 1:
        return "oi"
    return "g" if splits_between_groups(call, call["groups"]) else ""


@rule(aten.convolution.default)
def convolution(call: OpCall) -> Strategy:
    """(input [n, i, ...], weight [o, i, ...], or [i, o, ...] transposed, bias? [o]) -> [n, o, ...].

    A sum that is left pending takes the bias as one of its terms: it is added once.
    """
    labels = _labels(call, 0)
    if labels is None:
        return Strategy([])
    data, weight, output = labels
    rows = label_rows("n", (data, weight), (output,))
    rows += label_rows(_channels(call), (data, weight), (output,), SUM, nonempty=True)
    if len(call.inputs) == 3:
        of_bias: dict[Placement, Placement] = {SUM: SUM, Shard(1): Shard(0)}
        rows = [replace(row, inputs=(*row.inputs, of_bias.get(row.outputs[0], REPLICATE))) for row in rows]
    rows += pending_rows(call, (0, 2), (1, 2))  # with the bias, if there is one
    return Strategy(rows, local_op=_own_groups(call, 0) if call["groups"] > 1 else None)


@rule(aten.convolution_backward.default)
def convolution_backward(call: OpCall) -> Strategy:
    """(grad [n, o, ...], input [n, i, ...], weight) -> (grad of input, of weight, of bias [o])."""
    labels = _labels(call, 1)
    if labels is None:
        return Strategy([])
    data, weight, output = labels
    dims_in, dims_out = (output, data, weight), (data, weight, output[1])
    rows = label_rows("n", dims_in, dims_out, SUM)
    for label in _channels(call):
        # Each gradient sums over the label of its two factors that it lacks itself. The bias's has one factor.
        rows += label_rows(label, dims_in, dims_out, SUM if label in output else REPLICATE, nonempty=True)
    for op in pending_ops(call, ("sum", "avg")):
        term = Partial(op)
        rows.append(PlacementRow((term, REPLICATE, REPLICATE), (term,) * 3))
        rows.append(PlacementRow((REPLICATE, term, REPLICATE), (REPLICATE, term, REPLICATE)))
        rows.append(PlacementRow((REPLICATE, REPLICATE, term), (term, REPLICATE, REPLICATE)))
    return Strategy(rows, local_op=_own_groups(call, 1))


def _own_groups(call: OpCall, first: int) -> Call:
    """The op with the number of groups, and of bias gradients, that the shards at hand have.

    The CPU's backward of a transposed convolution over one space dim refuses some strided weights, by the strides of
    dims of size 1 of the input, which differ between ranks: it gets a contiguous weight.
    """
    op, channels, groups = call.op, call.inputs[first].shape[1], call["groups"]

    def local_op(*args: Value) -> Value:
        own = list(args)
        if groups > 1:
            own[-1 - first] = groups * own[first].size(1) // channels
        if first and call["transposed"]:
            own[2] = own[2].contiguous()
        if first and own[3] is not None:
            own[3] = [own[0].size(1)]
        return op(*own)

    return local_op
