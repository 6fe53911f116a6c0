"""Collectives per mesh dim: bus bandwidth and time over size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtbench.layout import layout_of
from dtbench.show.report import tables as t
from dtbench.show.report.cases import Case, distinct, group
from dtbench.show.report.figures import (
    Series,
    Style,
    bandwidth_tick,
    legend,
    line_panel,
    size_axis,
    value_axis,
)
from dtbench.show.report.parts.mesh import heat_figure, ranks_of, skew_figure, skew_table
from dtbench.show.report.parts.times import LIMIT, time_figure
from dtbench.show.report.section import MAX_PANELS, Figure, Section, capped, main_dtype, others_column
from dtbench.show.report.sources import Sources
from dtbench.units import format_bandwidth, format_size

# GB/s per link and direction, by NVML's number of the version (nvml.h, NVML_NVLINK_VERSION_*: 1.0, 2.0, 2.2,
# 3.0, 3.1, 4.0, 5.0). Source: NVIDIA's NVLink page, GB/s of both directions over links (V100 300/6, A100 600/12,
# H100 900/18, B200 1800/18) and the P100 white paper (160/4).
NVLINK_GBPS = {"1": 20.0, "2": 25.0, "3": 25.0, "4": 25.0, "5": 25.0, "6": 25.0, "7": 50.0}

COLLECTIVE_STYLES = {
    "all_reduce": Style("s0", "o"),
    "all_gather": Style("s1", "s", (5, 2)),
    "reduce_scatter": Style("s3", "^", (5, 1.5, 1, 1.5)),
    "all_to_all": Style("s4", "D", (1.5, 1.5), hollow=True),
    "broadcast": Style("s5", "v", (8, 2), hollow=True),
    "scatter": Style("s2", "X", (3, 1, 1, 1, 1, 1)),
}


@dataclass(frozen=True)
class Limit:
    """What no collective over a mesh dim can pass: bytes per second and direction of one rank's links."""

    Bps: float
    words: str


def limit_of(header: Mapping[str, Any], dim: str) -> Limit | None:
    """The NVLinks of one GPU, where all ranks of a group sit on one host and all pairs are linked; else None."""
    layout = next((one for one in layout_of(header) if one.name == dim), None)
    gpus = header["machine"]["gpus"]
    if layout is None or layout.hosts_per_group != (1, 1) or not layout.nvlink or not gpus:
        return None
    found = {_nvlink_Bps(gpu) for gpu in gpus}
    value = found.pop()
    if layout.nvlink[0] < layout.nvlink[1] or found or value is None:
        return None
    return Limit(value, f"the NVLinks of a GPU in one direction, {format_bandwidth(value)}")


def _nvlink_Bps(gpu: Mapping[str, Any]) -> float | None:  # noqa: N802
    links = gpu.get("nvlink")
    if not isinstance(links, Mapping):
        return None
    per_link, active = NVLINK_GBPS.get(str(links.get("version"))), links.get("active_links")
    return None if per_link is None or not isinstance(active, int) or active < 1 else per_link * active * 1e9


def collectives(cases: Sequence[Case], transitions: Sequence[Case], sources: Sources) -> Section:
    section = Section("collectives", "Collectives per mesh dim")
    cases = [c for c in cases if c.impls and next(iter(c.impls.values())).size_bytes]
    if not cases:
        section.missing = "dtbench run collectives"
        return section
    header = sources.runs[0].header
    dtype = main_dtype(cases)
    drawn = [c for c in cases if c.get("dtype") == dtype and c.get("mode") in ("isolated", "")]
    with_bus = [c for c in drawn if _only(c).busbw_Bps]
    limits = {
        str(dim): limit
        for dim in distinct(c.get("mesh_dim") for c in drawn)
        if (limit := limit_of(header, str(dim))) is not None
    }
    section.lead = (
        "Bus bandwidth is the data each rank has to move over the time it takes, comparable between "
        "collectives and numbers of ranks (nccl-tests’ factors; GB = 10⁹ bytes). “Alone”: one group of the "
        "mesh dim works. “Together”: all its groups do, as they do in a program, and share what links they "
        "share. Sizes are the whole tensor as one group holds it. "
    )
    known = "; ".join(f"over {dim} {limit.words}" for dim, limit in limits.items())
    section.lead += (
        f"The limit drawn is {known}."
        if known
        else "The speed of these links is not known here, so no limit is drawn."
    )
    if with_bus:
        section.figures.append(_bandwidth_figure(section, with_bus, str(dtype), limits))
    times = time_figure(section, drawn, transitions, str(dtype), sources.topology, limits)
    found = ranks_of(sources.runs)
    section.figures += [f for f in (times, heat_figure(header, found), skew_figure(found)) if f is not None]
    section.tables = [*_contention(drawn), *skew_table(found, header), _collectives_table(cases)]
    return section


def _only(case: Case) -> Any:
    return next(iter(case.impls.values()))


