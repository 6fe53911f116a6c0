"""The robust fits: a latency and a bandwidth, and times that rise with size.

Pure arithmetic on times in microseconds; `times` says which times. What is fitted are times, never bus
bandwidths. The loss is Huber's on log(predicted / measured), so that 10 % off counts the same at 1 KiB
and at 1 GiB; plain least squares would fit the largest sizes alone. Sizes count by octave, however
densely they were swept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, least_squares

from dtbench_core.cost.ring import BASE_LATENCY_US, GIB, hops

Array = NDArray[np.float64]

# Where Huber's loss turns from squares to absolute values: residuals of about 20 % are noise here,
# beyond that lie bursts and changes of algorithm.
HUBER_DELTA = 0.2
# A constant whose term is below 1 % of the time at its most telling size cannot be told from noise.
NEGLIGIBLE = 0.01
# The solver stops at this relative step: a hundredth of what any of these constants is known to.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class FittedLine:
    """time_us = base + intercept * (its regressor) + slope * (its regressor), both at least 0."""

    intercept: float  # us, or us per hop
    slope: float  # seconds per GiB: the inverse of a bandwidth
    slope_is_bound: bool  # the data only say that the slope is not larger


class Accuracy(NamedTuple):
    """Typical and worst factor between prediction and measurement, 1 being perfect."""

    geometric_mean_ratio: float
    worst_ratio: float

    @staticmethod
    def of(predicted: Sequence[float] | Array, measured: Sequence[float] | Array) -> Accuracy:
        logs = np.abs(np.log(np.asarray(predicted) / np.asarray(measured)))
        return Accuracy(float(np.exp(logs.mean())), float(np.exp(logs.max())))


def fit_ring(collectives: Sequence[str], sizes: Array, ranks: int, measured_us: Array) -> FittedLine:
    """The ring's two constants, one pair for all collectives of a mesh dim; element i is one point."""
    steps = np.array([hops(name, ranks) for name in collectives], dtype=float)
    return fit_line(BASE_LATENCY_US, steps, steps * sizes / GIB / ranks * 1e6, sizes, measured_us)


def fit_curve(sizes: Array, measured_us: Array) -> FittedLine:
    """Latency and inverse bandwidth of one curve: time_us = intercept + slope * size_GiB * 1e6."""
    return fit_line(0.0, np.ones_like(sizes), sizes / GIB * 1e6, sizes, measured_us)


def fit_line(
    base: float, per_intercept: Array, per_slope: Array, sizes: Array, measured: Array
) -> FittedLine:
    """Non-negative Huber fit of log(base + a * per_intercept + b * per_slope) to log(measured).

    The slope is kept above what would be NEGLIGIBLE at the largest size: where it ends there, the
    times do not grow with size, and the bandwidth is known from one side only.
    """
    largest, smallest = int(np.argmax(sizes)), int(np.argmin(sizes))
    least_slope = NEGLIGIBLE * measured[largest] / per_slope[largest]
    least, most = measured[smallest], measured[largest]
    latency, transfer = max(least - base, NEGLIGIBLE * least), max(most - least, 2 * NEGLIGIBLE * most)
    start = np.array([latency / per_intercept[smallest], transfer / per_slope[largest]])
    columns = np.stack([per_intercept, per_slope], axis=1)

    def residuals(x: Array) -> Array:
        return np.asarray(np.log((base + columns @ x) / measured))

    def jacobian(x: Array) -> Array:
        return np.asarray(columns / (base + columns @ x)[:, None])

    fitted = least_squares(
        residuals,
        start,
        jac=jacobian,
        bounds=([0.0, least_slope], [np.inf, np.inf]),
        x_scale=start,
        loss=_huber(octave_weights(sizes)),
        f_scale=HUBER_DELTA,
        xtol=TOLERANCE,
    )
    intercept, slope = (float(x) for x in fitted.x)
    # The solver stays inside its bounds: it comes near zero and never to it.
    if intercept * per_intercept[smallest] < NEGLIGIBLE**2 * measured[smallest]:
        intercept = 0.0
    return FittedLine(intercept, slope, bool(slope < 1.05 * least_slope))


def rising(times_us: Array) -> Array:
    """The nearest times that do not fall with size, in the logarithm; times_us: by ascending size.

    A larger tensor never has to take less time: where it was measured to, both count the same.
    """
    return np.asarray(np.exp(isotonic_regression(np.log(times_us)).x))


def octave_weights(sizes: Array) -> Array:
    """Every octave of size counts the same, however many points fell into it; the mean is 1."""
    _, octave, points = np.unique(np.floor(np.log2(sizes)), return_inverse=True, return_counts=True)
    weights = 1 / points[octave]
    return np.asarray(weights / weights.mean())


def _huber(weights: Array) -> Callable[..., Array]:
    """Huber's loss with a weight per residual, in the form that `least_squares` takes: rho, rho', rho''.

    scipy's own "huber" knows no weights, and weighting the residuals would move the threshold.
    """

    def loss(z: Array) -> Array:
        inside = z <= 1
        root = np.sqrt(np.maximum(z, 1.0))  # 1 inside
        rho = (np.where(inside, z, 2 * root - 1), 1 / root, np.where(inside, 0.0, -0.5 / root**3))
        return np.stack(rho) * weights

    return loss
