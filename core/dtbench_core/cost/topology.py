"""Constants of the cost model for a mesh, and the topology file that holds measured ones.

Bandwidths are in GiB/s (1024^3 bytes), latencies in microseconds. This module does not need torch, so that topologies
can be read and priced without it. mesh_topology.py contains the functions that need a DeviceMesh.
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
from dtbench_core.cost.ring import BASE_LATENCY_US
from dtbench_core.errors import CoreError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TOPOLOGY_SCHEMA = 1


class TopologyError(CoreError, ValueError):
    """A topology that cannot be read, or that lacks the requested mesh."""


# Collective -> changes of placement that consist mostly of it. Its curve prices them if the file has no curve of the
# changes themselves. It does not include the time of copies that reorder the tensor.
_CHANGES_OF_COLLECTIVE = {
    "all_gather": ("S(0)->R", "S(1)->R"),
    "all_reduce": ("P->R",),
    "reduce_scatter": ("P->S(0)", "P->S(1)"),
    "all_to_all": ("S(0)->S(1)", "S(1)->S(0)"),
}
# Changes that send something; "R->S(0)" and "R->S(1)" are local copies.
SENDING = tuple(name for names in _CHANGES_OF_COLLECTIVE.values() for name in names)


def tensor_bytes_per_printed_byte(collective: str, ranks: int) -> int:
    """Returns the factor from the size that nccl-tests prints to the size of the redistributed tensor.

    nccl-tests prints the size of the tensor that all ranks hold together, except for an all-to-all. There it prints the
    buffer of one rank (AlltoAllGetCollByteCount in its src/alltoall.cu).
    """
    return ranks if collective == "all_to_all" else 1


def curves_of_changes(collectives: Mapping[str, Curve], ranks: int) -> dict[str, Curve]:
    """Derives curves of changes of placement from those of plain collectives.

    Args:
        collectives: curve of each collective by name, over the bytes that nccl-tests counts.

    Returns:
        Curve of each change by name, over the bytes of the tensor that one group holds together.
    """
    return {
        change: Curve(
            tuple(size * tensor_bytes_per_printed_byte(name, ranks) for size in curve.sizes), curve.times_us
        )
        for name, curve in collectives.items()
        for change in _CHANGES_OF_COLLECTIVE.get(name, ())
    }


@dataclass(frozen=True)
class MeshConstants:
    """The constants of a mesh. Each sequence has one entry per mesh dim.

    Attributes:
        mesh: the mesh; None for estimates of a mesh that need not exist.
        mesh_dim_devices: number of ranks.
        mesh_dim_bandwidth: GiB/s.
        mesh_dim_latency: microseconds per hop.
        base_latency_us: microseconds that every collective takes in addition.
        source: origin of the numbers.
        mesh_dim_curves: measured time of each change of placement, by name ("S(0)->R"), over the bytes of the tensor
            that one group of the mesh dim holds together. If a mesh dim has curves, they price it, and its constants
            only price what was not measured.
        joint_curves: the same for a joint change on all mesh dims.
    """

    mesh: DeviceMesh | None
    mesh_dim_devices: Sequence[int]
    mesh_dim_bandwidth: Sequence[float]
    mesh_dim_latency: Sequence[float]
    base_latency_us: float = BASE_LATENCY_US
    source: str = "built-in"
    mesh_dim_curves: Sequence[Mapping[str, Curve]] = ()
    joint_curves: Mapping[str, Curve] = field(default_factory=dict)


@dataclass(frozen=True)
class DimConstants:
    """The measurements of one mesh dim.

    Attributes:
        name: name of the mesh dim.
        ranks: number of ranks.
        bandwidth: GiB/s.
        latency_us: microseconds per hop.
        curves: time of each change of placement ("S(0)->R"), over the bytes of the tensor that one group holds
            together.
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
        """Returns a mesh dim with curves of its changes: measured directly, or derived from those of collectives.

        If curves of some changes are missing, it has no curves at all. Curves and constants disagree, so a mesh dim is
        priced by either, never by some of each.

        Args:
            collectives: curve of each collective, over the bytes that nccl-tests prints.
            changes: curve of each change, over the bytes of the global tensor.
        """
        curves = curves_of_changes(collectives, ranks) | dict(changes)
        return cls(name, ranks, bandwidth, latency_us, curves if curves.keys() >= set(SENDING) else {})


