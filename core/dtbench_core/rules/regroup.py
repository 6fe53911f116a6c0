"""Placements of a tensor after a view that splits and joins dims, without moving data.

A view preserves the order of elements. Consider a group of input dims that become a group of output dims, and a shard
of one of the input dims. It splits the elements, seen as [preceding, length, following], along `length`. The output has
the same shards

    as Shard(j)             if the dims before j have `preceding` elements;
    as StridedShard(j, f)   if they have f times fewer, and j consists of f stretches;
    as RaggedShard(j, ...)  if the parts are not chunks of j, but whole indices of it.

Otherwise no placement describes the shards, and the tensor is moved first (view.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dtbench_core.layout.placement import (
    Placement,
    Placements,
    RaggedShard,
    Shard,
    StridedShard,
    chunk_lengths,
)


@dataclass
class Group:
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

    Mesh dims are handled from the outermost to the innermost. Each splits the part that the ones before it left.
    """
    states = [
        Group(ins, outs, {d: in_shape[d] for d in ins}, {d: out_shape[d] for d in outs})
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


def _split_group(group: Group, placement: Shard, parts: int) -> Shard | None:
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
    # `inner` indices of `out` have the same elements as `length` indices of the input dim.
    scaled = [count * inner for count in counts]
    if any(count % length for count in scaled):
        return None
    shard_counts = tuple(count // length for count in scaled)
    chunks = list(shard_counts) == chunk_lengths(inner, len(shard_counts))
    if factor > 1:
        return StridedShard(out, factor) if chunks and even else None
    return Shard(out) if chunks else RaggedShard(out, shard_counts)
