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
from dataclasses import dataclass
from functools import partial

from dtbench.engine.clock import Clock
from dtbench.engine.measure import ImplOutcome, SamplingSchedule, Subject, measure, to_result
from dtbench.engine.tasks import Task
from dtbench.gate.benchmark import label_of
from dtbench.records.result import Result
from dtbench.suite import Case, World
from dtbench.suite.case import Instrument

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


def warm_up_calls(case: Case) -> int:
    """How many calls are thrown away before a case is sampled or counted."""
    return max(case.warmup_calls, WARMUP_CALLS if case.samples is None else 0)


Wanted = tuple[Task, str, Sampling]  # a benchmark (task and impl), and how it is sampled


def measure_in_turns(
    wanted: Sequence[Wanted],
    world: World,
    clocks: Mapping[Instrument, Clock],
    starting: Callable[[str], None],
    await_turn: Callable[[int], None] = lambda _number: None,
) -> Iterator[Result]:
    """Results of the benchmarks, in their order.

    starting: called with a benchmark's label before anything of it runs. await_turn: called before each sample with
    its number among those of the benchmark, also where that has failed, so that launches of the same benchmarks stay
    in step. What is measured first is set up before: that takes longer than the samples, and may be done beside
    other launches.
    """
    for first in range(0, len(wanted), GROUP):
        group = wanted[first : first + GROUP]
        schedule = _InTurns(group, clocks, starting, await_turn)
        measure(schedule.subjects, world, schedule)
        for (task, impl, _), subject, taken_s in zip(group, schedule.subjects, schedule.taken_s, strict=True):
            good = ImplOutcome("ok", samples_s=tuple(taken_s))
            yield to_result(task, impl, ImplOutcome(*subject.failure) if subject.failure else good)


class _InTurns(SamplingSchedule):
    """The schedule of a gate's launch: a fixed number of samples of each benchmark, spread over the whole."""

    def __init__(
        self,
        group: Sequence[Wanted],
        clocks: Mapping[Instrument, Clock],
        starting: Callable[[str], None],
        await_turn: Callable[[int], None],
    ) -> None:
        self.subjects = [
            Subject(task.case, impl, partial(starting, label_of(task.label, impl))) for task, impl, _ in group
        ]
        self.taken_s: list[list[float]] = [[] for _ in group]
        self._samplings = [sampling for *_, sampling in group]
        self._clocks = clocks
        self._await_turn = await_turn

    def warm_up(self) -> None:
        for subject in self.subjects:
            subject.attempt(partial(subject.call, warm_up_calls(subject.case)))

    def sample(self) -> None:
        gc.collect()
        gc.freeze()
        for at, number in self._in_order():
            self._await_turn(number)
            self.subjects[at].attempt(partial(self._sample, at))

    def _in_order(self) -> Iterator[tuple[int, int]]:
        """Whose sample is next, and which: each has its own spread evenly over the whole."""
        rounds = max(sampling.samples for sampling in self._samplings)
        for turn in range(rounds):
            for at, sampling in enumerate(self._samplings):
                number = sampling.samples * turn // rounds
                if sampling.samples * (turn + 1) // rounds > number:
                    yield at, number

    def _sample(self, at: int) -> None:
        subject, sampling = self.subjects[at], self._samplings[at]
        workload, clock = subject.workload, self._clocks[subject.case.instrument]
        if workload.before is None:
            end = time.perf_counter() + WARMUP_S
            workload.run()
            while time.perf_counter() < end:
                workload.run()
        takes = []
        for _ in range(sampling.takes):
            subject.prepare()
            clock.settle(cold=False)
            takes.append(clock.measure(workload.run, sampling.calls))
        self.taken_s[at].append(min(takes))
