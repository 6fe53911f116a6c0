"""Ops that rearrange dims without changing values, described by a map from input dims to output dims.

If a view only splits or joins dims, shards stay in place if a placement describes them afterwards, see
Note [Regrouped dims].
Otherwise they are moved to the outermost of the joined dims. All pending reductions stay pending.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtbench_core.layout.placement import (
    REDUCE_OPS,
    REPLICATE,
    Placement,
    Placements,
    RaggedShard,
    Shard,
    StridedShard,
    chunk_lengths,
)
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


def mapped_rows(call: OpCall, dims: Mapping[int, int], outs: int = 1) -> list[PlacementRow]:
    """Returns rows for an op that moves input dim k to output dim dims[k] and keeps its shards."""
    return moved_rows(dims, outs) + linear_rows(call, 1, outs, ops=REDUCE_OPS)


@rule(aten.view.default, aten._unsafe_view.default, aten.view_copy.default)
def view(call: OpCall) -> Strategy:
    in_shape, out_shape = tuple(call.inputs[0].shape), tuple(call.outputs[0].shape)  # type: ignore[union-attr]
    rows = []
    groups = _factor_groups(in_shape, out_shape)
    for ins, outs in groups:
        src, dst = _outermost(in_shape, ins), _outermost(out_shape, outs)
        if src is None or dst is None:
            continue
        rows.append(
            PlacementRow(
                (Shard(src),),
                (Shard(dst),),
                even=() if in_shape[src] == out_shape[dst] else ((0, src), (-1, dst)),
            )
        )
    spec = call.inputs[0]
    placed = regrouped_placements(spec.placements, spec.info.sizes, in_shape, out_shape, groups)
    return Strategy(
        [*rows, *linear_rows(call, 1, ops=REDUCE_OPS)],
        local_shape_args=(1,),
        exact_placements=None if placed is None else ((spec.placements,), (placed,)),
    )


def _factor_groups(in_shape: Sequence[int], out_shape: Sequence[int]) -> list[tuple[range, range]]:
    """Returns the smallest ranges of input dims and of output dims with the same elements, in order."""
    if 0 in in_shape:
        return []  # no elements: any grouping would be valid, so none is returned
    groups, i, j = [], 0, 0
    while i < len(in_shape) and j < len(out_shape):
        start_i, start_j = i, j
        in_count, out_count = in_shape[i], out_shape[j]
        i, j = i + 1, j + 1
        while in_count != out_count:
            if in_count < out_count:
                in_count, i = in_count * in_shape[i], i + 1
            else:
                out_count, j = out_count * out_shape[j], j + 1
        groups.append((range(start_i, i), range(start_j, j)))
    return groups


def _outermost(shape: Sequence[int], dims: range) -> int | None:
    """Returns the first dim of the range with more than one element."""
    return next((d for d in dims if shape[d] > 1), None)


# ---- dims that are moved, added and removed ----


def _transpose_dims(call: OpCall, ndim: int) -> dict[int, int]:
    a, b = call.dim("dim0"), call.dim("dim1")
    return {d: {a: b, b: a}.get(d, d) for d in range(ndim)}


def _repeat_dims(call: OpCall, ndim: int) -> dict[int, int]:
    """Returns the dims that are not repeated, which keep their shards."""
    lead = len(call["repeats"]) - ndim
    return {d: d + lead for d in range(ndim) if call["repeats"][d + lead] == 1}


DimMap = Callable[[OpCall, int], dict[int, int]]  # (call, number of dims of the full tensor) -> map of dims

# For each kind of window: map from the tensor dims that it contains in full to its own dims. The table serves ops that
# return a window, that write one (`_scatter`), and that put one into zeros (`_backward`).
WINDOWS: dict[str, DimMap] = {
    "select": lambda call, n: remaining_dims(n, [call.dim(ndim=n)]),
    "slice": lambda call, n: remaining_dims(
        n, () if _is_full_slice(call) else [call.dim(ndim=n)], keepdim=True
    ),
    "diagonal": lambda call, n: remaining_dims(n, (call.dim("dim1", n), call.dim("dim2", n))),
}
# Names of ops -> map from input dims that may be sharded to output dims.
DIM_MAPS: dict[str, DimMap] = {
    "t t_copy": lambda _, n: {d: n - 1 - d for d in range(n)},
    "transpose.int transpose_copy.int": _transpose_dims,
    "permute permute_copy": lambda call, n: {src % n: dst for dst, src in enumerate(call["dims"])},
    "unsqueeze unsqueeze_copy": lambda call, n: {d: d + (d >= call.dim(ndim=n + 1)) for d in range(n)},
    "select.int select_copy.int unbind.int unbind_copy.int": WINDOWS["select"],
    "slice.Tensor slice_copy.Tensor": WINDOWS["slice"],
    "diagonal diagonal_copy": WINDOWS["diagonal"],
    "split.Tensor split_copy.Tensor unsafe_split.Tensor narrow_copy "
    "split_with_sizes split_with_sizes_copy unsafe_split_with_sizes": (
        lambda call, n: remaining_dims(n, [call.dim()], keepdim=True)
    ),
    # Windows over one dim, which must not be sharded; their elements become the last dim.
    "unfold unfold_copy": lambda call, n: remaining_dims(n, [call.dim("dimension")], keepdim=True),
    # Without dims, the flattened tensor is rolled.
    "roll": lambda call, n: remaining_dims(n, call.dims("dims"), keepdim=True),
    "rot90": lambda call, n: remaining_dims(n, [d % n for d in call["dims"]], keepdim=True),
    "repeat": _repeat_dims,
    # [..., channels, height, width]: dims before the channels may be sharded.
    "pixel_shuffle pixel_unshuffle": lambda _, n: remaining_dims(n, range(n - 3, n)),
    "channel_shuffle": lambda _, n: remaining_dims(n, range(1, n)),
}
_MOVES, _WRITES, _GRADIENTS = by_op(DIM_MAPS), by_op(WINDOWS, "_scatter"), by_op(WINDOWS, "_backward")


def _is_full_slice(call: OpCall) -> bool:
    """Whether a slice contains the whole dim, which may then be sharded."""
    results = call.outputs if len(call.inputs) == 1 else [call.inputs[1]]
    return call["step"] == 1 and all(t is not None and t.shape == call.inputs[0].shape for t in results)


@rule(*_MOVES)
def move_dims(call: OpCall) -> Strategy:
    return Strategy(mapped_rows(call, _MOVES[call.op](call, call.inputs[0].ndim), len(call.outputs)))


@rule(*_GRADIENTS)
def window_gradient(call: OpCall) -> Strategy:
    return Strategy(
        mapped_rows(
            call,
            {window_dim: d for d, window_dim in _GRADIENTS[call.op](call, len(call["input_sizes"])).items()},
        ),
        local_shape_args=(1,),
    )


@rule(aten.diag_embed.default)
def diag_embed(call: OpCall) -> Strategy:
    return Strategy(
        mapped_rows(
            call,
            {window_dim: d for d, window_dim in WINDOWS["diagonal"](call, call.inputs[0].ndim + 1).items()},
        )
    )


@rule(*_WRITES)
def write_window(call: OpCall) -> Strategy:
    """(self, src) -> self with src written to a window."""
    return Strategy(
        [
            *(
                PlacementRow((Shard(d), Shard(window_dim)), (Shard(d),))
                for d, window_dim in _WRITES[call.op](call, call.inputs[0].ndim).items()
            ),
            *linear_rows(call, 2, ops=REDUCE_OPS),
        ]
    )


@rule(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
@rule(aten.squeeze_copy.dim, aten.squeeze_copy.dims, aten.squeeze_copy.default)
def squeeze(call: OpCall) -> Strategy:
    # A dim of size 1 is not sharded: its only element would be on one rank, and other ranks would be empty.
    shape = call.inputs[0].shape
    everything = call.op in (aten.squeeze.default, aten.squeeze_copy.default)
    dims = range(len(shape)) if everything else () if call["dim"] == [] else call.dims()
    squeezed = tuple(d for d in dims if shape[d] == 1)
    # Pass the dims to the local op explicitly, because a dim of a shard may be 1 where that of the tensor is not.
    local_op = aten.squeeze_copy.dims if call.op.overloadpacket is aten.squeeze_copy else aten.squeeze.dims
    return Strategy(
        mapped_rows(call, remaining_dims(len(shape), squeezed)),
        local_op=lambda local, *_: local_op(local, squeezed),
        any_lengths=True,
    )


@rule(aten.expand.default, aten.expand_copy.default)
def expand(call: OpCall) -> Strategy:
    in_shape, out_shape = call.inputs[0].shape, call.outputs[0].shape  # type: ignore[union-attr]
    lead = len(out_shape) - len(in_shape)
    return Strategy(
        mapped_rows(call, {d: d + lead for d in range(len(in_shape)) if in_shape[d] == out_shape[d + lead]}),
        local_shape_args=(1,),
    )


def tensor_split(tensor: Value, indices_or_sections: Any = None, dim: int = 0, **named: object) -> Value:
    """Replaces `torch.tensor_split`, which reads the memory of an index tensor directly."""
    indices = named.get("tensor_indices_or_sections", indices_or_sections)
    if not isinstance(indices, torch.Tensor):
        return NotImplemented
    if isinstance(indices, Wrapper):
        indices = redistribute_tensor(indices, (REPLICATE,) * indices._spec.info.ndim)._local_tensor
    return torch.tensor_split(tensor, indices.tolist(), dim)


@rule(aten.cat.default)
def cat(call: OpCall) -> Strategy:
    """The joined dim must not be sharded; other dims may be, in the same way. torch ignores inputs of shape (0,)."""
    ndim = len(call.outputs[0].shape)  # type: ignore[union-attr]
    joined = call.dim(ndim=ndim)
    return Strategy(
        [
            *(
                PlacementRow(
                    tuple(Shard(d) if s.ndim == ndim else REPLICATE for s in call.inputs), (Shard(d),)
                )
                for d in range(ndim)
                if d != joined
            ),
            *linear_rows(call, len(call.inputs), ops=REDUCE_OPS),
        ]
    )


@rule(aten.stack.default)
def stack(call: OpCall) -> Strategy:
    ndim, count = call.inputs[0].ndim, len(call.inputs)
    new = call.dim(ndim=ndim + 1)
    return Strategy(
        [
            *(PlacementRow((Shard(d),) * count, (Shard(d + (d >= new)),)) for d in range(ndim)),
            *linear_rows(call, count, ops=REDUCE_OPS),
        ]
    )


@rule(aten.triu.default, aten.tril.default, aten.triu_.default, aten.tril_.default)
def triangle(call: OpCall) -> Strategy:
    """The last two dims are matrices. The offset of a shard shifts the diagonal."""
    op = call.op

    def localize(placed: PlacedSpecs) -> Callable[..., torch.Tensor] | None:
        row, column = placed.inputs[0].local_offset[-2:]
        return None if row == column == 0 else lambda local, diagonal=0: op(local, diagonal + row - column)

    return Strategy(mapped_rows(call, {d: d for d in range(call.inputs[0].ndim)}), localize=localize)


@rule(aten.unfold_backward.default)
def unfold_backward(call: OpCall) -> Strategy:
    """Sums the elements of overlapping windows."""
    ndim = len(call["input_sizes"])
    cut = call.dim(ndim=ndim)
    return Strategy(
        [*shard_rows((d for d in range(ndim) if d != cut), 1, 1), *linear_rows(call, 1)],
        local_shape_args=(1,),
    )


@rule(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(call: OpCall) -> Strategy:
    """Reinterprets the bits as another dtype. The last dim changes if the item sizes differ."""
    in_shape, out_shape = call.inputs[0].shape, call.outputs[0].shape  # type: ignore[union-attr]
    return Strategy(shard_rows((d for d in range(len(in_shape)) if in_shape[d] == out_shape[d]), 1, 1))


# ---- placements after a view that splits and joins dims ----

# Note [Regrouped dims]: a view preserves the order of elements. Consider a group of input dims that become a group of
# output dims, and a shard of one of the input dims. It splits the elements, seen as [preceding, length, following],
# along `length`. The output has the same shards
#
#     as Shard(j)             if the dims before j have `preceding` elements;
#     as StridedShard(j, f)   if they have f times fewer, and j consists of f stretches;
#     as RaggedShard(j, ...)  if the parts are not chunks of j, but whole indices of it.
#
# Otherwise no placement describes the shards, and the tensor is moved first.


@dataclass
class DimGroup:
    """Input dims and output dims that have the same elements.

    Attributes:
        ins, outs: the input and output dims.
        in_lengths, out_lengths: per dim, the length on one rank after the mesh dims handled so far.
        uneven: whether the last mesh dim split them unevenly, so that no further mesh dim can split them.
    """

    ins: range
    outs: range
    in_lengths: dict[int, int]
    out_lengths: dict[int, int]
    uneven: bool = False


def regrouped_placements(
    placements: Placements,
    mesh_sizes: Sequence[int],
    in_shape: Sequence[int],
    out_shape: Sequence[int],
    groups: Sequence[tuple[range, range]],
) -> Placements | None:
    """Returns the placements of the view of shape `out_shape`, or None if some shard cannot be described there.

    Mesh dims are handled from the outermost to the innermost. Each splits the parts that the outer mesh dims left.
    """
    states = [
        DimGroup(ins, outs, {d: in_shape[d] for d in ins}, {d: out_shape[d] for d in outs})
        for ins, outs in groups
    ]
    view_placements: list[Placement] = []
    for placement, parts in zip(placements, mesh_sizes, strict=True):
        if not isinstance(placement, Shard):
            view_placements.append(placement)
            continue
        group = next((g for g in states if placement.dim in g.ins), None)
        placed = None if group is None or group.uneven else _split_group(group, placement, parts)
        if placed is None:
            return None
        view_placements.append(placed)
    return tuple(view_placements)


def _split_group(group: DimGroup, placement: Shard, parts: int) -> Shard | None:
    """Returns the placement of the output for one more mesh dim, and updates the group."""
    dim = placement.dim
    stretches = placement.split_factor if isinstance(placement, StridedShard) else 1
    if group.in_lengths[dim] % stretches:
        return None
    length = group.in_lengths[dim] // stretches
    lead = math.prod(group.in_lengths[d] for d in group.ins if d < dim) * stretches
    counts = placement.counts if isinstance(placement, RaggedShard) else tuple(chunk_lengths(length, parts))
    even = min(counts) == max(counts)
    preceding = 1
    for out_dim in group.outs:
        size = group.out_lengths[out_dim]
        if lead % preceding == 0 and size % (lead // preceding) == 0:
            out_placement = _split_placement(out_dim, lead // preceding, size, length, counts, even)
            if out_placement is not None:
                group.uneven = not even
                if even:
                    group.in_lengths[dim] //= parts
                    group.out_lengths[out_dim] //= parts
                return out_placement
        preceding *= size
    return None


def _split_placement(
    out: int, factor: int, size: int, length: int, counts: tuple[int, ...], even: bool
) -> Shard | None:
    """Returns the placement of output dim `out` if its `factor` stretches can be split into `counts`, else None."""
    inner = size // factor
    # `inner` consecutive indices of `out` cover the same elements as `length` indices of the input dim.
    scaled = [count * inner for count in counts]
    if any(count % length for count in scaled):
        return None
    shard_counts = tuple(count // length for count in scaled)
    chunks = list(shard_counts) == chunk_lengths(inner, len(shard_counts))
    if factor > 1:
        return StridedShard(out, factor) if chunks and even else None
    return Shard(out) if chunks else RaggedShard(out, shard_counts)
