"""The output of `dtbench show`: selection of results, terminal tables, strict JSON and CSV."""

from __future__ import annotations

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console

from dtbench.engine.findings import describe_host_time, describe_slow_floors
from dtbench.engine.progress import status_with_caveat
from dtbench.engine.tasks import label_of, matcher
from dtbench.errors import UsageError
from dtbench.grouping import group_by, sort_by_order
from dtbench.records.result import MeshShape, Result, Run, estimator_of
from dtbench.reporting.suite_answers import answer_tables
from dtbench.stats.drops import drops_of
from dtbench.stats.exchanges import payload_choices, routing_costs
from dtbench.stats.host_time import group_costs, second_calls, step_growths
from dtbench.stats.layout import DimLayout, format_range, layout_of
from dtbench.suite import Param
from dtbench.suite.case import FLOOR, WHOLE
from dtbench.text import terminal
from dtbench.text.table import TableColumn
from dtbench.text.units import bandwidth_unit, format_ratio, format_spread, time_unit

if TYPE_CHECKING:
    import pandas as pd

# The core and torch first, then the references that they are compared with.
_IMPL_ORDER = ("core", "torch", FLOOR, WHOLE, "wrapped", "c10d", "unbucketed", "packed", "limit")
_IMPL_TITLES = {FLOOR: "floor (local)", WHOLE: "one rank (whole)"}
# Number of cases that are named if many share one reason; the others are counted.
_MAX_NAMES = 5
_ALL = "--csv and --json give all"


def print_runs(runs: Sequence[Run]) -> None:
    """Prints a table per suite of each run, then failures and caveats, and the provenance.

    A table has one row per case, or one row per implementation if the terminal is too narrow for that.
    """
    console = terminal.new_console()
    for number, run in enumerate(runs):
        if number:
            terminal.print_line(console, "")
        if len(runs) > 1:
            terminal.print_line(console, str(run.path), style="bold")
        _print_results(console, run)
        terminal.print_line(console, "")
        _print_provenance(console, run)
        if not by_one_process([run]):
            _print_layout(console, layout_of(run.header))


