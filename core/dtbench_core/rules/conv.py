"""Convolutions: batch, output channels, input channels and groups may be sharded, the space may not.

Sharding the space would need the neighbours' borders, which no single collective here brings.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dtbench_core.layout.placement import REPLICATE, Partial, Placement
from dtbench_core.rules.base import OpCall, Row, Strategy, aten, pending, pending_rows, rule
from dtbench_core.rules.labels import SUM, in_groups, place


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
    return "g" if in_groups(call, call["groups"]) else ""


@rule(aten.convolution.default)
def convolution(call: OpCall) -> Strategy:
    """(input [n, i, ...], weight [o, i, ...], or [i, o, ...] transposed, bias? [o]) -> [n, o, ...].

    A sum that is left pending takes the bias as one of its terms: it is added once.
    """
    labels = _labels(call, 0)
    if labels is None:
        return Strategy([])
    data, weight, output = labels
    biased = len(call.inputs) == 3
    rows = []
    for label in "n" + _channels(call):
        placed = place(label, output, SUM)
        bias = placed if placed == SUM else place(label, output[1])
        held = tuple(
            (i, dims.index(label)) for i, dims in enumerate((data, weight)) if label != "n" and label in dims
        )
        inputs = (place(label, data), place(label, weight), *((bias,) if biased else ()))
        rows.append(Row(inputs, (placed,), nonempty=held))
    rows += pending_rows(call, (0, 2), (1, 2))  # with the bias, if there is one
    return Strategy(rows, local_op=_own_groups(call, 0) if call["groups"] > 1 else None)


@rule(aten.convolution_backward.default)
def convolution_backward(call: OpCall) -> Strategy:
    """(grad [n, o, ...], input [n, i, ...], weight) -> (grad of input, of weight, of bias [o])."""
    labels = _labels(call, 1)
    if labels is None:
        return Strategy([])
    data, weight, output = labels
    of_bias = output[1]
    rows = []
    for label in "n" + _channels(call):
        inputs = tuple(place(label, dims) for dims in (output, data, weight))
        # Each gradient sums over the label of its two factors that it lacks itself.
        outputs: tuple[Placement, ...] = (
            place(label, data, SUM),
            place(label, weight, SUM),
            place(label, of_bias, SUM if label in output else REPLICATE),
        )
        held = tuple(
            (i, dims.index(label))
            for i, dims in enumerate((output, data, weight))
            if label != "n" and label in dims
        )
        rows.append(Row(inputs, outputs, nonempty=held))
    for op in ("sum", "avg"):
        if pending(call, op):
            term = Partial(op)
            rows.append(Row((term, REPLICATE, REPLICATE), (term,) * 3))
            rows.append(Row((REPLICATE, term, REPLICATE), (REPLICATE, term, REPLICATE)))
            rows.append(Row((REPLICATE, REPLICATE, term), (term, REPLICATE, REPLICATE)))
    return Strategy(rows, local_op=_own_groups(call, 1))


def _own_groups(call: OpCall, first: int) -> Callable[..., Any]:
    """The op with the number of groups, and of bias gradients, that the shards at hand have."""
    op, channels, groups = call.op, call.inputs[first].shape[1], call["groups"]

    def local_op(*args: Any) -> Any:
        given = list(args)
        if groups > 1:
            given[-1 - first] = groups * given[first].size(1) // channels
        if first and given[3] is not None:
            given[3] = [given[0].size(1)]
        return op(*given)

    return local_op
