"""Quantiles of samples, the estimate of a launch, and intervals from bootstrap replicates."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dtbench.grouping import group_by
from dtbench.records.result import Result, estimator_of
from dtbench.records.timing import SHARES, summarize
from dtbench.suite import Case

_K = TypeVar("_K", bound=Hashable)


def order_statistic(values: Collection[float], share: float) -> float:
    """Returns the sorted value at index floor(n * share), without interpolation.

    Raises:
        IndexError: no values.
    """
    return sorted(values)[int(len(values) * share)]


def estimate_s(samples_s: Sequence[float], case: Case | Result) -> float:
    """Returns the estimate of a launch from its samples, the order statistic that `estimator_of` names.

    Raises:
        ValueError: no samples, or one that is negative or not finite.
    """
    return float(getattr(summarize(samples_s), estimator_of(case)))


def estimates_s(samples_s: Sequence[NDArray[np.float64]], results: Sequence[Result]) -> list[float | None]:
    """Returns `estimate_s` for each set of samples; None for an empty one."""
    return batch_quantiles(
        samples_s,
        [
            SHARES[estimator_of(result)] if len(samples) else None
            for samples, result in zip(samples_s, results, strict=True)
        ],
    )


def batch_quantiles(
    samples: Sequence[NDArray[np.float64]], levels: Sequence[float | None]
) -> list[float | None]:
    """Returns the quantile of each set of samples at its level; None where the level is None.

    Sets of equal length are computed together, since numpy's overhead per call exceeds its work.
    """
    quantiles: list[float | None] = [None] * len(samples)
    keys = (
        None if level is None else (len(values), level) for values, level in zip(samples, levels, strict=True)
    )
    for (_, level), indices in index_blocks(keys):
        block = np.quantile(np.stack([samples[index] for index in indices]), level, axis=1)
        for index, value in zip(indices, block.tolist(), strict=True):
            quantiles[index] = value
    return quantiles


def index_blocks(keys: Iterable[_K | None]) -> Iterator[tuple[_K, list[int]]]:
    """Yields the indices of equal keys in blocks, for vectorized work. Keys that are None are skipped."""
    key_by_index = {index: key for index, key in enumerate(keys) if key is not None}
    for key, indices in group_by(key_by_index, key_by_index.__getitem__).items():
        # Blocks of 256 make numpy's overhead per call small and still keep arrays small.
        for first in range(0, len(indices), 256):
            yield key, indices[first : first + 256]


Array = NDArray[np.float64]


def resample(values: Array, count: int, rng: np.random.Generator) -> Array:
    """Draws `count` samples of n values each, with replacement, from n values.

    Args:
        values: shape (n, ...).

    Returns:
        Shape (count, n, ...).
    """
    return np.asarray(values[rng.integers(len(values), size=(count, len(values)))])


def interval(replicates: Array | NDArray[np.intp], share: float, *, interpolated: bool = True) -> Array:
    """Returns [low, high], between which the central `share` of the replicates lies; per column if there are several.

    Args:
        interpolated: interpolate between replicates. False takes both ends from the replicates themselves, which is
            needed if these are indices.
    """
    return np.asarray(
        np.quantile(
            replicates,
            [(1 - share) / 2, (1 + share) / 2],
            axis=0,
            method="linear" if interpolated else "inverted_cdf",
        )
    )
