"""Renders the modules of `dtbench export`. All values from the topology are inserted with `literal`."""

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import jinja2

from dtbench._version import __version__
from dtbench.cost.estimate import times_of
from dtbench.errors import UsageError
from dtbench.records.atomic import write_atomically
from dtbench.records.topology import CalibratedTopology
from dtbench_core.cost.curve import Curve
from dtbench_core.cost.ring import BASE_LATENCY_US
from dtbench_core.cost.topology import SENDING, curves_of_changes

NodeShape = tuple[int, int]  # nodes, ranks per node
Target = Literal["torch", "inductor", "autoparallel"]
# Versions whose private functions the templates replace, and with which the tests were run.
TORCH_VERSIONS = ("2.11", "2.13")

TEMPLATES = Path(__file__).parent
SHARD_TO_SHARD = ("S(0)->S(1)", "S(1)->S(0)")
# The same constants as in autoparallel's benchmarks/nccl_cost_model/tools/fit_profile.py.
LATENCY_BYTES, RAMP_POINTS = 64 * 2**10, 24
INDUCTOR_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


def export(topology: CalibratedTopology, target: Target, path: Path) -> None:
    """Writes the module atomically.

    Raises:
        UsageError: the target cannot represent the topology.
        OutputError: the path cannot be written, or is a file that `export` did not write.
    """
    write_atomically(path, render(topology, target, path.stem), _is_export, "module of `dtbench export`")


def render(topology: CalibratedTopology, target: Target, module: str = "topology") -> str:
    """Returns the source of the module. module: its name, for the usage in its docstring."""
    _check(topology)
    tables, ramps = _runtimes(topology) if target == "autoparallel" else ({}, {})
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["literal"] = literal
    curves = {
        (dim.name, name): times_of(dim.collectives[name])
        for dim in topology.dims
        for name in INDUCTOR_COLLECTIVES
        if name in dim.collectives
    }
    return environment.get_template(f"{target}.py.jinja").render(
        module=module if module.isascii() and module.isidentifier() else "topology",
        source=_source(topology),
        device_type=topology.device_type,
        dims={dim.name: (dim.ranks, dim.bandwidth_GiBps, dim.latency_us_per_hop) for dim in topology.dims},
        ranks={dim.name: dim.ranks for dim in topology.dims},
        curves=dict(_placement_curves(topology)) if target == "torch" else curves,
        tables=tables,
        ramps=ramps,
        curve_source=inspect.getsource(Curve).rstrip(),
        versions=" and ".join(TORCH_VERSIONS),
        newest=TORCH_VERSIONS[-1],
    )


def literal(value: object) -> str:
    """Formats a value as Python source: ASCII, on a single line, and safe for any string.

    Raises:
        TypeError: the value is not a string, number, None, or a tuple, list or dict of them.
    """
    if isinstance(value, str):
        return ascii(str(value))
    if value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return repr(value)
    if isinstance(value, tuple | list):
        items = [literal(item) for item in value]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(item)}' for key, item in value.items())}}}"
    raise TypeError(f"got {type(value).__name__}, expected a string, a finite number, None or a collection")


def _check(topology: CalibratedTopology) -> None:
    if not topology.dims:
        raise UsageError(
            "the topology has no mesh dim, expected at least one: calibrate a run of the suite collectives"
        )
    base = topology.base_latency_us
    if not math.isclose(base, BASE_LATENCY_US):
        raise UsageError(
            f"the topology was fitted with a base latency of {base:g} us, expected the {BASE_LATENCY_US} us of "
            "torch's formulas: calibrate again"
        )


def _source(topology: CalibratedTopology) -> dict[str, object]:
    """Describes the origin and the accuracy of the numbers."""
    versions = topology.runs[0].versions if topology.runs else {}
    return {
        "written_by": f"dtbench {__version__}",
        "calibrated": topology.created,
        "runs": [run.run_id for run in topology.runs],
        "versions": {key: str(value) for key, value in versions.items()},
        "device_type": topology.device_type,
        "backend": topology.backend,
        "mesh": dict(zip(topology.mesh.dim_names, topology.mesh.shape, strict=True)),
        "bandwidth_GiBps_90_percent": {dim.name: dim.bandwidth_interval for dim in topology.dims},
        "latency_us_90_percent": {dim.name: dim.latency_interval for dim in topology.dims},
        "warnings": topology.all_warnings(),
    }


