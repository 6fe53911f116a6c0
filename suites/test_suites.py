"""Every case of every suite as a pytest-benchmark test; see conftest.py for how to start it.

A round is one sample of the harness: `calls_per_sample` calls after a barrier. What is recorded is the
slowest rank's time of each round, per call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from dtbench.bench.options import Task
from dtbench.errors import describe
from dtbench.model import Skip, Workload, estimator_of
from dtbench.stats import summarize

Verdict = tuple[str, str] | None  # "failed", "skipped" or "wrong", and why


# An impl that does not get as far as its rounds has its own reason for it.
@pytest.mark.filterwarnings("ignore:Benchmark fixture was not used")
def test_case(request: Any, benchmark: Any, live: Any, task: tuple[Task, str], rounds: int) -> None:
    (todo, impl) = task
    gate = request.config.pluginmanager.get_plugin("dtbench-gate")
    if gate is not None:
        gate.judge(f"{todo.label} [{impl}]")
        return
    world, ranks, barrier = live.enter(todo.suite.world)
    measured = Measured(benchmark, todo, ranks)
    workload = measured.attempt(lambda: todo.case.build[impl](world))
    assert workload is not None
    try:
        measured.attempt(lambda: measured.sample(workload, barrier, rounds))
        wrong = measured.attempt(workload.check or (lambda: None))
        measured.agree(("wrong", wrong) if wrong else None)
        counters = measured.attempt(lambda: dict(workload.counters()) if workload.counters else {})
        measured.record(impl, workload.participates, counters or {})
    finally:
        if workload.close:
            workload.close()


class Measured:
    """One impl of a case between pytest-benchmark and the ranks."""

    def __init__(self, benchmark: Any, task: Task, ranks: Any) -> None:
        self.benchmark, self.task, self.ranks = benchmark, task, ranks

    def attempt(self, step: Callable[[], Any]) -> Any:
        """Does a step on every rank; what stops one of them stops all."""
        verdict: Verdict = None
        result = None
        try:
            result = step()
        except Skip as skip:
            verdict = ("skipped", str(skip))
        except Exception as error:
            verdict = ("failed", describe(error))
            self.ranks.raised(describe(error))
        self.agree(verdict)
        return result

    def agree(self, verdict: Verdict) -> None:
        """Ends the test on all ranks if any of them has a verdict; rank 0 tells it."""
        said = self.ranks.agree(verdict, first_verdict)
        if said is None:
            return
        rank, status, reason = said
        if self.benchmark.stats is not None:  # rounds were timed already: not to be written
            self.benchmark.has_error = True
            self.benchmark.stats.stats.data.clear()
        if status == "skipped" or self.ranks.rank != 0:
            pytest.skip(reason)
        pytest.fail(f"{status} on rank {rank}: {reason}", pytrace=False)

    def sample(self, workload: Workload, barrier: Callable[[], None], rounds: int) -> None:
        """The rounds, their number being the same on all ranks."""
        case = self.task.case
        calls = range(case.calls_per_sample)

        def setup() -> None:
            if workload.before is not None:
                workload.before()
            if case.clock == "device":
                barrier()

        def sample() -> None:
            for _ in calls:
                workload.run()
            if case.clock == "device":
                finish()

        warmup_rounds = -(-case.warmup_calls // len(calls))
        self.benchmark.pedantic(sample, setup=setup, rounds=rounds, warmup_rounds=warmup_rounds)

    def record(self, impl: str, participates: bool, counters: Mapping[str, float]) -> None:
        """Puts the agreed times in the place of this rank's, and beside them what they mean."""
        stats = self.benchmark.stats
        if stats is None:  # --benchmark-disable
            return
        case = self.task.case
        mine = stats.stats.data if participates else None
        calls = case.calls_per_sample
        stats.stats.data[:] = [s / calls for s in self.ranks.agree(mine, slowest)]
        stats.iterations = calls
        stats.group = self.task.label
        info: dict[str, Any] = {"suite": self.task.suite.name, "impl": impl, "params": dict(case.params)}
        if case.size_bytes is not None:
            info["size_bytes"] = case.size_bytes
            info["algbw_Bps"] = case.size_bytes / getattr(summarize(stats.stats.data), estimator_of(case))
            if case.busbw_factor is not None:
                info["busbw_Bps"] = info["algbw_Bps"] * case.busbw_factor
        self.benchmark.extra_info |= info | ({"counters": dict(counters)} if counters else {})


def finish() -> None:
    """Waits for the GPU, which a call leaves at work."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def first_verdict(votes: list[Verdict]) -> tuple[int, str, str] | None:
    return next(((rank, *vote) for rank, vote in enumerate(votes) if vote), None)


def slowest(votes: list[list[float] | None]) -> list[float]:
    """Round by round, over the ranks that took part."""
    return [max(samples) for samples in zip(*(v for v in votes if v is not None), strict=True)]
