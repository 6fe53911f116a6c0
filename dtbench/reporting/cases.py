"""The results of a report's runs, put together over launches: one figure per case and impl."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from dtbench.model import Param, Result, Run


@dataclass(frozen=True)
class Measured:
    """One impl of one case: medians over launches of each launch's order statistics, in seconds."""

    suite: str
    name: str
    impl: str
    params: Mapping[str, Param]
    median_s: float
    p25_s: float
    p75_s: float
    launches: int
    samples: int
    size_bytes: int | None
    busbw_factor: float | None
    rank_spread: float | None  # longest over shortest reading of the ranks, median over samples
    counters: Mapping[str, float]

    @property
    def algbw_Bps(self) -> float | None:  # noqa: N802 - bytes per second, as the run file spells it
        return self.size_bytes / self.median_s if self.size_bytes else None

    @property
    def busbw_Bps(self) -> float | None:  # noqa: N802
        algbw = self.algbw_Bps
        return algbw * self.busbw_factor if algbw is not None and self.busbw_factor is not None else None


@dataclass(frozen=True)
class Case:
    """One case with the impls that were measured for it."""

    name: str
    params: Mapping[str, Param]
    impls: Mapping[str, Measured]

    def get(self, param: str) -> Param:
        """The param's value, "" where the case lacks it."""
        return self.params.get(param, "")

    def number(self, param: str) -> int:
        """The param as a whole number, 0 where the case lacks it or it is none."""
        value = self.params.get(param, 0)
        return int(value) if isinstance(value, int | float) else 0

    def seconds(self, impl: str) -> float | None:
        return self.impls[impl].median_s if impl in self.impls else None

    def ratio(self, impl: str, base: str) -> float | None:
        """Time of `impl` over time of `base`, where both were measured."""
        if impl not in self.impls or base not in self.impls:
            return None
        return self.impls[impl].median_s / self.impls[base].median_s


def collect(runs: Sequence[Run]) -> dict[str, list[Case]]:
    """Suite -> cases, in the order in which they were first measured."""
    launches: dict[tuple[Any, ...], list[Result]] = {}
    for run in runs:
        for result in run.results:
            if result.status == "ok" and result.time_s is not None and result.time_s.median > 0:
                launches.setdefault(result.case_key, []).append(result)
    cases: dict[str, dict[tuple[Any, ...], Case]] = {}
    for (suite, name, impl, params), results in launches.items():
        of_suite = cases.setdefault(suite, {})
        case = of_suite.setdefault((name, params), Case(name, dict(params), {}))
        case.impls[impl] = _merge(results)  # type: ignore[index]
    return {suite: list(of_suite.values()) for suite, of_suite in cases.items()}


def _merge(results: Sequence[Result]) -> Measured:
    first = results[0]
    times = [r.time_s for r in results if r.time_s is not None]
    factors = [r.busbw_Bps / r.algbw_Bps for r in results if r.busbw_Bps is not None and r.algbw_Bps]
    spreads = [s for r in results if (s := _rank_spread(r)) is not None]
    return Measured(
        first.suite,
        first.name,
        first.impl,
        first.params,
        median(t.median for t in times),
        median(t.p25 for t in times),
        median(t.p75 for t in times),
        len(results),
        sum(t.n for t in times),
        first.size_bytes,
        factors[0] if factors else None,
        median(spreads) if spreads else None,
        first.counters,
    )


def _rank_spread(result: Result) -> float | None:
    per_rank = [samples for samples in result.rank_samples_s.values() if samples]
    if len(per_rank) < 2:
        return None
    ratios = [max(at) / min(at) for at in zip(*per_rank, strict=False) if min(at) > 0]
    return median(ratios) if ratios else None


def distinct(values: Iterable[Any]) -> list[Any]:
    """Each value once, in the order of first appearance."""
    return list(dict.fromkeys(values))


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there; None of none. The mean that fits ratios."""
    logs = [math.log(v) for v in values if v is not None and v > 0]
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def group(cases: Iterable[Case], key: Callable[[Case], Any]) -> dict[Any, list[Case]]:
    grouped: dict[Any, list[Case]] = {}
    for case in cases:
        grouped.setdefault(key(case), []).append(case)
    return grouped


def others(case: Case, known: Iterable[str]) -> str:
    """The params beside the known ones, in words: no two rows of a table may look the same."""
    return ", ".join(f"{k}={v}" for k, v in sorted(case.params.items()) if k not in set(known))
