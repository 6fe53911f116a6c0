"""Converts the inputs and outputs of parallelized modules between plain tensors and DTensors, on a 1-D mesh.

An input is a plain tensor, which is taken as this rank's part, or a DTensor, which is redistributed. It may be
wrapped in the tuple that a hook gets. The functions `make_input_*` and `make_output_*` have the names that torch gave
them for PairwiseParallel's `prepare_input` and `prepare_output`.

Note [Lengths of plain parts]: the length of one part does not determine the length of the whole tensor. Over 4 ranks,
a length of 7 is split as 2, 2, 2, 1. If each rank assumed that all parts are as long as its own, ranks would compute
with different shapes, and a collective would never end. So the ranks exchange the lengths of their parts (a small
all-gather, and a wait for it), but only where these may differ.

All ranks must decide equally whether to exchange. The decision therefore depends only on what all ranks know: the
lengths of DTensors whose parts modules returned. The lengths of a module's input are exchanged

- the first time that the input is read;
- each time, if the input was uneven the first time, or its length differed from that of the part returned last. Such
  a part comes from elsewhere, for example from a tensor that the program splits itself;
- each time, after a module has returned an uneven part with the same number of dims, split along the same dim.

So even lengths are exchanged once per input. A compiled graph cannot exchange lengths; there, uneven lengths are
refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError, LayoutError, MeshError
from dtbench_core.layout.mesh import mesh_info, mesh_or_current
from dtbench_core.layout.placement import Placement, Placements, Replicate, Shard
from dtbench_core.layout.shard_layout import joined_layout
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride, normalize_one
from dtbench_core.tensor.dtensor import DTensor, wrapped
from dtbench_core.torch_compat import in_graph, is_dynamo_compiling, is_traced


@in_graph
def redistributed(tensor: DTensor, placements: Placements) -> DTensor:
    """Returns the tensor redistributed to `placements`, or the tensor itself if it has them."""
    return tensor if tensor.placements == placements else tensor.redistribute(placements=placements)


@in_graph
def with_recorded_length(tensor: DTensor) -> DTensor:
    """Returns `tensor`, whose plain part a module is about to return, after recording the length of its sharded dim."""
    spec = tensor._spec
    placement, parts = spec.placements[0], spec.info.sizes[0]
    if isinstance(placement, Shard):
        key, length = (spec.ndim, placement.dim), spec.shape[placement.dim]
        last_length, uneven_count = spec.info.output_lengths.get(key, (0, 0))
        if length != last_length:
            spec.info.output_lengths[key] = length, uneven_count + (length % parts > 0)
    return tensor


# (argument, number of dims, sharded dim) -> how many uneven lengths modules had returned when the input was first
# read; -1 if the input was not the part returned last.
KnownLengths = dict[tuple[object, int, int], int]


def known_lengths_of(module: object, mesh: DeviceMesh, layout: Placement) -> KnownLengths | None:
    """Returns the record of inputs that `module` has read so far; see Note [Lengths of plain parts].

    None in a compiled graph, and for a layout that does not shard.
    """
    return (
        mesh_info(mesh).known_lengths.setdefault(module, {})
        if layout.is_shard() and not is_dynamo_compiling()
        else None
    )


@in_graph
def dtensor_from_parts(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    layout: Placement,
    known_lengths: KnownLengths | None,
    argument: object = None,
) -> DTensor:
    """Returns the DTensor whose parts are the plain tensors of all ranks, on a mesh with one dim.

    Args:
        tensor: this rank's part.
        layout: the placement of the parts. A Shard splits as torch.chunk does.
        known_lengths: see `known_lengths_of`.
        argument: identifies the input among those of its module.

    Raises:
        LayoutError: the parts are not those of torch.chunk (raised on all ranks); in a compiled graph: the parts are
            uneven.
    """
    info, placement = mesh_info(mesh), normalize_one(layout, tensor.ndim)
    if not isinstance(placement, Shard) or info.coordinate is None:
        return DTensor.from_local(tensor, mesh, (layout,))
    known_lengths = {} if known_lengths is None else known_lengths
    key = (argument, tensor.ndim, placement.dim)
    length, uneven_count = info.output_lengths.get(key[1:], (0, 0))
    if length % info.sizes[0] == 0 if is_traced() else known_lengths.get(key, -1) >= uneven_count:
        return DTensor.from_local(tensor, mesh, (placement,))
    shape, placements = joined_layout(tensor, info, (placement,))
    if placements != (placement,):
        raise LayoutError(
            f"got parts of a tensor of shape {list(shape)}, placed as {placements[0]}, expected parts as torch.chunk "
            f"splits it into {info.sizes[0]} along dim {placement.dim}: split it with "
            "distribute_tensor(...).to_local()"
        )
    spec = DTensorSpec.of(info, placements, shape, contiguous_stride(shape), tensor.dtype)
    known_lengths.setdefault(key, uneven_count if shape[placement.dim] == length and spec.is_even() else -1)
    return wrapped(tensor.contiguous(), spec)


def input_as_dtensor(
    value: Any, device_mesh: DeviceMesh | None, layout: Placement, placement: Placement | None = None
) -> DTensor:
    """Returns the single input in `value` as a DTensor.

    Args:
        layout: the placement of a plain input.
        placement: the placement of the result; by default `layout`.
    """
    tensor = value[0] if isinstance(value, tuple) and len(value) == 1 else value
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"got {type(value).__name__} as the input of a parallelized module, expected a tensor, or a tuple with "
            "one tensor: pass it by position, or write a prepare_input that takes the module's inputs"
        )
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else mesh_or_current(device_mesh)
    _check_1d(mesh)
    if not isinstance(tensor, DTensor):
        tensor = dtensor_from_parts(tensor, mesh, layout, known_lengths_of(input_as_dtensor, mesh, layout))
        if placement is None:
            return tensor
    return redistributed(tensor, (placement or layout,))


def redistribute_output(value: Any, placement: Placement) -> DTensor:
    if not isinstance(value, DTensor):
        raise ArgumentError(
            f"got {type(value).__name__} as the output of a parallelized module, expected a DTensor: pass a "
            "prepare_output that takes the module's output, or leave it out"
        )
    _check_1d(value.device_mesh)
    return redistributed(value, (placement,))


def _check_1d(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise MeshError(
            f"got a {mesh_info(mesh)}, expected a mesh with one dim: slice it, as in mesh['tp'], or place the tensor "
            "yourself"
        )


def make_input_replicate_1d(input: Any, device_mesh: DeviceMesh | None = None) -> DTensor:
    """Returns an input that every rank holds whole as a replicated DTensor."""
    return input_as_dtensor(input, device_mesh, Replicate())


def make_input_shard_1d(input: Any, device_mesh: DeviceMesh | None = None, dim: int = 0) -> DTensor:
    """Returns an input of which every rank holds an equal part along `dim` as a sharded DTensor."""
    return input_as_dtensor(input, device_mesh, Shard(dim))


def make_input_shard_1d_last_dim(input: Any, device_mesh: DeviceMesh | None = None) -> DTensor:
    """Same as `make_input_shard_1d` along the last dim."""
    return input_as_dtensor(input, device_mesh, Shard(-1))


def make_input_reshard_replicate(input: Any, device_mesh: DeviceMesh | None = None) -> DTensor:
    """Returns an input of which every rank holds an equal part along dim 0, gathered on every rank."""
    return input_as_dtensor(input, device_mesh, Shard(0), Replicate())


def make_output_replicate_1d(output: DTensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """Returns the output replicated on every rank."""
    return redistribute_output(output, Replicate())


def make_output_shard_1d(output: DTensor, device_mesh: DeviceMesh | None = None, dim: int = 0) -> DTensor:
    """Returns the output sharded along `dim`."""
    return redistribute_output(output, Shard(dim))


def make_output_tensor(output: DTensor, device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Returns the whole output as a plain tensor."""
    return redistribute_output(output, Replicate()).to_local()


def make_output_reshard_tensor(output: DTensor, device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Returns this rank's part of the output along dim 0 as a plain tensor."""
    return with_recorded_length(redistribute_output(output, Shard(0))).to_local()


def make_sharded_output_tensor(output: DTensor, device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """Returns this rank's part of the output in its present placement, as a plain tensor.

    Raises:
        ArgumentError: the output is a pending reduction, so this rank's tensor is not a part of it.
    """
    if isinstance(output, DTensor) and not output._spec.has_partial():
        return with_recorded_length(output).to_local()
    raise ArgumentError(
        f"make_sharded_output_tensor got {getattr(output, '_spec', type(output).__name__)}, expected a DTensor that "
        "is sharded or replicated: use make_output_tensor or make_output_reshard_tensor"
    )
