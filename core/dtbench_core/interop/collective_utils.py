"""Collectives over one mesh dim, padding, and the cost model, under the names of torch's `_collective_utils`.

They are for code written against those names; the core's own redistribution uses redistribute/movers.py. The cost
functions are those of cost/redistribution.py, and the constants of a mesh those of cost/mesh_topology.py.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core import comm
from dtbench_core.cost.mesh_topology import MeshTopoInfo
from dtbench_core.cost.redistribution import (
    all_to_all_cost,
    allgather_cost,
    allreduce_cost,
    one_step_redistribute_cost,
    redistribute_cost,
    reduce_scatter_cost,
    spec_to_bytes,
)
from dtbench_core.errors import ArgumentError, LayoutError
from dtbench_core.layout.mesh import mesh_info
from dtbench_core.layout.placement import REPLICATE, Placement, Shard
from dtbench_core.redistribute.movers import Exchange, make_mover, padded
from dtbench_core.runtime import simulation
from dtbench_core.torch_compat import resolve_group

__all__ = [
    "MeshTopoInfo",
    "all_to_all_cost",
    "allgather_cost",
    "allreduce_cost",
    "check_tensor_meta",
    "fill_empty_tensor_to_shards",
    "mesh_broadcast",
    "mesh_scatter",
    "one_step_redistribute_cost",
    "pad_tensor",
    "redistribute_cost",
    "reduce_scatter_cost",
    "shard_dim_alltoall",
    "spec_to_bytes",
    "unpad_tensor",
]

logger = logging.getLogger(__name__)


def shard_dim_alltoall(
    input: torch.Tensor, gather_dim: int, shard_dim: int, mesh: DeviceMesh, mesh_dim: int
) -> torch.Tensor:
    """Redistributes a tensor sharded on `gather_dim` over `mesh_dim`, so that it is sharded on `shard_dim` instead.

    Every rank passes a shard of the same shape and gets a contiguous shard, split as torch.chunk does. On CPU meshes
    (but not in a LocalTensorMode) the whole tensor is gathered and split, since not every CPU backend has an
    all-to-all; the first call logs a warning.

    Raises:
        ArgumentError: a dim that the tensor does not have, or the same dim twice.
    """
    ndim, shape = input.ndim, list(input.shape)
    for name, dim in (("gather_dim", gather_dim), ("shard_dim", shard_dim)):
        if not -ndim <= dim < ndim:
            raise ArgumentError(
                f"shard_dim_alltoall got {name}={dim} for a tensor of shape {shape}, expected a dim in "
                f"[{-ndim}, {ndim}): choose a dim the tensor has"
            )
    if gather_dim % ndim == shard_dim % ndim:
        raise ArgumentError(
            f"shard_dim_alltoall got gather_dim={gather_dim} and shard_dim={shard_dim} for a tensor of shape {shape}, "
            "expected two different dims: the tensor is already sharded on this one"
        )
    group = mesh_info(mesh).groups[mesh_dim]
    if simulation.active or isinstance(group, comm.OrderedGroup):  # a LocalTensorMode
        return _resharded(input, gather_dim, shard_dim, group)
    if mesh.device_type == "cpu":
        _warn_of_fallback()
        return _resharded(input, gather_dim, shard_dim, group, REPLICATE)
    return cast(
        "torch.Tensor",
        torch.ops.dtbench_core.shard_dim_alltoall(input, gather_dim, shard_dim, group.group_name),
    )


@functools.cache
def _warn_of_fallback() -> None:
    logger.warning("CPU process group does not support alltoall yet, falling back with allgather + chunk!")


def _resharded(
    shard: torch.Tensor, gather_dim: int, shard_dim: int, group: comm.Group, *intermediate: Placement
) -> torch.Tensor:
    """Redistributes a shard from `gather_dim` to `shard_dim`, through the `intermediate` placements."""
    shape = list(shard.shape)
    shape[gather_dim] *= group.size()
    ends = Shard(gather_dim % shard.ndim), Shard(shard_dim % shard.ndim)
    for src, dst in itertools.pairwise((ends[0], *intermediate, ends[1])):
        sizes, coordinate = (group.size(),), (group.rank(),)
        shard = make_mover(Exchange((src,), (dst,), sizes, tuple(shape), shard.dtype, group, coordinate))(
            shard
        )
    return shard


@torch.library.custom_op("dtbench_core::shard_dim_alltoall", mutates_args=())
def _shard_dim_alltoall(
    input: torch.Tensor, gather_dim: int, shard_dim: int, group_name: str
) -> torch.Tensor:
    return _resharded(input, gather_dim, shard_dim, resolve_group(group_name))


@_shard_dim_alltoall.register_fake
def _shard_dim_alltoall_meta(
    input: torch.Tensor, gather_dim: int, shard_dim: int, group_name: str
) -> torch.Tensor:
    group = resolve_group(group_name)
    shape = list(input.shape)
    shape[gather_dim] *= group.size()
    shape[shard_dim] = Shard(shard_dim).extent(shape[shard_dim], group.size(), group.rank())[0]
    return input.new_empty(shape)


# --- scatter and broadcast -------------------------------------------------------------------------


class _StagedWork(Work):
    """The Work of a collective that writes to `packed`, a packed copy of its output; `wait()` copies it back."""

    def __init__(self, work: Work, output: torch.Tensor, packed: torch.Tensor) -> None:
        super().__init__()
        self._work, self._output, self._packed = work, output, packed

    def wait(self, *timeout: timedelta) -> bool:
        done = self._work.wait(*timeout)
        self._output.copy_(self._packed)
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _run_on_packed_copy(
    output: torch.Tensor, collective: Callable[[torch.Tensor], Work | None]
) -> Work | None:
    """Runs `collective` on a packed copy of its output."""
    packed = comm.packed(output)
    work = collective(packed)
    if packed is output:
        return work
    if work is not None:
        return _StagedWork(work, output, packed)
    output.copy_(packed)
    return None


def mesh_scatter(
    output: torch.Tensor,
    scatter_list: list[torch.Tensor] | None,
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int | None = 0,
) -> Work | None:
    """Scatters the source rank's `scatter_list` over the ranks of `mesh_dim`; each rank gets its tensor in `output`.

    On the mesh [[0, 1], [2, 3]] and mesh dim 1, rank 0 sends to ranks 0 and 1, rank 2 to ranks 2 and 3.

    Args:
        output: receives this rank's tensor.
        scatter_list: one tensor per rank, with the shape of `output`; read on the source rank only.
        async_op: whether to return a Work.
        group_src: the source rank's index along the mesh dim. None: every rank copies from its own list, and nothing
            is sent.

    Returns:
        The Work if `async_op`; `output` and the list must stay alive until its `wait()`. None for meta tensors, which
        have no data.
    """
    if output.is_meta:
        return None
    group = mesh_info(mesh).groups[mesh_dim]
    if group_src is None:
        if scatter_list is None:
            raise ArgumentError(
                "mesh_scatter got neither group_src nor scatter_list, expected one of them: pass the source rank, or "
                "pass the list on every rank"
            )
        output.copy_(scatter_list[group.rank()])
        return None
    inputs = None
    if group.rank() == group_src and scatter_list is not None:
        inputs = [comm.packed(part) for part in scatter_list]
    return _run_on_packed_copy(
        output, lambda packed: comm.scatter(packed, inputs, group, group_src, async_op)
    )


def mesh_broadcast(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int | None = 0,
) -> Work | None:
    """Copies the tensor of the source rank of `mesh_dim` to the other ranks, in place.

    Args:
        tensor: sent on the source rank, overwritten on the others.
        async_op: whether to return a Work.
        group_src: the source rank's index along the mesh dim. None: every rank keeps its tensor.

    Returns:
        The Work if `async_op`. None for meta tensors, which have no data.
    """
    if tensor.is_meta or group_src is None:
        return None
    group = mesh_info(mesh).groups[mesh_dim]
    return _run_on_packed_copy(tensor, lambda packed: comm.broadcast(packed, group, group_src, async_op))


# --- padding ---------------------------------------------------------------------------------------


def pad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int) -> torch.Tensor:
    """Appends `pad_size` zeros on `pad_dim`; returns the tensor itself for 0."""
    return tensor if pad_size == 0 else padded(tensor, pad_dim % tensor.ndim, tensor.size(pad_dim) + pad_size)


def unpad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int) -> torch.Tensor:
    """Returns a view without the last `pad_size` elements on `pad_dim`; the tensor itself for 0."""
    return tensor if pad_size == 0 else tensor.narrow(pad_dim, 0, tensor.size(pad_dim) - pad_size)


def fill_empty_tensor_to_shards(
    shards: list[torch.Tensor], shard_dim: int, num_empty_tensors: int
) -> list[torch.Tensor]:
    """Appends shards that are empty on `shard_dim` to `shards`, in place, and returns it."""
    if num_empty_tensors:
        shape = list(shards[0].shape)
        shape[shard_dim] = 0
        shards.extend([shards[0].new_zeros(shape)] * num_empty_tensors)
    return shards


def check_tensor_meta(local_tensor: torch.Tensor, check_shape_stride: bool = False) -> None:
    """Checks that all ranks of the world pass tensors with the same dtype and requires_grad.

    Args:
        check_shape_stride: whether shape and stride must be the same, too.

    Raises:
        LayoutError: they differ; raised on every rank. It is a ValueError, and its notes list the values of each
            rank.
    """
    local_meta: dict[str, Any] = {"dtype": local_tensor.dtype, "requires_grad": local_tensor.requires_grad}
    if check_shape_stride:
        local_meta |= {"shape": tuple(local_tensor.shape), "stride": local_tensor.stride()}
    all_meta = comm.all_gather_objects(local_meta)
    if any(meta != all_meta[0] for meta in all_meta):
        error = LayoutError("Inconsistent tensor metadata (including shape and stride) across ranks.")
        for rank, meta in enumerate(all_meta):
            error.add_note(f"rank {rank}: {', '.join(f'{name} {value}' for name, value in meta.items())}")
        raise error
