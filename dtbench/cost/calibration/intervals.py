"""Predicts the range of times that a new launch would measure: the intervals of estimates and constants.

Most of the variance is between launches, so a curve of K launches has few independent values. Resampling K = 5 launches
would imply that a sixth launch always lies within their range. In fact it does so 67 % of the time. So `new_launch`
draws from a model, on the log scale:

    new launch = centre + launch effect + residual - error of the centre

- Launch effect: the mean deviation of a launch over all sizes of the curve, drawn from the K measured ones.
- Residual: the remaining deviation at each size, drawn from all launches and sizes and scaled by the scatter of that
  size. It includes the noise of the repetitions.
- Error of the centre: that of a median of K such launches.

Launch effect and residual are scaled up because their means were subtracted. A random factor accounts for estimating a
standard deviation from few launches: it turns a normal distribution into Student's t.

A single launch shows no variance between launches. Its repetitions are resampled, which gives too narrow intervals.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dtbench.cost.calibration.times import QUANTILE, Array, SizeTimes
from dtbench.stats import index_blocks, interval
from dtbench.text.units import interval_or_none

INTERVAL = 0.9
REPLICATES = 400
FITS = 100  # number of replicates to which a line is fitted
SEED = 20240229
# Weight of the pooled scatter, as a number of launches, when it is averaged with the scatter of a single size.
POOLED_LAUNCHES = 4
METHOD = (
    f"{INTERVAL:.0%} interval of what one new launch measures: {REPLICATES} bootstrap replicates (launch effect,"
    f" residual, error of the centre; {FITS} of them refitted for latency and bandwidth), seed {SEED};"
    " with one launch its repetitions alone, which is too narrow"
)


def new_launch(points: Sequence[SizeTimes], count: int = REPLICATES) -> Array:
    """Draws the times in microseconds that new launches may measure: (replicates, points). Deterministic."""
    rng = np.random.default_rng(SEED)
    launches = sorted({launch for point in points for launch in point.launches})
    logs = np.log([[point.by_launch.get(launch, np.nan) for point in points] for launch in launches])
    repeated = np.sum(np.isfinite(logs), axis=0) > 1
    if not repeated.any():
        return _repetitions(points, count, rng)
    deviations = _deviations(logs, repeated, count, rng)
    return np.asarray(
        np.exp(np.nanmedian(logs, axis=0) + deviations[:, 0] - np.median(deviations[:, 1:], axis=1))
    )


def fitted(
    points: Sequence[SizeTimes], fit: Callable[[Array], Sequence[float]]
) -> list[tuple[float, float] | None]:
    """Returns the interval (low, high) over new launches of each constant that `fit` computes from the times.

    It is None if all replicates give the same value.
    """
    constants = np.array([fit(times) for times in new_launch(points, FITS)])
    return [interval_or_none(float(low), float(high)) for low, high in interval(constants, INTERVAL).T]


def _deviations(logs: Array, repeated: NDArray[np.bool_], count: int, rng: np.random.Generator) -> Array:
    """Draws log deviations of launches: (count, 1 new launch + the number of measured launches, points)."""
    repeated_logs = logs[:, repeated]
    deviations = repeated_logs - np.nanmean(repeated_logs, axis=0)
    present = np.isfinite(deviations).any(axis=1)
    effects = np.nanmean(deviations[present], axis=1)
    effects *= np.sqrt(effects.size / (effects.size - 1))
    residuals = deviations[present] - np.nanmean(deviations[present], axis=1, keepdims=True)
    freedom = max(int(np.isfinite(residuals).sum()) - residuals.shape[1] - effects.size + 1, 1)
    residuals *= np.sqrt(np.isfinite(residuals).sum() / freedom)
    scale = np.ones(logs.shape[1])
    scale[repeated] = _scale_by_size(residuals)
    pool = (residuals / scale[repeated])[np.isfinite(residuals)]

    shape = (count, 1 + int(np.max(np.sum(np.isfinite(repeated_logs), axis=0))))
    drawn_effects = rng.choice(effects, shape) * _student_factors(effects.size - 1, count, rng)[:, None]
    drawn_residuals = rng.choice(pool, (*shape, logs.shape[1])) * scale
    return np.asarray(
        drawn_effects[:, :, None] + drawn_residuals * _student_factors(freedom, count, rng)[:, None, None]
    )


def _scale_by_size(residuals: Array) -> Array:
    """Returns the scatter of each size relative to the pooled scatter, shrunk towards 1."""
    pooled = float(np.nanmean(residuals**2))
    if pooled == 0:
        return np.ones(residuals.shape[1])
    ratio = np.nanmean(residuals**2, axis=0) / pooled
    weight = np.isfinite(residuals).sum(axis=0) - 1
    return np.asarray(np.sqrt((weight * ratio + POOLED_LAUNCHES) / (weight + POOLED_LAUNCHES)))


def _student_factors(freedom: int, count: int, rng: np.random.Generator) -> Array:
    """Draws factors that turn normal draws into Student's t with `freedom` degrees of freedom."""
    return np.asarray(np.sqrt(freedom / rng.chisquare(freedom, count)))


def _repetitions(points: Sequence[SizeTimes], count: int, rng: np.random.Generator) -> Array:
    """Resamples each size's samples and returns their quantiles: (replicates, points).

    The indices of the order statistics around the quantile depend only on the number of samples. So they are drawn
    once for all sizes with the same number and shuffled for each, instead of drawing every sample.
    """
    samples = [np.concatenate(list(point.launches.values())) for point in points]
    indices = {length: _neighbours(length, count, rng) for length in sorted(set(map(len, samples)))}
    columns = np.empty((count, len(points)))
    for length, block in index_blocks(map(len, samples)):
        ordered = np.sort([samples[point] for point in block])
        shuffled = rng.permuted(np.tile(np.arange(count), (len(block), 1)), axis=1)
        lower, upper = (np.take_along_axis(ordered, side[shuffled], 1) for side in indices[length])
        columns[:, block] = (lower + (upper - lower) * (QUANTILE * (length - 1) % 1)).T
    return columns


def _neighbours(length: int, count: int, rng: np.random.Generator) -> NDArray[np.int_]:
    """Draws the indices of the order statistics around the quantile of `length` resampled values: (2, replicates).

    The k-th smallest of n numbers between 0 and 1 is the sum of k of n + 1 exponential numbers, over the sum of all
    (Devroye, "Non-Uniform Random Variate Generation", 1986, chapter V).
    """
    k = int(QUANTILE * (length - 1)) + 1
    sums = np.cumsum(rng.standard_gamma([k, 1, length - k], (count, 3)), axis=1)
    return np.minimum(sums[:, :2] / sums[:, 2:] * length, length - 1).astype(int).T
