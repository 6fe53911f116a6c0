"""Collectives per mesh dim: bus bandwidth and time over size, beside the changes of placement and the fitted model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtbench.model import Gpu, Header
from dtbench.model.grouping import group_by
from dtbench.records.layout import layout_of
from dtbench.show.report import tables as t
from dtbench.show.report.axes import bandwidths_axis, seconds_tick, times_axis
from dtbench.show.report.cases import Case, distinct, main_dtype
from dtbench.show.report.figures import LOOKS, Curves, Figure, Series, Style, curves, line
from dtbench.show.report.impls import named
from dtbench.show.report.parts.cost_model import constants_line
from dtbench.show.report.parts.ranks import add_ranks
from dtbench.show.report.section import Material, Part, Section
from dtbench.text.units import format_bandwidth, format_size

# GB/s per link and direction, by NVML's number of the version (nvml.h, NVML_NVLINK_VERSION_*: 1.0, 2.0, 2.2,
# 3.0, 3.1, 4.0, 5.0). Source: NVIDIA's NVLink page, GB/s of both directions over links (V100 300/6, A100 600/12,
# H100 900/18, B200 1800/18) and the P100 white paper (160/4).
NVLINK_GBPS = {"1": 20.0, "2": 25.0, "3": 25.0, "4": 25.0, "5": 25.0, "6": 25.0, "7": 50.0}
LIMIT = Style("ink", "", (1, 2), words="limit of the links")
COLLECTIVE_STYLES = dict(
    zip(
        ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter"),
        LOOKS,
        strict=True,
    )
)
# The change of placement that each collective does the work of.
TRANSITION = {
    "all_reduce": "P->R",
    "all_gather": "S(0)->R",
    "reduce_scatter": "P->S(0)",
    "all_to_all": "S(0)->S(1)",
}
MODES = {"back_to_back": "calls back to back", "isolated": "isolated calls"}
TIME_STYLES = {
    "model": Style("s3", "", (6, 3), words="fitted model"),
    "together": Style("s2", "o", words="c10d, all groups together"),
    "alone": Style("s2", "o", (1.5, 1.5), hollow=True, words="c10d, one group alone"),
    "core": Style("s0", "^", words="core’s redistribute"),
    "torch": Style("s1", "s", (5, 2), hollow=True, words="torch’s redistribute"),
    "limit": LIMIT,
}


def limit_of(header: Header, dim: str) -> float | None:
    """Bytes per second that no collective over the dim can pass: a GPU's NVLinks in one direction, where all ranks of
    a group sit on one host and all pairs are linked; else None."""
    layout = next((one for one in layout_of(header) if one.name == dim), None)
    gpus = header.machine.gpus
    if layout is None or layout.hosts_per_group != (1, 1) or not layout.nvlink or not gpus:
        return None
    found = {_nvlink_Bps(gpu) for gpu in gpus}
    return found.pop() if layout.nvlink[0] == layout.nvlink[1] and len(found) == 1 else None


def _nvlink_Bps(gpu: Gpu) -> float | None:  # noqa: N802
    links = gpu.nvlink
    if links is None:
        return None
    per_link, active = NVLINK_GBPS.get(str(links.version)), links.active_links
    return None if per_link is None or active < 1 else per_link * active * 1e9


def fill(section: Section, of: Material) -> None:
    cases = [c for c in of.cases(*COLLECTIVES.suites) if c.impls and c.only.size_bytes]
    if not cases:
        return
    header = of.sources.runs[0].header
    dtype = main_dtype(cases)
    drawn = _of_one_mode([c for c in cases if c.get("dtype") == dtype])
    way = f"{dtype}, {MODES.get(str(drawn[0].get('mode')), 'isolated calls')}"
    dims = distinct(str(c.get("mesh_dim")) for c in drawn)
    given = {dim: peak for dim, peak in of.sources.peaks.items() if dim in dims}
    limits = given | {
        dim: limit for dim in dims if dim not in given and (limit := limit_of(header, dim)) is not None
    }
    sources = {dim: "as given" if dim in given else "the NVLinks of a GPU in one direction" for dim in limits}
    known = "; ".join(f"over {dim} {sources[dim]}, {format_bandwidth(limits[dim])}" for dim in limits)
    section.lead = (
        "Bus bandwidth is the data each rank has to move over the time it takes, comparable between "
        "collectives and numbers of ranks (nccl-tests’ factors; GB = 10⁹ bytes). “Alone”: one group of the "
        "mesh dim works. “Together”: all its groups do, as they do in a program, and share what links they "
        "share. Sizes are the whole tensor as one group holds it. "
        + (
            f"The limit drawn is {known}."
            if known
            else "The speed of these links is not known here, so no limit is drawn."
        )
    )
    section.add(
        _bandwidths(section, [c for c in drawn if c.only.busbw_Bps], way, limits),
        _times(section, [c for c in drawn if _place(c) == _place(drawn[0])], of, way, limits),
        _contention(drawn),
    )
    add_ranks(section, of.sources.runs)
    section.add(_table(cases))
    _headlines(section, cases)


def _of_one_mode(cases: Sequence[Case]) -> Sequence[Case]:
    """Those of isolated calls; of logs without any, those of the mode they have."""
    by_mode = group_by(cases, lambda c: c.get("mode") or "isolated")
    return by_mode.get("isolated") or next(iter(by_mode.values()))


def _place(case: Case) -> str:
    return {True: "in place", False: "out of place"}.get(case.get("in_place"), "")  # type: ignore[call-overload, no-any-return]


def _headlines(section: Section, cases: Sequence[Case]) -> None:
    """The first collective of each dim, the all_reduce if it was measured, at its best, all groups together."""
    reduced = any(c.name == "all_reduce" for c in cases)
    reduces = [c for c in cases if c.only.busbw_Bps and (c.name == "all_reduce" or not reduced)]
    reduces = [c for c in reduces if c.name == reduces[0].name]
    best = []
    for dim, members in group_by(reduces, lambda c: c.get("mesh_dim")).items():
        together = [c for c in members if c.get("groups") == "together"] or members
        case = max(together, key=lambda c: c.only.busbw_Bps or 0)
        words = f"bus bandwidth of {case.name} over {dim} at its best, {format_size(case.only.size_bytes)}"
        groups = f", groups {case.get('groups')}" if case.get("groups") else ""
        section.headlines.append((format_bandwidth(case.only.busbw_Bps), f"{words}{groups}"))
        best.append(f"{format_bandwidth(case.only.busbw_Bps)} over {dim}")
    if best:
        section.outcome = f"{reduces[0].name} at most {', '.join(best[:3])}"


def _bandwidths(
    section: Section, cases: Sequence[Case], way: str, limits: Mapping[str, float]
) -> Figure | None:
    """A panel per mesh dim, groups and place for the main collectives, and one for the others."""
    names = distinct(c.name for c in cases)
    styles = {name: COLLECTIVE_STYLES.get(name, LOOKS[i % len(LOOKS)]) for i, name in enumerate(names)}
    ordered = sorted(cases, key=lambda c: c.only.size_bytes or 0)
    grouped = group_by(
        ordered, lambda c: (c.name not in TRANSITION, str(c.get("groups")), _place(c), str(c.get("mesh_dim")))
    )
    wanted = sorted(grouped, key=lambda key: (key[0], key[1] != "together", key[2]))
    ends = [float(c.only.size_bytes or 0) for c in (*ordered[:1], *ordered[-1:])]
    panels = []
    for key in section.capped(wanted, "panels"):
        members, (_, groups, place, dim) = grouped[key], key
        series = [
            one
            for name in names
            for one in line(
                name, [(c.only.size_bytes or 0, c.only.busbw_Bps) for c in members if c.name == name]
            )
        ]
        series += [Series("limit", ends, [limits[dim]] * 2)] if dim in limits else []
        peak = max(c.only.busbw_Bps or 0 for c in members)
        desc = f"Bus bandwidth over size for {len(series)} collectives, at most {peak / 1e9:.3g} GB/s."
        words = [dim, f"{members[0].get('ranks')} ranks", groups, place]
        panels.append(Curves(", ".join(word for word in words if word), series, desc))
    return curves(
        "bandwidth",
        panels,
        {**styles, "limit": LIMIT},
        f"Bus bandwidth over tensor size, {way}; both axes logarithmic and common to all panels. "
        "A line that stops rising has reached what the links give; where “together” lies below "
        "“alone”, the groups share a link.",
        y=bandwidths_axis,
        ends=True,
    )


# ------------------------------------------------------------------------------------ time over size


def _times(
    section: Section, cases: Sequence[Case], of: Material, way: str, limits: Mapping[str, float]
) -> Figure | None:
    """A panel per mesh dim and collective that some change of placement needs."""
    by_key = group_by(cases, lambda c: (str(c.get("mesh_dim")), c.name))
    dims = distinct(dim for dim, _ in by_key)
    wanted = [(dim, name) for dim in dims for name in TRANSITION if (dim, name) in by_key]
    moved = [
        c
        for c in of.cases("redistribute")
        if c.get("dtype") == cases[0].get("dtype")
        and c.get("mode") in ("isolated", "")
        and c.get("groups") in ("together", "")
    ]
    panels = []
    for dim, name in section.capped(wanted, "panels"):
        same = [c for c in moved if c.name == TRANSITION[name] and c.get("mesh_dim") == dim]
        series = _lines(by_key[dim, name], same)
        sizes = [float(size) for one in series for size in one.x]
        measured = [c.only for c in by_key[dim, name]]
        factors = [m.busbw_Bps / m.algbw_Bps for m in measured if m.busbw_Bps and m.algbw_Bps]
        if not sizes:
            continue
        if dim in limits and factors:
            ends = [min(sizes), max(sizes)]
            series.append(Series("limit", ends, [size * factors[0] / limits[dim] for size in ends]))
        model = constants_line(of.sources.topology, dim, name, sizes)
        series = [*([Series("model", *model)] if model else []), *series]
        largest = max(max(one.y) for one in series)
        desc = (
            f"Time of {len(series)} ways over tensor size, at most {seconds_tick(float(f'{largest:.2g}'))}."
        )
        panels.append(Curves(f"{name} over {dim}: {TRANSITION[name]}", series, desc))
    return curves(
        "times",
        panels,
        TIME_STYLES,
        f"Time over tensor size, {way}; both axes logarithmic and common to all panels. "
        "The distance of the core and torch from c10d is what a redistribution costs beside its collective; where "
        "the model’s dashes leave the points, its prices mislead.",
        y=times_axis,
    )


def _lines(cases: Sequence[Case], moved: Sequence[Case]) -> list[Series]:
    """The raw collective, alone and together, and the two libraries' change of placement."""
    points: dict[str, list[tuple[float, float]]] = {}
    for groups in ("together", "alone"):
        of = [c.only for c in cases if (c.get("groups") or "together") == groups]
        points[groups] = [(m.size_bytes or 0, m.estimate_s) for m in of]
    for impl in ("core", "torch"):
        points[impl] = [(c.number("size"), s) for c in moved if (s := c.seconds(impl)) is not None]
    return [
        one
        for label, of in points.items()
        for one in line(label, sorted(point for point in of if point[0] > 0))
    ]


