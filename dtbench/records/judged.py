"""A judged case: what became of it between base and head, and the figures behind that.

`compare` and the gate make it; the terminal, JSON, JUnit, Markdown, exports, the history and the report read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from dtbench.fields import Amount, Count, Positive, Time
from dtbench.records.result import CaseKey
from dtbench.suite import Param
from dtbench.text.units import interval_or_none

# Measured on 80 processes of one build: without a floor, 1.0% of identical pairs pass the test at
# p < .01; with 2% fewer than 0.1% do, and a true 5% is still found every time.
MIN_CHANGE = 0.02
# A clock read and a call of Python cost about 0.1 us; a difference below twice that is no finding.
MIN_CHANGE_S = 0.2e-6


def smallest_change(base_s: float, floor_s: float = 0.0) -> float:
    """The change that matters to a benchmark of so many seconds, as a share: 2%, its own floor, or 0.2 us."""
    return max(MIN_CHANGE, floor_s / base_s, MIN_CHANGE_S / base_s)


class Verdict(StrEnum):
    """The gravest first. `compare` and reports write the word, the gate the name; both are read."""

    REGRESSION = "slower"
    FAILED = "failed"
    MISSING = "missing"
    INCONCLUSIVE = "inconclusive"
    IMPROVED = "faster"
    NEW = "new"
    PASS = "same"

    @classmethod
    def _missing_(cls, value: object) -> Verdict | None:
        return cls.__members__.get(str(value))

    @property
    def gravity(self) -> int:
        """Its place in this list."""
        return _GRAVITIES[self]

    @property
    def shape(self) -> str:
        """A sign that tells it without colour."""
        return _LOOKS[self][0]

    @property
    def colour(self) -> str:
        """On a terminal."""
        return _LOOKS[self][1]

    @property
    def meaning(self) -> str:
        return _LOOKS[self][2]


_GRAVITIES = {verdict: place for place, verdict in enumerate(Verdict)}
# Shape, colour, meaning.
_LOOKS = {
    Verdict.REGRESSION: ("▲", "red", "slower"),
    Verdict.FAILED: ("✕", "red", "failed or gave wrong data"),
    Verdict.MISSING: ("∅", "yellow", "measured before, missing now"),
    Verdict.INCONCLUSIVE: ("?", "yellow", "inconclusive: neither a change nor sameness is shown"),
    Verdict.IMPROVED: ("▼", "green", "faster"),
    Verdict.NEW: ("+", "", "new"),
    Verdict.PASS: ("=", "", "same"),
}


class Change(Struct, frozen=True, kw_only=True):
    """Head over base. low, high: bounds, None where there is none yet: of `compare` those of an interval that covers
    `confidence`, of the gate one-sided ones at 95 %. sd: of the logarithm over `pairs` of launches.
    smallest_detectable: the change that a test of so many pairs finds 4 times in 5, as a share; None without bounds.
    """

    ratio: Positive
    low: Amount | None = None
    high: Amount | None = None
    confidence: Amount | None = None
    sd: Amount | None = None
    p_slower: Amount | None = None
    p_faster: Amount | None = None
    smallest_detectable: Amount | None = None
    pairs: Count = 0

    def __post_init__(self) -> None:
        if self.low and self.high and interval_or_none(self.low, self.high) is None:
            for bound in ("low", "high", "confidence"):
                force_setattr(self, bound, None)


class Counts(Struct, frozen=True):
    """What was counted per call, in either arm."""

    base: int | float
    head: int | float


class Judged(Struct, frozen=True, kw_only=True):
    """One impl of a case. base_s, head_s: seconds per call, the median over launches of each launch's `estimator`; of
    the gate, head_s is base_s times the ratio of the pairs.

    label: the case's line in `list` and the impl. tolerance: the largest slowdown that sameness has to exclude.
    floor_s: smaller changes are none. stage: of the gate, what decided: "counters", "screen", "gross", "confirmed" or
    "". alpha: the level of its test. counters: what rose.
    """

    suite: str
    name: str
    impl: str
    params: dict[str, Param]
    label: str = ""
    verdict: Verdict
    reason: str = ""
    stage: str = ""
    size_bytes: int | None = None
    estimator: str = ""
    base_launches: Count = 0
    head_launches: Count = 0
    base_s: Time | None = None
    head_s: Time | None = None
    effect: Change | None = None
    alpha: Amount | None = None
    tolerance: Amount
    floor_s: Amount = 0.0
    counters: dict[str, Counts] = msgspec.field(default_factory=dict)

    @property
    def key(self) -> CaseKey:
        return self.suite, self.name, self.impl, tuple(sorted(self.params.items()))

    def words_of(self, params: Sequence[str]) -> str:
        """`add (mesh=8, pass=forward)`, with these of its params."""
        text = ", ".join(f"{name}={self.params[name]}" for name in params if name in self.params)
        return f"{self.name} ({text})" if text else self.name

    @property
    def ratio(self) -> float | None:
        return self.effect.ratio if self.effect else None

    @property
    def low(self) -> float | None:
        return (self.effect.low or None) if self.effect else None  # files of before have 0 for no bound

    @property
    def high(self) -> float | None:
        return self.effect.high if self.effect else None

    @property
    def matters(self) -> float | None:
        """The least change that counts, as a share."""
        return smallest_change(self.base_s, self.floor_s) if self.base_s else None

    @property
    def severity(self) -> float:
        """The change over the least that counts; positive is slower."""
        return (self.ratio - 1) / self.matters if self.ratio is not None and self.matters else 0.0
