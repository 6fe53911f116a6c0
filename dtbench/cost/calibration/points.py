"""Which times count: from the results of runs to one time per size and launch.

A sample is taken after a barrier, but ranks leave a barrier one by one, and a rank's own reading
includes its wait for the last one to arrive. The cost formulas know no such wait. So within a group a
sample lasts from the last arrival until all are done, and over the groups of a dim, which run together, it
is the *longest*: a dim is as slow as its slowest group. Over samples it is the lower quartile, over launches
the median.

Which results go together. One curve holds one dtype: bytes are what a collective moves, but a reduction
also adds, at a speed of its own per dtype. float32 comes first, else the dtype measured at the most
sizes; the others are left aside, and where they take another time per byte a warning says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np
from numpy.typing import NDArray

from dtbench.records.layout import from_last_arrivals_s
from dtbench.stats import quantiles_of
from dtbench.suite import Result, Run
from dtbench.suite.mesh import Groups

Array = NDArray[np.float64]
Launch = tuple[str, int]  # run_id, number of the launch in that run
Tagged = tuple[str, Result]  # run_id, result

COLLECTIVES, TRANSITIONS = "collectives", "redistribute"  # the suites that calibration reads
QUANTILE = 0.25  # of the samples of a launch
# Another dtype is said to differ where its times, at the same bytes, do so by more than this factor.
DTYPES_DIFFER = 1.25


@dataclass(frozen=True)
class Point:
    """One size: launch -> its samples in microseconds. by_launch: microseconds of each launch."""

    size_bytes: int
    launches: Mapping[Launch, Array]
    by_launch: Mapping[Launch, float]

    @cached_property
    def measured_us(self) -> float:
        return median(self.by_launch.values())


def points_of(sizes: Mapping[int, Mapping[Launch, Array]]) -> tuple[Point, ...]:
    """Size -> launch -> samples in microseconds, as points by ascending size."""
    estimates = iter(quartiles([samples for launches in sizes.values() for samples in launches.values()]))
    by_size = {size: dict(zip(launches, estimates, strict=False)) for size, launches in sizes.items()}
    return tuple(Point(size, sizes[size], by_size[size]) for size in sorted(sizes))


def quartiles(of: Sequence[Array]) -> list[float]:
    """The `QUANTILE` of each."""
    return [found for found in quantiles_of(of, [QUANTILE] * len(of)) if found is not None]


@dataclass(frozen=True)
class Series:
    """What a curve is fitted to: points by ascending size, all of one dtype."""

    name: str
    dtype: str
    points: tuple[Point, ...]

    @property
    def sizes(self) -> Array:
        return np.array([p.size_bytes for p in self.points], dtype=float)

    @property
    def measured_us(self) -> Array:
        return np.array([p.measured_us for p in self.points])

    @property
    def launches(self) -> list[Launch]:
        return sorted({launch for p in self.points for launch in p.launches})

    def only(self, sizes: Iterable[int]) -> Series:
        """The same without the points of other sizes."""
        wanted = set(sizes)
        return Series(self.name, self.dtype, tuple(p for p in self.points if p.size_bytes in wanted))


def tagged(runs: Sequence[Run], suite: str) -> list[Tagged]:
    """The suite's ok results that say their size and mesh dim."""
    return [
        (run.header.run_id, result)
        for run in runs
        for result in run.ok(suite)
        if result.size_bytes and "mesh_dim" in result.params
    ]


def preferred(results: Sequence[Tagged], param: str, wanted: str) -> tuple[list[Tagged], str | None]:
    """The results with param = wanted; where there are none, those of the first other value, in words.

    A result that lacks the param is one of before it was recorded, when all were as wanted.
    """
    values = {r.params.get(param, wanted) for _, r in results}
    if wanted in values or not values:
        taken, note = wanted, None
    else:
        taken = min(map(str, values))
        note = f"no results with {param} {wanted}: {taken} was taken"
    return [(run_id, r) for run_id, r in results if str(r.params.get(param, wanted)) == taken], note


def one_impl(results: Sequence[Tagged]) -> tuple[list[Tagged], str | None]:
    """The results of one way of measuring: c10d, or the first by name; what was left aside, in words."""
    impls = sorted({r.impl for _, r in results}, key=lambda impl: (impl != "c10d", impl))
    kept = [(run_id, r) for run_id, r in results if r.impl == impls[0]] if impls else []
    return kept, f"{', '.join(impls[1:])} was left aside for {impls[0]}" if len(impls) > 1 else None


def series_by_name(results: Sequence[Tagged], groups: Groups) -> tuple[dict[str, Series], list[str]]:
    """A series for each collective or transition of one mesh dim, and what to know about their dtypes."""
    found, notes = {}, []
    for name in sorted({r.name for _, r in results}):
        by_dtype = {}
        for dtype in sorted({_dtype(r) for _, r in results if r.name == name}):
            mine = [x for x in results if x[1].name == name and _dtype(x[1]) == dtype]
            points = _points(mine, groups)
            if points:
                by_dtype[dtype] = Series(name, dtype, points)
        if by_dtype:
            chosen = min(by_dtype.values(), key=lambda s: (s.dtype != "float32", -len(s.points), s.dtype))
            found[name] = chosen
            notes += _differing(chosen, by_dtype)
    return found, notes


def _dtype(result: Result) -> str:
    return str(result.params.get("dtype", "unknown"))


def _differing(chosen: Series, by_dtype: Mapping[str, Series]) -> list[str]:
    mine = {p.size_bytes: p.measured_us for p in chosen.points}
    notes = []
    for dtype, series in by_dtype.items():
        ratios = [p.measured_us / mine[p.size_bytes] for p in series.points if p.size_bytes in mine]
        ratio = float(np.median(ratios)) if ratios else 1.0
        if max(ratio, 1 / ratio) > DTYPES_DIFFER:
            notes.append(
                f"{chosen.name} of {dtype} takes {ratio:.2f}x the time of {chosen.dtype} at the same bytes: "
                f"the curve is that of {chosen.dtype}"
            )
    return notes


def samples_us(results: Sequence[Result], groups: Groups) -> list[Array]:
    """Of each result per sample from the last arrival in a group until it is done, the longest over the groups.

    Without the ranks' own readings (or where they do not match up) it is what the file holds, the
    longest over all ranks; without any samples, the lower quartile alone.
    """
    seconds: list[Array | Sequence[float]] = [
        from_last if from_last.size else result.samples_s or (result.time_s.p25,) if result.time_s else ()
        for result, from_last in zip(results, from_last_arrivals_s(results, groups), strict=True)
    ]
    if not seconds:
        return []
    times = np.concatenate([np.asarray(of, dtype=np.float64) for of in seconds]) * 1e6
    good = np.isfinite(times) & (times > 0)
    places = itertools.pairwise(itertools.accumulate(map(len, seconds), initial=0))
    whole = bool(good.all())
    return [times[a:b] if whole else times[a:b][good[a:b]] for a, b in places]


def _points(results: Sequence[Tagged], groups: Groups) -> tuple[Point, ...]:
    found: dict[int, dict[Launch, list[Array]]] = {}
    of_results = samples_us([result for _, result in results], groups)
    for (run_id, result), samples in zip(results, of_results, strict=True):
        if samples.size and result.size_bytes:
            launches = found.setdefault(result.size_bytes, {})
            launches.setdefault((run_id, result.launch), []).append(samples)
    return points_of(
        {
            size: {launch: np.concatenate(parts) for launch, parts in launches.items()}
            for size, launches in found.items()
        }
    )
