"""Redistribution and the cost model: time over size, fitted and built-in constants, and prediction errors."""

import math
import statistics
from collections.abc import Sequence
from functools import partial

import numpy as np

from dtbench.cost.estimate import estimate_call, ring_us
from dtbench.grouping import group_by
from dtbench.records.topology import CalibratedTopology, Constants, Dim
from dtbench.reporting.html.axes import log_axis, times_axis
from dtbench.reporting.html.figures import CurvePanel, DrawnCurve, Figure, Style, curves, lines
from dtbench.reporting.html.parts.suites import (
    CORE,
    TORCH,
    add_dots,
    case_columns,
    compare_core_with_torch,
    ratio_caption,
    time_columns,
)
from dtbench.reporting.html.section import (
    Material,
    Part,
    ReportCase,
    ReportSection,
    distinct,
    equal_parts,
    main_dtype,
)
from dtbench.text import columns
from dtbench.text.table import MAX_ROWS, Table, TableColumn
from dtbench.text.units import (
    format_factor,
    format_interval,
    format_seconds,
    format_size,
    plural,
    significant,
)
from dtbench_core.cost.ring import RING_COLLECTIVES
from dtbench_core.cost.topology import tensor_bytes_per_printed_byte

# Collective -> redistribution that it performs.
TRANSITION = {
    "all_reduce": "P->R",
    "all_gather": "S(0)->R",
    "reduce_scatter": "P->S(0)",
    "all_to_all": "S(0)->S(1)",
}
SHOWN = 3  # panels that are not folded
STYLES = {
    "builtin": Style("s4", "", (1.5, 1.5), words="PyTorch’s built-in constants"),
    "fitted": Style("s3", "", (6, 3), words="the fitted constants"),
    "table": Style("s3", "", words="table of the collective, with the 90 % interval of a new launch"),
    "measured": Style("ink", "o", None, hollow=True, words="measured, from the arrival of the last rank"),
    "c10d": Style("s2", "D", words="the collective only, c10d"),
    "core": Style(CORE.colour, "^", words="core’s redistribute"),
    "torch": Style(TORCH.colour, "s", (5, 2), hollow=True, words="torch’s redistribute"),
}


def fill(section: ReportSection, material: Material) -> None:
    topology, moved = material.sources.topology, material.cases("redistribute")
    if moved:
        section.lead = (
            "Time to redistribute a tensor over mesh dims, with real process groups. "
            + compare_core_with_torch(section, moved, "redistribute", "Over all transitions and sizes, the")
        )
    if moved or topology is not None:
        collectives = plain_cases(equal_parts(material.cases("collectives")))
        section.add(times_over_size(section, collectives, plain_cases(moved), topology))
    if moved:
        _added(section, collectives, plain_cases(moved))
        _add_cases(section, moved)
    if topology is not None:
        add_model(section, topology)
    section.missing = (
        "dtbench run redistribute collectives -o RUN.jsonl, dtbench calibrate RUN.jsonl -o TOPOLOGY.json, then "
        "dtbench report RUN.jsonl TOPOLOGY.json -o PAGE.html"
    )


def plain_cases(cases: Sequence[ReportCase]) -> Sequence[ReportCase]:
    """Returns the cases of the main dtype that were measured in isolated calls of all groups, out of place.

    If there are none, all cases of the main dtype.
    """
    if not cases:
        return cases
    dtype, usual = main_dtype(cases), (("groups", "together"), ("mode", "isolated"), ("in_place", False))
    sweep = [c for c in cases if all(c.get(param) in ("", value) for param, value in usual)]
    return [c for c in sweep or cases if c.get("dtype") == dtype]


def times_over_size(
    section: ReportSection,
    collectives: Sequence[ReportCase],
    moved: Sequence[ReportCase] = (),
    topology: CalibratedTopology | None = None,
    folded: str = "",
) -> Figure | None:
    """Draws a panel per mesh dim and collective of a redistribution; without runs, those of the topology."""
    fitted = {dim.name: dim for dim in (topology.dims if topology else ())}
    raw = group_by(collectives, lambda c: (str(c.get("mesh_dim")), c.name))
    of_libraries = group_by(moved, lambda c: (str(c.get("mesh_dim")), c.name))
    panels = []
    for dim in distinct([*(dim for dim, _ in (*raw, *of_libraries)), *fitted]):
        tables = fitted[dim].collectives if dim in fitted else {}
        for name in distinct([*TRANSITION, *RING_COLLECTIVES, *tables]):
            transition = TRANSITION.get(name, "")
            series = _measured(name, raw.get((dim, name), ()), of_libraries.get((dim, transition), ()))
            if not series and not raw and name in tables:
                series = table_lines(fitted[dim], name)
            if not series or (raw and not transition):
                continue
            sizes = [size for curve in series for size in curve.x]
            model = model_lines(fitted[dim], name, sizes) if dim in fitted else []
            panels.append(
                CurvePanel(
                    title=f"{name} over {dim}{f': {transition}' if transition else ''}",
                    series=[*model, *series],
                    shade=fitted_on(fitted[dim]) if dim in fitted else None,
                )
            )
    caption = (
        "Time over size, both axes logarithmic and common to all panels. As in nccl-tests, the size is that of the "
        "whole tensor, for all_to_all that of one rank’s buffer."
    )
    if moved and collectives:
        caption += " The distance of a redistribute from c10d is its overhead over the collective."
    if fitted:
        caption += (
            " Where the dashed line of a model departs from the measured points, DTensor’s planner uses wrong costs. "
            "Models are fitted to times from the arrival of the last rank, over the shaded sizes."
        )
    return curves(
        "times", section.capped(panels, "panels"), STYLES, caption, y=times_axis, shown=SHOWN, folded=folded
    )


