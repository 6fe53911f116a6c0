"""The description of a distributed tensor: mesh, placements and global metadata.

Note [Interned specs]: two specs with the same content are the same object, so a spec is compared
and hashed by identity, and a cached plan is found by a dict lookup that never looks inside one.
The table holds them weakly; a cached plan keeps the specs of its key alive.

Note [Order of elements]: strides are what this rank sees, and ranks may differ in them: `from_local` and
`distribute_tensor` take tensors as they lie. So elements never travel in the order of strides, but in the spec's
`order`, which follows from the calls alone, the same on every rank: row-major for tensors that come in; permuted by
views as their dims are; that of an input of the same shape for other results (a copy too, as a rank may need none
where another does), else row-major. Where all tensors came in row-major, it is mostly the order in memory, and nothing
is copied for it.
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
        info: the `MeshInfo`; mesh: its DeviceMesh.
        placements: one per mesh dim; Shard dims are non-negative.
        shape, stride, dtype: of the global tensor. row_major: whether the strides are those of torch.empty.
        order: the dims as elements travel, outermost first. See Note [Order of elements].
        local_shape, local_offset: this rank's part of it; (0,) on a rank outside the mesh, () of a tensor without dims.
        local_stride: that of a dense part whose dims lie in memory in the order of the global ones.
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
        """The one spec of this content. `placements` must be normalised (see `normalize`). order: None is row-major."""
        info = mesh if isinstance(mesh, MeshInfo) else mesh_info(mesh)
        if order is not None and order == tuple(range(len(order))):
            order = None
        key = (info, placements, tuple(shape), tuple(stride), dtype, order)
        try:
            interned = _interned.get(key)
        except TypeError:
            # Traced with symbolic sizes: how shards are cut depends on the numbers, so they are guarded.
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
        """The same tensor, placed otherwise: a copy, dense in memory."""
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

    def lays_out(self, local: torch.Tensor) -> bool:
        """Whether `local`, of the local shape, lies in memory as a dense tensor's part must. Of a tensor with gaps or
        overlaps, any part does: its strides depend on the tensor it is a view of."""
        if self.row_major and local.is_contiguous():
            return True
        if local.numel() == 0 or self.stride != preserved_stride(tuple(self.shape), self.stride):
            return True
        each = zip(local.shape, local.stride(), self.local_stride, strict=True)
        return all(n == 1 or has == wanted for n, has, wanted in each)

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
        """The mesh dims along which several ranks hold the same part."""
        if self._equal_dims is None:
            pairs = enumerate(
                zip(self.info.groups, self.placements, strict=False)
            )  # outside the mesh, no groups
            self._equal_dims = frozenset(
                d for d, (group, p) in pairs if group.size() > 1 and not isinstance(p, Shard)
            )
        return self._equal_dims

    @property
    def overlaps_itself(self) -> bool:
        """Whether several elements lie in one place, as those of an expanded tensor."""
        return any(step == 0 and n > 1 for n, step in zip(self.shape, self.stride, strict=True))

    def is_replicated(self) -> bool:
        return all(p.is_replicate() for p in self.placements)

    def is_even(self) -> bool:
        """Whether every rank holds equally much."""
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
    """The values of a tracer's symbols now, on which the graph then depends."""
    try:
        return tuple(map(int, symbols))
    except RuntimeError as error:
        unknown = as_unknown_size(
            error,
            CoreError,
            "got an op on a DTensor in a graph whose size depends on values, such as masked_select, nonzero or unique; "
            "expected one of a known size, by which shards are cut: call it outside the compiled function, or compile "
            "without fullgraph=True, so that the graph ends before it",
        )
        raise error if unknown is None else unknown from None


_interned: weakref.WeakValueDictionary[
    tuple[MeshInfo, Placements, tuple[int, ...], tuple[int, ...], torch.dtype, Order], DTensorSpec
] = weakref.WeakValueDictionary()


