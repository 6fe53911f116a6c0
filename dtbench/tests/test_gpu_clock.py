"""Clocks and NVML of a fake GPU: the order of events, the flush, throttling, and when a rank began."""

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


class Host:
    """The host's clock beside a fake GPU. Each reading takes a microsecond."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, drift: float = 0.0) -> None:
        self.now = 5_000_000
        self.gpus = FakeGpus(lambda: self.now, self.wait, drift)
        self.clock = GpuClock(CPU, self.gpus)
        monkeypatch.setattr(module, "perf_counter_ns", self.read)

    def read(self) -> int:
        self.now += 1_000
        return self.now

    def wait(self, until: float) -> None:
        self.now = round(until)


def test_gpu_clock_measures_the_time_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)

    def run() -> None:
        host.wait(host.now + 2_000)  # the caller's own time
        host.gpus.launch(40_000)

    host.clock.settle()
    assert host.clock.measure(run, 5) == pytest.approx((2_000 + 5 * 40_000) * 1e-9 / 5)


@pytest.mark.parametrize("cold", [False, True])
def test_gpu_clock_flushes_the_l2_of_cold_samples_only(monkeypatch: pytest.MonkeyPatch, cold: bool) -> None:
    host = Host(monkeypatch)
    flush = host.clock._flush.fill_(1)
    assert flush.numel() == 2 * host.gpus.l2_bytes(CPU)
    host.clock.settle(cold=cold)
    assert flush.any() != cold
    # The clocks are compared after the flush is done.
    assert list(host.gpus.log) == ["synchronize", *["record"] * len(host.clock._marks)]


def test_host_clock_begins_with_an_empty_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    clock = HostClockOnGpu(host.gpus)
    host.gpus.launch(1e9)
    clock.settle()
    assert host.now == 5_000_000 + 1e9
    assert clock.measure(lambda: host.gpus.launch(1e6), 1) == pytest.approx(1e-6)  # two readings of the clock


def test_busy_clock_keeps_the_gpu_occupied_during_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    host, busy = Host(monkeypatch), list[bool]()
    clock = HostClockOnBusyGpu(host.gpus)

    def run() -> None:
        host.wait(host.now + 3_000_000)
        busy.append(host.gpus.done_ns() > host.now)
        host.gpus.launch(10_000)

    for calls in (1, 1, 1, 4, 4, 1):
        clock.settle()
        assert host.gpus.done_ns() == host.now  # each begins with an empty queue
        assert clock.measure(run, calls) == pytest.approx(3e-3, rel=1e-3)
    # The GPU's work is longer after a long sample, and not much shorter after a short one.
    assert busy == [False, True, True, *(True, False, False, False), *[True] * 4, True]
    clock.measure(lambda: host.wait(host.now + 1e9), 1)
    before = host.now
    clock.measure(lambda: None, 1)
    assert host.gpus.done_ns() - before <= module.MAX_OCCUPIED_S * 1e9 + 10_000


@pytest.mark.parametrize("drift", [0.0, 5e-5])
def test_gpu_clock_reports_when_a_sample_began(monkeypatch: pytest.MonkeyPatch, drift: float) -> None:
    host = Host(monkeypatch, drift)
    host.clock.settle()
    host.wait(host.now + 300_000)  # a barrier
    began = host.now
    host.clock.measure(lambda: host.gpus.launch(10_000), 1)
    assert host.clock.started_ns is not None and 0 < host.clock.error_ns <= 500
    assert abs(host.clock.started_ns - began) <= host.clock.error_ns + drift * 400_000 + 2


def test_a_rehearsal_measures_with_a_gpus_instruments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(device.REHEARSAL, fake_gpu.__file__)
    fake, library = FakeGpus(), fake_nvml(1)
    library.reasons = 0x4
    monkeypatch.setattr(fake, "nvml", lambda: library)
    for user in (module, nvml):
        monkeypatch.setattr(user, "gpus", lambda: fake)
    tools: Any = make_instruments(CPU, barrier=lambda: None, budget=None)
    assert isinstance(tools.clocks["device"], GpuClock)
    assert tools.gpu_state()["throttled_by"] == ["sw_power_cap"]
    assert [gpu.name for gpu in nvml.describe_gpus()] == ["no GPU (rehearsal)"]


def test_arrivals_of_two_hosts_have_the_error_of_their_clocks() -> None:
    """The clock of rank 1 is 3 s ahead; it is 400 us late in every second sample."""
    starts = {0: [10**6, 2 * 10**6], 1: [3 * 10**9 + 10**6, 3 * 10**9 + 2_400_000]}
    common = {"counters": {}, "throttled": None, "error_ns": 300.0, "samples": [1e-5, 1e-5]}
    parts: Any = [
        {**common, "boot_id": f"k{rank}", "started": starts[rank], "offset": [-3e9 * rank, 200.0 * rank]}
        for rank in starts
    ]
    combined = combine_ranks(parts)
    arrivals_s = {"0": pytest.approx((0.0, 0.0), abs=1e-6), "1": pytest.approx((0.0, 4e-4), abs=1e-6)}
    assert combined.rank_arrivals_s == arrivals_s
    assert combined.counters["arrival_error_s"] == pytest.approx(500e-9)
