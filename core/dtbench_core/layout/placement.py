"""Placements: how a tensor is distributed along one mesh dim. Arithmetic without communication.

A tensor on an N-D mesh has one placement per mesh dim. If several mesh dims shard the same tensor dim, the outer mesh
dim (the lower index) splits first.
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

# The reductions that a Partial may await. "avg" divides the sum by the number of ranks of the mesh dim.
REDUCE_OPS = ("sum", "avg", "product", "max", "min", "band", "bor", "bxor")
# The bitwise reductions, of integers and booleans.
BITWISE = ("band", "bor", "bxor")
# When a tensor becomes Partial, the first rank keeps it and the others get this neutral element. For other reductions
# every rank keeps the tensor.
NEUTRAL = {"sum": 0, "product": 1, "bxor": 0}


class Placement:
    """Base class: how a tensor is distributed along one mesh dim. Immutable, compared by value."""

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
    """Each rank of the mesh dim has a slice of tensor dim `dim`, as torch.chunk cuts it.

    `dim` may be negative in a user's placement; in the spec of a tensor it is not.
    """

    dim: int

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def extent(self, size: int, parts: int, index: int) -> tuple[int, int]:
        """Returns (length, offset) of part `index` of a dim of `size` elements cut into `parts`."""
        return chunk_extent(size, parts, index)

    def lengths(self, size: int, parts: int) -> list[int]:
        """Returns the length of every part, in rank order."""
        return [self.extent(size, parts, index)[0] for index in range(parts)]

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """Returns (length, offset) of the part of `rank` if torch.chunk cuts the dim. The names are torch's.

        Args:
            curr_local_size: elements of the dim.
            num_chunks: ranks of the mesh dim.
        """
        return chunk_extent(curr_local_size, num_chunks, rank)

    def runs(self, size: int, parts: int, index: int) -> list[tuple[int, int]]:
        """Returns the (offset, length) runs of the dim that make up part `index`, in order."""
        length, offset = self.extent(size, parts, index)
        return [(offset, length)]

    def part(self, full: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        """Returns part `index` of the global tensor `full`, as a view if possible."""
        length, offset = self.extent(full.size(self.dim), parts, index)
        return full.narrow(self.dim, offset, length)

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class RaggedShard(Shard):
    """A Shard whose lengths differ from torch.chunk's, such as a table whose rows are distributed by load.

    Attributes:
        counts: length of each rank's slice; they add up to the length of the dim.
    """

    counts: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = tuple(self.counts)
        if any(not isinstance(n, int) or n < 0 for n in counts):
            raise ValueError(f"RaggedShard got the counts {counts}, expected ints >= 0, one per rank")
        object.__setattr__(self, "counts", counts)

    def extent(self, size: int, parts: int, index: int) -> tuple[int, int]:
        if sum(self.counts) != size:  # an outer mesh dim has cut the dim: see `normalize` in spec.py
            raise ValueError(f"got {size} elements for {self}, expected {sum(self.counts)}")
        return self.counts[index], sum(self.counts[:index])

    def __str__(self) -> str:
        return f"S({self.dim}:{'+'.join(map(str, self.counts))})"


@dataclass(frozen=True, slots=True)
class StridedShard(Shard):
    """torch.chunk cuts tensor dim `dim` into `split_factor` stretches, and each stretch into one part per rank.

    A view that joins a sharded dim with the dim before it turns Shard into StridedShard. For example, a [4, 6] tensor
    with Shard(1) has StridedShard(0, 4) after flatten.
    """

    split_factor: int

    def __post_init__(self) -> None:
        if self.split_factor < 1:
            raise ValueError(f"StridedShard got split_factor {self.split_factor}, expected an int >= 1")

    def extent(self, size: int, parts: int, index: int) -> tuple[int, int]:
        """Returns (length, offset of the first element). The elements are not contiguous: see `runs`."""
        runs = self.runs(size, parts, index)
        return sum(length for _, length in runs), runs[0][0]

    def runs(self, size: int, parts: int, index: int) -> list[tuple[int, int]]:
        runs = []
        for stretch in range(self.split_factor):
            length, offset = chunk_extent(size, self.split_factor, stretch)
            part_length, inner = chunk_extent(length, parts, index)
            runs.append((offset + inner, part_length))
        return [run for run in runs if run[1]] or runs[:1]

    def part(self, full: torch.Tensor, parts: int, index: int) -> torch.Tensor:
        size = full.size(self.dim)
        if size % self.split_factor == 0:
            inner = size // self.split_factor
            length, offset = chunk_extent(inner, parts, index)
            slices = full.unflatten(self.dim, (self.split_factor, inner)).narrow(self.dim + 1, offset, length)
            return cast("torch.Tensor", slices.flatten(self.dim, self.dim + 1))
        import torch

        runs = self.runs(size, parts, index)
        return torch.cat([full.narrow(self.dim, offset, length) for offset, length in runs], self.dim)

    def __str__(self) -> str:
        return f"S({self.dim}/{self.split_factor})"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Replicate(Placement):
    """Every rank of the mesh dim has the same values."""

    def is_replicate(self) -> bool:
        return True

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Partial(Placement):
    """Every rank of the mesh dim has a term; reducing the terms with `reduce_op` gives the tensor."""

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
    """Returns `value` if it is a placement, or the equivalent of a placement of torch.distributed.tensor.

    Raises:
        PlacementTypeError: anything else.
    """
    if isinstance(value, Placement):
        return value
    kind, torch_dtensor = type(value), sys.modules.get("torch.distributed.tensor")
    if torch_dtensor is not None:  # if it is not imported, no object of its classes can exist
        if kind is torch_dtensor.Shard:
            return Shard(value.dim)  # type: ignore[attr-defined]
        if kind is torch_dtensor.Replicate:
            return REPLICATE
        if kind is torch_dtensor.Partial:
            return Partial(value.reduce_op)  # type: ignore[attr-defined]
        if kind is torch_dtensor.placement_types._StridedShard:
            return StridedShard(value.dim, value.split_factor)  # type: ignore[attr-defined]
    raise PlacementTypeError(
        f"got {value!r} ({kind.__module__}.{kind.__qualname__}) as a placement, expected Shard, Replicate or Partial, "
        f"of dtbench_core or torch.distributed.tensor"
    )


def permuted(placements: Placements, places: Sequence[int]) -> Placements:
    """Returns the placements of the tensor after its dim `d` has become dim `places[d]`."""
    return tuple(dataclasses.replace(p, dim=places[p.dim]) if isinstance(p, Shard) else p for p in placements)


def describe(placements: Placements) -> str:
    """Formats placements for messages and tables: `S(0),R`."""
    return ",".join(str(p) for p in placements)


def chunk_extent(size: int, parts: int, index: int) -> tuple[int, int]:
    """Returns (length, offset) of part `index` if torch.chunk cuts `size` elements into `parts`.

    Every part but the last non-empty one has ceil(size / parts) elements, so trailing parts may be
    empty: chunk_extent(5, 4, 2) == (1, 4) and chunk_extent(5, 4, 3) == (0, 5).
    """
    full = -(-size // parts)
    offset = min(size, full * index)
    return min(full, size - offset), offset


def chunk_lengths(size: int, parts: int) -> list[int]:
    """Returns the length of every part, in rank order."""
    return [chunk_extent(size, parts, index)[0] for index in range(parts)]


def local_extents(
    shape: tuple[int, ...], placements: Placements, mesh_sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (local shape, global index of the first element) for the rank at `coordinate` of the mesh."""
    lengths, offsets = list(shape), [0] * len(shape)
    for placement, parts, index in zip(placements, mesh_sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            length, offset = placement.extent(lengths[placement.dim], parts, index)
            lengths[placement.dim] = length
            offsets[placement.dim] += offset
    return tuple(lengths), tuple(offsets)


def runs_of_rank(
    size: int, dim: int, placements: Placements, mesh_sizes: tuple[int, ...], coordinate: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Returns the (offset, length) runs of tensor dim `dim` that the rank at `coordinate` has, in local order.

    Args:
        size: elements of the dim.
    """
    runs = [(0, size)]
    for placement, parts, index in zip(placements, mesh_sizes, coordinate, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            length = sum(n for _, n in runs)
            runs = [
                run
                for part_run in placement.runs(length, parts, index)
                for run in _locate_run(runs, part_run)
            ]
    return runs


def _locate_run(joined: list[tuple[int, int]], run: tuple[int, int]) -> list[tuple[int, int]]:
    """Returns the runs of the global dim that one run of the local tensor covers.

    Args:
        joined: (offset in the global dim, length) runs whose concatenation is the local tensor.
        run: (offset, length) in the local tensor.
    """
    offset, length = run
    if length == 0:
        return [(joined[0][0] + min(offset, joined[0][1]), 0)] if joined else []
    runs, position = [], 0
    for start, n in joined:
        low, high = max(offset, position), min(offset + length, position + n)
        if low < high:
            runs.append((start + low - position, high - low))
        position += n
    return runs


def splits_evenly(size: int, dim: int, placements: Placements, mesh_sizes: tuple[int, ...]) -> bool:
    """Whether all ranks have the same number of elements of tensor dim `dim`. `size`: elements of the global dim."""
    for placement, parts in zip(placements, mesh_sizes, strict=True):
        if isinstance(placement, Shard) and placement.dim == dim:
            if size % parts or (type(placement) is not Shard and len({*placement.lengths(size, parts)}) > 1):
                return False
            size //= parts
    return True