def normalize(
    placements: Sequence[Placement] | None, ndim: int, info: MeshInfo, shape: Sequence[int] | None = None
) -> Placements:
    """Placements ready for a spec: one per mesh dim (all Replicate for None), Shard dims >= 0.

    With the global `shape`, also that RaggedShard and StridedShard fit it; those that cut as
    torch.chunk does become Shard.

    Raises:
        PlacementError: wrong count, not a placement, or one that the tensor cannot have.
    """
    if placements is None:
        return (REPLICATE,) * info.ndim
    try:
        listed = tuple(placements)
    except TypeError:
        raise PlacementTypeError(
            f"got the placement {placements}, expected a sequence of them: write [{placements!r}]"
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
            f"got {describe(placed)}: the reductions {sorted(pending)} cannot be pending together, as their order "
            "would change the result; reduce one of them first"
        )
    if shape is not None and any(isinstance(p, Shard) and type(p) is not Shard for p in placed):
        return _fitted(placed, shape, info)
    return placed


def normalize_one(placement: Placement, ndim: int) -> Placement:
    """One placement of a tensor of `ndim` dims, ours or torch's, its dim >= 0. Errors as for `normalize`."""
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
    """As a user writes it: `Shard(2)`."""
    return f"Shard({placement.dim})" if type(placement) is Shard else repr(placement)


def _fitted(placed: Placements, shape: Sequence[int], info: MeshInfo) -> Placements:
    """`placed`, checked against the lengths that each mesh dim finds, whatever the outer ones cut."""
    left = [{size} for size in shape]
    fitted: list[Placement] = []
    for mesh_dim, (placement, parts) in enumerate(zip(placed, info.sizes, strict=True)):
        fitting = placement
        if isinstance(placement, Shard):
            sizes = left[placement.dim]
            where = f"mesh dim {mesh_dim}, of {parts} ranks, for tensor dim {placement.dim} of {sorted(sizes)} elements"
            if isinstance(placement, RaggedShard) and (
                len(placement.counts) != parts or sizes != {sum(placement.counts)}
            ):
                raise PlacementError(
                    f"got {placement!r} on {where}, expected one count per rank, {sorted(sizes)} together: correct the "
                    "counts; one that an outer mesh dim cuts too must get equally much from it"
                )
            if all(
                placement.runs(n, parts, i) == Shard(0).runs(n, parts, i) for n in sizes for i in range(parts)
            ):
                fitting = Shard(placement.dim)
            left[placement.dim] = {length for n in sizes for length in placement.lengths(n, parts)}
        fitted.append(fitting)
    return tuple(fitted)


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape of this rank's part, where it begins in the tensor) of a tensor of that shape placed so; ((0,), ()) on a
    rank outside the mesh. The name is torch's.

    Raises:
        PlacementError: placements that the tensor cannot have.
    """
    info = mesh_info(mesh)
    placed = normalize(placements, len(global_shape), info, global_shape)
    if info.coordinate is None:
        return (0,), ()
    return local_extents(tuple(global_shape), placed, info.sizes, info.coordinate)


def contiguous_stride(shape: Sequence[int], order: Iterable[int] | None = None) -> tuple[int, ...]:
    """Row-major strides of `shape`, as torch.empty gives them; or those of dims in another order, innermost first."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(range(len(shape))) if order is None else order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def memory_order(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The dims as they lie in memory, outermost first."""
    return sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim]))


def preserved_stride(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a copy in torch.preserve_format: `stride` itself without gaps and overlaps."""
    if stride == contiguous_stride(shape):
        return stride
    try:
        return _preserved(shape, stride)
    except TypeError:  # a tracer's symbols, which no cache can hold
        return _preserved.__wrapped__(shape, stride)


@functools.lru_cache(maxsize=4096)
def _preserved(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty_like(torch.empty_strided(shape, stride, device="meta")).stride()
