"""Constants in use for a DeviceMesh: torch's built-in ones, or those of a measured topology.

torch's constants describe NCCL's low-latency ring on Ampere GPUs. torch also guesses from the shape of the mesh which
dims cross hosts. Both rarely fit the actual machine; `use_topology` replaces them with measurements.
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
    """The constants of each dim of a mesh, with the constructors of torch's class of the same name."""

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def build_from_mesh(mesh: DeviceMesh) -> MeshTopoInfo:
        """Returns the built-in constants, with torch's guess of the hosts. Cached per mesh."""
        bandwidths, latencies = zip(
            *guessed_links(mesh.shape, torch.get_device_module(mesh.device_type).device_count()), strict=True
        )
        return MeshTopoInfo(mesh, tuple(mesh.shape), bandwidths, latencies)

    @staticmethod
    def from_topology(
        topology: str | Path | Mapping[str, object] | Topology, mesh: DeviceMesh
    ) -> MeshTopoInfo:
        """Returns the constants that a topology file (or its content) holds for this mesh.

        Every dim of the mesh must be in the topology under the same name and with the same number of ranks. A dim of
        one rank may be missing. The mesh may have fewer dims than the topology, in any order.

        Raises:
            TopologyError: the topology cannot be read or is malformed; a dim of the mesh has no name, is missing or has
                another size; or the device types differ.
        """
        measured = topology if isinstance(topology, Topology) else Topology.load(topology)
        if measured.device_type and measured.device_type != mesh.device_type:
            raise TopologyError(
                f"{measured.source} was measured on {measured.device_type!r}, but the mesh is on "
                f"{mesh.device_type!r}: calibrate on the device that you use"
            )
        if (names := mesh.mesh_dim_names) is None:
            raise TopologyError(
                f"the mesh of shape {tuple(mesh.shape)} has no dim names, expected some of "
                f"{measured.describe_dims()}: pass mesh_dim_names when you create the mesh"
            )
        constants = measured.constants(list(zip(names, mesh.shape, strict=True)))
        return MeshTopoInfo(**vars(constants) | {"mesh": mesh})


_topology: Topology | None = None  # None: the built-in constants
_constants: dict[DeviceMesh, MeshTopoInfo] = {}  # by mesh, for the topology in use


class _InUse(contextlib.ExitStack):
    """Result of `use_topology`: `restore()`, or the end of a `with`, restores the previous topology once."""

    restore = contextlib.ExitStack.close


def use_topology(topology: str | Path | Mapping[str, object] | Topology | None) -> _InUse:
    """Prices redistributions with measured constants from now on; None selects the built-in constants.

    It takes effect at once, for the whole process. Use it as a context manager, or store the result and call
    `restore()`. Every rank must use the same topology: ranks that choose different routes wait for each other forever.
    A mesh that is not in the topology is priced by the built-in constants, with a warning.

    Raises:
        TopologyError: the topology cannot be read. Nothing changes then.
    """
    loaded = topology if topology is None or isinstance(topology, Topology) else Topology.load(topology)
    undo = _InUse()
    undo.callback(_switch, _topology)
    _switch(loaded)
    return undo


def topology_of(mesh: DeviceMesh) -> MeshTopoInfo:
    """Returns the constants that price this mesh: those of the topology in use, or the built-in ones."""
    if _topology is None:
        return MeshTopoInfo.build_from_mesh(mesh)
    if (info := _constants.get(mesh)) is None:
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
