"""The mesh dim that tensor parallelism uses, as a mesh of its own."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import MeshError
from dtbench_core.layout.mesh import mesh_info


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
