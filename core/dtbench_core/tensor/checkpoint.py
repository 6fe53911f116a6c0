"""Saves and loads DTensors: pickle, torch.save and torch.distributed.checkpoint.

A pickled DTensor contains its rank's part, the mesh, the placements and the global metadata. Only the same rank of
the same world can load it. A checkpoint contains blocks of the global tensor, so it can be loaded on another mesh or
with other placements.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import CoreError, LayoutError, MeshError, PlacementError
from dtbench_core.layout.local_shards import chunks_within, holds_shards, write_items
from dtbench_core.layout.mesh import mesh_info
from dtbench_core.layout.placement import (
    Partial,
    Placements,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    runs_of_rank,
)
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import UNCOPIED_ATTRIBUTES, SharedMemory, Wrapper, stored_local, wrap
from dtbench_core.redistribute.copied_view import Gathered, copied_view, reusable_origin

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def forget(tensor: Wrapper) -> None:
    """Deletes attributes from a deep copy that only the original must have.

    `_memory` stays: tensors that are copied together share memory as before. The copy of a parameter has no gradient,
    as for plain tensors.
    """
    for name in UNCOPIED_ATTRIBUTES:
        if name != "_memory":
            tensor.__dict__.pop(name, None)
    if isinstance(tensor, torch.nn.Parameter):
        tensor.grad = None


# ---- pickling ----


def reduce(tensor: Wrapper, protocol: object) -> tuple[Any, ...]:
    """Returns the function (`rebuild` or `rebuild_view`) and arguments with which pickle makes the DTensor again."""
    spec = tensor._spec
    if (origin := reusable_origin(tensor)) is not None:
        offset = tensor._memory[1] - origin.owner._memory[1]  # type: ignore[index]
        parts = (stored_local(tensor), spec.placements, tuple(spec.shape), spec.stride, spec.order)
        return rebuild_view, (origin.owner, *parts, *(origin.gathered or ()), offset)
    attributes = {k: v for k, v in tensor.__dict__.items() if k not in UNCOPIED_ATTRIBUTES}
    if tensor._memory is not None:  # views in the same file share it
        attributes["_memory"] = tensor._memory
    described = (spec.mesh, spec.placements, tuple(spec.shape), spec.stride, tensor.requires_grad)
    return rebuild, (tensor.viewed, tensor._local_tensor, *described, attributes, spec.order)


def rebuild_view(
    owner: Wrapper,
    local: torch.Tensor,
    placements: Placements,
    shape: Sequence[int],
    stride: Sequence[int],
    order: tuple[int, ...],
    gathered: torch.Tensor,
    gathered_placements: Placements,
    offset: int,
) -> Wrapper:
    """Returns the view of `owner` that was pickled.

    Args:
        local: the view's values, which share memory with `gathered`.
        gathered: the base's values with `gathered_placements`.
        offset: byte offset of the view from `owner`, in the global tensor.
    """
    spec = DTensorSpec.of(owner._spec.info, tuple(placements), shape, stride, local.dtype, order)
    return copied_view(
        type(owner).viewed, local, spec, owner, Gathered(gathered, tuple(gathered_placements)), offset
    )


def rebuild(
    cls: type[Wrapper],
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    shape: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
    attributes: dict[str, Any],
    order: tuple[int, ...] | None = None,  # older files lack it: row-major
) -> Wrapper:
    """Returns the DTensor that was pickled.

    Raises:
        MeshError: its mesh does not exist in this process.
        LayoutError: the file contains the part of another rank.
    """
    if not dist.is_initialized():
        raise MeshError(
            f"got a pickled DTensor on {mesh} and no process group, expected the world that saved it: call "
            "init_process_group and make the mesh first, or use torch.distributed.checkpoint to change worlds"
        )
    try:
        info = mesh_info(mesh)
    except CoreError:
        raise
    except Exception as error:  # torch raises different errors for missing groups
        raise MeshError(
            f"got a pickled DTensor on {mesh}, whose process groups are not in this process ({error}); expected the "
            "mesh to exist: make it first, in the same order as before the tensor was saved"
        ) from error
    spec = DTensorSpec.of(info, tuple(placements), shape, stride, local.dtype, order)
    # A pickled mesh has the coordinate of the rank that saved it, so this rank's is computed.
    coordinate = next(map(tuple, (info.mesh.mesh == dist.get_rank()).nonzero().tolist()), None)
    if coordinate != info.coordinate or tuple(local.shape) != spec.local_shape:
        raise LayoutError(
            f"got the part {list(local.shape)} of {spec} on rank {dist.get_rank()}, expected "
            f"{list(spec.local_shape)}: every rank must load the part that it saved"
        )
    tensor = wrap(cls, local, spec, requires_grad)
    tensor.__dict__.update(attributes)
    return tensor


# For torch.load(weights_only=True), torch's default.
torch.serialization.add_safe_globals(
    [rebuild, rebuild_view, SharedMemory, DeviceMesh, Shard, RaggedShard, StridedShard, Replicate, Partial]
)


# ---- checkpoints ----


class ShardBlock(NamedTuple):
    """A block of the global tensor on this rank.

    Attributes:
        offset: index of its first element in the global tensor.
        shape: lengths of its dims.
        local_offset: index of its first element in the local tensor.
    """

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    local_offset: tuple[int, ...]


def blocks(spec: DTensorSpec) -> list[ShardBlock]:
    """Returns the blocks that make up this rank's part. Empty blocks are left out unless the global tensor is empty."""
    info = spec.info
    if info.coordinate is None:
        return []
    pieces = []  # for each dim a list of (global offset, length, local offset)
    for dim, size in enumerate(spec.shape):
        runs = runs_of_rank(size, dim, spec.placements, info.sizes, info.coordinate)
        starts = itertools.accumulate((length for _, length in runs), initial=0)
        pieces.append([(*run, start) for run, start in zip(runs, starts, strict=False)])
    boxes = [ShardBlock(*(tuple(p[i] for p in box) for i in range(3))) for box in itertools.product(*pieces)]
    return [b for b in boxes if 0 in spec.shape or 0 not in b.shape]


