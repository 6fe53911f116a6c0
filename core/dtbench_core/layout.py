"""Local tensors and global ones: cutting the one from the other, and what shards say of their whole."""

from __future__ import annotations

import torch

from dtbench_core import comm
from dtbench_core.errors import LayoutError
from dtbench_core.mesh import MeshInfo
from dtbench_core.placement import Placements, Shard
from dtbench_core.spec import DTensorSpec


def empty_part(dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """What a rank outside the mesh holds of any tensor."""
    return torch.empty(0, dtype=dtype, device=device)


def part_of(whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's part of the global tensor `whole`, as a contiguous copy unless it is all of it."""
    coordinate = spec.info.coordinate
    if coordinate is None:
        return empty_part(whole.dtype, whole.device)
    part = whole
    for placement, parts, index in zip(spec.placements, spec.info.sizes, coordinate, strict=True):
        if isinstance(placement, Shard):
            part = placement.part(part, parts, index)
    return part if part is whole else part.clone(memory_format=torch.contiguous_format)


def even_layout(
    local: torch.Tensor, info: MeshInfo, placements: Placements
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Global shape and stride when every rank holds as much as this one."""
    shape, stride = list(local.shape), list(local.stride())
    for placement, parts in zip(placements, info.sizes, strict=True):
        if isinstance(placement, Shard):
            dim = placement.dim
            shape[dim] *= parts
            stride = [s * parts if d != dim and s > stride[dim] else s for d, s in enumerate(stride)]
    return tuple(shape), tuple(stride)


def checked_over_mesh(
    local: torch.Tensor, info: MeshInfo, placements: Placements, *, given_shape: bool
) -> torch.Tensor:
    """run_check: every rank sees every rank's metadata, so that all raise alike; replicas are made equal."""
    mine = (str(local.dtype), None if given_shape else tuple(local.shape))
    seen = [mine]
    for group in info.groups:
        seen = [meta for part in comm.all_gather_objects(seen, group) for meta in part]
    if any(meta != mine for meta in seen):
        listed = "; ".join(f"mesh rank {i}: {dtype} {shape or ''}" for i, (dtype, shape) in enumerate(seen))
        raise LayoutError(
            f"from_local got local tensors that differ between ranks ({listed}), expected one dtype and one shape: "
            "for uneven shards pass the global shape and stride"
        )
    for placement, group in zip(placements, info.groups, strict=True):
        if placement.is_replicate():
            local = local.clone(memory_format=torch.contiguous_format)
            comm.broadcast(local.detach(), group)
    return local
