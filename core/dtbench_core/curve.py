"""Measured time over size, of one collective or change of placement on one mesh dim.

Between two measured sizes the logarithm of the time is a straight line in the logarithm of the size.
Outside, a fitted line `alpha_us + size / beta` takes over, but never one that falls behind the nearest
measured time. A single measured size without a line stands for all smaller ones; larger ones take
proportionally longer.
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


@dataclass(frozen=True)
class Curve:
    """sizes: bytes of the tensor as one group holds it, ascending. times_us: at these sizes, never falling.

    alpha_us, beta_gib_s: of the line outside, or None both.
    """

    sizes: tuple[int, ...]
    times_us: tuple[float, ...]
    alpha_us: float | None = None
    beta_gib_s: float | None = None

    def us(self, size_bytes: float) -> float:
        """Microseconds at this size."""
        sizes, times = self.sizes, self.times_us
        if size_bytes < sizes[0]:
            return times[0] if self.alpha_us is None else min(self._line(size_bytes), times[0])
        if size_bytes > sizes[-1]:
            beyond = times[-1] * size_bytes / sizes[-1]
            return beyond if self.alpha_us is None else max(self._line(size_bytes), times[-1])
        right = bisect_left(sizes, size_bytes)
        if sizes[right] == size_bytes:
            return times[right]
        left = right - 1
        share = math.log(size_bytes / sizes[left]) / math.log(sizes[right] / sizes[left])
        return times[left] * math.exp(share * math.log(times[right] / times[left]))

    def _line(self, size_bytes: float) -> float:
        assert self.alpha_us is not None and self.beta_gib_s is not None
        return self.alpha_us + size_bytes / GIB / self.beta_gib_s * 1e6

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
        line: list[float | None] = [None, None]
        if content.get("beta_GiBps") is not None:
            line[0] = number(content.get("alpha_us"), f"{where}.alpha_us", zero=True)
            line[1] = number(content.get("beta_GiBps"), f"{where}.beta_GiBps")
        return Curve(tuple(int(size) for size in sizes), tuple(times), line[0], line[1])


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
