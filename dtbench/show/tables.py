"""What the terminal shows: runs, comparisons, findings; tables for people, strict JSON for machines."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from dtbench.cost.calibration.models import WORDS as MODELS
from dtbench.cost.calibration.validate import REGIMES, Group, Validation
from dtbench.cost.choices import CHOOSERS, Regret
from dtbench.judge.compare import Comparison, Row
from dtbench.judge.op_verdicts import VERDICTS as CASE_VERDICTS
from dtbench.judge.op_verdicts import has_verdicts, mode_of, summary_rows, verdict_of
from dtbench.judge.verdicts import Verdict
from dtbench.layout import DimLayout, layout_of
from dtbench.machine.doctor import Finding
from dtbench.model import Param, Result, Run, estimator_of
from dtbench.terminal import (
    add_figures,
    add_words,
    as_text,
    new_console,
    new_table,
    print_json,
    print_line,
    print_table,
    printable,
)
from dtbench.units import bandwidth_unit, format_ratio, format_size, significant, time_unit

if TYPE_CHECKING:
    import pandas as pd

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
# How many cases are named where many share one reason; the rest is counted.
_NAMED = 5


def print_runs(runs: Sequence[Run], as_json: bool = False) -> None:
    """Each run's provenance, then per suite one row per case with the impls side by side."""
    if as_json:
        print_json([_run_json(run) for run in runs])
        return
    console = new_console()
    for run in runs:
        _print_provenance(console, run)
        _print_layout(console, layout_of(run.header))
        for suite in dict.fromkeys(r.suite for r in run.results if not has_verdicts(r)):
            _print_suite(console, suite, run)
        verdicts = [r for r in run.results if has_verdicts(r)]
        if verdicts:
            _print_verdicts(console, verdicts)
        if not verdicts or len(verdicts) < len(run.results):
            _print_not_ok(console, run)


def print_csv(runs: Sequence[Run]) -> None:
    """The `dtbench.files.frame.results_frame` of the runs as CSV: a head, then one line per result.

    Text is made harmless: control characters are spelled out as in the tables, so that a result is
    one line, and what a spreadsheet would take for a formula has a quote before it.
    """
    from dtbench.files.frame import results_frame

    frame = results_frame(runs)
    for name in frame.select_dtypes(["string", "object"]).columns:
        frame[name] = frame[name].map(lambda v: _no_formula(printable(v)) if isinstance(v, str) else v)
    frame.columns = frame.columns.map(printable)
    frame.to_csv(sys.stdout, index=False, lineterminator="\n")


def _no_formula(text: str) -> str:
    # https://owasp.org/www-community/attacks/CSV_Injection names these characters, and the tab and line
    # ends, which are spelled out here already.
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


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


def print_validation(validation: Validation, as_json: bool = False) -> None:
    """Per group of calls a row per model: how far off it is by size, the noise floor last."""
    if as_json:
        print_json(validation.to_json())
        return
    console = new_console()
    print_line(console, validation.title, style="bold")
    for group in validation.groups:
        print_line(console, "")
        print_line(console, f"{group.name}: off by what factor, typically (1 is perfect)", style="bold")
        _print_group(console, group)
        if group.inside is not None:
            share = f"{group.inside:.0%} of {group.points} values lie inside the fit's 90 % intervals"
            print_line(console, share + ", which are of one launch only: too narrow" * group.one_launch)
        if group.beyond:
            print_line(console, f"{group.beyond} values lie beyond the sizes it was measured at")
    print_line(console, "")
    for note in validation.notes:
        print_line(console, f"note: {note}")


def _print_group(console: Console, group: Group) -> None:
    regimes = [regime for regime in REGIMES if any(regime in of_model for of_model in group.scores.values())]
    table = new_table(plain=not console.is_terminal)
    add_words(table, "model", list(MODELS.values()))
    for title in (*regimes, "median error", ">= 32 MiB, median error", "values"):
        add_figures(table, title)
    for model, scores in group.scores.items():
        large = scores.get(">= 32 MiB")
        table.add_row(
            as_text(MODELS[model]),
            *(as_text(format_ratio(scores[r].geometric_mean_ratio) if r in scores else "-") for r in regimes),
            as_text(_percent(scores["all"].median_error)),
            as_text(_percent(large.median_error) if large else "-"),
            str(scores["all"].points),
        )
    print_table(console, table)


