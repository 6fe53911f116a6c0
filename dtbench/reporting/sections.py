"""What the report says about each suite: a sentence or two, figures, and the tables they stand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtbench.reporting import tables as t
from dtbench.reporting.cases import Case, distinct, geometric_mean, group, others
from dtbench.reporting.figures import (
    Axis,
    LegendItem,
    Panel,
    Row,
    Series,
    Style,
    bandwidth_tick,
    dot_panel,
    legend,
    line_panel,
    seconds_tick,
    size_axis,
    value_axis,
)
from dtbench.units import format_seconds, format_size

# A figure of more panels is not read; the tables hold all.
MAX_PANELS = 12
MAX_DOT_ROWS = 60

CORE, TORCH, FLOOR = Style("s0", "o"), Style("s1", "s", (5, 2), hollow=True), Style("s2", "|", (1.5, 1.5))
IMPL_STYLES = {"core": CORE, "torch": TORCH, "local": FLOOR}
IMPL_WORDS = {
    "core": "dtbench core",
    "torch": "torch.distributed.tensor",
    "local": "plain torch, no distribution",
}
COLLECTIVE_STYLES = {
    "all_reduce": Style("s0", "o"),
    "all_gather": Style("s1", "s", (5, 2)),
    "reduce_scatter": Style("s3", "^", (5, 1.5, 1, 1.5)),
    "all_to_all": Style("s4", "D", (1.5, 1.5), hollow=True),
    "broadcast": Style("s5", "v", (8, 2), hollow=True),
    "scatter": Style("s2", "X", (3, 1, 1, 1, 1, 1)),
}
BUCKET_STYLES = {
    "core": CORE,
    "unbucketed": Style("s3", "^", (5, 1.5, 1, 1.5), hollow=True),
    "limit": Style("s2", "", (1.5, 1.5)),
}


@dataclass(frozen=True)
class Figure:
    caption: str
    legend: Sequence[LegendItem]
    panels: Sequence[Panel]
    columns: int


@dataclass
class Section:
    """missing: the command that would fill it, where there is nothing to show."""

    id: str
    title: str
    lead: str = ""
    figures: list[Figure] = field(default_factory=list)
    tables: list[t.Table] = field(default_factory=list)
    missing: str = ""
    cuts: list[str] = field(default_factory=list)


def capped(section: Section, items: Sequence[Any], most: int, what: str) -> Sequence[Any]:
    """The first so many of them; a cut is said in the section."""
    if len(items) > most:
        section.cuts.append(
            f"The figure shows the first {most} of {len(items)} {what}; the table has them all."
        )
    return items[:most]


def times_(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}×"


# ---------------------------------------------------------------------------------------- dispatch


def dispatch(cases: Sequence[Case]) -> Section:
    section = Section("dispatch", "Dispatch latency")
    cached = [c for c in cases if c.get("call") != "first"]
    if not cached:
        section.missing = "dtbench run dispatch"
        return section
    ratio = geometric_mean(c.ratio("core", "torch") for c in cached)
    section.lead = (
        "Time of one call on the host: look up the sharding, run the local op, wrap the result. "
        "One process plays a rank of a simulated world of 8, as a mesh of one dim (8) or two (2x4). "
        "The floor is the same op on plain local tensors. "
    )
    if ratio is not None:
        section.lead += (
            f"Over all cached calls the core takes {ratio:.2f}× the time of torch (geometric mean)."
        )
    grouped = group(cached, lambda c: (c.get("mesh"), c.get("pass")))
    _dots(
        section,
        {f"mesh {mesh}, {direction}": members for (mesh, direction), members in grouped.items()},
        lambda c: f"{c.name} {c.get('placements')}".strip(),
        "Median time per call, cached. At the right, core over torch: below 1 the core is faster.",
        columns=2,
        sort=True,
        each_axis=True,
    )
    section.tables = [_dispatch_summary(grouped), _dispatch_table(cached, cases)]
    return section


def _dispatch_summary(grouped: Mapping[Any, Sequence[Case]]) -> t.Table:
    both = [
        [r for c in members if (r := c.ratio("core", "torch")) is not None] for members in grouped.values()
    ]
    return t.Table(
        "Core against torch, cached calls, by mesh and pass",
        [
            t.text("Mesh", [mesh for mesh, _ in grouped]),
            t.text("Pass", [direction for _, direction in grouped]),
            t.counts("Cases with both", [len(r) for r in both]),
            t.ratios("core / torch, geometric mean", [geometric_mean(r) for r in both]),
            t.ratios("fastest case", [min(r, default=None) for r in both]),
            t.ratios("slowest case", [max(r, default=None) for r in both]),
            t.counts("Core slower by over 5 %", [sum(x > 1.05 for x in r) for r in both]),
            t.ratios(
                "core / floor, geometric mean",
                [geometric_mean(c.ratio("core", "local") for c in members) for members in grouped.values()],
            ),
        ],
    )


def _dispatch_table(cached: Sequence[Case], cases: Sequence[Case]) -> t.Table:
    known = ("placements", "mesh", "pass", "call")

    def identity(case: Case) -> tuple[Any, ...]:
        return (case.name, *sorted((k, v) for k, v in case.params.items() if k != "call"))

    first = {identity(c): c for c in cases if c.get("call") == "first"}

    def first_of(impl: str) -> list[float | None]:
        return [f.seconds(impl) if (f := first.get(identity(c))) else None for c in cached]

    return t.Table(
        "Every op: median time per call",
        [
            t.text("Op", [c.name for c in cached]),
            t.text("Placements", [c.get("placements") for c in cached]),
            t.text("Mesh", [c.get("mesh") for c in cached]),
            t.text("Pass", [c.get("pass") for c in cached]),
            *_others(cached, known),
            *t.times([(word, [c.seconds(i) for c in cached]) for i, word in _impl_headers(cached)]),
            t.ratios("core / torch", [c.ratio("core", "torch") for c in cached], mark_above=1.05),
            *t.times([("core, first call", first_of("core")), ("torch, first call", first_of("torch"))]),
        ],
        folded=True,
        note="▲ marks where the core takes over 5 % more time than torch. "
        "A first call has to find its sharding; a cached one looks it up.",
    )


def _impl_headers(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """The impls present, in a fixed order, with their column headers."""
    present = {impl for case in cases for impl in case.impls}
    words = {"core": "core", "torch": "torch", "local": "floor"}
    known = [(impl, word) for impl, word in words.items() if impl in present]
    return known + [(impl, impl) for impl in sorted(present - set(words))]


def _others(cases: Sequence[Case], known: Sequence[str]) -> list[t.Column]:
    rest = [others(case, known) for case in cases]
    return [t.text("Other parameters", rest)] if any(rest) else []


def _dots(
    section: Section,
    panels: Mapping[str, Sequence[Case]],
    label: Callable[[Case], str],
    caption: str,
    *,
    columns: int,
    sort: bool = False,
    each_axis: bool = False,
) -> None:
    """A dot plot of time per impl, a panel per entry. each_axis: every panel has a range of its own."""
    chosen = capped(section, list(panels.items()), MAX_PANELS, "groups")
    impls = [i for i in IMPL_STYLES if any(i in c.impls for _, members in chosen for c in members)]
    styles = {i: IMPL_STYLES[i] for i in impls}
    if not styles:
        return
    all_values = [
        s for _, members in chosen for c in members for i in impls if (s := c.seconds(i)) is not None
    ]
    drawn = []
    for index, (title, members) in enumerate(chosen):
        ordered = (
            sorted(members, key=lambda c: c.seconds("torch") or c.seconds("core") or 0.0) if sort else members
        )
        ordered = list(capped(section, ordered, MAX_DOT_ROWS, f"cases of “{title}”"))
        rows = [
            Row(
                label(c),
                {i: s for i in impls if (s := c.seconds(i)) is not None},
                times_(c.ratio("core", "torch")),
            )
            for c in ordered
        ]
        rows = [row for row in rows if row.values]
        if not rows:
            continue
        values = [v for row in rows for v in row.values.values()] if each_axis else all_values
        axis = value_axis(values, seconds_tick)
        desc = f"{len(rows)} rows; times from {format_seconds(min(values))} to {format_seconds(max(values))}."
        drawn.append(dot_panel(title, rows, styles, axis, prefix=f"{section.id}{index}", desc=desc))
    words = {f"{i}: {IMPL_WORDS[i]}": style for i, style in styles.items()}
    section.figures.append(
        Figure(caption, legend(words, prefix=f"{section.id}L", lines=False), drawn, columns)
    )


# ------------------------------------------------------------------------------------- collectives


def main_dtype(cases: Sequence[Case]) -> Any:
    dtypes = {c.get("dtype") for c in cases}
    return "float32" if "float32" in dtypes else min(dtypes, key=str)


def collectives(cases: Sequence[Case]) -> Section:
    section = Section("collectives", "Collectives per mesh dim")
    cases = [c for c in cases if c.impls and next(iter(c.impls.values())).size_bytes]
    if not cases:
        section.missing = "dtbench run collectives"
        return section
    dtype = main_dtype(cases)
    drawn = [c for c in cases if c.get("dtype") == dtype and c.get("mode") in ("isolated", "")]
    with_bus = [c for c in drawn if _only(c).busbw_Bps]
    section.lead = (
        "Bus bandwidth is the data each rank has to move over the time it takes, comparable between "
        "collectives and numbers of ranks (nccl-tests’ factors; GB = 10⁹ bytes). “Alone”: one group of the "
        "mesh dim works. “Together”: all its groups do, as they do in a program, and share what links they "
        "share."
    )
    if with_bus:
        section.figures.append(_bandwidth_figure(section, with_bus, str(dtype)))
    section.tables = [*_contention(drawn), _collectives_table(cases)]
    return section


def _only(case: Case) -> Any:
    return next(iter(case.impls.values()))


def _bandwidth_figure(section: Section, cases: Sequence[Case], dtype: str) -> Figure:
    sizes = [_only(c).size_bytes for c in cases]
    x, y = size_axis(sizes), value_axis([_only(c).busbw_Bps for c in cases], bandwidth_tick, log=True)
    grouped = group(
        sorted(cases, key=lambda c: str(c.get("groups"))), lambda c: (c.get("groups"), c.get("mesh_dim"))
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
        title = f"{dim}, {members[0].get('ranks')} ranks, {groups}"
        peak = max(_only(c).busbw_Bps for c in members)
        desc = f"Bus bandwidth over size for {len(series)} collectives, at most {peak / 1e9:.3g} GB/s."
        panels.append(line_panel(title, series, x, y, columns=columns, prefix=f"bandwidth{index}", desc=desc))
    return Figure(
        f"Bus bandwidth over tensor size, {dtype}, isolated calls; "
        "both axes logarithmic and common to all panels.",
        legend(styles, prefix="bandwidthL"),
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
                    [("alone", [r[3].median_s for r in rows]), ("together", [r[4].median_s for r in rows])]
                ),
                *t.bandwidths(
                    [
                        ("alone, bus", [r[3].busbw_Bps for r in rows]),
                        ("together, bus", [r[4].busbw_Bps for r in rows]),
                    ]
                ),
                t.ratios("time together / alone", [r[4].median_s / r[3].median_s for r in rows]),
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
            *_others(shown, ("mesh_dim", "ranks", "groups", "mode", "dtype", "size")),
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


# ------------------------------------------------------------------------------------ redistribute


def redistribute(cases: Sequence[Case]) -> Section:
    section = Section("redistribute", "Redistribute")
    if not cases:
        section.missing = "dtbench run redistribute"
        return section
    ratio = geometric_mean(c.ratio("core", "torch") for c in cases)
    section.lead = (
        "Time to bring a tensor from one placement to another over one mesh dim, with real process groups."
    )
    if ratio is not None:
        section.lead += f" Over all transitions and sizes the core takes {ratio:.2f}× the time of torch."
    dtype = main_dtype(cases)
    plain = (("groups", "together"), ("mode", "isolated"))
    sweep = [c for c in cases if all(c.get(param) in ("", value) for param, value in plain)]
    drawn = [c for c in sweep or cases if c.get("dtype") == dtype]
    ends = sorted({c.number("size") for c in drawn})
    ends = [ends[0], ends[-1]] if len(ends) > 1 else ends
    panels = {
        f"{dim}, {format_size(size)}": [
            c for c in drawn if c.get("mesh_dim") == dim and c.number("size") == size
        ]
        for dim in distinct(c.get("mesh_dim") for c in drawn)
        for size in ends
    }
    _dots(
        section,
        panels,
        lambda c: c.name,
        f"Median time per redistribute at the smallest and the largest size, {dtype}; "
        "at the right, core over torch.",
        columns=2,
    )
    section.tables = [
        t.Table(
            "Every transition and size: median time",
            [
                t.text("Mesh dim", [c.get("mesh_dim") for c in cases]),
                t.text("Transition", [c.name for c in cases]),
                t.text("Dtype", [c.get("dtype") for c in cases]),
                *_others(cases, ("mesh_dim", "ranks", "dtype", "size")),
                t.sizes("Size", [format_size(c.number("size")) for c in cases]),
                *t.times([(word, [c.seconds(i) for c in cases]) for i, word in _impl_headers(cases)]),
                t.ratios("core / torch", [c.ratio("core", "torch") for c in cases], mark_above=1.05),
            ],
            folded=True,
            note="Sizes are the whole tensor as one group of the mesh dim holds it.",
        )
    ]
    return section


# ---------------------------------------------------------------------------------------- bucketer


def bucketer(cases: Sequence[Case]) -> Section:
    section = Section("bucketer", "Bucketed reduce-scatter")
    cases = [c for c in cases if any(m.algbw_Bps for m in c.impls.values())]
    if not cases:
        section.missing = "dtbench run bucketer"
        return section
    section.lead = (
        "Many small tensors are reduced and scattered: through the bucketer, one call for each (unbucketed), "
        "and as one single tensor of the same bytes, which no bucketing can beat (limit). GB = 10⁹ bytes."
    )
    values = [m.algbw_Bps for c in cases for m in c.impls.values() if m.algbw_Bps]
    x = size_axis([c.number("bucket_bytes") or 1 for c in cases])
    y = value_axis(values, bandwidth_tick)
    swept = [c for c in cases if c.name == "reduce_scatter"]  # the large ones have one bucket size
    grouped = group(swept, lambda c: (c.get("mesh_dim"), c.get("dtype"), c.number("tensor_bytes")))
    columns = 2 if len(grouped) <= 2 else 3
    panels = []
    for index, (key, members) in enumerate(capped(section, list(grouped.items()), MAX_PANELS, "panels")):
        panels.append(_bucket_panel(key, members, x, y, columns, index))
    present = {i: s for i, s in BUCKET_STYLES.items() if any(i in c.impls for c in cases)}
    section.figures = [
        Figure(
            "Throughput over bucket size, one panel per size of the small tensors.",
            legend(present, prefix="bucketL"),
            panels,
            columns,
        )
    ]
    section.tables = [_bucketer_table(cases)]
    return section


def _bucket_panel(
    key: tuple[Any, ...], members: Sequence[Case], x: Axis, y: Axis, columns: int, index: int
) -> Panel:
    dim, dtype, tensor = key
    ordered = sorted(members, key=lambda c: c.number("bucket_bytes"))
    series = []
    for impl, style in BUCKET_STYLES.items():
        points = [
            (c.number("bucket_bytes") or 1, bandwidth)
            for c in ordered
            if impl in c.impls and (bandwidth := c.impls[impl].algbw_Bps)
        ]
        if points:
            series.append(Series(impl, style, [p[0] for p in points], [p[1] for p in points]))
    best = max((s for s in series if s.label == "core"), key=lambda s: max(s.y), default=None)
    desc = (
        f"Throughput over bucket size; the core reaches {max(best.y) / 1e9:.3g} GB/s."
        if best
        else "Throughput."
    )
    title = f"{dim}, tensors of {format_size(tensor)}, {dtype}"
    return line_panel(title, series, x, y, columns=columns, prefix=f"bucket{index}", desc=desc)


def _bucketer_table(cases: Sequence[Case]) -> t.Table:
    def bandwidth(impl: str) -> list[float | None]:
        return [c.impls[impl].algbw_Bps if impl in c.impls else None for c in cases]

    def counter(impl: str, name: str) -> list[float | None]:
        return [c.impls[impl].counters.get(name) if impl in c.impls else None for c in cases]

    def mebibytes(values: Sequence[float | None]) -> list[str]:
        return t.aligned(values, 2**20)

    impls = distinct(impl for c in cases for impl in c.impls)
    return t.Table(
        "Every bucket size and tensor size",
        [
            t.text("Collective", [c.name for c in cases]),
            t.text("Mesh dim", [c.get("mesh_dim") for c in cases]),
            t.text("Dtype", [c.get("dtype") for c in cases]),
            *_others(cases, ("mesh_dim", "ranks", "dtype", "tensor_bytes", "bucket_bytes", "total_bytes")),
            t.sizes("Tensor", [format_size(c.number("tensor_bytes")) for c in cases]),
            t.sizes("Bucket", [format_size(c.number("bucket_bytes")) for c in cases]),
            t.sizes("Total", [format_size(c.number("total_bytes")) for c in cases]),
            *t.bandwidths([(impl, bandwidth(impl)) for impl in impls]),
            t.ratios("time unbucketed / core", [c.ratio("unbucketed", "core") for c in cases]),
            t.ratios("time core / limit", [c.ratio("core", "limit") for c in cases]),
            t.counts("Collectives, core", counter("core", "collectives")),
            t.Column("Copied, core", mebibytes(counter("core", "bytes_copied")), True, "MiB"),
            t.Column("Peak memory, core", mebibytes(counter("core", "peak_bytes")), True, "MiB"),
        ],
        folded=True,
    )


# -------------------------------------------------------------------------- tensor parallel, others


def tensor_parallel(cases: Sequence[Case]) -> Section:
    section = Section("tensor_parallel", "Tensor parallelism")
    if not cases:
        section.missing = "dtbench run tensor_parallel"
        return section
    section.lead = (
        "One op, the blocks of a transformer and the loss behind it, cut over the ranks: the first linear layers by "
        "columns, the last by rows. "
        "“Local” is the plain model on one rank with all of the work, no communication."
    )
    ratio = geometric_mean(c.ratio("core", "torch") for c in cases)
    if ratio is not None:
        section.lead += f" The core takes {ratio:.2f}× the time of torch (geometric mean)."
    grouped = group(cases, lambda c: (c.get("mesh_dim"), c.get("ranks"), c.get("dtype")))
    _dots(
        section,
        {f"{dim}, {ranks} ranks, {dtype}": members for (dim, ranks, dtype), members in grouped.items()},
        lambda c: f"{c.name}, {c.get('pass')}",
        "Median time per step; at the right, core over torch.",
        columns=2,
        each_axis=True,
    )
    section.tables = [
        t.Table(
            "Every block and pass: median time",
            [
                t.text("Block", [c.name for c in cases]),
                t.text("Pass", [c.get("pass") for c in cases]),
                t.text("Mesh dim", [c.get("mesh_dim") for c in cases]),
                t.text("Dtype", [c.get("dtype") for c in cases]),
                *_others(cases, ("mesh_dim", "ranks", "pass", "dtype")),
                *t.times(
                    [
                        ("local" if i == "local" else w, [c.seconds(i) for c in cases])
                        for i, w in _impl_headers(cases)
                    ]
                ),
                t.ratios("core / torch", [c.ratio("core", "torch") for c in cases], mark_above=1.05),
            ],
        )
    ]
    return section


def other_suites(suites: Mapping[str, Sequence[Case]]) -> Section | None:
    """Suites that have no section of their own, such as a user's: a table, since what they mean is not known here."""
    if not suites:
        return None
    section = Section("others", "Other suites")
    section.lead = "Suites without a section of their own, as a table of what was measured."
    for suite, cases in suites.items():
        entries = [(c, m) for c in cases for m in c.impls.values()]
        section.tables.append(
            t.Table(
                f"Suite {suite}",
                [
                    t.text("Case", [c.name for c, _ in entries]),
                    t.text("Parameters", [others(c, ()) for c, _ in entries]),
                    t.text("Impl", [m.impl for _, m in entries]),
                    *t.times(
                        [
                            ("p25", [m.p25_s for _, m in entries]),
                            ("median", [m.median_s for _, m in entries]),
                            ("p75", [m.p75_s for _, m in entries]),
                        ]
                    ),
                    *t.bandwidths([("bandwidth", [m.algbw_Bps for _, m in entries])]),
                ],
            )
        )
    return section
