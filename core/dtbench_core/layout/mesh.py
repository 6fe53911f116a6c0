"""What the hot path needs to know of a torch DeviceMesh, looked up once per mesh.

The mesh itself is torch's. `MeshInfo` holds its sizes, this rank's coordinate and its process
groups in plain tuples, because DeviceMesh answers each of these through Python in microseconds.
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
    """One per mesh of a live world; equal meshes on the same process groups share it.

    Compared by identity.

    Attributes:
        coordinate: None on a rank outside the mesh.
        groups: of each mesh dim, its ranks in the order of their coordinates.
        whole: the process group of all ranks of the mesh in row-major order, where the mesh is the whole world; else
            None.
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
        "whole",
    )

    def __init__(self, mesh: DeviceMesh, groups: tuple[dist.ProcessGroup, ...]) -> None:
        self.mesh = mesh
        self.groups = tuple(_by_coordinate(mesh, dim, group) for dim, group in enumerate(groups))
        self.ndim: int = mesh.ndim
        self.sizes: tuple[int, ...] = tuple(mesh.shape)
        coordinate = mesh.get_coordinate()
        self.coordinate: tuple[int, ...] | None = None if coordinate is None else tuple(coordinate)
        self.device_type: str = mesh.device_type
        self.whole = _world_of(mesh) if groups else None
        self.output_lengths: dict[tuple[int, int], tuple[int, int]] = {}
        self.known_lengths: weakref.WeakKeyDictionary[object, dict[tuple[object, int, int], int]] = (
            weakref.WeakKeyDictionary()
        )

    def my_coordinate(self) -> tuple[int, ...]:
        """This rank's coordinate.

        Raises:
            MeshError: this rank is not part of the mesh.
        """
        if self.coordinate is None:
            raise MeshError(
                f"rank {dist.get_rank()} is not in the mesh {self.mesh}: got an op on a rank outside it, "
                "expected only its members; guard the call with `mesh.get_coordinate() is not None`"
            )
        return self.coordinate

    def __deepcopy__(self, memo: object) -> MeshInfo:
        return self  # a mesh is where ranks meet: a copy would be the same place

    def __repr__(self) -> str:
        names = self.mesh.mesh_dim_names
        return f"{'x'.join(map(str, self.sizes))} {self.device_type} mesh" + (f" {names}" if names else "")


@dataclass(slots=True, eq=False)
class MeshTables:
    """What a rank knows of meshes, by object, and by value with the process groups of their dims."""

    by_object: dict[int, tuple[weakref.ref[DeviceMesh], MeshInfo]] = field(default_factory=dict)
    by_value: dict[tuple[DeviceMesh, tuple[dist.ProcessGroup, ...]], MeshInfo] = field(default_factory=dict)


mesh_tables: PerRank[MeshTables] = PerRank("layout.meshes", MeshTables)
_tables = mesh_tables.get


def mesh_or_current(mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh given, or the one of the enclosing `with mesh:`.

    Raises:
        MeshError: neither.
    """
    if mesh is not None:
        return mesh
    try:
        return current_mesh()
    except RuntimeError as error:
        raise MeshError(
            "got no device_mesh and no mesh is current, expected one of them: pass device_mesh=, or call it inside "
            "`with mesh:`"
        ) from error


def _world_of(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The world's process group, if its ranks are the mesh's in the same order.

    Depends on the mesh alone, so that all ranks agree. A group that the user made with `_flatten` would
    do as well, but a rank may have planned before it was made.
    """
    world = dist.group.WORLD
    is_whole = world is not None and ranks_of_mesh(mesh) == list(range(world.size()))
    return world if is_whole else None


def _by_coordinate(mesh: DeviceMesh, dim: int, group: dist.ProcessGroup) -> comm.Group:
    """The group of a mesh dim, whose own order is that of the ranks' numbers."""
    ranks = dist.distributed_c10d.get_process_group_ranks(group)  # which simulated ranks answer
    line = next((line for line in mesh_dim_groups(mesh, dim) if set(line) == set(ranks)), ranks)
    return group if list(line) == ranks else comm.OrderedGroup(group, [ranks.index(rank) for rank in line])


def mesh_info(mesh: DeviceMesh) -> MeshInfo:
    """The shared `MeshInfo` of `mesh`.

    Looked up by object, which is what every call pays, then by value, so that `mesh["tp"]` taken twice is one
    mesh. A world that was destroyed and made again compares equal to its successor: the process groups tell
    them apart.
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

    table = _tables().by_object  # held by `forget`: at interpreter exit globals are gone before the meshes

    def forget(_: object) -> None:
        table.pop(key, None)

    table[key] = (weakref.ref(mesh, forget), info)
    return info
