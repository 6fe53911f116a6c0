"""The description of a distributed tensor: mesh, placements and global metadata.

Note [Interned specs]: two specs with the same content are the same object. So a spec is compared and hashed by
identity, and the dict lookup of a plan never compares the contents of specs. The table has weak references. A cached
plan keeps the specs of its key alive.

Note [Order of elements]: ranks may have different strides, since `from_local` and `distribute_tensor` keep those of the
tensors they get. So elements are never sent in the order of the strides, but in the spec's `order`. It depends only on
the calls, so it is the same on every rank:

- row-major for a new tensor,
- for a view, the base's order with its dims permuted like the view's,
- for other results, the order of an input of the same shape, else row-major. This holds for copies, too, since one
  rank may need a copy where another does not.

If all tensors start row-major, this order usually equals the memory order, and sending needs no copy.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import CoreError, DimError, PlacementError, PlacementTypeError
from dtbench_core.layout.mesh import MeshInfo, mesh_info
from dtbench_core.layout.placement import (
    REPLICATE,
    Partial,
    Placement,
    Placements,
    RaggedShard,
    Shard,
    as_placement,
    describe,
    local_extents,
    splits_evenly,
)
from dtbench_core.torch_compat import as_unknown_size

Order = tuple[int, ...] | None


class TensorMeta(NamedTuple):
    """Global metadata of a distributed tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(slots=True, weakref_slot=True, init=False, eq=False, repr=False)
class DTensorSpec:
    """Mesh, placements, global shape, stride and dtype. Make one with `DTensorSpec.of`.

    Attributes:
        info: the `MeshInfo`.
        mesh: its DeviceMesh.
        placements: one per mesh dim; Shard dims are non-negative.
        shape, stride, dtype: of the global tensor.
        row_major: whether the strides are those of torch.empty.
        order: the dims in the order in which elements are sent, outermost first. See Note [Order of elements].
        local_shape: shape of this rank's shard. On a rank outside the mesh (0,), or () for a 0-dim tensor.
        local_offset: global index of the shard's first element. On a rank outside the mesh the same as `local_shape`.
        local_stride: strides of a dense shard whose dims have the same memory order as the global tensor's.
    """

    info: MeshInfo
    placements: Placements
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    row_major: bool
    order: tuple[int, ...]
    _local: tuple[tuple[int, ...], tuple[int, ...]] | None
    _equal_dims: frozenset[int] | None

    def __init__(self) -> None:
        raise TypeError(
            "specs are interned: make one with DTensorSpec.of(mesh, placements, shape, stride, dtype)"
        )

    @staticmethod
    def of(
        mesh: DeviceMesh | MeshInfo,
        placements: Placements,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        order: Order = None,
    ) -> DTensorSpec:
        """Returns the spec with this content.

        Args:
            placements: as `normalize` returns them.
            order: None for row-major.
        """
        info = mesh if isinstance(mesh, MeshInfo) else mesh_info(mesh)
        if order is not None and order == tuple(range(len(order))):
            order = None
        key = (info, placements, tuple(shape), tuple(stride), dtype, order)
        try:
            interned = _interned.get(key)
        except TypeError:
            # Sizes are symbolic in a trace. The shards depend on the values of sizes, so the graph is guarded by them.
            key = (info, placements, _numbers(shape), _numbers(stride), dtype, order)
            interned = _interned.get(key)
        if interned is not None:
            return interned
        spec = object.__new__(DTensorSpec)
        spec.info, spec.placements = info, placements
        spec.shape, spec.stride, spec.dtype = torch.Size(key[2]), key[3], dtype
        spec.row_major = spec.stride == contiguous_stride(spec.shape)
        spec.order = tuple(range(len(key[2]))) if order is None else order
        spec._local = spec._equal_dims = None
        _interned[key] = spec
        return spec

    def with_placements(self, placements: Placements) -> DTensorSpec:
        """Returns the spec of a dense copy with other placements."""
        stride = preserved_stride(tuple(self.shape), self.stride)
        return DTensorSpec.of(self.info, placements, self.shape, stride, self.dtype, self.order)

    @property
    def mesh(self) -> DeviceMesh:
        return self.info.mesh

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def tensor_meta(self) -> TensorMeta:
        return TensorMeta(self.shape, self.stride, self.dtype)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of this rank's shard."""
        return self._extents()[0]

    @property
    def local_offset(self) -> tuple[int, ...]:
        """Global index of this rank's first element."""
        return self._extents()[1]

    @property
    def local_stride(self) -> tuple[int, ...]:
        return contiguous_stride(self.local_shape, reversed(memory_order(self.shape, self.stride)))

    def matches_strides(self, local: torch.Tensor) -> bool:
        """Whether the strides of a local tensor are those that a shard of this spec must have.

        True for a global tensor with gaps or overlaps, since its strides depend on its base.
        """
        if self.row_major and local.is_contiguous():
            return True
        if local.numel() == 0 or self.stride != preserved_stride(tuple(self.shape), self.stride):
            return True
        return all(
            n == 1 or step == expected
            for n, step, expected in zip(local.shape, local.stride(), self.local_stride, strict=True)
        )

    def _extents(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if self._local is None:
            info = self.info
            if info.coordinate is None:
                nothing = (0,) if self.shape else ()  # see dispatch/outside_mesh.py
                self._local = nothing, nothing
            else:
                self._local = local_extents(self.shape, self.placements, info.sizes, info.coordinate)
        return self._local

    @property
    def replica_dims(self) -> frozenset[int]:
        """The mesh dims along which several ranks have the same part."""
        if self._equal_dims is None:
            # Outside the mesh there are no groups.
            pairs = enumerate(zip(self.info.groups, self.placements, strict=False))
            self._equal_dims = frozenset(
                d for d, (group, p) in pairs if group.size() > 1 and not isinstance(p, Shard)
            )
        return self._equal_dims

    @property
    def overlaps_itself(self) -> bool:
        """Whether elements share memory, as those of an expanded tensor do."""
        return any(step == 0 and n > 1 for n, step in zip(self.shape, self.stride, strict=True))

    def is_replicated(self) -> bool:
        return all(p.is_replicate() for p in self.placements)

    def is_even(self) -> bool:
        """Whether all ranks have shards of the same shape."""
        sizes, dims = self.info.sizes, range(self.ndim)
        return all(splits_evenly(self.shape[d], d, self.placements, sizes) for d in dims)

    def has_partial(self) -> bool:
        return any(p.is_partial() for p in self.placements)

    def __deepcopy__(self, memo: object) -> DTensorSpec:
        return self  # interned: see Note [Interned specs]

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}{list(self.shape)} {describe(self.placements)} on {self.info}"


