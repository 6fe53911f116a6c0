"""Ops that rearrange dims without touching values: a map from input dims to output dims.

A view that only splits or joins dims keeps the shards that have a name afterwards (regroup.py); others
are moved to the outermost of the joined dims. Every pending reduction passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dtbench_core.layout.placement import REDUCE_OPS, REPLICATE, Shard
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.redistribute.autograd import redistribute_tensor
from dtbench_core.rules.base import OpCall, Placed, Row, Strategy, along, aten, linear_rows, rule
from dtbench_core.rules.regroup import kept


def mapped_rows(call: OpCall, dims: Mapping[int, int], outs: int = 1) -> list[Row]:
    """Rows for an op that moves input dim k to output dim dims[k] and leaves its shards whole."""
    rows = [Row((Shard(src),), (Shard(dst),) * outs) for src, dst in dims.items()]
    return rows + linear_rows(call, 1, outs, ops=REDUCE_OPS)


@rule(aten.view.default, aten._unsafe_view.default, aten.view_copy.default)
def view(call: OpCall) -> Strategy:
    before, after = tuple(call.inputs[0].shape), tuple(call.outputs[0].shape)  # type: ignore[union-attr]
    rows = []
    groups = _factor_groups(before, after)
    for ins, outs in groups:
        src, dst = _outermost(before, ins), _outermost(after, outs)
        if src is None or dst is None:
            continue
        if before[src] == after[dst]:
            rows.append(Row((Shard(src),), (Shard(dst),)))
        else:
            rows.append(Row((Shard(src),), (Shard(dst),), even=((0, src), (-1, dst))))
    rows += linear_rows(call, 1, ops=REDUCE_OPS)
    spec = call.inputs[0]
    placed = kept(spec.placements, spec.info.sizes, before, after, groups)
    exact = None if placed is None else ((spec.placements,), (placed,))
    return Strategy(rows, local_shape_args=(1,), exact=exact)


def _factor_groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[range, range]]:
    """The finest ranges of input dims and output dims that hold the same elements, in order."""
    if 0 in before:
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


@rule(aten.t.default, aten.t_copy.default)
def t(call: OpCall) -> Strategy:
    ndim = call.inputs[0].ndim
    return Strategy(mapped_rows(call, {d: ndim - 1 - d for d in range(ndim)}))


@rule(aten.transpose.int, aten.transpose_copy.int)
def transpose(call: OpCall) -> Strategy:
    ndim, a, b = call.inputs[0].ndim, call.dim("dim0"), call.dim("dim1")
    swapped = {a: b, b: a}
    return Strategy(mapped_rows(call, {d: swapped.get(d, d) for d in range(ndim)}))


@rule(aten.permute.default, aten.permute_copy.default)
def permute(call: OpCall) -> Strategy:
    ndim = call.inputs[0].ndim
    return Strategy(mapped_rows(call, {(src + ndim) % ndim: dst for dst, src in enumerate(call["dims"])}))


@rule(aten.unsqueeze.default, aten.unsqueeze_copy.default)
def unsqueeze(call: OpCall) -> Strategy:
    ndim = call.inputs[0].ndim
    new = call.dim(ndim=ndim + 1)
    return Strategy(mapped_rows(call, {d: d + (d >= new) for d in range(ndim)}))


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
@rule(aten.squeeze_copy.dim, aten.squeeze_copy.dims, aten.squeeze_copy.default)
def squeeze(call: OpCall) -> Strategy:
    # A dim of size 1 stays whole: its shard would be one rank's, and empty for the others.
    shape = call.inputs[0].shape
    everything = call.op in (aten.squeeze.default, aten.squeeze_copy.default)
    asked = range(len(shape)) if everything else () if call["dim"] == [] else call.dims()
    gone = tuple(d for d in asked if shape[d] == 1)
    kept = {d: d - sum(g < d for g in gone) for d in range(len(shape)) if d not in gone}
    # The dims are named to the local op: a shard may be of length 1 where the tensor is not.
    copies = call.op.overloadpacket is aten.squeeze_copy
    local_op = aten.squeeze_copy.dims if copies else aten.squeeze.dims
    return Strategy(
        mapped_rows(call, kept), local_op=lambda local, *_: local_op(local, gone), any_lengths=True
    )


@rule(aten.expand.default, aten.expand_copy.default)
def expand(call: OpCall) -> Strategy:
    before, after = call.inputs[0].shape, call.outputs[0].shape  # type: ignore[union-attr]
    lead = len(after) - len(before)
    rows = [Row((Shard(d),), (Shard(d + lead),)) for d in range(len(before)) if before[d] == after[d + lead]]
    return Strategy([*rows, *linear_rows(call, 1, ops=REDUCE_OPS)], local_shape_args=(1,))


@rule(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(call: OpCall) -> Strategy:
    """The sliced dim is whole, unless the slice takes all of it."""
    cut = call.dim()
    untouched = call.outputs[0] is not None and call.outputs[0].shape == call.inputs[0].shape
    backwards = call["step"] != 1
    return Strategy(_all_but(call, cut if not untouched or backwards else None))


@rule(aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.narrow_copy.default)
@rule(aten.split_copy.Tensor, aten.split_with_sizes_copy.default, aten.unsafe_split_with_sizes.default)
def split(call: OpCall) -> Strategy:
    return Strategy(_all_but(call, call.dim()))


def tensor_split(tensor: Any, indices_or_sections: Any = None, dim: int = 0, **named: Any) -> Any:
    """Runs in the place of `torch.tensor_split`, which reads the memory of an index tensor by itself."""
    where = named.get("tensor_indices_or_sections", indices_or_sections)
    if not isinstance(where, torch.Tensor):
        return NotImplemented
    if isinstance(where, Wrapper):
        where = redistribute_tensor(where, (REPLICATE,) * where._spec.info.ndim)._local_tensor
    return torch.tensor_split(tensor, where.tolist(), dim)


@rule(aten.select.int, aten.unbind.int, aten.select_copy.int, aten.unbind_copy.int)
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


@rule(aten.triu.default, aten.tril.default, aten.triu_.default, aten.tril_.default)
def triangle(call: OpCall) -> Strategy:
    """The last two dims are the matrix; a shard of it begins at an offset, which shifts the diagonal."""
    op, ndim = call.op, call.inputs[0].ndim

    def localize(placed: Placed) -> Callable[..., torch.Tensor] | None:
        row, column = placed.inputs[0].local_offset[-2:]
        if row == column == 0:
            return None
        return lambda local, diagonal=0: op(local, diagonal + row - column)

    return Strategy(mapped_rows(call, {d: d for d in range(ndim)}), localize=localize)


@rule(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(call: OpCall) -> Strategy:
    """The dims of the diagonal are whole; it comes last."""
    kept = _other_dims(call, call.inputs[0].ndim)
    return Strategy(mapped_rows(call, {d: i for i, d in enumerate(kept)}))


@rule(aten.diagonal_backward.default)
def diagonal_backward(call: OpCall) -> Strategy:
    kept = _other_dims(call, len(call["input_sizes"]))
    return Strategy(mapped_rows(call, dict(enumerate(kept))), local_shape_args=(1,))


@rule(aten.diag_embed.default)
def diag_embed(call: OpCall) -> Strategy:
    kept = _other_dims(call, call.inputs[0].ndim + 1)
    return Strategy(mapped_rows(call, dict(enumerate(kept))))


@rule(aten.diagonal_scatter.default)
def diagonal_scatter(call: OpCall) -> Strategy:
    kept = _other_dims(call, call.inputs[0].ndim)
    return _written_over(call, {d: i for i, d in enumerate(kept)})


def _other_dims(call: OpCall, ndim: int) -> list[int]:
    """The dims that are not the diagonal's dim1 and dim2, in order."""
    taken = (call.dim("dim1", ndim), call.dim("dim2", ndim))
    return [d for d in range(ndim) if d not in taken]


