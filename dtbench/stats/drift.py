"""Detects that a machine became slower or faster as a whole.

Plain torch shows it: no change of the measured code affects plain torch, so if its times change, the machine has.
"""

import math
from collections.abc import Iterable
from statistics import median

from dtbench.grouping import group_by
from dtbench.records.comparison import MIN_CHANGE

# Implementations in plain torch, against which suites compare their other implementations.
FLOORS = ("local", "plain")
# Change of a floor that suggests drift when there are too few launches for a test. It is twice the noise between
# launches, 1.5 to 2.1% in 80 processes of one build.
LEAST_DRIFT = 0.05
# Drift affects implementations unequally. Log changes from 0.5 to 1.5 times the floor's count as the same drift. This
# range was chosen, not fitted.
DRIFT_TOLERANCE = 0.5


def suggests_drift(ratio: float) -> bool:
    """Whether head / base of a floor suggests drift, with one launch on each side."""
    return abs(math.log(ratio)) > math.log1p(LEAST_DRIFT)


def suite_drifts(cases: Iterable[tuple[str, str, float]]) -> dict[str, float]:
    """Returns the drift of each suite in which plain torch and every other implementation changed together.

    Args:
        cases: suite, implementation and head / base of each case.

    Returns:
        Suite -> median head / base of plain torch.
    """
    drifts = {}
    for suite, rows in group_by(cases, lambda case: case[0]).items():
        floors = [ratio for _, impl, ratio in rows if impl in FLOORS]
        by_impl = group_by((row for row in rows if row[1] not in FLOORS), lambda row: row[1]).values()
        if floors and by_impl:
            drift = math.log(median(floors))
            changes = [math.log(median(ratio for *_, ratio in impl_rows)) for impl_rows in by_impl]
            if abs(drift) > math.log1p(MIN_CHANGE / 2) and all(
                change * drift >= DRIFT_TOLERANCE * drift**2 for change in changes
            ):
                drifts[suite] = math.exp(drift)
    return drifts


def is_explained_by_drift(ratio: float, floor_ratio: float) -> bool:
    """Whether the floor changed by as much in the same direction, so that the ratio says nothing about the code."""
    change, drift = math.log(ratio), math.log(floor_ratio)
    slack = max(DRIFT_TOLERANCE * abs(drift), math.log1p(MIN_CHANGE))
    return change * drift > 0 and abs(change) <= abs(drift) + slack
