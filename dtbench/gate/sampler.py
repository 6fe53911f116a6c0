"""Sampling for a gate: a fixed number of samples of every benchmark, spread over the whole launch.

On a shared machine a core is slower while its neighbour works, for tens of milliseconds at a time or for many seconds.
Samples taken in one go all meet that, or none does; samples taken in many short visits meet both, and launches that
are compared make their visits in turn, so that they meet the same. A loop that no arm touches is timed before and
after each sample. It says which moments were quiet: as good as the best that were no rare exception. Where few of a
benchmark's samples met one it is visited more often, and those of its samples are kept, as many as planned, beside
which the loop was fastest.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtbench.clock import Clock
from dtbench.gate.benchmark import DISTURBED
from dtbench.model import Case, Result, Skip, Workload
from dtbench.options import Task
from dtbench.sampling import describe
from dtbench.stats import summarize

VISITS = 20
SAMPLES = 60
FEWEST_SAMPLES = 10
# A sample longer than a quiet moment always meets a disturbance: slow calls are sampled in smaller groups.
SAMPLE_S = 1e-3
# One benchmark's samples together, so that slow ones do not make a launch long.
SAMPLES_S = 0.05
# Where fewer of the samples than this share met a quiet moment, visits go on for as long: that takes less than making
# the launch again.
QUIET_SHARE = 0.25
MORE_S = 2.5
# A moment is quiet if the loop took so much longer at most than at the best tenth of the launch's samples: a neighbour
# makes a core slower by 40% and more, and one that never rests leaves it fast for less than a hundredth of the time.
# Such exceptions, faster by as much, are left out: they would make the minimum of a few.
QUIET = 1.15
BEST = 0.1
LOOP = (None,) * 500  # 5 to 10 us
# The first of a visit finds its caches cold and is thrown away, where calls may be repeated at will.
WARMUP_CALLS = 20
# So many benchmarks are alive at a time.
GROUP = 200


def calls_for(case: Case, call_s: float) -> int:
    """How many calls of a case make a sample, given what one call takes; both arms make the same."""
    if case.samples is not None:
        return case.calls_per_sample
    return max(1, min(case.calls_per_sample, int(SAMPLE_S / max(call_s, 1e-9))))


def samples_for(case: Case, call_s: float) -> int:
    """How many samples of a case a launch takes; both arms take the same."""
    if case.samples is not None:
        return case.samples
    fit = int(SAMPLES_S / max(call_s * calls_for(case, call_s), 1e-9))
    return max(FEWEST_SAMPLES, min(SAMPLES, fit))


@dataclass
class Live:
    """One impl of a case, set up."""

    task: Task
    impl: str
    samples: int
    calls: int
    workload: Workload
    taken_s: list[float] = field(default_factory=list)
    loops_ns: list[int] = field(default_factory=list)  # of each sample: the slower loop beside it
    bad: tuple[str, str] | None = None  # status and why

    def disturbed(self, quiet_ns: float) -> bool:
        """Whether too few of its samples met a quiet moment."""
        quiet = sum(quiet_ns / QUIET <= loop <= quiet_ns * QUIET for loop in self.loops_ns)
        return self.bad is None and quiet < QUIET_SHARE * self.samples

    def quietest_s(self, quiet_ns: float) -> tuple[float, ...]:
        """At most as many samples as were planned, those with the fastest loops beside them but for rare exceptions; in
        order of time.
        """
        usual = [i for i, loop in enumerate(self.loops_ns) if loop >= quiet_ns / QUIET]
        order = sorted(usual or range(len(self.taken_s)), key=self.loops_ns.__getitem__)
        return tuple(self.taken_s[i] for i in sorted(order[: self.samples]))

    def attempt(self, step: Callable[[], object]) -> Any:
        """What the step gives; what it raises is this benchmark's end."""
        if self.bad is not None:
            return None
        try:
            return step()
        except Skip as skip:
            self.bad = ("skipped", str(skip))
        except Exception as error:
            self.bad = ("failed", describe(error))
        return None


