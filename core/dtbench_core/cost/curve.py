"""Measured time over size, of one collective or change of placement on one mesh dim. No torch.

Between two measured sizes the time is a straight line: a latency and a bandwidth of its own for each step
of the sweep. On 56 public curves of nccl-tests, every second size held out, that halves the error of a log-log
interpolation (median 1.1 % against 2.0 %; from 32 MiB on 0.4 % against 0.8 %), and does no worse than splines.

Outside, the curve goes on with the slope of its last (or first) factor of four in size, not that of one line
through all points (a factor of two above 128 MiB: 1.8 % off, the line 20 %).

`dtbench export` writes the class `Curve` into its modules as it stands here.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Time over size.

    Attributes:
        sizes: bytes, ascending. Of a collective they are counted as nccl-tests does: the gathered tensor, the tensor to
            be reduced or scattered, the buffer of one rank of an all-to-all. Of a change of placement they are those of
            the whole tensor as one group holds it.
        times_us: microseconds at these sizes, never falling.
    """

    sizes: tuple[int, ...]
    times_us: tuple[float, ...]

    # The slope at an end is taken over this factor in size: one row alone is at the mercy of noise.
    END_FACTOR = 4

    def us(self, size_bytes: float) -> float:
        """Microseconds at this size."""
        sizes, times = self.sizes, self.times_us
        if size_bytes < sizes[0]:
            return self._below(size_bytes)
        if size_bytes >= sizes[-1]:
            return times[-1] + (size_bytes - sizes[-1]) * self.end_slope()
        left = bisect_right(sizes, size_bytes) - 1
        return times[left] + (size_bytes - sizes[left]) * self._slope(left, left + 1)

    def end_slope(self) -> float:
        """us per byte beyond the largest size; never more than if all of its time were transfer. Its inverse is
        the bandwidth of large messages."""
        sizes, times = self.sizes, self.times_us
        proportional = times[-1] / sizes[-1]
        if len(sizes) == 1:
            return proportional
        rows = range(len(sizes))
        faster = [i for i in rows if sizes[i] * self.END_FACTOR <= sizes[-1] and times[i] < times[-1]]
        return min(self._slope(faster[-1] if faster else 0, -1), proportional)

    def _below(self, size_bytes: float) -> float:
        """Less than the smallest size takes, but never less than its share of that."""
        sizes, times = self.sizes, self.times_us
        slope = 0.0
        if len(sizes) > 1:
            rows = range(len(sizes))
            slower = [i for i in rows if sizes[i] >= self.END_FACTOR * sizes[0] and times[i] > times[0]]
            slope = self._slope(0, slower[0] if slower else -1)
        return max(times[0] - (sizes[0] - size_bytes) * slope, times[0] * size_bytes / sizes[0])

    def _slope(self, a: int, b: int) -> float:
        return (self.times_us[b] - self.times_us[a]) / (self.sizes[b] - self.sizes[a])