def _measured(name: str, collectives: Sequence[ReportCase], moved: Sequence[ReportCase]) -> list[DrawnCurve]:
    """Returns the curves of a collective and of the redistributions by core and torch, over the collective's size."""
    points = {"c10d": [(c.only.size_bytes or 0, c.only.estimate_s) for c in collectives]}
    points |= {
        impl: [
            (c.number("size") // tensor_bytes_per_printed_byte(name, c.number("ranks")), seconds)
            for c in moved
            if (seconds := c.seconds(impl)) is not None
        ]
        for impl in ("core", "torch")
    }
    return lines({label: sorted(p for p in pairs if p[0] > 0) for label, pairs in points.items()})


def _added(section: ReportSection, collectives: Sequence[ReportCase], moved: Sequence[ReportCase]) -> None:
    """Adds the overhead of a redistribution over its collective, at the smallest size at which both were measured."""
    raw = {
        (
            c.get("mesh_dim"),
            TRANSITION.get(c.name),
            (c.only.size_bytes or 0) * tensor_bytes_per_printed_byte(c.name, c.number("ranks")),
        ): c.only
        for c in collectives
    }
    measured_twice = {key: c for c in moved if (key := (c.get("mesh_dim"), c.name, c.number("size"))) in raw}
    smallest = min((size for *_, size in measured_twice), default=0)
    pairs = [(c, raw[key].estimate_s) for key, c in measured_twice.items() if key[2] == smallest]
    costs = []
    for impl, name in (("torch", "DTensor"), ("core", "dtbench’s core")):
        added = [s - collective_s for c, collective_s in pairs if (s := c.seconds(impl)) is not None]
        if added and (median := statistics.median(added)) > 0:
            costs.append((name, format_seconds(median), plural(len(added), "transition")))
    if costs:
        (name, added_s, count), *remaining = costs
        other_text = "".join(f"; {name} adds {s}" for name, s, _ in remaining)
        words = f"overhead of a redistribution by {name} over its collective at {format_size(smallest)}"
        section.headlines.insert(0, (f"+{added_s}", f"{words}, median of {count}{other_text}"))
        section.outcome = f"a redistribution by {name} adds {added_s} to its collective"


def _add_cases(section: ReportSection, cases: Sequence[ReportCase]) -> None:
    """Draws every transition at the smallest and the largest size, and lists all cases in a table."""
    drawn = plain_cases(cases)
    sizes = sorted({c.number("size") for c in drawn})
    by_dim_and_size = group_by(drawn, lambda c: (c.get("mesh_dim"), c.number("size")))
    panels = {
        f"{dim}, {format_size(size)}": by_dim_and_size.get((dim, size), [])
        for dim in distinct(dim for dim, _ in by_dim_and_size)
        for size in distinct([sizes[0], sizes[-1]])
    }
    drawn_sizes = "the smallest and the largest size" if len(sizes) > 1 else "one size"
    add_dots(
        section,
        panels,
        lambda c: c.name,
        f"Time per redistribute at {drawn_sizes}, {drawn[0].get('dtype')}{ratio_caption(drawn)}.",
    )
    params = {"mesh_dim": "Mesh dim", "dtype": "Dtype", "size": "Size"}
    listed = cases[:MAX_ROWS]
    section.add(
        Table(
            "Every transition and size",
            [*case_columns(listed, "Transition", params, "ranks"), *time_columns(listed)],
            folded=True,
            total=len(cases),
            note="Sizes are those of the whole tensor of a group.",
        )
    )


REDISTRIBUTION = Part(
    "redistribute", "Redistribution and the cost model", fill, ("redistribute",), measures_links=True
)


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
    section.notes += [
        *(f"{d.name}: {w}." for d in topology.dims for w in d.warnings),
        *(f"{d.name} has no constants: {d.reason}." for d in topology.left_out),
    ]
    section.add(_residuals(topology), _constants(topology))
    errors = []
    for dim in topology.dims if topology.backend.startswith("nccl") else ():
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
    return lines(
        {
            key: [(s, ring_s(dim, name, s, values)) for s in with_sizes_between(sizes)]
            for key, values in {"builtin": dim.builtin, "fitted": dim}.items()
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

    digits = partial(significant, digits=3)
    return Table(
        "Fitted and PyTorch’s built-in constants",
        [
            columns.text("Mesh dim", [dim.name for dim in dims]),
            columns.counts("Ranks", [dim.ranks for dim in dims]),
            columns.text("Layout", [dim.layout.kind or "unknown" for dim in dims]),
            TableColumn(
                "Bandwidth",
                [f"{'≥ ' * dim.bandwidth_is_lower_bound}{digits(dim.bandwidth_GiBps)}" for dim in dims],
                True,
                "GiB/s",
            ),
            TableColumn(
                "90 % interval",
                [format_interval(dim.bandwidth_interval, " – ") for dim in dims],
                True,
                "GiB/s",
            ),
            columns.numbers("built-in", (b.bandwidth_GiBps if b else None for b in builtin), digits, "GiB/s"),
            columns.numbers("Latency per hop", (dim.latency_us_per_hop for dim in dims), digits, "µs"),
            TableColumn(
                "90 % interval", [format_interval(dim.latency_interval, " – ") for dim in dims], True, "µs"
            ),
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
