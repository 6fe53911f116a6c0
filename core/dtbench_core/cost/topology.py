"""The constants that the cost model prices a mesh with, and the topology file that measured ones come from.

Bandwidths are in GiB/s (1024^3 bytes), latencies in microseconds. No torch: a topology is read and priced
where there is none. What reads a DeviceMesh is in mesh_topology.py.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dtbench_core.cost.curve import Curve
from dtbench_core.cost.ring import BASE_LATENCY_US, RingLink
from dtbench_core.errors import CoreError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TOPOLOGY_SCHEMA = 1


class TopologyError(CoreError, ValueError):
    """A topology that cannot be read, or that says nothing about the mesh asked for."""


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


def parts_of_tensor(collective: str, ranks: int) -> int:
    """How many buffers of the size that nccl-tests prints make up the tensor whose placement a collective changes.

    The size is that of the whole tensor, but for an all-to-all: there it is the buffer of one rank
    (AlltoAllGetCollByteCount in its src/alltoall.cu).
    """
    return ranks if collective == "all_to_all" else 1


def curves_of_changes(collectives: Mapping[str, Curve], ranks: int) -> dict[str, Curve]:
    """Curves by change of placement, made of those of bare collectives.

    Args:
        collectives: by name, over the bytes that nccl-tests counts.

    Returns:
        By change, over the bytes of the whole tensor as one group holds it.
    """
    return {
        change: Curve(tuple(size * parts_of_tensor(name, ranks) for size in curve.sizes), curve.times_us)
        for name, curve in collectives.items()
        for change in _STANDS_FOR.get(name, ())
    }


@dataclass(frozen=True)
class MeshConstants:
    """The constants of each dim of a mesh. The sequences run over the mesh dims.

    Attributes:
        mesh: None when planning for ranks that need not exist.
        mesh_dim_devices: ranks.
        mesh_dim_bandwidth: GiB/s.
        mesh_dim_latency: us per hop.
        base_latency_us: of every collective.
        source: where the numbers come from.
        mesh_dim_curves: the measured time of each change of placement, by name ("S(0)->R"), over the bytes of the
            whole tensor as one group of the mesh dim holds it, whatever the change. Where there are any, they price
            the mesh dim, and its constants only what was not measured.
        joint_curves: the same for all mesh dims at once.
    """

    mesh: DeviceMesh | None
    mesh_dim_devices: Sequence[int]
    mesh_dim_bandwidth: Sequence[float]
    mesh_dim_latency: Sequence[float]
    base_latency_us: float = BASE_LATENCY_US
    source: str = "built-in"
    mesh_dim_curves: Sequence[Mapping[str, Curve]] = ()
    joint_curves: Mapping[str, Curve] = field(default_factory=dict)

    @staticmethod
    def of_links(ranks: Sequence[int], links: Sequence[RingLink], source: str = "built-in") -> MeshConstants:
        """Mesh dims of so many ranks, joined by these."""
        bandwidths, latencies = zip(*links, strict=True)
        return MeshConstants(None, tuple(ranks), bandwidths, latencies, source=source)


@dataclass(frozen=True)
class DimConstants:
    """The measurements of one mesh dim.

    Attributes:
        bandwidth: GiB/s.
        latency_us: per hop.
        curves: time by change of placement ("S(0)->R"), over the bytes of the whole tensor as one group holds it.
    """

    name: str
    ranks: int
    bandwidth: float
    latency_us: float
    curves: Mapping[str, Curve] = field(default_factory=dict)

    @classmethod
    def of_times(
        cls,
        name: str,
        ranks: int,
        bandwidth: float,
        latency_us: float,
        *,
        collectives: Mapping[str, Curve],
        changes: Mapping[str, Curve],
    ) -> DimConstants:
        """A mesh dim with curves by change of placement: as the changes were measured, else as the bare collective
        was. A dim is priced by its curves or by its constants, not by some of each, as they disagree.

        Args:
            collectives: over the bytes that nccl-tests counts (`parts_of_tensor`).
            changes: over the bytes of the whole tensor.
        """
        curves = curves_of_changes(collectives, ranks) | dict(changes)
        return cls(name, ranks, bandwidth, latency_us, curves if curves.keys() >= set(SENDING) else {})


@dataclass(frozen=True)
class Topology:
    """A topology file, read and validated."""

    source: str
    device_type: str
    base_latency_us: float
    dims: tuple[DimConstants, ...]

    @classmethod
    def load(cls, topology: str | Path | Mapping[str, object]) -> Topology:
        """Reads a path, or takes the content as a mapping.

        Raises:
            TopologyError: with what is wrong and where.
        """
        if isinstance(topology, Mapping):
            return cls._parse(topology, "a mapping")
        path = Path(topology)
        if path.exists() and not path.is_file():  # a pipe would be waited on for ever
            raise TopologyError(f"{path} is not a regular file; expected one that `dtbench calibrate` wrote")
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
        base = _number(
            content.get("base_latency_us", BASE_LATENCY_US), f"{source}: base_latency_us", zero=True
        )
        return cls(source, str(content.get("device_type", "")), base, parsed)

    def constants(self, dims: Sequence[tuple[str, int]]) -> MeshConstants:
        """The constants of a mesh of these dims (name, ranks), which need not exist: for planning ahead.

        Raises:
            TopologyError: a dim that is not in the topology, or has another size.
        """
        held = {(dim.name, dim.ranks): dim for dim in self.dims}
        known_dims = []
        for name, size in dims:
            # One rank sends nothing, so there is nothing to measure, and the file may lack the dim.
            dim = held.get((name, size), DimConstants(name, 1, math.inf, 0.0) if size == 1 else None)
            if dim is None:
                raise TopologyError(
                    f"{self.source} holds {self.held()}, not the mesh dim {name}={size}: "
                    "calibrate with this mesh, or name the dim as it was measured"
                )
            known_dims.append(dim)
        return MeshConstants(
            None,
            tuple(dim.ranks for dim in known_dims),
            tuple(dim.bandwidth for dim in known_dims),
            tuple(dim.latency_us for dim in known_dims),
            self.base_latency_us,
            self.source,
            tuple(dim.curves for dim in known_dims) if any(dim.curves for dim in known_dims) else (),
            self._together([dim for dim in known_dims if dim.ranks > 1]),
        )

    def _together(self, dims: Sequence[DimConstants]) -> Mapping[str, Curve]:
        """The curves of all these at once, which a file holds as a dim called "dp+tp"."""
        names, ranks = sorted(dim.name for dim in dims), math.prod(dim.ranks for dim in dims)
        for dim in self.dims:
            if len(dims) > 1 and dim.ranks == ranks and sorted(dim.name.split("+")) == names:
                return dim.curves
        return {}

    def held(self) -> str:
        """Its mesh dims, in words."""
        return ", ".join(f"{dim.name}={dim.ranks}" for dim in self.dims)


def _parse_dim(dim: object, where: str) -> DimConstants:
    dim = _object(dim, where)
    name, ranks = dim.get("name"), dim.get("ranks")
    if not isinstance(name, str) or not name:
        raise TopologyError(f"{where}.name: got {name!r}, expected the name of a mesh dim: calibrate again")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise TopologyError(f"{where}.ranks: got {ranks!r}, expected a count of at least 1: calibrate again")
    bandwidth = _number(dim.get("bandwidth_GiBps"), f"{where}.bandwidth_GiBps")
    latency = _number(dim.get("latency_us_per_hop"), f"{where}.latency_us_per_hop", zero=True)
    transitions = _object(dim.get("transitions", {}), f"{where}.transitions")
    return DimConstants.of_times(
        name,
        ranks,
        bandwidth,
        latency,
        collectives=_read_curves(dim.get("collectives", {}), f"{where}.collectives"),
        changes=_read_curves(transitions.get("core", {}), f"{where}.transitions.core"),
    )


def _read_curves(content: object, where: str) -> dict[str, Curve]:
    return {name: read_curve(curve, f"{where}.{name}") for name, curve in _object(content, where).items()}


def _object(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TopologyError(f"{where}: got {type(value).__name__}, expected an object: calibrate again")
    return value


def read_curve(content: object, where: str) -> Curve:
    """A curve of a topology file.

    Raises:
        TopologyError: with what is wrong and where.
    """
    table = content.get("table") if isinstance(content, Mapping) else None
    if not isinstance(table, list) or not table:
        raise TopologyError(f"{where}: got no table of sizes and times, expected one: calibrate again")
    rows = [row if isinstance(row, Mapping) else {} for row in table]
    sizes = [_number(r.get("size_bytes"), f"{where}.table[{i}].size_bytes") for i, r in enumerate(rows)]
    times = [_number(r.get("time_us"), f"{where}.table[{i}].time_us") for i, r in enumerate(rows)]
    pairs = itertools.pairwise(zip(sizes, times, strict=True))
    if any(size >= next_size or us > next_us for (size, us), (next_size, next_us) in pairs):
        raise TopologyError(
            f"{where}.table: got sizes or times out of order, expected larger sizes that take no less time: "
            "calibrate again"
        )
    return Curve(tuple(int(size) for size in sizes), tuple(times))


def _number(value: object, where: str, *, zero: bool = False) -> float:
    """A field that must be a finite number above 0, or at least 0."""
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        bound = "at least 0" if zero else "above 0"
        raise TopologyError(f"{where}: got {value!r}, expected a finite number {bound}: calibrate again")
    return number
