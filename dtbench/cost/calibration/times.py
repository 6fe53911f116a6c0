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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtbench.grouping import group_by
from dtbench.records.result import Result, Run
from dtbench.stats import bandwidth_drops, batch_quantiles
from dtbench.stats.layout import from_last_arrivals_s
from dtbench.suite.mesh import Groups

Array = NDArray[np.float64]
Launch = tuple[str, int]  # run_id, number of the launch in that run

COLLECTIVES, TRANSITIONS = "collectives", "redistribute"  # the suites that calibration reads
QUANTILE = 0.25  # of the samples of a launch
# Sizes of a curve that lines are fitted to, at most: more say nothing new, and each line is fitted a hundred times.
MAX_FITTED_SIZES = 1000
# Another dtype is said to differ where its times, at the same bytes, do so by more than this factor.
DTYPES_DIFFER = 1.25


class LaunchResult(NamedTuple):
    launch: Launch
    result: Result


LaunchResults = Sequence[LaunchResult]


@dataclass(frozen=True)
class SizeTimes:
    """One size: launch -> its samples in microseconds. by_launch: microseconds of each launch."""

    size_bytes: int
    launches: Mapping[Launch, Array]
    by_launch: Mapping[Launch, float]

    @cached_property
    def measured_us(self) -> float:
        return median(self.by_launch.values())


@dataclass(frozen=True)
class CallTimes:
    """The times of a collective or change of placement over size, ascending, all of one dtype: a curve is fitted to
    them."""

    name: str
    dtype: str
    points: tuple[SizeTimes, ...]

    @property
    def sizes(self) -> Array:
        return np.array([p.size_bytes for p in self.points], dtype=float)

    @property
    def measured_us(self) -> Array:
        return np.array([p.measured_us for p in self.points])

    @property
    def launches(self) -> list[Launch]:
        return sorted({launch for p in self.points for launch in p.launches})

    @cached_property
    def steady(self) -> CallTimes:
        """Without the sizes in drops of bandwidth, which constants are not fitted to, unless they are half of them."""
        drops = bandwidth_drops(self.sizes.tolist(), self.measured_us.tolist())
        low = {float(self.sizes[i]) for drop in drops for i in drop}
        return self.only({*self.sizes} - low) if 2 * len(low) < len(self.points) else self

    @property
    def thinned(self) -> CallTimes:
        """The same with at most `MAX_FITTED_SIZES`, evenly, both ends among them."""
        places = np.linspace(0, len(self.points) - 1, min(MAX_FITTED_SIZES, len(self.points))).astype(int)
        return CallTimes(self.name, self.dtype, tuple(self.points[place] for place in places))

    def only(self, sizes: Iterable[float]) -> CallTimes:
        """The same without the points of other sizes."""
        wanted = set(sizes)
        return CallTimes(self.name, self.dtype, tuple(p for p in self.points if p.size_bytes in wanted))


def results_of(runs: Sequence[Run], suite: str) -> list[LaunchResult]:
    """The suite's ok results that say their size and mesh dim."""
    return [
        LaunchResult((run.header.run_id, result.launch), result)
        for run in runs
        for result in run.ok(suite)
        if result.size_bytes and "mesh_dim" in result.params
    ]


def preferred(results: LaunchResults, param: str, wanted: str, notes: list[str]) -> list[LaunchResult]:
    """The results with param = wanted; where there are none, those of the first other value, which a note says.

    A result that lacks the param is one of before it was recorded, when all were as wanted.
    """
    values = {r.result.params.get(param, wanted) for r in results}
    taken = wanted
    if values and wanted not in values:
        taken = min(map(str, values))
        notes.append(f"no results with {param} {wanted}: {taken} was taken")
    return [r for r in results if str(r.result.params.get(param, wanted)) == taken]


def one_impl(results: LaunchResults, notes: list[str]) -> list[LaunchResult]:
    """The results of one way of measuring: c10d, or the first by name; a note says what was left aside."""
    impls = sorted({r.result.impl for r in results}, key=lambda impl: (impl != "c10d", impl))
    if len(impls) > 1:
        notes.append(f"{', '.join(impls[1:])} was left aside for {impls[0]}")
    return [r for r in results if r.result.impl == impls[0]]


def times_by_name(results: LaunchResults, groups: Groups, warnings: list[str]) -> dict[str, CallTimes]:
    """The times of each collective or transition of one mesh dim; warnings: of their dtypes."""
    chosen = {}
    for name, of_name in sorted(group_by(results, lambda r: r.result.name).items()):
        by_dtype = group_by(of_name, lambda r: str(r.result.params.get("dtype", "unknown")))
        calls = [CallTimes(name, dtype, _points(of, groups)) for dtype, of in sorted(by_dtype.items())]
        calls = [call for call in calls if call.points]
        if calls:
            chosen[name] = min(calls, key=lambda c: (c.dtype != "float32", -len(c.points), c.dtype))
            warnings += _differing(chosen[name], calls)
    return chosen


def _differing(chosen: CallTimes, others: Sequence[CallTimes]) -> Iterator[str]:
    by_size = {p.size_bytes: p.measured_us for p in chosen.points}
    for other in others:
        ratios = [p.measured_us / by_size[p.size_bytes] for p in other.points if p.size_bytes in by_size]
        ratio = float(np.median(ratios)) if ratios else 1.0
        if max(ratio, 1 / ratio) > DTYPES_DIFFER:
            yield (
                f"{chosen.name} of {other.dtype} takes {ratio:.2f}x the time of {chosen.dtype} at the same bytes: "
                f"the curve is that of {chosen.dtype}"
            )


def _points(results: LaunchResults, groups: Groups) -> tuple[SizeTimes, ...]:
    samples_of: dict[int, dict[Launch, list[Array]]] = {}
    for (launch, result), samples in zip(
        results, samples_us([r.result for r in results], groups), strict=True
    ):
        if samples.size and result.size_bytes:
            samples_of.setdefault(result.size_bytes, {}).setdefault(launch, []).append(samples)
    return points_of(
        {
            size: {launch: np.concatenate(parts) for launch, parts in launches.items()}
            for size, launches in samples_of.items()
        }
    )


def points_of(sizes: Mapping[int, Mapping[Launch, Array]]) -> tuple[SizeTimes, ...]:
    """Size -> launch -> samples in microseconds, as points by ascending size."""
    estimates = iter(quartiles([samples for launches in sizes.values() for samples in launches.values()]))
    by_size = {size: dict(zip(launches, estimates, strict=False)) for size, launches in sizes.items()}
    return tuple(SizeTimes(size, sizes[size], by_size[size]) for size in sorted(sizes))


def quartiles(of: Sequence[Array]) -> list[float]:
    """The `QUANTILE` of each."""
    return [estimate for estimate in batch_quantiles(of, [QUANTILE] * len(of)) if estimate is not None]


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