def tables_of(run: Run) -> str:
    """Returns the text of the tables of a run, without the provenance."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        _print_results(terminal.new_console(), run)
    return out.getvalue().rstrip("\n")


def _print_results(console: Console, run: Run) -> None:
    suites = group_by(run.results, lambda r: r.suite)
    for index, (suite, results) in enumerate(islice(suites.items(), terminal.MAX_TABLES)):
        if index:
            terminal.print_line(console, "")
        _print_suite(console, suite, run, results)
    terminal.print_rest(console, len(suites), "suites", _ALL, terminal.MAX_TABLES)
    for table in answer_tables([run]):
        terminal.print_line(console, "")
        terminal.print_line(console, table.caption, "bold")
        terminal.print_table(console, table.columns)
        terminal.print_prose(console, table.note)
    for suite, results in suites.items():
        for line in describe_host_time(results):
            terminal.print_prose(console, f"{suite}: {line}")
    for drop in drops_of(run.results)[: terminal.MAX_TABLES]:
        terminal.print_prose(console, f"warning: {drop}")
    _print_not_ok(console, run)


def print_runs_json(runs: Sequence[Run]) -> None:
    """Prints the runs without their samples, which are in the run files."""
    terminal.print_json([_run_json(run) for run in runs])


def print_csv(runs: Sequence[Run]) -> None:
    """Prints the `dtbench.stats.frame.results_frame` of the runs as CSV."""
    from dtbench.stats.frame import results_frame
    from dtbench.text.csv import to_csv

    sys.stdout.write(terminal.encodable(to_csv(results_frame(runs))))


def _print_provenance(console: Console, run: Run) -> None:
    header, versions = run.header, run.header.versions
    commit, dirty = header.git.commit, header.git.dirty
    cpu, gpus, ranks = header.machine.cpu, header.machine.gpus, header.ranks
    is_single_process = by_one_process([run])
    mesh = MeshShape(dim_names=(), shape=()) if is_single_process else header.mesh
    count = f"one process of {len(ranks)} (the others idle)" if is_single_process else f"{len(ranks)}"
    # Several nodes may have the same name, so each node is listed.
    hosts = [str(host) for host, _ in dict.fromkeys(r.node for r in ranks)]
    cores = "" if cpu.usable_cores is None else f"{cpu.usable_cores} cores usable"
    lines = {
        "run": f"{run.path}" + ("" if run.complete else "  INCOMPLETE: no end line, continue with --resume"),
        "started": header.started,
        "versions": ", ".join(f"{name} {value}" for name, value in versions.items() if value),
        "commit": f"{commit}{' with changes' if dirty else ''}" if commit else "",
        "cpu": ", ".join(str(fact) for fact in (cpu.model, cores, cpu.governor) if fact),
        "gpus": _counted(str(gpu.name) for gpu in gpus),
        "ranks": f"{count} on {', '.join(hosts[:8])}{', ...' if len(hosts) > 8 else ''}" if ranks else "",
        "mesh": ", ".join(f"{n}={s}" for n, s in zip(mesh.dim_names, mesh.shape, strict=True)),
    }
    for name, value in lines.items():
        if value:
            terminal.print_line(console, f"{name + ':':<10}{value}")


def by_one_process(runs: Sequence[Run]) -> bool:
    """Whether a single process measured all results, so that the ranks and the mesh do not apply to the times."""
    suites = [(run, suite) for run in runs for suite in {r.suite for r in run.results}]
    return bool(suites) and all(run.by_one_process(suite) for run, suite in suites)


def _print_layout(console: Console, dims: Sequence[DimLayout]) -> None:
    """Prints the placement of each mesh dim's groups on hosts, without columns that have no values."""
    if not dims:
        return
    figures = {
        "ranks": [str(d.ranks) for d in dims],
        "groups": [str(d.groups) for d in dims],
        "hosts per group": [format_range(d.hosts_per_group) for d in dims],
        "ranks per host": [format_range(d.ranks_per_host) for d in dims],
        "groups per host pair": [str(d.groups_per_host_pair or "-") for d in dims],
        "NUMA nodes per group": [format_range(d.numa_nodes_per_group) for d in dims],
        "NVLink pairs": ["-" if d.nvlink is None else f"{d.nvlink[0]} of {d.nvlink[1]}" for d in dims],
    }
    terminal.print_line(console, "")
    terminal.print_line(console, "layout: placement of the groups of each mesh dim", style="bold")
    terminal.print_columns(
        console,
        [("mesh dim", [d.name for d in dims])],
        [(title, column) for title, column in figures.items() if set(column) != {"-"}],
    )


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(names).items())


def _print_suite(console: Console, suite: str, run: Run, suite_results: Sequence[Result]) -> None:
    from dtbench.stats.frame import cases_frame, cells, impls_of, params_of, results_frame

    by_case = group_by(suite_results, lambda r: (r.name, r.case_key[3]))
    shown = tuple(r for case in islice(by_case.values(), terminal.MAX_ROWS) for r in case)
    statistic = " or ".join(sorted({estimator_of(r) for r in shown}))
    results = results_frame([replace(run, results=shown)])
    cases = cases_frame(results)
    impls = sort_by_order(impls_of(cases), _IMPL_ORDER)
    params = params_of(cases)
    varying, shared = terminal.split_params(params)
    words = [
        TableColumn("case", cells(cases["name", ""])),
        *(
            TableColumn(name, [terminal.param_text(name, case_params.get(name)) for case_params in params])
            for name in varying
        ),
    ]
    launches = results["launch"].nunique()
    has_samples = max((r.time_s.n for r in shown if r.time_s), default=2) > 1
    facts = {
        f"{statistic} of the samples" if has_samples else "one time per case": True,
        f"median over {launches} launches": launches > 1,
        "spread to their upper quartile": has_samples,
        f"measured in one process, not on {len(run.header.ranks)} ranks": run.by_one_process(suite),
    }
    title = f"{suite}: {', '.join(fact for fact, applies in facts.items() if applies)}"
    by_impl = {impl: _figures(cases, impl) for impl in impls}
    has_both = {"core", "torch"} <= set(impls)
    ratios = list(map(format_ratio, cells(cases["core/torch", "estimate_s"]))) if has_both else []
    width = terminal.readable_width(console)
    table = _side_by_side(words, by_impl, ratios)
    if len(impls) > 1 and terminal.width_of(console, table) > width:
        table = _row_per_impl(words, by_impl, ratios)
    terminal.print_prose(console, terminal.titled(title, shared), "bold", width)
    terminal.print_table(console, table)
    terminal.print_rest(console, len(by_case), "cases", _ALL)
    columns = [cells(cases["estimate_s", impl]) for impl in impls]
    times = [{i: s for i, s in zip(impls, row, strict=True) if s} for row in zip(*columns, strict=True)]
    for line in describe_slow_floors(times):
        terminal.print_prose(console, f"{suite}: {line}", "", width)


