"""The cost formulas of `torch.distributed.tensor`, and the robust fit of their two constants.

Pure arithmetic on times in microseconds; `calibrate` says which times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Array = NDArray[np.float64]

GIB = 1024**3  # torch's cost functions divide bytes by 1024^3, whatever "GB/s" their comments say
# The constants below are those of MeshTopoInfo.build_from_mesh and the cost functions beside it, in
# torch/distributed/tensor/_collective_utils.py (2.11 to 2.13).
BASE_LATENCY_US = 6.6  # hard-coded in every cost function, so it is held and not fitted
INTRA_HOST = {"bandwidth_GiBps": 87.7, "latency_us_per_hop": 0.6}
INTER_HOST = {"bandwidth_GiBps": 87.7 * 0.22, "latency_us_per_hop": 2.7}

RING_COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter")
# Where Huber's loss turns from squares to absolute values: residuals of about 20 % are noise here,
# beyond that lie bursts and changes of algorithm.
HUBER_DELTA = 0.2
# A constant whose term is below 1 % of the time at its most telling size cannot be told from noise.
NEGLIGIBLE = 0.01


@dataclass(frozen=True)
class Line:
    """time_us = base + intercept * (its regressor) + slope * (its regressor), both at least 0."""

    intercept: float  # us, or us per hop
    slope: float  # seconds per GiB: the inverse of a bandwidth
    slope_is_bound: bool  # the data only say that the slope is not larger


def hops(collective: str, ranks: int) -> int:
    """Steps of the ring that torch's cost formulas assume."""
    return 2 * (ranks - 1) if collective == "all_reduce" else ranks - 1


def predict_us(
    collective: str,
    size_bytes: float,
    ranks: int,
    *,
    bandwidth_GiBps: float,  # noqa: N803 - the unit, as the topology file spells it
    latency_us_per_hop: float,
) -> float:
    """The stock formula's time, microseconds. size_bytes: the whole tensor, as a group holds it."""
    steps = hops(collective, ranks)
    transfer_s = size_bytes / GIB * steps / ranks / bandwidth_GiBps
    return BASE_LATENCY_US + steps * latency_us_per_hop + transfer_s * 1e6


def accuracy(predicted: Sequence[float], measured: Sequence[float]) -> dict[str, float]:
    """Typical and worst factor between prediction and measurement, 1 being perfect."""
    logs = np.abs(np.log(np.array(predicted) / np.array(measured)))
    return {"geometric_mean_ratio": float(np.exp(logs.mean())), "worst_ratio": float(np.exp(logs.max()))}


def fit_line(base: float, per_intercept: Array, per_slope: Array, sizes: Array, measured: Array) -> Line:
    """Non-negative Huber fit of log(base + a * per_intercept + b * per_slope) to log(measured).

    The slope is kept above what would be NEGLIGIBLE at the largest size: where it ends there, the
    times do not grow with size, and the bandwidth is known from one side only.
    """
    largest, smallest = int(np.argmax(sizes)), int(np.argmin(sizes))
    least_slope = NEGLIGIBLE * measured[largest] / per_slope[largest]
    start = np.array(
        [
            max(measured[smallest] - base, NEGLIGIBLE * measured[smallest]) / per_intercept[smallest],
            max(measured[largest] - measured[smallest], 2 * NEGLIGIBLE * measured[largest])
            / per_slope[largest],
        ]
    )
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
    )
    intercept, slope = (float(x) for x in fitted.x)
    # The solver stays inside its bounds: it comes near zero and never to it.
    if intercept * per_intercept[smallest] < NEGLIGIBLE**2 * measured[smallest]:
        intercept = 0.0
    return Line(intercept, slope, bool(slope < 1.05 * least_slope))


def octave_weights(sizes: Array) -> Array:
    """Every octave of size counts the same, however many points fell into it; the mean is 1."""
    octaves = np.floor(np.log2(sizes))
    weights = np.array([1 / np.sum(octaves == octave) for octave in octaves])
    return np.asarray(weights / weights.mean())


def _huber(weights: Array) -> Any:
    """Huber's loss with a weight per residual, in the form that `least_squares` takes: rho, rho', rho''.

    scipy's own "huber" knows no weights, and weighting the residuals would move the threshold.
    """

    def loss(z: Array) -> Array:
        inside = z <= 1
        root = np.sqrt(np.where(inside, 1.0, z))
        rho = np.stack(
            [
                np.where(inside, z, 2 * root - 1),
                np.where(inside, 1.0, 1 / root),
                np.where(inside, 0.0, -0.5 / root**3),
            ]
        )
        return np.asarray(rho * weights)

    return loss