# ------------------------------------------------------------------------------------ tables


def _contention(cases: Sequence[Case]) -> t.Table:
    """What the sibling groups cost: the largest size, alone and together."""
    rows = []
    for (dim, name), members in group_by(cases, lambda c: (c.get("mesh_dim"), c.name)).items():
        size = max(c.only.size_bytes or 0 for c in members)
        at = {c.get("groups"): c.only for c in members if c.only.size_bytes == size}
        if {"alone", "together"} <= set(at):
            rows.append((dim, name, size, at["alone"], at["together"]))
    alone, together = [r[3] for r in rows], [r[4] for r in rows]
    times = [("alone", [m.estimate_s for m in alone]), ("together", [m.estimate_s for m in together])]
    bus = [("alone, bus", [m.busbw_Bps for m in alone]), ("together, bus", [m.busbw_Bps for m in together])]
    return t.Table(
        "Alone against together, at the largest size",
        [
            t.text("Mesh dim", [r[0] for r in rows]),
            t.text("Collective", [r[1] for r in rows]),
            t.sizes("Size", [format_size(r[2]) for r in rows]),
            *t.times(times),
            *t.bandwidths(bus),
            t.ratios("time together / alone", [b.estimate_s / a.estimate_s for *_, a, b in rows]),
        ],
    )


