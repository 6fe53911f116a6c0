"""Functions for what goes into a parallelized module and comes out of it, on a mesh of one dim.

An input is a plain tensor, which is read as this rank's part, or a DTensor, which moves. It may stand in
the tuple that a hook gets. The names are those that PairwiseParallel's `prepare_input` and
`prepare_output` have always had.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError, MeshError
from dtbench_core.layout.mesh import mesh_info, mesh_or_current
from dtbench_core.layout.placement import Placement, Placements, Replicate, Shard
from dtbench_core.tensor.dtensor import DTensor
from dtbench_core.torch_compat import in_graph


@in_graph
def placed(tensor: DTensor, placements: Placements) -> DTensor:
    """Redistributed if need be."""
    return tensor if tensor.placements == placements else tensor.redistribute(placements=placements)


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
        tensor = DTensor.from_local(tensor, mesh, [layout])
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
    return placed_output(output, Shard(0)).to_local()


def make_sharded_output_tensor(output: DTensor, device_mesh: DeviceMesh | None = None) -> torch.Tensor:
    """This rank's part of the output, however it is placed, as a plain tensor.

    Raises:
        ArgumentError: a pending reduction: its terms are no part of the output.
    """
    if isinstance(output, DTensor) and not output._spec.has_partial():
        return output.to_local()
    raise ArgumentError(
        f"make_sharded_output_tensor got {getattr(output, '_spec', type(output).__name__)}, expected a DTensor that "
        "is sharded or replicated: use make_output_tensor or make_output_reshard_tensor"
    )