def measure(
    wanted: Sequence[tuple[Task, str, int, int]],
    world: Any,
    clocks: Mapping[str, Clock],
    starting: Callable[[str], None],
    await_turn: Callable[[], None] = lambda: None,
) -> Iterator[Result]:
    """Results of the benchmarks (task, impl, samples, calls per sample), in their order.

    starting: called with a case's label before anything of it runs, once per phase. await_turn: called before each
    visit. What is measured first is set up before: that takes longer than the samples, and may be done beside other
    launches.
    """
    for first in range(0, len(wanted), GROUP):
        group = [
            _build(task, impl, samples, calls, world, starting)
            for task, impl, samples, calls in wanted[first : first + GROUP]
        ]
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            chosen, visit, more_s = group, 0, 0.0
            while chosen and more_s < MORE_S:
                await_turn()
                began = time.monotonic()
                for live in chosen:
                    starting(live.task.label)
                    live.attempt(lambda live=live, visit=visit: _visit(live, visit % VISITS, clocks))  # type: ignore[misc]
                visit += 1
                if visit > VISITS:
                    more_s += time.monotonic() - began
                if visit >= VISITS:
                    quiet_ns = _quiet_ns(group)
                    chosen = [live for live in group if live.disturbed(quiet_ns)]
        finally:
            gc.enable()
        quiet_ns = _quiet_ns(group)
        for live in group:
            starting(live.task.label)
            _check(live, "after the samples")
            if live.workload.close is not None:
                live.attempt(live.workload.close)
            yield _result(live, quiet_ns)


def _quiet_ns(group: Sequence[Live]) -> float:
    loops = sorted(loop for live in group for loop in live.loops_ns)
    return loops[int(BEST * len(loops))] if loops else 0


def _build(
    task: Task, impl: str, samples: int, calls: int, world: Any, starting: Callable[[str], None]
) -> Live:
    starting(task.label)
    live = Live(task, impl, samples, calls, Workload(run=lambda: None))
    made = live.attempt(lambda: task.case.build[impl](world))
    if made is not None:
        live.workload = made
    live.attempt(lambda: _warm_up(live))
    _check(live, "after the warm-up")
    return live


def _warm_up(live: Live) -> None:
    workload = live.workload
    for _ in range(max(live.task.case.warmup_calls, WARMUP_CALLS if live.task.case.samples is None else 0)):
        if workload.before is not None:
            workload.before()
        workload.run()


def _visit(live: Live, visit: int, clocks: Mapping[str, Clock]) -> None:
    workload, clock = live.workload, clocks[live.task.case.clock]
    share = live.samples * (visit + 1) // VISITS - live.samples * visit // VISITS
    if share and workload.before is None:
        workload.run()
    for _ in range(share):
        if workload.before is not None:
            workload.before()
        clock.settle(cold=False)
        before_ns = _loop_ns()
        live.taken_s.append(clock.measure(workload.run, live.calls))
        live.loops_ns.append(max(before_ns, _loop_ns()))


def _loop_ns() -> int:
    began = time.perf_counter_ns()
    for _ in LOOP:
        pass
    return time.perf_counter_ns() - began


def _check(live: Live, when: str) -> None:
    check = live.workload.check
    wrong = live.attempt(check) if check is not None else None
    if wrong is not None:
        live.bad = ("wrong", f"{wrong} ({when})")


def _result(live: Live, quiet_ns: float) -> Result:
    case = live.task.case
    named = (live.task.suite.name, case.name, live.impl, case.params)
    if live.bad is not None:
        status, reason = live.bad
        return Result(*named, status, reason)  # type: ignore[arg-type]
    try:
        taken_s = live.quietest_s(quiet_ns)
        timing = summarize(taken_s)
    except ValueError as error:
        return Result(*named, "failed", str(error))
    found = {DISTURBED: float(live.disturbed(quiet_ns))}
    return Result(*named, "ok", size_bytes=case.size_bytes, time_s=timing, samples_s=taken_s, counters=found)
