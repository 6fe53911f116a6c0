"""What the styles of tensor parallelism share: errors, the mesh dim that they use, and parameters in their places: the
checks before, the cutting, and ties between modules."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import UninitializedParameter
from torch.utils.weak import WeakIdKeyDictionary

from dtbench_core.errors import ArgumentError, CoreError, MeshError
from dtbench_core.layout.mesh import MeshInfo, mesh_info
from dtbench_core.layout.placement import Placement
from dtbench_core.tensor.distribute import distribute_tensor
from dtbench_core.tensor.dtensor import DTensor

# ---- errors: each is of the core's tree and of the built-in type that torch raises ----


class PlanError(CoreError, TypeError, RuntimeError):
    """A plan that is neither a style nor a mapping of names to styles."""


class UnsupportedModuleError(CoreError, NotImplementedError):
    """A module that a style does not know how to shard. A RuntimeError, as every NotImplementedError is."""


class LayoutsError(ArgumentError, AssertionError):
    """Layouts that do not match the inputs or outputs of a module one to one."""


class UnsupportedStyleError(CoreError, NotImplementedError):
    """A style that the function at hand does not take."""


# ---- the mesh dim, as a mesh of its own ----


def mesh_of_dim(mesh: DeviceMesh, dim: int | str) -> DeviceMesh:
    """The 1-D mesh of this rank's peers along `dim`, an index or a name; `mesh` itself if it has one dim.

    Raises:
        MeshError: there is no such dim.
    """
    index = dim_index(mesh, dim)
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names:
        return mesh[mesh.mesh_dim_names[index]]
    if mesh.get_coordinate() is None:
        raise MeshError(
            f"got the {mesh_info(mesh)}, of which this rank is no member and whose dims have no names, expected a "
            "mesh that can be sliced here: give init_device_mesh mesh_dim_names"
        )
    return DeviceMesh.from_group(mesh.get_group(index), mesh.device_type)


def dim_index(mesh: DeviceMesh, dim: int | str) -> int:
    """The index, from 0, of a mesh dim given by index or name. Errors as for `mesh_of_dim`."""
    mesh_info(mesh)  # refuses what is no mesh
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


# Original parameter -> what it became, so that tied parameters stay tied. It lives while any module
# still holds the original.
_became: Any = WeakIdKeyDictionary()


def left_behind(module: nn.Module) -> list[str]:
    """Names of parameters that were tied to one now sharded, and that no style has reached."""
    return [name for name, parameter in module.named_parameters() if parameter in _became]


def check_parameters(style: str, module: nn.Module, names: Iterable[str]) -> None:
    """Refuses parameters that are computed, not made yet, or DTensors already."""
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
    """Puts the DTensor of a module's own parameter, if it has one, in its place."""
    original = module._parameters.get(name)
    if original is None:
        return
    info: MeshInfo = mesh_info(mesh)
    placed: nn.Parameter | None = _became.get(original)
    if placed is None:
        spread = distribute_tensor(original.detach(), mesh, [placement], src_data_rank=src_data_rank)
        placed = _became[original] = nn.Parameter(spread, requires_grad=original.requires_grad)
    elif (
        not isinstance(placed, DTensor) or placed._spec.info is not info or placed.placements != (placement,)
    ):
        raise ArgumentError(
            f"the {name} of a {type(module).__name__} is tied to one already placed as "
            f"{getattr(placed, '_spec', placed)}, expected {placement} on {info}: give both modules styles that shard "
            "it alike, or untie them"
        )
    module.register_parameter(name, placed)
