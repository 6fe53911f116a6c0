"""Shared parts of the styles: errors, the mesh dim to shard over, and sharding of parameters, including tied ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from dtbench_core.errors import ArgumentError, CoreError, MeshError
from dtbench_core.layout.mesh import mesh_info
from dtbench_core.layout.placement import Placement
from dtbench_core.tensor.distribute import distribute_tensor
from dtbench_core.tensor.dtensor import DTensor

# ---- errors: each is a CoreError, and of the built-in type that torch raises ----


class PlanError(CoreError, TypeError, RuntimeError):
    """A plan that is neither a style nor a mapping of names to styles."""


class UnsupportedModuleError(CoreError, NotImplementedError):
    """A module that a style cannot shard. It is a RuntimeError too, as every NotImplementedError."""


class LayoutsError(ArgumentError, AssertionError):
    """Layouts that do not correspond one to one to the inputs or outputs of a module."""


class UnsupportedStyleError(CoreError, NotImplementedError):
    """A style that the called function does not support."""


# ---- the mesh dim, as a mesh of its own ----


def mesh_of_dim(mesh: DeviceMesh, dim: int | str) -> DeviceMesh:
    """Returns the 1-D mesh along `dim` that contains this rank; `mesh` itself if it has one dim.

    Args:
        dim: index or name of a mesh dim.

    Raises:
        MeshError: there is no such dim, or the mesh cannot be sliced.
    """
    index = dim_index(mesh, dim)
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names:
        return mesh[mesh.mesh_dim_names[index]]
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"got the {mesh_info(mesh)}, which does not contain this rank and whose dims have no names, expected a "
            "mesh that can be sliced: pass mesh_dim_names to init_device_mesh"
        )
    return DeviceMesh.from_group(mesh.get_group(index), mesh.device_type)


def dim_index(mesh: DeviceMesh, dim: int | str) -> int:
    """Returns the index, from 0, of a mesh dim given by index or name.

    Raises:
        MeshError: there is no such dim.
    """
    mesh_info(mesh)  # raises if it is not a mesh
    names = mesh.mesh_dim_names
    if isinstance(dim, str) and names and dim in names:
        return names.index(dim)
    if isinstance(dim, int) and not isinstance(dim, bool) and -mesh.ndim <= dim < mesh.ndim:
        return dim % mesh.ndim
    choices = f"one of its names {names} or " if names else ""
    raise MeshError(
        f"got the mesh dim {dim!r} of the {mesh_info(mesh)}, expected {choices}an index in "
        f"[{-mesh.ndim}, {mesh.ndim}): name the dim to use"
    )


# Original parameter -> the parameter that replaced it, so that tied parameters stay tied. An entry lives as long as
# some module holds the original.
_placed_parameters: Any = WeakIdKeyDictionary()


def formerly_tied_parameters(module: nn.Module) -> list[str]:
    """Returns the names of parameters that were tied to a parameter now sharded, and that no style has replaced."""
    return [name for name, parameter in module.named_parameters() if parameter in _placed_parameters]


def check_parameters(style: str, module: nn.Module, names: Iterable[str]) -> None:
    """Raises an error for parameters that are computed, not yet initialised, or already DTensors."""
    kind = type(module).__name__
    for name in names:
        parameter = module._parameters.get(name)
        if name not in module._parameters or isinstance(parameter, UninitializedParameter):
            raise UnsupportedModuleError(
                f"{style} got a {kind} whose {name} is computed or not made yet, expected a parameter: "
                "initialise lazy modules, and remove parametrizations, before parallelizing"
            )
        if isinstance(parameter, DTensor):
            raise ArgumentError(
                f"{style} got a {kind} whose {name} is a DTensor already ({parameter._spec}), expected a plain "
                "parameter: parallelize a module once; two keys of the plan may match it"
            )


def place_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, src_data_rank: int | None
) -> None:
    """Replaces a module's parameter, if it has one of this name, by a DTensor."""
    if (original := module._parameters.get(name)) is None:
        return
    info = mesh_info(mesh)
    replacement: nn.Parameter | None = _placed_parameters.get(original)
    if replacement is None:
        replacement = _placed_parameters[original] = nn.Parameter(
            distribute_tensor(original.detach(), mesh, [placement], src_data_rank=src_data_rank),
            requires_grad=original.requires_grad,
        )
    elif (
        not isinstance(replacement, DTensor)
        or replacement._spec.info is not info
        or replacement.placements != (placement,)
    ):
        raise ArgumentError(
            f"the {name} of a {type(module).__name__} is tied to a parameter already placed as "
            f"{getattr(replacement, '_spec', replacement)}, expected {placement} on {info}: give both modules "
            "styles that shard it in the same way, or untie them"
        )
    module.register_parameter(name, replacement)
