"""The report's section on the cost model: measured times, the fitted constants, torch's built-in ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dtbench.cost.choices import Regret
from dtbench.cost.price import price, ring_us
from dtbench.show.report import tables as t
from dtbench.show.report.figures import (
    Axis,
    Panel,
    Series,
    Style,
    legend,
    line_panel,
    seconds_tick,
    size_axis,
    value_axis,
)
from dtbench.show.report.parts.residuals import regret_figure, regret_table, residual_figure
from dtbench.show.report.section import Figure, Section, capped
from dtbench.units import format_size, significant
from dtbench_core.cost.ring import RING_COLLECTIVES

# Those that the constants are fitted to; the tables have all.
MAX_PANELS = 6

MEASURED, FITTED = Style("ink", "o", None, hollow=True), Style("s0", "")
BUILTIN, TABLE = Style("s1", "", (5, 2)), Style("s3", "", (1.5, 1.5))
STYLES = {
    "measured": MEASURED,
    "its own table, with the 90 % interval of a new launch": TABLE,
    "fitted, one bandwidth per dim": FITTED,
    "PyTorch’s built-in constants": BUILTIN,
}


def calibration(topology: Mapping[str, Any] | None, regret: Regret | None, has_collectives: bool) -> Section:
    section = Section("calibration", "Cost model")
    if topology is not None:
        _fit(section, topology)
    if regret is not None and regret.groups:
        section.figures.append(regret_figure(regret))
        section.tables.append(regret_table(regret))
        section.lead = section.lead or "What the choices of each cost model cost more than the best."
    if topology is None and regret is None:
        run = "" if has_collectives else "dtbench run collectives -o RUN.jsonl, "
        section.missing = (
            f"{run}dtbench calibrate RUN.jsonl -o TOPOLOGY.json, then add TOPOLOGY.json to this report"
        )
    return section


def _fit(section: Section, topology: Mapping[str, Any]) -> None:
    section.lead = (
        "DTensor chooses redistributions by a model of a ring: a base latency of "
        f"{topology['base_latency_us']:g} µs, a latency per hop, and the bytes over one bandwidth per mesh "
        "dim. Here its two constants are fitted to the measured times; bandwidths are in GiB/s (1024³ "
        "bytes), the unit of PyTorch’s model. The built-in constants are those for the layout that the "
        "ranks’ hosts show. What a call is expected to take is read from a table of its own, which also has "
        "the interval that a new launch falls into nine times of ten."
    )
    residuals = residual_figure(topology)
    section.figures = [*_figures(section, topology), *([residuals] if residuals else [])]
    section.tables = [
        _constants(topology),
        *_left_out(topology),
        *_contention(topology),
        _residuals(topology),
        _curves_table(topology),
    ]


# ------------------------------------------------------------------------------------------ figure


def _figures(section: Section, topology: Mapping[str, Any]) -> list[Figure]:
    wanted = [
        (dim, name)
        for dim in topology["dims"]
        for name in sorted(dim["collectives"], key=lambda n: n not in RING_COLLECTIVES)
    ]
    # The all_reduce of each dim first.
    ring = ("all_reduce", "all_gather", "reduce_scatter")
    fitted = [(dim, name) for name in ring for dim in topology["dims"] if name in dim["collectives"]]
    wanted = fitted or wanted
    if not wanted:
        return []
    chosen = capped(section, wanted, MAX_PANELS, "panels")
    x = size_axis([row["size_bytes"] for dim, name in chosen for row in dim["collectives"][name]["table"]])
    curves = [_curves(dim, name) for dim, name in chosen]
    values = [v for series in curves for one in series for v in (*one.y, *(one.band or ((), ()))[1])]
    y = value_axis(values, seconds_tick, log=True, most=6)
    panels = [
        _panel(dim, name, series, x, y, i)
        for i, ((dim, name), series) in enumerate(zip(chosen, curves, strict=True))
    ]
    return [
        Figure(
            "Time over tensor size, both axes logarithmic and common to all panels. "
            "A point is the lower quartile of the samples, from the last arrival of a rank on; the band is what "
            "nine of ten new launches would measure, and the grey ground the sizes that the constants are fitted on. "
            "Far from the points, a line misleads DTensor’s planner.",
            legend(STYLES, prefix="fitL"),
            panels,
            3,
        )
    ]


def _panel(
    dim: Mapping[str, Any], name: str, series: Sequence[Series], x: Axis, y: Axis, index: int
) -> Panel:
    ratio = dim["residuals"]["geometric_mean_ratio"]
    desc = (
        "Measured times, their table with its interval, and the fitted constants; "
        f"over the dim the constants are off by {ratio:.2f} times in the mean."
    )
    title = f"{name} over {dim['name']}, {dim['ranks']} ranks"
    low, high = dim["fitted_on"]["size_bytes"]
    shade = (low / 1.1, high * 1.1)
    return line_panel(title, series, x, y, columns=3, prefix=f"fit{index}", desc=desc, shade=shade)


def _curves(dim: Mapping[str, Any], name: str) -> list[Series]:
    """The lines first, so that the points lie on top. Nothing is drawn beyond the measured sizes."""
    table = dim["collectives"][name]["table"]
    ends = [float(row["size_bytes"]) for row in table]
    # What is linear in size is bent on a logarithmic axis: it takes points between the rows to draw it.
    sizes = sorted({*ends, *(float(s) for s in np.geomspace(ends[0], ends[-1], 33))})

    def ring(constants: Mapping[str, Any]) -> list[float]:
        return [1e-6 * ring_us(name, size, dim["ranks"], constants) for size in sizes]

    series = []
    if name in RING_COLLECTIVES:
        if dim["builtin"] is not None:
            series.append(Series("built-in", BUILTIN, sizes, ring(dim["builtin"])))
        series.append(Series("fitted", FITTED, sizes, ring(dim)))
    prices = [price(dim["collectives"][name], size) for size in sizes]
    band = [p.low_us * 1e-6 for p in prices], [p.high_us * 1e-6 for p in prices]
    series.append(Series("table", TABLE, sizes, [p.time_us * 1e-6 for p in prices], band))
    series.append(Series("measured", MEASURED, ends, [row["measured_us"] * 1e-6 for row in table]))
    return series


# ------------------------------------------------------------------------------------------ tables


def _interval(pair: Sequence[float]) -> str:
    return f"{significant(pair[0], 3)} – {significant(pair[1], 3)}"


def _basis(dim: Mapping[str, Any]) -> str:
    """What a dim's constants were fitted on, in words."""
    on = dim["fitted_on"]
    low, high = (format_size(size) for size in on["size_bytes"])
    groups = "all groups together" if dim["groups_sharing"] == "together" else "one group alone"
    return f"{dim['name']} is fitted on {on['points']} points from {low} to {high}, {groups}."


