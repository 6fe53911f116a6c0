"""Distributes plain tensors and modules over a mesh."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core import comm
from dtbench_core.errors import ArgumentError, ArgumentTypeError, in_transform
from dtbench_core.layout.mesh import MeshInfo, mesh_info, mesh_or_current
from dtbench_core.layout.placement import Placement, Placements, Shard, describe
from dtbench_core.layout.shard_layout import empty_part, part_of, with_local_stride
from dtbench_core.layout.spec import DTensorSpec, normalize, preserved_stride
from dtbench_core.layout.wrapper import wrap
from dtbench_core.op_types import Call
from dtbench_core.redistribute.movers import padded
from dtbench_core.redistribute.routes import cheapest_route, placements_of_gradient, run_route
from dtbench_core.tensor.dtensor import DTensor
from dtbench_core.tensor.in_graphs import Described
from dtbench_core.torch_compat import accept_plain_gradients, functorch_level, is_torchs_dtensor


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Distributes a global tensor over the mesh. Every rank passes a tensor of the same shape.

    Args:
        placements: one per mesh dim; all Replicate if not given. For a Partial of sum, product or bxor, the first rank
            of the mesh dim gets the values. The other ranks get 0, or 1 for product. For other reductions all ranks get
            the values.
        src_data_rank: index, within each mesh dim, of the rank whose values are used. None: every rank cuts its part
            from `tensor`, and nothing is sent.

    Returns:
        A leaf DTensor that requires grad if `tensor` does.

    Raises:
        ArgumentError: the tensor is no leaf, or a transform of torch.func runs, or it is a DTensor with another layout.
    """
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentTypeError(f"distribute_tensor got {type(tensor).__name__}, expected a torch.Tensor")
    info = mesh_info(mesh_or_current(device_mesh))
    placed = normalize(placements, tensor.ndim, info, tensor.shape)
    if isinstance(tensor, DTensor):
        if tensor._spec.info is info and tensor.placements == placed:
            return tensor
        raise ArgumentError(
            f"distribute_tensor got a DTensor, {tensor._spec}, to be placed as {describe(placed)} on {info}; expected "
            "a plain tensor: use tensor.redistribute(placements=...)"
        )
    if functorch_level() is not None:
        raise in_transform("distribute_tensor", tensor.shape)
    if is_torchs_dtensor(tensor) or not tensor.is_leaf:
        raise _refusal(tensor)
    local = tensor.detach()
    if local.is_neg() or local.is_conj():  # its memory does not contain the values of the tensor
        local = local.resolve_conj().resolve_neg()
    if local.device.type not in (info.device_type, "meta"):
        local = local.to(info.device_type)
    values = placements_of_gradient(placed)  # Replicate in place of Partial
    stride = preserved_stride(tuple(tensor.shape), tensor.stride())
    spec = DTensorSpec.of(info, values, tensor.shape, stride, tensor.dtype)
    if info.coordinate is None:
        part = empty_part(spec, local.device)
    elif src_data_rank is None or local.is_meta:
        part = part_of(local, spec)
        part = with_local_stride(part, spec) if part is local else part
    else:
        part = _sent(local, info, values, src_data_rank)
        part = part if spec.row_major else with_local_stride(part, spec)
    if values != placed:
        part, spec = run_route(part, cheapest_route(spec, placed)), spec.with_placements(placed)
    return wrap(DTensor, part, spec, tensor.requires_grad)


def _refusal(tensor: torch.Tensor) -> ArgumentError:
    if is_torchs_dtensor(tensor):
        return ArgumentError(
            "distribute_tensor got a DTensor of torch.distributed.tensor, expected a plain tensor: use "
            "from_torch(tensor).redistribute(placements=...)"
        )
    return ArgumentError(
        "distribute_tensor got the result of a computation under autograd, expected a leaf tensor: use "
        "DTensor.from_local, which is differentiable, or detach() it"
    )


def _sent(full: torch.Tensor, info: MeshInfo, placements: Placements, src: int) -> torch.Tensor:
    """Returns this rank's contiguous part of rank `src`'s tensor. It is sent along each mesh dim, outermost first."""
    local = full
    for mesh_dim, placement in enumerate(placements):
        group, index, parts = info.groups[mesh_dim], info.my_coordinate()[mesh_dim], info.sizes[mesh_dim]
        if isinstance(placement, Shard):
            local = _scattered(
                [placement.part(local, parts, rank) for rank in range(parts)],
                placement.dim,
                group,
                index,
                src,
            )
        else:
            if local is full:
                local = local.clone(memory_format=torch.contiguous_format)
            comm.broadcast(local, group, src)
    return local


