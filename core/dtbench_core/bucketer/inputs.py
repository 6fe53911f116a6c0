"""What a bucketer takes: a list of n tensors, one tensor of n parts, or DTensors; checked, as plain memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dtbench_core import comm
from dtbench_core.bucketer.packing import SIDE_BY_SIDE_BYTES, BucketError, Source, side_by_side
from dtbench_core.layout.placement import Placements, Shard, StridedShard
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride
from dtbench_core.layout.wrapper import Wrapper, held_by, wrap

_metadata = attrgetter("shape", "dtype", "device")


class Intake(NamedTuple):
    """A checked input.

    Attributes:
        source: its n shards.
        numel: elements of a shard.
        shape: of the result; None if it is flat.
        dtype: of the shards.
        device: of the shards.
        rewrap: makes a DTensor of the result if the input was one.
    """

    source: Source
    numel: int
    shape: tuple[int, ...] | None
    dtype: torch.dtype
    device: torch.device
    rewrap: Callable[[Tensor], Tensor] | None = None


def check_group(group: object) -> None:
    if not isinstance(group, ProcessGroup):
        raise BucketError(
            f"got {group!r} as the group, expected a process group that this rank belongs to: "
            "call only on its members"
        )


def take_in(input: Tensor | Sequence[Tensor], group: ProcessGroup, hold: bool = False) -> Intake:
    """Returns a checked input. hold: it is not copied on arrival."""
    check_group(group)
    n = group.size()
    if isinstance(input, Wrapper):
        return _of_dtensor(input, group)
    if isinstance(input, Tensor):
        return _of_tensor(input, n)
    if len(input) != n:
        raise BucketError(
            f"reduce_scatter received {len(input)} inputs, expected group.size() ({n}): "
            "pass one tensor for each rank of the group, or one tensor of that many equal parts"
        )
    if isinstance(input[0], Wrapper):
        return _of_dtensors(input, group)
    return _of_list(input, hold)


def _of_tensor(tensor: Tensor, n: int) -> Intake:
    plain = _plain(tensor)
    if not plain.ndim or plain.shape[0] % n:
        raise BucketError(
            f"got one tensor of {_describe(tensor)}, expected a dim 0 that group.size() ({n}) divides, "
            "one part for each rank: pad dim 0, or pass a list of one tensor for each rank"
        )
    numel = plain.numel() // n
    shape = None if plain.ndim == 1 else (plain.shape[0] // n, *plain.shape[1:])
    return Intake(plain.reshape(n, numel), numel, shape, plain.dtype, plain.device)


def _of_list(shards: Sequence[Tensor], hold: bool = False) -> Intake:
    if set(map(type, shards)) != {Tensor} or any(s.requires_grad for s in shards):
        shards = [_plain(s) for s in shards]
    first = shards[0]
    if len(set(map(_metadata, shards))) > 1:
        rank = next(r for r, shard in enumerate(shards) if _metadata(shard) != _metadata(first))
        raise BucketError(
            f"got input {rank} of {_describe(shards[rank])} beside input 0 of {_describe(first)}, "
            "expected the same shape, dtype and device: pad or convert the inputs first"
        )
    numel = first.numel()
    source: Source = shards
    worth_bytes = SIDE_BY_SIDE_BYTES if first.is_cpu and not hold else 0
    if type(first) is Tensor and numel > 0 and worth_bytes <= numel * first.itemsize:
        joined = side_by_side(shards)
        source = shards if joined is None else joined
    return Intake(source, numel, None if first.ndim == 1 else first.shape, first.dtype, first.device)


def _plain(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise BucketError(f"got {type(tensor).__name__} as an input, expected a tensor")
    if tensor.layout is not torch.strided or isinstance(tensor, Wrapper) or hasattr(tensor, "placements"):
        raise BucketError(
            f"got a {type(tensor).__module__}.{type(tensor).__name__} ({tensor.layout}) as an input, expected "
            "dense tensors, all plain or all DTensors of dtbench_core: pass its .to_local() or .to_dense()"
        )
    return tensor.detach() if tensor.requires_grad else tensor


# --- DTensors --------------------------------------------------------------------------------------


def _of_dtensor(tensor: Wrapper, group: ProcessGroup) -> Intake:
    """Its local part; where `group` is along one of its mesh dims, the reduction of a pending sum there."""
    spec = tensor._spec
    dim = _mesh_dim_of(spec, group)
    others = tuple(p for d, p in enumerate(spec.placements) if d != dim)
    if not spec.is_even() or (dim is None and spec.has_partial()) or any(p.is_partial() for p in others):
        raise BucketError(
            f"got a gradient {spec} for a group of {group.size()} ranks, expected an even one, summed over all mesh "
            "dims but the group's: redistribute it first"
        )
    if dim is not None and not spec.placements[dim].is_partial():
        raise BucketError(
            f"got a gradient {spec} for the group of its mesh dim {dim}, expected Partial there: what is placed "
            f"as {spec.placements[dim]} needs no reduction, redistribute it"
        )
    held = held_by(tensor).detach()
    along = None if dim is None else spec.info.groups[dim]
    if isinstance(along, comm.OrderedGroup):  # a bucket gives its parts to ranks of the group
        held = along.in_group_order(held)
    taken = _of_tensor(held, group.size())
    if dim is None:
        return taken
    # Cut after the mesh dims that follow have cut: each of their shards by itself.
    later = zip(spec.placements[dim + 1 :], spec.info.sizes[dim + 1 :], strict=True)
    factor = math.prod(n for p, n in later if p.is_shard(0))
    cut = StridedShard(0, factor) if factor > 1 else Shard(0)
    placements = (*spec.placements[:dim], cut, *spec.placements[dim + 1 :])
    return taken._replace(rewrap=_rewrap(tensor, spec, placements))


def _of_dtensors(tensors: Sequence[Tensor], group: ProcessGroup) -> Intake:
    """One DTensor for each rank, all with the same placements and along other mesh dims; so is the result."""
    first = tensors[0]
    assert isinstance(first, Wrapper)
    spec = first._spec
    if any(not isinstance(t, Wrapper) or t._spec is not spec for t in tensors):
        raise BucketError(
            f"got a DTensor {spec} beside others, expected one with the same spec for each rank: "
            "redistribute them first"
        )
    if spec.has_partial() or _mesh_dim_of(spec, group) is not None:
        raise BucketError(
            f"got a list of DTensors {spec} for a group of {group.size()} ranks, expected placements that are summed "
            "and mesh dims other than the group's: pass one DTensor that is Partial along the group instead"
        )
    taken = _of_list([held_by(t).detach() for t in tensors if isinstance(t, Wrapper)])
    return taken._replace(rewrap=_rewrap(first, spec, spec.placements))


def _mesh_dim_of(spec: DTensorSpec, group: ProcessGroup) -> int | None:
    for dim, own in enumerate(map(comm.process_group_of, spec.info.groups)):
        if own is group or dist.get_process_group_ranks(own) == dist.get_process_group_ranks(group):
            return dim
    return None


def _rewrap(tensor: Wrapper, spec: DTensorSpec, placements: Placements) -> Callable[[Tensor], Tensor]:
    kind = tensor.viewed
    result = DTensorSpec.of(spec.info, placements, spec.shape, contiguous_stride(spec.shape), spec.dtype)
    return lambda local: wrap(kind, local, result)


def take_gradient(gradient: Tensor, group: ProcessGroup) -> Intake:
    """Returns the elements of a gradient in row-major order; of a DTensor those of this rank.

    The source may have fewer than n * numel elements: the rest are zeros.
    """
    if isinstance(gradient, Wrapper):
        if gradient._spec.has_partial():
            raise BucketError(
                f"got a gradient {gradient._spec}, expected one that is not Partial: redistribute the output "
                "of the layer, or hand the gradient over yourself with the group it is to be summed over"
            )
        gradient = held_by(gradient)
    if gradient.layout is not torch.strided:
        raise BucketError(
            f"got a gradient of layout {gradient.layout}, expected a dense one: make the layer with sparse=False"
        )
    flat = _plain(gradient).reshape(-1)
    return Intake(flat, -(-flat.numel() // group.size()), None, flat.dtype, flat.device)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
