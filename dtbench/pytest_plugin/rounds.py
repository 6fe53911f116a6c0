"""A case's impl as a pytest-benchmark test.

A round is one sample of the harness: `calls_per_sample` calls after a barrier. What is recorded is the
slowest rank's time of each round, per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from dtbench.engine.clock import clocks_of
from dtbench.engine.failure import ActiveCase
from dtbench.engine.options import Task
from dtbench.engine.sampling import CollectiveSchedule
from dtbench.pytest_plugin import gate_of
from dtbench.pytest_plugin.world import Up, live_of
from dtbench.stats import summarize
from dtbench.suite import estimator_of

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

ROUNDS, QUICK_ROUNDS = 20, 5


def test_of(task: Task, impl: str, *, alone: bool) -> Callable[..., None]:
    """The test function. alone: a suite of ranks that runs on one."""

    def test(request: pytest.FixtureRequest, benchmark: BenchmarkFixture) -> None:
        gate = gate_of(request.config)
        if gate is not None:
            gate.judge(f"{task.label} [{impl}]")
            return
        option = request.config.option
        given = option.dtbench_rounds
        rounds = int(given if given is not None else QUICK_ROUNDS if option.dtbench_quick else ROUNDS)
        _measure(benchmark, task, impl, live_of(request.config).enter(task.suite.world, alone=alone), rounds)

    return test


def _measure(benchmark: BenchmarkFixture, task: Task, impl: str, up: Up, rounds: int) -> None:
    bad = Rounds(benchmark, (task, impl), up, rounds).run(up.world).get(impl)
    if bad is None:
        return
    if benchmark.stats is not None:  # rounds were timed already: not to be written
        benchmark.has_error = True
        benchmark.stats.stats.data.clear()
    if bad.status == "skipped" or up.ranks.rank != 0:
        pytest.skip(bad.reason)
    pytest.fail(f"{bad.status} on rank {bad.rank}: {bad.reason}", pytrace=False)


class Rounds(CollectiveSchedule):
    """The schedule of one impl of a case under pytest-benchmark: so many rounds on all ranks, then what they mean.

    pytest-benchmark counts the rounds; their times are those of the harness's clock."""

    def __init__(self, benchmark: BenchmarkFixture, task: tuple[Task, str], up: Up, rounds: int) -> None:
        self.task, self.impl = task
        super().__init__(self.task.case, [self.impl], up.ranks, ActiveCase())
        self.benchmark, self.barrier, self.rounds = benchmark, up.barrier, rounds
        self.clock = clocks_of(up.world.device)[self.case.instrument]
        self.subject = self.live[self.impl]
        self.samples: list[float] = []

    def agree(self) -> None:
        """What stops one rank stops all."""
        self.vote(None, lambda _votes: None)

    def warm_up(self) -> None:
        self.agree()

    def sample(self) -> None:
        self.agree()
        self.subject.attempt(self.time_rounds)
        self.agree()

    def time_rounds(self) -> None:
        calls = self.case.calls_per_sample

        def setup() -> None:
            self.subject.ready()
            self.clock.settle()
            if self.case.clock == "device":
                self.barrier()

        def sample() -> None:
            self.samples.append(self.clock.measure(self.subject.workload.run, calls))

        warmup_rounds = -(-self.case.warmup_calls // calls)
        self.benchmark.pedantic(sample, setup=setup, rounds=self.rounds, warmup_rounds=warmup_rounds)

    def finish(self) -> None:
        """Puts the agreed times in the place of this rank's, and beside them what they mean."""
        workload, case, stats = self.subject.workload, self.case, self.benchmark.stats
        count = workload.counters or dict
        counters = self.subject.attempt(lambda: dict(count()))
        mine = self.samples[-self.rounds :] if stats is not None and workload.participates else None
        agreed = self.vote(mine, slowest)
        if stats is None:  # --benchmark-disable
            return
        stats.stats.data[:] = agreed
        stats.iterations = case.calls_per_sample
        # A table of each case, whose rows are its impls.
        stats.group = " ".join([self.task.suite.name, case.name, *map(str, case.params.values())])
        stats.name = self.impl
        info: dict[str, object] = {
            "suite": self.task.suite.name,
            "impl": self.impl,
            "params": dict(case.params),
        }
        if case.size_bytes is not None:
            info["size_bytes"] = case.size_bytes
            algbw_Bps = case.size_bytes / getattr(summarize(stats.stats.data), estimator_of(case))  # noqa: N806
            info["algbw_Bps"] = algbw_Bps
            if case.busbw_factor is not None:
                info["busbw_Bps"] = algbw_Bps * case.busbw_factor
        self.benchmark.extra_info |= info | ({"counters": counters} if counters else {})


def slowest(votes: list[list[float] | None]) -> list[float]:
    """Round by round, over the ranks that took part."""
    return [max(samples) for samples in zip(*(v for v in votes if v is not None), strict=True)]