def _numbers(symbols: Sequence[int]) -> tuple[int, ...]:
    """Returns the values of a tracer's symbolic numbers. The graph is guarded by them."""
    try:
        return tuple(map(int, symbols))
    except RuntimeError as error:
        unknown = as_unknown_size(
            error,
            CoreError,
            "got an op in a graph with a result whose size depends on values, such as masked_select or nonzero; "
            "expected an op whose result has a known size: call it outside the compiled function, or compile without "
            "fullgraph=True, so that the graph ends before it",
        )
        raise error if unknown is None else unknown from None


_interned: weakref.WeakValueDictionary[
    tuple[MeshInfo, Placements, tuple[int, ...], tuple[int, ...], torch.dtype, Order], DTensorSpec
] = weakref.WeakValueDictionary()


def normalize(
    placements: Sequence[Placement] | None, ndim: int, info: MeshInfo, shape: Sequence[int] | None = None
) -> Placements:
    """Returns placements for a spec: one per mesh dim (all Replicate for None), with Shard dims >= 0.

    With the global `shape`, checks that RaggedShard and StridedShard fit it. Those that cut like torch.chunk become
    Shard.

    Raises:
        PlacementError: wrong number of placements, not a placement, or a placement that the tensor cannot have.
    """
    if placements is None:
        return (REPLICATE,) * info.ndim
    try:
        listed = tuple(placements)
    except TypeError:
        raise PlacementTypeError(
            f"got the placement {placements}, expected a sequence of placements: write [{placements!r}]"
        ) from None
    if len(listed) != info.ndim:
        raise PlacementError(
            f"got {len(listed)} placements {[str(p) for p in listed]} for the {info}, "
            f"expected one for each of its {info.ndim} dims: add Replicate() for the dims that do not shard"
        )
    placed = tuple(normalize_one(p, ndim) for p in listed)
    pending = {p.reduce_op for p in placed if isinstance(p, Partial)}
    if len(pending) > 1 and not pending <= {"sum", "avg"}:
        raise PlacementError(
            f"got {describe(placed)}: the reductions {sorted(pending)} cannot be pending together, as the result "
            "depends on their order; reduce one of them first"
        )
    if shape is not None and any(isinstance(p, Shard) and type(p) is not Shard for p in placed):
        return _fitted(placed, shape, info)
    return placed


