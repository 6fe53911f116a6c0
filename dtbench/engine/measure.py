"""The one loop that measures: builds the impls of a case, warms them up, checks, samples, checks again, closes.
What comes out of it is a result (`to_result`).

    build -> warm up -> check -> sample -> check -> finish -> close

How often, in which order and who decides is a schedule's: adaptive and voted on by all ranks (`sampling`, for
`dtbench run`), fixed and in turns (a gate's launches), counted (a gate's counters), recorded (`dtbench profile`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from dtbench.engine.tasks import Task
from dtbench.errors import describe, place_in
from dtbench.machine.device import gpus
from dtbench.records.result import Result, Status, estimator_of
from dtbench.stats import summarize
from dtbench.suite import Case, Skip, Workload
from dtbench.suite.registry import World
from dtbench.text.masking import mask

_T = TypeVar("_T")


@dataclass(eq=False)
class Subject:
    """One impl of a case on this rank. What its code raises, or gets wrong, ends it and nothing else.

    entering: called before any of its code runs. raised: told of a failure, in one line. bad: its status and
    why, once it has ended; from then on none of its code runs but `close`.
    """

    case: Case
    impl: str
    entering: Callable[[], None] = lambda: None
    raised: Callable[[str], None] = lambda _reason: None
    workload: Workload = field(default_factory=lambda: Workload(run=lambda: None))
    bad: tuple[Status, str] | None = None

    def attempt(self, step: Callable[[], _T]) -> _T | None:
        """What the step gives; None where it raises, or the subject has ended."""
        if self.bad is not None:
            return None
        self.entering()
        try:
            return step()
        except Skip as skip:
            self.bad = ("skipped", str(skip))
        except Exception as error:
            reason = mask(describe(error)) + place_in(error, self.case.build.get(self.impl))
            self.bad = ("failed", reason)
            self.raised(reason)
        return None

    def build(self, world: World) -> None:
        self.attempt(lambda: self._build(world))

    def _build(self, world: World) -> None:
        workload = self.case.build[self.impl](world)
        if not isinstance(workload, Workload):
            raise TypeError(f"its build gave {workload!r:.80}, expected a dtbench.suite.Workload")
        self.workload = workload

    def ready(self) -> None:
        """What must precede a call."""
        if self.workload.before is not None:
            self.workload.before()

    def call(self, times: int = 1) -> None:
        """Calls that nobody times."""
        for _ in range(times):
            self.ready()
            self.workload.run()

    def check(self, when: str) -> None:
        """Ends it where its data is wrong."""
        if self.workload.check is not None:
            wrong = self.attempt(self.workload.check)
            if wrong is not None:
                self.bad = ("wrong", f"{wrong} ({when})")

    def close(self) -> None:
        """Frees what it holds, once."""
        workload, self.workload = self.workload, Workload(run=lambda: None)
        if workload.close is not None:
            try:
                workload.close()
            except Exception as error:  # says nothing new of what has ended already
                self.bad = self.bad or ("failed", mask(describe(error)))


class SamplingSchedule(Protocol):
    """How subjects are measured. Each method goes through all of them."""

    def warm_up(self) -> None: ...

    def sample(self) -> None: ...

    def finish(self) -> None:
        """After the last check, before they are closed."""
        return


def measure(subjects: Sequence[Subject], world: World, schedule: SamplingSchedule) -> None:
    """Takes the subjects through the loop; they say themselves how they ended. What the schedule raises ends it."""
    with no_collections():
        try:
            for subject in subjects:
                subject.build(world)
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


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Collects garbage now and not meanwhile."""
    gc.collect()
    # What survived is modules, caches and results. Left unfrozen, the next case's collection would walk
    # through all of torch again: longer than a short case takes.
    gc.freeze()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def release_memory() -> None:
    """Gives back what closed subjects held, so that running out of memory ends one case, not the run."""
    gc.collect()
    gpus().free_cached()


@dataclass
class ImplOutcome:
    """One impl's end. samples_s: per sample, the max over participating ranks; seconds per call. The ranks'
    own are as in `Result`.
    """

    status: Status
    reason: str = ""
    rank: int | None = None
    samples_s: tuple[float, ...] = ()
    rank_samples_s: dict[str, tuple[float, ...]] = field(default_factory=dict)
    rank_arrivals_s: dict[str, tuple[float, ...]] = field(default_factory=dict)
    counters: dict[str, float] = field(default_factory=dict)


def to_result(task: Task, impl: str, outcome: ImplOutcome, launch: int = 0) -> Result:
    """The line of the run file for one impl of a task."""
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
    busbw = None if algbw is None or case.busbw_factor is None else algbw * case.busbw_factor
    return msgspec.structs.replace(
        result,
        time_s=timing,
        samples_s=outcome.samples_s,
        rank_samples_s=outcome.rank_samples_s,
        rank_arrivals_s=outcome.rank_arrivals_s,
        algbw_Bps=algbw,
        busbw_Bps=busbw,
        counters=outcome.counters,
    )
