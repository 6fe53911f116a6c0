"""How much communication hides behind computation: measured, profiled, and as a timeline per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtbench.show.report import tables as t
from dtbench.show.report.cases import Case, group
from dtbench.show.report.figures import Axis, Panel, Row, Style, dot_panel, legend, seconds_tick, value_axis
from dtbench.show.report.profiles import MAX_SPANS, RankProfile, Span
from dtbench.show.report.section import CORE, FLOOR, TORCH, Figure
from dtbench.show.report.shapes import Bar, Lane, bar_legend, bars_panel, shades, timeline_panel
from dtbench.units import format_seconds, format_size

STYLES = {
    "core": ("core: waits at first use", CORE),
    "torch": ("torch: waits at first use", TORCH),
    "wait_at_once": ("waits at once", Style("s3", "^", None, hollow=True)),
    "local": ("the computation alone", FLOOR),
}
PARTS = {
    "compute": "computing",
    "overlap": "both",
    "exposed": "communicating",
    "host": "neither",
}
MAX_SECTIONS = 3
MAX_RANKS = 8
_LANE_COLOURS = {"communication": "s1", "compute": "s0"}


def hidden(case: Case) -> float | None:
    """The share of the collectives' time that the core hides: 1 where it costs no more than the computation."""
    core, at_once, local = (case.seconds(i) for i in ("core", "wait_at_once", "local"))
    if core is None or at_once is None or local is None or at_once <= local:
        return None
    return (at_once - core) / (at_once - local)


def overlap_figure(cases: Sequence[Case]) -> Figure | None:
    """A panel per mesh dim: an all-reduce per layer, waited for at once or where it is used."""
    panels: list[Panel] = []
    values = [s for c in cases for i in STYLES if (s := c.seconds(i)) is not None]
    if not values:
        return None
    x = value_axis(values, seconds_tick, most=4)
    for index, (dim, members) in enumerate(group(cases, lambda c: c.get("mesh_dim")).items()):
        rows = [
            Row(
                _words(c), {i: s for i in STYLES if (s := c.seconds(i)) is not None}, _hidden_words(hidden(c))
            )
            for c in members
        ]
        rows = [row for row in rows if row.values]
        if rows:
            styles = {i: style for i, (_, style) in STYLES.items()}
            desc = "; ".join(f"{row.label} {row.note}" for row in rows)
            panels.append(dot_panel(f"{dim}", rows, styles, x, prefix=f"overlap{index}", desc=desc))
    present = {i: v for i, v in STYLES.items() if any(i in c.impls for c in cases)}
    return Figure(
        "Overlap: time of some layers with an all-reduce each. At the right, the share of the collectives’ time that "
        "the core hides behind the computation; 100 % would cost no more than the computation alone, below 0 % "
        "waiting at once is better.",
        legend(dict(present.values()), prefix="overlapL", lines=False),
        panels,
        2,
    )


def _words(case: Case) -> str:
    late = case.number("late_ms")
    return format_size(case.number("size")) + (f", a rank {late} ms late" if late else "")


def _hidden_words(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}".replace("-", "−") + " hidden"


def overlap_table(cases: Sequence[Case]) -> t.Table:
    columns = [(words, [c.seconds(i) for c in cases]) for i, (words, _) in STYLES.items()]
    shares = [hidden(c) for c in cases]
    return t.Table(
        "Overlap: every size",
        [
            t.text("Mesh dim", [c.get("mesh_dim") for c in cases]),
            t.text("Gradient", [_words(c) for c in cases]),
            t.text("Dtype", [c.get("dtype") for c in cases]),
            *t.times(columns),
            t.Column(
                "hidden by the core",
                [t.MISSING if s is None else f"{100 * s:.0f}" for s in shares],
                True,
                "%",
            ),
        ],
        folded=True,
    )


# ------------------------------------------------------------------------------------ profiles of ranks