def create_write_items(tensor: Wrapper, name: str, object: Any) -> list[WriteItem]:
    """Returns the write items of torch.distributed.checkpoint for this rank's blocks.

    Ranks that have the same block give it the same name, so that it is written once.
    """
    return write_items(name, create_chunk_list(tensor), tensor._local_tensor, tensor._spec.shape)


def create_chunk_list(tensor: Wrapper) -> list[ChunkStorageMetadata]:
    """Returns this rank's blocks as chunks of torch.distributed.checkpoint.

    Raises:
        PlacementError: a Partial, since its ranks have terms and not the values.
        LayoutError: a shard of a `LocalShardsWrapper` exceeds the tensor.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    if tensor._spec.has_partial():
        raise PlacementError(
            f"got a checkpoint of {tensor._spec}, expected Shard or Replicate: redistribute it first, as the ranks "
            "have terms of its values, not the values"
        )
    if holds_shards(tensor._local_tensor):
        return chunks_within(tensor._local_tensor, tensor._spec.shape)
    return [
        ChunkStorageMetadata(offsets=torch.Size(b.offset), sizes=torch.Size(b.shape))
        for b in blocks(tensor._spec)
    ]


def get_tensor_shard(tensor: Wrapper, index: MetadataIndex) -> torch.Tensor:
    """Returns the part of the local tensor that is the block at `index.offset`."""
    if holds_shards(tensor._local_tensor):
        return tensor._local_tensor.__get_tensor_shard__(index)
    own_blocks = blocks(tensor._spec)
    for block in own_blocks:
        if index.offset is None or tuple(index.offset) == block.offset:
            local = tensor._local_tensor
            for dim, (start, length) in enumerate(zip(block.local_offset, block.shape, strict=True)):
                local = local if length == local.size(dim) else local.narrow(dim, start, length)
            return local
    raise LayoutError(
        f"got the offset {index.offset} of {index.fqn}, expected one of {[b.offset for b in own_blocks]}, where this "
        "rank's blocks start"
    )
