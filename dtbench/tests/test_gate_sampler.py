"""How a gate's launch samples: quiet moments are looked for, and both arms keep equally many samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from dtbench.clock import HostClock
from dtbench.gate import sampler
from dtbench.gate.sampler import MORE_S, VISITS, measure
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


def run(
    monkeypatch: pytest.MonkeyPatch,
    quiet: Iterator[bool],
    *,
    benchmarks: int = 1,
    await_turn: Callable[[Machine], None] = lambda _machine: None,
) -> tuple[Result, Machine]:
    """The last benchmark's result, and the machine."""
    machine = Machine(quiet)
    monkeypatch.setattr(sampler, "_loop_ns", machine.loop_ns)
    monkeypatch.setattr(sampler, "time", SimpleNamespace(monotonic=lambda: machine.samples * SAMPLE_S))
    clock = HostClock()
    monkeypatch.setattr(clock, "measure", machine.sample_s)
    made = Suite("made_up", lambda _plan: iter(()), "simulated", "", None, {}, False, None)
    wanted = []
    for number in range(benchmarks):
        case = Case("x", {"n": number}, {"python": lambda _world: Workload(run=lambda: None)}, clock="host")
        wanted.append((Task(made, case, ("python",)), "python", SAMPLES, 1))
    *_, result = measure(wanted, None, {"host": clock}, lambda _label: None, lambda: await_turn(machine))
    return result, machine


def test_a_quiet_machine_gives_the_samples_that_were_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    result, machine = run(monkeypatch, iter(lambda: True, None))
    assert machine.samples == len(result.samples_s) == SAMPLES
    assert set(result.samples_s) == {1e-3} and not result.counters["disturbed"]


def test_more_visits_find_quiet_moments_and_no_more_samples_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def quiet() -> Iterator[bool]:
        yield from [True] * (SAMPLES // 8)  # too few, and too many to be exceptions
        yield from [False] * SAMPLES
        while True:
            yield True

    result, machine = run(monkeypatch, quiet())
    assert SAMPLES < machine.samples < 2 * SAMPLES
    assert len(result.samples_s) == SAMPLES
    assert sum(s == 1e-3 for s in result.samples_s) >= SAMPLES // 4
    assert not result.counters["disturbed"]


def test_a_machine_that_is_hardly_ever_quiet_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The minimum of a launch that met an exception would be that of another kind of launch."""
    result, machine = run(monkeypatch, (n % 30 == 7 for n in range(10**6)))
    assert machine.samples == SAMPLES and len(result.samples_s) == SAMPLES - 2
    assert set(result.samples_s) == {1.6e-3} and not result.counters["disturbed"]


def test_the_search_for_quiet_moments_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two benchmarks one never meets any."""
    each_visit = SAMPLES // VISITS
    first = (n < 2 * SAMPLES and n // each_visit % 2 == 0 for n in range(10**6))
    result, machine = run(monkeypatch, first, benchmarks=2)
    assert machine.samples == 2 * SAMPLES + MORE_S / SAMPLE_S
    assert len(result.samples_s) == SAMPLES and set(result.samples_s) == {1.6e-3}
    assert result.counters["disturbed"]


def test_a_turn_is_awaited_before_each_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    run(monkeypatch, iter(lambda: True, None), await_turn=lambda machine: measured.append(machine.samples))
    assert measured == list(range(0, SAMPLES, SAMPLES // VISITS))
