"""Runs as pandas data frames: flat for notebooks and CSV, and one row per case for tables.

Here alone launches are merged and the impls of a case set side by side; `show` and `report` read it.
Units stand in the names, as in the run file. Missing is NA, or NaN in columns of floats.
"""

from __future__ import annotations

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

# One or several runs, read or by their paths.
Runs = Run | str | Path | Iterable[Run | str | Path]

# The order statistics, in seconds: min_s to mean_s. Their number of samples is the column `samples`.
TIME_COLUMNS = ("estimate_s", *(f"{f.name}_s" for f in dataclasses.fields(Timing) if f.name != "n"))
PARAM, COUNTER = "param.", "counter."

# What launches are merged by.
_OF_A_CASE = ("suite", "name", "impl", "case", "status", "samples")
_KINDS: dict[str, type] = {
    **dict.fromkeys(("run_id", "suite", "name", "impl", "status", "reason", "clock"), str),
    **dict.fromkeys(("launch", "case", "rank", "samples", "size_bytes"), int),
}
_BANDWIDTHS = ["algbw_Bps", "busbw_Bps"]
# Nullable, so that a column which some rows lack still holds whole numbers and bools as such.
_DTYPES = {str: "string", bool: "boolean", int: "Int64", float: "float64"}


def results_frame(of: Runs, suite: str | None = None) -> pd.DataFrame:
    """One row per result, in the order of the files.

    of: a run, the path of a run file, or several of either. suite: that suite's results alone, with the params and
        counters that it has.

    Columns, always there:
        run_id, suite, name, impl: text.
        launch: whole number, from 0 in each run.
        case: whole number, the same for all impls, launches and runs of one case (suite, name and
            params), counted from 0 in the order of first appearance.
        status: ok, failed, skipped or wrong; reason: text; rank: the rank that failed.
        clock: host or device. samples: their number; estimate_s: the one of the following that stands for the
            launch (`dtbench.suite.estimator_of`); min_s, p25_s, median_s, p75_s, p95_s, max_s, mean_s: seconds
            per call.
        size_bytes, algbw_Bps, busbw_Bps: bytes, and bytes per second.
        rank_spread: longest over shortest reading of the ranks in a sample, median over samples.
        spread: how far the samples' upper quartile lies above estimate_s, as a share of it.
        from_last_s: from the arrival of a group's last rank until all of it is done, the longest over the groups
            of the mesh dim, the same order statistic as estimate_s; where the ranks' own readings are there.
    Then one column per param (`param.` before its name, so none can be mistaken for another column)
    and one per counter (`counter.`), missing where a result has none of that name. A param whose values
    differ in type has the dtype `object`, so that each stays as it is; a counter is a number in any case.
    A null character, which pandas may take for the end of a text, is spelled out as \\x00.

    Raises:
        UnreadableRunError: a file that is no run. UsageError: no run has a result of the suite.
    """
    runs = as_runs(of)
    pairs = [(run, result) for run in runs for result in run.results if suite in (None, result.suite)]
    if suite is not None and not pairs:
        there = ", ".join(dict.fromkeys(r.suite for run in runs for r in run.results)) or "no results at all"
        raise UsageError(f"no result of the suite {suite!r}: the runs have {there}")
    return _results_frame(pairs)


def timed_frames(runs: Sequence[Run], figures: Collection[str]) -> dict[str, pd.DataFrame]:
    """Suite -> the rows of its `results_frame` that hold a time, with no figures but these, `median_s` and the
    counters: of a hundred thousand results the others take longer than to read them."""
    pairs = ((run, result) for run in runs for result in run.results)
    timed = ((run, r) for run, r in pairs if r.status == "ok" and r.time_s and r.time_s.median > 0)
    by_suite = group_by(timed, lambda pair: pair[1].suite)
    return {suite: _results_frame(of, {*figures, "median_s"}) for suite, of in by_suite.items()}


