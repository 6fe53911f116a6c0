"""Collectives over one mesh dim, padding, and the cost model: what torch.distributed.tensor keeps in
`_collective_utils`, by the same names.

The core's own redistribution does not pass through here (see redistribute/movers.py); these are for code that
is written against them. The cost functions are those of cost/redistribution.py, the constants of a mesh those of
cost/mesh_topology.py.
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
from dtbench_core.layout.spec import TensorMeta
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
    """The tensor that is sharded on `gather_dim` over `mesh_dim`, sharded on `shard_dim` instead.

    Every rank passes a shard of one shape and gets a contiguous one, cut as torch.chunk cuts. On CPU
    meshes (but not in a LocalTensorMode) everything is gathered and cut, as not every CPU transport has
    an all-to-all; the first call says so.

    Raises:
        ArgumentError: a dim that the tensor lacks, or both the same.
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
            "expected two dims: it is sharded so already"
        )
    group = mesh_info(mesh).groups[mesh_dim]
    if simulation.active or isinstance(group, comm.OrderedGroup):  # a LocalTensorMode
        return _moved(input, gather_dim, shard_dim, group)
    if mesh.device_type == "cpu":
        _tell_fallback()
        return _moved(input, gather_dim, shard_dim, group, REPLICATE)
    return cast(
        "torch.Tensor",
        torch.ops.dtbench_core.shard_dim_alltoall(input, gather_dim, shard_dim, group.group_name),
    )


@functools.cache
def _tell_fallback() -> None:
    logger.warning("CPU process group does not support alltoall yet, falling back with allgather + chunk!")


def _moved(
    shard: torch.Tensor, gather_dim: int, shard_dim: int, group: comm.Group, *between: Placement
) -> torch.Tensor:
    """The shard of `gather_dim`, by way of the placements `between`, as one of `shard_dim`."""
    shape = list(shard.shape)
    shape[gather_dim] *= group.size()
    ends = Shard(gather_dim % shard.ndim), Shard(shard_dim % shard.ndim)
    for src, dst in itertools.pairwise((ends[0], *between, ends[1])):
        sizes, at = (group.size(),), (group.rank(),)
        shard = make_mover(Exchange((src,), (dst,), sizes, tuple(shape), shard.dtype, group, at))(shard)
    return shard


@torch.library.custom_op("dtbench_core::shard_dim_alltoall", mutates_args=())
def _shard_dim_alltoall(
    input: torch.Tensor, gather_dim: int, shard_dim: int, group_name: str
) -> torch.Tensor:
    return _moved(input, gather_dim, shard_dim, resolve_group(group_name))


@_shard_dim_alltoall.register_fake
def _shard_dim_alltoall_meta(
    input: torch.Tensor, gather_dim: int, shard_dim: int, group_name: str
) -> torch.Tensor:
    group = resolve_group(group_name)
    shape = list(input.shape)
    shape[gather_dim] *= group.size()
    shape[shard_dim] = Shard(shard_dim).extent(shape[shard_dim], group.size(), group.rank())[0]
    return input.new_empty(shape)


# --- from one rank to all --------------------------------------------------------------------------


