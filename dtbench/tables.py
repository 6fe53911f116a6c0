"""What the terminal shows: runs, comparisons, findings; tables for people, strict JSON for machines.

A figure is never cut: numbers do not wrap, and where a terminal is narrower than they need, the
lines run over its edge instead. Text from files is foreign: it is shown without markup and without
the control characters that would move a terminal's cursor.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dtbench.compare import VERDICTS, Comparison, Row
from dtbench.doctor import Finding
from dtbench.model import Param, Result, Run
from dtbench.units import Unit, bandwidth_unit, format_ratio, format_size, significant, time_unit

# Core and its rival first, then the references that they are read against.
_IMPL_ORDER = ("core", "torch", "local", "c10d", "unbucketed", "limit")
_IMPL_TITLES = {"local": "floor (local)"}
_VERDICT_STYLE = {
    "slower": "red",
    "failed": "red",
    "missing": "yellow",
    "inconclusive": "yellow",
    "faster": "green",
}
# Wide enough that nothing wraps where no terminal reads along.
_PIPE_WIDTH = 10_000
# How many cases are named where many share one reason; the rest is counted.
_NAMED = 5


def print_runs(runs: Sequence[Run], as_json: bool = False) -> None:
    """Each run's provenance, then per suite one row per case with the impls side by side."""
    if as_json:
        _print_json([_run_json(run) for run in runs])
        return
    console = _console()
    for run in runs:
        _print_provenance(console, run)
        for suite in dict.fromkeys(r.suite for r in run.results):
            _print_suite(console, suite, [r for r in run.results if r.suite == suite])
        _print_not_ok(console, run)


def print_comparison(comparison: Comparison, as_json: bool = False) -> None:
    """One row per case and impl, the worst verdicts first, then what weakens them."""
    if as_json:
        _print_json(comparison.to_json())
        return
    console = _console()
    rows = sorted(comparison.rows, key=lambda r: (VERDICTS.index(r.verdict), -(r.ratio or 0)))
    for suite in dict.fromkeys(row.key[0] for row in comparison.rows):
        _print_suite_comparison(console, suite, [row for row in rows if row.key[0] == suite])
    for note in comparison.notes:
        _line(console, f"note: {note}")
    counts = ", ".join(f"{comparison.count(v)} {v}" for v in VERDICTS if comparison.count(v))
    _line(console, counts or "nothing to compare: the two sides have no case in common")


def print_findings(findings: Sequence[Finding], as_json: bool = False) -> None:
    """What disturbs a measurement first, each with effect and remedy; then what is in order."""
    if as_json:
        _print_json([finding.to_json() for finding in findings])
        return
    console = _console()
    table = _table(plain=not console.is_terminal)
    _add_words(table, "", ["DISTURBS"])
    _add_words(table, "check", [f.check for f in findings])
    _add_words(table, "found", [f.got for f in findings])
    for finding in findings:
        mark = {True: "ok", False: "DISTURBS", None: "unknown"}[finding.ok]
        style = {True: "green", False: "red", None: "yellow"}[finding.ok]
        table.add_row(Text(mark, style=style), _text(finding.check), _text(finding.got))
    _print_table(console, table)
    bad = [f for f in findings if f.ok is False]
    for finding in bad:
        _line(console, f"{finding.check}: {finding.got}")
        _line(console, f"    effect: {finding.effect}")
        _line(console, f"    remedy: {finding.remedy}")
    _line(console, f"{len(bad)} of {len(findings)} checks found something that disturbs a measurement")


# ------------------------------------------------------------------------------------- runs


def _print_provenance(console: Console, run: Run) -> None:
    header, versions = run.header, run.header["versions"]
    commit, dirty = header["git"].get("commit"), header["git"].get("dirty")
    cpu, gpus, ranks, mesh = (
        header["machine"]["cpu"],
        header["machine"]["gpus"],
        header["ranks"],
        header["mesh"],
    )
    hosts = dict.fromkeys(str(r.get("host")) for r in ranks)
    dims = ", ".join(f"{n}={s}" for n, s in zip(mesh["dim_names"], mesh["shape"], strict=True))
    lines = {
        "run": f"{run.path}" + ("" if run.complete else "  INCOMPLETE: no end line, go on with --resume"),
        "started": header["started"],
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items() if value),
        "commit": f"{commit}{' with changes' if dirty else ''}" if commit else "",
        "cpu": ", ".join(
            str(fact)
            for fact in (
                cpu.get("model"),
                _with("cores usable", cpu.get("usable_cores")),
                cpu.get("governor"),
            )
            if fact
        ),
        "gpus": _counted(str(gpu.get("name")) for gpu in gpus),
        "ranks": f"{len(ranks)} on {', '.join(list(hosts)[:8])}{', ...' if len(hosts) > 8 else ''}"
        if ranks
        else "",
        "mesh": dims,
    }
    for name, value in lines.items():
        if value:
            _line(console, f"{name + ':':<10}{value}")


def _with(unit: str, value: object) -> str:
    return "" if value is None else f"{value} {unit}"


