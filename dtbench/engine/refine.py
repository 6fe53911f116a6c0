"""Chooses sizes to add to a sweep: beside each point that interpolation between its neighbours misses.

A table of times is interpolated linearly between its sizes. If that misses a measured point by over 10 %, the curve
bends (a protocol switch, a cache, the change from latency to bandwidth), and the times between the neighbours are
unknown. Then the geometric middles on both sides of the point are measured, and checked in the same way, until the
steps are narrow or enough sizes are added.

Noise must not add sizes. Disturbances only add time, and more bytes do not take less time, so a point that takes over
10 % longer than a larger size was disturbed and is left out. The spread of a point is the interquartile ratio of its
samples; a miss has to exceed the spread of the three points together. That is stricter than the standard error of a
quartile, since launches differ by more than the samples within a launch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from dtbench.grouping import group_by
from dtbench.records.result import Result
from dtbench.stats import quantile
from dtbench.stats.layout import from_last_arrival_s
from dtbench.suite import ROUTING, Case, Param, RunOptions
from dtbench.suite.mesh import groups_in

MISS = math.log(1.10)
# Largest number of sizes added to a curve (a collective or transition on a mesh dim): two bisections around one bend.
MAX_ADDED_SIZES = 4
# No sizes are added between neighbours closer than this factor.
MIN_STEP = 2.0

CurveKey = tuple[str, tuple[tuple[str, Param], ...]]  # the name and params of its cases, except the size


def is_calibrated_with(item: Case | Result) -> bool:
    """Whether calibration uses the case: equal parts, all groups of the mesh dim at once, each call awaited."""
    params = item.params
    return ROUTING not in params and (params.get("groups"), params.get("mode")) == ("together", "isolated")


def sizes_between(
    options: RunOptions, swept: Sequence[Result], added: Sequence[Result]
) -> Iterator[tuple[str, Mapping[str, Param]]]:
    """Yields name and params of the cases to measure next, see `Refinement.wanted`.

    For suites with the params mesh_dim, groups, mode and size. Refines the sweeps that calibration uses. With several
    impls, the largest miss counts.

    Args:
        swept: results of a launch for the listed sizes.
        added: its results for the sizes added so far.
    """
    curves: dict[CurveKey, dict[str, dict[int, Sequence[float]]]] = {}
    for result in (*swept, *added):
        samples = _samples(options, result) if result.status == "ok" and is_calibrated_with(result) else ()
        if samples and min(samples) > 0:
            curve = curves.setdefault(_curve_key(result), {}).setdefault(result.impl, {})
            curve[int(result.params["size"])] = samples
    sizes_added = {
        key: {int(result.params["size"]) for result in results}
        for key, results in group_by(added, _curve_key).items()
    }
    for name, by_impl in curves.items():
        measured = sizes_added.get(name, set()).union(*by_impl.values())
        may_add = MAX_ADDED_SIZES - len(sizes_added.get(name, ()))
        misses: dict[int, float] = {}
        for points in by_impl.values():
            for size, miss in middles(points).items():
                misses[size] = max(miss, misses.get(size, 0.0))
        chosen = sorted(misses.keys() - measured, key=lambda size: (-misses[size], size))
        yield from ((name[0], {**dict(name[1]), "size": size}) for size in chosen[: max(may_add, 0)])


def middles(points: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Returns the sizes to measure, and the log of the factor by which interpolation misses the points beside each.

    If interpolation misses the points on both sides of a new size, their misses add up: the bend lies between them.

    Args:
        points: size -> samples, seconds.
    """
    sizes = _undisturbed({size: quantile(samples, 0.25) for size, samples in points.items()})
    times = [quantile(points[size], 0.25) for size in sizes]
    spread = [math.log(quantile(points[s], 0.75) / t) for s, t in zip(sizes, times, strict=True)]
    new_sizes: dict[int, float] = {}
    for middle in range(1, len(sizes) - 1):
        previous, following = middle - 1, middle + 1
        share = (sizes[middle] - sizes[previous]) / (sizes[following] - sizes[previous])
        parts = (1 - share) * times[previous], share * times[following]
        miss = abs(math.log(times[middle] / sum(parts)))
        weights = [part / sum(parts) for part in parts]
        noise = math.hypot(spread[middle], weights[0] * spread[previous], weights[1] * spread[following])
        if miss <= max(MISS, noise):
            continue
        for low, high in ((sizes[previous], sizes[middle]), (sizes[middle], sizes[following])):
            if high / low >= MIN_STEP:
                size = round(math.sqrt(low * high))
                new_sizes[size] = new_sizes.get(size, 0.0) + miss
    return new_sizes


def _undisturbed(times: Mapping[int, float]) -> list[int]:
    """Returns the sizes, ascending, without those that take over 10 % longer than a larger size."""
    undisturbed: list[int] = []
    shortest = math.inf
    for size in sorted(times, reverse=True):
        if times[size] <= shortest * math.exp(MISS):
            undisturbed.append(size)
            shortest = min(shortest, times[size])
    return undisturbed[::-1]


def _curve_key(result: Result) -> CurveKey:
    return result.name, tuple(sorted((k, v) for k, v in result.params.items() if k != "size"))


def _samples(options: RunOptions, result: Result) -> tuple[float, ...]:
    """Returns times from the last rank's arrival, as calibration does; without arrivals those of the slowest rank."""
    return (
        from_last_arrival_s(result, groups_in(options.mesh, result.params.get("mesh_dim")))
        or result.samples_s
    )
