"""Runs as pandas data frames: one row per result for notebooks and CSV, and one row per case for tables.

This is the only place that merges launches and combines the implementations of a case into one row; `dtbench show` and
the report use it. Column names contain units, as in the run file. Missing values are NA, or NaN in columns of floats.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dtbench.errors import UsageError
from dtbench.grouping import group_by
from dtbench.records.result import Result, Run
from dtbench.records.run import read_run
from dtbench.records.timing import Timing
from dtbench.stats import estimates_s, index_blocks
from dtbench.stats.layout import from_last_arrivals_s, mesh_groups
from dtbench.suite import Param

# Runs, or paths of run files.
Runs = Run | str | Path | Iterable[Run | str | Path]

# The estimate and the order statistics of a launch, in seconds. The column `samples` has the number of samples.
TIME_COLUMNS = ("estimate_s", *(f"{f.name}_s" for f in dataclasses.fields(Timing) if f.name != "n"))
PARAM, COUNTER = "param.", "counter."

# Columns that are always kept, since merging launches needs them.
_CASE_COLUMNS = ("suite", "name", "impl", "case", "status", "samples")
_KINDS: dict[str, type] = {
    **dict.fromkeys(("run_id", "suite", "name", "impl", "status", "reason", "clock"), str),
    **dict.fromkeys(("launch", "case", "rank", "samples", "size_bytes"), int),
}
_BANDWIDTHS = ["algbw_Bps", "busbw_Bps"]
# Nullable dtypes keep integers and bools as such in columns with missing values.
_DTYPES = {str: "string", bool: "boolean", int: "Int64", float: "float64"}


def results_frame(of: Runs, suite: str | None = None) -> pd.DataFrame:
    """Returns a frame with one row per result, in the order of the files.

    These columns always exist:
        run_id, suite, name, impl: text.
        launch: integer, from 0 in each run.
        case: integer, the same for all implementations, launches and runs of one case (suite, name and params);
            numbered from 0 in the order of first appearance.
        status: ok, failed, skipped or wrong.
        reason: text.
        rank: the rank that failed.
        clock: host or device.
        samples: number of samples.
        estimate_s: the launch's estimate, one of the following order statistics (`estimator_of`).
        min_s, p25_s, median_s, p75_s, p95_s, max_s, mean_s: seconds per call.
        size_bytes: bytes.
        algbw_Bps, busbw_Bps: bytes per second.
        rank_spread: longest over shortest time of the ranks in a sample, median over samples.
        spread: relative distance of the samples' upper quartile above estimate_s.
        from_last_s: seconds from the arrival of a group's last rank until all of the group is done. The longest over
            the groups of the mesh dim, as the same order statistic as estimate_s. Missing without samples of single
            ranks.

    There is one column per param, prefixed "param.", and one per counter, prefixed "counter.". They are missing where a
    result has no such param or counter. A param with values of several types has the dtype `object`; a counter is
    always a number. Null characters are written as \\x00, since pandas may treat them as the end of a text.

    Args:
        of: a run, the path of a run file, or several of either.
        suite: only this suite's results, with the params and counters that occur in it.

    Raises:
        UnreadableRunError: a file is not a run.
        UsageError: no run has a result of the suite.
    """
    runs = as_runs(of)
    pairs = [(run, result) for run in runs for result in run.results if suite in (None, result.suite)]
    if suite is not None and not pairs:
        suites = ", ".join(dict.fromkeys(r.suite for run in runs for r in run.results)) or "no results at all"
        raise UsageError(f"no result of the suite {suite!r}: the runs have {suites}")
    return _results_frame(pairs)


def timed_frames(runs: Sequence[Run], figures: Collection[str]) -> dict[str, pd.DataFrame]:
    """Returns suite -> the rows of its `results_frame` that have a time.

    The frames contain only the given figures, `median_s` and the counters. For a hundred thousand results, computing
    the other columns would take longer than reading the files.
    """
    timed = (
        (run, r) for run in runs for r in run.results if r.status == "ok" and r.time_s and r.time_s.median > 0
    )
    return {
        suite: _results_frame(rows, {*figures, "median_s"})
        for suite, rows in group_by(timed, lambda pair: pair[1].suite).items()
    }


def _results_frame(pairs: Sequence[tuple[Run, Result]], figures: Collection[str] = ()) -> pd.DataFrame:
    """Builds the frame. If `figures` is not empty, other figures are left out."""
    results = [result for _, result in pairs]
    times = [result.time_s for result in results]
    numbers: dict[tuple[object, ...], int] = {}
    values_by_column: dict[str, Callable[[], Sequence[object]]] = {
        "run_id": lambda: [run.header.run_id for run, _ in pairs],
        **{name: partial(_field, results, name) for name in ("suite", "name", "impl", "launch")},
        "case": lambda: [
            numbers.setdefault((suite, name, params), len(numbers))
            for suite, name, _, params in (r.case_key for r in results)
        ],
        **{name: partial(_field, results, name) for name in ("status", "reason", "rank", "clock")},
        "samples": partial(_field, times, "n"),
        **{name: partial(_field, times, name.removesuffix("_s")) for name in TIME_COLUMNS},
        **{name: partial(_field, results, name) for name in ("estimate_s", "size_bytes", *_BANDWIDTHS)},
        "rank_spread": partial(_rank_spreads, results),
        "from_last_s": partial(_from_last_times, pairs),
        "spread": partial(_field, results, "spread"),
    }
    columns = {
        name: _column(values_of(), _KINDS.get(name, float))
        for name, values_of in values_by_column.items()
        if not figures or name in figures or name in _CASE_COLUMNS
    }
    for name in _names(r.params for r in results):
        values = [r.params.get(name) for r in results]
        kinds = {type(value) for value in values if value is not None}
        columns[PARAM + _text(name)] = _column(values, kinds.pop() if len(kinds) == 1 else object)
    for name in _names(r.counters for r in results):
        counts = [r.counters.get(name) for r in results]
        are_integers = all(isinstance(count, int) for count in counts if count is not None)
        columns[COUNTER + _text(name)] = _column(counts, int if are_integers else float)
    return pd.DataFrame(columns)


def cases_frame(of: pd.DataFrame | Runs, suite: str | None = None) -> pd.DataFrame:
    """Returns a frame with one row per case and the implementations in columns.

    Rows are in the order of first appearance, indexed by `case`. `cases_frame(results)["estimate_s"]` is a table of
    cases by implementations. Columns have two levels:
        (suite, ""), (name, ""), (param.X, ""): the case.
        (F, impl): the figure F of an implementation, merged over its ok launches. estimate_s, min_s to mean_s,
            rank_spread and from_last_s are medians over launches; samples is the sum; the bandwidths belong to
            estimate_s; spread is the upper quartile of the launches' p75_s / estimate_s - 1; size_bytes and counter.X
            are those of the first launch; launches is the number of ok launches.
        (status, impl): the first status that is not ok, else ok; missing if the implementation is.
        (core/torch, F): F of core / F of torch, for estimate_s and min_s to mean_s.

    Args:
        of: a `results_frame`, some rows of one, or the argument of `results_frame`.
        suite: as for `results_frame`. Empty columns are then left out.
    """
    results = of if isinstance(of, pd.DataFrame) else results_frame(of, suite)
    case = results.drop_duplicates("case").set_index("case")
    case = case[["suite", "name", *(c for c in case.columns if c.startswith(PARAM))]]
    impls = list(dict.fromkeys(results["impl"]))
    merged = {impl: _merged(results[results["impl"] == impl]).reindex(case.index) for impl in impls}
    columns = {(str(c), ""): case[c] for c in case.columns}
    figures = list(merged[impls[0]].columns) if impls else []
    for figure in figures:
        columns |= {(figure, impl): merged[impl][figure] for impl in impls}
    has_both = {"core", "torch"} <= set(impls)
    for statistic in [name for name in TIME_COLUMNS if has_both and name in figures]:
        torch = merged["torch"][statistic]
        columns["core/torch", statistic] = merged["core"][statistic] / torch.where(torch > 0)
    frame = pd.DataFrame(columns, index=case.index)
    return frame if suite is None else frame.dropna(axis="columns", how="all")


def as_runs(runs: Runs) -> list[Run]:
    """Returns the runs and reads those that are given as paths.

    Raises:
        UnreadableRunError: a file is not a run.
    """
    run_list = [runs] if isinstance(runs, (Run, str, Path)) else runs
    return [run if isinstance(run, Run) else read_run(run) for run in run_list]


def cells(column: "pd.Series[Any]") -> list[Any]:
    """Returns the column's values as Python objects; None for a missing one."""
    return column.astype(object).where(column.notna(), None).tolist()