def _counted(names: Iterable[str]) -> str:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


@dataclass(frozen=True)
class _CaseRow:
    """One case with all its impls: impl -> its results, one per launch."""

    name: str
    params: Mapping[str, Param]
    results: dict[str, list[Result]]

    def time_s(self, impl: str) -> float | None:
        """The median over launches of the suite's figure."""
        return _median([getattr(r.time_s, _figure_of(r.suite)) for r in self._good(impl)])

    def bandwidth(self, impl: str, which: str) -> float | None:
        """That of the time shown, bytes per second: the median of the seconds per byte over launches."""
        slowness = _median([1 / b for r in self._good(impl) if (b := getattr(r, which))])
        return None if slowness is None else 1 / slowness

    def status(self, impl: str) -> str:
        """Why there is no figure: "failed", "wrong", "skipped", or "-" where the case has no such impl."""
        return next((r.status for r in self.results.get(impl, []) if r.status != "ok"), "-")

    def _good(self, impl: str) -> list[Result]:
        return [r for r in self.results.get(impl, []) if r.status == "ok" and r.time_s is not None]


def _figure_of(suite: str) -> str:
    # The median, which the file's bandwidths count with; a host latency's noise only adds to its minimum.
    return "min" if suite == "dispatch" else "median"


def _case_rows(results: Sequence[Result]) -> list[_CaseRow]:
    rows: dict[tuple[str, tuple[tuple[str, Param], ...]], _CaseRow] = {}
    for r in results:
        key = (r.name, tuple(sorted(r.params.items())))
        row = rows.setdefault(key, _CaseRow(r.name, r.params, {}))
        row.results.setdefault(r.impl, []).append(r)
    return list(rows.values())


def _print_suite(console: Console, suite: str, results: Sequence[Result]) -> None:
    rows = _case_rows(results)
    found = {impl for row in rows for impl in row.results}
    impls = [i for i in _IMPL_ORDER if i in found] + sorted(found.difference(_IMPL_ORDER))
    varying, same = _split_params([row.params for row in rows])
    launches = len({r.launch for r in results})
    unit = time_unit(t for row in rows for i in impls if (t := row.time_s(i)) is not None)

    table = _table(plain=not console.is_terminal)
    _add_words(table, "case", [row.name for row in rows])
    for name in varying:
        _add_words(table, name, [_param(name, row.params.get(name)) for row in rows])
    columns = _figure_columns(rows, impls, unit)
    for title, _ in columns:
        _add_figures(table, title)
    for row in rows:
        params = [_param(name, row.params.get(name)) for name in varying]
        table.add_row(_text(row.name), *map(_text, params), *(_text(figure(row)) for _, figure in columns))

    _line(console, "")
    title = f"{suite}: {_figure_of(suite)} of the samples"
    title += f", median over {launches} launches" if launches > 1 else ""
    _line(console, _title(title, same), style="bold")
    _print_table(console, table)


def _figure_columns(
    rows: Sequence[_CaseRow], impls: Sequence[str], unit: Unit
) -> list[tuple[str, Callable[[_CaseRow], str]]]:
    """(title, figure of a row): a time per impl, core/torch, then the bandwidths that were measured."""

    def time_of(impl: str) -> Callable[[_CaseRow], str]:
        return lambda row: row.status(impl) if (t := row.time_s(impl)) is None else unit.format(t)

    def ratio(row: _CaseRow) -> str:
        core, torch = row.time_s("core"), row.time_s("torch")
        return format_ratio(core / torch if core is not None and torch else None)

    def bandwidth_of(impl: str, which: str, scale: Unit) -> Callable[[_CaseRow], str]:
        return lambda row: scale.format(row.bandwidth(impl, which))

    columns = [(f"{_IMPL_TITLES.get(impl, impl)} [{unit.name}]", time_of(impl)) for impl in impls]
    if {"core", "torch"} <= set(impls):
        columns.append(("core/torch", ratio))
    for which, short in (("algbw_Bps", "algbw"), ("busbw_Bps", "busbw")):
        figures = {i: [b for row in rows if (b := row.bandwidth(i, which)) is not None] for i in impls}
        shown = [impl for impl in impls if figures[impl]]
        scale = bandwidth_unit(b for impl in shown for b in figures[impl])
        for impl in shown:
            name = short if len(impls) == 1 else f"{impl} {short}"
            columns.append((f"{name} [{scale.name}]", bandwidth_of(impl, which, scale)))
    return columns


def _split_params(all_params: Sequence[Mapping[str, Param]]) -> tuple[list[str], dict[str, Param]]:
    """(names whose values differ between cases, name -> value where all cases have one and the same)."""
    names = list(dict.fromkeys(name for params in all_params for name in params))
    values = {name: {_param(name, params.get(name)) for params in all_params} for name in names}
    varying = [name for name in names if len(values[name]) > 1]
    return varying, {name: all_params[0][name] for name in names if name not in varying}


