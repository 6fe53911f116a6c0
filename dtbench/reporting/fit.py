"""A table of cases made to fit the terminal, by what costs the reader least.

In turn: params of few values become headings, units go into the title, bandwidths and times that others imply are left
out, then the spread of what is compared with; last, every impl of a case gets a line of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from dtbench.suite.grouping import group_by
from dtbench.text.terminal import Column, print_columns, print_line, print_prose, readable_width, width_of

# More headings than this make a table hard to follow.
_MOST_HEADINGS = 8
# Of more impls than these a table side by side is not read.
_MOST_BESIDE = 3


@dataclass(frozen=True)
class Figures:
    """A column of figures. kind: "time", "spread", "from last", "algbw", "busbw" or "core/torch"; impl: whose."""

    kind: str
    impl: str
    title: str
    cells: Sequence[str]
    unit: str = ""

    @property
    def whole_title(self) -> str:
        return f"{self.title} [{self.unit}]" if self.unit else self.title


@dataclass(frozen=True)
class CaseTable:
    """words: the columns of case and params, a cell per case. headings: params that became headings. in_title: whether
    the units stand in the title. left_out: what columns are not shown."""

    words: Sequence[Column]
    figures: Sequence[Figures]
    headings: Sequence[Column] = ()
    in_title: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def columns(self) -> list[Column]:
        return [(f.title if self.in_title else f.whole_title, f.cells) for f in self.figures]

    @property
    def units(self) -> str:
        """`times in µs, bandwidths in MB/s`, where the columns do not say it."""
        if not self.in_title:
            return ""
        known = {("bandwidths" if f.kind.endswith("bw") else "times"): f.unit for f in self.figures if f.unit}
        return ", ".join(f"{what} in {unit}" for what, unit in known.items())


def fit(console: Console, words: Sequence[Column], figures: Sequence[Figures], grouped: bool) -> CaseTable:
    """The first of the tables that is no wider than what reads it. grouped: whether cases may be put under headings,
    which changes their order."""
    whole = narrowest = CaseTable(words, figures)
    for narrowest in _ever_narrower(whole, grouped):
        if width_of(console, narrowest.words, narrowest.columns) <= readable_width(console):
            break
    return narrowest


def print_cases(console: Console, title: str, table: CaseTable) -> None:
    width = readable_width(console)
    print_prose(console, f"{title}; {table.units}" if table.units else title, "bold", width)
    every = range(len(table.words[0][1]))
    sections = group_by(every, lambda row: tuple(cells[row] for _, cells in table.headings))
    for values, rows in sections.items():
        if values:
            named = zip((name for name, _ in table.headings), values, strict=True)
            print_line(console, "")
            print_line(console, ", ".join(f"{name}={value}" for name, value in named), style="bold")
        chosen = [
            [(name, [cells[row] for row in rows]) for name, cells in columns]
            for columns in (table.words, table.columns)
        ]
        print_columns(console, *chosen)
    if table.left_out:
        left_out = f"left out at {width} columns: {', '.join(table.left_out)}"
        print_prose(console, f"{left_out}; --csv and --json give all, COLUMNS=200 more", width=width)


def _ever_narrower(table: CaseTable, grouped: bool) -> Iterator[CaseTable]:
    yield table
    if grouped:
        for grouping in _under_headings(table):
            table = grouping
            yield table
    shorter = [replace(f, title=f.title.replace("floor (local)", "floor")) for f in table.figures]
    table = replace(table, figures=shorter, in_title=True)
    yield table
    impls = list(dict.fromkeys(f.impl for f in table.figures if f.impl))
    doomed = [
        ("algbw", impl) for impl in impls if any((f.kind, f.impl) == ("busbw", impl) for f in table.figures)
    ]
    doomed += [("from last", impl) for impl in reversed(impls)]
    doomed += [(kind, impl) for impl in reversed(impls[1:]) for kind in ("algbw", "busbw")]
    if len(impls) <= _MOST_BESIDE:
        doomed += [("spread", impl) for impl in reversed(impls)]
    for kind, impl in doomed:
        gone = [f for f in table.figures if (f.kind, f.impl) == (kind, impl)]
        if gone:
            kept = [f for f in table.figures if f not in gone]
            said = kind if len(impls) == 1 else f"{impl} {kind}"
            table = replace(table, figures=kept, left_out=(*table.left_out, said))
            yield table
    if len(impls) > 1:
        yield _a_line_each(replace(table, figures=shorter, left_out=()), impls)


def _under_headings(table: CaseTable) -> Iterator[CaseTable]:
    """One param more as a heading, that of the fewest values first, as long as there are few headings."""
    params = sorted(table.words[1:], key=lambda column: len(set(column[1])))
    for count in range(1, len(params)):
        headings = params[:count]
        sections = len(set(zip(*(cells for _, cells in headings), strict=True)))
        if sections > min(_MOST_HEADINGS, len(table.words[0][1]) // 2):
            return
        yield replace(
            table, words=[c for c in table.words if not any(c is one for one in headings)], headings=headings
        )


def _a_line_each(table: CaseTable, impls: Sequence[str]) -> CaseTable:
    """Every impl of a case in a row of its own."""
    by_impl = {impl: {f.kind: f for f in table.figures if f.impl == impl} for impl in impls}
    rows = [
        (case, impl)
        for case in range(len(table.words[0][1]))
        for impl in impls
        if "time" in by_impl[impl] and by_impl[impl]["time"].cells[case] != "-"
    ]

    def of_rows(column: Column) -> Column:
        return column[0], [column[1][case] for case, _ in rows]

    kinds = {f.kind: f.unit for f in table.figures if f.impl}
    return replace(
        table,
        words=[*map(of_rows, table.words), ("impl", [impl for _, impl in rows])],
        headings=[of_rows(column) for column in table.headings],
        figures=[
            Figures(
                kind,
                "",
                kind,
                [f.cells[case] if (f := by_impl[impl].get(kind)) else "-" for case, impl in rows],
                unit,
            )
            for kind, unit in kinds.items()
        ],
        left_out=("core/torch",) if any(f.kind == "core/torch" for f in table.figures) else (),
    )
