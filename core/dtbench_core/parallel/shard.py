"""Parameters spread over a second mesh dim, and gathered for the time of a forward: the data-parallel half of
two-dimensional parallelism.

After `parallelize_module(model, mesh, plan, "tp")` every rank of the other dim, "dp", holds the same shards.
`shard_parameters(model, mesh, "dp")` makes them DTensors on the whole mesh:

    Colwise weight  [o, i]   tp S(0), dp S(1)       Rowwise weight  [o, i]   tp S(1), dp S(0)
    Colwise bias    [o]      tp S(0), dp cuts what tp leaves: StridedShard where dp is the outer mesh dim
    anything else            tp R,    dp S(0)

Before a module runs, its own parameters are gathered over dp, and the module sees what it saw before: DTensors
on the tp mesh, or plain tensors. Backward their gradients are averaged over dp and scattered. The gathered
parameters live until the backward has used them.
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


class _Held(NamedTuple):
    """How one parameter is gathered.

    gathered: its placements then, on the whole mesh. gradient: those of its ranks' gradients.
    inside: what the module sees: the spec on the other mesh dim, or None for a plain tensor.
    """

    gathered: Placements
    gradient: Placements
    inside: DTensorSpec | None


def shard_parameters(
    module: nn.Module,
    device_mesh: DeviceMesh,
    mesh_dim: int | str = 0,
    *,
    src_data_rank: int | None = 0,
    reduce_op: str = "avg",
) -> nn.Module:
    """Spreads a module's parameters over one dim of a mesh, in place; each rank of that dim trains on its own data.

    Args:
        device_mesh: of one or two dims. With two, parameters that are DTensors must live on its other dim, as
            `parallelize_module(module, device_mesh, plan, other_dim)` leaves them.
        mesh_dim: the dim to spread over, by index or name.
        src_data_rank: the rank of that dim whose values count; None: every rank keeps its part of its own.
        reduce_op: what becomes of the ranks' gradients: "avg" or "sum".

    Returns:
        The same module; names and modules stay, parameters are new.

    Raises:
        MeshError: a mesh of more dims, or a parameter on another mesh. ArgumentError: another reduce_op.
    """
    if reduce_op not in ("avg", "sum"):
        raise ArgumentError(f'shard_parameters got reduce_op={reduce_op!r}, expected "avg" or "sum"')
    over = dim_index(device_mesh, mesh_dim)
    if device_mesh.ndim > 2:
        raise MeshError(
            f"shard_parameters got the {mesh_info(device_mesh)}, expected one dim, or two of which tensor parallelism "
            'uses the other: slice it, as in mesh["dp", "tp"]'
        )
    other = None if device_mesh.ndim == 1 else mesh_info(mesh_of_dim(device_mesh, 1 - over))
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor) and parameter._spec.info is not other:
            raise MeshError(
                f"shard_parameters got the parameter {name}, which is {parameter._spec}, expected plain parameters"
                f"{f' or DTensors on the {other}' if other else ''}: parallelize the module over the other dim of the "
                "same mesh, and shard it once"
            )
    spread: dict[nn.Parameter, tuple[nn.Parameter, _Held]] = {}
    for part in module.modules():
        own: dict[str, _Held] = {}
        for name, original in list(part._parameters.items()):
            if original is None:
                continue
            if original not in spread:
                spread[original] = _spread(original, device_mesh, over, src_data_rank, reduce_op)
            shard, own[name] = spread[original]
            part.register_parameter(name, shard)
        if own:
            part.register_forward_pre_hook(partial(_gather, own))
            part.register_forward_hook(partial(_release, own), always_call=True)
    return module


def _spread(
    parameter: nn.Parameter, mesh: DeviceMesh, over: int, src: int | None, reduce_op: str
) -> tuple[nn.Parameter, _Held]:
    inside = parameter._spec if isinstance(parameter, DTensor) else None
    inner = REPLICATE if inside is None else inside.placements[0]
    info, shape = mesh_info(mesh), parameter.shape

    def on_both(here: Placement) -> Placements:
        return (here,) if info.ndim == 1 else (here, inner) if over == 0 else (inner, here)

    def described(placements: Placements) -> DTensorSpec:
        return DTensorSpec.of(info, placements, shape, contiguous_stride(shape), parameter.dtype)

    local = parameter.to_local().detach() if isinstance(parameter, DTensor) else parameter.detach()
    if src is not None:
        local = distribute._sent(local, mesh_info(mesh_of_dim(mesh, over)), (REPLICATE,), src)
    placed = normalize(on_both(_where(shape, inner, mesh, over)), len(shape), info, shape)
    shard = wrapped(local, described(on_both(REPLICATE))).redistribute(placements=placed)
    held = _Held(on_both(REPLICATE), on_both(Partial(reduce_op)), inside)
    return nn.Parameter(shard, parameter.requires_grad), held


def _where(shape: torch.Size, placement: Placement, mesh: DeviceMesh, over: int) -> Placement:
    """How mesh dim `over` cuts a parameter that the other dim places as `placement`."""
    parts = mesh.size(over)
    free = [dim for dim in range(len(shape)) if not placement.is_shard(dim)]
    if free:
        even = [dim for dim in free if shape[dim] % parts == 0]
        return Shard((even or free)[0])
    if not shape:  # a single number
        return REPLICATE
    if over == 1:  # the inner mesh dim cuts what the outer leaves, which is what a second Shard says
        return Shard(0)
    pieces = mesh.size(1 - over)
    return StridedShard(0, split_factor=pieces) if shape[0] % pieces == 0 else REPLICATE


def _gather(own: dict[str, _Held], module: nn.Module, inputs: Any) -> None:
    """Lets the module see its parameters whole: an attribute of its own hides the parameter of that name."""
    for name, held in own.items():
        parameter: Any = module._parameters[name]
        local = parameter.redistribute(placements=held.gathered).to_local(grad_placements=held.gradient)
        module.__dict__[name] = local if held.inside is None else wrapped(local, held.inside)


def _release(own: dict[str, _Held], module: nn.Module, inputs: Any, outputs: Any) -> None:
    for name in own:
        module.__dict__.pop(name, None)