def print_regret(found: Regret, as_json: bool = False) -> None:
    """Per library, kind and size a row per model: what its choices cost more than the best."""
    if as_json:
        print_json(found.to_json())
        return
    console = new_console()
    for group in found.groups:
        head = f"{group.name} by {group.library}, {format_size(group.size_bytes)}, {found.mesh}: "
        counts = f"{next(iter(group.scores.values())).decisions} decisions, {group.launches} launches"
        print_line(console, head + counts, style="bold")
        table = new_table(plain=not console.is_terminal)
        add_words(table, "chosen by", list(CHOOSERS.values()))
        for title in (
            "mean regret",
            "90 % interval",
            "largest",
            "within 10 %",
            "pairs in order",
            "no preference",
        ):
            add_figures(table, title)
        for model, score in group.scores.items():
            low, high = score.interval
            shares = (score.near, score.ranked_right, score.ties)
            table.add_row(
                as_text(CHOOSERS[model]),
                _percent(score.mean),
                f"{_percent(low)} to {_percent(high)}",
                _percent(score.worst),
                *("-" if share is None else f"{share:.0%}" for share in shares),
            )
        print_table(console, table)
        print_line(console, "")
    for note in found.notes:
        print_line(console, f"note: {note}")


def _percent(share: float) -> str:
    return f"{100 * share:.{1 if share >= 0.1 else 2}f} %"


def print_findings(findings: Sequence[Finding], as_json: bool = False) -> None:
    """What disturbs a measurement first, each with effect and remedy; then what is in order."""
    if as_json:
        print_json([finding.to_json() for finding in findings])
        return
    console = new_console()
    table = new_table(plain=not console.is_terminal)
    add_words(table, "", ["DISTURBS"])
    add_words(table, "check", [f.check for f in findings])
    add_words(table, "found", [f.got for f in findings])
    for finding in findings:
        mark = {True: "ok", False: "DISTURBS", None: "unknown"}[finding.ok]
        style = {True: "green", False: "red", None: "yellow"}[finding.ok]
        table.add_row(Text(mark, style=style), as_text(finding.check), as_text(finding.got))
    print_table(console, table)
    bad = [f for f in findings if f.ok is False]
    for finding in bad:
        print_line(console, f"{finding.check}: {finding.got}")
        print_line(console, f"    effect: {finding.effect}")
        print_line(console, f"    remedy: {finding.remedy}")
    print_line(console, f"{len(bad)} of {len(findings)} checks found something that disturbs a measurement")


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
    names = {host: str(r.get("host")) for r in ranks for host in [(r.get("host"), r.get("boot_id"))]}
    hosts = list(names.values())  # nodes of one name are several all the same
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
        "ranks": f"{len(ranks)} on {', '.join(hosts[:8])}{', ...' if len(hosts) > 8 else ''}"
        if ranks
        else "",
        "mesh": dims,
    }
    for name, value in lines.items():
        if value:
            print_line(console, f"{name + ':':<10}{value}")