class _StagedWork(Work):
    """The Work of a collective that writes to `staged`, a packed copy of its output; `wait()` copies it back."""

    def __init__(self, work: Work, output: torch.Tensor, staged: torch.Tensor) -> None:
        super().__init__()
        self._work, self._output, self._staged = work, output, staged

    def wait(self, *timeout: timedelta) -> bool:
        done = self._work.wait(*timeout)
        self._output.copy_(self._staged)
        return done

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _staged(output: torch.Tensor, collective: Callable[[torch.Tensor], Work | None]) -> Work | None:
    """`collective` on a packed copy of its output."""
    staged = comm.packed(output)
    work = collective(staged)
    if staged is output:
        return work
    if work is not None:
        return _StagedWork(work, output, staged)
    output.copy_(staged)
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
    """Gives every rank of `mesh_dim` its tensor of the source rank's `scatter_list`, in `output`.

    On the mesh [[0, 1], [2, 3]] and mesh dim 1, rank 0 gives to 0 and 1, rank 2 to 2 and 3.

    Args:
        scatter_list: one tensor per rank, of `output`'s shape; read on the source rank only.
        group_src: the source's place along the mesh dim. None: every rank takes from its own list, and
            nothing is sent.

    Returns:
        The Work if `async_op`: `output` and the list must stay alive until its `wait()`. None on meta
        tensors, which hold nothing to send.
    """
    if output.is_meta:
        return None
    group = mesh_info(mesh).groups[mesh_dim]
    if group_src is None:
        if scatter_list is None:
            raise ArgumentError(
                "mesh_scatter got neither group_src nor scatter_list, expected one: name the source rank, or pass the "
                "list on every rank"
            )
        output.copy_(scatter_list[group.rank()])
        return None
    inputs = None
    if group.rank() == group_src and scatter_list is not None:
        inputs = [comm.packed(part) for part in scatter_list]
    return _staged(output, lambda staged: comm.scatter(staged, inputs, group, group_src, async_op))


def mesh_broadcast(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    mesh_dim: int = 0,
    async_op: bool = False,
    *,
    group_src: int | None = 0,
) -> Work | None:
    """Copies the tensor of the source rank of `mesh_dim` to the others, in place.

    Args:
        group_src: the source's place along the mesh dim. None: every rank keeps its own.

    Returns:
        The Work if `async_op`. None on meta tensors, which hold nothing to send.
    """
    if tensor.is_meta or group_src is None:
        return None
    group = mesh_info(mesh).groups[mesh_dim]
    return _staged(tensor, lambda staged: comm.broadcast(staged, group, group_src, async_op))


# --- shards of one length --------------------------------------------------------------------------


def pad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int) -> torch.Tensor:
    """`tensor` with `pad_size` zeros appended on `pad_dim`; itself for 0."""
    if pad_size == 0:
        return tensor
    return padded(tensor, pad_dim % tensor.ndim, tensor.size(pad_dim) + pad_size)


def unpad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int) -> torch.Tensor:
    """`tensor` without its last `pad_size` elements on `pad_dim`, as a view; itself for 0."""
    if pad_size == 0:
        return tensor
    return tensor.narrow(pad_dim, 0, tensor.size(pad_dim) - pad_size)


def fill_empty_tensor_to_shards(
    shards: list[torch.Tensor], shard_dim: int, num_empty_tensors: int
) -> list[torch.Tensor]:
    """Appends shards that have no elements on `shard_dim` to `shards`, in place, and returns it."""
    if num_empty_tensors:
        shape = list(shards[0].shape)
        shape[shard_dim] = 0
        shards.extend([shards[0].new_zeros(shape)] * num_empty_tensors)
    return shards


def check_tensor_meta(local_tensor: torch.Tensor, check_shape_stride: bool = False) -> TensorMeta | None:
    """Checks that all ranks of the world pass tensors of one dtype and one requires_grad.

    Args:
        check_shape_stride: of one shape and one stride too.

    Raises:
        LayoutError: they do not, on every rank. It is a ValueError; its notes say who has what.
    """
    mine: dict[str, Any] = {"dtype": local_tensor.dtype, "requires_grad": local_tensor.requires_grad}
    if check_shape_stride:
        mine |= {"shape": tuple(local_tensor.shape), "stride": local_tensor.stride()}
    seen = comm.all_gather_objects(mine)
    if any(meta != seen[0] for meta in seen):
        error = LayoutError("Inconsistent tensor metadata (including shape and stride) across ranks.")
        for rank, meta in enumerate(seen):
            error.add_note(f"rank {rank}: {', '.join(f'{name} {value}' for name, value in meta.items())}")
        raise error
    return None
