"""Measured time over size, of one collective or change of placement on one mesh dim.

Between two measured sizes the time is a straight line: a latency and a bandwidth of its own for each step
of the sweep. Outside, the curve goes on with the slope of its last (or first) factor of four in size.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtbench_core.errors import CoreError

GIB = 1024**3


class TopologyError(CoreError, ValueError):
    """A topology that cannot be read, or that says nothing about the mesh asked for."""


# The slope at an end is taken over this factor in size: one row alone is at the mercy of noise.
END_FACTOR = 4


@dataclass(frozen=True)
class Curve:
    """sizes: bytes of the tensor as one group holds it, ascending. times_us: at these sizes, never falling."""

    sizes: tuple[int, ...]
    times_us: tuple[float, ...]

    def us(self, size_bytes: float) -> float:
        """Microseconds at this size."""
        sizes, times = self.sizes, self.times_us
        if size_bytes < sizes[0]:
            return self._below(size_bytes)
        if size_bytes > sizes[-1]:
            return times[-1] + (size_bytes - sizes[-1]) * self._end_slope()
        right = max(bisect_left(sizes, size_bytes), 1) if len(sizes) > 1 else 0
        left = max(right - 1, 0)
        share = (size_bytes - sizes[left]) / (sizes[right] - sizes[left]) if right else 0.0
        return times[left] + share * (times[right] - times[left])

    def _end_slope(self) -> float:
        """us per byte beyond the largest size; never more than if all of its time were transfer."""
        sizes, times = self.sizes, self.times_us
        proportional = times[-1] / sizes[-1]
        if len(sizes) == 1:
            return proportional
        rows = range(len(sizes))
        faster = [i for i in rows if sizes[i] * END_FACTOR <= sizes[-1] and times[i] < times[-1]]
        return min(self._slope(faster[-1] if faster else 0, -1), proportional)

    def _below(self, size_bytes: float) -> float:
        """Less than the smallest size takes, but never less than its share of that."""
        sizes, times = self.sizes, self.times_us
        slope = 0.0
        if len(sizes) > 1:
            rows = range(len(sizes))
            slower = [i for i in rows if sizes[i] >= END_FACTOR * sizes[0] and times[i] > times[0]]
            slope = self._slope(0, slower[0] if slower else -1)
        return max(times[0] - (sizes[0] - size_bytes) * slope, times[0] * size_bytes / sizes[0])

    def _slope(self, a: int, b: int) -> float:
        return (self.times_us[b] - self.times_us[a]) / (self.sizes[b] - self.sizes[a])

    @staticmethod
    def parse(content: object, where: str) -> Curve:
        """A curve of a topology file.

        Raises:
            TopologyError: with what is wrong and where.
        """
        table = content.get("table") if isinstance(content, Mapping) else None
        if not isinstance(content, Mapping) or not isinstance(table, list) or not table:
            raise TopologyError(f"{where}: got no table of sizes and times, expected one: calibrate again")
        rows = [row if isinstance(row, Mapping) else {} for row in table]
        sizes = [number(r.get("size_bytes"), f"{where}.table[{i}].size_bytes") for i, r in enumerate(rows)]
        times = [number(r.get("time_us"), f"{where}.table[{i}].time_us") for i, r in enumerate(rows)]
        pairs = itertools.pairwise(zip(sizes, times, strict=True))
        if any(size >= next_size or us > next_us for (size, us), (next_size, next_us) in pairs):
            raise TopologyError(
                f"{where}.table: got sizes or times out of order, expected larger sizes that take no less time: "
                "calibrate again"
            )
        return Curve(tuple(int(size) for size in sizes), tuple(times))


def number(value: Any, where: str, *, zero: bool = False) -> float:
    """A field of a topology file that must be a finite number above 0, or at least 0.

    Raises:
        TopologyError: it is not.
    """
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero):
        bound = "at least 0" if zero else "above 0"
        raise TopologyError(f"{where}: got {value!r}, expected a finite number {bound}: calibrate again")
    return float(value)