def parts_figure(profiles: Sequence[RankProfile]) -> Figure | None:
    """A panel per section: what each rank did in an iteration."""
    panels = []
    for index, one in enumerate(p for p in profiles[:MAX_SECTIONS] if p.parts_us):
        bars = [
            Bar(f"rank {rank}", [(PARTS[k], parts[k] * 1e-6) for k in PARTS], _shares(parts))
            for rank, parts in list(one.parts_us.items())[:MAX_RANKS]
        ]
        top = max(sum(length for _, length in bar.parts) for bar in bars)
        if top <= 0:
            continue
        ticks = value_axis([top], seconds_tick, log=False)
        axis = Axis(0, top * 1.01, False, seconds_tick, ticks.ticks)
        desc = "; ".join(f"{bar.label}: {bar.note}" for bar in bars)
        panels.append(
            bars_panel(one.label, bars, shades(list(PARTS.values())), axis, prefix=f"parts{index}", desc=desc)
        )
    if not panels:
        return None
    return Figure(
        "What each rank does in one iteration, mean over the profiled ones. “Communicating” is exposed: nothing is "
        "computed meanwhile; “both” is what overlaps. "
        f"At most {MAX_SECTIONS} sections and {MAX_RANKS} ranks are drawn; the table has all.",
        bar_legend(shades(list(PARTS.values())), prefix="partsL"),
        panels,
        1,
    )


def _shares(parts: Mapping[str, float]) -> str:
    communication = parts["overlap"] + parts["exposed"]
    share = f", {parts['overlap'] / communication:.0%} hidden" if communication > 0 else ""
    return f"{format_seconds(sum(parts[k] for k in PARTS) * 1e-6)}{share}"


def timeline_figure(spans: Mapping[str, Sequence[Span]]) -> Figure | None:
    """A panel per section: the middle iteration, two lanes per rank."""
    panels = []
    for index, (section, found) in enumerate(list(spans.items())[:MAX_SECTIONS]):
        ranks = sorted({span.rank for span in found})[:MAX_RANKS]
        lanes = [
            Lane(
                f"rank {rank} {lane}",
                [(s.start_us * 1e-6, s.end_us * 1e-6) for s in found if s.rank == rank and s.lane == lane],
                colour,
            )
            for rank in ranks
            for lane, colour in _LANE_COLOURS.items()
        ]
        top = max(s.end_us for s in found) * 1e-6
        if top <= 0:
            continue
        axis = Axis(0, top * 1.01, False, seconds_tick, value_axis([top], seconds_tick, log=False).ticks)
        drawn = sum(len(lane.spans) for lane in lanes)
        desc = f"{drawn} spans of {len(ranks)} ranks in {format_seconds(top)}."
        panels.append(timeline_panel(section, lanes, axis, prefix=f"timeline{index}", desc=desc))
    if not panels:
        return None
    return Figure(
        "One iteration as a timeline: for each rank when it communicates (from its call until the transport is done) "
        "and when it computes, on rank 0’s clock. Bars above each other of different length: a rank waits for another. "
        "At most "
        f"{MAX_SECTIONS} sections, {MAX_RANKS} ranks and {MAX_SPANS} spans of a lane are drawn; the whole trace "
        "opens in Perfetto.",
        (),
        panels,
        1,
    )


def parts_table(profiles: Sequence[RankProfile]) -> t.Table:
    rows = [(one, rank, parts) for one in profiles for rank, parts in one.parts_us.items()]
    columns = [(PARTS[k], [parts[k] * 1e-6 for *_, parts in rows]) for k in PARTS]
    return t.Table(
        "Profile of ranks: time per iteration",
        [
            t.text("Section", [one.label for one, _, _ in rows]),
            t.text("Rank", [rank for _, rank, _ in rows]),
            *t.times(columns),
            t.counts("Iterations", [one.iterations for one, _, _ in rows]),
            t.ratios(
                "profiled / plain",
                [one.profiled_us / one.plain_us if one.plain_us else None for one, _, _ in rows],
            ),
            t.text("Who is late", ["; ".join(one.late) for one, _, _ in rows]),
        ],
        folded=True,
    )
