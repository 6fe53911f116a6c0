"""Clocks and NVML of a GPU that is not there: the order of events, the flush, throttling, when a rank began."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtbench.engine import clock as module
from dtbench.engine.clock import GpuClock, HostClockOnBusyGpu, HostClockOnGpu
from dtbench.engine.sampling import combine_ranks
from dtbench.engine.session import make_instruments
from dtbench.machine import device, nvml
from dtbench.tests.gpu import fake_gpu
from dtbench.tests.gpu.fake_gpu import FakeGpus, fake_nvml

CPU = torch.device("cpu")


class Time:
    """The host's clock, and a GPU beside it. Each reading takes a microsecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drift: float = 0.0) -> None:
        self.now = 5_000_000
        self.gpus = FakeGpus(lambda: self.now, self.wait, drift)
        monkeypatch.setattr(module, "perf_counter_ns", self.read)

    def read(self) -> int:
        self.now += 1_000
        return self.now

    def wait(self, until: float) -> None:
        self.now = round(until)

    def clock(self) -> GpuClock:
        return GpuClock(CPU, self.gpus)


def test_a_sample_is_the_gpus_time_and_not_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    clock = time.clock()

    def run() -> None:
        time.now += 2_000  # the caller's
        time.gpus.launch(40_000)

    clock.settle()
    assert clock.measure(run, 5) == pytest.approx((2_000 + 5 * 40_000) * 1e-9 / 5)


def test_settling_flushes_then_waits_then_ties_the_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    clock = time.clock()
    assert clock._flush.numel() == 2 * time.gpus.l2_bytes(CPU)
    clock._flush.fill_(1)
    clock.settle()
    assert clock._flush.all()  # warm: the case's buffers stay where they are
    time.gpus.log.clear()
    flush = clock._flush

    class Logging:
        def zero_(self) -> None:
            time.gpus.launch(30_000)
            flush.zero_()

    clock._flush = Logging()  # type: ignore[assignment]
    clock.settle(cold=True)
    assert not flush.any()
    assert list(time.gpus.log) == ["launch", "synchronize", *["record"] * len(clock._marks)]


def test_a_host_sample_begins_with_an_empty_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    clock = HostClockOnGpu(time.gpus)
    time.gpus.launch(1e9)
    clock.settle()
    assert time.now == 5_000_000 + 1e9
    assert clock.measure(lambda: time.gpus.launch(1e6), 1) == pytest.approx(1e-6)  # two readings of the clock


def test_a_busy_sample_is_the_callers_time_while_the_gpu_is_at_earlier_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = Time(monkeypatch)
    clock, busy = HostClockOnBusyGpu(time.gpus), list[bool]()

    def run() -> None:
        time.now += 3_000_000
        busy.append(time.gpus.done_ns() > time.now)
        time.gpus.launch(10_000)

    for calls in (1, 1, 1, 4, 4, 1):
        clock.settle()
        assert time.gpus.done_ns() == time.now  # each begins with an empty queue
        assert clock.measure(run, calls) == pytest.approx(3e-3, rel=1e-3)
    # What the GPU is given is longer once a sample took longer, and not much shorter after a short one.
    assert busy == [False, True, True, *(True, False, False, False), *[True] * 4, True]
    assert list(time.gpus.log)[-2:] == ["launch", "launch"]
    clock.measure(lambda: time.wait(time.now + 1e9), 1)
    before = time.now
    clock.measure(lambda: None, 1)
    assert time.gpus.done_ns() - before <= module.MAX_OCCUPIED_S * 1e9 + 10_000


@pytest.mark.parametrize("drift", [0.0, 5e-5])
def test_a_sample_began_when_its_event_was_passed(monkeypatch: pytest.MonkeyPatch, drift: float) -> None:
    time = Time(monkeypatch, drift)
    clock = time.clock()
    clock.settle()
    time.now += 300_000  # a barrier
    began = time.now
    clock.measure(lambda: time.gpus.launch(10_000), 1)
    assert clock.started_ns is not None
    assert abs(clock.started_ns - began) <= clock.error_ns + drift * 400_000 + 2
    assert 0 < clock.error_ns <= 500


def test_a_rehearsal_measures_with_a_gpus_instruments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.REHEARSAL, fake_gpu.__file__)
    fake = FakeGpus()
    monkeypatch.setattr(module, "gpus", lambda: fake)
    library = fake_nvml(1)
    library.reasons = 0x4
    monkeypatch.setattr(fake, "nvml", lambda: library)
    monkeypatch.setattr(nvml, "gpus", lambda: fake)
    tools: Any = make_instruments(CPU, barrier=lambda: None, budget=None)
    assert isinstance(tools.clocks["device"], GpuClock)
    assert tools.gpu_state()["throttled_by"] == ["sw_power_cap"]
    assert [gpu.name for gpu in nvml.describe_gpus()] == ["no GPU (rehearsal)"]


def test_ranks_on_gpus_of_two_hosts_tell_who_came_last() -> None:
    """Two ranks, each with a clock of its host, set to other times; rank 1 is late."""
    late_ns, ahead_ns, samples = 400_000, 3_000_000_000, 5
    wall = [0, 0]  # true time, as each rank lives through it

    def part(rank: int) -> dict[str, Any]:
        def host() -> int:
            wall[rank] += 1_000  # a reading takes a microsecond
            return wall[rank] + rank * ahead_ns

        def wait(until: float) -> None:
            wall[rank] = round(until) - rank * ahead_ns

        gpus = FakeGpus(lambda: wall[rank] + rank * ahead_ns, wait)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "perf_counter_ns", host)
            clock = GpuClock(CPU, gpus)
            taken, started, error_ns = [], [], 0.0
            for number in range(samples):
                clock.settle()
                wall[rank] = 1_000_000 * (number + 1) + (rank * late_ns if number % 2 else 0)  # a barrier
                taken.append(clock.measure(lambda: gpus.launch(10_000), 1))
                started.append(clock.started_ns)
                error_ns = max(error_ns, clock.error_ns)
        offset = [-rank * ahead_ns + rank * 50.0, rank * 200.0]  # as a ping may have found it
        facts = {"counters": {}, "kernel": f"k{rank}", "throttled": None, "offset": offset}
        return facts | {"samples": taken, "started": started, "error_ns": error_ns}

    combined = combine_ranks([part(0), part(1)])
    error_s = combined.counters["arrival_error_s"]
    assert 0 < error_s < 2e-6
    for number, (first, second) in enumerate(zip(*combined.rank_arrivals_s.values(), strict=True)):
        assert abs(second - first - (late_ns * 1e-9 if number % 2 else 0.0)) <= 2 * error_s
