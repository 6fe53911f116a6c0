"""The cases of a report's runs, with the launches merged."""

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
    """The results of one implementation of a case, merged over launches by `dtbench.stats.frame.cases_frame`.

    Attributes:
        impl: name of the implementation.
        estimate_s: median over launches of the estimate, seconds per call.
        median_s: median over launches of the samples' median.
        p25_s: median over launches of the samples' lower quartile.
        p75_s: median over launches of the samples' upper quartile.
        size_bytes: message size.
        algbw_Bps: algorithm bandwidth, bytes per second.
        busbw_Bps: bus bandwidth, bytes per second.
        rank_spread: longest over shortest time of the ranks, median over samples.
        counters: counters by name.
    """

    impl: str
    estimate_s: float
    median_s: float
    p25_s: float
    p75_s: float
    size_bytes: int | None
    algbw_Bps: float | None  # noqa: N815 - spelled as in the run file
    busbw_Bps: float | None  # noqa: N815
    rank_spread: float | None
    counters: Mapping[str, float]


@dataclass(frozen=True)
class ReportCase:
    """A case with its measured implementations."""

    name: str
    params: Mapping[str, Param]
    impls: Mapping[str, MeasuredImpl]

    def get(self, param: str) -> Param:
        """Returns the value of a param; "" if the case lacks it."""
        return self.params.get(param, "")

    def number(self, param: str) -> int:
        """Returns a param as an integer; 0 if the case lacks it or its value is not a number."""
        value = self.params.get(param, 0)
        return int(value) if isinstance(value, int | float) else 0

    @cached_property
    def only(self) -> MeasuredImpl:
        """The implementation, in suites that have only one."""
        return next(iter(self.impls.values()))

    def seconds(self, impl: str) -> float | None:
        return self.impls[impl].estimate_s if impl in self.impls else None

    def ratio(self, impl: str, base: str) -> float | None:
        """Returns time of `impl` / time of `base`; None unless both were measured."""
        has_both = {impl, base} <= self.impls.keys()
        return self.impls[impl].estimate_s / self.impls[base].estimate_s if has_both else None


def collect(runs: Sequence[Run]) -> dict[str, list[ReportCase]]:
    """Returns suite -> cases, in the order in which they were first measured."""
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
                case_counters = {
                    c.removeprefix(COUNTER): v for c in counters if (v := columns[c][row]) is not None
                }
                measured[impl] = MeasuredImpl(
                    impl, **{f: columns[f][row] for f in figures}, counters=case_counters
                )
    return [ReportCase(*case) for case in zip(cells(frame["name", ""]), params_of(frame), impls, strict=True)]


def distinct(values: Iterable[_K]) -> list[_K]:
    """Returns each value once, in the order of first appearance."""
    return list(dict.fromkeys(values))


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Returns the geometric mean, which is the right one for ratios, of the values that are not None."""
    present = [v for v in values if v]
    return statistics.geometric_mean(present) if present else None


def main_dtype(cases: Sequence[ReportCase]) -> Param:
    dtypes = {c.get("dtype") for c in cases}
    return "float32" if "float32" in dtypes else min(dtypes, key=str)
