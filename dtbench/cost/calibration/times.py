"""Reduces the results of runs to a time per size and launch.

Ranks leave the barrier before a sample at different times, so a rank's own reading includes waiting for the last rank.
The cost formulas do not model that wait. So a sample of a group lasts from the last arrival until all ranks are done.
The groups of a mesh dim run at the same time, and the slowest determines the time of the dim. A launch's time is the
lower quartile of its samples; the time of a size is the median over launches.

A curve has a single dtype, since the speed of reductions depends on it. It is float32 if that was measured, else the
dtype with the most sizes. A warning reports other dtypes that take a different time for the same number of bytes.
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
# Lines are fitted to at most this many sizes of a curve. More do not change the fit, which is repeated 100 times.
MAX_FITTED_SIZES = 1000
# A warning reports dtypes whose times for the same number of bytes differ by more than this factor.
DTYPES_DIFFER = 1.25


class LaunchResult(NamedTuple):
    launch: Launch
    result: Result


LaunchResults = Sequence[LaunchResult]


@dataclass(frozen=True)
class SizeTimes:
    """The times of a call at one size.

    Attributes:
        launches: launch -> samples in microseconds.
        by_launch: launch -> its estimate in microseconds.
    """

    size_bytes: int
    launches: Mapping[Launch, Array]
    by_launch: Mapping[Launch, float]

    @cached_property
    def measured_us(self) -> float:
        return median(self.by_launch.values())


@dataclass(frozen=True)
class CallTimes:
    """The times of a collective or redistribution by ascending size, to which a curve is fitted."""

    name: str
    dtype: str
    points: tuple[SizeTimes, ...]

    @property
    def sizes(self) -> Array:
        return np.array([point.size_bytes for point in self.points], dtype=float)

    @property
    def measured_us(self) -> Array:
        return np.array([point.measured_us for point in self.points])

    @property
    def launches(self) -> list[Launch]:
        return sorted({launch for point in self.points for launch in point.launches})

    @cached_property
    def steady(self) -> CallTimes:
        """The times without sizes at which the bandwidth drops, unless these are at least half of the sizes."""
        drops = bandwidth_drops(self.sizes.tolist(), self.measured_us.tolist())
        dropped = {float(self.sizes[index]) for drop in drops for index in drop}
        return self.only({*self.sizes} - dropped) if 2 * len(dropped) < len(self.points) else self

    @property
    def thinned(self) -> CallTimes:
        """The times at no more than `MAX_FITTED_SIZES` evenly chosen sizes, including both ends."""
        indices = np.linspace(0, len(self.points) - 1, min(MAX_FITTED_SIZES, len(self.points))).astype(int)
        return CallTimes(self.name, self.dtype, tuple(self.points[index] for index in indices))

    def only(self, sizes: Iterable[float]) -> CallTimes:
        """Returns the times at these sizes."""
        selected = set(sizes)
        points = tuple(point for point in self.points if point.size_bytes in selected)
        return CallTimes(self.name, self.dtype, points)


def results_of(runs: Sequence[Run], suite: str) -> list[LaunchResult]:
    """Returns the suite's ok results that have a size and a mesh dim."""
    return [
        LaunchResult((run.header.run_id, result.launch), result)
        for run in runs
        for result in run.ok(suite)
        if result.size_bytes and "mesh_dim" in result.params
    ]


def preferred(results: LaunchResults, param: str, value: str, notes: list[str]) -> list[LaunchResult]:
    """Selects the results with param = value. Without any, selects the first other value and adds a note.

    Results without the param were written before it existed, when `value` was the only one.
    """
    values = {entry.result.params.get(param, value) for entry in results}
    selected = value
    if values and value not in values:
        selected = min(map(str, values))
        notes.append(f"no results with {param} {value}: used {selected} instead")
    return [entry for entry in results if str(entry.result.params.get(param, value)) == selected]


