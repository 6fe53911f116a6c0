"""What fits into a time: how long cases take, and which of them to measure first (`dtbench run --budget`).

Every suite keeps the same share of what it would take, and spends it on the cases that say most: of a sweep its
ends, its middle, then the middles between, over all curves before the next size; of cases without a size a few of
each name, spread over the suite's list. Pure: all ranks choose alike, and rank 0 alone looks at a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dtbench.engine.progress import about
from dtbench.text.units import plural

if TYPE_CHECKING:
    from dtbench.engine.options import Task

# Of one impl of a case on two cores with 4 gloo ranks, in the ratios of a full run; scaled to a run of 426 results that
# took 98 s there with nothing beside. A GPU takes less. A machine that is slower measures fewer: see `Deadlines`.
_SIMULATED_S, _RANKS_S, _PER_BYTE_S = 0.15, 0.18, 24e-9
_QUICK = 0.4  # of that, with --quick
# Parameters whose values are the points of one curve.
_SWEPT = ("size", "bucket_bytes")
# Before the first case: torch is loaded by every rank.
START_S = 15.0


def estimate_s(tasks: Sequence[Task], quick: bool) -> float:
    """About how long the tasks take, in seconds, without the start of the ranks."""
    return sum(map(_task_s, tasks)) * (_QUICK if quick else 1.0)


def forecast(tasks: Sequence[Task], listed: Sequence[Task], quick: bool) -> str:
    """`132 of 831 cases, about 3 min by estimate`."""
    seconds = START_S + estimate_s(tasks, quick)
    cases = f"{len(tasks)} of {len(listed)} cases" if len(tasks) < len(listed) else plural(len(tasks), "case")
    return f"{cases}, {about(seconds)} by estimate"


def _task_s(task: Task) -> float:
    if task.suite.world == "simulated":
        return _SIMULATED_S * len(task.impls)
    return (_RANKS_S + _PER_BYTE_S * (task.case.size_bytes or 0)) * len(task.impls)


def choose(tasks: Sequence[Task], budget_s: float, quick: bool) -> list[Task]:
    """Those that fit into so many seconds with the start of the ranks, suite by suite, the most telling first;
    of every suite at least one."""
    share = (budget_s - START_S) / max(estimate_s(tasks, quick), 1e-9)
    chosen: list[Task] = []
    for suite in dict.fromkeys(task.suite.name for task in tasks):
        own = by_importance([task for task in tasks if task.suite.name == suite])
        left_s = share * estimate_s(own, quick)
        for number, task in enumerate(own):
            left_s -= estimate_s([task], quick)
            if left_s < 0 and number > 0:
                break
            chosen.append(task)
    return chosen


def by_importance(tasks: Sequence[Task]) -> list[Task]:
    """The tasks of one suite, the most telling first."""
    curves: dict[tuple[object, ...], list[Task]] = {}
    names: dict[str, list[tuple[object, ...]]] = {}
    for task in tasks:
        params = tuple((key, value) for key, value in task.case.params.items() if key not in _SWEPT)
        curve = task.case.name, *params
        if curve not in curves:
            names.setdefault(task.case.name, []).append(curve)
        curves.setdefault(curve, []).append(task)
    sweeps = any(len(points) > 2 for points in curves.values())
    ranked: list[tuple[int, int, Task]] = []
    for of_name in names.values():
        for place, curve_at in enumerate(coarse_to_fine(len(of_name))):
            points = curves[of_name[curve_at]]
            points.sort(key=lambda task: [float(task.case.params.get(key, 0)) for key in _SWEPT])
            budget_priority = points[0].suite.budget_priority
            # What accompanies a sweep comes after three sizes of the sweep itself.
            comes_first = (
                budget_priority(points[0].case) if budget_priority else not sweeps or len(points) > 1
            )
            first = 0 if comes_first else 3
            for size, at in enumerate(coarse_to_fine(len(points)), first):
                ranked.append((size, place, points[at]))
    return [task for _, _, task in sorted(ranked, key=lambda entry: entry[:2])]


def coarse_to_fine(count: int) -> Iterator[int]:
    """All of range(count): the ends, the middle, the middles of the halves, and so on."""
    gaps = [(0, count - 1)]
    yield from sorted({0, count - 1} if count else set())
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if low < middle:
            yield middle
            gaps += [(low, middle), (middle, high)]


def name_left_out(listed: Sequence[Task], left: Sequence[Task]) -> str:
    """`collectives 250 of 360 cases, ...`, or nothing."""
    total, missing = (Counter(task.suite.name for task in tasks) for tasks in (listed, left))
    return ", ".join(f"{suite} {count} of {total[suite]} cases" for suite, count in missing.items())


class Deadlines:
    """When a suite has to end, so that the others get their share of what is left.

    tasks: what is to be measured, in order. end_s: when all has to end, on the clock that `allows` is given.
    """

    def __init__(self, tasks: Sequence[Task], end_s: float) -> None:
        self._end_s = end_s
        self._left = dict.fromkeys(dict.fromkeys(task.suite.name for task in tasks), 0.0)
        for task in tasks:
            self._left[task.suite.name] += _task_s(task)
        self._until: dict[str, float] = {}

    def allows(self, task: Task, now_s: float) -> bool:
        """Whether another case of its suite may begin now; the first one always may."""
        suite = task.suite.name
        if suite in self._until:
            return now_s < self._until[suite]
        share = self._left.pop(suite)
        share /= share + sum(self._left.values())
        self._until[suite] = now_s + share * (self._end_s - now_s)
        return True
