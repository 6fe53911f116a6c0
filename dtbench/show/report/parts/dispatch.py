"""Dispatch latency: time per call on the host, cached and on the first call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dtbench.show.report import tables as t
from dtbench.show.report.cases import Case, geometric_mean, group
from dtbench.show.report.parts.stages import ecdf_figure, stage_figure, stage_table
from dtbench.show.report.profiles import CallProfile
from dtbench.show.report.section import Section, dots, impl_headers, others_column


def dispatch(cases: Sequence[Case], calls: Sequence[CallProfile] = ()) -> Section:
    section = Section("dispatch", "Dispatch latency")
    cached = [c for c in cases if c.get("call") != "first"]
    if not cases and not calls:
        section.missing = "dtbench run dispatch"
        return section
    spread = ecdf_figure(cases)
    section.figures = [spread] if spread else []
    stages = stage_figure(calls)
    if not cached:
        section.lead = "Time of one call on the host."
        section.figures += [stages] if stages else []
        section.tables = ([_first_table(cases)] if cases else []) + ([stage_table(calls)] if calls else [])
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
    dots(
        section,
        {f"mesh {mesh}, {direction}": members for (mesh, direction), members in grouped.items()},
        lambda c: f"{c.name} {c.get('placements')}".strip(),
        "Median time per call, cached, with the lower and upper quartile as a line. At the right, core over torch: "
        "below 1 the core is faster.",
        columns=2,
        sort=True,
        each_axis=True,
    )
    section.figures += [stages] if stages else []
    section.tables = [_dispatch_summary(grouped), _dispatch_table(cached, cases)]
    section.tables += [stage_table(calls)] if calls else []
    return section


def _names(cases: Sequence[Case]) -> list[t.Column]:
    """What tells the cases apart."""
    params = [("Placements", "placements"), ("Mesh", "mesh"), ("Pass", "pass")]
    return [
        t.text("Op", [c.name for c in cases]),
        *(t.text(title, [c.get(param) for c in cases]) for title, param in params),
    ]


def _first_table(cases: Sequence[Case]) -> t.Table:
    return t.Table(
        "Every op: median time of a first call",
        [
            *_names(cases),
            *t.times([(word, [c.seconds(i) for c in cases]) for i, word in impl_headers(cases)]),
            t.ratios("core / torch", [c.ratio("core", "torch") for c in cases], mark_above=1.05),
        ],
        folded=True,
    )


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
            *_names(cached),
            *others_column(cached, known),
            *t.times([(word, [c.seconds(i) for c in cached]) for i, word in impl_headers(cached)]),
            t.ratios("core / torch", [c.ratio("core", "torch") for c in cached], mark_above=1.05),
            *t.times([("core, first call", first_of("core")), ("torch, first call", first_of("torch"))]),
        ],
        folded=True,
        note="▲ marks where the core takes over 5 % more time than torch. "
        "A first call has to find its sharding; a cached one looks it up.",
    )
