"""Cuts local tensors from global ones, and derives the global layout from the ranks' local tensors."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from dtbench_core import comm
from dtbench_core.errors import LayoutError
from dtbench_core.layout.local_shards import holds_shards
from dtbench_core.layout.mesh import MeshInfo
from dtbench_core.layout.placement import (
    Placement,
    Placements,
    RaggedShard,
    Shard,
    StridedShard,
    describe,
    local_extents,
)
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride, memory_order, normalize, preserved_stride
from dtbench_core.runtime import cache_put, on_clear
from dtbench_core.torch_compat import is_traced


def empty_part(spec: DTensorSpec, device: torch.device | str) -> torch.Tensor:
    """Returns the local tensor of a rank outside the mesh: no elements, or a 0 if the tensor has no dims."""
    return torch.zeros(spec.local_shape, dtype=spec.dtype, device=device)


def part_of(full: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Returns this rank's part of a global tensor: `full` if nothing is cut, else a copy with the local strides."""
    part = window_of(full, spec)
    return part if part is full or spec.info.coordinate is None else with_local_stride(part, spec)


def window_of(full: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Returns this rank's part of a global tensor, sharing its memory if possible; `full` itself if nothing is cut."""
    if spec.info.coordinate is None:
        return empty_part(spec, full.device)
    part = full
    for placement, parts, index in zip(spec.placements, spec.info.sizes, spec.info.coordinate, strict=True):
        if isinstance(placement, Shard):
            part = placement.part(part, parts, index)
    return part


def with_local_stride(part: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Returns a copy of this rank's part with the spec's local strides."""
    if spec.row_major:
        return part.clone(memory_format=torch.contiguous_format)
    return part.new_empty_strided(spec.local_shape, spec.local_stride).copy_(part)


def even_layout(
    local: torch.Tensor, info: MeshInfo, placements: Placements
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the global shape and stride if all ranks have this local shape, apart from dims with a RaggedShard."""
    shape, stride = list(local.shape), list(local.stride())
    order = memory_order(local.shape, local.stride())
    for placement, parts in zip(placements, info.sizes, strict=True):
        if isinstance(placement, Shard):
            dim, was = placement.dim, shape[placement.dim]
            shape[dim] = sum(placement.counts) if isinstance(placement, RaggedShard) else was * parts
            stride = [
                -(-s * shape[dim] // max(was, 1)) if d != dim and s > stride[dim] else s
                for d, s in enumerate(stride)
            ]
    if local.stride() == preserved_stride(tuple(local.shape), local.stride()):
        return tuple(shape), contiguous_stride(shape, reversed(order))
    return tuple(shape), tuple(stride)


_even_specs: dict[tuple[object, ...], DTensorSpec | None] = {}
on_clear(_even_specs.clear)


def even_spec(local: torch.Tensor, info: MeshInfo, placements: Sequence[Placement]) -> DTensorSpec | None:
    """Returns the cached spec of a tensor whose local shape and stride are the same on every rank.

    None if the arguments need further checks. Raises the errors of `normalize`.
    """
    key = (info, tuple(placements), local.shape, local.stride(), local.dtype, local.device.type)
    try:
        return _even_specs[key]
    except (KeyError, TypeError):  # TypeError: no placements; `normalize` raises for them
        pass
    placed = normalize(placements, local.ndim, info)
    is_member_on_device = local.device.type in (info.device_type, "meta") and info.coordinate is not None
    plain = {RaggedShard, StridedShard}.isdisjoint(map(type, placed))
    spec = None
    if is_member_on_device and plain:
        spec = DTensorSpec.of(info, placed, *even_layout(local, info, placed), local.dtype)
    cache_put(_even_specs, key, spec)
    return spec


# Maximum number of dims of a tensor whose shape the ranks compare. torch's own limit is 64 for most ops.
MAX_DIMS = 64


def agreed_placements(
    local: torch.Tensor, info: MeshInfo, placements: Placements, shape: Sequence[int], stride: Sequence[int]
) -> Placements:
    """Returns the placements for which the ranks' local tensors make up the global one.

    The ranks gather their local shapes, so that all return the same or all raise. A Shard becomes a RaggedShard if the
    lengths are not those of torch.chunk.

    The fake backend has no other ranks, and a graph is traced on each rank alone. There nothing is gathered, and the
    placements are returned unchanged.

    Raises:
        LayoutError: shapes that do not fit together.
    """
    if is_traced() or not _can_ask(info, placements):
        return placements
    kind = "shards" if holds_shards(local) else "tensor"
    arguments = (tuple(shape), tuple(stride), str(local.dtype), describe(placements), kind)
    return _matching(placements, shape, _local_shapes(tuple(local.shape), arguments, info), info)


def joined_layout(
    local: torch.Tensor, info: MeshInfo, placements: Placements
) -> tuple[tuple[int, ...], Placements]:
    """Returns the global shape and the placements of the concatenated local tensors.

    The ranks gather their local shapes.

    Raises:
        LayoutError: shapes that do not fit together; or the call is in a graph, where nothing can be gathered.
    """
    if not _can_ask(info, placements):
        return even_layout(local, info, placements)[0], placements
    if is_traced():
        raise LayoutError(
            f"got a local tensor of shape {list(local.shape)}, placed as {describe(placements)}, in a compiled graph "
            "that has shards of different lengths; expected equal lengths, as ranks cannot exchange lengths in a "
            "graph: call local_map outside the graph, use DTensor.from_local with the global shape and stride, or keep "
            "DTensors between modules with use_local_output=False"
        )
    shapes = _local_shapes(tuple(local.shape), (str(local.dtype), describe(placements)), info)
    shape = []
    for dim in range(local.ndim):
        # Add the lengths along the mesh dims that cut this dim, at coordinate 0 of the other mesh dims.
        line = (
            local_shape
            for coordinate, local_shape in shapes.items()
            if all(p.is_shard(dim) or i == 0 for p, i in zip(placements, coordinate, strict=True))
        )
        shape.append(sum(local_shape[dim] for local_shape in line if dim < len(local_shape)))
    return tuple(shape), _matching(placements, shape, shapes, info)


def _can_ask(info: MeshInfo, placements: Placements) -> bool:
    """Whether ranks may have different lengths, and the process group has other ranks that can be asked."""
    cuts = [parts for p, parts in zip(placements, info.sizes, strict=True) if p.is_shard()]
    return (
        max(cuts, default=1) > 1
        and bool(info.groups)
        and dist.get_backend(comm.process_group_of(info.groups[0])) != "fake"
    )


def _matching(
    placements: Placements,
    shape: Sequence[int],
    shapes: dict[tuple[int, ...], tuple[int, ...]],
    info: MeshInfo,
) -> Placements:
    for candidate in (placements, _ragged(placements, shape, shapes, info)):
        if all(
            local_extents(tuple(shape), candidate, info.sizes, coordinate)[0] == local_shape
            for coordinate, local_shape in shapes.items()
        ):
            return candidate
    listed = "; ".join(f"{list(local_shape)} at {coordinate}" for coordinate, local_shape in shapes.items())
    raise LayoutError(
        f"from_local got local tensors of the shapes {listed} (by mesh coordinate) for a tensor of shape "
        f"{list(shape)} placed as {describe(placements)}; expected shards that add up to it, and the same shape on "
        "ranks that have the same part: correct the shards, or the global shape"
    )


def _local_shapes(
    local_shape: tuple[int, ...], arguments: object, info: MeshInfo
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Returns the local shape of every rank by mesh coordinate.

    Args:
        arguments: other arguments of the call, which must be the same on all ranks.

    Raises:
        LayoutError: the arguments differ between ranks.
    """
    if len(local_shape) > MAX_DIMS:
        raise LayoutError(f"from_local got a tensor of {len(local_shape)} dims, expected at most {MAX_DIMS}")
    digest = zlib.crc32(repr(arguments).encode())
    mine = [digest, len(local_shape), *local_shape, *[0] * (MAX_DIMS - len(local_shape))]
    table = torch.tensor([mine], dtype=torch.int64, device=info.device_type)
    for group in reversed(info.groups):  # innermost first: row-major order of ranks
        gathered = table.new_empty((group.size() * len(table), table.size(1)))
        comm.all_gather(gathered, table, group)
        table = gathered
    rows = table.tolist()
    if any(row[0] != digest for row in rows):
        raise LayoutError(
            f"from_local got different arguments on the ranks: here shape, stride, dtype and placements {arguments}; "
            "expected the same on every rank: pass the global shape and stride, and shards on all ranks or on none"
        )
    coordinates = itertools.product(*map(range, info.sizes))
    return {coordinate: tuple(row[2 : 2 + row[1]]) for coordinate, row in zip(coordinates, rows, strict=True)}


def _ragged(
    placements: Placements,
    shape: Sequence[int],
    shapes: dict[tuple[int, ...], tuple[int, ...]],
    info: MeshInfo,
) -> Placements:
    """Returns `placements` with RaggedShards of the ranks' lengths, where these add up to the global length.

    The lengths are read from the ranks at coordinate 0 of the other mesh dims. A tensor dim that several mesh dims cut
    keeps its placements, since the inner lengths would depend on the outer coordinate.
    """
    ragged = list(placements)
    origin = (0,) * info.ndim
    for mesh_dim, (placement, parts) in enumerate(zip(placements, info.sizes, strict=True)):
        if type(placement) is not Shard or sum(p.is_shard(placement.dim) for p in placements) > 1:
            continue
        line = [shapes[(*origin[:mesh_dim], i, *origin[mesh_dim + 1 :])] for i in range(parts)]
        counts = tuple(local_shape[placement.dim] for local_shape in line if len(local_shape) == len(shape))
        if len(counts) == parts and sum(counts) == shape[placement.dim]:
            ragged[mesh_dim] = RaggedShard(placement.dim, counts)
    return tuple(ragged)


def checked_over_mesh(
    local: torch.Tensor, info: MeshInfo, placements: Placements, *, with_shape: bool
) -> torch.Tensor:
    """Returns the local tensor after the checks of `from_local(run_check=True)`.

    The ranks gather the metadata of all ranks, so that all raise or none does. Replicas get the first rank's values.

    Args:
        with_shape: whether the caller gave the global shape, so that local shapes may differ.
    """
    shards = local.shards if holds_shards(local) else [local]
    layout = [(tuple(shard.shape), shard.stride()) for shard in shards]
    mine = (str(local.dtype), local.requires_grad, None if with_shape else layout)
    metadata_of_ranks = [mine]
    for group in info.groups:
        metadata_of_ranks = [
            meta for part in comm.all_gather_objects(metadata_of_ranks, group) for meta in part
        ]
    if any(meta != mine for meta in metadata_of_ranks):
        listed = "; ".join(
            f"mesh rank {i}: {dtype}{' that requires grad' if grad else ''} {layout or ''}"
            for i, (dtype, grad, layout) in enumerate(metadata_of_ranks)
        )
        raise LayoutError(
            f"from_local got local tensors that differ between ranks ({listed}), expected one dtype, one shape and "
            "stride, and all or none to require grad: for uneven shards pass the global shape and stride"
        )
    for placement, group in zip(placements, info.groups, strict=True):
        if placement.is_replicate():
            local = local.clone(memory_format=torch.contiguous_format)
            for replica in local.shards if holds_shards(local) else [local]:
                comm.broadcast(replica.detach(), group)
    return local
