"""Sampling for a gate: a fixed number of samples of every benchmark, spread over the whole launch.

On a shared machine, a core can be slower by half for milliseconds or seconds while its neighbour works. So compared
launches take each sample in turns, on one CPU and within a few milliseconds. The conditions are then usually the same
for both, and the gate compares the ratio of such samples. A benchmark takes its next sample only after the other
benchmarks, so that a short disturbance affects few of its samples.
"""

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
# A sample is the fastest of this many takes (timed blocks of calls), since the first finds caches filled by other
# benchmarks. With three times as many samples of one take each, the ratios of ops of 20 to 50 us scattered by 5%
# instead of 2%.
TAKES = 3
# Upper bound of a take's duration, so that the samples of compared launches are close in time. With takes a quarter as
# long, the ratios of the same ops scattered 1.5 times as much.
TAKE_S = 1e-3
# Upper bound for all takes of one benchmark, so that slow benchmarks do not prolong a launch.
SAMPLES_S = SAMPLES * TAKES * TAKE_S
# Launches of fewer benchmarks take more samples of each, up to this factor. That costs little compared with the setup,
# and fewer pairs of launches are needed.
FEW_BENCHMARKS = 16
# Duration of unmeasured calls before each sample, since the caches hold data of other benchmarks.
WARMUP_S = 2e-4
WARMUP_CALLS = 20  # least number of unmeasured calls after setup
# Largest number of benchmarks that are set up at a time.
GROUP = 200


@dataclass(frozen=True)
class Sampling:
    """The sampling of a benchmark, the same in both arms.

    Attributes:
        samples: number of samples.
        takes: number of takes per sample; the fastest counts.
        calls: number of calls per take.
    """

    samples: int
    takes: int
    calls: int


def sampling_for(case: Case, call_s: float, benchmarks: int) -> Sampling:
    """Returns the sampling of a case.

    A case with a fixed number of samples gets at least that many, with its own number of calls per sample.

    Args:
        call_s: rough time of one call, seconds.
        benchmarks: number of benchmarks in the launch.
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
    """Returns the number of unmeasured calls before a case is sampled or counted."""
    return max(case.warmup_calls, WARMUP_CALLS if case.samples is None else 0)


SampledBenchmark = tuple[Task, str, Sampling]  # task, impl and sampling


def measure_in_turns(
    benchmarks: Sequence[SampledBenchmark],
    world: World,
    clocks: Mapping[Instrument, Clock],
    starting: Callable[[str], None],
    await_turn: Callable[[int], None] = lambda _number: None,
) -> Iterator[Result]:
    """Yields the results of the benchmarks, in order.

    The first group is set up before the first turn: setup takes longer than sampling, and may run in parallel with
    other launches.

    Args:
        benchmarks: the benchmarks to measure.
        clocks: instrument -> its clock.
        starting: called with a benchmark's label before its code runs.
        await_turn: called before each sample with its index, also for failed benchmarks. So launches of the same
            benchmarks take the same number of turns.
    """
    for first in range(0, len(benchmarks), GROUP):
        group = benchmarks[first : first + GROUP]
        schedule = _InTurns(group, clocks, starting, await_turn)
        measure(schedule.subjects, world, schedule)
        for (task, impl, _), subject, taken_s in zip(group, schedule.subjects, schedule.taken_s, strict=True):
            outcome = ImplOutcome("ok", samples_s=tuple(taken_s))
            yield to_result(task, impl, ImplOutcome(*subject.failure) if subject.failure else outcome)


class _InTurns(SamplingSchedule):
    """The schedule of a timed launch: a fixed number of samples per benchmark, spread over the launch."""

    def __init__(
        self,
        group: Sequence[SampledBenchmark],
        clocks: Mapping[Instrument, Clock],
        starting: Callable[[str], None],
        await_turn: Callable[[int], None],
    ) -> None:
        self.subjects = [
            Subject(task.case, impl, partial(starting, label_of(task.label, impl))) for task, impl, _ in group
        ]
        self.taken_s: list[list[float]] = [[] for _ in group]
        self._samplings = [sampling for *_, sampling in group]
        self._clocks, self._await_turn = clocks, await_turn

    def warm_up(self) -> None:
        for subject in self.subjects:
            subject.attempt(partial(subject.call, warm_up_calls(subject.case)))

    def sample(self) -> None:
        gc.collect()
        gc.freeze()
        for index, number in self._in_order():
            self._await_turn(number)
            self.subjects[index].attempt(partial(self._sample, index))

    def _in_order(self) -> Iterator[tuple[int, int]]:
        """Yields (benchmark, sample) indices, the samples of each benchmark spread evenly over the launch."""
        rounds = max(sampling.samples for sampling in self._samplings)
        for turn in range(rounds):
            for index, sampling in enumerate(self._samplings):
                number = sampling.samples * turn // rounds
                if sampling.samples * (turn + 1) // rounds > number:
                    yield index, number

    def _sample(self, index: int) -> None:
        subject, sampling = self.subjects[index], self._samplings[index]
        workload, clock = subject.workload, self._clocks[subject.case.instrument]
        if workload.before is None:
            end = time.perf_counter() + WARMUP_S
            workload.run()
            while time.perf_counter() < end:
                workload.run()
        self.taken_s[index].append(subject.fastest_s(clock, sampling.takes, sampling.calls))
