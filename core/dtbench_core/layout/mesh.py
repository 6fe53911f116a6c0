"""Properties of a torch DeviceMesh that every op needs, computed once per mesh.

A DeviceMesh takes microseconds to return its sizes, this rank's coordinate or its process groups. A `MeshInfo` stores
them in plain tuples.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core import comm
from dtbench_core.errors import MeshError
from dtbench_core.runtime import PerRank
from dtbench_core.torch_compat import current_mesh, mesh_dim_groups, ranks_of_mesh, real_object


class MeshInfo:
    """Properties of one mesh. Equal meshes on the same process groups share one `MeshInfo`, compared by identity.

    Attributes:
        coordinate: this rank's coordinate; None on a rank outside the mesh.
        groups: this rank's process group along each mesh dim, with its ranks in the order of their coordinates.
        world_group: the default process group, if the mesh has exactly its ranks, in row-major order; else None.
        output_lengths, known_lengths: see Note [Lengths of plain parts] in parallel/convert.py.
    """

    __slots__ = (
        "__weakref__",
        "coordinate",
        "device_type",
        "groups",
        "known_lengths",
        "mesh",
        "ndim",
        "output_lengths",
        "sizes",
        "world_group",
    )

    def __init__(self, mesh: DeviceMesh, groups: tuple[dist.ProcessGroup, ...]) -> None:
        self.mesh = mesh
        self.groups = tuple(_by_coordinate(mesh, dim, group) for dim, group in enumerate(groups))
        self.ndim: int = mesh.ndim
        self.sizes: tuple[int, ...] = tuple(mesh.shape)
        coordinate = mesh.get_coordinate()
        self.coordinate: tuple[int, ...] | None = None if coordinate is None else tuple(coordinate)
        self.device_type: str = mesh.device_type
        self.world_group = _world_group(mesh) if groups else None
        self.output_lengths: dict[tuple[int, int], tuple[int, int]] = {}
        self.known_lengths: weakref.WeakKeyDictionary[object, dict[tuple[object, int, int], int]] = (
            weakref.WeakKeyDictionary()
        )

    def my_coordinate(self) -> tuple[int, ...]:
        """Returns this rank's coordinate.

        Raises:
            MeshError: this rank is not part of the mesh.
        """
        if self.coordinate is None:
            raise MeshError(
                f"rank {dist.get_rank()} is not in the mesh {self.mesh}: got an op on a rank outside it, "
                "expected only ranks in it; guard the call with `mesh.get_coordinate() is not None`"
            )
        return self.coordinate

    def __deepcopy__(self, memo: object) -> MeshInfo:
        return self  # a copy would have the same process groups

    def __repr__(self) -> str:
        names = self.mesh.mesh_dim_names
        return f"{'x'.join(map(str, self.sizes))} {self.device_type} mesh" + (f" {names}" if names else "")


@dataclass(slots=True, eq=False)
class MeshTables:
    """The `MeshInfo` objects of one rank.

    Attributes:
        by_object: by id of the DeviceMesh, with a weak reference to it.
        by_value: by the DeviceMesh and the process groups of its dims.
    """

    by_object: dict[int, tuple[weakref.ref[DeviceMesh], MeshInfo]] = field(default_factory=dict)
    by_value: dict[tuple[DeviceMesh, tuple[dist.ProcessGroup, ...]], MeshInfo] = field(default_factory=dict)


mesh_tables: PerRank[MeshTables] = PerRank("layout.meshes", MeshTables)
_tables = mesh_tables.get


def mesh_or_current(mesh: DeviceMesh | None) -> DeviceMesh:
    """Returns `mesh`, or the mesh of the enclosing `with mesh:`.

    Raises:
        MeshError: there is neither.
    """
    if mesh is not None:
        return mesh
    try:
        return current_mesh()
    except RuntimeError as error:
        raise MeshError(
            "got no device_mesh, and there is no current mesh: pass device_mesh=, or call it inside `with mesh:`"
        ) from error


def _world_group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """Returns the default process group if it has the ranks of the mesh in the same order, else None.

    A group that the user made with `_flatten` is not used. One rank may have made plans before the group existed,
    and another rank after.
    """
    world = dist.group.WORLD
    return world if world is not None and ranks_of_mesh(mesh) == list(range(world.size())) else None


def _by_coordinate(mesh: DeviceMesh, dim: int, group: dist.ProcessGroup) -> comm.Group:
    """Returns the group of a mesh dim with its ranks ordered by coordinate instead of by rank number."""
    ranks = dist.distributed_c10d.get_process_group_ranks(group)  # simulated ranks override this function
    line = next((line for line in mesh_dim_groups(mesh, dim) if set(line) == set(ranks)), ranks)
    return group if list(line) == ranks else comm.OrderedGroup(group, [ranks.index(rank) for rank in line])


def mesh_info(mesh: DeviceMesh) -> MeshInfo:
    """Returns the shared `MeshInfo` of `mesh`.

    Lookup by object is fast. If it fails, lookup by value lets two slices `mesh["tp"]` share one `MeshInfo`. The value
    includes the process groups, since a mesh made again after destroy_process_group equals the earlier one.
    """
    entry = _tables().by_object.get(id(mesh))
    if entry is not None and entry[0]() is mesh:
        return entry[1]
    if not isinstance(mesh, DeviceMesh):
        raise MeshError(
            f"got {type(mesh).__name__} as device_mesh, expected a torch DeviceMesh: make one with "
            "torch.distributed.device_mesh.init_device_mesh(device_type, shape)"
        )
    mesh = real_object(mesh)
    groups = tuple(mesh.get_all_groups()) if mesh.get_coordinate() is not None else ()
    by_value = _tables().by_value
    if (info := by_value.get((mesh, groups))) is None:
        info = by_value[mesh, groups] = MeshInfo(mesh, groups)
    key = id(mesh)

    # A local variable, since at interpreter exit globals are deleted before the meshes.
    table = _tables().by_object

    def forget(_: object) -> None:
        table.pop(key, None)

    table[key] = (weakref.ref(mesh, forget), info)
    return info
