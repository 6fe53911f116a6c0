"""Sampling for a gate: a fixed number of samples of every benchmark, spread over the whole launch.

On a shared machine a core is slower by half while its neighbour works, for milliseconds or for many seconds. So the
launches that are compared take each sample in turn, on one CPU and within a few milliseconds of each other, where they
mostly meet the same; what counts is the ratio of two that were taken together. Between two samples of one benchmark
lie those of all the others: what a neighbour does for a moment meets few of them.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dtbench.bench.clock import Clock
from dtbench.bench.options import Task
from dtbench.errors import describe
from dtbench.model import Case, Result, Skip, Workload
from dtbench.stats import summarize

SAMPLES, FEWEST_SAMPLES = 20, 10
# A sample is the fastest of so many takes: the first meets caches that others have filled. Of one take each, thrice as
# many, the ratios of ops that last 20 to 50 us scattered by 5% instead of 2.
TAKES = 3
# Takes of slow calls hold fewer of them: samples that are taken together are to lie close to each other. Of takes a
# quarter as long the ratios of the same ops scattered by half as much again.
TAKE_S = 1e-3
# One benchmark's takes together, so that slow ones do not make a launch long.
SAMPLES_S = SAMPLES * TAKES * TAKE_S
# Launches of few benchmarks take more samples of each, up to so many times as many: beside setting them up it costs
# nothing, and what scatters needs fewer pairs.
FEW_BENCHMARKS = 16
# Before a sample others had the core: calls are thrown away for so long, where they may be repeated at will.
WARMUP_S = 2e-4
WARMUP_CALLS = 20
# So many benchmarks are alive at a time.
GROUP = 200


@dataclass(frozen=True)
class Sampling:
    """How a benchmark is sampled, in both arms alike: samples, each the fastest of so many takes of so many calls."""

    samples: int
    takes: int
    calls: int


def sampling_for(case: Case, call_s: float, benchmarks: int) -> Sampling:
    """How a case is sampled in a launch of so many benchmarks.

    call_s: what one call takes, seconds, roughly. A case with a number of samples of its own gets at least these, of
    as many calls as it says.
    """
    calls = case.calls_per_sample
    if case.samples is None:
        calls = max(1, min(calls, int(TAKE_S / max(call_s, 1e-9))))
    take_s = max(call_s * calls, 1e-9)
    takes = TAKES if take_s <= TAKE_S else 1
    times = max(1, FEW_BENCHMARKS // max(benchmarks, 1))
    fit = min(SAMPLES * times, int(SAMPLES_S * times / (takes * take_s)))
    return Sampling(max(case.samples or FEWEST_SAMPLES, fit), takes, calls)


@dataclass
class Live:
    """One impl of a case, set up."""

    task: Task
    impl: str
    sampling: Sampling
    workload: Workload
    taken_s: list[float] = field(default_factory=list)
    bad: tuple[str, str] | None = None  # status and why

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
    wanted: Sequence[tuple[Task, str, Sampling]],
    world: Any,
    clocks: Mapping[str, Clock],
    starting: Callable[[str], None],
    await_turn: Callable[[int], None] = lambda _number: None,
) -> Iterator[Result]:
    """Results of the benchmarks (task, impl, how), in their order.

    starting: called with a case's label before anything of it runs. await_turn: called before each sample with its
    number among those of the benchmark, also where that has failed, so that launches of the same benchmarks stay
    in step. What is measured first is set up before: that takes longer than the samples, and may be done beside
    other launches.
    """
    for first in range(0, len(wanted), GROUP):
        group = [
            _build(task, impl, sampling, world, starting)
            for task, impl, sampling in wanted[first : first + GROUP]
        ]
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            for live, number in _in_order(group):
                await_turn(number)
                starting(live.task.label)
                live.attempt(lambda live=live: _sample(live, clocks))  # type: ignore[misc]
        finally:
            gc.enable()
        for live in group:
            starting(live.task.label)
            _check(live, "after the samples")
            if live.workload.close is not None:
                live.attempt(live.workload.close)
            yield _result(live)


def _in_order(group: Sequence[Live]) -> Iterator[tuple[Live, int]]:
    """Whose sample is next, and which: each has its own spread evenly over the whole."""
    rounds = max(live.sampling.samples for live in group)
    for at in range(rounds):
        for live in group:
            number = live.sampling.samples * at // rounds
            if live.sampling.samples * (at + 1) // rounds > number:
                yield live, number


def _build(task: Task, impl: str, sampling: Sampling, world: Any, starting: Callable[[str], None]) -> Live:
    starting(task.label)
    live = Live(task, impl, sampling, Workload(run=lambda: None))
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


def _sample(live: Live, clocks: Mapping[str, Clock]) -> None:
    workload, clock = live.workload, clocks[live.task.case.clock]
    if workload.before is None:
        end = time.perf_counter() + WARMUP_S
        workload.run()
        while time.perf_counter() < end:
            workload.run()
    takes = []
    for _ in range(live.sampling.takes):
        if workload.before is not None:
            workload.before()
        clock.settle(cold=False)
        takes.append(clock.measure(workload.run, live.sampling.calls))
    live.taken_s.append(min(takes))


def _check(live: Live, when: str) -> None:
    check = live.workload.check
    wrong = live.attempt(check) if check is not None else None
    if wrong is not None:
        live.bad = ("wrong", f"{wrong} ({when})")


def _result(live: Live) -> Result:
    case = live.task.case
    named = (live.task.suite.name, case.name, live.impl, case.params)
    if live.bad is not None:
        status, reason = live.bad
        return Result(*named, status, reason)  # type: ignore[arg-type]
    try:
        timing = summarize(live.taken_s)
    except ValueError as error:
        return Result(*named, "failed", str(error))
    return Result(*named, "ok", size_bytes=case.size_bytes, time_s=timing, samples_s=tuple(live.taken_s))
