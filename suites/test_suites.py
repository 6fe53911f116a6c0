"""Every case of every suite as a pytest-benchmark test; see conftest.py for how to start it.

A round is one sample of the harness: `calls_per_sample` calls after a barrier. What is recorded is the
slowest rank's time of each round, per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dtbench.bench.options import Task
from dtbench.bench.sampling import Voted
from dtbench.machine.device import gpus
from dtbench.model import estimator_of
from dtbench.stats import summarize
from dtbench.world.failure import Now


# An impl that does not get as far as its rounds has its own reason for it.
@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")
def test_case(request: Any, benchmark: Any, live: Any, task: tuple[Task, str], rounds: int) -> None:
    (todo, impl) = task
    gate = request.config.pluginmanager.get_plugin("dtbench-gate")
    if gate is not None:
        gate.judge(f"{todo.label} [{impl}]")
        return
    world, ranks, barrier = live.enter(todo.suite.world)
    bad = Rounds(benchmark, task, ranks, barrier, rounds).run(world).get(impl)
    if bad is None:
        return
    if benchmark.stats is not None:  # rounds were timed already: not to be written
        benchmark.has_error = True
        benchmark.stats.stats.data.clear()
    if bad.status == "skipped" or ranks.rank != 0:
        pytest.skip(bad.reason)
    pytest.fail(f"{bad.status} on rank {bad.rank}: {bad.reason}", pytrace=False)


class Rounds(Voted):
    """The schedule of one impl of a case under pytest-benchmark: so many rounds on all ranks, then what they mean."""

    def __init__(
        self, benchmark: Any, task: tuple[Task, str], ranks: Any, barrier: Callable[[], None], rounds: int
    ) -> None:
        self.task, self.impl = task
        super().__init__(self.task.case, [self.impl], ranks, Now())
        self.benchmark, self.barrier, self.rounds = benchmark, barrier, rounds
        self.subject = self.live[self.impl]

    def agree(self, mine: Any = None, decide: Callable[[list[Any]], Any] = lambda _: None) -> Any:
        """What stops one rank stops all."""
        return self.vote({"mine": mine}, lambda votes: decide([vote["mine"] for vote in votes]))

    def warm_up(self) -> None:
        self.agree()

    def sample(self) -> None:
        self.agree()
        self.subject.attempt(self.time_rounds)
        self.agree()

    def time_rounds(self) -> None:
        alone, calls = self.case.clock == "device", range(self.case.calls_per_sample)

        def setup() -> None:
            self.subject.ready()
            if alone:
                self.barrier()

        def sample() -> None:
            for _ in calls:
                self.subject.workload.run()
            if alone:
                finish()

        warmup_rounds = -(-self.case.warmup_calls // len(calls))
        self.benchmark.pedantic(sample, setup=setup, rounds=self.rounds, warmup_rounds=warmup_rounds)

    def finish(self) -> None:
        """Puts the agreed times in the place of this rank's, and beside them what they mean."""
        workload, case, stats = self.subject.workload, self.case, self.benchmark.stats
        count = workload.counters or dict
        counters = self.subject.attempt(lambda: dict(count()))
        mine = stats.stats.data if stats is not None and workload.participates else None
        agreed = self.agree(mine, slowest)
        if stats is None:  # --benchmark-disable
            return
        stats.stats.data[:] = [s / case.calls_per_sample for s in agreed]
        stats.iterations = case.calls_per_sample
        stats.group = self.task.label
        info: dict[str, Any] = {
            "suite": self.task.suite.name,
            "impl": self.impl,
            "params": dict(case.params),
        }
        if case.size_bytes is not None:
            info["size_bytes"] = case.size_bytes
            info["algbw_Bps"] = case.size_bytes / getattr(summarize(stats.stats.data), estimator_of(case))
            if case.busbw_factor is not None:
                info["busbw_Bps"] = info["algbw_Bps"] * case.busbw_factor
        self.benchmark.extra_info |= info | ({"counters": counters} if counters else {})


def finish() -> None:
    """Waits for the GPU, which a call leaves at work."""
    if gpus().count():
        gpus().synchronize()


def slowest(votes: list[list[float] | None]) -> list[float]:
    """Round by round, over the ranks that took part."""
    return [max(samples) for samples in zip(*(v for v in votes if v is not None), strict=True)]
