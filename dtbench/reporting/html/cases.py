"""The cases of a report's runs, put together over launches: one figure per case and impl."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeVar

import pandas as pd

from dtbench.records.result import Run
from dtbench.stats.frame import COUNTER, cases_frame, cells, impls_of, names_of, params_of, timed_frames
from dtbench.suite import Param

_K = TypeVar("_K")


@dataclass(frozen=True)
class MeasuredImpl:
    """One impl of one case over its launches, as `dtbench.stats.frame.cases_frame` merges them."""

    impl: str
    estimate_s: float  # what `dtbench.records.result.estimator_of` names, the median over launches
    median_s: float
    p25_s: float
    p75_s: float
    size_bytes: int | None
    algbw_Bps: float | None  # noqa: N815 - bytes per second, as the run file spells it
    busbw_Bps: float | None  # noqa: N815
    rank_spread: float | None  # longest over shortest reading of the ranks, median over samples
    counters: Mapping[str, float]


@dataclass(frozen=True)
class ReportCase:
    """One case with the impls that were measured for it."""

    name: str
    params: Mapping[str, Param]
    impls: Mapping[str, MeasuredImpl]

    def get(self, param: str) -> Param:
        """The param's value, "" where the case lacks it."""
        return self.params.get(param, "")

    def number(self, param: str) -> int:
        """The param as a whole number, 0 where the case lacks it or it is none."""
        value = self.params.get(param, 0)
        return int(value) if isinstance(value, int | float) else 0

    @cached_property
    def only(self) -> MeasuredImpl:
        """Of a suite of one impl."""
        return next(iter(self.impls.values()))

    def seconds(self, impl: str) -> float | None:
        return self.impls[impl].estimate_s if impl in self.impls else None

    def ratio(self, impl: str, base: str) -> float | None:
        """Time of `impl` over time of `base`, where both were measured."""
        both = {impl, base} <= self.impls.keys()
        return self.impls[impl].estimate_s / self.impls[base].estimate_s if both else None


def collect(runs: Sequence[Run]) -> dict[str, list[ReportCase]]:
    """Suite -> cases, in the order in which they were first measured."""
    figures = [f.name for f in fields(MeasuredImpl) if f.name not in ("impl", "counters")]
    return {
        suite: _cases(cases_frame(timed), figures) for suite, timed in timed_frames(runs, figures).items()
    }


def _cases(frame: pd.DataFrame, figures: Sequence[str]) -> list[ReportCase]:
    counters = names_of(frame, COUNTER)
    impls: list[dict[str, MeasuredImpl]] = [{} for _ in range(len(frame))]
    for impl in impls_of(frame):
        columns = {name: cells(frame[name, impl]) for name in (*figures, *counters)}
        for row, measured in enumerate(impls):
            if columns["median_s"][row] is not None:
                there = {c.removeprefix(COUNTER): v for c in counters if (v := columns[c][row]) is not None}
                measured[impl] = MeasuredImpl(impl, **{f: columns[f][row] for f in figures}, counters=there)
    return [ReportCase(*case) for case in zip(cells(frame["name", ""]), params_of(frame), impls, strict=True)]


def distinct(values: Iterable[_K]) -> list[_K]:
    """Each value once, in the order of first appearance."""
    return list(dict.fromkeys(values))


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None of none. The mean that fits ratios."""
    there = [v for v in values if v]
    return statistics.geometric_mean(there) if there else None


def main_dtype(cases: Sequence[ReportCase]) -> Param:
    dtypes = {c.get("dtype") for c in cases}
    return "float32" if "float32" in dtypes else min(dtypes, key=str)