def normalize_one(placement: Placement, ndim: int) -> Placement:
    """Returns the placement of this library that equals `placement`, for a tensor of `ndim` dims, with its dim >= 0.

    Raises the errors of `normalize`.
    """
    placement = as_placement(placement)
    if not isinstance(placement, Shard):
        return placement
    if not isinstance(placement.dim, int):
        raise PlacementTypeError(
            f"got {placement!r}, expected an int as its dim, negative to count from the last"
        )
    if not -ndim <= placement.dim < ndim:
        raise DimError(
            f"got {_written(placement)} for a tensor of {ndim} dims, expected a dim in [{-ndim}, {ndim}): "
            "choose a dim the tensor has, or Replicate()"
        )
    return dataclasses.replace(placement, dim=placement.dim + ndim) if placement.dim < 0 else placement


def _written(placement: Shard) -> str:
    """Formats a shard as a user writes it: `Shard(2)`."""
    return f"Shard({placement.dim})" if type(placement) is Shard else repr(placement)


def _fitted(placed: Placements, shape: Sequence[int], info: MeshInfo) -> Placements:
    """Returns `placed` after checks that each placement fits the lengths that the outer mesh dims leave.

    Placements that cut like torch.chunk become Shard.
    """
    lengths = [{size} for size in shape]
    fitted: list[Placement] = []
    for mesh_dim, (placement, parts) in enumerate(zip(placed, info.sizes, strict=True)):
        fitting = placement
        if isinstance(placement, Shard):
            sizes = lengths[placement.dim]
            place = f"mesh dim {mesh_dim}, of {parts} ranks, for tensor dim {placement.dim} of {sorted(sizes)} elements"
            if isinstance(placement, RaggedShard) and (
                len(placement.counts) != parts or sizes != {sum(placement.counts)}
            ):
                raise PlacementError(
                    f"got {placement!r} on {place}, expected one count per rank, adding up to {sorted(sizes)}: correct "
                    "them; an outer mesh dim that cuts the same tensor dim must cut it evenly"
                )
            if all(
                placement.runs(n, parts, i) == Shard(0).runs(n, parts, i) for n in sizes for i in range(parts)
            ):
                fitting = Shard(placement.dim)
            lengths[placement.dim] = {length for n in sizes for length in placement.lengths(n, parts)}
        fitted.append(fitting)
    return tuple(fitted)


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (local shape, global offset) of this rank's part; ((0,), ()) on a rank outside the mesh.

    The name is torch's.

    Raises:
        PlacementError: placements that the tensor cannot have.
    """
    info = mesh_info(mesh)
    placed = normalize(placements, len(global_shape), info, global_shape)
    if info.coordinate is None:
        return (0,), ()
    return local_extents(tuple(global_shape), placed, info.sizes, info.coordinate)


def contiguous_stride(shape: Sequence[int], order: Iterable[int] | None = None) -> tuple[int, ...]:
    """Returns the strides of a dense tensor of this shape.

    Args:
        order: the dims in memory order, innermost first; None for row-major.
    """
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))) if order is None else order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Returns the dims in their order in memory, outermost first."""
    return sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim]))


def preserved_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides of a copy with torch.preserve_format: `stride` if it has no gaps and overlaps."""
    if stride == contiguous_stride(shape):
        return stride
    try:
        return _preserved(shape, stride)
    except TypeError:  # a tracer's symbols cannot be keys of a cache
        return _preserved.__wrapped__(shape, stride)


@functools.lru_cache(maxsize=4096)
def _preserved(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()
