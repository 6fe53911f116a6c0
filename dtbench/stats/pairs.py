"""The paired comparison of launches, and the thresholds of all comparisons.

A pair is one launch of base and one of head, measured one after the other. The statistics use the log of head / base.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np

from dtbench.records.comparison import MIN_CHANGE_S
from dtbench.stats.rank_tests import paired_bounds, signed_rank_p

# Significance level of one test.
MAX_P = 0.01
# Largest factor by which launches of one build have differed. The largest of the 709 ratios between two launches of a
# case in results/*.jsonl is 3.16: compile mlp, torch, in results/compile-cpu-2ranks.jsonl.
MAX_LAUNCH_SPREAD = 3.2
# Probability that any benchmark of a run without changes is called slower.
FAMILY_P = 0.05
BOUND_CONFIDENCE = 0.95
# Power of the test at the smallest detectable change.
_POWER = 0.80


def exceeds_launch_spread(base_s: Sequence[float], head_s: Sequence[float]) -> bool:
    """Whether every launch of one side exceeds every launch of the other by more than launches of one build differ.

    Then a single launch on each side shows a change.

    Args:
        base_s: one estimate per launch, positive seconds.
        head_s: the same for head.
    """
    low, high = sorted((base_s, head_s), key=max)
    return min(high) > max(MAX_LAUNCH_SPREAD * max(low), max(low) + MIN_CHANGE_S)


def significance_level(benchmarks: int, looks: int) -> float:
    """Returns the significance level of one test.

    It is 1%, or 5% divided by the number of benchmarks if that is less; divided by the number of looks at the data.
    """
    return min(MAX_P, FAMILY_P / max(benchmarks, 1)) / looks


@dataclass(frozen=True)
class Effect:
    """The change from base to head, estimated from pairs of launches.

    Attributes:
        ratio: head / base, the Hodges-Lehmann estimate of the paired log ratios.
        low: one-sided lower bound of the ratio at 95%; 0 with too few pairs.
        high: one-sided upper bound of the ratio at 95%; inf with too few pairs.
        sd: standard deviation of `logs`.
        pairs: number of pairs.
        logs: log ratio of each pair.
    """

    ratio: float
    low: float
    high: float
    sd: float
    pairs: int
    logs: tuple[float, ...] = ()

    @cached_property
    def p_slower(self) -> float:
        """p value of the exact signed-rank test for head being slower."""
        return signed_rank_p(np.asarray(self.logs))

    @cached_property
    def p_faster(self) -> float:
        """p value of the exact signed-rank test for head being faster."""
        return signed_rank_p(-np.asarray(self.logs))

    def smallest_detectable(self, alpha: float = MAX_P) -> float:
        """Returns the relative change that a test at level `alpha` detects with 80% power with this many pairs.

        It is inf if the pairs are too few for bounds or do not vary at all.
        """
        sd = self.sd if self.sd > 0 and math.isfinite(self.high) else math.inf
        quantiles = NormalDist().inv_cdf(1 - alpha) + NormalDist().inv_cdf(_POWER)
        return math.exp(quantiles * sd / math.sqrt(self.pairs)) - 1


def paired_effect(base: Sequence[float], head: Sequence[float]) -> Effect:
    """Estimates the change from base to head.

    Args:
        base: one estimate per launch, seconds.
        head: the same for head; element i is paired with element i of base.

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
