"""A comparison on the terminal: a table per suite, the worst verdicts first; or strict JSON."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from html import escape
from itertools import islice

import msgspec

from dtbench.comparison.runs import Comparison
from dtbench.errors import plain
from dtbench.grouping import group_by
from dtbench.records.judged import Change, Judged
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
from dtbench.text.units import NO_INTERVAL, format_difference, format_interval, format_ratio, time_unit


def print_comparison(comparison: Comparison, as_json: bool = False) -> None:
    """One row per case and impl, the worst verdicts first, then what weakens them."""
    if as_json:
        print_json(msgspec.to_builtins(comparison, str_keys=True))
        return
    console, by_suite = new_console(), _by_suite(comparison)
    for suite, rows in islice(by_suite.items(), MAX_TABLES):
        title, columns = _table(suite, rows[:MAX_ROWS], comparison)
        print_line(console, title, style="bold")
        print_table(console, columns)
        print_rest(console, len(rows), "cases", "--json gives all")
        print_line(console, "")
    print_rest(console, len(by_suite), "suites", "--json gives all", MAX_TABLES)
    for line in _ending(comparison):
        print_line(console, line)


def text_of(comparison: Comparison) -> str:
    """What `print_comparison` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print_comparison(comparison)
    return out.getvalue().rstrip("\n")


def html_of(comparison: Comparison) -> str:
    """The same for a notebook, escaped."""
    import pandas as pd

    parts = []
    for suite, rows in islice(_by_suite(comparison).items(), MAX_TABLES):
        title, columns = _table(suite, rows[:MAX_ROWS], comparison)
        cells = list(zip(*(map(plain, one.cells) for one in columns), strict=True))
        table = pd.DataFrame(cells, columns=[plain(one.title) for one in columns])
        parts.append(f"<p>{escape(plain(title))}</p>{table.to_html(index=False)}")
    return "".join([*parts, *(f"<p>{escape(plain(line))}</p>" for line in _ending(comparison))])


def _by_suite(comparison: Comparison) -> dict[str, list[Judged]]:
    """As the base's file has them; where there are verdicts, the worst first in each."""
    by_suite = group_by(() if comparison.nothing_shared else comparison.rows, lambda row: row.suite)
    if comparison.of_single_launches and not comparison.is_decided:
        return by_suite
    return {
        suite: sorted(rows, key=lambda row: (row.verdict.gravity, -(row.ratio or 0)))
        for suite, rows in by_suite.items()
    }


def _ending(comparison: Comparison) -> list[str]:
    notes = () if comparison.nothing_shared else comparison.notes
    return [*(f"note: {note}" for note in notes), comparison.sentence]


def _table(suite: str, rows: Sequence[Judged], comparison: Comparison) -> tuple[str, list[TableColumn]]:
    """Its title and columns. One launch against another has differences, and verdicts where any is decided."""
    varying, same = split_params([row.params for row in rows])
    unit = time_unit(t for row in rows for t in (row.base_s, row.head_s) if t is not None)
    columns = [
        TableColumn("case", [row.name for row in rows]),
        TableColumn("impl", [row.impl for row in rows]),
        *(TableColumn(name, [param_text(name, row.params.get(name)) for row in rows]) for name in varying),
        TableColumn("base", [unit.format(row.base_s) for row in rows], True, unit.name),
        TableColumn("new", [unit.format(row.head_s) for row in rows], True, unit.name),
    ]
    title, single = suite, comparison.of_single_launches
    why = ["" if row.reason == comparison.machines_differ else row.reason for row in rows]
    if not single or comparison.is_decided:
        verdicts = [row.verdict for row in rows]
        columns.insert(0, TableColumn("verdict", [*map(str, verdicts)], styles=[v.colour for v in verdicts]))
    if single:
        if not comparison.is_decided:
            why = [f"{row.verdict}: {row.reason}".rstrip(": ") if row.ratio is None else "" for row in rows]
        differences = ["-" if row.ratio is None else format_difference(row.ratio) for row in rows]
        columns.append(TableColumn("difference", differences, True))
    else:
        title += f": {rows[0].estimator} of each launch, median over launches; new/base: median over all pairs of them"
        columns += [
            TableColumn("new/base", [format_ratio(row.ratio) for row in rows], True),
            TableColumn("interval", [_interval(row) for row in rows], True),
            TableColumn("p", [_p(row.effect) for row in rows], True),
            TableColumn("launches", [f"{row.base_launches}/{row.head_launches}" for row in rows], True),
        ]
    if any(why):
        columns.append(TableColumn("why", why))
    return titled(title, same), columns


def _interval(row: Judged) -> str:
    interval = format_interval((row.low, row.high), "..")
    if row.effect is None or row.effect.confidence is None or interval == NO_INTERVAL:
        return "-" if row.effect is None else NO_INTERVAL
    return f"{interval} ({100 * row.effect.confidence:.0f}%)"


def _p(effect: Change | None) -> str:
    """The smaller of the two."""
    if effect is None or effect.p_slower is None or effect.p_faster is None:
        return "-"
    return f"{min(effect.p_slower, effect.p_faster):.2g}"
