"""Estimates the time of a call on a mesh dim of a topology, with the interval that a new launch would measure.

Times come from the curve (`dtbench_core.cost.curve`). Outside the measured sizes an estimate is marked as extrapolated,
and its interval widens with every doubling.
"""

import math
from dataclasses import dataclass
from statistics import median

from dtbench.records.topology import Constants, Dim, MeasuredCurve, TableRow
from dtbench_core.cost.ring import Ring, busbw_factor

# Minimum half width of the interval (log scale) per doubling outside the table. 56 public curves were cut off, and this
# covers 82 to 100 % of their values at 2, 4 and 16 times the cut-off size.
EXTRAPOLATED_HALF_WIDTH = math.log(1.2)
MAX_HALF_WIDTH = 20.0  # the factor e^20 means "unknown", but is finite
# If the slope explains less than this share of the time at the largest size, the times are latency and noise.
MIN_SLOPE_SHARE = 0.1
# A slope taken from other collectives is this many times as uncertain as the collective's own.
OTHER_SLOPE_UNCERTAINTY = 2.0


@dataclass(frozen=True)
class CallEstimate:
    """The estimated time of a call.

    Attributes:
        time_us: microseconds.
        low_us: lower end of the 90 % interval of what a new launch would measure; `time_us` if the scatter between
            launches is unknown. Wider than 90 % if the estimate is extrapolated.
        high_us: upper end of the interval.
        size_factor: ratio of the size to the nearest measured one, at least 1.
        ranks_factor: ranks / measured ranks.
        by_formula: the collective was not measured on this dim; the estimate is torch's ring formula with the dim's
            constants.
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


def estimate_call(curve: MeasuredCurve, size_bytes: float) -> CallEstimate:
    """Estimates the time of a call from its curve.

    Args:
        size_bytes: the size of the tensor of one group.

    Raises:
        ValueError: the size is below 1.
    """
    if not size_bytes >= 1:
        raise ValueError(f"got size_bytes={size_bytes}: expected at least 1")
    first, last = curve.table[0], curve.table[-1]
    time_us = curve.columns["time_us"].us(size_bytes)
    if first.size_bytes <= size_bytes <= last.size_bytes:
        low_us, high_us = (curve.columns[column].us(size_bytes) for column in ("low_us", "high_us"))
        return CallEstimate(time_us, low_us, high_us)
    nearest = last if size_bytes > last.size_bytes else first
    factor = max(size_bytes / nearest.size_bytes, nearest.size_bytes / size_bytes)
    low_us, high_us = _bounds(nearest)
    spread = max(high_us / nearest.time_us, nearest.time_us / low_us)
    half_width = max(math.log(spread), EXTRAPOLATED_HALF_WIDTH) * (1 + math.log2(factor))
    return _with_half_width(time_us, half_width, factor)


def _bounds(row: TableRow) -> tuple[float, float]:
    """Returns the interval of a row. For a row without an interval, both ends are its time."""
    return row.low_us or row.time_us, row.high_us or row.time_us


def estimate_collective(dim: Dim, collective: str, ranks: int, size_bytes: int) -> CallEstimate:
    """Estimates one of the RING_COLLECTIVES on a dim.

    For a number of ranks that was not measured, the time is scaled like that of a ring with the dim's bandwidth and
    latency per hop. Each doubling of ranks widens the interval as much as a doubling of the size.

    Args:
        ranks: ranks per group, at least 2.
        size_bytes: the size of the tensor of one group.
    """
    if (curve := dim.collectives.get(collective)) is None:
        estimated = _by_formula(dim, collective, size_bytes)
    elif size_bytes > curve.table[-1].size_bytes and not _grows(curve):
        estimated = _by_other_slopes(dim, collective, size_bytes)
    else:
        estimated = estimate_call(curve, size_bytes)
    factor = ranks / dim.ranks
    if factor == 1:
        return estimated
    scale = ring_us(collective, size_bytes, ranks, dim) / ring_us(collective, size_bytes, dim.ranks, dim)
    half_width = max(
        math.log(estimated.high_us / estimated.time_us), math.log(estimated.time_us / estimated.low_us)
    )
    per_doubling = max(half_width / (1 + math.log2(estimated.size_factor)), EXTRAPOLATED_HALF_WIDTH)
    half_width += per_doubling * abs(math.log2(factor))
    return _with_half_width(
        estimated.time_us * scale, half_width, estimated.size_factor, factor, estimated.by_formula
    )


def _grows(curve: MeasuredCurve) -> bool:
    """Whether the times at the end of the table grow with size."""
    last = curve.table[-1]
    return curve.columns["time_us"].end_slope() * last.size_bytes >= MIN_SLOPE_SHARE * last.time_us


def _by_other_slopes(dim: Dim, collective: str, size_bytes: int) -> CallEstimate:
    """Extrapolates a table whose times do not grow with size.

    The time per byte over a link comes from the dim's other collectives, else from the dim's bandwidth. Without either,
    the interval is practically unlimited.
    """
    last = dim.collectives[collective].table[-1]
    factor = size_bytes / last.size_bytes
    per_byte = [
        curve.columns["time_us"].end_slope() / busbw_factor(name, dim.ranks)
        for name, curve in dim.collectives.items()
        if name != collective and _grows(curve)
    ]
    if not per_byte and not dim.bandwidth_is_lower_bound:
        per_byte = [1e6 / (dim.bandwidth_GiBps * 2**30)]
    if not per_byte:
        return _with_half_width(last.time_us * factor, MAX_HALF_WIDTH, factor)
    slope = median(per_byte) * busbw_factor(collective, dim.ranks)
    low_us, high_us = _bounds(last)
    half_width = max(math.log(high_us / low_us) / 2, OTHER_SLOPE_UNCERTAINTY * EXTRAPOLATED_HALF_WIDTH)
    time_us = last.time_us + (size_bytes - last.size_bytes) * slope
    return _with_half_width(time_us, half_width * (1 + math.log2(factor)), factor)


def _by_formula(dim: Dim, collective: str, size_bytes: int) -> CallEstimate:
    """Estimates by the ring formula over the measured ranks, as uncertain as the worst point of its fit."""
    smallest, largest = dim.fitted_on.size_bytes
    factor = max(1.0, size_bytes / largest, smallest / size_bytes)
    half_width = max(math.log(dim.residuals.worst_ratio), EXTRAPOLATED_HALF_WIDTH) * (1 + math.log2(factor))
    return _with_half_width(
        ring_us(collective, size_bytes, dim.ranks, dim), half_width, factor, by_formula=True
    )


def _with_half_width(
    time_us: float, half_width: float, size_factor: float, ranks_factor: float = 1.0, by_formula: bool = False
) -> CallEstimate:
    """Returns an estimate with the given half width of its interval, on a log scale."""
    spread = math.exp(min(half_width, MAX_HALF_WIDTH))
    return CallEstimate(time_us, time_us / spread, time_us * spread, size_factor, ranks_factor, by_formula)


def ring_us(collective: str, size_bytes: float, ranks: int, constants: Constants | Dim) -> float:
    """Returns the microseconds of the ring formula."""
    return Ring(ranks, constants.bandwidth_GiBps, constants.latency_us_per_hop).collective_us(
        collective, size_bytes
    )