_TIMES, _RATES = ("time", "spread", "since last arrival"), ("algbw", "busbw")
# Figure -> column of one implementation. Times are in seconds, bandwidths in bytes per second, the spread is text.
_ImplFigures = dict[str, list[Any]]


def _figures(cases: pd.DataFrame, impl: str) -> _ImplFigures:
    """Returns the columns of one implementation, without empty ones.

    A case without a time has its status in the time column, or "-" if it lacks the implementation.
    """
    from dtbench.stats.frame import cells

    statuses = [s if s not in (None, "ok") else "-" for s in cells(cases["status", impl])]
    times = [s if t is None else t for t, s in zip(cells(cases["estimate_s", impl]), statuses, strict=True)]
    optional = {"since last arrival": "from_last_s", "algbw": "algbw_Bps", "busbw": "busbw_Bps"}
    return {"time": times, "spread": list(map(format_spread, cells(cases["spread", impl])))} | {
        kind: values for kind, name in optional.items() if any(values := cells(cases[name, impl]))
    }


def _side_by_side(
    words: Sequence[TableColumn], by_impl: Mapping[str, _ImplFigures], ratios: Sequence[str]
) -> list[TableColumn]:
    """Returns the columns of a table with one row per case: times, core/torch, bandwidths."""
    columns = {}
    for kind in (*_TIMES, *_RATES):
        kind_figures = {impl: figures[kind] for impl, figures in by_impl.items() if kind in figures}
        for impl, (cells, unit) in zip(
            kind_figures, _in_one_unit(kind, list(kind_figures.values())), strict=True
        ):
            titles = {"time": _IMPL_TITLES.get(impl, impl), "spread": kind}
            title = titles.get(kind, f"{impl} {kind}" if len(by_impl) > 1 else kind)
            columns[kind, impl] = TableColumn(title, cells, True, unit)
    times = [columns[kind, impl] for impl in by_impl for kind in _TIMES if (kind, impl) in columns]
    rates = [columns[kind, impl] for kind in _RATES for impl in by_impl if (kind, impl) in columns]
    return [*words, *times, *([TableColumn("core/torch", ratios, True)] if ratios else []), *rates]


def _row_per_impl(
    words: Sequence[TableColumn], by_impl: Mapping[str, _ImplFigures], ratios: Sequence[str]
) -> list[TableColumn]:
    """Returns the columns of a table with one row per case and implementation."""
    rows = [
        (case, impl)
        for case in range(len(words[0].cells))
        for impl, figures in by_impl.items()
        if figures["time"][case] != "-"
    ]
    columns = [TableColumn(word.header, [word.cells[case] for case, _ in rows]) for word in words]
    columns.append(TableColumn("impl", [_IMPL_TITLES.get(impl, impl) for _, impl in rows]))
    for kind in dict.fromkeys(kind for figures in by_impl.values() for kind in figures):
        values = [by_impl[impl][kind][case] if kind in by_impl[impl] else None for case, impl in rows]
        ((cells, unit),) = _in_one_unit(kind, [values])
        columns.append(TableColumn(kind, cells, True, unit))
    if ratios:
        columns.append(
            TableColumn("core/torch", [ratios[case] if impl == "core" else "" for case, impl in rows], True)
        )
    return columns


def _in_one_unit(kind: str, columns: Sequence[Sequence[Any]]) -> list[tuple[list[str], str]]:
    """Returns the cells and the unit of each column. Text is unchanged."""
    if kind == "spread":
        return [([str(cell or "-") for cell in column], "") for column in columns]
    values = [cell for column in columns for cell in column if isinstance(cell, float)]
    unit = bandwidth_unit(values) if kind.endswith("bw") else time_unit(values)
    return [([c if isinstance(c, str) else unit.format(c) for c in column], unit.name) for column in columns]


