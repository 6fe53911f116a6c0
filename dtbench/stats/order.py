"""Order statistics of samples.

Quantiles interpolate linearly between the order statistics (definition 7 of Hyndman & Fan, "Sample Quantiles in
Statistical Packages", 1996; numpy's default, and to the last bit what numpy gives).
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dtbench.suite import Case, Result, Timing, estimator_of

_K = TypeVar("_K", bound=Hashable)

# The figures of a `Timing` by the share of the samples below them.
SHARES = {"min": 0.0, "p25": 0.25, "median": 0.5, "p75": 0.75, "p95": 0.95, "max": 1.0}


def quantile(values: Iterable[float], share: float) -> float:
    """The value that so many of the values lie below, in Python alone: numpy's call costs more than a few values do.

    Raises:
        IndexError: no values.
    """
    ordered = sorted(values)
    return _between(ordered, *_place(share, len(ordered)))


def order_statistic(values: Iterable[float], share: float) -> float:
    """As `quantile`, but one of the values themselves, the upper where the share lies between two.

    Raises:
        IndexError: no values.
    """
    ordered = sorted(values)
    return ordered[int(len(ordered) * share)]


def figures_of(samples_s: Sequence[float]) -> list[float]:
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
    figures = dict(zip(SHARES, figures_of([float(s) for s in samples_s]), strict=True))
    return Timing(**figures, mean=math.fsum(samples_s) / len(samples_s), n=len(samples_s))


def estimate_s(samples_s: Sequence[float], of: Case | Result) -> float:
    """What stands for these samples: the order statistic that `dtbench.suite.estimator_of` names.

    Raises:
        ValueError: no samples, or one that is negative or not finite.
    """
    return float(getattr(summarize(samples_s), estimator_of(of)))


def estimates_s(samples_s: Sequence[NDArray[np.float64]], of: Sequence[Result]) -> list[float | None]:
    """`estimate_s` of many; None where there are no samples."""
    shares = [
        SHARES[estimator_of(one)] if len(samples) else None
        for samples, one in zip(samples_s, of, strict=True)
    ]
    return quantiles_of(samples_s, shares)


def quantiles_of(
    samples: Sequence[NDArray[np.float64]], shares: Sequence[float | None]
) -> list[float | None]:
    """`quantile` of many, as many as are equally long at once, since numpy's call takes longer than its work; None
    where no share is asked for."""
    quantiles: list[float | None] = [None] * len(samples)
    keys = (None if share is None else (len(of), share) for of, share in zip(samples, shares, strict=True))
    for (_, share), places in blocks_of(keys):
        at_once = np.quantile(np.stack([samples[place] for place in places]), share, axis=1)
        for place, figure in zip(places, at_once.tolist(), strict=True):
            quantiles[place] = figure
    return quantiles


def blocks_of(keys: Iterable[_K | None]) -> Iterator[tuple[_K, list[int]]]:
    """The places of equal keys, a few hundred at a time, for work on many at once. Those of None are left out."""
    blocks: dict[_K, list[int]] = {}
    for place, key in enumerate(keys):
        if key is not None:
            blocks.setdefault(key, []).append(place)
    for key, places in blocks.items():
        # So many that numpy's calls cost little, and arrays stay small.
        for first in range(0, len(places), 256):
            yield key, places[first : first + 256]
