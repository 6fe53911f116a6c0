"""Ops that rearrange dims without touching values: a map from input dims to output dims.

A view that only splits or joins dims keeps a shard if it cuts at the outermost of the joined dims and
every rank holds equally much on both sides. Every pending reduction passes through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtbench_core.placement import REDUCE_OPS, REPLICATE, Partial, Shard
from dtbench_core.rules.base import OpCall, Row, Strategy, aten, linear_rows, pending, rule
from dtbench_core.spec import numel


def mapped_rows(call: OpCall, dims: Mapping[int, int], outs: int = 1) -> list[Row]:
    """Rows for an op that moves input dim k to output dim dims[k] and leaves its shards whole."""
    rows = [Row((Shard(src),), (Shard(dst),) * outs) for src, dst in dims.items()]
    return rows + linear_rows(call, 1, outs, ops=REDUCE_OPS)


@rule(aten.view.default, aten._unsafe_view.default)
def view(call: OpCall) -> Strategy:
    before, after = tuple(call.inputs[0].shape), tuple(call.outputs[0].shape)  # type: ignore[union-attr]
    rows = []
    for ins, outs in _factor_groups(before, after):
        src, dst = _outermost(before, ins), _outermost(after, outs)
        if src is None or dst is None:
            continue
        if before[src] == after[dst]:
            rows.append(Row((Shard(src),), (Shard(dst),)))
        else:
            rows.append(Row((Shard(src),), (Shard(dst),), even=((0, src), (-1, dst))))
    rows += linear_rows(call, 1, ops=REDUCE_OPS)
    return Strategy(rows, local_shape_args=(1,))


def _factor_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]]:
    """The finest ranges of input dims and output dims that hold the same elements, in order."""
    if numel(before) == 0:
        return []  # nothing to keep apart: any grouping would do, so none is claimed
    groups, i, j = [], 0, 0
    while i < len(before) and j < len(after):
        start_i, start_j = i, j
        left, right = before[i], after[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        groups.append((range(start_i, i), range(start_j, j)))
    return groups


def _outermost(shape: Sequence[int], dims: range) -> int | None:
    """The first dim of the range with more than one element."""
    return next((d for d in dims if shape[d] > 1), None)


@rule(aten.t.default)
def t(call: OpCall) -> Strategy:
    ndim = call.inputs[0].ndim
    return Strategy(mapped_rows(call, {d: ndim - 1 - d for d in range(ndim)}))


@rule(aten.transpose.int)
def transpose(call: OpCall) -> Strategy:
    ndim, a, b = call.inputs[0].ndim, call.dim("dim0"), call.dim("dim1")
    swapped = {a: b, b: a}
    return Strategy(mapped_rows(call, {d: swapped.get(d, d) for d in range(ndim)}))


@rule(aten.permute.default)
def permute(call: OpCall) -> Strategy:
    ndim = call.inputs[0].ndim
    return Strategy(mapped_rows(call, {(src + ndim) % ndim: dst for dst, src in enumerate(call["dims"])}))


@rule(aten.unsqueeze.default)
def unsqueeze(call: OpCall) -> Strategy:
    ndim = call.inputs[0].ndim
    new = call.dim(ndim=ndim + 1)
    return Strategy(mapped_rows(call, {d: d + (d >= new) for d in range(ndim)}))


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def squeeze(call: OpCall) -> Strategy:
    # A dim of size 1 stays whole: its shard would be one rank's, and empty for the others.
    shape = call.inputs[0].shape
    asked = range(len(shape)) if call.op is aten.squeeze.default else call.dims()
    gone = tuple(d for d in asked if shape[d] == 1)
    kept = {d: d - sum(g < d for g in gone) for d in range(len(shape)) if d not in gone}
    # The dims are named to the local op: a shard may be of length 1 where the tensor is not.
    return Strategy(mapped_rows(call, kept), local_op=lambda local, *_: aten.squeeze.dims(local, gone))


@rule(aten.expand.default)
def expand(call: OpCall) -> Strategy:
    before, after = call.inputs[0].shape, call.outputs[0].shape  # type: ignore[union-attr]
    lead = len(after) - len(before)
    rows = [Row((Shard(d),), (Shard(d + lead),)) for d in range(len(before)) if before[d] == after[d + lead]]
    return Strategy([*rows, *linear_rows(call, 1, ops=REDUCE_OPS)], local_shape_args=(1,))


@rule(aten.slice.Tensor)
def slice_(call: OpCall) -> Strategy:
    """The sliced dim is whole, unless the slice takes all of it."""
    cut = call.dim()
    untouched = call.outputs[0] is not None and call.outputs[0].shape == call.inputs[0].shape
    backwards = call["step"] != 1
    return Strategy(_all_but(call, cut if not untouched or backwards else None))


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.narrow_copy.default)
def split(call: OpCall) -> Strategy:
    return Strategy(_all_but(call, call.dim()))


@rule(aten.select.int, aten.unbind.int)
def select(call: OpCall) -> Strategy:
    cut, ndim = call.dim(), call.inputs[0].ndim
    kept = {d: d - (d > cut) for d in range(ndim) if d != cut}
    return Strategy(mapped_rows(call, kept, len(call.outputs)))


def _all_but(call: OpCall, cut: int | None) -> list[Row]:
    kept = {d: d for d in range(call.inputs[0].ndim) if d != cut}
    return mapped_rows(call, kept, len(call.outputs))


@rule(aten.slice_backward.default)
def slice_backward(call: OpCall) -> Strategy:
    return Strategy(_all_but(call, call.dim(ndim=len(call["input_sizes"]))), local_shape_args=(1,))


@rule(aten.select_backward.default)
def select_backward(call: OpCall) -> Strategy:
    ndim = len(call["input_sizes"])
    cut = call.dim(ndim=ndim)
    grown = {d: d + (d >= cut) for d in range(ndim - 1)}
    return Strategy(mapped_rows(call, grown), local_shape_args=(1,))


@rule(aten.cat.default)
def cat(call: OpCall) -> Strategy:
    """The joined dim is whole; the others may be sharded alike. Torch skips inputs of shape (0,)."""
    ndim = len(call.outputs[0].shape)  # type: ignore[union-attr]
    joined = call.dim(ndim=ndim)
    rows = [
        Row(tuple(Shard(d) if s.ndim == ndim else REPLICATE for s in call.inputs), (Shard(d),))
        for d in range(ndim)
        if d != joined
    ]
    return Strategy([*rows, *linear_rows(call, len(call.inputs), ops=REDUCE_OPS)])


@rule(aten.stack.default)
def stack(call: OpCall) -> Strategy:
    ndim = call.inputs[0].ndim
    new = call.dim(ndim=ndim + 1)
    count = len(call.inputs)
    rows = [Row((Shard(d),) * count, (Shard(d + (d >= new)),)) for d in range(ndim)]
    return Strategy([*rows, *linear_rows(call, count, ops=REDUCE_OPS)])


@rule(aten.triu.default, aten.tril.default)
def triangle(call: OpCall) -> Strategy:
    """Batch dims may be sharded; the matrix itself is cut by global index."""
    kept = {d: d for d in range(call.inputs[0].ndim - 2)}
    rows = [Row((Shard(s),), (Shard(d),)) for s, d in kept.items()]
    rows += [Row((Partial(op),), (Partial(op),)) for op in ("sum", "avg") if pending(call, op)]
    return Strategy(rows)
