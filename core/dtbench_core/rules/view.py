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
from dtbench_core.op_types import Value
from dtbench_core.redistribute.autograd import redistribute_tensor
from dtbench_core.rules.base import (
    OpCall,
    PlacedSpecs,
    PlacementRow,
    Strategy,
    aten,
    by_op,
    linear_rows,
    rule,
    shard_rows,
)
from dtbench_core.rules.labels import moved_rows, remaining_dims
from dtbench_core.rules.regroup import regrouped_placements


def mapped_rows(call: OpCall, dims: Mapping[int, int], outs: int = 1) -> list[PlacementRow]:
    """Rows for an op that moves input dim k to output dim dims[k] and leaves its shards whole."""
    return moved_rows(dims, outs) + linear_rows(call, 1, outs, ops=REDUCE_OPS)


@rule(aten.view.default, aten._unsafe_view.default, aten.view_copy.default)
def view(call: OpCall) -> Strategy:
    before, after = tuple(call.inputs[0].shape), tuple(call.outputs[0].shape)  # type: ignore[union-attr]
    rows = []
    groups = _factor_groups(before, after)
    for ins, outs in groups:
        src, dst = _outermost(before, ins), _outermost(after, outs)
        if src is None or dst is None:
            continue
        even = () if before[src] == after[dst] else ((0, src), (-1, dst))
        rows.append(PlacementRow((Shard(src),), (Shard(dst),), even=even))
    rows += linear_rows(call, 1, ops=REDUCE_OPS)
    spec = call.inputs[0]
    placed = regrouped_placements(spec.placements, spec.info.sizes, before, after, groups)
    exact = None if placed is None else ((spec.placements,), (placed,))
    return Strategy(rows, local_shape_args=(1,), exact_placements=exact)


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


# ---- dims moved, added and taken away ----


def _swapped(call: OpCall, ndim: int) -> dict[int, int]:
    a, b = call.dim("dim0"), call.dim("dim1")
    return {d: {a: b, b: a}.get(d, d) for d in range(ndim)}


def _repeated(call: OpCall, ndim: int) -> dict[int, int]:
    """Dims that are not repeated keep their shards."""
    lead = len(call["repeats"]) - ndim
    return {d: d + lead for d in range(ndim) if call["repeats"][d + lead] == 1}


Dims = Callable[[OpCall, int], dict[int, int]]  # of a call, and how many dims the whole tensor has

# Windows of a tensor: the dims that a window has in full -> its own dims. Told of the ops that take one, that write
# it (`_scatter`) and that put it into zeros (`_backward`).
WINDOWS: dict[str, Dims] = {
    "select": lambda call, n: remaining_dims(n, [call.dim(ndim=n)]),
    "slice": lambda call, n: remaining_dims(n, () if _takes_all(call) else [call.dim(ndim=n)], keepdim=True),
    "diagonal": lambda call, n: remaining_dims(n, (call.dim("dim1", n), call.dim("dim2", n))),
}
# Of ops, the input dims that may be sharded -> output dims.
MOVED: dict[str, Dims] = {
    "t t_copy": lambda _, n: {d: n - 1 - d for d in range(n)},
    "transpose.int transpose_copy.int": _swapped,
    "permute permute_copy": lambda call, n: {src % n: dst for dst, src in enumerate(call["dims"])},
    "unsqueeze unsqueeze_copy": lambda call, n: {d: d + (d >= call.dim(ndim=n + 1)) for d in range(n)},
    "select.int select_copy.int unbind.int unbind_copy.int": WINDOWS["select"],
    "slice.Tensor slice_copy.Tensor": WINDOWS["slice"],
    "diagonal diagonal_copy": WINDOWS["diagonal"],
    "split.Tensor split_copy.Tensor unsafe_split.Tensor narrow_copy "
    "split_with_sizes split_with_sizes_copy unsafe_split_with_sizes": (
        lambda call, n: remaining_dims(n, [call.dim()], keepdim=True)
    ),
    # Windows over one dim, which is whole; their elements come last.
    "unfold unfold_copy": lambda call, n: remaining_dims(n, [call.dim("dimension")], keepdim=True),
    # Without dims the tensor is rolled as if flat.
    "roll": lambda call, n: remaining_dims(n, call.dims("dims"), keepdim=True),
    "rot90": lambda call, n: remaining_dims(n, [d % n for d in call["dims"]], keepdim=True),
    "repeat": _repeated,
    # [..., channels, height, width]: dims before the channels may be sharded.
    "pixel_shuffle pixel_unshuffle": lambda _, n: remaining_dims(n, range(n - 3, n)),
    "channel_shuffle": lambda _, n: remaining_dims(n, range(1, n)),
}
_MOVES, _WRITES, _GRADIENTS = by_op(MOVED), by_op(WINDOWS, "_scatter"), by_op(WINDOWS, "_backward")


def _takes_all(call: OpCall) -> bool:
    """Whether a slice is of the whole dim, which then need not be whole on a rank."""
    results = call.outputs if len(call.inputs) == 1 else [call.inputs[1]]
    return call["step"] == 1 and all(t is not None and t.shape == call.inputs[0].shape for t in results)


@rule(*_MOVES)
def moved(call: OpCall) -> Strategy:
    return Strategy(mapped_rows(call, _MOVES[call.op](call, call.inputs[0].ndim), len(call.outputs)))


