"""Redistribution and the cost model: time over size of collectives, redistributions and models."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dtbench.grouping import group_by
from dtbench.records.topology import CalibratedTopology
from dtbench.reporting.html.axes import times_axis
from dtbench.reporting.html.cases import ReportCase, distinct, main_dtype
from dtbench.reporting.html.figures import CurvePanel, DrawnCurve, Figure, Style, curves, lines
from dtbench.reporting.html.parts.cost_model import add_model, fitted_on, model_lines, table_lines
from dtbench.reporting.html.parts.suites import (
    CORE,
    TORCH,
    add_dots,
    case_columns,
    compare_core_with_torch,
    ratio_caption,
    time_columns,
)
from dtbench.reporting.html.section import Material, Part, ReportSection
from dtbench.text.table import MAX_ROWS, Table
from dtbench.text.units import format_seconds, format_size, plural
from dtbench_core.cost.ring import RING_COLLECTIVES
from dtbench_core.cost.topology import parts_of_tensor

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
        collectives = plain_cases([c for c in material.cases("collectives") if c.impls and c.only.size_bytes])
        section.add(times_over_size(section, collectives, plain_cases(moved), topology))
    if moved:
        _added(section, collectives, plain_cases(moved))
        _add_cases(section, moved)
    if topology is not None:
        add_model(section, topology)
    section.missing = (
        "dtbench run redistribute collectives -o RUN.jsonl, dtbench calibrate RUN.jsonl -o TOPOLOGY.json, then "
        "dtbench report RUN.jsonl TOPOLOGY.json"
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
    dims = distinct([*(dim for dim, _ in (*raw, *of_libraries)), *fitted])
    panels = []
    for dim in dims:
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
            " Where a dashed model leaves the points, DTensor’s planner uses wrong costs. Models are fitted to "
            "times from the arrival of the last rank, over the shaded sizes."
        )
    return curves(
        "times", section.capped(panels, "panels"), STYLES, caption, y=times_axis, shown=SHOWN, folded=folded
    )


def _measured(name: str, collectives: Sequence[ReportCase], moved: Sequence[ReportCase]) -> list[DrawnCurve]:
    """Returns the curves of a collective and of the redistributions by core and torch, over the collective's size."""
    points = {"c10d": [(c.only.size_bytes or 0, c.only.estimate_s) for c in collectives]}
    for impl in ("core", "torch"):
        seconds = [(c, s) for c in moved if (s := c.seconds(impl)) is not None]
        points[impl] = [(c.number("size") // parts_of_tensor(name, c.number("ranks")), s) for c, s in seconds]
    return lines({label: sorted(p for p in pairs if p[0] > 0) for label, pairs in points.items()})


def _added(section: ReportSection, collectives: Sequence[ReportCase], moved: Sequence[ReportCase]) -> None:
    """Adds the overhead of a redistribution over its collective, at the smallest size at which both were measured."""
    raw = {
        (
            c.get("mesh_dim"),
            TRANSITION.get(c.name),
            (c.only.size_bytes or 0) * parts_of_tensor(c.name, c.number("ranks")),
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
