"""From one placement to another: the core beside torch."""

from __future__ import annotations

from collections.abc import Sequence

from dtbench.show.report import tables as t
from dtbench.show.report.cases import Case, distinct, geometric_mean
from dtbench.show.report.section import Section, dots, impl_headers, main_dtype, others_column
from dtbench.units import format_size


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
    dots(
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
                *others_column(cases, ("mesh_dim", "ranks", "dtype", "size")),
                t.sizes("Size", [format_size(c.number("size")) for c in cases]),
                *t.times([(word, [c.seconds(i) for c in cases]) for i, word in impl_headers(cases)]),
                t.ratios("core / torch", [c.ratio("core", "torch") for c in cases], mark_above=1.05),
            ],
            folded=True,
            note="Sizes are the whole tensor as one group of the mesh dim holds it.",
        )
    ]
    return section