@rule(aten.select_scatter.default)
def select_scatter(call: OpCall) -> Strategy:
    cut, ndim = call.dim(), call.inputs[0].ndim
    return _written_over(call, {d: d - (d > cut) for d in range(ndim) if d != cut})


@rule(aten.slice_scatter.default)
def slice_scatter(call: OpCall) -> Strategy:
    cut, (whole, part) = call.dim(), call.inputs
    untouched = whole.shape == part.shape and call["step"] == 1
    return _written_over(call, {d: d for d in range(whole.ndim) if d != cut or untouched})


def _written_over(call: OpCall, dims: Mapping[int, int]) -> Strategy:
    """(self, src) -> self with src in a window of it; dims: of self to those of src."""
    rows = [Row((Shard(d), Shard(s)), (Shard(d),)) for d, s in dims.items()]
    return Strategy([*rows, *linear_rows(call, 2, ops=REDUCE_OPS)])


@rule(aten.unfold.default, aten.unfold_copy.default)
def unfold(call: OpCall) -> Strategy:
    """Windows over one dim, which is whole; their elements come last."""
    cut = call.dim("dimension")
    return Strategy(mapped_rows(call, {d: d for d in range(call.inputs[0].ndim) if d != cut}))


@rule(aten.unfold_backward.default)
def unfold_backward(call: OpCall) -> Strategy:
    """Sums where windows overlap."""
    ndim = len(call["input_sizes"])
    cut = call.dim(ndim=ndim)
    rows = along((d for d in range(ndim) if d != cut), 1, 1)
    return Strategy([*rows, *linear_rows(call, 1)], local_shape_args=(1,))


@rule(aten.roll.default)
def roll(call: OpCall) -> Strategy:
    """Without dims the tensor is rolled as if flat."""
    ndim = call.inputs[0].ndim
    whole = call.dims("dims")
    return Strategy(mapped_rows(call, {d: d for d in range(ndim) if d not in whole}))


@rule(aten.rot90.default)
def rot90(call: OpCall) -> Strategy:
    ndim = call.inputs[0].ndim
    turned = [d % ndim for d in call["dims"]]
    return Strategy(mapped_rows(call, {d: d for d in range(ndim) if d not in turned}))


@rule(aten.repeat.default)
def repeat(call: OpCall) -> Strategy:
    """Dims that are not repeated keep their shards."""
    ndim, repeats = call.inputs[0].ndim, call["repeats"]
    lead = len(repeats) - ndim
    return Strategy(mapped_rows(call, {d: d + lead for d in range(ndim) if repeats[d + lead] == 1}))


@rule(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(call: OpCall) -> Strategy:
    """The bits under another dtype; the last dim grows or shrinks where the sizes differ."""
    before, after = call.inputs[0].shape, call.outputs[0].shape  # type: ignore[union-attr]
    return Strategy(along((d for d in range(len(before)) if before[d] == after[d]), 1, 1))


@rule(aten.pixel_shuffle.default, aten.pixel_unshuffle.default, aten.channel_shuffle.default)
def shuffle(call: OpCall) -> Strategy:
    """[..., channels, height, width]: dims before the channels may be sharded."""
    batch = 1 if call.op is aten.channel_shuffle.default else call.inputs[0].ndim - 3
    return Strategy(mapped_rows(call, {d: d for d in range(batch)}))
