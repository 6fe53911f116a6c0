"""Collectives per mesh dim: bus bandwidth over size, late ranks, and contention between groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dtbench.grouping import group_by, in_order
from dtbench.records.result import Header
from dtbench.reporting.html.axes import bandwidths_axis
from dtbench.reporting.html.cases import ReportCase, distinct, main_dtype
from dtbench.reporting.html.figures import DASHES, LOOKS, CurvePanel, DrawnCurve, Figure, Style, curves, lines
from dtbench.reporting.html.parts.ranks import add_ranks
from dtbench.reporting.html.parts.redistribution import plain_cases, times_over_size
from dtbench.reporting.html.parts.suites import case_columns
from dtbench.reporting.html.section import Material, Part, ReportSection
from dtbench.stats import bandwidth_drops
from dtbench.stats.layout import layout_of
from dtbench.suite import Param
from dtbench.text import columns
from dtbench.text.table import MAX_ROWS, Table
from dtbench.text.units import format_bandwidth, format_size

# GB/s per link and direction, by NVML's version number (nvml.h, NVML_NVLINK_VERSION_*: 1.0, 2.0, 2.2,
# 3.0, 3.1, 4.0, 5.0). Source: NVIDIA's NVLink page, GB/s of both directions over links (V100 300/6, A100 600/12,
# H100 900/18, B200 1800/18) and the P100 white paper (160/4).
NVLINK_GBPS = {"1": 20.0, "2": 25.0, "3": 25.0, "4": 25.0, "5": 25.0, "6": 25.0, "7": 50.0}
OUT, DROPPED = "out of place", "in a drop of bandwidth"
MAIN = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
GROUPS = {
    "alone": "“Alone”: only one group of the mesh dim communicates. ",
    "together": "“Together”: all groups of the mesh dim communicate at once, as in a program, over shared links. ",
}
MODES = {"back_to_back": "calls back to back", "isolated": "isolated calls"}


def limit_of(header: Header, dim: str) -> float | None:
    """Returns the bandwidth of a GPU's NVLinks in one direction, in bytes per second.

    It is None unless all ranks of a group are on one host and all pairs of their GPUs are linked.
    """
    layout = next((layout for layout in layout_of(header) if layout.name == dim), None)
    if layout is None or layout.hosts_per_group != (1, 1) or not layout.nvlink:
        return None
    of_gpus = [gpu.nvlink for gpu in header.machine.gpus]
    speeds = {
        NVLINK_GBPS.get(str(nvlink.version), 0.0) * nvlink.active_links * 1e9 if nvlink else 0.0
        for nvlink in of_gpus
    }
    speed = speeds.pop() if layout.nvlink[0] == layout.nvlink[1] and len(speeds) == 1 else 0.0
    return speed if speed > 0 else None


def fill(section: ReportSection, material: Material) -> None:
    cases = [c for c in material.cases(*COLLECTIVES.suites) if c.impls and c.only.size_bytes]
    if not cases:
        return
    header = material.sources.runs[0].header
    dtype = main_dtype(cases)
    drawn = _main_mode([c for c in cases if c.get("dtype") == dtype])
    setting = f"{dtype}, {MODES.get(str(drawn[0].get('mode')), 'isolated calls')}"
    dims = distinct(str(c.get("mesh_dim")) for c in drawn)
    peaks = material.sources.peaks
    limits = {dim: limit for dim in dims if (limit := peaks.get(dim) or limit_of(header, dim))}
    sources = {dim: "as given" if dim in peaks else "the NVLinks of a GPU in one direction" for dim in limits}
    words = "; ".join(f"{dim} {format_bandwidth(limits[dim])}, {sources[dim]}" for dim in limits)
    section.lead = (
        "Bus bandwidth is the data that each rank has to move, divided by the time. It is comparable between "
        "collectives and numbers of ranks (nccl-tests’ factors; GB = 10⁹ bytes). "
        + "".join(words for groups, words in GROUPS.items() if any(c.get("groups") == groups for c in cases))
        + "Sizes are those of the whole tensor of a group. "
        + (f"Limits: {words}." if words else "No limit is drawn, since the speed of the links is unknown.")
    )
    section.notes += [f"{drop}." for drop in material.drops]
    section.add(
        _bandwidths(section, [c for c in drawn if c.only.busbw_Bps], setting, limits), _contention(drawn)
    )
    if not material.cases("redistribute") and material.sources.topology is None:
        section.add(times_over_size(section, plain_cases(cases), folded="Time over size"))
    add_ranks(section, material.sources.runs)
    section.add(_table(cases))
    _headlines(section, cases, limits)
    for drop in material.drops[:1] if section.outcome else ():
        section.outcome += f", and {drop.collective} drops at {format_size(drop.first_bytes)}"


def _main_mode(cases: Sequence[ReportCase]) -> Sequence[ReportCase]:
    """Returns the isolated calls, or those of the first mode if there are no isolated ones, as in some logs."""
    by_mode = group_by(cases, lambda c: c.get("mode") or "isolated")
    return by_mode.get("isolated") or next(iter(by_mode.values()))


def _place(case: ReportCase) -> str:
    return {True: "in place", False: OUT}.get(case.get("in_place"), "")  # type: ignore[call-overload, no-any-return]


def _headlines(section: ReportSection, cases: Sequence[ReportCase], limits: Mapping[str, float]) -> None:
    """Adds a headline per mesh dim: the best bandwidth of all_reduce, or else of the first collective."""
    by_name = group_by((c for c in cases if c.only.busbw_Bps), lambda c: c.name)
    reduces = by_name.get("all_reduce") or next(iter(by_name.values()), [])
    best = []
    for dim, members in group_by(reduces, lambda c: str(c.get("mesh_dim"))).items():
        candidates = [c for c in members if c.get("groups") == "together"] or members
        case = max(candidates, key=lambda c: c.only.busbw_Bps or 0)
        rate = case.only.busbw_Bps or 0.0
        limit_text = f" of {format_bandwidth(limits[dim])}, {rate / limits[dim]:.0%}" if dim in limits else ""
        groups = f", groups {case.get('groups')}" if case.get("groups") else ""
        words = f"over {dim}{limit_text}: bus bandwidth of {case.name} at {format_size(case.only.size_bytes)}{groups}"
        section.headlines.append((format_bandwidth(rate), words))
        best.append(f"{format_bandwidth(rate)} over {dim}{limit_text.replace(',', ' or')}")
    if best:
        section.outcome = f"{reduces[0].name} reaches {', '.join(best[:3])}"


def _bandwidths(
    section: ReportSection, cases: Sequence[ReportCase], setting: str, limits: Mapping[str, float]
) -> Figure | None:
    """Draws a panel per collective. Colours distinguish mesh dims; dashes groups alone or together, and in place."""
    dims = section.capped(distinct(map(_dim, cases)), "mesh dims", len(LOOKS))
    kinds = {(c.get("groups"), c.get("in_place")): c for c in cases}.values()
    ways = distinct(map(_way, sorted(kinds, key=lambda c: (c.get("groups") != "together", _place(c) != OUT))))
    styles: dict[str, Style] = {}
    for (dim, ranks), look in zip(dims, LOOKS, strict=False):
        for index, way in enumerate(ways):
            styles[_label((dim, ranks), way)] = replace(
                look, dash=DASHES[min(index, len(DASHES) - 1)], hollow=index > 0
            )
        if dim in limits:
            styles[f"limit of {dim}"] = replace(look, marker="", dash=(1, 2))
    styles[DROPPED] = Style("ink", "X", None)
    ordered = sorted(cases, key=lambda c: c.only.size_bytes or 0)
    ends = [float(c.only.size_bytes or 0) for c in (*ordered[:1], *ordered[-1:])]
    panels, by_name = [], group_by(ordered, lambda c: c.name)
    for name in in_order(by_name, MAIN):
        by_label = group_by(by_name[name], lambda c: _label(_dim(c), _way(c)))
        series = lines(
            {label: bandwidth_points(members) for label, members in by_label.items() if label in styles}
        )
        for curve in list(series):
            times = [size / rate for size, rate in zip(curve.x, curve.y, strict=True)]
            for drop in bandwidth_drops(curve.x, times):
                series += lines({DROPPED: [(curve.x[i], curve.y[i]) for i in drop]})
        series += [
            DrawnCurve(label, ends, [rate] * 2)
            for dim, rate in limits.items()
            if (label := f"limit of {dim}") in styles
        ]
        panels.append(CurvePanel(name, series))
    groups = {c.get("groups") for c in cases}
    shared = "; where “together” lies below “alone”, the groups share a link"
    return curves(
        "bandwidth",
        panels,
        styles,
        f"Bus bandwidth over tensor size, {setting}; both axes logarithmic and common to all panels. A line levels off "
        f"at the bandwidth of the links{shared if {'alone', 'together'} <= groups else ''}.",
        y=bandwidths_axis,
    )


def bandwidth_points(cases: Sequence[ReportCase]) -> list[tuple[float, float | None]]:
    return [(c.only.size_bytes or 0, c.only.busbw_Bps) for c in cases]


def _dim(case: ReportCase) -> tuple[str, Param]:
    return str(case.get("mesh_dim")), case.get("ranks")


def _way(case: ReportCase) -> str:
    return ", ".join(word for word in (str(case.get("groups")), _place(case)) if word)


def _label(dim: tuple[str, Param], way: str) -> str:
    name, ranks = dim
    return ", ".join(filter(None, (name, f"{ranks} ranks" if ranks else "", way)))


def _contention(cases: Sequence[ReportCase]) -> Table:
    """Compares a group alone with all groups together at the largest size."""
    rows = []
    for (dim, name), members in group_by(cases, lambda c: (c.get("mesh_dim"), c.name)).items():
        size = max(c.only.size_bytes or 0 for c in members)
        by_groups = {c.get("groups"): c.only for c in members if c.only.size_bytes == size}
        if {"alone", "together"} <= set(by_groups):
            rows.append((dim, name, size, by_groups["alone"], by_groups["together"]))
    ways = {"alone": [r[3] for r in rows], "together": [r[4] for r in rows]}
    return Table(
        "One group alone vs all groups together, at the largest size",
        [
            columns.text("Mesh dim", [r[0] for r in rows]),
            columns.text("Collective", [r[1] for r in rows]),
            columns.sizes("Size", [format_size(r[2]) for r in rows]),
            *columns.times([(way, [m.estimate_s for m in impls]) for way, impls in ways.items()]),
            *columns.bandwidths(
                [(f"{way}, bus", [m.busbw_Bps for m in impls]) for way, impls in ways.items()]
            ),
            columns.ratios("time together / alone", [b.estimate_s / a.estimate_s for *_, a, b in rows]),
        ],
        folded=True,
    )


def _table(cases: Sequence[ReportCase]) -> Table:
    all_entries = [(c, m) for c in cases for m in c.impls.values()]
    entries = all_entries[:MAX_ROWS]
    measured = [m for _, m in entries]
    params = {"mesh_dim": "Mesh dim", "groups": "Groups", "mode": "Mode", "in_place": "In place"}
    spreads = [m.rank_spread for m in measured]
    quartiles = {"lower quartile": "p25_s", "median": "median_s", "upper quartile": "p75_s"}
    note = "A sample is the longest time of all ranks; bandwidths are those of the lower quartile"
    if all(m.p25_s == m.p75_s for _, m in all_entries):  # a log has one time per size
        quartiles, note = {"time": "estimate_s"}, "There is one time per size"
    rates = {"algorithm": "algbw_Bps", "bus": "busbw_Bps"}
    return Table(
        "Every collective and size",
        [
            *case_columns(
                [c for c, _ in entries], "Collective", params | {"dtype": "Dtype"}, "ranks", "size"
            ),
            columns.sizes("Size", [format_size(m.size_bytes) for m in measured]),
            *columns.times(
                [(title, [getattr(m, name) for m in measured]) for title, name in quartiles.items()]
            ),
            *columns.bandwidths(
                [(title, [getattr(m, name) for m in measured]) for title, name in rates.items()]
            ),
            *([columns.ratios("longest / shortest rank", spreads)] if any(spreads) else []),
        ],
        folded=True,
        total=len(all_entries),
        note=f"Sizes are those of the whole tensor of a group. {note}"
        + ("; the last column is the ratio of the ranks’ own times." if any(spreads) else "."),
    )


COLLECTIVES = Part(
    "collectives",
    "Collectives per mesh dim",
    fill,
    ("collectives", "collectives_other"),  # the latter from imported logs, without a cost model
    "dtbench run collectives",
    measures_links=True,
)