def _constants(topology: Mapping[str, Any]) -> t.Table:
    dims = topology["dims"]
    builtin = [dim["builtin"] or {} for dim in dims]

    def bandwidth(dim: Mapping[str, Any]) -> str:
        return ("≥ " if dim.get("bandwidth_is_lower_bound") else "") + significant(dim["bandwidth_GiBps"], 3)

    def ours(name: str) -> list[str]:
        return [significant(b[name], 3) if name in b else t.MISSING for b in builtin]

    intervals = sorted({dim.get("intervals", "") for dim in dims} - {""})
    return t.Table(
        "Fitted constants beside PyTorch’s built-in ones",
        [
            t.text("Mesh dim", [dim["name"] for dim in dims]),
            t.counts("Ranks", [dim["ranks"] for dim in dims]),
            t.text("Layout", [dim["layout"]["kind"] or "unknown" for dim in dims]),
            t.Column("Bandwidth", [bandwidth(dim) for dim in dims], True, "GiB/s"),
            t.Column("90 % interval", [_interval(dim["bandwidth_interval"]) for dim in dims], True, "GiB/s"),
            t.Column("built-in", ours("bandwidth_GiBps"), True, "GiB/s"),
            t.Column(
                "Latency per hop", [significant(dim["latency_us_per_hop"], 3) for dim in dims], True, "µs"
            ),
            t.Column("90 % interval", [_interval(dim["latency_interval"]) for dim in dims], True, "µs"),
            t.Column("built-in", ours("latency_us_per_hop"), True, "µs"),
            t.ratios("Fit off by, mean", [dim["residuals"]["geometric_mean_ratio"] for dim in dims]),
            t.ratios("worst", [dim["residuals"]["worst_ratio"] for dim in dims]),
            t.ratios("Built-in off by, mean", [b.get("geometric_mean_ratio") for b in builtin]),
        ],
        note=" ".join(
            [
                *(_basis(dim) for dim in dims),
                *(f"Intervals: {interval}." for interval in intervals),
                "“Off by”: the larger of predicted and measured time over the smaller; 1 is perfect.",
            ]
        ),
    )


