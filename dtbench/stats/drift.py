"""A machine that became slower or faster as a whole, told by plain torch, which no change of the code moves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median

from dtbench.grouping import group_by
from dtbench.records.comparison import MIN_CHANGE

# Plain torch, by the names that suites give it: what they read their other implementations against.
FLOORS = ("local", "plain")
# A floor's move counts from here on where no test of its launches shows it: twice the noise between launches of 1.5
# to 2.1 %, as 80 processes of one build have.
LEAST = 0.05
# Drift does not meet all code alike: an implementation moved with its floor from half of the floor's move, on the log
# scale, to half as much again. Set, not fitted.
ALIKE = 0.5


def suggests_drift(ratio: float) -> bool:
    """Whether a floor of one launch on each side suggests it."""
    return abs(math.log(ratio)) > math.log1p(LEAST)


def suite_drifts(moves: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """Suite -> by which factor plain torch and every other implementation moved together, where they did.

    moves: suite, implementation and new over base, of each case.
    """
    drifts = {}
    for suite, of in group_by(moves, lambda move: move[0]).items():
        floors = [ratio for _, impl, ratio in of if impl in FLOORS]
        others = group_by((move for move in of if move[1] not in FLOORS), lambda move: move[1]).values()
        if floors and others:
            common = math.log(median(floors))
            moved = [math.log(median(ratio for *_, ratio in other)) for other in others]
            if abs(common) > math.log1p(MIN_CHANGE / 2) and all(
                m * common >= ALIKE * common**2 for m in moved
            ):
                drifts[suite] = math.exp(common)
    return drifts


def is_explained_by_drift(ratio: float, floor: float) -> bool:
    """Whether the floor moved by as much in the same direction, so that the ratio says nothing of the code."""
    own, common = math.log(ratio), math.log(floor)
    slack = max(ALIKE * abs(common), math.log1p(MIN_CHANGE))
    return own * common > 0 and abs(own) <= abs(common) + slack