@dataclass(frozen=True)
class Topology:
    """A validated topology file.

    Attributes:
        source: path of the file.
        device_type: device that was measured; "" if unknown.
        base_latency_us: microseconds that every collective takes in addition.
        dims: the measured mesh dims.
    """

    source: str
    device_type: str
    base_latency_us: float
    dims: tuple[DimConstants, ...]

    @classmethod
    def load(cls, topology: str | Path | Mapping[str, object]) -> Topology:
        """Reads a topology from a path, or from its content as a mapping.

        Raises:
            TopologyError: the topology cannot be read or is malformed; the message names the field.
        """
        if isinstance(topology, Mapping):
            return cls._parse(topology, "a mapping")
        path = Path(topology)
        if path.exists() and not path.is_file():  # reading a pipe would block forever
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
        return cls(
            source,
            str(content.get("device_type", "")),
            _number(content.get("base_latency_us", BASE_LATENCY_US), f"{source}: base_latency_us", zero=True),
            parsed,
        )

    def constants(self, dims: Sequence[tuple[str, int]]) -> MeshConstants:
        """Returns the constants of a mesh, which need not exist.

        Args:
            dims: name and number of ranks of each mesh dim.

        Raises:
            TopologyError: a mesh dim is not in the topology, or has another size.
        """
        measured_dims = {(dim.name, dim.ranks): dim for dim in self.dims}
        known_dims = []
        for name, size in dims:
            # A mesh dim of one rank sends nothing, so it is not measured and may be missing in the file.
            dim = measured_dims.get((name, size), DimConstants(name, 1, math.inf, 0.0) if size == 1 else None)
            if dim is None:
                raise TopologyError(
                    f"{self.source} holds {self.describe_dims()}, not the mesh dim {name}={size}: "
                    "calibrate with this mesh, or use the name under which the dim was measured"
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
            self._joint_curves([dim for dim in known_dims if dim.ranks > 1]),
        )

    def _joint_curves(self, dims: Sequence[DimConstants]) -> Mapping[str, Curve]:
        """Returns the curves of joint changes on these mesh dims. A file lists them as a dim named like "dp+tp"."""
        names, ranks = sorted(dim.name for dim in dims), math.prod(dim.ranks for dim in dims)
        for dim in self.dims:
            if len(dims) > 1 and dim.ranks == ranks and sorted(dim.name.split("+")) == names:
                return dim.curves
        return {}

    def describe_dims(self) -> str:
        """Returns the mesh dims for messages, like "dp=4, tp=2"."""
        return ", ".join(f"{dim.name}={dim.ranks}" for dim in self.dims)


def _parse_dim(dim: object, field_path: str) -> DimConstants:
    dim = _object(dim, field_path)
    name, ranks = dim.get("name"), dim.get("ranks")
    if not isinstance(name, str) or not name:
        raise TopologyError(
            f"{field_path}.name: got {name!r}, expected the name of a mesh dim: calibrate again"
        )
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise TopologyError(
            f"{field_path}.ranks: got {ranks!r}, expected a count of at least 1: calibrate again"
        )
    return DimConstants.of_times(
        name,
        ranks,
        _number(dim.get("bandwidth_GiBps"), f"{field_path}.bandwidth_GiBps"),
        _number(dim.get("latency_us_per_hop"), f"{field_path}.latency_us_per_hop", zero=True),
        collectives=_read_curves(dim.get("collectives", {}), f"{field_path}.collectives"),
        changes=_read_curves(
            _object(dim.get("transitions", {}), f"{field_path}.transitions").get("core", {}),
            f"{field_path}.transitions.core",
        ),
    )


def _read_curves(content: object, field_path: str) -> dict[str, Curve]:
    return {
        name: read_curve(curve, f"{field_path}.{name}")
        for name, curve in _object(content, field_path).items()
    }


def _object(value: object, field_path: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise TopologyError(f"{field_path}: got {type(value).__name__}, expected an object: calibrate again")
    return value


def read_curve(content: object, field_path: str) -> Curve:
    """Parses a curve of a topology file.

    Raises:
        TopologyError: the curve is malformed; the message names the field.
    """
    table = content.get("table") if isinstance(content, Mapping) else None
    if not isinstance(table, list) or not table:
        raise TopologyError(f"{field_path}: got no table of sizes and times, expected one: calibrate again")
    rows = [row if isinstance(row, Mapping) else {} for row in table]
    sizes = [_number(r.get("size_bytes"), f"{field_path}.table[{i}].size_bytes") for i, r in enumerate(rows)]
    times = [_number(r.get("time_us"), f"{field_path}.table[{i}].time_us") for i, r in enumerate(rows)]
    if any(
        size >= next_size or us > next_us
        for (size, us), (next_size, next_us) in itertools.pairwise(zip(sizes, times, strict=True))
    ):
        raise TopologyError(
            f"{field_path}.table: got sizes or times out of order, expected larger sizes that take no less time: "
            "calibrate again"
        )
    return Curve(tuple(int(size) for size in sizes), tuple(times))


def _number(value: object, field_path: str, *, zero: bool = False) -> float:
    """Returns a field that must be a finite number above 0, or at least 0 if `zero`."""
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        bound = "at least 0" if zero else "above 0"
        raise TopologyError(f"{field_path}: got {value!r}, expected a finite number {bound}: calibrate again")
    return number
