"""Blocks of a model cut over ranks, and suites without a part of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtbench.show.report import tables as t
from dtbench.show.report.cases import Case, geometric_mean, group, others
from dtbench.show.report.section import Section, dots, impl_headers, others_column


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
    dots(
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
                *others_column(cases, ("mesh_dim", "ranks", "pass", "dtype")),
                *t.times(
                    [
                        ("local" if i == "local" else w, [c.seconds(i) for c in cases])
                        for i, w in impl_headers(cases)
                    ]
                ),
                t.ratios("core / torch", [c.ratio("core", "torch") for c in cases], mark_above=1.05),
            ],
        )
    ]
    return section


def other_suites(suites: Mapping[str, Sequence[Case]]) -> list[Section]:
    """Suites that have no section of their own, such as a user's: a table, since what they mean is not known here."""
    if not suites:
        return []
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
    return [section]
