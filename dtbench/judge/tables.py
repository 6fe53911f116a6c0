"""A comparison on the terminal: a table per suite, the worst verdicts first; or strict JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from rich.console import Console
from rich.text import Text

from dtbench.judge.compare import Comparison, Row
from dtbench.judge.verdicts import Verdict
from dtbench.terminal import (
    MAX_ROWS,
    MAX_TABLES,
    Column,
    new_console,
    param_text,
    print_columns,
    print_json,
    print_line,
    print_rest,
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
    single = comparison.of_single_launches
    # Where there are verdicts, the worst first.
    rows = list(comparison.rows)
    if not single:
        rows.sort(key=lambda r: (r.verdict.gravity, -(r.ratio or 0)))
    suites: dict[str, list[Row]] = {row.key[0]: [] for row in comparison.rows}
    for row in rows:
        suites[row.key[0]].append(row)
    for suite, of_suite in islice(suites.items(), MAX_TABLES):
        (_print_differences if single else _print_suite_comparison)(console, suite, of_suite[:MAX_ROWS])
        print_rest(console, len(of_suite), "cases", "--json gives all")
        print_line(console, "")
    print_rest(console, len(suites), "suites", "--json gives all", MAX_TABLES)
    for note in comparison.notes:
        print_line(console, f"note: {note}")
    counts = ", ".join(f"{comparison.count(v)} {v}" for v in Verdict if comparison.count(v))
    if single:
        counts = _spread(comparison)
    print_line(console, counts or "nothing to compare: the two sides have no case in common")


def _print_suite_comparison(console: Console, suite: str, rows: Sequence[Row]) -> None:
    varying, same = split_params([dict(row.key[3]) for row in rows])
    unit = time_unit(t for row in rows for t in (row.base_s, row.new_s) if t is not None)
    smaller = [min((p for p in (row.p_slower, row.p_faster) if p is not None), default=None) for row in rows]
    words: list[Column] = [
        ("verdict", [Text(row.verdict, style=_VERDICT_STYLE.get(row.verdict, "")) for row in rows]),
        ("case", [row.key[1] for row in rows]),
        ("impl", [row.key[2] for row in rows]),
        *((name, [param_text(name, dict(row.key[3]).get(name)) for row in rows]) for name in varying),
    ]
    figures: list[Column] = [
        (f"base [{unit.name}]", [unit.format(row.base_s) for row in rows]),
        (f"new [{unit.name}]", [unit.format(row.new_s) for row in rows]),
        ("new/base", [format_ratio(row.ratio) for row in rows]),
        ("interval", [_interval(row) for row in rows]),
        ("p", ["-" if p is None else f"{p:.2g}" for p in smaller]),
        ("launches", [f"{row.base_launches}/{row.new_launches}" for row in rows]),
    ]
    estimator = rows[0].estimator
    print_line(
        console, titled(f"{suite}: {estimator} of each launch, median over launches", same), style="bold"
    )
    print_columns(console, words, figures, [("why", [row.reason for row in rows])])


def _print_differences(console: Console, suite: str, rows: Sequence[Row]) -> None:
    """One launch against another: how each size differs."""
    varying, same = split_params([dict(row.key[3]) for row in rows])
    unit = time_unit(t for row in rows for t in (row.base_s, row.new_s) if t is not None)
    words: list[Column] = [
        ("case", [row.key[1] for row in rows]),
        ("impl", [row.key[2] for row in rows]),
        *((name, [param_text(name, dict(row.key[3]).get(name)) for row in rows]) for name in varying),
    ]
    figures: list[Column] = [
        (f"base [{unit.name}]", [unit.format(row.base_s) for row in rows]),
        (f"new [{unit.name}]", [unit.format(row.new_s) for row in rows]),
        ("difference", ["-" if row.ratio is None else f"{row.ratio - 1:+.1%}" for row in rows]),
    ]
    other = [f"{row.verdict}: {row.reason}".rstrip(": ") if row.ratio is None else "" for row in rows]
    print_line(console, titled(suite, same), style="bold")
    print_columns(console, words, figures, [("why", other)] if any(other) else ())


def _spread(comparison: Comparison) -> str:
    """How far single launches lie apart, and once that this is no verdict."""
    ratios = [row.ratio - 1 for row in comparison.rows if row.ratio is not None]
    rest = [f"{n} {v}" for v in Verdict if v is not Verdict.INCONCLUSIVE and (n := comparison.count(v))]
    spread = f"{len(ratios)} times differ by {min(ratios):+.1%} to {max(ratios):+.1%}"
    return f"{', '.join([*rest, spread])}: no verdict from one launch on each side"


def _interval(row: Row) -> str:
    if row.low is None or row.high is None or row.confidence is None:
        return "-"
    return f"{significant(row.low, 3)}..{significant(row.high, 3)} ({100 * row.confidence:.0f}%)"
