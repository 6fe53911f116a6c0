"""What one call takes on a mesh dim of a topology, with the interval that one new launch would measure.

The time is the core's (`dtbench_core.cost.curve`). Beyond the table a price is flagged, and its interval widens
by every doubling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median
from typing import Literal

from dtbench.records.topology import Constants, Dim, MeasuredCurve, TableRow
from dtbench_core.cost.curve import Curve
from dtbench_core.cost.ring import Ring, busbw_factor

# Half width of the interval per doubling beyond the table, at least: covers 82 to 100 % of what 56
# public curves measured at 2, 4 and 16 times the size they were cut off at.
BEYOND_HALF_WIDTH = math.log(1.2)
MAX_HALF_WIDTH = 20.0  # a factor of e^20 says that nothing is known, and can be computed with
# Share of the time at the largest size that its slope has to explain: below it the times are latency and noise.
GROWS = 0.1
# A slope of other collectives is this many times as uncertain as one's own.
BORROWED = 2.0


@dataclass(frozen=True)
class Price:
    """Microseconds; low and high: 90 % interval of what one new launch would measure, where both factors are 1; the
    time itself where nothing says how launches scatter.

    size_factor: how far the size lies outside the measured ones; 1 inside.
    ranks_factor: ranks / measured ranks.
    by_formula: the collective was not measured on this dim; torch's ring formula with the dim's constants.
    """

    time_us: float
    low_us: float
    high_us: float
    size_factor: float = 1.0
    ranks_factor: float = 1.0
    by_formula: bool = False

    @property
    def extrapolated(self) -> bool:
        return self.size_factor > 1 or self.ranks_factor != 1 or self.by_formula


def price(curve: MeasuredCurve, size_bytes: float) -> Price:
    """The price at one size of a curve.

    size_bytes: the tensor as one group holds it, at least 1.

    Raises:
        ValueError: a size below 1.
    """
    if not size_bytes >= 1:
        raise ValueError(f"got size_bytes={size_bytes}: expected at least 1")
    first, last = curve.table[0], curve.table[-1]
    time_us = times_of(curve).us(size_bytes)
    if first.size_bytes <= size_bytes <= last.size_bytes:
        low_us, high_us = (times_of(curve, column).us(size_bytes) for column in ("low_us", "high_us"))
        return Price(time_us, low_us, high_us)
    nearest = last if size_bytes > last.size_bytes else first
    beyond = max(size_bytes / nearest.size_bytes, nearest.size_bytes / size_bytes)
    low_us, high_us = _bounds(nearest)
    own = max(high_us / nearest.time_us, nearest.time_us / low_us)
    return _around(time_us, max(math.log(own), BEYOND_HALF_WIDTH) * (1 + math.log2(beyond)), beyond)


def _bounds(row: TableRow) -> tuple[float, float]:
    """Its interval; the time itself where it has none."""
    return row.low_us or row.time_us, row.high_us or row.time_us


def estimate(dim: Dim, collective: str, ranks: int, size_bytes: int) -> Price:
    """One of the RING_COLLECTIVES on a dim. ranks: of a group, at least 2.

    Over other ranks than measured, the measured time is multiplied by the ratio that a ring with the dim's
    bandwidth and latency per hop has, and its interval widens by every doubling of ranks as much as by a
    doubling of size.
    """
    curve = dim.collectives.get(collective)
    if curve is None:
        at = _by_formula(dim, collective, size_bytes)
    elif size_bytes > curve.table[-1].size_bytes and not _grows(curve):
        at = _by_other_slopes(dim, collective, size_bytes)
    else:
        at = price(curve, size_bytes)
    factor = ranks / dim.ranks
    if factor == 1:
        return at
    scale = ring_us(collective, size_bytes, ranks, dim) / ring_us(collective, size_bytes, dim.ranks, dim)
    half_width = max(math.log(at.high_us / at.time_us), math.log(at.time_us / at.low_us))
    per_doubling = max(half_width / (1 + math.log2(at.size_factor)), BEYOND_HALF_WIDTH)
    half_width += per_doubling * abs(math.log2(factor))
    return _around(at.time_us * scale, half_width, at.size_factor, factor, at.by_formula)


def _grows(curve: MeasuredCurve) -> bool:
    """Whether the end of the table tells what more bytes take."""
    last = curve.table[-1]
    return times_of(curve).end_slope() * last.size_bytes >= GROWS * last.time_us


def _by_other_slopes(dim: Dim, collective: str, size_bytes: int) -> Price:
    """Beyond a table whose times do not grow: as the dim's other collectives do for each byte that passes a link,
    else by the dim's bandwidth; without either nothing is known."""
    last = dim.collectives[collective].table[-1]
    beyond = size_bytes / last.size_bytes
    per_byte = [
        times_of(other).end_slope() / busbw_factor(name, dim.ranks)
        for name, other in dim.collectives.items()
        if name != collective and _grows(other)
    ]
    if not per_byte and not dim.bandwidth_is_lower_bound:
        per_byte = [1e6 / (dim.bandwidth_GiBps * 2**30)]
    if not per_byte:
        return _around(last.time_us * beyond, MAX_HALF_WIDTH, beyond)
    slope = median(per_byte) * busbw_factor(collective, dim.ranks)
    low_us, high_us = _bounds(last)
    half_width = max(math.log(high_us / low_us) / 2, BORROWED * BEYOND_HALF_WIDTH)
    return _around(
        last.time_us + (size_bytes - last.size_bytes) * slope, half_width * (1 + math.log2(beyond)), beyond
    )


def _by_formula(dim: Dim, collective: str, size_bytes: int) -> Price:
    """The ring's time over as many ranks as were measured, as far off as the worst point of its fit."""
    smallest, largest = dim.fitted_on.size_bytes
    beyond = max(1.0, size_bytes / largest, smallest / size_bytes)
    half_width = max(math.log(dim.residuals.worst_ratio), BEYOND_HALF_WIDTH) * (1 + math.log2(beyond))
    return _around(ring_us(collective, size_bytes, dim.ranks, dim), half_width, beyond, by_formula=True)


def _around(
    time_us: float, half_width: float, size_factor: float, ranks_factor: float = 1.0, by_formula: bool = False
) -> Price:
    """A price whose interval reaches so far to either side, in the logarithm."""
    spread = math.exp(min(half_width, MAX_HALF_WIDTH))
    return Price(time_us, time_us / spread, time_us * spread, size_factor, ranks_factor, by_formula)


def times_of(curve: MeasuredCurve, column: Literal["time_us", "low_us", "high_us"] = "time_us") -> Curve:
    """A column of a curve's table over size; the times where it has no bounds."""
    return curve.columns[column]


def ring_us(collective: str, size_bytes: float, ranks: int, constants: Constants | Dim) -> float:
    """Microseconds by the ring formula."""
    ring = Ring(ranks, constants.bandwidth_GiBps, constants.latency_us_per_hop)
    return ring.collective_us(collective, size_bytes)
