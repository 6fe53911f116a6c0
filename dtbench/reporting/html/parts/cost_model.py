"""The cost model: fitted constants, torch's built-in ones, and their prediction errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from dtbench.cost.estimate import estimate_call, ring_us
from dtbench.records.topology import CalibratedTopology, Constants, Dim
from dtbench.reporting.html.axes import log_axis
from dtbench.reporting.html.figures import CurvePanel, DrawnCurve, Figure, Style, curves, lines
from dtbench.reporting.html.section import ReportSection
from dtbench.text import columns
from dtbench.text.table import Table, TableColumn
from dtbench.text.units import format_factor, format_interval, format_size, significant
from dtbench_core.cost.ring import RING_COLLECTIVES

RESIDUAL_STYLES = {
    "fitted": Style("s0", "o", None, words="fitted constants"),
    "builtin": Style("s1", "s", None, hollow=True, words="PyTorch’s built-in constants"),
    "table": Style("s3", "^", None, hollow=True, words="its own table"),
}

# Ticks of ratios, labelled in percent, on a logarithmic axis. Each set includes 0 %.
_DECADES = (1e-4, 1e-3, 0.01, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4)
PERCENT_TICKS = (sorted((*_DECADES, 0.5, 2.0)), _DECADES, _DECADES[::2], (0.5, 1.0, 2.0))


def ring_s(dim: Dim, name: str, size: float, constants: Constants | Dim | None) -> float | None:
    """Returns the seconds by torch's formula; None without a formula for the collective, or without constants."""
    if constants is None or name not in RING_COLLECTIVES:
        return None
    return 1e-6 * ring_us(name, size, dim.ranks, constants)


def with_sizes_between(sizes: Sequence[float]) -> list[float]:
    """Adds sizes in between, since functions that are linear in size are curved on a logarithmic axis."""
    added = np.geomspace(min(sizes), max(sizes), 33) if max(sizes) > min(sizes) else ()
    return sorted({*sizes, *(float(s) for s in added)})


def add_model(section: ReportSection, topology: CalibratedTopology) -> None:
    """Adds the constants and their prediction errors."""
    hosts = (
        "; the built-in ones depend on the hosts of the ranks"
        if any(d.builtin for d in topology.dims)
        else ""
    )
    section.lead += (
        " DTensor chooses redistributions by a model of a ring: a base latency of "
        f"{topology.base_latency_us:g} µs, a latency per hop, and the bytes over one bandwidth per mesh dim. Here its "
        f"two constants are fitted to the measured times{hosts}."
    )
    section.notes += [f"{d.name}: {w}." for d in topology.dims for w in d.warnings]
    section.notes += [f"{d.name} has no constants: {d.reason}." for d in topology.left_out]
    section.add(_residuals(topology), _constants(topology))
    errors = []
    for dim in topology.dims if topology.backend == "nccl" else ():
        # torch's constants describe links between GPUs; their error over another transport means nothing.
        if dim.builtin:
            builtin_error, fitted_error = (
                format_factor(dim.builtin.geometric_mean_ratio),
                format_factor(dim.residuals.geometric_mean_ratio),
            )
            words = f"mean error of PyTorch’s built-in constants over {dim.name}; of the fitted ones {fitted_error}"
            section.headlines.append((builtin_error, words))
            errors.append(f"{builtin_error} over {dim.name}")
    if errors:
        section.outcome = section.outcome or f"PyTorch’s built-in constants are off by {', '.join(errors)}"


def fitted_on(dim: Dim) -> tuple[float, float]:
    """Returns the range of sizes to which the constants are fitted, with a margin."""
    low, high = dim.fitted_on.size_bytes
    return low / 1.1, high * 1.1


def model_lines(dim: Dim, name: str, sizes: Sequence[float]) -> list[DrawnCurve]:
    """Returns the curves of times by the built-in and by the fitted constants."""
    constants = {"builtin": dim.builtin, "fitted": dim}
    return lines(
        {
            key: [(s, ring_s(dim, name, s, values)) for s in with_sizes_between(sizes)]
            for key, values in constants.items()
        }
    )


def table_lines(dim: Dim, name: str) -> list[DrawnCurve]:
    """Returns the curves of a collective's table with its interval, and of the measured points."""
    table = dim.collectives[name].table
    ends = [float(row.size_bytes) for row in table]
    sizes = with_sizes_between(ends)
    prices = [estimate_call(dim.collectives[name], size) for size in sizes]
    band = [p.low_us * 1e-6 for p in prices], [p.high_us * 1e-6 for p in prices]
    return [
        DrawnCurve("table", sizes, [p.time_us * 1e-6 for p in prices], band),
        DrawnCurve("measured", ends, [row.measured_us * 1e-6 for row in table]),
    ]


