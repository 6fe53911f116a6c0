"""90 % intervals hold nine of ten new launches, for launches with a known spread."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from dtbench.cost.calibration import intervals
from dtbench.cost.calibration.times import QUANTILE, Launch, SizeTimes, points_of
from dtbench.stats import interval

Array = NDArray[np.float64]
Draw = Callable[..., Array]

SIZES = [1024 * 4**k for k in range(8)]
REPETITIONS, NEW = 20, 5


def point(size: int, launches: dict[Launch, Array]) -> SizeTimes:
    return points_of({size: launches})[0]


def draws(tails: str, rng: np.random.Generator) -> Draw:
    """Values of standard deviation 1: normal, or Student's t of 3 degrees of freedom."""
    if tails == "normal":
        return lambda size=(): np.asarray(rng.normal(size=size))
    return lambda size=(): np.asarray(rng.standard_t(3, size) / np.sqrt(3))


def coverage(
    launches: int, common: float, own: Array, tails: str = "normal", machines: int = 60
) -> tuple[float, float]:
    """Share of new launches inside, and mean half width in logs.

    common: sd of what a launch does to all sizes; own: sd of what it does to each size.
    """
    rng = np.random.default_rng(7)
    draw = draws(tails, rng)
    centre = np.log(100 + np.array(SIZES) * 1e-4)

    def launch() -> Array:  # (sizes, repetitions) us
        exact = centre + common * draw() + own * draw(len(SIZES))
        return np.exp(exact[:, None] + rng.normal(0, 0.05, (len(SIZES), REPETITIONS)))

    inside, widths = [], []
    for _ in range(machines):
        measured = [launch() for _ in range(launches)]
        points = [
            point(size, {("r", k): m[i] for k, m in enumerate(measured)}) for i, size in enumerate(SIZES)
        ]
        low, high = interval(intervals.new_launch(points, 200), intervals.INTERVAL)
        widths.append(np.log(high / low) / 2)
        for _ in range(NEW):
            new = np.quantile(launch(), QUANTILE, axis=1)
            inside.append((low <= new) & (new <= high))
    return float(np.mean(inside)), float(np.mean(widths))


@pytest.mark.parametrize("tails", ["normal", "heavy"])
@pytest.mark.parametrize(("common", "own"), [(0.1, 0.02), (0.1, 0.1), (0.0, 0.1)])
def test_intervals_hold_nine_of_ten_new_launches(common: float, own: float, tails: str) -> None:
    share, width = coverage(5, common, np.full(len(SIZES), own), tails)
    assert 0.85 <= share <= 0.97
    # Not by being boundless: Student's t of 4 degrees of freedom is 1.42 times a normal's 1.645 sd wide.
    assert width < 1.6 * 1.645 * float(np.hypot(common, own)) + 0.05


def test_intervals_of_few_launches_are_wide_enough_unless_there_is_one() -> None:
    own = np.full(len(SIZES), 0.05)
    shares, widths = zip(*(coverage(k, 0.1, own) for k in (2, 3, 8)), strict=True)
    assert min(shares) >= 0.85
    assert widths[0] > 1.5 * widths[1] > 1.5 * widths[2]
    alone, _ = coverage(1, 0.1, np.full(len(SIZES), 0.02))
    assert alone < 0.5  # as its file says
