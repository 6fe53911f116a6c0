"""Collectives per mesh dim: bus bandwidth over size, contention between groups, and late ranks.

Another section compares the bus bandwidth of several systems.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dtbench.grouping import group_by, sort_by_order
from dtbench.records.result import Header, Result, Run
from dtbench.reporting.html.axes import bandwidths_axis, value_axis
from dtbench.reporting.html.figures import (
    DASHES,
    LOOKS,
    CurvePanel,
    DotRow,
    DrawnCurve,
    Figure,
    Style,
    curves,
    dots,
    lines,
)
from dtbench.reporting.html.parts.redistribution import plain_cases, times_over_size
from dtbench.reporting.html.parts.suites import case_columns
from dtbench.reporting.html.section import (
    Material,
    Part,
    ReportCase,
    ReportSection,
    collect,
    distinct,
    equal_parts,
    main_dtype,
)
from dtbench.reporting.suite_answers import answer_tables
from dtbench.stats import bandwidth_drops, estimate_s
from dtbench.stats.layout import format_hosts, from_last_arrival_s, layout_of, mesh_groups
from dtbench.suite.mesh import Groups
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
    speeds = {
        NVLINK_GBPS.get(str(nvlink.version), 0.0) * nvlink.active_links * 1e9 if nvlink else 0.0
        for nvlink in [gpu.nvlink for gpu in header.machine.gpus]
    }
    speed = speeds.pop() if layout.nvlink[0] == layout.nvlink[1] and len(speeds) == 1 else 0.0
    return speed if speed > 0 else None


def fill(section: ReportSection, material: Material) -> None:
    section.add(*answer_tables(material.sources.runs, "collectives"))
    if not (cases := equal_parts(material.cases(*COLLECTIVES.suites))):
        return
    runs, dtype = material.sources.runs, main_dtype(cases)
    drawn = _main_mode([c for c in cases if c.get("dtype") == dtype])
    setting = f"{dtype}, {MODES.get(str(drawn[0].get('mode')), 'isolated calls')}"
    peaks = material.sources.peaks
    limits = {
        dim: limit
        for dim in distinct(str(c.get("mesh_dim")) for c in drawn)
        if (limit := peaks.get(dim) or limit_of(runs[0].header, dim))
    }
    words = "; ".join(
        f"{dim} {format_bandwidth(limit)}, "
        + ("as given" if dim in peaks else "the NVLinks of a GPU in one direction")
        for dim, limit in limits.items()
    )
    section.lead = (
        "Bus bandwidth is the data that each rank has to move, divided by the time. It is comparable between "
        "collectives and numbers of ranks (nccl-tests’ factors; GB = 10⁹ bytes). "
        + "".join(words for groups, words in GROUPS.items() if any(c.get("groups") == groups for c in cases))
        + "Sizes are those of the whole tensor of a group. "
        + (f"Limits: {words}." if words else "No limit is drawn, since the speed of the links is unknown.")
    )
    section.notes += [f"{drop}." for drop in material.drops]
    hosts = format_hosts({d.name: (d.hosts_per_group, d.ranks_per_host) for d in layout_of(runs[0].header)})
    section.add(
        _bandwidths(section, [c for c in drawn if c.only.busbw_Bps], setting, limits, hosts),
        _contention(drawn),
    )
    if not material.cases("redistribute") and material.sources.topology is None:
        section.add(times_over_size(section, plain_cases(cases), folded="Time over size"))
    skews = ranks_of(runs)
    section.add(_arrival_figure(skews), _ranks_table(skews, runs[0].header), _table(cases))
    _headlines(section, cases, limits)
    for drop in material.drops[:1] if section.outcome else ():
        section.outcome += f", and {drop.collective} drops at {format_size(drop.first_bytes)}"


def _main_mode(cases: Sequence[ReportCase]) -> Sequence[ReportCase]:
    """Returns the isolated calls, or those of the first mode if none is isolated, as in some logs."""
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
        section.headlines.append(
            (
                format_bandwidth(rate),
                f"over {dim}{limit_text}: bus bandwidth of {case.name} at {format_size(case.only.size_bytes)}{groups}",
            )
        )
        best.append(f"{format_bandwidth(rate)} over {dim}{limit_text.replace(',', ' or')}")
    if best:
        section.outcome = f"{reduces[0].name} reaches {', '.join(best[:3])}"


def _bandwidths(
    section: ReportSection,
    cases: Sequence[ReportCase],
    setting: str,
    limits: Mapping[str, float],
    hosts: Mapping[str, str],
) -> Figure | None:
    """Draws a panel per collective. Colours show the mesh dim; dashes show grouping and placement (in place or not)."""
    dims = section.capped(distinct(_dim(c, hosts) for c in cases), "mesh dims", len(LOOKS))
    kinds = {(c.get("groups"), c.get("in_place")): c for c in cases}.values()
    ways = distinct(
        map(
            _grouping_and_placement,
            sorted(kinds, key=lambda c: (c.get("groups") != "together", _place(c) != OUT)),
        )
    )
    styles: dict[str, Style] = {}
    for (dim, ranks), look in zip(dims, LOOKS, strict=False):
        styles |= {
            _label((dim, ranks), way): replace(
                look, dash=DASHES[min(index, len(DASHES) - 1)], hollow=index > 0
            )
            for index, way in enumerate(ways)
        }
        if dim in limits:
            styles[f"limit of {dim}"] = replace(look, marker="", dash=(1, 2))
    styles[DROPPED] = Style("ink", "X", None)
    ordered = sorted(cases, key=lambda c: c.only.size_bytes or 0)
    ends = [float(c.only.size_bytes or 0) for c in (*ordered[:1], *ordered[-1:])]
    panels, by_name = [], group_by(ordered, lambda c: c.name)
    for name in sort_by_order(by_name, MAIN):
        series = lines(
            {
                label: bandwidth_points(members)
                for label, members in group_by(
                    by_name[name], lambda c: _label(_dim(c, hosts), _grouping_and_placement(c))
                ).items()
                if label in styles
            }
        )
        for curve in list(series):
            for drop in bandwidth_drops(
                curve.x, [size / rate for size, rate in zip(curve.x, curve.y, strict=True)]
            ):
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


def _dim(case: ReportCase, hosts: Mapping[str, str]) -> tuple[str, str]:
    """Returns the mesh dim and the number of its ranks, by hosts if the groups span several."""
    name, ranks = str(case.get("mesh_dim")), case.get("ranks")
    return name, hosts.get(name) or (f"{ranks} ranks" if ranks else "")


def _grouping_and_placement(case: ReportCase) -> str:
    return ", ".join(word for word in (str(case.get("groups")), _place(case)) if word)


def _label(dim: tuple[str, str], way: str) -> str:
    return ", ".join(filter(None, (*dim, way)))


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
    params = {
        "mesh_dim": "Mesh dim",
        "groups": "Groups",
        "mode": "Mode",
        "in_place": "In place",
        "dtype": "Dtype",
    }
    spreads = [m.rank_spread for m in measured]
    quartiles = {"lower quartile": "p25_s", "median": "median_s", "upper quartile": "p75_s"}
    note = "A sample is the longest time of all ranks; bandwidths are those of the lower quartile"
    if all(m.p25_s == m.p75_s for _, m in all_entries):  # a log has one time per size
        quartiles, note = {"time": "estimate_s"}, "There is one time per size"
    return Table(
        "Every collective and size",
        [
            *case_columns([c for c, _ in entries], "Collective", params, "ranks", "size"),
            columns.sizes("Size", [format_size(m.size_bytes) for m in measured]),
            *columns.times(
                [(title, [getattr(m, name) for m in measured]) for title, name in quartiles.items()]
            ),
            *columns.bandwidths(
                [("algorithm", [m.algbw_Bps for m in measured]), ("bus", [m.busbw_Bps for m in measured])]
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


# More rows are not readable on a page.
MAX_RANKS = 48
LATE = {"late": Style("s1", "D", words="median, lower and upper quartile")}


@dataclass(frozen=True)
class RankSkew:
    """Arrival delays of all ranks at one collective over one mesh dim.

    Attributes:
        dim: the mesh dim.
        name: the collective.
        size_bytes: message size.
        busbw_Bps: rank -> bus bandwidth of its group from the arrival of the last rank on, bytes per second.
        late_s: rank -> (lower quartile, median, upper quartile) of its delay after the first rank of its group.
        last: rank -> share of the samples in which it arrived last.
    """

    dim: str
    name: str
    size_bytes: int
    busbw_Bps: dict[int, float]  # noqa: N815 - bytes per second
    late_s: dict[int, tuple[float, float, float]]
    last: dict[int, float]

    @property
    def words(self) -> str:
        return f"{self.dim}: {self.name}, {format_size(self.size_bytes)}"


def ranks_of(runs: Sequence[Run]) -> list[RankSkew]:
    """Returns the delays of each mesh dim, at the largest all_reduce (or else the first collective) of all groups."""
    skews, groups = [], mesh_groups(runs[0].header)
    usual = {"groups": ("together", None), "mode": ("isolated", None)}
    measured = [
        r
        for run in runs
        for r in run.collectives()
        if r.rank_samples_s and r.size_bytes and r.busbw_Bps and r.algbw_Bps
        if all(r.params.get(name) in values for name, values in usual.items())
    ]
    by_dim = group_by(measured, lambda r: r.params.get("mesh_dim"))
    for dim in runs[0].header.mesh.dim_names if groups else ():
        if results := by_dim.get(dim):
            chosen = max(results, key=lambda r: (r.name == "all_reduce", r.size_bytes or 0))
            matching = [r for r in results if (r.name, r.size_bytes) == (chosen.name, chosen.size_bytes)]
            skews.append(_ranks_of(dim, matching, groups[dim]))
    return [skew for skew in skews if skew.late_s]


def _ranks_of(dim: str, results: Sequence[Result], groups: Groups) -> RankSkew:
    """Merges the launches: the median for bandwidths, quartiles over all samples for delays."""
    skew = RankSkew(dim, results[0].name, results[0].size_bytes or 0, {}, {}, {})
    for group in groups:
        late, bandwidths = [], []
        for result in results:
            assert result.busbw_Bps and result.algbw_Bps and result.size_bytes
            shared = min(len(result.rank_samples_s.get(str(rank), ())) for rank in group)
            if len(group) < 2 or not shared:
                continue
            late.append(_lateness_s(result, group, shared))
            # Empty if the ranks have different numbers of samples, as in a damaged file.
            samples = from_last_arrival_s(result, [group])
            if samples and (from_last := estimate_s(samples, result)) > 0:
                bandwidths.append(result.size_bytes * result.busbw_Bps / result.algbw_Bps / from_last)
        if bandwidths:
            skew.busbw_Bps.update(dict.fromkeys(group, float(np.median(bandwidths))))
        delays = np.hstack(late) if late else ()
        for index, (rank, rank_delays) in enumerate(zip(group, delays, strict=False)):
            low, middle, high = np.quantile(rank_delays, (0.25, 0.5, 0.75)).tolist()
            skew.late_s[rank] = low, middle, high
            skew.last[rank] = float(np.mean(np.argmax(delays, axis=0) == index))
    return skew


def _lateness_s(result: Result, group: Sequence[int], samples: int) -> np.ndarray:
    """Returns the delay of each rank after the first rank of its group, shape (ranks, samples).

    Without a common clock, the delay is estimated as the longest time of all ranks minus the rank's own time.
    """
    arrivals_s = [result.rank_arrivals_s.get(str(rank), ())[:samples] for rank in group]
    if all(len(times) == samples for times in arrivals_s):
        arrivals = np.array(arrivals_s)
        return np.asarray(arrivals - arrivals.min(axis=0))
    times_s = np.array([result.rank_samples_s[str(rank)][:samples] for rank in group])
    return np.asarray(times_s.max(axis=0) - times_s)


def _arrival_figure(skews: Sequence[RankSkew]) -> Figure | None:
    """Draws the delay of each rank."""
    panels = {}
    for skew in skews:
        latest = sorted(skew.late_s, key=lambda rank: -skew.late_s[rank][1])[:MAX_RANKS]
        panels[skew.words] = [
            DotRow(
                f"rank {rank}",
                {"late": skew.late_s[rank][1]},
                f"last {skew.last.get(rank, 0):.0%}",
                {"late": (skew.late_s[rank][0], skew.late_s[rank][2])},
            )
            for rank in (sorted(latest) if len(skew.late_s) <= MAX_RANKS else latest)
        ]

    return dots(
        "skew",
        panels,
        LATE,
        "Rank skew: each rank’s arrival at the collective after the first rank of its group, and the share of samples "
        "in which it arrived last. A rank that is nearly always last delays its group.",
        partial(value_axis, log=False),
        folded="Arrival delay, rank by rank",
    )


def _ranks_table(skews: Sequence[RankSkew], header: Header) -> Table:
    hosts = {rank.rank: rank.host for rank in header.ranks}
    rows = [(skew, rank) for skew in skews for rank in sorted(skew.late_s)]
    late = [skew.late_s[rank] for skew, rank in rows]
    return Table(
        "Every rank: arrival delay and bandwidth of its group",
        [
            columns.text("Mesh dim", [skew.dim for skew, _ in rows]),
            columns.text("Collective", [skew.name for skew, _ in rows]),
            columns.sizes("Size", [format_size(skew.size_bytes) for skew, _ in rows]),
            columns.counts("Rank", [rank for _, rank in rows]),
            columns.text("Host", [hosts.get(rank) or "" for _, rank in rows]),
            *columns.times(
                [
                    (word, [quartiles[i] for quartiles in late])
                    for i, word in enumerate(("delay, p25", "median", "p75"))
                ]
            ),
            columns.percents("last", [skew.last.get(rank, 0) for skew, rank in rows], 0, "% of samples"),
            *columns.bandwidths([("group’s bus", [skew.busbw_Bps.get(rank) for skew, rank in rows])]),
        ],
        folded=True,
    )


# More lines in a panel are not readable.
MAX_SYSTEMS = 6
# Collective -> cases of one system by size.
_Curves = Mapping[str, Sequence[ReportCase]]


def fill_systems(section: ReportSection, material: Material) -> None:
    if not (shown := section.capped(material.sources.systems, "systems", MAX_SYSTEMS)):
        return
    systems = {_system_label(runs, material.sources.systems): _curves(runs) for runs in shown}
    section.lead = (
        "Bus bandwidth is comparable between numbers of ranks; dtypes and modes are those of each file. "
        f"The other sections show {next(iter(systems))}."
    )
    best = {label: best for label, of_system in systems.items() if (best := _best_bandwidth(of_system))}
    section.outcome = "at best " + ", ".join(
        f"{label} {format_bandwidth(rate)}" for label, rate in best.items()
    )
    section.add(_systems_figure(systems))


def _system_label(runs: Sequence[Run], systems: Sequence[Sequence[Run]]) -> str:
    """Returns the name of the first file, with its folder if several systems have files of that name."""
    names = [system[0].path.stem for system in systems]
    path = runs[0].path
    return path.stem if names.count(path.stem) == 1 else f"{path.parent.name}/{path.stem}"


def _curves(runs: Sequence[Run]) -> _Curves:
    """Selects the cases of each collective: largest group, all groups together, isolated calls, if available."""
    by_name: dict[str, list[ReportCase]] = {}
    cases = [c for c in equal_parts(collect(runs).get("collectives", [])) if c.only.busbw_Bps]
    for name, members in group_by(cases, lambda c: c.name).items():
        max_ranks = max(c.number("ranks") for c in members)
        usual = {"ranks": max_ranks, "groups": "together", "mode": "isolated", "dtype": "float32"}
        for param, value in usual.items():
            members = [c for c in members if c.get(param) == value] or members
        key = ("mesh_dim", "groups", "mode", "dtype", "in_place")
        matching = [c for c in members if all(c.get(param) == members[0].get(param) for param in key)]
        by_name[name] = sorted(matching, key=lambda c: c.only.size_bytes or 0)
    return by_name


def _best_bandwidth(curves_by_name: _Curves) -> float | None:
    """Returns the best bus bandwidth of all_reduce, or else of the first collective."""
    cases = curves_by_name.get("all_reduce") or next(iter(curves_by_name.values()), [])
    return max((c.only.busbw_Bps or 0.0 for c in cases), default=None)


def _systems_figure(systems: Mapping[str, _Curves]) -> Figure | None:
    panels = [
        CurvePanel(name, lines({label: bandwidth_points(s.get(name, ())) for label, s in systems.items()}))
        for name in distinct(name for system in systems.values() for name in system)
    ]
    # Collectives of a single system are only drawn if the systems share none.
    panels = [panel for panel in panels if len(panel.series) > 1] or panels
    return curves(
        "systems",
        panels,
        dict(zip(systems, LOOKS, strict=False)),
        "Bus bandwidth over tensor size; both axes logarithmic and common to all panels.",
        y=bandwidths_axis,
    )


SYSTEMS = Part("systems", "Comparison of systems", fill_systems)
