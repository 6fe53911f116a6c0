"""Robust fits of a latency and a bandwidth, and of monotone curves, to times in microseconds.

The loss is Huber's on log(predicted / measured), so that an error of 10 % weighs the same at 1 KiB and at 1 GiB. Plain
least squares would fit the largest sizes alone. Each octave of sizes has the same weight, however many sizes it has.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import isotonic_regression, least_squares

from dtbench_core.cost.ring import BASE_LATENCY_US, GIB, hops

Array = NDArray[np.float64]

# Huber's loss is quadratic up to this residual: deviations of about 20 % are noise, larger ones are bursts and changes
# of the algorithm.
HUBER_DELTA = 0.2
# A latency or bandwidth is indistinguishable from noise if it contributes less than 1 % even at the size where it
# contributes most.
NEGLIGIBLE = 0.01
# Relative step at which the solver stops: 1/100 of the accuracy to which such constants can be measured.
TOLERANCE = 1e-5


@dataclass(frozen=True)
class FittedLine:
    """A line fitted to times in microseconds, see `fit_line`. Both constants are at least 0.

    Attributes:
        intercept: us, or us per hop.
        slope: seconds per GiB, the inverse of a bandwidth.
        slope_is_bound: the data only show that the slope is not larger.
    """

    intercept: float
    slope: float
    slope_is_bound: bool


class Accuracy(NamedTuple):
    """The typical and the worst factor between prediction and measurement; 1 is perfect."""

    geometric_mean_ratio: float
    worst_ratio: float

    @staticmethod
    def of(predicted: Sequence[float] | Array, measured: Sequence[float] | Array) -> "Accuracy":
        logs = np.abs(np.log(np.asarray(predicted) / np.asarray(measured)))
        return Accuracy(float(np.exp(logs.mean())), float(np.exp(logs.max())))


def fit_ring(collectives: Sequence[str], sizes: Array, ranks: int, measured_us: Array) -> FittedLine:
    """Fits the ring's latency and bandwidth to all collectives of a mesh dim. Element i of the arguments is a point."""
    steps = np.array([hops(name, ranks) for name in collectives], dtype=float)
    return fit_line(BASE_LATENCY_US, steps, steps * sizes / GIB / ranks * 1e6, sizes, measured_us)


def fit_curve(sizes: Array, measured_us: Array) -> FittedLine:
    """Fits latency and inverse bandwidth of a curve: time_us = intercept + slope * size_GiB * 1e6."""
    return fit_line(0.0, np.ones_like(sizes), sizes / GIB * 1e6, sizes, measured_us)


def fit_line(
    base: float, per_intercept: Array, per_slope: Array, sizes: Array, measured: Array
) -> FittedLine:
    """Fits log(base + intercept * per_intercept + slope * per_slope) to log(measured), both constants at least 0.

    The slope has a lower limit: its share of the time at the largest size is at least NEGLIGIBLE. At that limit the
    times do not grow with size, so only a lower bound of the bandwidth is known.
    """
    largest, smallest = int(np.argmax(sizes)), int(np.argmin(sizes))
    min_slope = NEGLIGIBLE * measured[largest] / per_slope[largest]
    first, last = measured[smallest], measured[largest]
    latency, transfer = max(first - base, NEGLIGIBLE * first), max(last - first, 2 * NEGLIGIBLE * last)
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
        bounds=([0.0, min_slope], [np.inf, np.inf]),
        x_scale=start,
        loss=_huber(octave_weights(sizes)),
        f_scale=HUBER_DELTA,
        xtol=TOLERANCE,
    )
    intercept, slope = (float(x) for x in fitted.x)
    # The solver stays strictly inside its bounds, so it never returns exactly 0.
    if intercept * per_intercept[smallest] < NEGLIGIBLE**2 * measured[smallest]:
        intercept = 0.0
    return FittedLine(intercept, slope, bool(slope < 1.05 * min_slope))


def rising(times_us: Array) -> Array:
    """Returns the nearest times, on a log scale, that never fall with size.

    Args:
        times_us: times by ascending size.
    """
    return np.asarray(np.exp(isotonic_regression(np.log(times_us)).x))


def octave_weights(sizes: Array) -> Array:
    """Returns a weight for each size, with the same sum for every octave of sizes and a mean of 1."""
    _, octave, points = np.unique(np.floor(np.log2(sizes)), return_inverse=True, return_counts=True)
    weights = 1 / points[octave]
    return np.asarray(weights / weights.mean())


def _huber(weights: Array) -> Callable[..., Array]:
    """Returns Huber's loss with a weight per residual, in the form for `least_squares`: rho, rho', rho''.

    scipy's "huber" has no weights, and weighting the residuals instead would move its threshold.
    """

    def loss(z: Array) -> Array:
        is_quadratic = z <= 1
        root = np.sqrt(np.maximum(z, 1.0))  # 1 in the quadratic part
        rho = (
            np.where(is_quadratic, z, 2 * root - 1),
            1 / root,
            np.where(is_quadratic, 0.0, -0.5 / root**3),
        )
        return np.stack(rho) * weights

    return loss