def _results_frame(pairs: Sequence[tuple[Run, Result]], figures: Collection[str] = ()) -> pd.DataFrame:
    """figures: none but these; all, without any."""
    results = [result for _, result in pairs]
    times = [result.time_s for result in results]
    numbers: dict[tuple[object, ...], int] = {}
    of: dict[str, Callable[[], Sequence[object]]] = {
        "run_id": lambda: [run.header.run_id for run, _ in pairs],
        **{name: partial(_field, results, name) for name in ("suite", "name", "impl", "launch")},
        "case": lambda: [numbers.setdefault(_case(r), len(numbers)) for r in results],
        **{name: partial(_field, results, name) for name in ("status", "reason", "rank", "clock")},
        "samples": partial(_field, times, "n"),
        **{name: partial(_field, times, name.removesuffix("_s")) for name in TIME_COLUMNS},
        **{name: partial(_field, results, name) for name in ("estimate_s", "size_bytes", *_BANDWIDTHS)},
        "rank_spread": partial(_rank_spreads, results),
        "from_last_s": partial(_from_last, pairs),
        "spread": partial(_field, results, "spread"),
    }
    columns = {
        name: _column(values_of(), _KINDS.get(name, float))
        for name, values_of in of.items()
        if not figures or name in figures or name in _OF_A_CASE
    }
    for name in _names(r.params for r in results):
        values = [r.params.get(name) for r in results]
        kinds = {type(value) for value in values if value is not None}
        columns[PARAM + _text(name)] = _column(values, kinds.pop() if len(kinds) == 1 else object)
    for name in _names(r.counters for r in results):
        counts = [r.counters.get(name) for r in results]
        whole = all(isinstance(count, int) for count in counts if count is not None)
        columns[COUNTER + _text(name)] = _column(counts, int if whole else float)
    return pd.DataFrame(columns)


def cases_frame(of: pd.DataFrame | Runs, suite: str | None = None) -> pd.DataFrame:
    """One row per case of a `results_frame` (or of some of its rows, or of what it takes), impls side by side.

    suite: as for `results_frame`; columns in which it has nothing are then left out.

    Rows stand in the order of first appearance, indexed by `case`. Columns have two levels:
        (suite, ""), (name, ""), (param.X, ""): the case.
        (F, impl): of each impl the figure F, merged over launches: the median of each launch's
            estimate_s and min_s to mean_s, of rank_spread and from_last_s; the sum of samples; the bandwidth of
            estimate_s; spread: of the launches' p75_s the upper quartile, over estimate_s, less 1;
            size_bytes and counter.X of the first launch. launches: how many were ok. Other launches
            have no say.
        (status, impl): the first status that is not ok, else ok; missing where the impl is.
        (core/torch, F): F of core over F of torch, for estimate_s and min_s to mean_s.

    So `cases_frame(results)["estimate_s"]` is a table of cases by impls.
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
    both = {"core", "torch"} <= set(impls)
    for statistic in [name for name in TIME_COLUMNS if both and name in figures]:
        torch = merged["torch"][statistic]
        columns["core/torch", statistic] = merged["core"][statistic] / torch.where(torch > 0)
    frame = pd.DataFrame(columns, index=case.index)
    return frame if suite is None else frame.dropna(axis="columns", how="all")


def as_runs(of: Runs) -> list[Run]:
    """The runs, those that are given by their paths read.

    Raises:
        UnreadableRunError: a file that is no run.
    """
    several = [of] if isinstance(of, (Run, str, Path)) else of
    return [one if isinstance(one, Run) else read_run(one) for one in several]


def cells(column: pd.Series[Any]) -> list[Any]:
    """The column's values as Python's own, None where one is missing."""
    return column.astype(object).where(column.notna(), None).tolist()


def impls_of(cases: pd.DataFrame) -> list[str]:
    """The impls of a `cases_frame`, in the order of first appearance."""
    impls = cases.columns.get_level_values(1)
    return list(impls[cases.columns.get_level_values(0) == "estimate_s"])


def names_of(cases: pd.DataFrame, prefix: str) -> list[str]:
    """The columns of a `cases_frame` for params (`PARAM`) or counters (`COUNTER`), prefix included."""
    return list(dict.fromkeys(c for c in cases.columns.get_level_values(0) if c.startswith(prefix)))


def params_of(cases: pd.DataFrame) -> list[dict[str, Param]]:
    """Per row of a `cases_frame` the case's params by their names."""
    columns = {name.removeprefix(PARAM): cells(cases[name, ""]) for name in names_of(cases, PARAM)}
    return [
        {name: values[row] for name, values in columns.items() if values[row] is not None}
        for row in range(len(cases))
    ]


