"""Where the shards of a tensor lie once a view has split and joined its dims. Nothing moves.

A view keeps the order of the elements. So look at a group of input dims that become a group of output
dims, and at a cut in one of them: it cuts the elements, seen as [before, length, after], along
`length`. The output has the same cut

    as Shard(j)             where the dims before j hold `before` elements;
    as StridedShard(j, f)   where they hold f times fewer, and j begins with f stretches;
    as RaggedShard(j, ...)  where the parts are no chunks of j, but whole steps of it.

Else it has no name for it, and the tensor is moved first (view.py).
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
    """Input and output dims that hold the same elements, and what one rank holds of each so far.

    uneven: ranks hold different amounts since the last cut, so that no other can follow.
    """

    ins: range
    outs: range
    held_in: dict[int, int]
    held_out: dict[int, int]
    uneven: bool = False


def regrouped_placements(
    placements: Placements,
    mesh_sizes: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    groups: Sequence[tuple[range, range]],
) -> Placements | None:
    """The placements of the view of shape `after`, or None where a shard of `before` cannot stay.

    Mesh dims cut one after the other, the outermost first, each what the ones before it left.
    """
    states = [
        Group(ins, outs, {d: before[d] for d in ins}, {d: after[d] for d in outs}) for ins, outs in groups
    ]
    kept_placements: list[Placement] = []
    for placement, parts in zip(placements, mesh_sizes, strict=True):
        if not isinstance(placement, Shard):
            kept_placements.append(placement)
            continue
        group = next((g for g in states if placement.dim in g.ins), None)
        placed = None if group is None or group.uneven else _cut(group, placement, parts)
        if placed is None:
            return None
        kept_placements.append(placed)
    return tuple(kept_placements)


def _cut(group: Group, placement: Shard, parts: int) -> Shard | None:
    """The output's placement for one more cut, and the group after it."""
    dim = placement.dim
    stretches = placement.split_factor if isinstance(placement, StridedShard) else 1
    if group.held_in[dim] % stretches:
        return None
    length = group.held_in[dim] // stretches
    lead = math.prod(group.held_in[d] for d in group.ins if d < dim) * stretches
    counts = placement.counts if isinstance(placement, RaggedShard) else tuple(chunk_lengths(length, parts))
    even = min(counts) == max(counts)
    ahead = 1
    for out in group.outs:
        held = group.held_out[out]
        if lead % ahead == 0 and held % (lead // ahead) == 0:
            named = _named(out, lead // ahead, held, length, counts, even)
            if named is not None:
                group.uneven = not even
                if even:
                    group.held_in[dim] //= parts
                    group.held_out[out] //= parts
                return named
        ahead *= held
    return None


def _named(
    out: int, factor: int, held: int, length: int, counts: tuple[int, ...], even: bool
) -> Shard | None:
    """Output dim `out`, which holds `factor` stretches, cut like `length` was into `counts`; or None."""
    inner = held // factor
    # inner steps of `out` for `length` steps of the input: both are the same elements.
    scaled = [count * inner for count in counts]
    if any(count % length for count in scaled):
        return None
    mine = tuple(count // length for count in scaled)
    chunks = list(mine) == chunk_lengths(inner, len(mine))
    if factor > 1:
        return StridedShard(out, factor) if chunks and even else None
    return Shard(out) if chunks else RaggedShard(out, mine)