def _print_not_ok(console: Console, run: Run) -> None:
    # Also lists valid times with a caveat, e.g. that the GPU was throttled.
    groups = group_by(
        (r for r in run.results if r.status != "ok" or r.reason),
        lambda r: (status_with_caveat(r), r.suite, r.impl, r.reason),
    )
    terminal.print_line(console, "")
    for (status, suite, impl, reason), results in islice(groups.items(), terminal.MAX_ROWS):
        names = list(
            dict.fromkeys(
                " ".join(
                    [r.name, *(f"{name}={terminal.param_text(name, v)}" for name, v in r.params.items())]
                )
                for r in results
            )
        )
        shown = "; ".join(names[:_MAX_NAMES]) + f"; and {len(names) - _MAX_NAMES} more" * (
            len(names) > _MAX_NAMES
        )
        terminal.print_line(console, f"{status}: {suite}/{impl}: {reason or 'no reason given'} ({shown})")
    terminal.print_rest(console, len(groups), "reasons", _ALL)
    terminal.print_line(console, _counted(map(status_with_caveat, run.results)) or "no results")


def _run_json(run: Run) -> dict[str, object]:
    return {
        "path": str(run.path),
        "complete": run.complete,
        "header": msgspec.to_builtins(run.header),
        "results": [
            {
                name: value
                for name, value in msgspec.to_builtins(result.without_samples()).items()
                if name not in ("kind", "samples_s", "rank_samples_s", "rank_arrivals_s")
            }
            for result in run.results
        ],
        "second_calls": msgspec.to_builtins(second_calls(run.results)),
        "step_growths": msgspec.to_builtins(step_growths(run.results)),
        "group_costs": msgspec.to_builtins(group_costs(run.results)),
        "bandwidth_drops": msgspec.to_builtins(drops_of(run.results)),
        "routing_costs": msgspec.to_builtins(routing_costs([run])),
        "payload_choices": msgspec.to_builtins(payload_choices([run])),
    }


# Figure by which --sort orders the cases -> field of the result. The core's result counts if a case has one.
_FIGURES = {"time": "estimate_s", "spread": "spread", "algbw": "algbw_Bps", "busbw": "busbw_Bps"}
_RATIO = "core/torch"


def choose(runs: Sequence[Run], text: str, sort: str) -> list[Run]:
    """Selects the results whose case matches a text, and sorts them.

    Args:
        text: see `dtbench.engine.tasks.matcher`; "" selects all results.
        sort: time, spread, algbw, busbw, core/torch or the name of a param, in ascending order, or in descending order
            if prefixed by "-". Cases without this figure come last. "" keeps the order of the file.

    Raises:
        UsageError: no result matches, or no case has the figure.
    """
    if text:
        matches = matcher(text)
        runs = [
            replace(run, results=tuple(r for r in run.results if matches(label_of(r.suite, r))))
            for run in runs
        ]
        if not any(run.results for run in runs):
            raise UsageError(f"--filter {text!r} matches no result; `dtbench show` without it lists them")
    return [replace(run, results=tuple(_sorted(run.results, sort))) for run in runs] if sort else list(runs)


def _sorted(results: Sequence[Result], sort: str) -> list[Result]:
    name = sort.removeprefix("-")
    cases = group_by(results, lambda r: (r.suite, r.name, tuple(sorted(r.params.items())))).values()
    if not (keyed := [(value, case) for case in cases if (value := _value(name, case)) is not None]):
        params = ", ".join(dict.fromkeys(param for r in results for param in r.params))
        raise UsageError(
            f"--sort {sort}: no case has it; expected {', '.join((*_FIGURES, _RATIO))} or a param: {params}"
        )
    keyed.sort(key=lambda pair: (isinstance(pair[0], str), pair[0]), reverse=sort.startswith("-"))
    missing = [case for case in cases if _value(name, case) is None]
    return [result for case in (*(case for _, case in keyed), *missing) for result in case]


def _value(name: str, case: Sequence[Result]) -> Param | None:
    if name == _RATIO:
        core, torch = (_figure([r for r in case if r.impl == impl], "time") for impl in ("core", "torch"))
        return core / torch if core and torch else None
    if name in _FIGURES:
        return _figure([r for r in case if r.impl == "core"] or case, name)
    return case[0].params.get(name)


def _figure(results: Sequence[Result], name: str) -> float | None:
    """Returns the median over launches."""
    values = [
        value for r in results if r.status == "ok" and (value := getattr(r, _FIGURES[name])) is not None
    ]
    return median(values) if values else None
