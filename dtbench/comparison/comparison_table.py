"""A comparison on the terminal: a table per suite, the worst verdicts first; or strict JSON."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import msgspec
from rich.console import Console

from dtbench.comparison.runs import Comparison
from dtbench.records.judged import Change, Judged, Verdict
from dtbench.suite.grouping import group_by
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
from dtbench.text.units import format_ratio, significant, time_unit


def print_comparison(comparison: Comparison, as_json: bool = False) -> None:
    """One row per case and impl, the worst verdicts first, then what weakens them."""
    if as_json:
        print_json(msgspec.to_builtins(comparison, str_keys=True))
        return
    console = new_console()
    if comparison.nothing_shared:
        print_line(console, comparison.nothing_shared)
        return
    single = comparison.of_single_launches
    # Where there are verdicts, the worst first.
    rows = list(comparison.rows)
    if not single:
        rows.sort(key=lambda r: (r.verdict.gravity, -(r.ratio or 0)))
    by_suite = group_by(rows, lambda row: row.suite)
    for suite in islice(dict.fromkeys(row.suite for row in comparison.rows), MAX_TABLES):
        _print_suite(console, suite, by_suite[suite][:MAX_ROWS], single)
        print_rest(console, len(by_suite[suite]), "cases", "--json gives all")
        print_line(console, "")
    print_rest(console, len(by_suite), "suites", "--json gives all", MAX_TABLES)
    for note in comparison.notes:
        print_line(console, f"note: {note}")
    counts = ", ".join(f"{comparison.count(v)} {v}" for v in Verdict if comparison.count(v))
    print_line(console, _spread(comparison) if single else counts or "nothing to compare")


def _print_suite(console: Console, suite: str, rows: Sequence[Judged], single: bool) -> None:
    """single: one launch against another, which has differences and no verdicts."""
    varying, same = split_params([row.params for row in rows])
    unit = time_unit(t for row in rows for t in (row.base_s, row.head_s) if t is not None)
    columns = [
        TableColumn("case", [row.name for row in rows]),
        TableColumn("impl", [row.impl for row in rows]),
        *(TableColumn(name, [param_text(name, row.params.get(name)) for row in rows]) for name in varying),
        TableColumn("base", [unit.format(row.base_s) for row in rows], True, unit.name),
        TableColumn("new", [unit.format(row.head_s) for row in rows], True, unit.name),
    ]
    title = suite
    if single:
        why = [f"{row.verdict}: {row.reason}".rstrip(": ") if row.ratio is None else "" for row in rows]
        differences = ["-" if row.ratio is None else f"{row.ratio - 1:+.1%}" for row in rows]
        columns.append(TableColumn("difference", differences, True))
    else:
        why = [row.reason for row in rows]
        title += f": {rows[0].estimator} of each launch, median over launches"
        colours = [row.verdict.colour for row in rows]
        columns.insert(0, TableColumn("verdict", [str(row.verdict) for row in rows], styles=colours))
        columns += [
            TableColumn("new/base", [format_ratio(row.ratio) for row in rows], True),
            TableColumn("interval", [_interval(row) for row in rows], True),
            TableColumn("p", [_p(row.effect) for row in rows], True),
            TableColumn("launches", [f"{row.base_launches}/{row.head_launches}" for row in rows], True),
        ]
    if any(why):
        columns.append(TableColumn("why", why))
    print_line(console, titled(title, same), style="bold")
    print_table(console, columns)


def _spread(comparison: Comparison) -> str:
    """How far single launches lie apart, and once that this is no verdict."""
    ratios = [row.ratio - 1 for row in comparison.rows if row.ratio is not None]
    rest = [f"{n} {v}" for v in Verdict if v is not Verdict.INCONCLUSIVE and (n := comparison.count(v))]
    spread = f"{len(ratios)} times differ by {min(ratios):+.1%} to {max(ratios):+.1%}"
    return f"{', '.join([*rest, spread])}: no verdict from one launch on each side"


def _interval(row: Judged) -> str:
    if row.low is None or row.high is None or row.effect is None or row.effect.confidence is None:
        return "-"
    return f"{significant(row.low, 3)}..{significant(row.high, 3)} ({100 * row.effect.confidence:.0f}%)"


def _p(effect: Change | None) -> str:
    """The smaller of the two."""
    if effect is None or effect.p_slower is None or effect.p_faster is None:
        return "-"
    return f"{min(effect.p_slower, effect.p_faster):.2g}"
