"""The bootstrap: resampling, and intervals from the replicates."""

import numpy as np
from numpy.typing import NDArray

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
        interpolated: interpolate between replicates. Otherwise both ends are replicates, as indices have to be.
    """
    tails = [(1 - share) / 2, (1 + share) / 2]
    return np.asarray(
        np.quantile(replicates, tails, axis=0, method="linear" if interpolated else "inverted_cdf")
    )
