"""Local tensors and global ones: cutting the one from the other, and what shards say of their whole."""

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
    """What a rank outside the mesh holds: nothing, or a 0 where the tensor has no dims."""
    return torch.zeros(spec.local_shape, dtype=spec.dtype, device=device)


def part_of(whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's part of the global tensor `whole`, a copy that lies as the spec says unless it is all of it."""
    part = window_of(whole, spec)
    return part if part is whole or spec.info.coordinate is None else laid_out(part, spec)


def window_of(whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's part of the global tensor `whole`, in its memory; `whole` itself where that is all of it."""
    if spec.info.coordinate is None:
        return empty_part(spec, whole.device)
    part = whole
    for placement, parts, index in zip(spec.placements, spec.info.sizes, spec.info.coordinate, strict=True):
        if isinstance(placement, Shard):
            part = placement.part(part, parts, index)
    return part


def laid_out(part: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """A copy of this rank's part that lies in memory as the spec says."""
    if spec.row_major:
        return part.clone(memory_format=torch.contiguous_format)
    return part.new_empty_strided(spec.local_shape, spec.local_stride).copy_(part)


def even_layout(
    local: torch.Tensor, info: MeshInfo, placements: Placements
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Global shape and stride when every rank holds as much as this one, or what its RaggedShard says."""
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
    """The spec of a tensor of which every rank holds as much as this one; cached. None: look closer.

    Errors as for `normalize`.
    """
    key = (info, tuple(placements), local.shape, local.stride(), local.dtype, local.device.type)
    try:
        return _even_specs[key]
    except (KeyError, TypeError):  # TypeError: no placements, which `normalize` tells
        pass
    placed = normalize(placements, local.ndim, info)
    here = local.device.type in (info.device_type, "meta") and info.coordinate is not None
    plain = {RaggedShard, StridedShard}.isdisjoint(map(type, placed))
    spec = None
    if here and plain:
        spec = DTensorSpec.of(info, placed, *even_layout(local, info, placed), local.dtype)
    cache_put(_even_specs, key, spec)
    return spec


# Of a tensor whose shape the ranks compare. torch's own limit is 64 for most ops.
MAX_DIMS = 64


def agreed_placements(
    local: torch.Tensor, info: MeshInfo, placements: Placements, shape: Sequence[int], stride: Sequence[int]
) -> Placements:
    """The placements under which the ranks' local tensors make up the global one.

    The ranks tell each other their local shapes, so that all compute the same answer, or raise.
    Where they do not cut as torch.chunk does, a Shard becomes a RaggedShard. On the fake backend there
    is nobody to ask, and in a graph no rank knows what another one traces: the placements stay.

    Raises:
        LayoutError: shapes that do not fit together.
    """
    if is_traced() or not _can_ask(info, placements):
        return placements
    kind = "shards" if holds_shards(local) else "tensor"
    described = (tuple(shape), tuple(stride), str(local.dtype), describe(placements), kind)
    return _matching(placements, shape, _everybodys(tuple(local.shape), described, info), info)


def joined_layout(
    local: torch.Tensor, info: MeshInfo, placements: Placements
) -> tuple[tuple[int, ...], Placements]:
    """The global shape, and the placements, of the ranks' local tensors joined as they are.

    The ranks tell each other their local shapes. Errors as for `agreed_placements`, and in a graph, where they cannot.
    """
    if not _can_ask(info, placements):
        return even_layout(local, info, placements)[0], placements
    if is_traced():
        raise LayoutError(
            f"got a local tensor of shape {list(local.shape)}, placed as {describe(placements)}, that a compiled graph "
            "made of shards of different lengths; expected equally long ones, as ranks cannot tell each other theirs "
            "there: call local_map outside of it, use DTensor.from_local with the global shape and stride, or keep "
            "DTensors between modules with use_local_output=False"
        )
    shapes = _everybodys(tuple(local.shape), (str(local.dtype), describe(placements)), info)
    shape = []
    for dim in range(local.ndim):  # the lengths along the mesh dims that cut it, at the origin of the others
        line = (
            held
            for at, held in shapes.items()
            if all(p.is_shard(dim) or i == 0 for p, i in zip(placements, at, strict=True))
        )
        shape.append(sum(held[dim] for held in line if dim < len(held)))
    return tuple(shape), _matching(placements, shape, shapes, info)


def _can_ask(info: MeshInfo, placements: Placements) -> bool:
    """Whether there are ranks that may hold other lengths, and that can tell."""
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
            local_extents(tuple(shape), candidate, info.sizes, at)[0] == held for at, held in shapes.items()
        ):
            return candidate
    listed = "; ".join(f"{list(held)} at {at}" for at, held in shapes.items())
    raise LayoutError(
        f"from_local got local tensors of the shapes {listed} (by mesh coordinate) for a tensor of shape "
        f"{list(shape)} placed as {describe(placements)}; expected shards that make it up, equal wherever a mesh dim "
        "does not cut: correct the shards, or the global shape"
    )


def _everybodys(
    held: tuple[int, ...], described: object, info: MeshInfo
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """The local shape of every rank by mesh coordinate.

    Raises:
        LayoutError: ranks that disagree on what else they were given.
    """
    if len(held) > MAX_DIMS:
        raise LayoutError(f"from_local got a tensor of {len(held)} dims, expected at most {MAX_DIMS}")
    digest = zlib.crc32(repr(described).encode())
    mine = [digest, len(held), *held, *[0] * (MAX_DIMS - len(held))]
    seen = torch.tensor([mine], dtype=torch.int64, device=info.device_type)
    for group in reversed(info.groups):  # the innermost first, so that the ranks end in row-major order
        gathered = seen.new_empty((group.size() * len(seen), seen.size(1)))
        comm.all_gather(gathered, seen, group)
        seen = gathered
    rows = seen.tolist()
    if any(row[0] != digest for row in rows):
        raise LayoutError(
            f"from_local got different arguments on the ranks: here shape, stride, dtype and placements {described}; "
            "expected the same on every rank: pass the global shape and stride, and shards on all ranks or on none"
        )
    coordinates = itertools.product(*map(range, info.sizes))
    return {at: tuple(row[2 : 2 + row[1]]) for at, row in zip(coordinates, rows, strict=True)}


def _ragged(
    placements: Placements,
    shape: Sequence[int],
    shapes: dict[tuple[int, ...], tuple[int, ...]],
    info: MeshInfo,
) -> Placements:
    """`placements` with the lengths that the ranks hold along the first line of each mesh dim, where these
    add up. A dim that several mesh dims cut stays as it is: the inner lengths would depend on the outer."""
    ragged = list(placements)
    origin = (0,) * info.ndim
    for mesh_dim, (placement, parts) in enumerate(zip(placements, info.sizes, strict=True)):
        if type(placement) is not Shard or sum(p.is_shard(placement.dim) for p in placements) > 1:
            continue
        line = [shapes[(*origin[:mesh_dim], i, *origin[mesh_dim + 1 :])] for i in range(parts)]
        counts = tuple(held[placement.dim] for held in line if len(held) == len(shape))
        if len(counts) == parts and sum(counts) == shape[placement.dim]:
            ragged[mesh_dim] = RaggedShard(placement.dim, counts)
    return tuple(ragged)


def checked_over_mesh(
    local: torch.Tensor, info: MeshInfo, placements: Placements, *, with_shape: bool
) -> torch.Tensor:
    """run_check: every rank sees every rank's metadata, so that all raise or none; replicas are made equal."""
    shards = local.shards if holds_shards(local) else [local]
    layout = [(tuple(shard.shape), shard.stride()) for shard in shards]
    mine = (str(local.dtype), local.requires_grad, None if with_shape else layout)
    seen = [mine]
    for group in info.groups:
        seen = [meta for part in comm.all_gather_objects(seen, group) for meta in part]
    if any(meta != mine for meta in seen):
        listed = "; ".join(
            f"mesh rank {i}: {dtype}{' that requires grad' if grad else ''} {layout or ''}"
            for i, (dtype, grad, layout) in enumerate(seen)
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
