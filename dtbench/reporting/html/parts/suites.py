"""Suites that are drawn alike, impl beside impl: blocks of a model, and whatever no part claims."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dtbench.reporting.html.cases import ReportCase, distinct
from dtbench.reporting.html.impls import add_dots, bandwidths, core_beside_torch, impls_of, named, times
from dtbench.reporting.html.section import Material, Part, ReportSection
from dtbench.suite.grouping import group_by
from dtbench.text import table as t
from dtbench.text.units import format_size

MOST_ROWS = 8  # of a table that is not folded, beside a figure


def tensor_parallel(section: ReportSection, of: Material) -> None:
    cases = of.cases("tensor_parallel")
    if not cases:
        return
    section.lead = (
        "One op, the blocks of a transformer and the loss behind it, cut over the ranks: the first linear layers by "
        "columns, the last by rows. The floor is the plain model on one rank with all of the work, no communication. "
        + core_beside_torch(section, cases, "block", "The")
    )
    grouped = group_by(cases, lambda c: (c.get("pass"), c.get("dtype")))
    add_dots(
        section,
        {f"{direction}, {dtype}": members for (direction, dtype), members in grouped.items()},
        lambda c: f"{c.name}, {c.get('mesh_dim')} of {c.get('ranks')}",
        "Time per step; at the right, the core beside torch.",
        each_axis=True,
    )
    params = {"pass": "Pass", "mesh_dim": "Mesh dim", "dtype": "Dtype"}
    columns = [*named(cases, "Block", params, "ranks"), *times(cases)]
    section.add(t.Table("Every block and pass", columns, folded=True))


TENSOR_PARALLEL = Part(
    "tensor_parallel",
    "Tensor parallelism",
    tensor_parallel,
    ("tensor_parallel",),
    "dtbench run tensor_parallel",
    of_links=True,
)


def other_suites(claimed: Collection[str]) -> Part:
    """The part of all suites that no other claims, such as a user's: what is known of any suite is drawn of them."""

    def fill(section: ReportSection, of: Material) -> None:
        suites = {suite: cases for suite, cases in of.suites.items() if suite not in claimed}
        section.lead = "Suites without a section of their own: their cases with the impls side by side."
        panels = {f"Suite {suite}": cases for suite, cases in suites.items()}
        caption = (
            "Time per call, with a line to the upper quartile, of the suites without a section of their own."
        )
        differing = _differences([case for cases in suites.values() for case in cases])
        add_dots(
            section,
            panels,
            lambda c: " ".join([c.name, *(_said(c, param) for param in differing if param in c.params)]),
            caption,
            each_axis=True,
            folded="Case by case" if len(suites) < len(of.suites) else "",
        )
        section.add(*(_generic(f"Suite {suite}", cases) for suite, cases in suites.items()))

    return Part("others", "Other suites", fill)


def _said(case: ReportCase, param: str) -> str:
    """The param's value, a size with its unit."""
    counts_bytes = param == "size" or param.endswith("_bytes")
    return format_size(case.number(param)) if counts_bytes else str(case.get(param))


def _differences(cases: Sequence[ReportCase]) -> list[str]:
    """The params that tell the cases apart."""
    params = distinct(param for c in cases for param in c.params)
    return [param for param in params if len({c.get(param) for c in cases}) > 1]


def _generic(caption: str, cases: Sequence[ReportCase]) -> t.Table:
    """A column per param, then per impl its time, its median and upper quartile, and bandwidths."""
    params = {param: param for param in distinct(param for c in cases for param in c.params)}
    spans = [
        (
            f"{impl}, {field}",
            [getattr(c.impls[impl], f"{field}_s") if impl in c.impls else None for c in cases],
        )
        for impl in impls_of(cases)
        for field in ("median", "p75")
    ]
    columns = [*named(cases, "Case", params), *times(cases), *t.times(spans), *bandwidths(cases)]
    note = (
        "The first column of an impl is the time that stands for it: of host latencies the minimum, of all others the "
        "lower quartile."
    )
    return t.Table(caption, columns, folded=len(cases) > MOST_ROWS, note=note)