def impls_of(cases: pd.DataFrame) -> list[str]:
    """Returns the implementations of a `cases_frame`, in the order of first appearance."""
    return list(cases.columns.get_level_values(1)[cases.columns.get_level_values(0) == "estimate_s"])


def names_of(cases: pd.DataFrame, prefix: str) -> list[str]:
    """Returns the columns of a `cases_frame` for params (`PARAM`) or counters (`COUNTER`), with the prefix."""
    return list(dict.fromkeys(c for c in cases.columns.get_level_values(0) if c.startswith(prefix)))


def params_of(cases: pd.DataFrame) -> list[dict[str, Param]]:
    """Returns the params of the case in each row of a `cases_frame`."""
    columns = {name.removeprefix(PARAM): cells(cases[name, ""]) for name in names_of(cases, PARAM)}
    return [
        {name: values[row] for name, values in columns.items() if values[row] is not None}
        for row in range(len(cases))
    ]


def _merged(results: pd.DataFrame) -> pd.DataFrame:
    """Merges the launches of one implementation into one row per case."""
    not_ok = results[results["status"] != "ok"].groupby("case", sort=False)
    timed = results[(results["status"] == "ok") & results["median_s"].notna()].copy()
    # Bandwidths are inverse to times, so the median is taken over their reciprocals.
    timed[_BANDWIDTHS] = 1 / timed[_BANDWIDTHS].where(timed[_BANDWIDTHS] > 0)
    launches = timed.groupby("case", sort=False)
    present = [c for c in (*TIME_COLUMNS, "rank_spread", "from_last_s", *_BANDWIDTHS) if c in timed.columns]
    figures = launches[present].median()
    figures[_BANDWIDTHS] = 1 / figures[_BANDWIDTHS]
    if {"p75_s", "estimate_s"} <= {*present}:
        high_s, estimate_s = launches["p75_s"].quantile(0.75), figures["estimate_s"]
        has_spread = (estimate_s > 0) & (launches["samples"].sum() > 1)  # a single sample has no spread
        figures["spread"] = (high_s / estimate_s.where(has_spread) - 1).clip(lower=0)
    constants = ["size_bytes", *(c for c in timed.columns if c.startswith(COUNTER))]
    figures = (
        figures.join(launches[constants].first())
        .assign(launches=launches.size().astype("Int64"), samples=launches["samples"].sum())
        .reindex(results["case"].drop_duplicates())
    )
    return figures.assign(status=not_ok["status"].first().reindex(figures.index).fillna("ok"))


