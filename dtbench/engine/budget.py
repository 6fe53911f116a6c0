"""What fits into a time: how long cases take, and which of them to measure first (`dtbench run --budget`).

Every suite keeps the same share of what it would take, and spends it on the cases that say most: those of a headline;
then of each curve its ends and its middle, all three or none, for no line is fitted to fewer; then the middles between,
over all curves before the next size. Of cases without a size a few of each name, spread over the suite's list.

All ranks put the cases in the same order, and rank 0 alone looks at a clock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from dtbench.engine.progress import format_about
from dtbench.engine.ranks import RankGroup
from dtbench.engine.tasks import Task
from dtbench.grouping import group_by
from dtbench.machine.limits import usable_cpus
from dtbench.text.units import plural

# Of one impl, beside what its suite says of itself: seconds per byte that is sent. All these are from whole runs of 4
# gloo ranks on two cores that did nothing else. GPUs take less.
_PER_BYTE_S = 16e-9
# Each further pass over a case finds its shardings and its memory there.
_FURTHER_PASS = 0.6
# Before the first case: a process loads torch and the suites, then do all ranks, on a core each where there are as
# many; several meet. At the end they leave one another.
_LOAD_S, _MEET_S, _END_S = 1.5, 1.0, 1.0
# Parameters whose values are the points of one curve, and how many of these a line needs.
_SWEPT = ("size", "bucket_bytes")
_LINE = 3


def start_s(ranks: int) -> float:
    """About how long it takes until the first case."""
    return _LOAD_S * (1 + max(1.0, ranks / len(usable_cpus()))) + (_MEET_S if ranks > 1 else 0.0)


def estimate_s(tasks: Sequence[Task], quick: bool) -> float:
    """About how long the tasks take, in seconds, without the start of the ranks."""
    return sum(impl_s(task, quick) * len(task.impls) for task in tasks)


def impl_s(task: Task, quick: bool) -> float:
    """Of one impl of the task."""
    suite, case = task.suite, task.case
    seconds = suite.impl_s[quick] + (_PER_BYTE_S * (case.size_bytes or 0) if suite.world == "ranks" else 0.0)
    return seconds * (1 + (case.passes - 1) * _FURTHER_PASS)


def forecast(tasks: Sequence[Task], listed: Sequence[Task], quick: bool, ranks: int) -> str:
    """`132 of 831 cases, about 3 min by estimate`."""
    seconds = start_s(ranks) + estimate_s(tasks, quick) + _END_S
    cases = f"{len(tasks)} of {len(listed)} cases" if len(tasks) < len(listed) else plural(len(tasks), "case")
    return f"{cases}, {format_about(seconds)} by estimate"


def choose(tasks: Sequence[Task], budget_s: float, quick: bool, ranks: int) -> list[Task]:
    """Those that fit into so many seconds if all takes as long as estimated. tasks: by importance."""
    deadlines = Deadlines(tasks, budget_s, quick)
    now_s, chosen = start_s(ranks), []
    for task in tasks:
        if deadlines.allows(task, now_s):
            chosen.append(task)
            now_s += estimate_s([task], quick)
    return chosen


def by_importance(tasks: Sequence[Task]) -> list[Task]:
    """Suite by suite, the most telling first."""
    return [task for unit in _units(tasks) for task in unit]


def _units(tasks: Sequence[Task]) -> list[list[Task]]:
    """The tasks by importance; those that say something together alone are one unit."""
    return [unit for of in group_by(tasks, lambda t: t.suite.name).values() for unit in _units_of_suite(of)]


def _units_of_suite(tasks: Sequence[Task]) -> list[list[Task]]:
    headline = [task for task in tasks if task.case.passes > 1]
    curves = group_by(
        (task for task in tasks if task.case.passes == 1),
        lambda task: (task.case.name, *((k, v) for k, v in task.case.params.items() if k not in _SWEPT)),
    )
    sweeps = any(len(points) > 2 for points in curves.values())
    ranked: list[tuple[int, int, list[Task]]] = []
    for of_name in group_by(curves.values(), lambda points: points[0].case.name).values():
        for place, curve_at in enumerate(coarse_to_fine(len(of_name))):
            points = of_name[curve_at]
            points.sort(key=lambda task: [float(task.case.params.get(key, 0)) for key in _SWEPT])
            ordered = [points[at] for at in coarse_to_fine(len(points))]
            priority = points[0].suite.budget_priority
            # What accompanies a sweep comes after three sizes of the sweep itself.
            first = int(not (priority(points[0].case) if priority else not sweeps or len(points) > 1))
            ranked.append((first, place, ordered[:_LINE]))
            ranked += [(size, place, [task]) for size, task in enumerate(ordered[_LINE:], first + 1)]
    return [*([headline] if headline else []), *(unit for *_, unit in sorted(ranked, key=lambda r: r[:2]))]


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
    """Whether there is time for a task, so that a run ends in time and every suite gets its share of what is left.

    tasks: what may be measured, by importance. end_s: when all has to end, on the clock that `allows` is given.
    """

    def __init__(self, tasks: Sequence[Task], end_s: float, quick: bool) -> None:
        self._end_s = end_s - _END_S
        self._quick = quick
        self._units = {id(unit[0].case): unit for unit in _units(tasks)}
        self._left = {
            suite: estimate_s(of, quick)
            for suite, of in group_by(tasks, lambda task: task.suite.name).items()
        }
        self._suite = ""
        self._refused: set[str] = set()  # suites
        self._closed = False  # a unit of this suite had no time: what is less important has none
        self._began_s = self._until_s = self._spent_s = 0.0  # spent: as estimated

    def agree(self, task: Task, ranks: RankGroup) -> bool:
        """Returns whether rank 0 finds time for the task. After a refusal, the suite's other tasks are refused, too."""
        suite = task.suite.name
        if suite not in self._refused and not ranks.agree(
            None, lambda _votes: self.allows(task, time.monotonic())
        ):
            self._refused.add(suite)
        return suite not in self._refused

    def allows(self, task: Task, now_s: float) -> bool:
        """Whether the next task may begin now. The first unit of all always may, the first of a suite where it takes
        at most twice the suite's share; a unit that was begun is measured to its end."""
        unit = self._units.get(id(task.case))
        if unit is None:
            return not self._closed
        needed_s, left_s = estimate_s(unit, self._quick), self._end_s - now_s
        if task.suite.name != self._suite:
            first, self._suite = not self._suite, task.suite.name
            share = self._left.pop(self._suite)
            share *= left_s / (share + sum(self._left.values()))
            self._closed = not first and needed_s > min(2 * share, left_s)
            self._began_s, self._until_s, self._spent_s = now_s, now_s + share, 0.0
        elif not self._closed:
            pace = (now_s - self._began_s) / self._spent_s
            self._closed = now_s + needed_s * pace > self._until_s
        if not self._closed:
            self._spent_s += needed_s
        return not self._closed
