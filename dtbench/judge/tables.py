"""A comparison on the terminal: a table per suite, the worst verdicts first; or strict JSON."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from dtbench.judge.compare import Comparison, Row
from dtbench.judge.verdicts import Verdict
from dtbench.terminal import (
    add_figures,
    add_words,
    as_text,
    new_console,
    new_table,
    param_text,
    print_json,
    print_line,
    print_table,
    split_params,
    titled,
)
from dtbench.units import format_ratio, significant, time_unit

_VERDICT_STYLE = {
    "slower": "red",
    "failed": "red",
    "missing": "yellow",
    "inconclusive": "yellow",
    "faster": "green",
}


def print_comparison(comparison: Comparison, as_json: bool = False) -> None:
    """One row per case and impl, the worst verdicts first, then what weakens them."""
    if as_json:
        print_json(comparison.to_json())
        return
    console = new_console()
    rows = sorted(comparison.rows, key=lambda r: (r.verdict.gravity, -(r.ratio or 0)))
    for suite in dict.fromkeys(row.key[0] for row in comparison.rows):
        _print_suite_comparison(console, suite, [row for row in rows if row.key[0] == suite])
    for note in comparison.notes:
        print_line(console, f"note: {note}")
    counts = ", ".join(f"{comparison.count(v)} {v}" for v in Verdict if comparison.count(v))
    print_line(console, counts or "nothing to compare: the two sides have no case in common")


def _print_suite_comparison(console: Console, suite: str, rows: Sequence[Row]) -> None:
    varying, same = split_params([dict(row.key[3]) for row in rows])
    unit = time_unit(t for row in rows for t in (row.base_s, row.new_s) if t is not None)
    table = new_table(plain=not console.is_terminal)
    add_words(table, "verdict", [row.verdict for row in rows])
    add_words(table, "case", [row.key[1] for row in rows])
    add_words(table, "impl", [row.key[2] for row in rows])
    for name in varying:
        add_words(table, name, [param_text(name, dict(row.key[3]).get(name)) for row in rows])
    for title in (f"base [{unit.name}]", f"new [{unit.name}]", "new/base", "interval", "p", "launches"):
        add_figures(table, title)
    add_words(table, "why", [row.reason for row in rows])
    for row in rows:
        smaller = min((p for p in (row.p_slower, row.p_faster) if p is not None), default=None)
        table.add_row(
            Text(row.verdict, style=_VERDICT_STYLE.get(row.verdict, "")),
            as_text(row.key[1]),
            as_text(row.key[2]),
            *(as_text(param_text(name, dict(row.key[3]).get(name))) for name in varying),
            as_text(unit.format(row.base_s)),
            as_text(unit.format(row.new_s)),
            as_text(format_ratio(row.ratio)),
            as_text(_interval(row)),
            as_text("-" if smaller is None else f"{smaller:.2g}"),
            f"{row.base_launches}/{row.new_launches}",
            as_text(row.reason),
        )
    estimator = rows[0].estimator
    print_line(
        console, titled(f"{suite}: {estimator} of each launch, median over launches", same), style="bold"
    )
    print_table(console, table)
    print_line(console, "")


def _interval(row: Row) -> str:
    if row.low is None or row.high is None or row.confidence is None:
        return "-"
    return f"{significant(row.low, 3)}..{significant(row.high, 3)} ({100 * row.confidence:.0f}%)"