@rule(*_GRADIENTS)
def window_gradient(call: OpCall) -> Strategy:
    dims = _GRADIENTS[call.op](call, len(call["input_sizes"]))
    return Strategy(mapped_rows(call, {own: d for d, own in dims.items()}), local_shape_args=(1,))


@rule(aten.diag_embed.default)
def diag_embed(call: OpCall) -> Strategy:
    dims = WINDOWS["diagonal"](call, call.inputs[0].ndim + 1)
    return Strategy(mapped_rows(call, {own: d for d, own in dims.items()}))


@rule(*_WRITES)
def written_over(call: OpCall) -> Strategy:
    """(self, src) -> self with src in a window of it."""
    dims = _WRITES[call.op](call, call.inputs[0].ndim)
    rows = [PlacementRow((Shard(d), Shard(own)), (Shard(d),)) for d, own in dims.items()]
    return Strategy([*rows, *linear_rows(call, 2, ops=REDUCE_OPS)])


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
@rule(aten.squeeze_copy.dim, aten.squeeze_copy.dims, aten.squeeze_copy.default)
def squeeze(call: OpCall) -> Strategy:
    # A dim of size 1 stays whole: its shard would be one rank's, and empty for the others.
    shape = call.inputs[0].shape
    everything = call.op in (aten.squeeze.default, aten.squeeze_copy.default)
    dims = range(len(shape)) if everything else () if call["dim"] == [] else call.dims()
    gone = tuple(d for d in dims if shape[d] == 1)
    # The dims are named to the local op: a shard may be of length 1 where the tensor is not.
    copies = call.op.overloadpacket is aten.squeeze_copy
    local_op = aten.squeeze_copy.dims if copies else aten.squeeze.dims
    rows = mapped_rows(call, remaining_dims(len(shape), gone))
    return Strategy(rows, local_op=lambda local, *_: local_op(local, gone), any_lengths=True)


@rule(aten.expand.default, aten.expand_copy.default)
def expand(call: OpCall) -> Strategy:
    before, after = call.inputs[0].shape, call.outputs[0].shape  # type: ignore[union-attr]
    lead = len(after) - len(before)
    dims = {d: d + lead for d in range(len(before)) if before[d] == after[d + lead]}
    return Strategy(mapped_rows(call, dims), local_shape_args=(1,))


def tensor_split(tensor: Value, indices_or_sections: Any = None, dim: int = 0, **named: object) -> Value:
    """Runs in the place of `torch.tensor_split`, which reads the memory of an index tensor by itself."""
    where = named.get("tensor_indices_or_sections", indices_or_sections)
    if not isinstance(where, torch.Tensor):
        return NotImplemented
    if isinstance(where, Wrapper):
        where = redistribute_tensor(where, (REPLICATE,) * where._spec.info.ndim)._local_tensor
    return torch.tensor_split(tensor, where.tolist(), dim)


@rule(aten.cat.default)
def cat(call: OpCall) -> Strategy:
    """The joined dim is whole; the others may be sharded the same way. Torch skips inputs of shape (0,)."""
    ndim = len(call.outputs[0].shape)  # type: ignore[union-attr]
    joined = call.dim(ndim=ndim)
    rows = [
        PlacementRow(tuple(Shard(d) if s.ndim == ndim else REPLICATE for s in call.inputs), (Shard(d),))
        for d in range(ndim)
        if d != joined
    ]
    return Strategy([*rows, *linear_rows(call, len(call.inputs), ops=REDUCE_OPS)])


@rule(aten.stack.default)
def stack(call: OpCall) -> Strategy:
    ndim = call.inputs[0].ndim
    new = call.dim(ndim=ndim + 1)
    count = len(call.inputs)
    rows = [PlacementRow((Shard(d),) * count, (Shard(d + (d >= new)),)) for d in range(ndim)]
    return Strategy([*rows, *linear_rows(call, count, ops=REDUCE_OPS)])


@rule(aten.triu.default, aten.tril.default, aten.triu_.default, aten.tril_.default)
def triangle(call: OpCall) -> Strategy:
    """The last two dims are the matrix; a shard of it begins at an offset, which shifts the diagonal."""
    op, ndim = call.op, call.inputs[0].ndim

    def localize(placed: PlacedSpecs) -> Callable[..., torch.Tensor] | None:
        row, column = placed.inputs[0].local_offset[-2:]
        if row == column == 0:
            return None
        return lambda local, diagonal=0: op(local, diagonal + row - column)

    return Strategy(mapped_rows(call, {d: d for d in range(ndim)}), localize=localize)


@rule(aten.unfold_backward.default)
def unfold_backward(call: OpCall) -> Strategy:
    """Sums where windows overlap."""
    ndim = len(call["input_sizes"])
    cut = call.dim(ndim=ndim)
    rows = shard_rows((d for d in range(ndim) if d != cut), 1, 1)
    return Strategy([*rows, *linear_rows(call, 1)], local_shape_args=(1,))


@rule(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(call: OpCall) -> Strategy:
    """The bits under another dtype; the last dim grows or shrinks where the sizes differ."""
    before, after = call.inputs[0].shape, call.outputs[0].shape  # type: ignore[union-attr]
    return Strategy(shard_rows((d for d in range(len(before)) if before[d] == after[d]), 1, 1))
