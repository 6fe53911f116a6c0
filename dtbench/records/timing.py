"""Order statistics of the samples of one launch.

Quantiles interpolate linearly between the order statistics (definition 7 of Hyndman & Fan, "Sample Quantiles in
Statistical Packages", 1996; numpy's default, with results identical to numpy's to the last bit).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from dtbench.fields import Amount, Whole

# Statistic of `Timing` -> its quantile.
SHARES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


@dataclass(frozen=True, slots=True)
class Timing:
    """Order statistics of the samples, seconds per call."""

    min: Amount
    p25: Amount
    median: Amount
    p75: Amount
    p95: Amount
    max: Amount
    mean: Amount
    n: Whole


def quantile(values: Iterable[float], share: float) -> float:
    """Returns a quantile. For few values, this is faster than a call of numpy.

    Args:
        share: the quantile, 0 to 1.

    Raises:
        IndexError: `values` is empty.
    """
    ordered = sorted(values)
    return _interpolate(ordered, *_neighbours(share, len(ordered)))


def timing_quantiles(samples_s: Sequence[float]) -> list[float]:
    """Returns the quantiles in `SHARES`, ascending even if rounding would swap two close ones."""
    ordered = sorted(samples_s)
    return list(
        accumulate((_interpolate(ordered, *neighbours) for neighbours in _all_neighbours(len(ordered))), max)
    )


@lru_cache(1024)
def _all_neighbours(n: int) -> tuple[tuple[int, int, float], ...]:
    return tuple(_neighbours(share, n) for share in SHARES.values())


def _neighbours(share: float, n: int) -> tuple[int, int, float]:
    """Returns the two order statistics around a quantile of `n` numbers, and the interpolation weight."""
    position = share * (n - 1)
    return math.floor(position), math.ceil(position), position % 1


def _interpolate(ordered: Sequence[float], lower: int, upper: int, weight: float) -> float:
    """Interpolates from the nearer neighbour, like numpy."""
    difference = ordered[upper] - ordered[lower]
    return (
        ordered[lower] + difference * weight if weight < 0.5 else ordered[upper] - difference * (1 - weight)
    )


def summarize(samples_s: Sequence[float]) -> Timing:
    """Returns the statistics of the samples of one launch.

    Raises:
        ValueError: `samples_s` is empty, or a sample is negative or not finite.
    """
    if not samples_s:
        raise ValueError("got no samples to summarize: expected at least one")
    if (bad := next((s for s in samples_s if not math.isfinite(s) or s < 0), None)) is not None:
        raise ValueError(f"got a sample of {bad} s: expected finite times of at least 0")
    figures = dict(zip(SHARES, timing_quantiles([float(s) for s in samples_s]), strict=True))
    return Timing(**figures, mean=math.fsum(samples_s) / len(samples_s), n=len(samples_s))
