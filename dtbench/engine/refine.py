"""Which sizes a sweep lacks: those next to a point that interpolation between its neighbours misses.

A table of times is read as straight lines between its sizes. Where that would miss a measured point between
two others by over 10 %, the curve bends (a protocol switch, a cache, the knee from latency to bandwidth), and
what lies between the neighbours cannot be known: the geometric middles on both sides of the point are
measured too, and looked at in the same way, until the steps are narrow or enough sizes are added.

Noise must not drive it. What disturbs a machine only adds time, and more bytes do not take less of it: a
point that lies over 10 % above one of a larger size was disturbed and is left out. The spread of a point is
its samples' interquartile ratio; a miss has to exceed that of the three points together. This asks for more
than the error of a quartile over some samples (which is smaller by the root of their number), because
launches differ by more than samples within one do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from dtbench.records.result import Result
from dtbench.stats import quantile
from dtbench.stats.layout import from_last_arrival_s
from dtbench.suite import Case, Param, RunOptions
from dtbench.suite.mesh import groups_in

MISS = math.log(1.10)
# Sizes added to one curve (a collective or transition on a mesh dim): two levels below one bend.
MOST_ADDED = 4
# Neighbours closer than this factor are near enough.
NARROWEST = 2.0

Name = tuple[str, tuple[tuple[str, Param], ...]]  # of a curve: the case's name, its params but the size


def is_calibrated_with(measured: Case | Result) -> bool:
    """Whether the topology is fitted to it: all groups of the mesh dim at work, each call awaited."""
    return (measured.params.get("groups"), measured.params.get("mode")) == ("together", "isolated")


def sizes_between(
    options: RunOptions, swept: Sequence[Result], added: Sequence[Result]
) -> Iterator[tuple[str, Mapping[str, Param]]]:
    """The (name, params) to measure next, for suites whose params are a mesh dim, `groups`, `mode` and
    `size`; see `Refinement.wanted`. Only the sweeps of all groups together, isolated, are refined.

    swept, added: results of one launch, of the planned sizes and of those added since. Where several
    impls were measured, the one that misses most decides.
    """
    curves: dict[Name, dict[str, dict[int, Sequence[float]]]] = {}
    sizes_added: dict[Name, set[int]] = {}
    for result in (*swept, *added):
        if is_calibrated_with(result):
            samples = _samples(options, result) if result.status == "ok" else ()
            if samples and min(samples) > 0:
                curve = curves.setdefault(_name(result), {}).setdefault(result.impl, {})
                curve[int(result.params["size"])] = samples
    for result in added:
        sizes_added.setdefault(_name(result), set()).add(int(result.params["size"]))
    for name, by_impl in curves.items():
        measured = sizes_added.get(name, set()).union(*by_impl.values())
        left = MOST_ADDED - len(sizes_added.get(name, ()))
        misses: dict[int, float] = {}
        for points in by_impl.values():
            for size, miss in middles(points).items():
                misses[size] = max(miss, misses.get(size, 0.0))
        wanted = sorted(misses.keys() - measured, key=lambda size: (-misses[size], size))
        yield from ((name[0], {**dict(name[1]), "size": size}) for size in wanted[: max(left, 0)])


def middles(points: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """For each size to measure, by how much the points beside it are missed, in logs: where both are, the
    bend lies between them.

    points: size -> the samples of a curve, seconds.
    """
    sizes = _undisturbed({size: quantile(samples, 0.25) for size, samples in points.items()})
    times = [quantile(points[size], 0.25) for size in sizes]
    spread = [math.log(quantile(points[s], 0.75) / t) for s, t in zip(sizes, times, strict=True)]
    wanted: dict[int, float] = {}
    for middle in range(1, len(sizes) - 1):
        left, right = middle - 1, middle + 1
        share = (sizes[middle] - sizes[left]) / (sizes[right] - sizes[left])
        parts = (1 - share) * times[left], share * times[right]
        miss = abs(math.log(times[middle] / sum(parts)))
        weights = [part / sum(parts) for part in parts]
        noise = math.hypot(spread[middle], weights[0] * spread[left], weights[1] * spread[right])
        if miss <= max(MISS, noise):
            continue
        for low, high in ((sizes[left], sizes[middle]), (sizes[middle], sizes[right])):
            if high / low >= NARROWEST:
                size = round(math.sqrt(low * high))
                wanted[size] = wanted.get(size, 0.0) + miss
    return wanted


def _undisturbed(times: Mapping[int, float]) -> list[int]:
    """The sizes, ascending, without those that take over 10 % longer than a larger one."""
    kept: list[int] = []
    least = math.inf
    for size in sorted(times, reverse=True):
        if times[size] <= least * math.exp(MISS):
            kept.append(size)
            least = min(least, times[size])
    return kept[::-1]


def _name(result: Result) -> Name:
    return result.name, tuple(sorted((k, v) for k, v in result.params.items() if k != "size"))


def _samples(options: RunOptions, result: Result) -> tuple[float, ...]:
    """From the last rank's arrival, as calibration counts; without the ranks' readings the longest."""
    return (
        from_last_arrival_s(result, groups_in(options.mesh, result.params.get("mesh_dim")))
        or result.samples_s
    )