def _param(name: str, value: Param | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool) and (name == "size" or name.endswith("_bytes")):
        return format_size(value)
    return str(value)


def _print_not_ok(console: Console, run: Run) -> None:
    groups: dict[tuple[str, str, str, str], list[Result]] = {}
    for r in run.results:
        if r.status != "ok" or r.reason:  # a good time with a reservation: its GPU was throttled
            groups.setdefault((r.status, r.suite, r.impl, r.reason), []).append(r)
    _line(console, "")
    for (status, suite, impl, reason), results in groups.items():
        names = list(dict.fromkeys(_case_text(r.name, r.params) for r in results))
        shown = "; ".join(names[:_NAMED]) + (
            f"; and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        )
        _line(console, f"{status}: {suite}/{impl}: {reason or 'no reason given'} ({shown})")
    _line(console, _counted(r.status for r in run.results) or "no results")


def _run_json(run: Run) -> dict[str, Any]:
    """The run without its samples, which lie in its file."""
    results = [r.to_json() for r in run.results]
    for result in results:
        del result["kind"], result["samples_s"], result["rank_samples_s"]
    return {"path": str(run.path), "complete": run.complete, "header": dict(run.header), "results": results}


# ------------------------------------------------------------------------------- comparison


def _print_suite_comparison(console: Console, suite: str, rows: Sequence[Row]) -> None:
    varying, same = _split_params([dict(row.key[3]) for row in rows])
    unit = time_unit(t for row in rows for t in (row.base_s, row.new_s) if t is not None)
    table = _table(plain=not console.is_terminal)
    _add_words(table, "verdict", [row.verdict for row in rows])
    _add_words(table, "case", [row.key[1] for row in rows])
    _add_words(table, "impl", [row.key[2] for row in rows])
    for name in varying:
        _add_words(table, name, [_param(name, dict(row.key[3]).get(name)) for row in rows])
    for title in (f"base [{unit.name}]", f"new [{unit.name}]", "new/base", "interval", "p", "launches"):
        _add_figures(table, title)
    _add_words(table, "why", [row.reason for row in rows])
    for row in rows:
        smaller = min((p for p in (row.p_slower, row.p_faster) if p is not None), default=None)
        table.add_row(
            Text(row.verdict, style=_VERDICT_STYLE.get(row.verdict, "")),
            _text(row.key[1]),
            _text(row.key[2]),
            *(_text(_param(name, dict(row.key[3]).get(name))) for name in varying),
            _text(unit.format(row.base_s)),
            _text(unit.format(row.new_s)),
            _text(format_ratio(row.ratio)),
            _text(_interval(row)),
            _text("-" if smaller is None else f"{smaller:.2g}"),
            f"{row.base_launches}/{row.new_launches}",
            _text(row.reason),
        )
    estimator = rows[0].estimator
    _line(console, _title(f"{suite}: {estimator} of each launch, median over launches", same), style="bold")
    _print_table(console, table)
    _line(console, "")


def _interval(row: Row) -> str:
    if row.low is None or row.high is None or row.confidence is None:
        return "-"
    return f"{significant(row.low, 3)}..{significant(row.high, 3)} ({100 * row.confidence:.0f}%)"


def _case_text(name: str, params: Mapping[str, Param]) -> str:
    return " ".join([name, *(f"{key}={_param(key, value)}" for key, value in params.items())])


# --------------------------------------------------------------------------------- printing


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _console() -> Console:
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def _table(plain: bool) -> Table:
    return Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False, header_style="" if plain else "bold")


def _add_words(table: Table, title: str, cells: Sequence[str]) -> None:
    """A column of text, which may break between words where the terminal is narrow."""
    words = [word for cell in (title, *cells) for word in _printable(cell).split()]
    table.add_column(_text(title), min_width=max(map(cell_len, words), default=0))


def _add_figures(table: Table, title: str) -> None:
    table.add_column(_text(title), justify="right", no_wrap=True)


def _title(title: str, same: Mapping[str, Param]) -> str:
    """With the params that all cases of a table share, so that they need no column."""
    fixed = ", ".join(f"{name}={_param(name, value)}" for name, value in same.items())
    return f"{title}; {fixed}" if fixed else title


def _print_table(console: Console, table: Table) -> None:
    # What a table needs at least: its figures whole and each word of its text on one line.
    wide = console.options.update(width=_PIPE_WIDTH)
    needed = Measurement.get(console, wide, table).minimum
    width = console.width
    console.width = max(width, needed)
    console.print(table, crop=False)
    console.width = width


def _line(console: Console, line: str, style: str = "") -> None:
    console.print(_text(line, style), soft_wrap=True)


def _text(text: str, style: str = "") -> Text:
    return Text(_printable(text), style=style, overflow="fold")


def _printable(text: str) -> str:
    """Without control characters (an escape sequence in a file could rewrite the screen), and such
    that the terminal's encoding can spell it."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("µ", "u").encode(encoding, "backslashreplace").decode(encoding)
    return text


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, allow_nan=False, indent=2) + "\n")
