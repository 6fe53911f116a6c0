"""Checks the inputs of a bucketer: a list of n tensors, one tensor with n parts, or DTensors. Returns plain tensors."""

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
from dtbench_core.bucketer.packing import CONTIGUOUS_ROWS_MIN_BYTES, BucketError, Source, as_contiguous_rows
from dtbench_core.layout.placement import Placements, Shard, StridedShard
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride
from dtbench_core.layout.wrapper import Wrapper, stored_local, wrap

_metadata = attrgetter("shape", "dtype", "device")


class CheckedInput(NamedTuple):
    """A checked input.

    Attributes:
        source: its n shards.
        numel: elements per shard.
        shape: the shape of the result; None if it is flat.
        dtype: the dtype of the shards.
        device: the device of the shards.
        rewrap: makes a DTensor of the result, if the input was a DTensor.
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
            "call it only on the ranks of the group"
        )


def check_input(input: Tensor | Sequence[Tensor], group: ProcessGroup, hold: bool = False) -> CheckedInput:
    """Checks an input.

    Args:
        hold: whether the input is kept instead of being copied on arrival.

    Raises:
        BucketError: see `ReduceScatterBucketer.reduce_scatter_async`.
    """
    check_group(group)
    n = group.size()
    if isinstance(input, Wrapper):
        return _check_dtensor(input, group)
    if isinstance(input, Tensor):
        return _check_tensor(input, n)
    if len(input) != n:
        raise BucketError(
            f"reduce_scatter received {len(input)} inputs, expected group.size() ({n}): "
            "pass one tensor for each rank of the group, or one tensor of that many equal parts"
        )
    return _check_dtensors(input, group) if isinstance(input[0], Wrapper) else _check_list(input, hold)


def _check_tensor(tensor: Tensor, n: int) -> CheckedInput:
    plain = _as_plain(tensor)
    if not plain.ndim or plain.shape[0] % n:
        raise BucketError(
            f"got one tensor of {_describe(tensor)}, expected a dim 0 that group.size() ({n}) divides, "
            "one part for each rank: pad dim 0, or pass a list with one tensor for each rank"
        )
    numel = plain.numel() // n
    return CheckedInput(
        plain.reshape(n, numel),
        numel,
        None if plain.ndim == 1 else (plain.shape[0] // n, *plain.shape[1:]),
        plain.dtype,
        plain.device,
    )


def _check_list(shards: Sequence[Tensor], hold: bool = False) -> CheckedInput:
    if set(map(type, shards)) != {Tensor} or any(s.requires_grad for s in shards):
        shards = [_as_plain(s) for s in shards]
    first = shards[0]
    if len(set(map(_metadata, shards))) > 1:
        rank = next(r for r, shard in enumerate(shards) if _metadata(shard) != _metadata(first))
        raise BucketError(
            f"got input {rank} of {_describe(shards[rank])} and input 0 of {_describe(first)}, "
            "expected the same shape, dtype and device: pad or convert the inputs first"
        )
    numel = first.numel()
    source: Source = shards
    min_bytes = CONTIGUOUS_ROWS_MIN_BYTES if first.is_cpu and not hold else 0
    if type(first) is Tensor and numel > 0 and min_bytes <= numel * first.itemsize:
        rows = as_contiguous_rows(shards)
        source = shards if rows is None else rows
    return CheckedInput(source, numel, None if first.ndim == 1 else first.shape, first.dtype, first.device)


def _as_plain(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise BucketError(f"got {type(tensor).__name__} as an input, expected a tensor")
    if tensor.layout is not torch.strided or isinstance(tensor, Wrapper) or hasattr(tensor, "placements"):
        raise BucketError(
            f"got a {type(tensor).__module__}.{type(tensor).__name__} ({tensor.layout}) as an input, expected "
            "dense tensors, all plain or all DTensors of dtbench_core: pass its .to_local() or .to_dense()"
        )
    return tensor.detach() if tensor.requires_grad else tensor


# --- DTensors --------------------------------------------------------------------------------------


def _check_dtensor(tensor: Wrapper, group: ProcessGroup) -> CheckedInput:
    """Checks a DTensor and takes its local part.

    If `group` is that of a mesh dim, the DTensor must be Partial there, and the result is a DTensor sharded there.
    """
    spec = tensor._spec
    dim = _mesh_dim_of(spec, group)
    if (
        not spec.is_even()
        or (dim is None and spec.has_partial())
        or any(p.is_partial() for d, p in enumerate(spec.placements) if d != dim)
    ):
        raise BucketError(
            f"got a gradient {spec} for a group of {group.size()} ranks, expected even shards and Partial at most on "
            "the group's mesh dim: redistribute it first"
        )
    if dim is not None and not spec.placements[dim].is_partial():
        raise BucketError(
            f"got a gradient {spec} for the group of its mesh dim {dim}, expected Partial there: "
            f"{spec.placements[dim]} needs no reduction, redistribute it"
        )
    local = stored_local(tensor).detach()
    dim_group = None if dim is None else spec.info.groups[dim]
    if isinstance(dim_group, comm.OrderedGroup):  # the bucket distributes the parts in the order of the group
        local = dim_group.in_group_order(local)
    checked = _check_tensor(local, group.size())
    if dim is None:
        return checked
    # The inner mesh dims have sharded dim 0 already; each of their shards is now sharded by itself.
    factor = math.prod(
        size
        for p, size in zip(spec.placements[dim + 1 :], spec.info.sizes[dim + 1 :], strict=True)
        if p.is_shard(0)
    )
    placements = (
        *spec.placements[:dim],
        StridedShard(0, factor) if factor > 1 else Shard(0),
        *spec.placements[dim + 1 :],
    )
    return checked._replace(rewrap=_rewrap(tensor, spec, placements))


def _check_dtensors(tensors: Sequence[Tensor], group: ProcessGroup) -> CheckedInput:
    """Checks one DTensor for each rank of the group, all with the same spec on other mesh dims.

    The result is a DTensor with this spec, too.
    """
    first = tensors[0]
    assert isinstance(first, Wrapper)
    spec = first._spec
    if any(not isinstance(t, Wrapper) or t._spec is not spec for t in tensors):
        raise BucketError(
            f"got a DTensor {spec} and inputs with other specs, expected a DTensor with the same spec for each rank: "
            "redistribute them first"
        )
    if spec.has_partial() or _mesh_dim_of(spec, group) is not None:
        raise BucketError(
            f"got a list of DTensors {spec} for a group of {group.size()} ranks, expected no Partial, and mesh "
            "dims other than the group's: pass one DTensor that is Partial along the group instead"
        )
    return _check_list([stored_local(t).detach() for t in tensors if isinstance(t, Wrapper)])._replace(
        rewrap=_rewrap(first, spec, spec.placements)
    )


def _mesh_dim_of(spec: DTensorSpec, group: ProcessGroup) -> int | None:
    for dim, dim_group in enumerate(map(comm.process_group_of, spec.info.groups)):
        if dim_group is group or dist.get_process_group_ranks(dim_group) == dist.get_process_group_ranks(
            group
        ):
            return dim
    return None


def _rewrap(tensor: Wrapper, spec: DTensorSpec, placements: Placements) -> Callable[[Tensor], Tensor]:
    kind = tensor.viewed
    result_spec = DTensorSpec.of(spec.info, placements, spec.shape, contiguous_stride(spec.shape), spec.dtype)
    return lambda local: wrap(kind, local, result_spec)


def check_gradient(gradient: Tensor, group: ProcessGroup) -> CheckedInput:
    """Checks a gradient and returns its elements in row-major order; only this rank's elements of a DTensor.

    The source may have fewer than n * numel elements; the missing elements are zeros.
    """
    if isinstance(gradient, Wrapper):
        if gradient._spec.has_partial():
            raise BucketError(
                f"got a gradient {gradient._spec}, expected one that is not Partial: redistribute the output "
                "of the layer, or pass the gradient to reduce_scatter_async with the group to sum over"
            )
        gradient = stored_local(gradient)
    if gradient.layout is not torch.strided:
        raise BucketError(
            f"got a gradient of layout {gradient.layout}, expected a dense gradient: make the layer with sparse=False"
        )
    flat = _as_plain(gradient).reshape(-1)
    return CheckedInput(flat, -(-flat.numel() // group.size()), None, flat.dtype, flat.device)


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"
