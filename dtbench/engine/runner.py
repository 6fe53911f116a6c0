"""From tasks to results: measures one task after another in a live world."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import msgspec

from dtbench.engine.failure import ActiveCase
from dtbench.engine.options import Task
from dtbench.engine.sampling import Adaptive, Budget, Instruments, Outcome, Ranks
from dtbench.stats import summarize
from dtbench.suite import Result, estimator_of
from dtbench.suite.suites import World


def budget_of(world: str, quick: bool) -> Budget:
    """How much is measured per impl of a case.

    Host latencies need rounds enough for a steady quartile, and cost microseconds each; collectives
    between processes on one machine cost milliseconds, and five say what thirty say within the noise
    between launches. Seconds are set so that the whole `--quick` job stays in minutes on two cores.
    """
    seconds = 0.02 if quick else 0.10
    least, most = (20, 50) if world == "simulated" else (5, 30)
    return Budget(samples_s=seconds, least=least, most=most, warmup_s=seconds)


@dataclasses.dataclass
class Sweep:
    """Measures tasks and hands on their results.

    record: called on rank 0 with each result as soon as it is there. starting: called on every rank
        before a task. limit: a context that ends the run if a task is still in it after so many
        seconds. go_on: called on every rank before a task: whether there is time for it.
    """

    launch: int
    timeout_s: float
    now: ActiveCase
    record: Callable[[Result], None]
    starting: Callable[[Task], None]
    limit: Callable[[float], AbstractContextManager[None]]
    go_on: Callable[[Task, Ranks], bool] = lambda _task, _ranks: True

    def measure(self, tasks: Sequence[Task], world: World, ranks: Ranks, instruments: Instruments) -> None:
        """Measures the tasks in order, all ranks of `ranks` together."""
        for task in tasks:
            if not self.go_on(task, ranks):
                continue
            case, now = task.case, self.now
            now.begin(task.suite.name, case.name, case.params, task.impls)
            self.starting(task)
            with self.limit(self.timeout_s), _kept_folder():
                schedule = Adaptive(case, task.impls, ranks, instruments, now, self.timeout_s)
                outcomes = schedule.run(world)
            if ranks.rank == 0:
                for impl in task.impls:
                    self.record(to_result(task, impl, outcomes[impl], self.launch))
            now.end()


@contextmanager
def _kept_folder() -> Iterator[None]:
    """The current folder afterwards is that of before, to which the run file's path may be relative."""
    before = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
    try:
        yield
    finally:
        os.fchdir(before)
        os.close(before)


def to_result(task: Task, impl: str, outcome: Outcome, launch: int = 0) -> Result:
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
    algbw = None if case.size_bytes is None or estimate_s <= 0 else case.size_bytes / estimate_s
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