def _placement_curves(topology: CalibratedTopology) -> Iterator[tuple[tuple[str, str], Curve]]:
    """Yields (mesh dim, transition) -> curve: DTensor's measured transitions, else the collective that each uses.

    Transitions from Replicate do not communicate and keep a cost of 0, which torch relies on.
    """
    for dim in topology.dims:
        collectives = {name: times_of(curve) for name, curve in dim.collectives.items()}
        curves: dict[str, Curve | None] = {**curves_of_changes(collectives, dim.ranks)}
        if topology.device_type == "cpu":
            # On a CPU, DTensor gathers the complete tensor and slices its shard (`shard_dim_alltoall` in
            # torch/distributed/tensor/_collective_utils.py).
            curves |= dict.fromkeys(SHARD_TO_SHARD, collectives.get("all_gather"))
        curves |= {change: times_of(curve) for change, curve in dim.transitions.get("torch", {}).items()}
        for change in SENDING:
            if (curve := curves.get(change)) is not None:
                yield (dim.name, change), curve


def _runtimes(
    topology: CalibratedTopology,
) -> tuple[dict[str, dict[NodeShape, tuple[float, float]]], dict[str, dict[NodeShape, tuple[float, ...]]]]:
    """Computes autoparallel's tables.

    Returns:
        tables: collective -> (nodes, ranks per node) -> (latency in us, peak bandwidth in GB/s).
        ramps: collective -> (nodes, ranks per node) -> share of the peak bandwidth at sizes that double.

    Raises:
        UsageError: no dim has groups with the same layout on their hosts.
    """
    tables: dict[str, dict[NodeShape, tuple[float, float]]] = {}
    ramps: dict[str, dict[NodeShape, tuple[float, ...]]] = {}
    for dim in topology.dims:
        hosts, per_host = set(dim.layout.hosts_per_group or ()), set(dim.layout.ranks_per_host or ())
        shape = (min(hosts, default=0), min(per_host, default=0))
        if len(hosts) > 1 or len(per_host) > 1 or math.prod(shape) != dim.ranks:
            continue
        for name in INDUCTOR_COLLECTIVES:
            if name not in dim.collectives:
                continue
            curve = times_of(dim.collectives[name])
            small = [size for size in curve.sizes if size <= LATENCY_BYTES] or curve.sizes[:1]
            latency = min(map(curve.us, small))
            peak = max(_rate(curve, size, latency) for size in curve.sizes)
            entry = tables.setdefault(name, {}).get(shape)
            if peak and (entry is None or peak < entry[1]):  # the slowest of the dims with this shape
                sizes = (64 * 2**k * dim.ranks for k in range(RAMP_POINTS))
                tables[name][shape] = (round(latency, 6), round(peak, 6))
                ramps.setdefault(name, {})[shape] = tuple(
                    round(min(max(_rate(curve, size, latency) / peak or 1.0, 0.01), 1.0), 6) for size in sizes
                )
    if not ramps:
        raise UsageError(
            "autoparallel requires groups with the same number of hosts and of ranks per host: no mesh dim of the "
            "topology has such groups"
        )
    return {name: entries for name, entries in tables.items() if entries}, ramps


def _rate(curve: Curve, size: int, latency_us: float) -> float:
    """Returns the bandwidth in GB/s after subtracting the latency; 0 if the time is not longer than the latency."""
    transfer_us = curve.us(size) - latency_us
    return size / (1000 * transfer_us) if transfer_us > 0 else 0.0


def _is_export(head: str) -> bool:
    return head.startswith('"""Measured ') and "written by `dtbench export" in head.split("\n", 1)[0]
