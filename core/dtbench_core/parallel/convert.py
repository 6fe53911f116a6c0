"""Functions for what goes into a parallelized module and comes out of it, on a mesh of one dim.

An input is a plain tensor, which is read as this rank's part, or a DTensor, which moves. It may stand in
the tuple that a hook gets. The names are those that PairwiseParallel's `prepare_input` and
`prepare_output` have always had.

Note [Lengths of plain parts]: a part does not tell the length of the whole. 7 over 4 ranks is 2, 2, 2, 1; a rank that
took all parts for as long as its own would compute with a length of its own, and a collective would never end. So the
ranks tell each other the lengths of their parts (a small all-gather, and a wait for it), but only where they may
differ. All ranks must come to the same answer to that. They know the length of each DTensor whose parts a module hands
out, and ask for an input of a module

- the first time that it is read;
- each time, if it was then uneven, or of another length than the part that was handed out last: it comes from
  elsewhere, such as a tensor that the program cuts itself;
- each time, once an uneven part of as many dims, cut along the same one, was handed out since.

Even lengths are thus asked for once for each input. In a compiled graph no rank can ask: an uneven length is refused.
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
def placed(tensor: DTensor, placements: Placements) -> DTensor:
    """Redistributed if need be."""
    return tensor if tensor.placements == placements else tensor.redistribute(placements=placements)


@in_graph
def handed_out(tensor: DTensor) -> DTensor:
    """`tensor`, whose plain part a module hands out: its length is noted, if it is cut."""
    spec = tensor._spec
    placement, parts = spec.placements[0], spec.info.sizes[0]
    if isinstance(placement, Shard):
        cut, length = (spec.ndim, placement.dim), spec.shape[placement.dim]
        last, uneven = spec.info.handed_out.get(cut, (0, 0))
        if length != last:
            spec.info.handed_out[cut] = length, uneven + (length % parts > 0)
    return tensor


# (argument, dims of the tensor, the sharded one) -> how many uneven lengths had been handed out when it was first read
# as a part of a tensor that was handed out, or -1 if it was not.
ReadLengths = dict[tuple[object, int, int], int]


def lengths_read_by(module: object, mesh: DeviceMesh, layout: Placement) -> ReadLengths | None:
    """The lengths that the module has read until now; None in a compiled graph, and of a layout that does not cut."""
    asks = layout.is_shard() and not is_dynamo_compiling()
    return mesh_info(mesh).readers.setdefault(module, {}) if asks else None


@in_graph
def read_part(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    layout: Placement,
    known: ReadLengths | None,
    argument: object = None,
) -> DTensor:
    """The DTensor that the plain tensors of all ranks make up, on a mesh of one dim.

    Args:
        layout: how the ranks' tensors make it up. A Shard cuts as torch.chunk does.
        known: see `lengths_read_by`.
        argument: which input of the module it is.

    Raises:
        LayoutError: parts that torch.chunk would not cut, on all ranks; in a compiled graph, uneven ones.
    """
    info, placement = mesh_info(mesh), normalize_one(layout, tensor.ndim)
    if not isinstance(placement, Shard) or info.coordinate is None:
        return DTensor.from_local(tensor, mesh, (layout,))
    known, key = {} if known is None else known, (argument, tensor.ndim, placement.dim)
    length, uneven = info.handed_out.get(key[1:], (0, 0))
    if length % info.sizes[0] == 0 if is_traced() else known.get(key, -1) >= uneven:
        return DTensor.from_local(tensor, mesh, (placement,))
    shape, placed = joined_layout(tensor, info, (placement,))
    if placed != (placement,):
        raise LayoutError(
            f"got parts of a tensor of shape {list(shape)}, placed as {placed[0]}, expected parts as torch.chunk cuts "
            f"it into {info.sizes[0]} along dim {placement.dim}: cut it with distribute_tensor(...).to_local()"
        )
    spec = DTensorSpec.of(info, placed, shape, contiguous_stride(shape), tensor.dtype)
    known.setdefault(key, uneven if shape[placement.dim] == length and spec.is_even() else -1)
    return wrapped(tensor.contiguous(), spec)


def read_input(
    value: Any, device_mesh: DeviceMesh | None, layout: Placement, wanted: Placement | None = None
) -> DTensor:
    """The one input in `value`, which is placed as `layout` if it is plain, as a DTensor placed as `wanted`."""
    tensor = value[0] if isinstance(value, tuple) and len(value) == 1 else value
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"got {type(value).__name__} as the input of a parallelized module, expected one tensor, or a tuple of "
            "one: pass it by position, or write a prepare_input that takes what the module does"
        )
    mesh = tensor.device_mesh if isinstance(tensor, DTensor) else mesh_or_current(device_mesh)
    _check_one_dim(mesh)
    if not isinstance(tensor, DTensor):
        tensor = read_part(tensor, mesh, layout, lengths_read_by(read_input, mesh, layout))
        if wanted is None:
            return tensor
    return placed(tensor, (wanted or layout,))


def placed_output(value: Any, placement: Placement) -> DTensor:
    if not isinstance(value, DTensor):
        raise ArgumentError(
            f"got {type(value).__name__} as the output of a parallelized module, expected a DTensor: give a "
            "prepare_output that takes what the module gives, or leave it out"
        )
    _check_one_dim(value.device_mesh)
    return placed(value, (placement,))


def _check_one_dim(mesh: DeviceMesh) -> None:
    if mesh.ndim != 1:
        raise MeshError(
            f"got a {mesh_info(mesh)}, expected one dim: slice it, as in mesh['tp'], or place the tensor yourself"
        )


def make_input_replicate_1d(input: Any, device_mesh: DeviceMesh | None = None) -> DTensor:
    """The input, the whole of which every rank holds, as a replicated DTensor."""
    return read_input(input, device_mesh, Replicate())


def make_input_shard_1d(input: Any, device_mesh: DeviceMesh | None = None, dim: int = 0) -> DTensor:
    """The input, of which every rank holds an equal part along `dim`, as a sharded DTensor."""
    return read_input(input, device_mesh, Shard(dim))


def make_input_shard_1d_last_dim(input: Any, device_mesh: DeviceMesh | None = None) -> DTensor:
    """As `make_input_shard_1d` along the last dim."""
    return read_input(input, device_mesh, Shard(-1))


def make_input_reshard_replicate(input: Any, device_mesh: DeviceMesh | None = None) -> DTensor:
    """The input, of which every rank holds an equal part along dim 0, gathered on every rank."""
    return read_input(input, device_mesh, Shard(0), Replicate())


def make_output_replicate_1d(output: DTensor, device_mesh: DeviceMesh | None = None) -> DTensor:
    """The output whole on every rank."""
    return placed_output(output, Replicate())


def make_output_shard_1d(output: DTensor, device_mesh: DeviceMesh | None = None, dim: int = 0) -> DTensor:
    """The output sharded along `dim`."""
    return placed_output(output, Shard(dim))


def make_output_tensor(output: DTensor, device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """The whole output as a plain tensor."""
    return placed_output(output, Replicate()).to_local()


def make_output_reshard_tensor(output: DTensor, device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """This rank's part of the output along dim 0 as a plain tensor."""
    return handed_out(placed_output(output, Shard(0))).to_local()


def make_sharded_output_tensor(output: DTensor, device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """This rank's part of the output, however it is placed, as a plain tensor.

    Raises:
        ArgumentError: a pending reduction: its terms are no part of the output.
    """
    if isinstance(output, DTensor) and not output._spec.has_partial():
        return handed_out(output).to_local()
    raise ArgumentError(
        f"make_sharded_output_tensor got {getattr(output, '_spec', type(output).__name__)}, expected a DTensor that "
        "is sharded or replicated: use make_output_tensor or make_output_reshard_tensor"
    )
