"""What a part of the report is made of, and what several parts share: styles of the impls, dot plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtbench.show.report import tables as t
from dtbench.show.report.cases import Case, others
from dtbench.show.report.figures import (
    LegendItem,
    Panel,
    Row,
    Style,
    dot_panel,
    legend,
    seconds_tick,
    value_axis,
)
from dtbench.units import format_seconds

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


def impl_headers(cases: Sequence[Case]) -> list[tuple[str, str]]:
    """The impls present, in a fixed order, with their column headers."""
    present = {impl for case in cases for impl in case.impls}
    words = {"core": "core", "torch": "torch", "local": "floor"}
    known = [(impl, word) for impl, word in words.items() if impl in present]
    return known + [(impl, impl) for impl in sorted(present - set(words))]


def others_column(cases: Sequence[Case], known: Sequence[str]) -> list[t.Column]:
    rest = [others(case, known) for case in cases]
    return [t.text("Other parameters", rest)] if any(rest) else []


def dots(
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
                {i: (m.p25_s, m.p75_s) for i, m in c.impls.items() if i in impls},
            )
            for c in ordered
        ]
        rows = [row for row in rows if row.values]
        if not rows:
            continue
        ends = [v for row in rows for span in row.spans.values() for v in span if v > 0]
        values = [*(v for row in rows for v in row.values.values()), *ends] if each_axis else all_values
        axis = value_axis(values, seconds_tick)
        desc = f"{len(rows)} rows; times from {format_seconds(min(values))} to {format_seconds(max(values))}."
        drawn.append(dot_panel(title, rows, styles, axis, prefix=f"{section.id}{index}", desc=desc))
    words = {f"{i}: {IMPL_WORDS[i]}": style for i, style in styles.items()}
    section.figures.append(
        Figure(caption, legend(words, prefix=f"{section.id}L", lines=False), drawn, columns)
    )


def main_dtype(cases: Sequence[Case]) -> Any:
    dtypes = {c.get("dtype") for c in cases}
    return "float32" if "float32" in dtypes else min(dtypes, key=str)