def _left_out(topology: Mapping[str, Any]) -> list[t.Table]:
    left_out = topology.get("left_out") or []
    if not left_out:
        return []
    return [
        t.Table(
            "Mesh dims without constants",
            [
                t.text("Mesh dim", [dim["name"] for dim in left_out]),
                t.counts("Ranks", [dim["ranks"] for dim in left_out]),
                t.text("Why", [dim["reason"] for dim in left_out]),
            ],
        )
    ]


def _residuals(topology: Mapping[str, Any]) -> t.Table:
    rows = [(dim, p) for dim in topology["dims"] for p in dim["residuals"]["points"]]

    def builtin(dim: Mapping[str, Any], point: Mapping[str, Any]) -> float | None:
        constants = dim["builtin"]
        if constants is None or point["collective"] not in RING_COLLECTIVES:
            return None
        return 1e-6 * ring_us(point["collective"], point["size_bytes"], dim["ranks"], constants)

    predicted = [builtin(dim, p) for dim, p in rows]
    return t.Table(
        "Every point: measured, fitted, built-in",
        [
            t.text("Mesh dim", [dim["name"] for dim, _ in rows]),
            t.text("Collective", [p["collective"] for _, p in rows]),
            t.sizes("Size", [format_size(p["size_bytes"]) for _, p in rows]),
            *t.times(
                [
                    ("measured", [p["measured_s"] for _, p in rows]),
                    ("fitted", [p["predicted_s"] for _, p in rows]),
                    ("built-in", predicted),
                ]
            ),
            t.ratios("fitted / measured", [p["predicted_s"] / p["measured_s"] for _, p in rows]),
            t.factors(
                "built-in / measured",
                [
                    None if v is None else v / p["measured_s"]
                    for v, (_, p) in zip(predicted, rows, strict=True)
                ],
            ),
        ],
        folded=True,
    )


def _contention(topology: Mapping[str, Any]) -> list[t.Table]:
    rows = [(dim, name, ratio) for dim in topology["dims"] for name, ratio in dim["contention"].items()]
    if not rows:
        return []
    return [
        t.Table(
            "Time of all groups at once over the time of one alone: 2 where two share one link",
            [
                t.text("Mesh dim", [dim["name"] for dim, _, _ in rows]),
                t.text("Collective", [name for _, name, _ in rows]),
                t.sizes("Size", [format_size(ratio["size_bytes"]) for _, _, ratio in rows]),
                t.ratios("together / alone", [ratio["together_over_alone"] for _, _, ratio in rows]),
            ],
            folded=True,
        )
    ]


def _curves_table(topology: Mapping[str, Any]) -> t.Table:
    rows = [
        (dim, what, name, curve)
        for dim in topology["dims"]
        for what, curves in {"c10d": dim["collectives"], **dim["transitions"]}.items()
        for name, curve in curves.items()
    ]
    curves = [curve for *_, curve in rows]

    def interval(which: str) -> list[str]:
        return [_interval(curve[which]) if curve[which] else t.MISSING for curve in curves]

    return t.Table(
        "A line of its own for every collective and change of placement: time = α + size / β",
        [
            t.text("Mesh dim", [dim["name"] for dim, *_ in rows]),
            t.text("Of", [what for _, what, _, _ in rows]),
            t.text("Call", [name for _, _, name, _ in rows]),
            t.Column("α", t.aligned([curve["alpha_us"] for curve in curves]), True, "µs"),
            t.Column("90 % interval", interval("alpha_interval"), True, "µs"),
            t.Column("β", t.aligned([curve["beta_GiBps"] for curve in curves]), True, "GiB/s"),
            t.Column("90 % interval", interval("beta_interval"), True, "GiB/s"),
            t.ratios("off by, mean", [curve["geometric_mean_ratio"] for curve in curves]),
            t.counts("Points", [curve["points"] for curve in curves]),
            t.counts("Launches", [curve["launches"] for curve in curves]),
            t.Column(
                "Sizes", [" – ".join(format_size(s) for s in curve["size_bytes"]) for curve in curves], True
            ),
        ],
        note="Prices are read from the tables of measured times; a line sums one up.",
        folded=True,
    )
