"""Shards parameters over a second mesh dim and gathers them for each forward, for data parallelism.

After `parallelize_module(model, mesh, plan, "tp")`, all ranks along the other dim, "dp", hold the same shards.
`shard_parameters(model, mesh, "dp")` makes them DTensors on the whole mesh:

    Colwise weight  [o, i]   tp S(0), dp S(1)       Rowwise weight  [o, i]   tp S(1), dp S(0)
    Colwise bias    [o]      tp S(0), dp shards each tp shard: a StridedShard where dp is the outer mesh dim
    other parameters         tp R,    dp S(0)

Before a module runs, its own parameters are gathered over dp, so that it gets the same parameters as before: DTensors
on the tp mesh, or plain tensors. In the backward pass their gradients are averaged over dp and scattered. The
gathered parameters are kept until the backward pass has used them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import ArgumentError, MeshError
from dtbench_core.layout.mesh import mesh_info
from dtbench_core.layout.placement import REPLICATE, Partial, Placement, Placements, Shard, StridedShard
from dtbench_core.layout.spec import DTensorSpec, contiguous_stride, normalize
from dtbench_core.parallel.parameters import dim_index, mesh_of_dim
from dtbench_core.tensor import distribute
from dtbench_core.tensor.dtensor import DTensor, wrapped


class _ParameterLayout(NamedTuple):
    """The placements of one parameter while its module runs.

    Attributes:
        gathered: placements of the gathered parameter on the whole mesh.
        gradient: placements of the ranks' gradients on the whole mesh.
        module_spec: the spec on the other mesh dim that the module gets; None for a plain tensor.
    """

    gathered: Placements
    gradient: Placements
    module_spec: DTensorSpec | None


def shard_parameters(
    module: nn.Module,
    device_mesh: DeviceMesh,
    mesh_dim: int | str = 0,
    *,
    src_data_rank: int | None = 0,
    reduce_op: str = "avg",
) -> nn.Module:
    """Shards a module's parameters over one dim of a mesh, in place. Each rank along that dim trains on its own data.

    Args:
        module: the module to change.
        device_mesh: a mesh of one or two dims. With two, parameters that are DTensors must live on its other dim, as
            after `parallelize_module(module, device_mesh, plan, other_dim)`.
        mesh_dim: the dim to shard over, by index or name.
        src_data_rank: the rank along that dim whose values are distributed. None: every rank keeps its part of its
            own values.
        reduce_op: how the ranks' gradients are combined, "avg" or "sum".

    Returns:
        The same module. Names and modules stay, parameters are new.

    Raises:
        MeshError: a mesh with more dims, or a parameter on another mesh.
        ArgumentError: another reduce_op.
    """
    if reduce_op not in ("avg", "sum"):
        raise ArgumentError(f'shard_parameters got reduce_op={reduce_op!r}, expected "avg" or "sum"')
    shard_dim = dim_index(device_mesh, mesh_dim)
    if device_mesh.ndim > 2:
        raise MeshError(
            f"shard_parameters got the {mesh_info(device_mesh)}, expected one dim, or two where tensor parallelism "
            'uses the other one: slice it, as in mesh["dp", "tp"]'
        )
    other_info = None if device_mesh.ndim == 1 else mesh_info(mesh_of_dim(device_mesh, 1 - shard_dim))
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter._spec.info is not other_info:
            raise MeshError(
                f"shard_parameters got the parameter {name}, which is {parameter._spec}, expected plain parameters"
                f"{f' or DTensors on the {other_info}' if other_info else ''}: parallelize the module over the other "
                "dim of the same mesh, and shard it once"
            )
    sharded: dict[nn.Parameter, tuple[nn.Parameter, _ParameterLayout]] = {}
    for part in module.modules():
        layouts: dict[str, _ParameterLayout] = {}
        for name, original in list(part._parameters.items()):
            if original is None:
                continue
            if original not in sharded:
                sharded[original] = _shard_parameter(
                    original, device_mesh, shard_dim, src_data_rank, reduce_op
                )
            shard, layouts[name] = sharded[original]
            part.register_parameter(name, shard)
        if layouts:
            part.register_forward_pre_hook(partial(_gather, layouts))
            part.register_forward_hook(partial(_release, layouts), always_call=True)
    return module


def _shard_parameter(
    parameter: nn.Parameter, mesh: DeviceMesh, shard_dim: int, src: int | None, reduce_op: str
) -> tuple[nn.Parameter, _ParameterLayout]:
    module_spec = parameter._spec if isinstance(parameter, DTensor) else None
    other_placement = REPLICATE if module_spec is None else module_spec.placements[0]
    info, shape = mesh_info(mesh), parameter.shape

    def on_all_dims(placement: Placement) -> Placements:
        return tuple(placement if dim == shard_dim else other_placement for dim in range(info.ndim))

    local = parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
    if src is not None:
        local = distribute._sent(local, mesh_info(mesh_of_dim(mesh, shard_dim)), (REPLICATE,), src)
    placed = normalize(
        on_all_dims(_placement_along(shape, other_placement, mesh, shard_dim)), len(shape), info, shape
    )
    shard = wrapped(
        local, DTensorSpec.of(info, on_all_dims(REPLICATE), shape, contiguous_stride(shape), parameter.dtype)
    ).redistribute(placements=placed)
    layout = _ParameterLayout(on_all_dims(REPLICATE), on_all_dims(Partial(reduce_op)), module_spec)
    return nn.Parameter(shard, parameter.requires_grad), layout


def _placement_along(shape: torch.Size, placement: Placement, mesh: DeviceMesh, shard_dim: int) -> Placement:
    """Returns the placement along mesh dim `shard_dim` of a parameter that the other dim places as `placement`."""
    size = mesh.size(shard_dim)
    if unsharded := [dim for dim in range(len(shape)) if not placement.is_shard(dim)]:
        return Shard(([dim for dim in unsharded if shape[dim] % size == 0] or unsharded)[0])
    if not shape:  # a single number
        return REPLICATE
    if shard_dim == 1:  # the inner mesh dim shards each shard of the outer dim, as a second Shard does
        return Shard(0)
    outer_size = mesh.size(1 - shard_dim)
    return StridedShard(0, split_factor=outer_size) if shape[0] % outer_size == 0 else REPLICATE


def _gather(layouts: dict[str, _ParameterLayout], module: nn.Module, inputs: Any) -> None:
    """Gathers the parameters and sets them as attributes of the module, where they hide the registered parameters."""
    for name, layout in layouts.items():
        parameter: Any = module._parameters[name]
        local = parameter.redistribute(placements=layout.gathered).to_local(grad_placements=layout.gradient)
        module.__dict__[name] = local if layout.module_spec is None else wrapped(local, layout.module_spec)


def _release(layouts: dict[str, _ParameterLayout], module: nn.Module, inputs: Any, outputs: Any) -> None:
    for name in layouts:
        module.__dict__.pop(name, None)