def _table(cases: Sequence[Case]) -> t.Table:
    entries = [(c, m) for c in cases for m in c.impls.values()]
    measured = [m for _, m in entries]
    params = {
        "mesh_dim": "Mesh dim",
        "groups": "Groups",
        "mode": "Mode",
        "in_place": "In place",
        "dtype": "Dtype",
    }
    quartiles = [
        ("lower quartile", [m.p25_s for m in measured]),
        ("median", [m.median_s for m in measured]),
        ("upper", [m.p75_s for m in measured]),
    ]
    return t.Table(
        "Every collective and size",
        [
            *named([c for c, _ in entries], "Collective", params, "ranks", "size"),
            t.sizes("Size", [format_size(m.size_bytes) for m in measured]),
            *t.times(quartiles),
            *t.bandwidths(
                [("algorithm", [m.algbw_Bps for m in measured]), ("bus", [m.busbw_Bps for m in measured])]
            ),
            t.ratios("longest / shortest rank", [m.rank_spread for m in measured]),
        ],
        folded=True,
        note="Sizes are the whole tensor as one group holds it. A sample is the longest time of all ranks; bandwidths "
        "are those of the lower quartile; the last column says how far the ranks’ own times lie apart.",
    )


COLLECTIVES = Part(
    "collectives",
    "Collectives per mesh dim",
    fill,
    ("collectives", "collectives_other"),  # of imported logs, what the cost model is not fitted to
    "dtbench run collectives",
    leads=True,
)
