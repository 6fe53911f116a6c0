"""The constants that the cost model prices a mesh with: built in, or measured and read from a file.

Bandwidths are in GiB/s (1024^3 bytes), latencies in microseconds; see cost.py for the model. The
constants built in are PyTorch's. They describe NCCL's low-latency ring on Ampere GPUs and guess from
the shape of the mesh which dims cross hosts, so they rarely fit the machine at hand. `use_topology`
puts measured constants in their place.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from dtbench_core.cost.curve import Curve, TopologyError, number
from dtbench_core.runtime import process

# The four constants of torch/distributed/tensor/_collective_utils.py (unchanged from 2.0 to 2.13). They
# are the Ring/LL entries for Ampere of NCCL's src/graph/tuning.cc: base latency 6.6 us, bandwidth cap
# 87.7, NVLink hop 0.6 us, network hop 2.7 us. 0.22 is PyTorch's ratio of network to NVLink bandwidth.
BASE_LATENCY_US = 6.6
INTRA_HOST_BANDWIDTH = 87.7  # GiB/s as the formula uses it
INTRA_HOST_LATENCY_US = 0.6
INTER_HOST_BANDWIDTH_FACTOR = 0.22
INTER_HOST_LATENCY_US = 2.7

TOPOLOGY_SCHEMA = 2

# Where the file holds no measured changes of placement: the collective that does most of each. The
# copies that put a tensor in order are not in its time.
_STANDS_FOR = {
    "all_gather": ("S(0)->R", "S(1)->R"),
    "all_reduce": ("P->R",),
    "reduce_scatter": ("P->S(0)", "P->S(1)"),
    "all_to_all": ("S(0)->S(1)", "S(1)->S(0)"),
}
# Those that send something; "R->S(0)" and "R->S(1)" are local copies.
SENDING = tuple(name for names in _STANDS_FOR.values() for name in names)


@dataclass(frozen=True)
class MeshTopoInfo:
    """The constants of each dim of a mesh. The sequences run over the mesh dims.

    mesh_dim_devices: ranks. mesh_dim_bandwidth: GiB/s. mesh_dim_latency: us per hop.
    base_latency_us: of every collective. source: where the numbers come from. mesh_dim_curves: what
    changes of placement were measured to take, by name ("S(0)->R"); where there are any, they price the
    mesh dim, and its constants only what was not measured. joint_curves: the same of all mesh dims at once.
    """

    mesh: DeviceMesh
    mesh_dim_devices: Sequence[int]
    mesh_dim_bandwidth: Sequence[float]
    mesh_dim_latency: Sequence[float]
    base_latency_us: float = BASE_LATENCY_US
    source: str = "built-in"
    mesh_dim_curves: Sequence[Mapping[str, Curve]] = ()
    joint_curves: Mapping[str, Curve] = field(default_factory=dict)

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def build_from_mesh(mesh: DeviceMesh) -> MeshTopoInfo:
        """The built-in constants, by PyTorch's rule: a dim crosses hosts once it and the dims inside it
        hold more ranks than a host has devices. The same object for the same mesh."""
        devices_per_host = torch.get_device_module(mesh.device_type).device_count()
        bandwidth = [INTRA_HOST_BANDWIDTH] * mesh.ndim
        latency = [INTRA_HOST_LATENCY_US] * mesh.ndim
        inside = 1
        for dim in reversed(range(mesh.ndim)):
            inside *= mesh.size(dim)
            if inside > devices_per_host:
                bandwidth[dim] *= INTER_HOST_BANDWIDTH_FACTOR
                latency[dim] = INTER_HOST_LATENCY_US
        return MeshTopoInfo(mesh, tuple(mesh.shape), tuple(bandwidth), tuple(latency))

    @staticmethod
    def from_topology(topology: str | Path | Mapping[str, Any], mesh: DeviceMesh) -> MeshTopoInfo:
        """The measured constants of a topology file (or its content) for this mesh.

        Every dim of the mesh is looked up by name and must have been measured with as many ranks; a dim of
        one rank need not be there. A mesh may have fewer dims than the file, in any order.

        Raises:
            TopologyError: unreadable or malformed topology, or a mesh dim that it does not hold.
        """
        return Topology.load(topology).info(mesh)


@dataclass(frozen=True)
class DimConstants:
    """What was measured on one mesh dim: GiB/s, us per hop, and times over size."""

    name: str
    ranks: int
    bandwidth: float
    latency_us: float
    curves: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class Topology:
    """A topology file, read and validated."""

    source: str
    device_type: str
    base_latency_us: float
    dims: tuple[DimConstants, ...]

    @classmethod
    def load(cls, topology: str | Path | Mapping[str, Any]) -> Topology:
        """Reads a path, or takes the content as a mapping.

        Raises:
            TopologyError: with what is wrong and where.
        """
        if isinstance(topology, Mapping):
            return cls._parse(topology, "a mapping")
        path = Path(topology)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise TopologyError(
                f"cannot read the topology {path}: {error.strerror}; give the path of a file that "
                "`dtbench calibrate` wrote"
            ) from error
        except ValueError as error:  # JSONDecodeError and UnicodeDecodeError
            raise TopologyError(
                f"{path} is not JSON ({error}); expected a topology file: write one with `dtbench calibrate`"
            ) from error
        return cls._parse(content, str(path))

    @classmethod
    def _parse(cls, content: object, source: str) -> Topology:
        if not isinstance(content, Mapping) or content.get("kind") != "topology":
            kind = content.get("kind") if isinstance(content, Mapping) else type(content).__name__
            raise TopologyError(
                f"{source}: got kind {kind!r}, expected 'topology': "
                "give a file that `dtbench calibrate` wrote"
            )
        if content.get("schema") != TOPOLOGY_SCHEMA:
            raise TopologyError(
                f"{source}: got schema {content.get('schema')!r}, expected {TOPOLOGY_SCHEMA}: "
                "read it with the version of dtbench that wrote it, or calibrate again"
            )
        dims = content.get("dims")
        if not isinstance(dims, list) or not dims:
            raise TopologyError(f"{source}: got dims {dims!r}, expected a list of mesh dims: calibrate again")
        parsed = tuple(_parse_dim(dim, f"{source}: dims[{i}]") for i, dim in enumerate(dims))
        names = [dim.name for dim in parsed]
        if len(set(names)) != len(names):
            raise TopologyError(
                f"{source}: got dims {names}, expected each name once: remove the repeated ones"
            )
        base = number(
            content.get("base_latency_us", BASE_LATENCY_US), f"{source}: base_latency_us", zero=True
        )
        return cls(source, str(content.get("device_type", "")), base, parsed)

    def info(self, mesh: DeviceMesh) -> MeshTopoInfo:
        """The constants of this mesh.

        Raises:
            TopologyError: a dim of the mesh has no name, is not in the topology, or has another size; or
                the device type is another.
        """
        if self.device_type and self.device_type != mesh.device_type:
            raise TopologyError(
                f"{self.source} was measured on {self.device_type!r}, the mesh is on {mesh.device_type!r}: "
                "calibrate on the device that is used"
            )
        names = mesh.mesh_dim_names
        if names is None:
            raise TopologyError(
                f"the mesh of shape {tuple(mesh.shape)} has no dim names, expected some of "
                f"{self._held()}: pass mesh_dim_names when making the mesh"
            )
        return self.info_of(list(zip(names, mesh.shape, strict=True)), mesh)

    def info_of(self, dims: Sequence[tuple[str, int]], mesh: DeviceMesh | None = None) -> MeshTopoInfo:
        """The constants of a mesh of these dims (name, ranks), which need not exist: for planning ahead.

        Raises:
            TopologyError: a dim that is not in the topology, or has another size.
        """
        held = {(dim.name, dim.ranks): dim for dim in self.dims}
        found = []
        for name, size in dims:
            # One rank sends nothing, so there is nothing to measure, and the file may lack the dim.
            dim = held.get((name, size), DimConstants(name, 1, math.inf, 0.0) if size == 1 else None)
            if dim is None:
                raise TopologyError(
                    f"{self.source} holds {self._held()}, not the mesh dim {name}={size}: "
                    "calibrate with this mesh, or name the dim as it was measured"
                )
            found.append(dim)
        return MeshTopoInfo(
            mesh,  # type: ignore[arg-type]
            tuple(dim.ranks for dim in found),
            tuple(dim.bandwidth for dim in found),
            tuple(dim.latency_us for dim in found),
            self.base_latency_us,
            self.source,
            tuple(dim.curves for dim in found) if any(dim.curves for dim in found) else (),
            self._together([dim for dim in found if dim.ranks > 1]),
        )

    def _together(self, dims: Sequence[DimConstants]) -> Mapping[str, Curve]:
        """The curves of all these at once, which a file holds as a dim called "dp+tp"."""
        names, ranks = sorted(dim.name for dim in dims), math.prod(dim.ranks for dim in dims)
        for dim in self.dims:
            if len(dims) > 1 and dim.ranks == ranks and sorted(dim.name.split("+")) == names:
                return dim.curves
        return {}

    def _held(self) -> str:
        return ", ".join(f"{dim.name}={dim.ranks}" for dim in self.dims)


def _parse_dim(dim: object, where: str) -> DimConstants:
    if not isinstance(dim, Mapping):
        raise TopologyError(f"{where}: got {type(dim).__name__}, expected an object: calibrate again")
    name, ranks = dim.get("name"), dim.get("ranks")
    if not isinstance(name, str) or not name:
        raise TopologyError(f"{where}.name: got {name!r}, expected the name of a mesh dim: calibrate again")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise TopologyError(f"{where}.ranks: got {ranks!r}, expected a count of at least 1: calibrate again")
    bandwidth = number(dim.get("bandwidth_GiBps"), f"{where}.bandwidth_GiBps")
    latency = number(dim.get("latency_us_per_hop"), f"{where}.latency_us_per_hop", zero=True)
    return DimConstants(name, ranks, bandwidth, latency, _parse_curves(dim, where))


def _parse_curves(dim: Mapping[str, Any], where: str) -> dict[str, Curve]:
    """By change of placement: as this library was measured, else as the bare collective was."""
    curves: dict[str, Curve] = {}
    collectives = _object(dim.get("collectives"), f"{where}.collectives")
    for collective, names in _STANDS_FOR.items():
        if collective in collectives:
            curve = Curve.parse(collectives[collective], f"{where}.collectives.{collective}")
            curves |= dict.fromkeys(names, curve)
    measured = _object(dim.get("transitions"), f"{where}.transitions")
    for name, content in _object(measured.get("core"), f"{where}.transitions.core").items():
        curves[str(name)] = Curve.parse(content, f"{where}.transitions.core.{name}")
    # A mesh dim is priced by its curves or by its constants, not by some of each: they disagree.
    return curves if curves.keys() >= set(SENDING) else {}


def _object(value: object, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TopologyError(f"{where}: got {type(value).__name__}, expected an object: calibrate again")
    return value


# --- which constants are in use --------------------------------------------------------------------

_listeners: list[Callable[[], None]] = []


class _InUse:
    """What `use_topology` returns: undo by `restore()`, or at the end of a `with`."""

    def __init__(self, previous: Topology | None) -> None:
        self._previous = previous
        self._done = False

    def restore(self) -> None:
        """Puts back what was in use before. A second call does nothing."""
        if not self._done:
            self._done = True
            _switch(self._previous)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()


def use_topology(topology: str | Path | Mapping[str, Any] | Topology | None) -> _InUse:
    """Prices redistributions with measured constants from now on; None means the built-in ones.

    Takes effect at once, for the whole process. Use it as a context manager, or keep what it returns and
    call `restore()`. Every rank must use the same topology: ranks that plan differently wait for each
    other forever. A mesh that the topology does not hold is priced by the built-in constants, with a
    warning.

    Raises:
        TopologyError: the topology cannot be read; nothing changes then.
    """
    loaded = topology if topology is None or isinstance(topology, Topology) else Topology.load(topology)
    undo = _InUse(process.topology)
    _switch(loaded)
    return undo


def topology_in_use() -> Topology | None:
    """The measured topology, or None while the built-in constants are used."""
    return process.topology


def on_topology_change(listener: Callable[[], None]) -> None:
    """Calls `listener` after every change, so that what was decided by cost can be forgotten."""
    _listeners.append(listener)


def topology_of(mesh: DeviceMesh) -> MeshTopoInfo:
    """The constants that price this mesh: of the topology in use, else the built-in ones."""
    if process.topology is None:
        return MeshTopoInfo.build_from_mesh(mesh)
    info = process.mesh_constants.get(mesh)
    if info is None:
        try:
            info = process.topology.info(mesh)
        except TopologyError as error:
            warnings.warn(f"{error}. The built-in constants price this mesh instead.", stacklevel=2)
            info = MeshTopoInfo.build_from_mesh(mesh)
        process.mesh_constants[mesh] = info
    return info


def _switch(topology: Topology | None) -> None:
    process.topology = topology
    process.mesh_constants.clear()
    process.clear_caches()
    for listener in _listeners:
        listener()