def _residuals(topology: CalibratedTopology) -> Figure | None:
    """Draws the prediction errors over size, with a panel per mesh dim."""
    return curves(
        "residual",
        [
            CurvePanel(f"{dim.name}, {dim.ranks} ranks", residuals_of(dim), shade=fitted_on(dim), level=1.0)
            for dim in topology.dims
        ],
        RESIDUAL_STYLES,
        "Predicted minus measured time in percent of the measured time, on a logarithmic axis: −50 % is half, +100 % "
        "is double. Shaded: sizes used for the fit.",
        y=lambda values: log_axis([*values, 0.5, 2.0], percent_off, ticks=PERCENT_TICKS),
        folded="Prediction error of the constants and the tables, over size",
    )


def residuals_of(dim: Dim) -> list[DrawnCurve]:
    pairs: dict[str, list[tuple[float, float]]] = {"builtin": [], "table": [], "fitted": []}
    for point in dim.residuals.points:
        name, size, measured = point.collective, point.size_bytes, point.measured_s
        pairs["fitted"].append((size, point.predicted_s / measured))
        if (built_in := ring_s(dim, name, size, dim.builtin)) is not None:
            pairs["builtin"].append((size, built_in / measured))
        if name in dim.collectives:
            pairs["table"].append(
                (size, 1e-6 * estimate_call(dim.collectives[name], size).time_us / measured)
            )
    return lines(pairs)


def percent_off(ratio: float) -> str:
    """Formats a ratio as its deviation from 1: 0.5 is "−50 %", 2 is "+100 %"."""
    percent = 100 * (ratio - 1)
    if math.isclose(percent, 0, abs_tol=1e-9):
        return "0 %"
    digits = 0 if abs(percent) >= 1 and ratio >= 0.1 else 2
    return f"{percent:+.{digits}f} %".replace("-", "−").replace(".00", "")


def _basis(dim: Dim) -> str:
    """Describes the points to which the constants of a mesh dim are fitted."""
    on = dim.fitted_on
    low, high = (format_size(size) for size in on.size_bytes)
    groups = "all groups together" if dim.groups_sharing == "together" else "one group alone"
    return f"{dim.name} is fitted to {on.points} points from {low} to {high}, {groups}."


def _constants(topology: CalibratedTopology) -> Table:
    dims = topology.dims
    builtin = [dim.builtin for dim in dims]

    def column(header: str, cells: Sequence[str], unit: str) -> TableColumn:
        return TableColumn(header, cells, True, unit)

    digits = partial(significant, digits=3)
    bandwidths = [f"{'≥ ' * dim.bandwidth_is_lower_bound}{digits(dim.bandwidth_GiBps)}" for dim in dims]
    return Table(
        "Fitted and PyTorch’s built-in constants",
        [
            columns.text("Mesh dim", [dim.name for dim in dims]),
            columns.counts("Ranks", [dim.ranks for dim in dims]),
            columns.text("Layout", [dim.layout.kind or "unknown" for dim in dims]),
            column("Bandwidth", bandwidths, "GiB/s"),
            column(
                "90 % interval", [format_interval(dim.bandwidth_interval, " – ") for dim in dims], "GiB/s"
            ),
            columns.numbers("built-in", (b.bandwidth_GiBps if b else None for b in builtin), digits, "GiB/s"),
            columns.numbers("Latency per hop", (dim.latency_us_per_hop for dim in dims), digits, "µs"),
            column("90 % interval", [format_interval(dim.latency_interval, " – ") for dim in dims], "µs"),
            columns.numbers("built-in", (b.latency_us_per_hop if b else None for b in builtin), digits, "µs"),
            columns.ratios("Fit off by, mean", [dim.residuals.geometric_mean_ratio for dim in dims]),
            columns.ratios("worst", [dim.residuals.worst_ratio for dim in dims]),
            columns.ratios("Built-in off by, mean", [b.geometric_mean_ratio if b else None for b in builtin]),
        ],
        note=" ".join(
            [
                *(_basis(dim) for dim in dims),
                *(f"Intervals: {i}." for i in sorted({dim.intervals for dim in dims} - {""})),
                "“Off by”: the larger of predicted and measured time over the smaller; 1 is perfect.",
                "GiB are 1024³ bytes, the unit of PyTorch’s model.",
            ]
        ),
    )
