"""Clocks behind one protocol: the host's, the work's on a CPU, the work's on a GPU.

A clock says how long `calls` calls took, per call. Tests put a fake in their place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

from dtbench.engine.clock_offsets import SAME_CLOCK, offset_from_marks
from dtbench.machine.device import GpuEvent, Gpus, gpus, is_gpu
from dtbench.suite.case import Instrument

if TYPE_CHECKING:
    import torch

# Marks that tie a GPU's clock to the host's before a sample: more than one, as an interrupt widens its bounds.
_MARKS = 3
# A GPU is kept busy for so long before a sample of the host's time, at first and at most: ten calls of a DTensor op
# take less than the first, and each sample waits for it.
OCCUPIED_S, MOST_OCCUPIED_S = 2e-3, 0.2
# The share of it that the calls may take; and what is left of a length after a sample that needs less, so that a slow
# first call does not lengthen all later samples.
SPARE, FADE = 0.8, 0.7


class Clock(Protocol):
    """Measures calls.

    started_ns: when the last sample began, on the running kernel's monotonic clock; None before the first.
    error_ns: how far off that may be.
    """

    started_ns: int | None
    error_ns: float

    def settle(self, *, cold: bool = False) -> None:
        """Before a sample, untimed: waits for earlier work; `cold` also empties the device's cache."""
        ...

    def measure(self, run: Callable[[], object], calls: int) -> float:
        """Seconds per call of `run`, called `calls` times."""
        ...


class HostClock:
    """The calling thread's wall time. On a CPU, where the caller does the work, also the work's."""

    started_ns: int | None = None
    error_ns = 0.0

    def settle(self, *, cold: bool = False) -> None:
        pass

    def measure(self, run: Callable[[], object], calls: int) -> float:
        repeats = itertools.repeat(None, calls)
        start = perf_counter_ns()
        for _ in repeats:
            run()
        end = perf_counter_ns()
        self.started_ns = start
        return (end - start) * 1e-9 / calls


class HostClockOnGpu(HostClock):
    """The calling thread's time where calls enqueue GPU work: starts each sample with an empty queue,
    so that a full one does not hold the caller up."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    def settle(self, *, cold: bool = False) -> None:
        self._gpus.synchronize()


class HostClockOnBusyGpu(HostClockOnGpu):
    """The calling thread's time while the GPU is at earlier work, as in a training step whose host runs ahead.

    What the GPU is given first is to last until the calls are over: its length follows what the last samples took.
    More launches than the driver queues (about 1,024) hold the caller up all the same.
    """

    def __init__(self, gpus: Gpus) -> None:
        super().__init__(gpus)
        self._occupied_s = OCCUPIED_S

    def measure(self, run: Callable[[], object], calls: int) -> float:
        self._gpus.occupy(self._occupied_s)
        seconds = super().measure(run, calls)
        wanted_s = max(OCCUPIED_S, seconds * calls / SPARE, FADE * self._occupied_s)
        self._occupied_s = min(wanted_s, MOST_OCCUPIED_S)
        return seconds


class GpuClock:
    """The GPU's time between two events on the current stream. On an idle GPU that begins before the first launch: a
    sample of one call holds the host's time to launch it (microseconds), and one of many small kernels is the host's.

    An event on an idle GPU, between two readings of the host's clock, ties the clocks together: so `started_ns`, the
    start event's time, is on the host's clock, and off by at most `error_ns`.
    """

    def __init__(self, device: torch.device, gpus: Gpus) -> None:
        import torch

        self.started_ns: int | None = None
        self.error_ns = 0.0
        self._gpus = gpus
        self._start, self._end = gpus.event(), gpus.event()
        self._marks = [gpus.event() for _ in range(_MARKS)]
        # What to add to the GPU's time since the first mark to have the host's clock.
        self._offset = SAME_CLOCK
        # Twice the L2: writing it leaves no line of the case's buffers behind, whatever the
        # replacement policy keeps of the first half.
        self._flush = torch.empty(max(2 * gpus.l2_bytes(device), 1), dtype=torch.uint8, device=device)

    def settle(self, *, cold: bool = False) -> None:
        if cold:
            self._flush.zero_()
        self._gpus.synchronize()
        self._tie_clocks()

    def measure(self, run: Callable[[], object], calls: int) -> float:
        self._start.record()
        for _ in range(calls):
            run()
        self._end.record()
        self._end.synchronize()
        self.started_ns = round(self._offset.ns + self._since_first_mark_ns(self._start))
        self.error_ns = self._offset.uncertainty_ns
        return float(self._start.elapsed_time(self._end)) * 1e-3 / calls

    def _tie_clocks(self) -> None:
        """Anew before each sample: clocks drift apart, by microseconds in a second."""
        readings = []
        for mark in self._marks:
            before = perf_counter_ns()
            mark.record()
            mark.synchronize()
            readings.append((before, mark, perf_counter_ns()))
        shown = [(before, self._since_first_mark_ns(mark), after) for before, mark, after in readings]
        self._offset = offset_from_marks((before, at, at, after) for before, at, after in shown)

    def _since_first_mark_ns(self, event: GpuEvent) -> float:
        return float(self._marks[0].elapsed_time(event)) * 1e6


def clocks_of(device: torch.device) -> dict[Instrument, Clock]:
    """The clocks that cases ask for by name, on this device."""
    if not is_gpu(device):
        return dict.fromkeys(("host", "busy", "device"), HostClock())
    of_host, busy = HostClockOnGpu(gpus()), HostClockOnBusyGpu(gpus())
    return {"host": of_host, "busy": busy, "device": GpuClock(device, gpus())}
