"""The constants of a DeviceMesh: torch's built-in ones, or those of the measured topology in use.

torch's constants describe NCCL's low-latency ring on Ampere GPUs and guess from the shape of the mesh which
dims cross hosts, so they rarely fit the machine at hand. `use_topology` puts measured ones in their place.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.cost.ring import guessed_links
from dtbench_core.cost.topology import MeshConstants, Topology, TopologyError
from dtbench_core.runtime import clear_caches


class MeshTopoInfo(MeshConstants):
    """The constants of each dim of a mesh, made as torch's class of this name is."""

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def build_from_mesh(mesh: DeviceMesh) -> MeshTopoInfo:
        """The built-in constants, for hosts as torch guesses them. The same object for the same mesh."""
        devices_per_host = torch.get_device_module(mesh.device_type).device_count()
        bandwidths, latencies = zip(*guessed_links(mesh.shape, devices_per_host), strict=True)
        return MeshTopoInfo(mesh, tuple(mesh.shape), bandwidths, latencies)

    @staticmethod
    def from_topology(
        topology: str | Path | Mapping[str, object] | Topology, mesh: DeviceMesh
    ) -> MeshTopoInfo:
        """The measured constants of a topology file (or its content) for this mesh.

        Every dim of the mesh is looked up by name and must have been measured with as many ranks; a dim of
        one rank need not be there. A mesh may have fewer dims than the file, in any order.

        Raises:
            TopologyError: unreadable or malformed topology; a dim of the mesh that has no name, is not in it or
                has another size; or another device type.
        """
        held = topology if isinstance(topology, Topology) else Topology.load(topology)
        if held.device_type and held.device_type != mesh.device_type:
            raise TopologyError(
                f"{held.source} was measured on {held.device_type!r}, the mesh is on {mesh.device_type!r}: "
                "calibrate on the device that is used"
            )
        names = mesh.mesh_dim_names
        if names is None:
            raise TopologyError(
                f"the mesh of shape {tuple(mesh.shape)} has no dim names, expected some of "
                f"{held.held()}: pass mesh_dim_names when making the mesh"
            )
        constants = held.constants(list(zip(names, mesh.shape, strict=True)))
        return MeshTopoInfo(**vars(constants) | {"mesh": mesh})


_topology: Topology | None = None  # None: the built-in constants
_constants: dict[DeviceMesh, MeshTopoInfo] = {}  # of its meshes


class _InUse(contextlib.ExitStack):
    """What `use_topology` returns: `restore()`, or the end of a `with`, puts back what was in use before, once."""

    restore = contextlib.ExitStack.close


def use_topology(topology: str | Path | Mapping[str, object] | Topology | None) -> _InUse:
    """Prices redistributions with measured constants from now on; None means the built-in ones.

    Takes effect at once, for the whole process. Use it as a context manager, or keep what it returns and
    call `restore()`. Every rank must use the same topology: ranks that plan differently wait for each
    other forever. A mesh that the topology does not hold is priced by the built-in constants, with a
    warning.

    Raises:
        TopologyError: the topology cannot be read; nothing changes then.
    """
    loaded = topology if topology is None or isinstance(topology, Topology) else Topology.load(topology)
    undo = _InUse()
    undo.callback(_switch, _topology)
    _switch(loaded)
    return undo


def topology_of(mesh: DeviceMesh) -> MeshTopoInfo:
    """The constants that price this mesh: of the topology in use, else the built-in ones."""
    if _topology is None:
        return MeshTopoInfo.build_from_mesh(mesh)
    info = _constants.get(mesh)
    if info is None:
        try:
            info = MeshTopoInfo.from_topology(_topology, mesh)
        except TopologyError as error:
            warnings.warn(f"{error}. The built-in constants price this mesh instead.", stacklevel=2)
            info = MeshTopoInfo.build_from_mesh(mesh)
        _constants[mesh] = info
    return info


def _switch(topology: Topology | None) -> None:
    global _topology
    _topology = topology
    _constants.clear()
    clear_caches()