def _scattered(parts: Sequence[torch.Tensor], dim: int, group: Any, index: int, src: int) -> torch.Tensor:
    """Returns part `index` of the source rank's parts. Parts are sent padded, since a scatter needs equal shapes."""
    lengths = [part.size(dim) for part in parts]
    max_length = max(lengths)
    shape = (*parts[0].shape[:dim], max_length, *parts[0].shape[dim + 1 :])
    if 0 in shape:
        return parts[index].clone(memory_format=torch.contiguous_format)
    output = parts[0].new_empty(shape)
    sent = [padded(part, dim, max_length) for part in parts] if index == src else None
    comm.scatter(output, sent, group, src)
    return output if lengths[index] == max_length else output.narrow(dim, 0, lengths[index]).contiguous()


def distribute_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Call | None = None,
    output_fn: Call | None = None,
) -> nn.Module:
    """Makes a module's parameters and buffers DTensors, in place, and converts its inputs and outputs.

    Args:
        partition_fn: called with (fully qualified name, submodule, mesh) for every submodule, to replace parameters.
            Parameters and buffers that are still plain afterwards are replicated.
        input_fn: called before forward with (module, inputs, mesh), or (inputs, mesh) if it takes two arguments. The
            result replaces the inputs.
        output_fn: called after forward with (module, outputs, mesh), or (outputs, mesh) if it takes two arguments. The
            result replaces the outputs.

    Returns:
        The same module.

    Raises:
        ArgumentError: `input_fn` or `output_fn` takes neither two nor three arguments.
    """
    mesh = mesh_or_current(device_mesh)
    convert_input = _with_three_arguments("input_fn", input_fn)
    convert_output = _with_three_arguments("output_fn", output_fn)
    for name, part in module.named_modules():
        if partition_fn is not None:
            partition_fn(name, part, mesh)
        _replicate_plain(part, mesh)
    if convert_input is not None:
        module.register_forward_pre_hook(partial(_convert_inputs, convert_input, mesh))
    if convert_output is not None:
        module.register_forward_hook(partial(_convert_outputs, convert_output, mesh))
    return module


# Hooks are module-level functions so that a parallelized module can be pickled.


def _convert_inputs(convert: Call, mesh: DeviceMesh, module: nn.Module, inputs: Any) -> Any:
    return convert(module, inputs, mesh)


def _convert_outputs(convert: Call, mesh: DeviceMesh, module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return convert(module, outputs, mesh)


def without_module(function: Call, module: nn.Module, values: Any, mesh: DeviceMesh) -> Any:
    """Calls `function(values, mesh)`. With `partial`, it makes a function of (module, values, mesh)."""
    return function(values, mesh)


def _with_three_arguments(name: str, function: Call | None) -> Call | None:
    """Returns `function` as a function of (module, inputs or outputs, mesh)."""
    if function is None:
        return None
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C without a signature
        return function
    for count in (3, 2):
        with contextlib.suppress(TypeError):
            signature.bind(*range(count))
            return function if count == 3 else partial(without_module, function)
    raise ArgumentError(
        f"distribute_module got {name}{signature}, expected a function of (module, {name[:-3]}s, mesh) or "
        f"({name[:-3]}s, mesh)"
    )


def _replicate_plain(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        if not isinstance(parameter, DTensor):
            replicated = nn.Parameter(distribute_tensor(parameter.detach(), mesh), parameter.requires_grad)
            module.register_parameter(name, replicated)
    for name, buffer in list(module.named_buffers(recurse=False)):
        if not isinstance(buffer, DTensor):
            setattr(module, name, distribute_tensor(buffer, mesh))


def _placed_gradient(grad: torch.Tensor, described: Described) -> DTensor:
    """Returns a global gradient as a DTensor with the placements of the graph's result. Nothing is sent."""
    spec, *_ = described
    return distribute_tensor(grad, spec.info.mesh, spec.placements, src_data_rank=None)


accept_plain_gradients(DTensor, _placed_gradient)
