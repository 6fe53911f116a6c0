"""Which ranks meet in a collective when only one process stands for all of them.

The process is one rank of a fake world, and has just that rank's groups. But a group of a DeviceMesh
dim is one of several that lie side by side (its fibres): in the mesh [[0, 1], [2, 3]] the groups of the
inner dim are 0-1 and 2-3, and a call on the one is, on the other ranks, a call on the other.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.errors import SimulationError
from dtbench_core.simulate.group import name_ranks
from dtbench_core.torch_compat import mesh_dim_groups, mesh_group_names

Fibres = tuple[tuple[int, ...], ...]


_dims: weakref.WeakKeyDictionary[DeviceMesh, dict[int, Fibres]] = weakref.WeakKeyDictionary()


def fibres_of_dim(mesh: DeviceMesh, dim: int) -> Fibres:
    """The ranks of every group along `dim` of `mesh`, or of its siblings where it is a slice."""
    fibres = _dims.setdefault(mesh, {})
    if dim not in fibres:
        fibres[dim] = mesh_dim_groups(mesh, dim)
    return fibres[dim]


def coordinate_of(mesh: DeviceMesh, rank: int) -> tuple[int, ...] | None:
    """Where `rank` stands in `mesh`, or in the sibling of it that holds `rank`; None outside."""
    fibres = [next((f for f in fibres_of_dim(mesh, d) if rank in f), None) for d in range(mesh.ndim)]
    return None if None in fibres else tuple(f.index(rank) for f in fibres if f is not None)


# As declared, or as their meshes say.
_groups: weakref.WeakKeyDictionary[ProcessGroup, Fibres] = weakref.WeakKeyDictionary()


def declare_group(group: ProcessGroup, fibres: Sequence[Sequence[int]]) -> None:
    """Declares which ranks call a collective on `group`, or on their own counterpart of it.

    Needed only for groups made by hand: those of a DeviceMesh are known.

    Args:
        fibres: the global ranks of each group, in group order; one of them is `group`'s own. Ranks in
            none of them take no part.

    Raises:
        SimulationError: `group`'s own ranks are not among them.
    """
    listed = tuple(tuple(ranks) for ranks in fibres)
    own = tuple(dist.get_process_group_ranks(group))
    if own not in listed:
        raise SimulationError(
            f"declare_group got {list(map(list, listed))} for the group of {name_ranks(own)}, expected the ranks of "
            "all groups, this one's among them"
        )
    _groups[group] = listed


def fibres_of_group(group: ProcessGroup) -> Fibres:
    """The groups that meet in a collective on `group`."""
    if group not in _groups:
        _groups[group] = _fibres_by_mesh(group)
    return _groups[group]


def _fibres_by_mesh(group: ProcessGroup) -> Fibres:
    own = tuple(dist.get_process_group_ranks(group))
    if not group.group_desc.startswith("mesh"):
        return (own,)
    # A group does not know its mesh. Looking through all objects is slow, and done once per group.
    for mesh in gc.get_objects():
        if issubclass(type(mesh), DeviceMesh):  # isinstance would read attributes of any object
            for dim, name in enumerate(mesh_group_names(mesh)):
                if name == group.group_name:
                    fibres = fibres_of_dim(mesh, dim)
                    # A mesh of a destroyed world may have used the same name for other ranks.
                    is_own = any(set(own) == set(fibre) for fibre in fibres)
                    if is_own and max(map(max, fibres)) < dist.get_world_size():
                        return tuple(tuple(sorted(fibre)) for fibre in fibres)  # as torch makes groups
    return (own,)
