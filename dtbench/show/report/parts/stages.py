"""Where the time of single calls goes, stage by stage, and how the times of all ops are spread."""

from __future__ import annotations

from collections.abc import Sequence

from dtbench.show.report import tables as t
from dtbench.show.report.cases import Case, distinct
from dtbench.show.report.figures import Axis, Series, Style, legend, line_panel, seconds_tick, value_axis
from dtbench.show.report.profiles import CallProfile
from dtbench.show.report.section import Figure
from dtbench.show.report.shapes import Bar, bar_legend, bars_panel, shades
from dtbench.units import format_seconds

# As a call passes them (`dtbench profile`); others come after these.
ORDER = ("entry", "checks", "key", "cache", "plan", "redistribute", "communicate", "local op", "wrap", "glue")
MAX_CASES = 4
ECDF_STYLES = {
    "local": ("floor: plain torch", Style("s2", "", (1.5, 1.5))),
    "core cached": ("core, cached", Style("s0", "")),
    "torch cached": ("torch, cached", Style("s1", "", (5, 2))),
    "core first": ("core, first call", Style("s3", "", (8, 2))),
    "torch first": ("torch, first call", Style("s4", "", (3, 1, 1, 1))),
}


def ecdf_figure(cases: Sequence[Case]) -> Figure | None:
    """A panel per pass: which share of the ops takes at most so long."""
    passes = distinct(c.get("pass") for c in cases)
    found = {str(p): _ecdfs([c for c in cases if c.get("pass") == p]) for p in passes}
    found = {p: series for p, series in found.items() if series}
    if not found:
        return None
    x = value_axis(
        [v for series in found.values() for one in series for v in one.x], seconds_tick, log=True, most=7
    )
    y = Axis(0, 1.02, False, lambda v: f"{v:.0%}", [0, 0.25, 0.5, 0.75, 1])
    panels = []
    for index, (name, series) in enumerate(found.items()):
        middle = "; ".join(f"{ECDF_STYLES[one.label][0]} {format_seconds(_median(one.x))}" for one in series)
        panels.append(
            line_panel(
                name or "all calls",
                series,
                x,
                y,
                columns=2,
                prefix=f"ecdf{index}",
                desc=f"Median op: {middle}.",
            )
        )
    present = {one.label for series in found.values() for one in series}
    return Figure(
        "Share of the ops (both meshes, all placements) that take at most so long. The further left a line, the "
        "faster; the distance to the floor is what distribution adds, that between first and cached calls what "
        "finding a sharding costs once.",
        legend({w: s for k, (w, s) in ECDF_STYLES.items() if k in present}, prefix="ecdfL"),
        panels,
        2,
    )


def _ecdfs(cases: Sequence[Case]) -> list[Series]:
    series = []
    for key, (_, style) in ECDF_STYLES.items():
        impl, _, call = key.partition(" ")
        of = [c for c in cases if (c.get("call") or "cached") == (call or "cached")]
        times = sorted(s for c in of if (s := c.seconds(impl)) is not None)
        if times:
            # A step at every op, from 0.
            xs = [x for time in times for x in (time, time)]
            ys = [y / len(times) for k in range(len(times)) for y in (k, k + 1)]
            series.append(Series(key, style, xs, ys))
    return series


def _median(values: Sequence[float]) -> float:
    return values[len(values) // 2]


# ------------------------------------------------------------------------------------ stages


def stage_figure(calls: Sequence[CallProfile]) -> Figure | None:
    """A panel per case: a bar per impl, its parts the stages."""
    labels = distinct(c.label for c in calls)[:MAX_CASES]
    order = stages_of(calls)
    colours = shades(order)
    panels = []
    for index, label in enumerate(labels):
        mine = [c for c in calls if c.label == label]
        top = max(max(c.whole_ns, sum(max(ns, 0) for ns, _ in c.stages.values())) for c in mine) * 1e-9
        if top <= 0:
            continue
        axis = value_axis([top], seconds_tick, log=False)
        axis = Axis(0, top * 1.01, False, axis.format, axis.ticks)
        bars = [
            Bar(
                c.impl,
                [(stage, c.stages[stage][0] * 1e-9) for stage in order if stage in c.stages],
                f"{format_seconds(c.whole_ns * 1e-9)} in all",
                c.floor_ns * 1e-9 if c.floor_ns is not None else None,
            )
            for c in mine
        ]
        desc = "; ".join(f"{bar.label} {bar.note}" for bar in bars)
        panels.append(bars_panel(label, bars, colours, axis, prefix=f"stages{index}", desc=desc))
    if not panels:
        return None
    return Figure(
        "Where the time of one call goes, stage by stage, what recording costs taken off; the upright strokes are the "
        "plain op alone, so what lies beyond its length is what distribution adds. Stages too short for their name "
        f"are in the table; so are cases beyond the first {MAX_CASES}.",
        bar_legend(colours, prefix="stagesL"),
        panels,
        1,
    )


def stages_of(calls: Sequence[CallProfile]) -> list[str]:
    present = {stage for c in calls for stage in c.stages}
    return [s for s in ORDER if s in present] + sorted(present - set(ORDER))


def stage_table(calls: Sequence[CallProfile]) -> t.Table:
    rows = [(c, stage) for c in calls for stage in stages_of([c])]
    return t.Table(
        "Every stage: time per call",
        [
            t.text("Case", [c.label for c, _ in rows]),
            t.text("Impl", [c.impl for c, _ in rows]),
            t.text("Stage", [stage for _, stage in rows]),
            t.Column("time", t.aligned([c.stages[s][0] for c, s in rows], 1e3, 2), True, "µs"),
            t.Column("plus or minus", t.aligned([c.stages[s][1] for c, s in rows], 1e3, 2), True, "µs"),
            t.Column(
                "share",
                [f"{100 * c.stages[s][0] / c.whole_ns:.0f}" if c.whole_ns else "–" for c, s in rows],
                True,
                "%",
            ),
            t.text("Recorded by", [c.source for c, _ in rows]),
        ],
        folded=True,
    )
