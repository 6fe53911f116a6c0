"""How a gate's launch samples: in turn with the launches beside it, and as often as they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dtbench.engine.clock import HostClock
from dtbench.engine.options import Task
from dtbench.gate import sampler
from dtbench.gate.sampler import Sampling, measure_in_turns, sampling_for
from dtbench.suite import Case, Result, Workload
from dtbench.suite.suites import Suite

SUITE = Suite("made_up", lambda _plan: iter(()), "simulated", "", None, {}, False, None)


class Machine:
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
    (result,) = Machine(monkeypatch, [3e-3, 1e-3, 2e-3, 6e-3, 5e-3, 4e-3]).run(Sampling(4, 3, 1))
    assert result.samples_s == (1e-3, 4e-3, 1e-3, 4e-3)


def test_a_turn_is_awaited_before_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.run(Sampling(2, 1, 2), Sampling(2, 1, 1))
    one, other = ["warm 0", "take 0", "take 0"], ["warm 1", "take 1"]
    assert machine.seen == ["turn 0", *one, "turn 0", *other, "turn 1", *one, "turn 1", *other]


def test_what_must_precede_a_call_precedes_each_take(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.run(Sampling(1, 2, 1), before=True)
    assert machine.seen == ["turn 0", "before 0", "take 0", "before 0", "take 0"]


def test_few_samples_are_spread_over_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    machine.run(Sampling(6, 1, 1), Sampling(2, 1, 1))
    assert [what[-1] for what in machine.seen if what.startswith("take")] == list("00010001")


def test_a_benchmark_that_fails_takes_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch beside it, where it does not, would be out of step."""
    machine = Machine(monkeypatch)
    sound, bad = machine.run(Sampling(3, 1, 1), Sampling(3, 1, 1), broken=1)
    assert [what for what in machine.seen if "turn" in what] == [f"turn {n // 2}" for n in range(6)]
    assert (sound.status, bad.status) == ("ok", "failed") and "no such op" in bad.reason


@pytest.mark.parametrize(
    ("call_s", "benchmarks", "wanted"),
    [
        (5e-6, 30, Sampling(20, 3, 100)),
        (5e-6, 4, Sampling(80, 3, 100)),  # few benchmarks
        (44e-6, 30, Sampling(20, 3, 22)),  # a take of at most a millisecond
        (0.8e-3, 30, Sampling(20, 3, 1)),
        (5e-3, 30, Sampling(12, 1, 1)),  # too slow for more takes
        (1.0, 30, Sampling(10, 1, 1)),
        (1.0, 1, Sampling(10, 1, 1)),
        (0.0, 30, Sampling(20, 3, 100)),
    ],
)
def test_slow_calls_are_sampled_less(call_s: float, benchmarks: int, wanted: Sampling) -> None:
    assert sampling_for(Case("x", {}, {}, calls_per_sample=100), call_s, benchmarks) == wanted


def test_a_case_that_says_its_samples_gets_at_least_these() -> None:
    case = Case("x", {}, {}, calls_per_sample=7, samples=3)
    assert sampling_for(case, 1.0, 30) == Sampling(3, 1, 7)
    assert sampling_for(case, 1e-6, 30) == Sampling(20, 3, 7)
