"""Chooses the cases that fit into a time, and the order to measure them in (`dtbench run --budget`).

Every suite gets the same share of the time that it would take, without cases that come last (`Suite.budget_priority`).
It first measures its headline cases, then the ends and the middle of each curve, then further sizes, each for all
curves before the next. The ends and the middle are measured together or not at all, since a line needs three points.
Cases without a size are spread over the suite's list.

All ranks use the same order; only rank 0 reads a clock.
"""

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence

from dtbench.engine.progress import format_about
from dtbench.engine.rank_votes import RankGroup
from dtbench.engine.tasks import Task
from dtbench.grouping import group_by
from dtbench.machine.limits import usable_cpus
from dtbench.text.units import plural

# Seconds per byte sent, in addition to the time that a suite declares per impl. All estimates are from complete runs of
# 4 gloo ranks on two otherwise idle cores. GPUs take less.
_PER_BYTE_S = 16e-9
# Time of each later pass relative to the first, which caches shardings and memory.
_LATER_PASS = 0.6
# Seconds to load torch and the suites (in the launcher, then in all ranks, in parallel if there are enough cores), for
# several ranks to join, and to end.
_LOAD_S, _JOIN_S, _END_S = 1.5, 1.0, 1.0
# The params that a curve is swept over, and the number of points that a line needs.
_SWEPT = ("size", "bucket_bytes")
_LINE = 3


def start_s(ranks: int) -> float:
    """Estimates the seconds until the first case."""
    return _LOAD_S * (1 + max(1.0, ranks / len(usable_cpus()))) + (_JOIN_S if ranks > 1 else 0.0)


def estimate_s(tasks: Sequence[Task], quick: bool) -> float:
    """Estimates the seconds of the tasks, without the start of the ranks."""
    return sum(impl_s(task, quick) * len(task.impls) for task in tasks)


def impl_s(task: Task, quick: bool) -> float:
    """Estimates the seconds of one impl of the task."""
    suite, case = task.suite, task.case
    seconds = suite.impl_s[quick] + (_PER_BYTE_S * (case.size_bytes or 0) if task.world == "ranks" else 0.0)
    return seconds * (1 + (case.passes - 1) * _LATER_PASS)


def forecast(tasks: Sequence[Task], listed: Sequence[Task], quick: bool, ranks: int) -> str:
    """Formats number and time of the tasks: `132 of 831 cases, about 3 min by estimate`."""
    seconds = start_s(ranks) + estimate_s(tasks, quick) + _END_S
    cases = f"{len(tasks)} of {len(listed)} cases" if len(tasks) < len(listed) else plural(len(tasks), "case")
    return f"{cases}, {format_about(seconds)} by estimate"


def choose(tasks: Sequence[Task], budget_s: float, quick: bool, ranks: int) -> list[Task]:
    """Returns the tasks that fit into a budget by estimate. `tasks` are ordered by importance."""
    deadlines = Deadlines(tasks, budget_s, quick)
    now_s, chosen = start_s(ranks), []
    for task in tasks:
        if deadlines.allows(task, now_s):
            chosen.append(task)
            now_s += estimate_s([task], quick)
    return chosen


def by_importance(tasks: Sequence[Task]) -> list[Task]:
    """Orders the tasks suite by suite, the most important first."""
    return [task for unit in _units(tasks) for task in unit]


def _share_of(task: Task) -> tuple[str, str]:
    """Identifies the share of the time: cases of a suite on simulated ranks are measured before those on real ones."""
    return task.suite.name, task.world


def _units(tasks: Sequence[Task]) -> list[list[Task]]:
    """Orders the tasks by importance, and joins tasks that are only meaningful together into one unit."""
    return [
        unit for suite_tasks in group_by(tasks, _share_of).values() for unit in _units_of_suite(suite_tasks)
    ]