def _bandwidth_figure(
    section: Section, cases: Sequence[Case], dtype: str, limits: Mapping[str, Limit]
) -> Figure:
    sizes = [_only(c).size_bytes for c in cases]
    x, y = (
        size_axis(sizes),
        value_axis(
            [*(_only(c).busbw_Bps for c in cases), *(limit.Bps for limit in limits.values())],
            bandwidth_tick,
            log=True,
        ),
    )
    grouped = group(
        sorted(cases, key=lambda c: str(c.get("groups")), reverse=True),
        lambda c: (c.get("groups"), c.get("mesh_dim")),
    )
    styles = styles_of(distinct(c.name for c in cases))
    columns = min(max(len(distinct(c.get("mesh_dim") for c in cases)), 2), 3)
    panels = []
    for index, ((groups, dim), members) in enumerate(
        capped(section, list(grouped.items()), MAX_PANELS, "panels")
    ):
        series = []
        for name, style in styles.items():
            mine = sorted((c for c in members if c.name == name), key=lambda c: _only(c).size_bytes)
            if mine:
                series.append(
                    Series(
                        name, style, [_only(c).size_bytes for c in mine], [_only(c).busbw_Bps for c in mine]
                    )
                )
        if str(dim) in limits:
            ends = [min(sizes), max(sizes)]
            series.append(Series("limit", LIMIT, ends, [limits[str(dim)].Bps] * 2))
        title = f"{dim}, {members[0].get('ranks')} ranks, {groups}"
        peak = max(_only(c).busbw_Bps for c in members)
        desc = f"Bus bandwidth over size for {len(series)} collectives, at most {peak / 1e9:.3g} GB/s."
        panels.append(line_panel(title, series, x, y, columns=columns, prefix=f"bandwidth{index}", desc=desc))
    return Figure(
        f"Bus bandwidth over tensor size, {dtype}, isolated calls; "
        "both axes logarithmic and common to all panels. A line that stops rising has reached what the links "
        "give; where “together” lies below “alone”, the groups share a link.",
        legend({**styles, **({"limit": LIMIT} if limits else {})}, prefix="bandwidthL"),
        panels,
        columns,
    )


def styles_of(names: Sequence[str]) -> dict[str, Style]:
    """A style per name; those without one of their own take turns."""
    spare = list(COLLECTIVE_STYLES.values())
    return {name: COLLECTIVE_STYLES.get(name, spare[i % len(spare)]) for i, name in enumerate(names)}


def _contention(cases: Sequence[Case]) -> list[t.Table]:
    """What the sibling groups cost: the largest size, alone and together."""
    rows = []
    for (dim, name), members in group(cases, lambda c: (c.get("mesh_dim"), c.name)).items():
        size = max(_only(c).size_bytes for c in members)
        at = {c.get("groups"): c for c in members if _only(c).size_bytes == size}
        if {"alone", "together"} <= set(at):
            rows.append((dim, name, size, _only(at["alone"]), _only(at["together"])))
    if not rows:
        return []
    return [
        t.Table(
            "Alone against together, at the largest size",
            [
                t.text("Mesh dim", [r[0] for r in rows]),
                t.text("Collective", [r[1] for r in rows]),
                t.sizes("Size", [format_size(r[2]) for r in rows]),
                *t.times(
                    [
                        ("alone", [r[3].estimate_s for r in rows]),
                        ("together", [r[4].estimate_s for r in rows]),
                    ]
                ),
                *t.bandwidths(
                    [
                        ("alone, bus", [r[3].busbw_Bps for r in rows]),
                        ("together, bus", [r[4].busbw_Bps for r in rows]),
                    ]
                ),
                t.ratios("time together / alone", [r[4].estimate_s / r[3].estimate_s for r in rows]),
            ],
        )
    ]


def _collectives_table(cases: Sequence[Case]) -> t.Table:
    entries = [(c, m) for c in cases for m in c.impls.values()]
    shown = [c for c, _ in entries]
    measured = [m for _, m in entries]
    return t.Table(
        "Every collective and size",
        [
            t.text("Mesh dim", [c.get("mesh_dim") for c in shown]),
            t.text("Collective", [c.name for c in shown]),
            t.text("Groups", [c.get("groups") for c in shown]),
            t.text("Mode", [c.get("mode") for c in shown]),
            t.text("Dtype", [c.get("dtype") for c in shown]),
            *others_column(shown, ("mesh_dim", "ranks", "groups", "mode", "dtype", "size")),
            t.sizes("Size", [format_size(m.size_bytes) for m in measured]),
            *t.times(
                [
                    ("p25", [m.p25_s for m in measured]),
                    ("median", [m.median_s for m in measured]),
                    ("p75", [m.p75_s for m in measured]),
                ]
            ),
            *t.bandwidths(
                [("algorithm", [m.algbw_Bps for m in measured]), ("bus", [m.busbw_Bps for m in measured])]
            ),
            t.ratios("longest / shortest rank", [m.rank_spread for m in measured]),
        ],
        folded=True,
        note="Sizes are the whole tensor as one group holds it. A sample is the longest time of all ranks; "
        "the last column says how far the ranks’ own times lie apart.",
    )
