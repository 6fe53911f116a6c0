"""Order statistics of the samples of one launch.

Quantiles interpolate linearly between the order statistics (definition 7 of Hyndman & Fan, "Sample Quantiles in
Statistical Packages", 1996; numpy's default, with results identical to numpy's to the last bit).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from dtbench.fields import Amount, Whole

# The figures of a `Timing` by the share of the samples below them.
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
    """The value that so many of the values lie below, in Python alone: numpy's call costs more than a few values do.

    Raises:
        IndexError: no values.
    """
    ordered = sorted(values)
    return _between(ordered, *_place(share, len(ordered)))


def timing_quantiles(samples_s: Sequence[float]) -> list[float]:
    """The samples' `SHARES`; two between the same neighbours may round to the wrong order, and are put in it."""
    ordered = sorted(samples_s)
    return list(accumulate((_between(ordered, *place) for place in _places(len(ordered))), max))


@lru_cache(1024)
def _places(n: int) -> tuple[tuple[int, int, float], ...]:
    return tuple(_place(share, n) for share in SHARES.values())


def _place(share: float, n: int) -> tuple[int, int, float]:
    """Of a quantile of `n` ordered numbers the neighbours, and how far it lies from the lower to the upper."""
    at = share * (n - 1)
    return math.floor(at), math.ceil(at), at % 1


def _between(ordered: Sequence[float], low: int, high: int, part: float) -> float:
    """From the nearer end, as numpy does."""
    below, above = ordered[low], ordered[high]
    apart = above - below
    return below + apart * part if part < 0.5 else above - apart * (1 - part)


def summarize(samples_s: Sequence[float]) -> Timing:
    """The order statistics of one launch's samples.

    Raises:
        ValueError: no samples, or one that is negative or not finite.
    """
    if not samples_s:
        raise ValueError("got no samples to summarize: expected at least one")
    bad = next((s for s in samples_s if not math.isfinite(s) or s < 0), None)
    if bad is not None:
        raise ValueError(f"got a sample of {bad} s: expected finite times of at least 0")
    figures = dict(zip(SHARES, timing_quantiles([float(s) for s in samples_s]), strict=True))
    return Timing(**figures, mean=math.fsum(samples_s) / len(samples_s), n=len(samples_s))