def _units_of_suite(tasks: Sequence[Task]) -> list[list[Task]]:
    headline = [task for task in tasks if task.case.passes > 1]
    curves = group_by(
        (task for task in tasks if task.case.passes == 1),
        lambda task: (task.case.name, *((k, v) for k, v in task.case.params.items() if k not in _SWEPT)),
    )
    sweeps = any(len(points) > 2 for points in curves.values())
    ranked: list[tuple[float, int, list[Task]]] = []
    for curves_of_name in group_by(curves.values(), lambda points: points[0].case.name).values():
        for position, curve_index in enumerate(coarse_to_fine(len(curves_of_name))):
            points = curves_of_name[curve_index]
            points.sort(key=lambda task: [float(task.case.params.get(key, 0)) for key in _SWEPT])
            ordered = [points[index] for index in coarse_to_fine(len(points))]
            priority = points[0].suite.budget_priority
            # Cases that accompany a sweep follow three sizes of the sweep itself.
            is_first = priority(points[0].case) if priority else not sweeps or len(points) > 1
            first = math.inf if is_first is None else int(not is_first)
            ranked.append((first, position, ordered[:_LINE]))
            ranked += [(first + size, position, [task]) for size, task in enumerate(ordered[_LINE:], 1)]
    return [
        *([headline] if headline else []),
        *(unit for *_, unit in sorted(ranked, key=lambda rank: rank[:2])),
    ]


def coarse_to_fine(count: int) -> Iterator[int]:
    """Yields all of range(count): the ends, the middle, the middles of the halves, and so on."""
    gaps = [(0, count - 1)]
    yield from sorted({0, count - 1} if count else set())
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if low < middle:
            yield middle
            gaps += [(low, middle), (middle, high)]


def format_left_out(listed: Sequence[Task], left_out: Sequence[Task]) -> str:
    """Formats the number of tasks left out per suite: `collectives 250 of 360 cases, ...`."""
    total, missing = (Counter(task.suite.name for task in tasks) for tasks in (listed, left_out))
    return ", ".join(f"{suite} {count} of {total[suite]} cases" for suite, count in missing.items())


class Deadlines:
    """The times until which the tasks of a run may begin. Every suite gets its share of the remaining time."""

    def __init__(self, tasks: Sequence[Task], end_s: float, quick: bool) -> None:
        """Shares the time until `end_s`.

        Args:
            tasks: the tasks by importance.
            end_s: when the run has to end, on the clock that `allows` gets.
        """
        self._end_s = end_s - _END_S
        self._quick = quick
        self._units = {id(unit[0].case): unit for unit in _units(tasks)}
        self._remaining_s = {
            suite: estimate_s(
                [task for task in suite_tasks if priority(task.case) is not None] or suite_tasks, quick
            )
            for suite, suite_tasks in group_by(tasks, _share_of).items()
            for priority in [suite_tasks[0].suite.budget_priority or bool]  # by default, no case comes last
        }
        self._suite: tuple[str, str] | None = None
        self._refused: set[tuple[str, str]] = set()  # suites
        self._closed = False  # no time was left for a unit of this suite: skip its less important ones
        # `_spent_s`: estimated seconds of the units that the suite has begun.
        self._began_s = self._until_s = self._spent_s = 0.0

    def agree(self, task: Task, ranks: RankGroup) -> bool:
        """Returns whether rank 0 finds time for the task. After a refusal, the suite's other tasks are refused, too."""
        suite = _share_of(task)
        if suite not in self._refused and not ranks.agree(
            None, lambda _votes: self.allows(task, time.monotonic())
        ):
            self._refused.add(suite)
        return suite not in self._refused

    def allows(self, task: Task, now_s: float) -> bool:
        """Returns whether the next task may begin now.

        The first unit of a run always may. The first unit of a suite may if it fits and takes at most twice the suite's
        share. A unit that was begun is completed.
        """
        unit = self._units.get(id(task.case))
        if unit is None:
            return not self._closed
        needed_s, remaining_s = estimate_s(unit, self._quick), self._end_s - now_s
        if _share_of(task) != self._suite:
            first, self._suite = not self._suite, _share_of(task)
            share = self._remaining_s.pop(self._suite)
            share *= remaining_s / (share + sum(self._remaining_s.values()))
            self._closed = not first and needed_s > min(2 * share, remaining_s)
            self._began_s, self._until_s, self._spent_s = now_s, now_s + share, 0.0
        elif not self._closed:
            pace = (now_s - self._began_s) / self._spent_s
            self._closed = now_s + needed_s * pace > self._until_s
        if not self._closed:
            self._spent_s += needed_s
        return not self._closed
