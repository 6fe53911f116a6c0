"""What pairs of launches show, and the least that counts: of the gate, of `compare`, and of the choice of settings.

A pair is one launch of each side, next to each other in time; what counts is the log of head / base.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from dtbench.records.comparison import MIN_CHANGE_S
from dtbench.stats.rank_tests import paired_bounds, signed_rank_p

# The level of one test.
MAX_P = 0.01
# Launches of one build differ by a factor of up to this. The largest of the 709 ratios between two launches of one case
# in results/*.jsonl is 3.16: compile mlp, torch, in results/compile-cpu-2ranks.jsonl.
MAX_LAUNCH_SPREAD = 3.2
# The chance that any benchmark of an unchanged run is called slower.
FAMILY_P = 0.05
BOUND_CONFIDENCE = 0.95
# At which the smallest detectable change is told.
_POWER = 0.80


def exceeds_launch_spread(base_s: Sequence[float], head_s: Sequence[float]) -> bool:
    """Whether the sides differ by more than launches of one build do, so that one launch of each shows a change.

    Args:
        base_s: one estimate per launch, positive seconds.
        head_s: the same for head. Every launch of one side has to be beyond every launch of the other.
    """
    low, high = sorted((base_s, head_s), key=max)
    return min(high) > max(MAX_LAUNCH_SPREAD * max(low), max(low) + MIN_CHANGE_S)


def significance_level(benchmarks: int, looks: int) -> float:
    """The level of one test: 1%, or 5% over the family, split over the looks at it."""
    return min(MAX_P, FAMILY_P / max(benchmarks, 1)) / looks


@dataclass(frozen=True)
class Effect:
    """What n pairs say. ratio: head / base (Hodges-Lehmann of the paired log ratios). low, high: its one-sided
    bounds at 95%, 0 and inf where there are too few pairs. sd: of the log ratios `logs`.
    """

    ratio: float
    low: float
    high: float
    sd: float
    pairs: int
    logs: tuple[float, ...] = ()

    @cached_property
    def p_slower(self) -> float:
        """The exact signed-rank test of head being slower."""
        return signed_rank_p(np.asarray(self.logs))

    @cached_property
    def p_faster(self) -> float:
        """The same of head being faster."""
        return signed_rank_p(-np.asarray(self.logs))

    def smallest_detectable(self, alpha: float = MAX_P) -> float:
        """The change that a test of so many pairs at level `alpha` finds 4 times in 5, as a share; inf where the pairs
        are too few for bounds, or do not vary at all."""
        sd = self.sd if self.sd > 0 and math.isfinite(self.high) else math.inf
        quantiles = NormalDist().inv_cdf(1 - alpha) + NormalDist().inv_cdf(_POWER)
        return math.exp(quantiles * sd / math.sqrt(self.pairs)) - 1


def paired_effect(base: Sequence[float], head: Sequence[float]) -> Effect:
    """The paired effect of head against base.

    base, head: one estimate per launch, seconds, in pairs.

    Raises:
        ValueError: no pairs, sides of different length, or an estimate that is not positive and finite.
    """
    if len(base) != len(head) or not base:
        raise ValueError(f"got {len(base)} base and {len(head)} head launches: expected pairs")
    if not all(0 < t < math.inf for t in (*base, *head)):
        raise ValueError("got an estimate that is not positive and finite")
    logs = np.log(np.asarray(head)) - np.log(np.asarray(base))
    n = len(logs)
    ratio, low, high = paired_bounds(logs.tolist(), BOUND_CONFIDENCE)
    sd = float(np.std(logs, ddof=1)) if n > 1 else math.inf
    return Effect(ratio, low, high, sd, n, tuple(logs.tolist()))
