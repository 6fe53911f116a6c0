"""A fake GPU behind the protocols of `dtbench.machine.device`, for tests and for rehearsals on a CPU.

It runs work in order on one stream. It has a clock of its own, which may run fast.
"""

from __future__ import annotations

import time
from collections import deque
from types import SimpleNamespace
from typing import Any

NAME = "no GPU (rehearsal)"
# The device of a rehearsal; cpu:0 is the CPU under another name.
ENVIRON = {"DTBENCH_REHEARSAL": __file__, "DTBENCH_TEST_DEVICE": "cpu:0"}


class FakeGpus:
    """One GPU.

    Args:
        now: returns the time of the host's clock, ns.
        wait: returns when the host's clock shows a time, ns.
        drift: the GPU's clock shows (1 + drift) times the time that passes on the host's.

    Attributes:
        log: the latest calls, in order.
    """

    count, uuid = staticmethod(lambda: 1), staticmethod(lambda _index: None)
    l2_bytes, nvml = staticmethod(lambda _device: 1 << 20), staticmethod(lambda: fake_nvml(1))
    captured = staticmethod(lambda run: run)

    def __init__(self, now: Any = time.perf_counter_ns, wait: Any = lambda _: 0, drift: float = 0.0) -> None:
        self.log: deque[str] = deque(maxlen=100)
        self.now_ns, self._wait_ns = now, wait
        self.drift, self._busy_until_ns = drift, 0.0

    def launch(self, ns: float) -> None:
        """Appends work of this duration to the stream."""
        self.log.append("launch")
        self._busy_until_ns = self.done_ns() + ns

    def done_ns(self) -> float:
        """Returns when all work so far will be done, on the host's clock."""
        return float(max(self.now_ns(), self._busy_until_ns))

    def wait_for(self, ns: float) -> None:
        if self.now_ns() < ns:
            self._wait_ns(ns)

    def select(self, _index: int = 0) -> Any:
        import torch  # no command waits for it that needs none

        return torch.device("cpu")

    current = select

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.wait_for(self._busy_until_ns)

    def occupy(self, seconds: float) -> None:
        self.launch(seconds * 1e9)

    def free_cached(self) -> None:
        self.log.append("free")


class FakeEvent:
    """Like torch.cuda.Event with timing: it may be recorded again, and has a time once the GPU has reached it."""

    def __init__(self, gpus: FakeGpus) -> None:
        self._gpus = gpus
        self._at_ns: float | None = None

    def record(self) -> None:
        self._gpus.log.append("record")
        self._at_ns = self._gpus.done_ns()

    def synchronize(self) -> None:
        self._gpus.wait_for(self._at_ns or 0)

    def elapsed_time(self, end_event: FakeEvent) -> float:
        start, end = self._at_ns, end_event._at_ns
        if start is None or end is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        if max(start, end) > self._gpus.now_ns():
            raise RuntimeError("device not ready")
        return (1 + self._gpus.drift) * (end - start) / 1e6


def rehearsed() -> FakeGpus:
    """Returns the fake GPUs of a rehearsal; see `dtbench.machine.device`."""
    return FakeGpus(wait=lambda until: time.sleep(max(until - time.perf_counter_ns(), 0) * 1e-9))


def fake_nvml(count: int) -> SimpleNamespace:
    """Returns fake bindings of NVML for this many GPUs; an unsupported query raises, as in the real ones.

    Its attribute `reasons` is the mask of reasons that limit the clocks.
    """
    fake = SimpleNamespace(
        reasons=0, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0, NVML_NVLINK_MAX_LINKS=4
    )
    fake.nvmlDeviceGetCount = lambda: count
    fake.nvmlDeviceGetHandleByIndex = lambda index: f"handle-{range(count)[index]}"
    fake.nvmlDeviceGetHandleByUUID = lambda uuid: f"handle-of-{uuid}"
    fake.nvmlDeviceGetName = lambda handle: NAME
    fake.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: fake.reasons
    return fake
