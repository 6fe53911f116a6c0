"""Bucketed reduce-scatter: throughput over bucket size. Overlap of communication with computation."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from dtbench.cost.bucket_size import bucket_choices
from dtbench.grouping import group_by
from dtbench.reporting.html.axes import bandwidth_tick, value_axis
from dtbench.reporting.html.figures import CurvePanel, DotRow, Figure, Style, curves, dots, lines
from dtbench.reporting.html.parts.suites import (
    CORE,
    FLOOR,
    TORCH,
    bandwidth_columns,
    case_columns,
    mean_ratio,
    note_slow_floors,
)
from dtbench.reporting.html.section import Material, Part, ReportCase, ReportSection
from dtbench.text import columns
from dtbench.text.table import MAX_ROWS, Table, TableColumn
from dtbench.text.units import format_size, format_speedup

BUCKET_STYLES = {
    "core": replace(CORE, words="core: dtbench’s bucketer"),
    "unbucketed": Style("s3", "^", (5, 1.5, 1, 1.5), hollow=True, words="unbucketed: one call per tensor"),
    "reference": Style("s4", "D", (8, 2), hollow=True, words="reference: fairscale’s algorithm"),
    "packed": Style("s5", "", (4, 1, 1, 1), words="packed: one call per bucket, without copies"),
    "limit": Style("s2", "", (1.5, 1.5), words="limit: one call, without copies"),
}
OVERLAP_STYLES = {
    "core": replace(CORE, words="core: waits at first use"),
    "torch": replace(TORCH, words="torch: waits at first use"),
    "wait_at_once": Style("s3", "^", None, hollow=True, words="waits at once"),
    "local": replace(FLOOR, words="computation only"),
}


def fill(section: ReportSection, material: Material) -> None:
    buckets = [c for c in material.cases("bucketer") if any(m.algbw_Bps for m in c.impls.values())]
    section.lead = "The share of communication that computation covers."
    if buckets:
        section.lead = "Reduce-scatter of many small tensors, in buckets or not. GB = 10⁹ bytes."
        section.add(_throughput(section, buckets), _bucket_table(buckets))
        _headline(section, material, buckets)
    overlaps = material.cases("overlap")
    note_slow_floors(section, overlaps, "Overlap: ")
    section.add(_overlap(overlaps), _overlap_table(overlaps))


def _headline(section: ReportSection, material: Material, cases: Sequence[ReportCase]) -> None:
    """Adds headlines: the speedup of the largest buckets over one call per tensor, and the bucket size to choose."""
    largest = max(c.number("bucket_bytes") for c in cases)
    mean, words = mean_ratio([c for c in cases if c.number("bucket_bytes") == largest], "core", "unbucketed")
    if mean:
        words = f"in buckets of {format_size(largest)} than with one call per tensor: {words}"
        section.headlines.append((format_speedup(mean), words))
    for choice in bucket_choices(material.sources.runs):
        if choice.bucket_cap_mb is not None:
            group = choice.group
            words = f"bucket_cap_mb for {group.dtype} over {group.mesh_dim}={group.ranks}"
            section.headlines.append((format_size(choice.bucket_bytes), words))


def _throughput(section: ReportSection, cases: Sequence[ReportCase]) -> Figure | None:
    """Draws throughput over bucket size, with a panel per mesh dim and size of the small tensors."""
    groups = group_by(
        sorted(cases, key=lambda c: (c.number("tensor_bytes"), c.number("bucket_bytes"))),
        lambda c: (c.get("mesh_dim"), c.number("tensor_bytes"), c.get("dtype"), c.name),
    )
    panels, impls = [], {impl for c in cases for impl in c.impls}
    for (dim, tensor, dtype, name), members in groups.items():
        if name != "reduce_scatter" and len({c.number("bucket_bytes") for c in members}) == 1:
            continue
        points = {
            impl: [
                (c.number("bucket_bytes") or 1, c.impls[impl].algbw_Bps) for c in members if impl in c.impls
            ]
            for impl in BUCKET_STYLES
        }
        panels.append(CurvePanel(f"{dim}, tensors of {format_size(tensor)}, {dtype}", lines(points)))
    return curves(
        "bucket",
        section.capped(panels, "panels"),
        BUCKET_STYLES,
        "Throughput over bucket size, one panel per mesh dim and size of the small tensors."
        + " The closer the core is to the limit, the better." * ({"core", "limit"} <= impls)
        + " Where it equals unbucketed, buckets of that size give no speedup."
        * ({"core", "unbucketed"} <= impls),
        y=partial(value_axis, format_tick=bandwidth_tick, title="throughput"),
        x_title="size of a bucket",
    )


def _bucket_table(all_cases: Sequence[ReportCase]) -> Table:
    cases = all_cases[:MAX_ROWS]

    def counter(name: str) -> list[float | None]:
        return [c.impls["core"].counters.get(name) if "core" in c.impls else None for c in cases]

    params = {
        "mesh_dim": "Mesh dim",
        "dtype": "Dtype",
        "tensor_bytes": "Tensor",
        "bucket_bytes": "Bucket",
        "total_bytes": "Total",
    }
    return Table(
        "Every bucket size and tensor size",
        [
            *case_columns(cases, "Collective", params, "ranks"),
            *bandwidth_columns(cases),
            columns.speeds("core vs unbucketed", [c.ratio("core", "unbucketed") for c in cases]),
            columns.ratios("time core / limit", [c.ratio("core", "limit") for c in cases]),
            columns.counts("Collectives, core", counter("collectives")),
            TableColumn("Copied, core", columns.aligned(counter("bytes_copied"), 2**20), True, "MiB"),
            TableColumn("Peak memory, core", columns.aligned(counter("peak_bytes"), 2**20), True, "MiB"),
        ],
        folded=True,
        total=len(all_cases),
    )


def covered_share(case: ReportCase) -> float | None:
    """Returns the share of the collectives' time that computation covers.

    It is 1 if the step takes no longer than the computation.
    """
    core, at_once, local = (case.seconds(i) for i in ("core", "wait_at_once", "local"))
    if core is None or at_once is None or local is None or at_once <= local:
        return None
    return (at_once - core) / (at_once - local)


def covered_text(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}".replace("-", "−") + " covered"


def _gradient(case: ReportCase) -> str:
    late = case.number("late_ms")
    return format_size(case.number("size")) + (f", a rank {late} ms late" if late else "")


def _overlap(cases: Sequence[ReportCase]) -> Figure | None:
    """Draws the times of layers with an all_reduce each, which is waited for at once or at first use."""
    share = (
        " At the right: share of the collectives’ time that computation covers with the core. At 100 % the step takes "
        "no longer than the computation; below 0 % waiting at once is faster."
    )
    rows = [
        DotRow(
            f"{c.get('mesh_dim')}, {_gradient(c)}",
            {i: s for i in OVERLAP_STYLES if (s := c.seconds(i)) is not None},
            covered_text(covered_share(c)),
        )
        for c in cases
    ]
    return dots(
        "overlap",
        {"Layers with an all_reduce each": rows},
        OVERLAP_STYLES,
        "Overlap: time of several layers with an all_reduce each."
        + (share if any(map(covered_share, cases)) else ""),
        value_axis,
    )


def _overlap_table(cases: Sequence[ReportCase]) -> Table:
    return Table(
        "Overlap: every size",
        [
            columns.text("Mesh dim", [c.get("mesh_dim") for c in cases]),
            columns.text("Gradient", [_gradient(c) for c in cases]),
            columns.text("Dtype", [c.get("dtype") for c in cases]),
            *columns.times(
                [(style.words, [c.seconds(impl) for c in cases]) for impl, style in OVERLAP_STYLES.items()]
            ),
            columns.percents("covered, core", [covered_share(c) for c in cases], 0),
        ],
        folded=True,
    )


BUCKETER = Part(
    "bucketer",
    "Bucketed reduce-scatter and overlap",
    fill,
    ("bucketer", "overlap"),
    "dtbench run bucketer overlap",
    measures_links=True,
)