def one_impl(results: LaunchResults, notes: list[str]) -> list[LaunchResult]:
    """Selects the results of impl c10d, else of the first impl by name. A note lists the ignored impls."""
    impls = sorted({entry.result.impl for entry in results}, key=lambda impl: (impl != "c10d", impl))
    if len(impls) > 1:
        notes.append(f"used impl {impls[0]} and ignored {', '.join(impls[1:])}")
    return [entry for entry in results if entry.result.impl == impls[0]]


def times_by_name(results: LaunchResults, groups: Groups, warnings: list[str]) -> dict[str, CallTimes]:
    """Returns the times of each collective or redistribution of a mesh dim.

    Args:
        warnings: is extended by warnings about dtypes.
    """
    chosen = {}
    for name, results_of_name in sorted(group_by(results, lambda entry: entry.result.name).items()):
        by_dtype = group_by(results_of_name, lambda entry: str(entry.result.params.get("dtype", "unknown")))
        calls = [CallTimes(name, dtype, _points(part, groups)) for dtype, part in sorted(by_dtype.items())]
        calls = [call for call in calls if call.points]
        if calls:
            chosen[name] = min(
                calls, key=lambda call: (call.dtype != "float32", -len(call.points), call.dtype)
            )
            warnings += _dtype_warnings(chosen[name], calls)
    return chosen


def _dtype_warnings(chosen: CallTimes, calls: Sequence[CallTimes]) -> Iterator[str]:
    by_size = {point.size_bytes: point.measured_us for point in chosen.points}
    for call in calls:
        ratios = [
            point.measured_us / by_size[point.size_bytes]
            for point in call.points
            if point.size_bytes in by_size
        ]
        ratio = float(np.median(ratios)) if ratios else 1.0
        if max(ratio, 1 / ratio) > DTYPES_DIFFER:
            yield (
                f"{chosen.name} of {call.dtype} takes {ratio:.2f}x as long as {chosen.dtype} for the same bytes: "
                f"the curve is that of {chosen.dtype}"
            )


def _points(results: LaunchResults, groups: Groups) -> tuple[SizeTimes, ...]:
    samples_of: dict[int, dict[Launch, list[Array]]] = {}
    for (launch, result), samples in zip(
        results, samples_us([entry.result for entry in results], groups), strict=True
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
    """Converts size -> launch -> samples (microseconds) to points by ascending size."""
    estimates = iter(quartiles([samples for launches in sizes.values() for samples in launches.values()]))
    by_size = {size: dict(zip(launches, estimates, strict=False)) for size, launches in sizes.items()}
    return tuple(SizeTimes(size, sizes[size], by_size[size]) for size in sorted(sizes))


def quartiles(samples: Sequence[Array]) -> list[float]:
    """Returns the `QUANTILE` of each array."""
    return [
        estimate for estimate in batch_quantiles(samples, [QUANTILE] * len(samples)) if estimate is not None
    ]


def samples_us(results: Sequence[Result], groups: Groups) -> list[Array]:
    """Returns the samples of each result: the time from the last arrival in a group, of the slowest group.

    If the ranks' own readings are missing or inconsistent, the file's samples are returned, which are the maximum
    over all ranks. Without samples, the lower quartile is returned.
    """
    seconds: list[Array | Sequence[float]] = [
        from_last if from_last.size else result.samples_s or (result.time_s.p25,) if result.time_s else ()
        for result, from_last in zip(results, from_last_arrivals_s(results, groups), strict=True)
    ]
    if not seconds:
        return []
    times = np.concatenate([np.asarray(samples, dtype=np.float64) for samples in seconds]) * 1e6
    valid = np.isfinite(times) & (times > 0)
    bounds = itertools.pairwise(itertools.accumulate(map(len, seconds), initial=0))
    all_valid = bool(valid.all())
    return [times[start:end] if all_valid else times[start:end][valid[start:end]] for start, end in bounds]
