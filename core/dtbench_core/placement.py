"""How one mesh dim holds a tensor: Shard, Replicate or Partial. Pure arithmetic, no communication.

A tensor on an N-D mesh has one placement per mesh dim. Where several mesh dims shard the same
tensor dim, the outer mesh dim (the lower index) splits first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# The reductions a Partial may be pending; "avg" is a sum divided by the ranks of the mesh dim.
REDUCE_OPS = ("sum", "avg", "product", "max", "min")


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


@dataclass(frozen=True, slots=True)
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
        return chunk_lengths(size, parts)

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
class Replicate(Placement):
    """Every rank of the mesh dim holds the same values."""

    def is_replicate(self) -> bool:
        return True

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True)
class Partial(Placement):
    """Every rank of the mesh dim holds a term; `reduce_op` over the ranks gives the tensor."""

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        if self.reduce_op not in REDUCE_OPS:
            raise ValueError(
                f"Partial got reduce_op {self.reduce_op!r}, expected one of {', '.join(REDUCE_OPS)}"
            )

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __str__(self) -> str:
        return "P" if self.reduce_op == "sum" else f"P({self.reduce_op})"


Placements = tuple[Placement, ...]
REPLICATE = Replicate()


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


def splits_evenly(size: int, dim: int, placements: Placements, mesh_sizes: tuple[int, ...]) -> bool:
    """Whether every rank holds equally much of tensor dim `dim`, which has `size` elements."""
    for placement, parts in zip(placements, mesh_sizes, strict=True):
        if placement.is_shard(dim):
            if size % parts:
                return False
            size //= parts
    return True
