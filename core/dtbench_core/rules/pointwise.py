"""Elementwise ops: every op torch tags `pointwise`, copies, casts and `*_like` factories.

Any dim may be sharded, if all inputs that have it (not broadcast over it) are. A pending sum passes
only through the ops that are linear in the inputs holding it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from dtbench_core.placement import REPLICATE, Partial, Placement, Shard
from dtbench_core.rules.base import OpCall, Row, Strategy, along, aten, linear_rows, pending, rule


def is_pointwise(op: OpOverload) -> bool:
    """Whether torch says the op is elementwise (and draws no random numbers)."""
    return torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags


# f(x + y) = f(x) + f(y), in all tensor inputs together.
LINEAR = {aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor}
LINEAR |= {
    aten.neg.default,
    aten.neg_.default,
    aten.clone.default,
    aten.positive.default,
    aten.detach.default,
}
# Linear in the first input alone: the others are factors.
SCALING = {aten.mul.Tensor, aten.mul_.Tensor, aten.mul.Scalar, aten.mul_.Scalar}
SCALING |= {aten.div.Tensor, aten.div_.Tensor, aten.div.Scalar, aten.div_.Scalar}
# Linear in the second as well, the first being the factor.
PRODUCTS = {aten.mul.Tensor}


def pointwise(call: OpCall) -> Strategy:
    """The rule of every pointwise op; inputs broadcast to the first output's shape."""
    outs = len(call.outputs)
    shape = call.outputs[0].shape if call.outputs and call.outputs[0] is not None else torch.Size()
    rows = [Row(_broadcast(call, dim, shape), (Shard(dim),) * outs) for dim in range(len(shape))]
    return Strategy([*rows, *_partial_rows(call)])


def _broadcast(call: OpCall, dim: int, shape: torch.Size) -> tuple[Placement, ...]:
    """Inputs' placements when output dim `dim` is sharded: Replicate where the input lacks the dim."""
    placed: list[Placement] = []
    for spec in call.inputs:
        own = dim - (len(shape) - spec.ndim)
        sharded = own >= 0 and (spec.shape[own] == shape[dim])
        placed.append(Shard(own) if sharded else REPLICATE)
    return tuple(placed)


def _partial_rows(call: OpCall) -> list[Row]:
    count = len(call.inputs)
    # A plain number added to a pending sum would be added once per rank.
    if call.op in LINEAR and not _adds_number(call):
        return linear_rows(call, count)
    if call.op not in SCALING or call.kwargs.get("rounding_mode"):
        return []
    rows = []
    for op in ("sum", "avg"):
        if pending(call, op):
            term, rest = Partial(op), (REPLICATE,) * (count - 1)
            rows.append(Row((term, *rest), (term,)))
            if call.op in PRODUCTS and count == 2:
                rows.append(Row((REPLICATE, term), (term,)))
    return rows


def _adds_number(call: OpCall) -> bool:
    return len(call.inputs) == 1 and len(call.args) > 1


@rule(aten.detach.default, aten.alias.default, aten.clone.default)
def same_values(call: OpCall) -> Strategy:
    """Ops that return their input's values: every placement passes."""
    ops = ("sum", "avg", "product", "max", "min")
    return Strategy([*along(range(call.inputs[0].ndim), 1, 1), *linear_rows(call, 1, ops=ops)])


@rule(aten._to_copy.default)
def cast(call: OpCall) -> Strategy:
    """A cast between floating dtypes passes a pending sum; one to integers truncates, so it does not."""
    output = call.outputs[0]
    floating = (
        call.inputs[0].dtype.is_floating_point and output is not None and output.dtype.is_floating_point
    )
    return Strategy([*along(range(call.inputs[0].ndim), 1, 1), *(linear_rows(call, 1) if floating else [])])


@rule(aten.copy_.default, aten.fill_.Scalar, aten.fill_.Tensor)
def overwrite(call: OpCall) -> Strategy:
    """In-place writes; the written tensor keeps its placement, the source follows."""
    linear = linear_rows(call, 2) if call.op is aten.copy_.default else []
    return Strategy([*pointwise(call).rows, *linear])


@rule(aten.masked_fill_.Scalar)
def masked_fill(call: OpCall) -> Strategy:
    """Filling with 0 is linear in the filled tensor, any other value is not."""
    zero = [Row((Partial(op), REPLICATE), (Partial(op),)) for op in ("sum", "avg") if call["value"] == 0]
    return Strategy([*pointwise(call).rows, *zero])


@rule(
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.zero_.default,
)
def like(call: OpCall) -> Strategy:
    """Fresh values of the input's shape: its shards are kept, a Partial's values are not read."""
    rows = along(range(call.inputs[0].ndim), 1, 1)
    if call.op is aten.zero_.default:
        return Strategy([*rows, *linear_rows(call, 1)])
    return Strategy(
        [*rows, *(Row((Partial(op),), (REPLICATE,)) for op in ("sum", "avg") if pending(call, op))]
    )


@rule(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default, aten.new_full.default)
def new(call: OpCall) -> Strategy:
    """Fresh values of a shape of their own: sharded like the input where the shapes are equal."""
    return Strategy(_new_rows(call), local_shape_args=(1,))


@rule(aten.new_empty_strided.default)
def new_strided(call: OpCall) -> Strategy:
    """The local strides keep the order of the global ones."""
    order = sorted(range(len(call["stride"])), key=lambda dim: call["stride"][dim])

    def local_op(local: torch.Tensor, size: list[int], _: object, **kwargs: Any) -> torch.Tensor:
        strides, step = [0] * len(size), 1
        for dim in order:
            strides[dim] = step
            step *= max(size[dim], 1)
        made: torch.Tensor = aten.new_empty_strided(local, size, strides, **kwargs)
        return made

    return Strategy(_new_rows(call), local_shape_args=(1,), local_op=local_op)


def _new_rows(call: OpCall) -> list[Row]:
    same = tuple(call["size"]) == tuple(call.inputs[0].shape)
    rows = along(range(call.inputs[0].ndim), 1, 1) if same else []
    # The input's values are not read, so it need not move: the result is whole.
    unread = {p for p in call.inputs[0].placements if not same or p.is_partial()}
    return [*rows, *(Row((p,), (REPLICATE,)) for p in sorted(unread, key=str))]
