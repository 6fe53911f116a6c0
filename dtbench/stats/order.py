"""Order statistics of samples: the estimate of a launch, and quantiles of many sample sets at once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dtbench.records.result import Result, estimator_of
from dtbench.records.timing import SHARES, summarize
from dtbench.suite import Case

_K = TypeVar("_K", bound=Hashable)


def order_statistic(values: Iterable[float], share: float) -> float:
    """As `quantile`, but one of the values themselves, the upper where the share lies between two.

    Raises:
        IndexError: no values.
    """
    ordered = sorted(values)
    return ordered[int(len(ordered) * share)]


def estimate_s(samples_s: Sequence[float], of: Case | Result) -> float:
    """What stands for these samples: the order statistic that `dtbench.records.result.estimator_of` names.

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
    return batch_quantiles(samples_s, shares)


def batch_quantiles(
    samples: Sequence[NDArray[np.float64]], shares: Sequence[float | None]
) -> list[float | None]:
    """`quantile` of many, as many as are equally long at once, since numpy's call takes longer than its work; None
    where no share is asked for."""
    quantiles: list[float | None] = [None] * len(samples)
    keys = (None if share is None else (len(of), share) for of, share in zip(samples, shares, strict=True))
    for (_, share), places in index_blocks(keys):
        at_once = np.quantile(np.stack([samples[place] for place in places]), share, axis=1)
        for place, figure in zip(places, at_once.tolist(), strict=True):
            quantiles[place] = figure
    return quantiles


def index_blocks(keys: Iterable[_K | None]) -> Iterator[tuple[_K, list[int]]]:
    """The places of equal keys, a few hundred at a time, for work on many at once. Those of None are left out."""
    blocks: dict[_K, list[int]] = {}
    for place, key in enumerate(keys):
        if key is not None:
            blocks.setdefault(key, []).append(place)
    for key, places in blocks.items():
        # So many that numpy's calls cost little, and arrays stay small.
        for first in range(0, len(places), 256):
            yield key, places[first : first + 256]
