"""What one new launch would measure: the spread that prices and constants are given with.

Most of the variance lies between launches, so a curve of K launches holds few independent values, and to
resample K = 5 of them is to claim that a sixth lies among them: it does 67 % of the time. `new_launch`
therefore draws from a model of what differs, on the log scale:

    new launch = centre + launch effect + rest - error of the centre

*Launch effect*: a launch's mean deviation over all sizes of the curve, one of the K found. *Rest*: what
is left at each size, of all launches and sizes pooled, shrunk towards how much that size itself scatters;
the noise of the repetitions is in it, and drawing that again would count it twice. Both are inflated for
the mean taken out, and by a random factor for a standard deviation that few launches barely tell: the
one that makes Student's t of a normal distribution. *Error of the centre*: that of a median of K such
launches.

With one launch there is no such spread to see: its repetitions are resampled, and the result is too narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dtbench.cost.calibration.times import QUANTILE, Array, SizeTimes
from dtbench.stats import index_blocks, interval
from dtbench.text.units import interval_or_none

INTERVAL = 0.9
REPLICATES = 400
FITS = 100  # replicates that a line is fitted to
SEED = 20240229
# A size's own scatter counts by its launches, the pooled one as if it came from so many.
POOLED_COUNTS_AS = 4
METHOD = (
    f"{INTERVAL:.0%} interval of what one new launch measures: {REPLICATES} bootstrap replicates (launch effect,"
    f" rest, error of the centre; {FITS} of them refitted for latency and bandwidth), seed {SEED};"
    " with one launch its repetitions alone, which is too narrow"
)


def new_launch(points: Sequence[SizeTimes], count: int = REPLICATES) -> Array:
    """Microseconds that a new launch may measure: (replicates, points). The same points give the same."""
    rng = np.random.default_rng(SEED)
    launches = sorted({launch for p in points for launch in p.launches})
    logs = np.log([[p.by_launch.get(launch, np.nan) for p in points] for launch in launches])
    repeated = np.sum(np.isfinite(logs), axis=0) > 1
    if not repeated.any():
        return _repetitions(points, count, rng)
    centre = np.nanmedian(logs, axis=0)
    drawn = _deviations(logs, repeated, count, rng)
    return np.asarray(np.exp(centre + drawn[:, 0] - np.median(drawn[:, 1:], axis=1)))


def fitted(
    points: Sequence[SizeTimes], fit: Callable[[Array], Sequence[float]]
) -> list[tuple[float, float] | None]:
    """(low, high) of each constant that `fit` makes of the points' times, over new launches; None where all that was
    measured gives one value."""
    constants = np.array([fit(times) for times in new_launch(points, FITS)])
    return [interval_or_none(float(low), float(high)) for low, high in interval(constants, INTERVAL).T]


def _deviations(logs: Array, repeated: NDArray[np.bool_], count: int, rng: np.random.Generator) -> Array:
    """Log deviations of drawn launches: (count, 1 new launch + as many as were measured, points)."""
    seen = logs[:, repeated]
    launches = int(np.max(np.sum(np.isfinite(seen), axis=0)))
    deviations = seen - np.nanmean(seen, axis=0)
    present = np.isfinite(deviations).any(axis=1)
    effects = np.nanmean(deviations[present], axis=1)
    effects *= np.sqrt(effects.size / (effects.size - 1))
    rest = deviations[present] - np.nanmean(deviations[present], axis=1, keepdims=True)
    freedom = max(int(np.isfinite(rest).sum()) - rest.shape[1] - effects.size + 1, 1)
    rest *= np.sqrt(np.isfinite(rest).sum() / freedom)
    scale = np.ones(logs.shape[1])
    scale[repeated] = _own_scale(rest)
    pool = (rest / scale[repeated])[np.isfinite(rest)]

    size = (count, launches + 1)
    drawn = rng.choice(effects, size) * _student(effects.size - 1, count, rng)[:, None]
    noise = rng.choice(pool, (*size, logs.shape[1])) * scale * _student(freedom, count, rng)[:, None, None]
    return np.asarray(drawn[:, :, None] + noise)


def _own_scale(rest: Array) -> Array:
    """How much more than the others each size scatters: between its own estimate and 1."""
    pooled = float(np.nanmean(rest**2))
    if pooled == 0:
        return np.ones(rest.shape[1])
    own = np.nanmean(rest**2, axis=0) / pooled
    weight = np.isfinite(rest).sum(axis=0) - 1
    return np.asarray(np.sqrt((weight * own + POOLED_COUNTS_AS) / (weight + POOLED_COUNTS_AS)))


def _student(freedom: int, count: int, rng: np.random.Generator) -> Array:
    """Factors that turn normal draws into Student's t of so many degrees of freedom."""
    return np.asarray(np.sqrt(freedom / rng.chisquare(freedom, count)))


def _repetitions(points: Sequence[SizeTimes], count: int, rng: np.random.Generator) -> Array:
    """Quantiles of each size's samples, drawn again with replacement: (replicates, points).

    Which ordered samples lie beside the quantile depends on their number alone. So their indices are drawn once for
    all sizes of one number, and shuffled for each: the samples need not be drawn one by one.
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
    """Indices of the ordered samples next to the quantile of `length` draws with replacement: (2, replicates).

    The k-th smallest of n numbers between 0 and 1 is the sum of k of n + 1 exponential numbers, over the sum of all
    (Devroye, "Non-Uniform Random Variate Generation", 1986, chapter V).
    """
    k = int(QUANTILE * (length - 1)) + 1
    sums = np.cumsum(rng.standard_gamma([k, 1, length - k], (count, 3)), axis=1)
    return np.minimum(sums[:, :2] / sums[:, 2:] * length, length - 1).astype(int).T