def _print_layout(console: Console, dims: Sequence[DimLayout]) -> None:
    """Per mesh dim where its groups lie, by what the ranks said; columns that nothing is known of stay out."""
    if not dims:
        return
    words = {"mesh dim": [d.name for d in dims]}
    figures = {
        "ranks": [str(d.ranks) for d in dims],
        "groups": [str(d.groups) for d in dims],
        "hosts per group": [_span(d.hosts_per_group) for d in dims],
        "ranks per host": [_span(d.ranks_per_host) for d in dims],
        "groups per host pair": [str(d.groups_per_host_pair or "-") for d in dims],
        "NUMA nodes per group": [_span(d.numa_nodes_per_group) for d in dims],
        "NVLink pairs": ["-" if d.nvlink is None else f"{d.nvlink[0]} of {d.nvlink[1]}" for d in dims],
    }
    known = {title: column for title, column in figures.items() if set(column) != {"-"}}
    table = new_table(plain=not console.is_terminal)
    for title, column in words.items():
        add_words(table, title, column)
    for title in known:
        add_figures(table, title)
    for row in zip(*words.values(), *known.values(), strict=True):
        table.add_row(*map(as_text, row))
    print_line(console, "")
    print_line(console, "layout: where the groups of each mesh dim lie", style="bold")
    print_table(console, table)


def _span(span: tuple[int, int] | None) -> str:
    """`2`, or `1..2` where groups differ."""
    if span is None:
        return "-"
    return str(span[0]) if span[0] == span[1] else f"{span[0]}..{span[1]}"


def _print_verdicts(console: Console, results: Sequence[Result]) -> None:
    """Per mode and impl how many ops have which verdict, then each op that does not pass."""
    head, rows = summary_rows(results)
    table = new_table(plain=not console.is_terminal)
    for title, column in zip(head, zip(*rows, strict=True), strict=True):
        if title in ("mode", "impl"):
            add_words(table, title, column)
        else:
            add_figures(table, title)
    for row in rows:
        table.add_row(*map(as_text, row))
    print_line(console, "")
    print_table(console, table)
    for verdict in CASE_VERDICTS[:-1]:
        for r in results:
            if verdict_of(r) == verdict:
                print_line(console, f"{verdict}: {r.impl} {mode_of(r)} {r.name}: {r.reason}")


def _with(unit: str, value: object) -> str:
    return "" if value is None else f"{value} {unit}"


def _counted(names: Iterable[str]) -> str:
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counts.items())


def _print_suite(console: Console, suite: str, run: Run) -> None:
    from dtbench.files.frame import cases_frame, cells, impls_of, params_of, results_frame

    own = tuple(r for r in run.results if r.suite == suite)
    statistic = " or ".join(sorted({estimator_of(r) for r in own}))
    results = results_frame([dataclasses.replace(run, results=own)])
    cases = cases_frame(results)
    found = set(impls_of(cases))
    impls = [i for i in _IMPL_ORDER if i in found] + sorted(found.difference(_IMPL_ORDER))
    params = params_of(cases)
    varying, same = _split_params(params)
    words = {"case": cells(cases["name", ""])}
    words |= {name: [_param(name, of_case.get(name)) for of_case in params] for name in varying}
    figures = _figure_columns(cases, impls, "estimate_s")

    table = new_table(plain=not console.is_terminal)
    for title, column in words.items():
        add_words(table, title, column)
    for title, _ in figures:
        add_figures(table, title)
    for row in zip(*words.values(), *(column for _, column in figures), strict=True):
        table.add_row(*map(as_text, row))

    print_line(console, "")
    launches = results["launch"].nunique()
    title = f"{suite}: {statistic} of the samples"
    title += f", median over {launches} launches" if launches > 1 else ""
    print_line(console, _title(title, same), style="bold")
    print_table(console, table)


