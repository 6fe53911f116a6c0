"""The comparison of one case between base and head: verdict, change and times.

Written by `dtbench compare` and the gate; read by the terminal, JSON, JUnit, Markdown, exports, history and report.
"""

from collections.abc import Sequence
from enum import StrEnum

import msgspec
from msgspec import Struct
from msgspec.structs import force_setattr

from dtbench.fields import Amount, Count, Positive, Time
from dtbench.records.result import CaseKey
from dtbench.suite import Param
from dtbench.text.units import interval_or_none

# Measured on 80 processes of one build. Without this threshold, 1.0% of identical pairs pass the test at p < .01. With
# it, fewer than 0.1% do, and a true change of 5% is still found every time.
MIN_CHANGE = 0.02
# A clock read and a Python call cost about 0.1 us each; a smaller difference than both together means nothing.
MIN_CHANGE_S = 0.2e-6


def change_threshold(base_s: float, floor_s: float = 0.0) -> float:
    """Returns the relative change below which a difference is ignored: the largest of 2%, `floor_s` and 0.2 us."""
    return max(MIN_CHANGE, floor_s / base_s, MIN_CHANGE_S / base_s)


class Verdict(StrEnum):
    """The outcome of one case between base and head, the gravest first."""

    SLOWER = "slower"
    FAILED = "failed"
    MISSING = "missing"
    INCONCLUSIVE = "inconclusive"
    FASTER = "faster"
    NEW = "new"
    SAME = "same"

    @property
    def gravity(self) -> int:
        """Rank in the order of gravity, 0 for the gravest."""
        return [*Verdict].index(self)

    @property
    def shape(self) -> str:
        """Symbol that identifies the verdict without colour."""
        return _LOOKS[self][0]

    @property
    def colour(self) -> str:
        """Colour on a terminal."""
        return _LOOKS[self][1]

    @property
    def meaning(self) -> str:
        return _LOOKS[self][2]


# Verdict -> (shape, colour, meaning).
_LOOKS = {
    Verdict.SLOWER: ("▲", "red", "slower"),
    Verdict.FAILED: ("✕", "red", "failed or returned wrong data"),
    Verdict.MISSING: ("∅", "yellow", "measured in base, missing in head"),
    Verdict.INCONCLUSIVE: ("?", "yellow", "inconclusive: shows neither a change nor sameness"),
    Verdict.FASTER: ("▼", "green", "faster"),
    Verdict.NEW: ("+", "", "measured in head only"),
    Verdict.SAME: ("=", "", "same"),
}


class Change(Struct, frozen=True, kw_only=True):
    """The change of a case's time from base to head.

    Attributes:
        ratio: time of head / time of base.
        low: lower bound of the ratio; None if there are too few launches. From `dtbench compare`, low and high are the
            ends of an interval with coverage `confidence`; from the gate, one-sided bounds at 95%.
        high: upper bound of the ratio; None if there are too few launches.
        confidence: coverage of the interval, 0 to 1.
        sd: standard deviation of the log ratio over the pairs of launches.
        p_slower: p value of the test for head being slower.
        p_faster: p value of the test for head being faster.
        smallest_detectable: relative change that a test of this many pairs detects with 80% power; None without bounds.
        pairs: number of pairs of launches; 0 if the launches are not paired.
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
    """A counter's value per call in base and in head."""

    base: int | float
    head: int | float


class ComparedCase(Struct, frozen=True, kw_only=True):
    """The comparison of one implementation of a case between base and head.

    Attributes:
        suite: suite of the case.
        name: name of the case.
        impl: implementation, e.g. "core" or "torch".
        params: params of the case.
        label: the case as `dtbench list` shows it, followed by the implementation.
        verdict: the verdict.
        reason: explains a verdict that needs it, else "".
        stage: stage of the gate that decided: "counters", "screen", "gross" or "confirmed"; else "".
        size_bytes: message size of the case.
        estimator: order statistic that represents the samples of a launch.
        base_launches: number of timed launches of base.
        head_launches: number of timed launches of head.
        base_s: seconds per call in base, the median of the launches' estimates.
        head_s: the same for head. From the gate, base_s times the ratio of the pairs.
        effect: the change; None if one side has no times.
        alpha: significance level of the gate's test.
        tolerance: largest relative slowdown that still counts as the same.
        floor_s: changes below this many seconds are ignored.
        counters: counters that rose.
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

    def describe(self, params: Sequence[str]) -> str:
        """Returns the name with the given params, e.g. "add (mesh=8, pass=forward)"."""
        text = ", ".join(f"{name}={self.params[name]}" for name in params if name in self.params)
        return f"{self.name} ({text})" if text else self.name

    @property
    def ratio(self) -> float | None:
        return self.effect.ratio if self.effect else None

    @property
    def low(self) -> float | None:
        return self.effect.low if self.effect else None

    @property
    def high(self) -> float | None:
        return self.effect.high if self.effect else None

    @property
    def change_threshold(self) -> float | None:
        """Relative change below which a difference is ignored; None without a time of base."""
        return change_threshold(self.base_s, self.floor_s) if self.base_s else None

    @property
    def severity(self) -> float:
        """The relative change as a multiple of `change_threshold`; positive is slower."""
        threshold = self.change_threshold
        return (self.ratio - 1) / threshold if self.ratio is not None and threshold else 0.0
