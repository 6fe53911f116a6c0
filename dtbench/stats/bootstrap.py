"""The bootstrap: samples drawn again from themselves, and the intervals of what is made of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def resample(values: Array, count: int, rng: np.random.Generator) -> Array:
    """(count, n, ...): so many times as many of the n values as there are, with replacement."""
    return np.asarray(values[rng.integers(len(values), size=(count, len(values)))])


def interval(replicates: Array | NDArray[np.intp], share: float, *, interpolated: bool = True) -> Array:
    """[low, high] of the replicates, of each column where there are several: `share` of them lie between.

    interpolated: else both are replicates themselves, as indices have to be.
    """
    tails = [(1 - share) / 2, (1 + share) / 2]
    return np.asarray(
        np.quantile(replicates, tails, axis=0, method="linear" if interpolated else "inverted_cdf")
    )
