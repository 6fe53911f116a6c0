"""How a gate's launch samples: quiet moments are looked for, and both arms keep equally many samples."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dtbench.clock import HostClock
from dtbench.gate import sampler
from dtbench.gate.sampler import MORE_S, measure
from dtbench.model import Case, Result, Workload
from dtbench.options import Task
from dtbench.registry import Suite

SAMPLES = 40
QUIET_NS, LOUD_NS = 1000, 1600
SAMPLE_S = 2**-6  # on the clock that ends the search for quiet moments


class Machine:
    """A neighbour whose work slows everything down. quiet: whether it is, for each sample."""

    def __init__(self, quiet: Iterator[bool]) -> None:
        self._quiet = quiet
        self._now = True
        self.asked = 0

    def loop_ns(self) -> int:
        if self.asked % 2 == 0:  # before a sample; the other comes after it
            self._now = next(self._quiet)
        self.asked += 1
        return QUIET_NS if self._now else LOUD_NS

    def sample_s(self, *_: Any) -> float:
        return 1e-3 if self._now else 1.6e-3

    @property
    def samples(self) -> int:
        return self.asked // 2


def run(monkeypatch: pytest.MonkeyPatch, quiet: Iterator[bool]) -> tuple[Result, Machine]:
    machine = Machine(quiet)
    monkeypatch.setattr(sampler, "_loop_ns", machine.loop_ns)
    monkeypatch.setattr(sampler, "time", SimpleNamespace(monotonic=lambda: machine.samples * SAMPLE_S))
    clock = HostClock()
    monkeypatch.setattr(clock, "measure", machine.sample_s)
    case = Case("x", {}, {"python": lambda _world: Workload(run=lambda: None)}, clock="host")
    made = Suite("made_up", lambda _plan: iter([case]), "simulated", "", None, {}, False, None)
    task = Task(made, case, ("python",))
    (result,) = measure([(task, "python", SAMPLES, 1)], None, {"host": clock}, lambda _label: None)
    return result, machine


def test_a_quiet_machine_gives_the_samples_that_were_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    result, machine = run(monkeypatch, iter(lambda: True, None))
    assert machine.samples == len(result.samples_s) == SAMPLES
    assert set(result.samples_s) == {1e-3} and not result.counters["disturbed"]


def test_more_visits_find_quiet_moments_and_no_more_samples_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def quiet() -> Iterator[bool]:
        yield True  # one quiet moment, which tells what is fast
        for _ in range(SAMPLES + 5):
            yield False
        while True:
            yield True

    result, machine = run(monkeypatch, quiet())
    assert SAMPLES < machine.samples < 2 * SAMPLES
    assert len(result.samples_s) == SAMPLES
    assert sum(s == 1e-3 for s in result.samples_s) >= SAMPLES // 4
    assert not result.counters["disturbed"]


def test_a_machine_that_is_never_quiet_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    result, machine = run(monkeypatch, (n == 0 for n in iter(range(10**6))))
    assert machine.samples == SAMPLES + MORE_S / SAMPLE_S
    assert len(result.samples_s) == SAMPLES and result.time_s is not None
    assert result.time_s.min == 1e-3 and result.counters["disturbed"]
