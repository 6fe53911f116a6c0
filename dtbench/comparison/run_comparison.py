"""The comparison of two sides of runs, and how it is shown: terminal tables, strict JSON, or HTML in a notebook."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from html import escape
from itertools import islice
from typing import Literal

import msgspec
from msgspec import Struct

from dtbench.comparison.compare_launches import SINGLE_LAUNCH
from dtbench.errors import plain
from dtbench.grouping import group_by
from dtbench.records.comparison import Change, ComparedCase, Verdict
from dtbench.records.exports import Point, relative
from dtbench.text.table import TableColumn
from dtbench.text.terminal import (
    MAX_ROWS,
    MAX_TABLES,
    new_console,
    param_text,
    print_json,
    print_line,
    print_rest,
    print_table,
    split_params,
    titled,
)
from dtbench.text.units import (
    NO_INTERVAL,
    format_difference,
    format_interval,
    format_ratio,
    plural,
    time_unit,
)


class Comparison(Struct, frozen=True, kw_only=True):
    """Verdicts of all cases and implementations of two sides of runs.

    Attributes:
        kind: identifies the JSON.
        exit_code: exit code of `dtbench compare`.
        notes: caveats that apply to all cases.
        counts: number of cases per verdict.
        rows: the cases in the order of the base's file.
        nothing_shared: one line that describes both sides if they have no case in common, else "".
        machines_differ: how the machines of the two sides differ, else "". If they differ, no timed case gets a verdict
            other than inconclusive.
    """

    kind: Literal["comparison"] = "comparison"
    exit_code: int
    notes: tuple[str, ...]
    counts: dict[Verdict, int]
    rows: tuple[ComparedCase, ...]
    nothing_shared: str = ""
    machines_differ: str = ""

    @property
    def has_single_launches(self) -> bool:
        """Whether every comparable case has exactly one launch on each side."""
        comparable = [row for row in self.rows if row.effect is not None]
        return bool(comparable) and all(row.base_launches == row.head_launches == 1 for row in comparable)

    @property
    def has_changes(self) -> bool:
        """Whether any case is slower or faster."""
        return bool(self.counts[Verdict.SLOWER] or self.counts[Verdict.FASTER])

    @property
    def points(self) -> list[Point]:
        """Times of head for other tools. Their bounds are those of the ratio times the time of base."""
        return [*filter(None, (relative(row, row.verdict, row.reason) for row in self.rows))]

    @property
    def summary(self) -> str:
        """Number of cases per verdict, in one line."""
        if self.nothing_shared:
            return self.nothing_shared
        counts = [f"{count} {verdict}" for verdict in Verdict if (count := self.counts[verdict])]
        if self.has_single_launches:
            ratios = [row.ratio for row in self.rows if row.ratio is not None]
            extremes = " to ".join(map(format_difference, (min(ratios), max(ratios))))
            counts = [f"{plural(len(ratios), 'time')}, {extremes}"] + [
                text for text in counts if self.has_changes or not text.endswith(Verdict.INCONCLUSIVE)
            ]
        summary = ", ".join(counts) or "nothing to compare"
        if self.machines_differ:
            return f"cannot tell: {self.machines_differ} ({summary})"
        return summary if self.has_changes or not self.has_single_launches else f"{SINGLE_LAUNCH} ({summary})"

    def __repr__(self) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            print_comparison(self)
        return out.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        """The tables for a notebook, with all text escaped."""
        import pandas as pd

        parts = []
        for suite, rows in islice(_rows_by_suite(self).items(), MAX_TABLES):
            title, columns = _table(suite, rows[:MAX_ROWS], self)
            cells = list(zip(*(map(plain, column.cells) for column in columns), strict=True))
            table = pd.DataFrame(cells, columns=[plain(column.title) for column in columns])
            parts.append(f"<p>{escape(plain(title))}</p>{table.to_html(index=False)}")
        return "".join([*parts, *(f"<p>{escape(plain(line))}</p>" for line in _closing_lines(self))])


def print_comparison(comparison: Comparison, as_json: bool = False) -> None:
    """Prints a table per suite with the gravest verdicts first, then notes and the summary; or strict JSON."""
    if as_json:
        print_json(msgspec.to_builtins(comparison, str_keys=True))
        return
    console, by_suite = new_console(), _rows_by_suite(comparison)
    for suite, rows in islice(by_suite.items(), MAX_TABLES):
        title, columns = _table(suite, rows[:MAX_ROWS], comparison)
        print_line(console, title, style="bold")
        print_table(console, columns)
        print_rest(console, len(rows), "cases", "--json gives all")
        print_line(console, "")
    print_rest(console, len(by_suite), "suites", "--json gives all", MAX_TABLES)
    for line in _closing_lines(comparison):
        print_line(console, line)


def _rows_by_suite(comparison: Comparison) -> dict[str, list[ComparedCase]]:
    """Groups the rows by suite, in the order of the base's file or, if there are verdicts, the gravest first."""
    by_suite = group_by(() if comparison.nothing_shared else comparison.rows, lambda row: row.suite)
    if comparison.has_single_launches and not comparison.has_changes:
        return by_suite
    return {
        suite: sorted(rows, key=lambda row: (row.verdict.gravity, -(row.ratio or 0)))
        for suite, rows in by_suite.items()
    }