def _figure_columns(cases: pd.DataFrame, impls: Sequence[str], statistic: str) -> list[tuple[str, list[str]]]:
    """(title, cells): a time per impl; those from the last rank's arrival; core/torch; bandwidths."""
    from dtbench.files.frame import cells

    times = {impl: cells(cases[statistic, impl]) for impl in impls}
    unit = time_unit(t for column in times.values() for t in column if t is not None)
    columns = []
    for impl, column in times.items():
        # Why there is no figure, or "-" where the case has no such impl.
        instead = [s if s not in (None, "ok") else "-" for s in cells(cases["status", impl])]
        figures = [s if t is None else unit.format(t) for t, s in zip(column, instead, strict=True)]
        columns.append((f"{_IMPL_TITLES.get(impl, impl)} [{unit.name}]", figures))
    for impl in impls:
        if any(from_last := cells(cases["from_last_s", impl])):
            name = "from last" if len(impls) == 1 else f"{impl} from last"
            columns.append((f"{name} [{unit.name}]", list(map(unit.format, from_last))))
    if {"core", "torch"} <= set(impls):
        columns.append(("core/torch", list(map(format_ratio, cells(cases["core/torch", statistic])))))
    for which, short in (("algbw_Bps", "algbw"), ("busbw_Bps", "busbw")):
        bandwidths = {i: b for i in impls if any(b := cells(cases[which, i]))}
        scale = bandwidth_unit(b for column in bandwidths.values() for b in column if b is not None)
        for impl, column in bandwidths.items():
            name = short if len(impls) == 1 else f"{impl} {short}"
            columns.append((f"{name} [{scale.name}]", list(map(scale.format, column))))
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
        if has_verdicts(r):
            continue
        if r.status != "ok" or r.reason:  # a good time with a reservation: its GPU was throttled
            groups.setdefault((r.status, r.suite, r.impl, r.reason), []).append(r)
    print_line(console, "")
    for (status, suite, impl, reason), results in groups.items():
        names = list(dict.fromkeys(_case_text(r.name, r.params) for r in results))
        shown = "; ".join(names[:_NAMED]) + (
            f"; and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        )
        print_line(console, f"{status}: {suite}/{impl}: {reason or 'no reason given'} ({shown})")
    print_line(console, _counted(r.status for r in run.results) or "no results")


def _run_json(run: Run) -> dict[str, Any]:
    """The run without its samples, which lie in its file."""
    results = [r.to_json() for r in run.results]
    for result in results:
        for name in ("kind", "samples_s", "rank_samples_s", "rank_arrivals_s"):
            del result[name]
    return {"path": str(run.path), "complete": run.complete, "header": dict(run.header), "results": results}


# ------------------------------------------------------------------------------- comparison


def _print_suite_comparison(console: Console, suite: str, rows: Sequence[Row]) -> None:
    varying, same = _split_params([dict(row.key[3]) for row in rows])
    unit = time_unit(t for row in rows for t in (row.base_s, row.new_s) if t is not None)
    table = new_table(plain=not console.is_terminal)
    add_words(table, "verdict", [row.verdict for row in rows])
    add_words(table, "case", [row.key[1] for row in rows])
    add_words(table, "impl", [row.key[2] for row in rows])
    for name in varying:
        add_words(table, name, [_param(name, dict(row.key[3]).get(name)) for row in rows])
    for title in (f"base [{unit.name}]", f"new [{unit.name}]", "new/base", "interval", "p", "launches"):
        add_figures(table, title)
    add_words(table, "why", [row.reason for row in rows])
    for row in rows:
        smaller = min((p for p in (row.p_slower, row.p_faster) if p is not None), default=None)
        table.add_row(
            Text(row.verdict, style=_VERDICT_STYLE.get(row.verdict, "")),
            as_text(row.key[1]),
            as_text(row.key[2]),
            *(as_text(_param(name, dict(row.key[3]).get(name))) for name in varying),
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
        console, _title(f"{suite}: {estimator} of each launch, median over launches", same), style="bold"
    )
    print_table(console, table)
    print_line(console, "")


def _interval(row: Row) -> str:
    if row.low is None or row.high is None or row.confidence is None:
        return "-"
    return f"{significant(row.low, 3)}..{significant(row.high, 3)} ({100 * row.confidence:.0f}%)"


def _case_text(name: str, params: Mapping[str, Param]) -> str:
    return " ".join([name, *(f"{key}={_param(key, value)}" for key, value in params.items())])


def _title(title: str, same: Mapping[str, Param]) -> str:
    """With the params that all cases of a table share, so that they need no column."""
    fixed = ", ".join(f"{name}={_param(name, value)}" for name, value in same.items())
    return f"{title}; {fixed}" if fixed else title
