"""Renders Python modules for `dtbench export`. All values from the topology are inserted with `literal`."""

import inspect
import math
from collections.abc import Iterator
from pathlib import Path

import jinja2

from dtbench._version import __version__
from dtbench.cost.export.targets import Export, ExportRequest
from dtbench.errors import UsageError
from dtbench.records.topology import CalibratedTopology
from dtbench_core.cost.curve import Curve
from dtbench_core.cost.ring import BASE_LATENCY_US
from dtbench_core.cost.topology import SENDING, curves_of_changes

# Versions whose private functions the templates replace, and with which the tests were run.
TORCH_VERSIONS = ("2.11", "2.13")

TEMPLATES = Path(__file__).parent
SHARD_TO_SHARD = ("S(0)->S(1)", "S(1)->S(0)")
INDUCTOR_COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")


def render_torch(request: ExportRequest) -> Export:
    """Returns the module that installs constants and times in torch.distributed.tensor."""
    topology = request.topology
    return _render_installer(
        request,
        "torch",
        dims={dim.name: (dim.ranks, dim.bandwidth_GiBps, dim.latency_us_per_hop) for dim in topology.dims},
        curves=dict(_placement_curves(topology)),
    )


def render_inductor(request: ExportRequest) -> Export:
    """Returns the module that installs times of collectives in the scheduler of torch.compile."""
    curves = {
        (dim.name, name): dim.collectives[name].columns["time_us"]
        for dim in request.topology.dims
        for name in INDUCTOR_COLLECTIVES
        if name in dim.collectives
    }
    return _render_installer(
        request, "inductor", ranks={dim.name: dim.ranks for dim in request.topology.dims}, curves=curves
    )


def _render_installer(request: ExportRequest, template: str, **values: object) -> Export:
    topology = request.topology
    if not math.isclose(base := topology.base_latency_us, BASE_LATENCY_US):
        raise UsageError(
            f"the topology was fitted with a base latency of {base:g} us, expected the {BASE_LATENCY_US} us of "
            "torch's formulas: calibrate again"
        )
    return Export(
        render_template(
            request,
            f"{template}.py",
            device_type=topology.device_type,
            curve_source=inspect.getsource(Curve).rstrip(),
            versions=" and ".join(TORCH_VERSIONS),
            newest=TORCH_VERSIONS[-1],
            **values,
        )
    )


def render_template(request: ExportRequest, template: str, **values: object) -> str:
    """Renders a file from a template of this folder."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["literal"] = literal
    name = request.path.stem
    return environment.get_template(f"{template}.jinja").render(
        module=name if name.isascii() and name.isidentifier() else "topology",
        source=describe_source(request.topology),
        **values,
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


def describe_source(topology: CalibratedTopology) -> dict[str, object]:
    """Describes the origin and the accuracy of the numbers."""
    return {
        "written_by": f"dtbench {__version__}",
        "calibrated": topology.created,
        "runs": [run.run_id for run in topology.runs],
        "versions": {key: value for run in topology.runs[:1] for key, value in run.versions.items() if value},
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
        collectives = {name: curve.columns["time_us"] for name, curve in dim.collectives.items()}
        curves: dict[str, Curve | None] = {**curves_of_changes(collectives, dim.ranks)}
        if topology.device_type == "cpu":
            # On a CPU, DTensor gathers the complete tensor and slices its shard (`shard_dim_alltoall` in
            # torch/distributed/tensor/_collective_utils.py).
            curves |= dict.fromkeys(SHARD_TO_SHARD, collectives.get("all_gather"))
        curves |= {
            change: curve.columns["time_us"] for change, curve in dim.transitions.get("torch", {}).items()
        }
        for change in SENDING:
            if (curve := curves.get(change)) is not None:
                yield (dim.name, change), curve
