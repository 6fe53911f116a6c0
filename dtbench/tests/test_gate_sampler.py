"""How a gate's launch samples: in turn with the launches beside it, and as often as they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dtbench.engine.clock import HostClock
from dtbench.engine.tasks import Task
from dtbench.gate import sampler
from dtbench.gate.sampler import Sampling, measure_in_turns, sampling_for
from dtbench.records.result import Result
from dtbench.suite import Case, Workload
from dtbench.suite.registry import Suite

SUITE = Suite("made_up", lambda _plan: iter(()), "simulated", "", None, {}, False, None)


class SamplerLog:
    """What happens, in order: "turn" of a sample, "warm", "before" and "take" of a benchmark by its number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes_s: Sequence[float] = (1e-3,)) -> None:
        self.seen: list[str] = []
        self._takes_s = takes_s
        self._taken = 0
        self._measuring = False
        self._clock = HostClock()
        monkeypatch.setattr(self._clock, "measure", self._measure)
        monkeypatch.setattr(sampler, "WARMUP_S", 0.0)  # one call

    def _measure(self, run: Callable[[], object], calls: int) -> float:
        self._measuring = True
        for _ in range(calls):
            run()
        self._measuring = False
        self._taken += 1
        return self._takes_s[(self._taken - 1) % len(self._takes_s)]

    def run(self, *samplings: Sampling, before: bool = False, broken: int | None = None) -> list[Result]:
        """Results of a benchmark per sampling; the broken one cannot be built."""
        wanted = [(self._task(n, before, n == broken), "python", how) for n, how in enumerate(samplings)]
        clocks = {"host": self._clock}
        return list(
            measure_in_turns(
                wanted, None, clocks, lambda _: None, lambda number: self.seen.append(f"turn {number}")
            )
        )

    def _task(self, number: int, before: bool, broken: bool) -> Task:
        def build(_world: Any) -> Workload:
            if broken:
                raise RuntimeError("no such op")
            prepare = (lambda: self.seen.append(f"before {number}")) if before else None
            return Workload(run=lambda: self.seen.append(f"{self._what()} {number}"), before=prepare)

        case = Case("x", {"n": number}, {"python": build}, clock="host", samples=2, warmup_calls=0)
        return Task(SUITE, case, ("python",))

    def _what(self) -> str:
        return "take" if self._measuring else "warm"


def test_as_many_samples_as_planned_each_the_fastest_of_its_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = SamplerLog(monkeypatch, [3e-3, 1e-3, 2e-3, 6e-3, 5e-3, 4e-3]).run(Sampling(4, 3, 1))
    assert result.samples_s == (1e-3, 4e-3, 1e-3, 4e-3)


ONE, OTHER = ["warm 0", "take 0", "take 0"], ["warm 1", "take 1"]


@pytest.mark.parametrize(
    ("samplings", "before", "seen"),
    [
        (  # a turn is awaited before each sample
            [Sampling(2, 1, 2), Sampling(2, 1, 1)],
            False,
            ["turn 0", *ONE, "turn 0", *OTHER, "turn 1", *ONE, "turn 1", *OTHER],
        ),
        # what must precede a call precedes each take
        ([Sampling(1, 2, 1)], True, ["turn 0", "before 0", "take 0", "before 0", "take 0"]),
    ],
)
def test_the_order_of_a_launch(
    monkeypatch: pytest.MonkeyPatch, samplings: list[Sampling], before: bool, seen: list[str]
) -> None:
    machine = SamplerLog(monkeypatch)
    machine.run(*samplings, before=before)
    assert machine.seen == seen


def test_a_benchmark_that_fails_takes_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch beside it, where it does not, would be out of step."""
    machine = SamplerLog(monkeypatch)
    sound, bad = machine.run(Sampling(3, 1, 1), Sampling(3, 1, 1), broken=1)
    assert [what for what in machine.seen if "turn" in what] == [f"turn {n // 2}" for n in range(6)]
    assert (sound.status, bad.status) == ("ok", "failed") and "no such op" in bad.reason


@pytest.mark.parametrize(
    ("own", "call_s", "benchmarks", "wanted"),
    [
        (None, 5e-6, 30, Sampling(20, 3, 100)),
        (None, 44e-6, 30, Sampling(20, 3, 22)),  # a take of at most a millisecond
        (None, 5e-3, 30, Sampling(12, 1, 1)),  # too slow for more takes
        (None, 1.0, 1, Sampling(10, 1, 1)),
        (3, 1.0, 30, Sampling(3, 1, 100)),  # a case that says its samples gets at least these
    ],
)
def test_slow_calls_are_sampled_less(
    own: int | None, call_s: float, benchmarks: int, wanted: Sampling
) -> None:
    case = Case("x", {}, {}, calls_per_sample=100, samples=own)
    assert sampling_for(case, call_s, benchmarks) == wanted
