"""How one mesh dim holds a tensor: Shard, Replicate or Partial. Pure arithmetic, no communication.

A tensor on an N-D mesh has one placement per mesh dim. Where several mesh dims shard the same
tensor dim, the outer mesh dim (the lower index) splits first.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from dtbench_core.errors import PlacementError, PlacementTypeError

if TYPE_CHECKING:
    import torch

# The reductions a Partial may be pending; "avg" is a sum divided by the ranks of the mesh dim.
REDUCE_OPS = ("sum", "avg", "product", "max", "min", "band", "bor", "bxor")
# Those of whole numbers and booleans, bit by bit.
BITWISE = ("band", "bor", "bxor")
# What all ranks but the first hold of a value that is pending; of other reductions, they hold the value too.
NEUTRAL = {"sum": 0, "product": 1, "bxor": 0}


class Placement:
    """What one mesh dim does with a tensor. Immutable, compared by value."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a Shard (of `dim`, when given)."""
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether this is a Partial (pending `reduce_op`, when given)."""
        return False


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Shard(Placement):
    """The ranks of the mesh dim hold slices of tensor dim `dim`, as torch.chunk cuts them.

    `dim` may be negative until the placement meets a tensor, which fixes it.
    """

    dim: int

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def extent(self, size: int, parts: int, index: int) -> tuple[int, int]:
        """(length, offset) of part `index` of a dim of `size` elements cut into `parts`."""
        return chunk_extent(size, parts, index)

    def lengths(self, size: int, parts: int) -> list[int]:
        """The length of every part, in rank order."""
        return [self.extent(size, parts, index)[0] for index in range(parts)]

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """(length, offset) of the part of `rank` when torch.chunk cuts so many elements into `num_chunks`. The names
        are torch's."""
        return chunk_extent(curr_local_size, num_chunks, rank)

    def runs(self, size: int, parts: int, index: int) -> list[tuple[int, int]]:
        """The (offset, length) stretches of the dim that part `index` is made of, in order."""
        length, offset = self.extent(size, parts, index)
        return [(offset, length)]

    def part(self, whole: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        """Part `index` of `whole`: a view where it can be one."""
        length, offset = self.extent(whole.size(self.dim), parts, index)
        return whole.narrow(self.dim, offset, length)

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class RaggedShard(Shard):
    """Slices of tensor dim `dim` of the lengths `counts`, in the order of the mesh dim's ranks.

    The lengths add up to the tensor's. For layouts that torch.chunk does not make, such as a table
    whose rows are spread by load.
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = tuple(self.counts)
        if any(not isinstance(n, int) or n < 0 for n in counts):
            raise ValueError(f"RaggedShard got the counts {counts}, expected ints >= 0, one per rank")
        object.__setattr__(self, "counts", counts)

    def extent(self, size: int, parts: int, index: int) -> tuple[int, int]:
        if sum(self.counts) != size:  # an outer mesh dim has cut the dim: see `normalize` in spec.py
            raise ValueError(f"{self} holds {sum(self.counts)} elements, and not the {size} there are")
        return self.counts[index], sum(self.counts[:index])

    def __str__(self) -> str:
        return f"S({self.dim}:{'+'.join(map(str, self.counts))})"


@dataclass(frozen=True, slots=True)
class StridedShard(Shard):
    """Tensor dim `dim`, cut by torch.chunk into `split_factor` stretches, each of which is cut as a Shard cuts.

    So a rank holds a part of every stretch. This is what becomes of a shard of an inner dim when a view joins it with
    the dim before it: [4, 6] as S(1), flattened, is StridedShard(0, 4).
    """

    split_factor: int

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise ValueError(f"StridedShard got split_factor {self.split_factor}, expected an int >= 1")

    def extent(self, size: int, parts: int, index: int) -> tuple[int, int]:
        """(length, offset of the first element): the elements are no one stretch, see `runs`."""
        held = self.runs(size, parts, index)
        return sum(length for _, length in held), held[0][0]

    def runs(self, size: int, parts: int, index: int) -> list[tuple[int, int]]:
        held = []
        for stretch in range(self.split_factor):
            length, offset = chunk_extent(size, self.split_factor, stretch)
            own, inner = chunk_extent(length, parts, index)
            held.append((offset + inner, own))
        return [run for run in held if run[1]] or held[:1]

    def part(self, whole: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        size = whole.size(self.dim)
        if size % self.split_factor == 0:
            inner = size // self.split_factor
            length, offset = chunk_extent(inner, parts, index)
            seen = whole.unflatten(self.dim, (self.split_factor, inner)).narrow(self.dim + 1, offset, length)
            return cast("torch.Tensor", seen.flatten(self.dim, self.dim + 1))
        import torch

        held = self.runs(size, parts, index)
        return torch.cat([whole.narrow(self.dim, offset, length) for offset, length in held], self.dim)

    def __str__(self) -> str:
        return f"S({self.dim}/{self.split_factor})"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Replicate(Placement):
    """Every rank of the mesh dim holds the same values."""

    def is_replicate(self) -> bool:
        return True

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Partial(Placement):
    """Every rank of the mesh dim holds a term; `reduce_op` over the ranks gives the tensor."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise PlacementError(
                f"Partial got reduce_op {self.reduce_op!r}, expected one of {', '.join(REDUCE_OPS)}"
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __str__(self) -> str:
        return "P" if self.reduce_op == "sum" else f"P({self.reduce_op})"


Placements = tuple[Placement, ...]
REPLICATE = Replicate()


def as_placement(value: object) -> Placement:
    """`value` if it is a placement; if it is one of torch.distributed.tensor, that of the same meaning.

    Raises:
        PlacementTypeError: anything else.
    """
    if isinstance(value, Placement):
        return value
    kind, theirs = type(value), sys.modules.get("torch.distributed.tensor")
    if theirs is not None:  # else nobody holds one of its placements
        if kind is theirs.Shard:
            return Shard(value.dim)  # type: ignore[attr-defined]
        if kind is theirs.Replicate:
            return REPLICATE
        if kind is theirs.Partial:
            return Partial(value.reduce_op)  # type: ignore[attr-defined]
        if kind is theirs.placement_types._StridedShard:
            return StridedShard(value.dim, value.split_factor)  # type: ignore[attr-defined]
    raise PlacementTypeError(
        f"got {value!r} ({kind.__module__}.{kind.__qualname__}) as a placement, expected Shard, Replicate or Partial, "
        f"of dtbench_core or torch.distributed.tensor"
    )


def permuted(placements: Placements, places: Sequence[int]) -> Placements:
    """The placements of the tensor whose dim `d` has become dim `places[d]`."""
    return tuple(dataclasses.replace(p, dim=places[p.dim]) if isinstance(p, Shard) else p for p in placements)


def describe(placements: Placements) -> str:
    """The placements as messages and tables show them: `S(0),R`."""
    return ",".join(str(p) for p in placements)


def chunk_extent(size: int, parts: int, index: int) -> tuple[int, int]:
    """(length, offset) of part `index` when torch.chunk cuts `size` into `parts`.

    Every part but the last non-empty one has ceil(size / parts) elements, so trailing parts may be
    empty: chunk_extent(5, 4, 2) == (1, 4) and chunk_extent(5, 4, 3) == (0, 5).
    """
    full = -(-size // parts)
    offset = min(size, full * index)
    return min(full, size - offset), offset


def chunk_lengths(size: int, parts: int) -> list[int]:
    """The length of every part, in rank order."""
    return [chunk_extent(size, parts, index)[0] for index in range(parts)]


def local_extents(
    shape: tuple[int, ...], placements: Placements, mesh_sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, global offset of its first element) of the rank at `coordinate` of the mesh."""
    lengths, offsets = list(shape), [0] * len(shape)
    for placement, parts, index in zip(placements, mesh_sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            length, offset = placement.extent(lengths[placement.dim], parts, index)
            lengths[placement.dim] = length
            offsets[placement.dim] += offset
    return tuple(lengths), tuple(offsets)


def held_runs(
    size: int, dim: int, placements: Placements, mesh_sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> list[tuple[int, int]]:
    """The (offset, length) stretches of tensor dim `dim`, of `size` elements, that the rank at `coordinate` holds, in
    its order."""
    held = [(0, size)]
    for placement, parts, index in zip(placements, mesh_sizes, coordinate, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            length = sum(n for _, n in held)
            held = [run for wanted in placement.runs(length, parts, index) for run in _within(held, wanted)]
    return held


def _within(held: list[tuple[int, int]], wanted: tuple[int, int]) -> list[tuple[int, int]]:
    """What the run `wanted` of the joined runs `held`, all (offset, length), is in their own offsets."""
    offset, length = wanted
    if length == 0:
        return [(held[0][0] + min(offset, held[0][1]), 0)] if held else []
    runs, before = [], 0
    for start, n in held:
        low, high = max(offset, before), min(offset + length, before + n)
        if low < high:
            runs.append((start + low - before, high - low))
        before += n
    return runs


def splits_evenly(size: int, dim: int, placements: Placements, mesh_sizes: tuple[int, ...]) -> bool:
    """Whether every rank holds equally much of tensor dim `dim`, which has `size` elements."""
    for placement, parts in zip(placements, mesh_sizes, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            if size % parts or (type(placement) is not Shard and len({*placement.lengths(size, parts)}) > 1):
                return False
            size //= parts
    return True
