"""The words for what became of a benchmark, and the least change that counts: of `compare`, the gate and the report."""

from __future__ import annotations

from enum import StrEnum

# The level of one test.
MAX_P = 0.01
# Measured on 80 processes of one build: without a floor, 1.0% of identical pairs pass the test at
# p < .01; with 2% fewer than 0.1% do, and a true 5% is still found every time.
MIN_CHANGE = 0.02
# A clock read and a call of Python cost about 0.1 us; a difference below twice that is no finding.
MIN_CHANGE_S = 0.2e-6


class Verdict(StrEnum):
    """The gravest first. `compare` and reports write the value, the gate the name."""

    REGRESSION = "slower"
    FAILED = "failed"
    MISSING = "missing"
    INCONCLUSIVE = "inconclusive"
    IMPROVED = "faster"
    NEW = "new"
    PASS = "same"

    @property
    def gravity(self) -> int:
        """Its place in this list."""
        return list(Verdict).index(self)


def smallest_change(base_s: float, floor_s: float = 0.0) -> float:
    """The change that matters to a benchmark of so many seconds, as a share: 2%, its own floor, or 0.2 us."""
    return max(MIN_CHANGE, floor_s / base_s, MIN_CHANGE_S / base_s)
