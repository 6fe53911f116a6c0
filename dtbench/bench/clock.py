"""Clocks behind one protocol: the host's, the work's on a CPU, the work's on a GPU.

A clock says how long `calls` calls took, per call. Tests put a fake in their place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch


class Clock(Protocol):
    """Measures calls.

    started_ns: when the last sample began, on the running kernel's monotonic clock; None where the work runs
    on a clock of its own.
    """

    started_ns: int | None

    def settle(self, *, cold: bool = False) -> None:
        """Before a sample, untimed: waits for earlier work; `cold` also empties the device's cache."""
        ...

    def measure(self, run: Callable[[], object], calls: int) -> float:
        """Seconds per call of `run`, called `calls` times."""
        ...


class HostClock:
    """The calling thread's wall time. On a CPU, where the caller does the work, also the work's."""

    started_ns: int | None = None

    def settle(self, *, cold: bool = False) -> None:
        pass

    def measure(self, run: Callable[[], object], calls: int) -> float:
        if calls == 1:
            start = perf_counter_ns()
            run()
            end = perf_counter_ns()
        else:
            repeats = itertools.repeat(None, calls)
            start = perf_counter_ns()
            for _ in repeats:
                run()
            end = perf_counter_ns()
        self.started_ns = start
        return (end - start) * 1e-9 / calls


class HostClockOnCuda(HostClock):
    """The calling thread's time where calls enqueue GPU work: starts each sample with an empty queue,
    so that a full one does not hold the caller up."""

    def settle(self, *, cold: bool = False) -> None:
        import torch

        torch.cuda.synchronize()


class CudaClock:
    """The GPU's time between two events on the current stream."""

    started_ns: int | None = None

    def __init__(self, device: torch.device) -> None:
        import torch

        event: Any = torch.cuda.Event  # its constructor has no types
        self._start = event(enable_timing=True)
        self._end = event(enable_timing=True)
        # Twice the L2: writing it leaves no line of the case's buffers behind, whatever the
        # replacement policy keeps of the first half.
        flush_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._flush = torch.empty(max(flush_bytes, 1), dtype=torch.uint8, device=device)

    def settle(self, *, cold: bool = False) -> None:
        import torch

        if cold:
            self._flush.zero_()
        torch.cuda.synchronize()

    def measure(self, run: Callable[[], object], calls: int) -> float:
        self._start.record()
        for _ in range(calls):
            run()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1e-3 / calls


def clocks_of(device: torch.device) -> dict[Literal["host", "device"], Clock]:
    """The clocks that cases ask for by name, on this device."""
    if device.type == "cpu":
        return {"host": HostClock(), "device": HostClock()}
    return {"host": HostClockOnCuda(), "device": CudaClock(device)}