def _merged(results: pd.DataFrame) -> pd.DataFrame:
    """The launches of one impl put together: one row per case."""
    bad = results[results["status"] != "ok"].groupby("case", sort=False)
    good = results[(results["status"] == "ok") & results["median_s"].notna()].copy()
    # Over launches a bandwidth goes with the time, so its seconds per byte are what has a median.
    good[_BANDWIDTHS] = 1 / good[_BANDWIDTHS].where(good[_BANDWIDTHS] > 0)
    launches = good.groupby("case", sort=False)
    there = [c for c in (*TIME_COLUMNS, "rank_spread", "from_last_s", *_BANDWIDTHS) if c in good.columns]
    figures = launches[there].median()
    figures[_BANDWIDTHS] = 1 / figures[_BANDWIDTHS]
    if {"p75_s", "estimate_s"} <= {*there}:
        high_s, estimate_s = launches["p75_s"].quantile(0.75), figures["estimate_s"]
        has_spread = (estimate_s > 0) & (launches["samples"].sum() > 1)  # a single sample has none
        figures["spread"] = (high_s / estimate_s.where(has_spread) - 1).clip(lower=0)
    counters = [c for c in good.columns if c.startswith(COUNTER)]
    figures = figures.join(launches[["size_bytes", *counters]].first())
    figures = figures.assign(launches=launches.size().astype("Int64"), samples=launches["samples"].sum())
    figures = figures.reindex(results["case"].drop_duplicates())
    return figures.assign(status=bad["status"].first().reindex(figures.index).fillna("ok"))


def _case(result: Result) -> tuple[object, ...]:
    suite, name, _, params = result.case_key
    return suite, name, params


def _rank_spreads(results: Sequence[Result]) -> list[float | None]:
    spreads: list[float | None] = [None] * len(results)
    per_rank = [[*filter(None, r.rank_samples_s.values())] for r in results]
    keys = ((len(ranks), min(map(len, ranks))) if len(ranks) > 1 else None for ranks in per_rank)
    for (_, shared), places in index_blocks(keys):
        readings = np.array([[samples[:shared] for samples in per_rank[place]] for place in places])
        shortest, longest = readings.min(axis=1), readings.max(axis=1)
        # Times of a foreign file may lie so far apart that this is infinite, or be 0.
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            ratios = longest / shortest
        there = shortest > 0
        rows = zip(places, np.median(ratios, axis=1).tolist(), there.all(axis=1).tolist(), strict=True)
        for row, (place, spread, whole) in enumerate(rows):
            if whole:
                spreads[place] = spread
            elif there[row].any():
                spreads[place] = float(np.median(ratios[row, there[row]]))
    return spreads


def _from_last(pairs: Sequence[tuple[Run, Result]]) -> list[float | None]:
    times_s: list[float | None] = [None] * len(pairs)
    groups = {id(run): mesh_groups(run.header) for run in {id(run): run for run, _ in pairs}.values()}
    dims = ((id(run), str(r.params.get("mesh_dim"))) for run, r in pairs)
    for (run_id, dim), places in index_blocks(key if key[1] in groups[key[0]] else None for key in dims):
        results = [pairs[place][1] for place in places]
        estimates = estimates_s(from_last_arrivals_s(results, groups[run_id][dim]), results)
        for place, estimate in zip(places, estimates, strict=True):
            times_s[place] = estimate
    return times_s


def _field(of: Sequence[object], name: str) -> list[object]:
    return [None if one is None else getattr(one, name) for one in of]


def _names(mappings: Iterable[Mapping[str, object]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _column(values: Sequence[object], kind: type) -> pd.Series[Any]:
    if kind in (str, object) and any(isinstance(value, str) and "\0" in value for value in set(values)):
        values = [_text(value) if isinstance(value, str) else value for value in values]
    return pd.Series(values, dtype=_DTYPES.get(kind, "object"))


def _text(text: str) -> str:
    return text.replace("\0", "\\x00")
