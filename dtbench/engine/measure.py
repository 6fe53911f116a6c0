"""The loop that measures the impls of a case, for every command, and the result of an impl.

    build -> warm up -> check -> sample -> check -> finish -> close

A schedule chooses the number and order of the calls: adaptive, by votes of all ranks (`sampling`, for `dtbench run`);
fixed and in turns (launches of a gate); counted (counters of a gate); or recorded (`dtbench profile`).
"""

import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from dtbench.engine.clock import Clock
from dtbench.engine.tasks import Task
from dtbench.errors import describe, format_location
from dtbench.machine.device import gpus
from dtbench.records.result import Result, Status, estimator_of
from dtbench.records.run import without_collecting
from dtbench.stats import summarize
from dtbench.suite import Case, Skip, Workload
from dtbench.suite.registry import World
from dtbench.text.masking import mask

_T = TypeVar("_T")


@dataclass(eq=False)
class Subject:
    """An implementation of a case on this rank. If its code raises or computes wrong data, only this subject fails.

    Attributes:
        on_start: called before any of its code runs.
        on_failure: called with the error, in one line, if its code raises.
        workload: the impl, once it is built.
        failure: (status, reason) once it has failed or was skipped. From then on only `close` runs its code.
    """

    case: Case
    impl: str
    on_start: Callable[[], None] = lambda: None
    on_failure: Callable[[str], None] = lambda _error: None
    workload: Workload = field(default_factory=lambda: Workload(run=lambda: None))
    failure: tuple[Status, str] | None = None

    def attempt(self, step: Callable[[], _T]) -> _T | None:
        """Returns the result of `step`; None if it raises, or if the subject has failed before."""
        if self.failure is not None:
            return None
        self.on_start()
        try:
            return step()
        except Skip as skip:
            self.failure = ("skipped", str(skip))
        except Exception as error:
            reason = mask(describe(error)) + format_location(error, self.case.build.get(self.impl))
            self.failure = ("failed", reason)
            self.on_failure(reason)
        return None

    def build(self, world: World) -> None:
        workload = self.case.build[self.impl](world)
        if not isinstance(workload, Workload):
            raise TypeError(f"its build gave {workload!r:.80}, expected a dtbench.suite.Workload")
        self.workload = workload

    def prepare(self) -> None:
        """Runs what the workload needs before a call."""
        if self.workload.before is not None:
            self.workload.before()

    def call(self, times: int = 1) -> None:
        """Calls the workload without timing it."""
        for _ in range(times):
            self.prepare()
            self.workload.run()

    def fastest_s(self, clock: Clock, samples: int, calls: int) -> float:
        """Returns the seconds per call of the fastest of `samples` samples of `calls` calls."""
        samples_s = []
        for _ in range(samples):
            self.prepare()
            clock.settle()
            samples_s.append(clock.measure(self.workload.run, calls))
        return min(samples_s)

    def check(self, phase: str) -> None:
        """Sets the failure if the workload's data is wrong."""
        if self.workload.check is not None and (wrong := self.attempt(self.workload.check)) is not None:
            self.failure = ("wrong", f"{wrong} ({phase})")

    def counters(self) -> dict[str, float] | None:
        """Returns the workload's counters; None if reading them failed."""
        count = self.workload.counters
        return {} if count is None else self.attempt(lambda: dict(count()))

    def close(self) -> None:
        """Frees the workload's resources, once."""
        workload, self.workload = self.workload, Workload(run=lambda: None)
        if workload.close is not None:
            try:
                workload.close()
            except Exception as error:  # an earlier failure is kept, since it probably caused this one
                self.failure = self.failure or ("failed", mask(describe(error)))


class SamplingSchedule(Protocol):
    """A sampling schedule. Each method handles all subjects."""

    def warm_up(self) -> None:
        """Makes unmeasured calls."""

    def sample(self) -> None:
        """Takes the samples."""

    def finish(self) -> None:
        """Called after the last check, before the subjects are closed."""
        return


def measure(subjects: Sequence[Subject], world: World, schedule: SamplingSchedule) -> None:
    """Measures the subjects; failures of their code are set on them. An exception of the schedule ends the loop."""
    gc.collect()
    # The remaining objects are modules, caches and results. Unless they are frozen, the next garbage collection scans
    # all of torch, which takes longer than a short case.
    gc.freeze()
    with without_collecting():
        try:
            for subject in subjects:
                subject.attempt(functools.partial(subject.build, world))
            schedule.warm_up()
            for subject in subjects:
                subject.check("after the warm-up")
            schedule.sample()
            for subject in subjects:
                subject.check("after the samples")
            schedule.finish()
        finally:
            for subject in subjects:
                subject.close()


def release_memory() -> None:
    """Frees the memory of closed subjects, so that running out of memory ends one case and not the run."""
    gc.collect()
    gpus().free_cached()


@dataclass
class ImplOutcome:
    """The outcome of one impl.

    Attributes:
        status: as in `Result`.
        reason: why it failed or was skipped, or a caveat.
        rank: the rank at fault.
        samples_s: each sample on the slowest participating rank, seconds per call.
        rank_samples_s: rank -> its samples, seconds per call.
        rank_arrivals_s: rank -> how late it began each sample, seconds.
        counters: counter -> value.
    """

    status: Status
    reason: str = ""
    rank: int | None = None
    samples_s: tuple[float, ...] = ()
    rank_samples_s: dict[str, tuple[float, ...]] = field(default_factory=dict)
    rank_arrivals_s: dict[str, tuple[float, ...]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)


def to_result(task: Task, impl: str, outcome: ImplOutcome, launch: int = 0) -> Result:
    """Returns the result of one impl of a task, as the run file holds it."""
    case = task.case
    result = Result(
        suite=task.suite.name,
        name=case.name,
        impl=impl,
        params=case.params,
        status=outcome.status,
        reason=outcome.reason,
        rank=outcome.rank,
        size_bytes=case.size_bytes,
        launch=launch,
        clock=case.clock,
    )
    if outcome.status != "ok" or not outcome.samples_s:
        return msgspec.structs.replace(result, counters=outcome.counters)
    try:
        timing = summarize(outcome.samples_s)
    except ValueError as error:
        return msgspec.structs.replace(result, status="failed", reason=str(error))
    estimate_s = getattr(timing, estimator_of(case))
    measurable = case.bandwidth and case.size_bytes is not None and estimate_s > 0
    algbw = case.size_bytes / estimate_s if measurable else None
    return msgspec.structs.replace(
        result,
        time_s=timing,
        samples_s=outcome.samples_s,
        rank_samples_s=outcome.rank_samples_s,
        rank_arrivals_s=outcome.rank_arrivals_s,
        algbw_Bps=algbw,
        busbw_Bps=None if algbw is None or case.busbw_factor is None else algbw * case.busbw_factor,
        counters=outcome.counters,
    )