def _closing_lines(comparison: Comparison) -> list[str]:
    notes = () if comparison.nothing_shared else comparison.notes
    return [*(f"note: {note}" for note in notes), comparison.summary]


def _table(suite: str, rows: Sequence[ComparedCase], comparison: Comparison) -> tuple[str, list[TableColumn]]:
    """Returns title and columns of a suite's table.

    With one launch on each side the table shows differences; it shows verdicts only if any case is slower or faster.
    """
    varying, shared = split_params([row.params for row in rows])
    unit = time_unit(t for row in rows for t in (row.base_s, row.head_s) if t is not None)
    columns = [
        TableColumn("case", [row.name for row in rows]),
        TableColumn("impl", [row.impl for row in rows]),
        *(TableColumn(name, [param_text(name, row.params.get(name)) for row in rows]) for name in varying),
        TableColumn("base", [unit.format(row.base_s) for row in rows], True, unit.name),
        TableColumn("head", [unit.format(row.head_s) for row in rows], True, unit.name),
    ]
    title, single = suite, comparison.has_single_launches
    reasons = ["" if row.reason == comparison.machines_differ else row.reason for row in rows]
    if not single or comparison.has_changes:
        verdicts = [row.verdict for row in rows]
        columns.insert(0, TableColumn("verdict", [*map(str, verdicts)], styles=[v.colour for v in verdicts]))
    if single:
        if not comparison.has_changes:
            reasons = [
                f"{row.verdict}: {row.reason}".rstrip(": ") if row.ratio is None else "" for row in rows
            ]
        differences = ["-" if row.ratio is None else format_difference(row.ratio) for row in rows]
        columns.append(TableColumn("difference", differences, True))
    else:
        title += (
            f"; base, head: median over launches of each launch's {rows[0].estimator}; "
            "head/base: median over all pairs of launches"
        )
        columns += [
            TableColumn("head/base", [format_ratio(row.ratio) for row in rows], True),
            TableColumn("interval", [_interval(row) for row in rows], True),
            TableColumn("p", [_p(row.effect) for row in rows], True),
            TableColumn("launches", [f"{row.base_launches}/{row.head_launches}" for row in rows], True),
        ]
    if any(reasons):
        columns.append(TableColumn("reason", reasons))
    return titled(title, shared), columns


def _interval(row: ComparedCase) -> str:
    interval = format_interval((row.low, row.high), "..")
    if row.effect is None or row.effect.confidence is None or interval == NO_INTERVAL:
        return "-" if row.effect is None else NO_INTERVAL
    return f"{interval} ({100 * row.effect.confidence:.0f}%)"


def _p(effect: Change | None) -> str:
    """Formats the smaller of the two one-sided p values."""
    if effect is None or effect.p_slower is None or effect.p_faster is None:
        return "-"
    return f"{min(effect.p_slower, effect.p_faster):.2g}"
