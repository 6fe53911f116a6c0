"""The clocks that time samples: of the calling thread, and of the work on a CPU or GPU."""

import itertools
from collections.abc import Callable
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

from dtbench.engine.clock_offsets import SAME_CLOCK, offset_from_marks
from dtbench.machine.device import GpuEvent, Gpus, gpus, is_gpu
from dtbench.suite.case import Instrument

if TYPE_CHECKING:
    import torch

# Number of events (marks) that relate a GPU's clock to the host's before a sample. Several, since an interrupt may
# widen the bounds of one.
_MARKS = 3
# Initial and maximal seconds for which the GPU is kept busy while host time is measured. Ten calls of a DTensor op take
# less than 2 ms, and each sample waits for the GPU's work.
OCCUPIED_S, MAX_OCCUPIED_S = 2e-3, 0.2
# The calls may take this share of the busy time.
OCCUPIED_SHARE = 0.8
# The busy time shrinks at most by this factor per sample. It thus recovers from a slow first call.
OCCUPIED_DECAY = 0.7


class Clock(Protocol):
    """A clock that times calls.

    Attributes:
        started_ns: start of the last sample, on the host's monotonic clock; None before the first.
        error_ns: uncertainty of `started_ns`.
    """

    started_ns: int | None
    error_ns: float

    def settle(self, *, cold: bool = False) -> None:
        """Waits for earlier work before a sample; with `cold`, also empties the device's cache."""

    def measure(self, run: Callable[[], object], calls: int) -> float:
        """Calls `run` `calls` times. Returns seconds per call."""


class HostClock:
    """Wall time of the calling thread, which on a CPU is also the time of the work."""

    started_ns: int | None = None
    error_ns = 0.0

    def settle(self, *, cold: bool = False) -> None:
        """Does nothing: calls end with their work."""

    def measure(self, run: Callable[[], object], calls: int) -> float:
        repeats = itertools.repeat(None, calls)
        start = perf_counter_ns()
        for _ in repeats:
            run()
        end = perf_counter_ns()
        self.started_ns = start
        return (end - start) * 1e-9 / calls


class HostClockOnGpu(HostClock):
    """Wall time of the calling thread for calls that enqueue GPU work. Each sample starts with an empty queue."""

    def __init__(self, gpus: Gpus) -> None:
        self._gpus = gpus

    def settle(self, *, cold: bool = False) -> None:
        self._gpus.synchronize()


class HostClockOnBusyGpu(HostClockOnGpu):
    """Wall time of the calling thread while the GPU is busy, as in a training step whose host runs ahead.

    The GPU gets work that lasts until the calls are over; its length follows the last samples. Launches still wait for
    the GPU once the driver's queue is full, at about 1,024.
    """

    def __init__(self, gpus: Gpus) -> None:
        super().__init__(gpus)
        self._occupied_s = OCCUPIED_S

    def measure(self, run: Callable[[], object], calls: int) -> float:
        self._gpus.occupy(self._occupied_s)
        seconds = super().measure(run, calls)
        self._occupied_s = min(
            max(OCCUPIED_S, seconds * calls / OCCUPIED_SHARE, OCCUPIED_DECAY * self._occupied_s),
            MAX_OCCUPIED_S,
        )
        return seconds


class GpuClock:
    """The GPU's time between two events on the current stream.

    On an idle GPU the first event passes before the first kernel is launched. So a sample of one call includes the
    host's launch time (microseconds), and the host's time determines a sample of many small kernels.

    Events on an idle GPU, each between two readings of the host's clock, relate the two clocks. `started_ns`, the time
    of the start event, is on the host's clock, with an uncertainty of `error_ns`.
    """

    def __init__(self, device: "torch.device", gpus: Gpus) -> None:
        import torch

        self.started_ns: int | None = None
        self.error_ns = 0.0
        self._gpus = gpus
        self._start, self._end = gpus.event(), gpus.event()
        self._marks = [gpus.event() for _ in range(_MARKS)]
        # From the GPU's time since the first mark to the host's clock.
        self._offset = SAME_CLOCK
        # Twice the L2: writing it evicts all of the case's buffers, even if the replacement policy keeps a part of the
        # first half.
        self._flush = torch.empty(max(2 * gpus.l2_bytes(device), 1), dtype=torch.uint8, device=device)

    def settle(self, *, cold: bool = False) -> None:
        if cold:
            self._flush.zero_()
        self._gpus.synchronize()
        # Before each sample, since the clocks drift apart by microseconds per second.
        readings = []
        for mark in self._marks:
            earliest_ns = perf_counter_ns()
            mark.record()
            mark.synchronize()
            readings.append((earliest_ns, mark, perf_counter_ns()))
        self._offset = offset_from_marks(
            (earliest_ns, gpu_ns, gpu_ns, latest_ns)
            for earliest_ns, mark, latest_ns in readings
            for gpu_ns in [self._since_first_mark_ns(mark)]
        )

    def measure(self, run: Callable[[], object], calls: int) -> float:
        self._start.record()
        for _ in range(calls):
            run()
        self._end.record()
        self._end.synchronize()
        self.started_ns = round(self._offset.ns + self._since_first_mark_ns(self._start))
        self.error_ns = self._offset.uncertainty_ns
        return float(self._start.elapsed_time(self._end)) * 1e-3 / calls

    def _since_first_mark_ns(self, event: GpuEvent) -> float:
        return float(self._marks[0].elapsed_time(event)) * 1e6


def clocks_of(device: "torch.device") -> dict[Instrument, Clock]:
    """Returns the clock of each kind of case on this device."""
    if not is_gpu(device):
        return dict.fromkeys(("host", "busy", "device"), HostClock())
    return {
        "host": HostClockOnGpu(gpus()),
        "busy": HostClockOnBusyGpu(gpus()),
        "device": GpuClock(device, gpus()),
    }