def _rank_spreads(results: Sequence[Result]) -> list[float | None]:
    spreads: list[float | None] = [None] * len(results)
    per_rank = [[*filter(None, r.rank_samples_s.values())] for r in results]
    keys = ((len(ranks), min(map(len, ranks))) if len(ranks) > 1 else None for ranks in per_rank)
    for (_, shared_count), indices in index_blocks(keys):
        times_s = np.array([[samples[:shared_count] for samples in per_rank[index]] for index in indices])
        shortest, longest = times_s.min(axis=1), times_s.max(axis=1)
        # In files of other tools, times may be 0, or so far apart that their ratio overflows.
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            ratios = longest / shortest
        is_positive = shortest > 0
        rows = zip(indices, np.median(ratios, axis=1).tolist(), is_positive.all(axis=1).tolist(), strict=True)
        for row, (index, spread, all_positive) in enumerate(rows):
            if all_positive:
                spreads[index] = spread
            elif is_positive[row].any():
                spreads[index] = float(np.median(ratios[row, is_positive[row]]))
    return spreads


def _from_last_times(pairs: Sequence[tuple[Run, Result]]) -> list[float | None]:
    times_s: list[float | None] = [None] * len(pairs)
    groups = {id(run): mesh_groups(run.header) for run in {id(run): run for run, _ in pairs}.values()}
    dims = ((id(run), str(r.params.get("mesh_dim"))) for run, r in pairs)
    for (run_id, dim), indices in index_blocks(key if key[1] in groups[key[0]] else None for key in dims):
        results = [pairs[index][1] for index in indices]
        estimates = estimates_s(from_last_arrivals_s(results, groups[run_id][dim]), results)
        for index, estimate in zip(indices, estimates, strict=True):
            times_s[index] = estimate
    return times_s


def _field(records: Sequence[object], name: str) -> list[object]:
    return [None if record is None else getattr(record, name) for record in records]


def _names(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _column(values: Sequence[object], kind: type) -> "pd.Series[Any]":
    if kind in (str, object) and any(isinstance(value, str) and "\0" in value for value in set(values)):
        values = [_text(value) if isinstance(value, str) else value for value in values]
    return pd.Series(values, dtype=_DTYPES.get(kind, "object"))


def _text(text: str) -> str:
    return text.replace("\0", "\\x00")
