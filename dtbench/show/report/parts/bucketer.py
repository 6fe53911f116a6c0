"""Bucketed reduce-scatter: throughput over bucket size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from dtbench.show.report import tables as t
from dtbench.show.report.cases import Case, distinct, group
from dtbench.show.report.figures import (
    Axis,
    Panel,
    Series,
    Style,
    bandwidth_tick,
    legend,
    line_panel,
    size_axis,
    value_axis,
)
from dtbench.show.report.parts.overlap import (
    overlap_figure,
    overlap_table,
    parts_figure,
    parts_table,
    timeline_figure,
)
from dtbench.show.report.profiles import RankProfile, Span
from dtbench.show.report.section import CORE, MAX_PANELS, Figure, Section, capped, others_column
from dtbench.units import format_size

BUCKET_STYLES = {
    "core": CORE,
    "unbucketed": Style("s3", "^", (5, 1.5, 1, 1.5), hollow=True),
    "reference": Style("s4", "D", (8, 2), hollow=True),
    "limit": Style("s2", "", (1.5, 1.5)),
}


def bucketer(
    cases: Sequence[Case],
    overlaps: Sequence[Case] = (),
    profiles: Sequence[RankProfile] = (),
    spans: Mapping[str, Sequence[Span]] = MappingProxyType({}),
) -> Section:
    section = Section("bucketer", "Bucketed reduce-scatter and overlap")
    cases = [c for c in cases if any(m.algbw_Bps for m in c.impls.values())]
    if cases:
        _throughput(section, cases)
    more = [
        overlap_figure(overlaps) if overlaps else None,
        parts_figure(profiles),
        timeline_figure(spans),
    ]
    section.figures += [figure for figure in more if figure is not None]
    section.tables += [overlap_table(overlaps)] if overlaps else []
    section.tables += [parts_table(profiles)] if profiles else []
    if not section.figures and not section.tables:
        section.missing = "dtbench run bucketer overlap"
    section.lead = section.lead or "How much communication hides behind computation."
    return section


def _throughput(section: Section, cases: Sequence[Case]) -> None:
    section.lead = (
        "Many small tensors are reduced and scattered: through the bucketer, one call for each (unbucketed), "
        "and as one single tensor of the same bytes, which no bucketing can beat (limit). The reference is fairscale’s "
        "algorithm. GB = 10⁹ bytes."
    )
    values = [m.algbw_Bps for c in cases for m in c.impls.values() if m.algbw_Bps]
    x = size_axis([c.number("bucket_bytes") or 1 for c in cases])
    y = value_axis(values, bandwidth_tick)
    swept = [c for c in cases if c.name == "reduce_scatter"]  # the large ones have one bucket size
    grouped = group(swept, lambda c: (c.get("mesh_dim"), c.get("dtype"), c.number("tensor_bytes")))
    columns = 2 if len(grouped) in (1, 2, 4) else 3
    panels = []
    for index, (key, members) in enumerate(capped(section, list(grouped.items()), MAX_PANELS, "panels")):
        panels.append(_bucket_panel(key, members, x, y, columns, index))
    present = {i: s for i, s in BUCKET_STYLES.items() if any(i in c.impls for c in cases)}
    section.figures = [
        Figure(
            "Throughput over bucket size, one panel per size of the small tensors. The nearer the core to the "
            "limit the better; where it falls to the unbucketed, buckets of that size buy nothing.",
            legend(present, prefix="bucketL"),
            panels,
            columns,
        )
    ]
    section.tables = [_bucketer_table(cases)]


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
            *others_column(
                cases, ("mesh_dim", "ranks", "dtype", "tensor_bytes", "bucket_bytes", "total_bytes")
            ),
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
