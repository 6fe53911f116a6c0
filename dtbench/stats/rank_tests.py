"""Rank tests and Hodges-Lehmann estimates for two sides of launches or for pairs of launches, and their thresholds.

The intervals of the estimates invert the tests. All are exact also for tied values. A pair is one launch of base and
one of head, measured one after the other; its statistics use the log of head / base.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from statistics import NormalDist, median

import numpy as np

from dtbench.records.comparison import MIN_CHANGE_S

# Up to this many launches on both sides together, the distribution of the rank sum is counted exactly. Beyond, the
# error of the normal approximation is far below the 1% level of the test (Mann & Whitney 1947 found it good from 8 + 8
# on).
_EXACT_UP_TO = 40
CONFIDENCE = 0.95  # intended coverage of a ratio's interval


@dataclass(frozen=True)
class RatioEstimate:
    """The ratio head / base with an interval.

    Attributes:
        ratio: head / base.
        low: lower end of the interval; None if a side has fewer than two launches.
        high: upper end of the interval; None if a side has fewer than two launches.
        confidence: actual coverage of the interval, which with few launches is below the intended one.
    """

    ratio: float
    low: float | None
    high: float | None
    confidence: float | None


def hodges_lehmann_ratio(base: Sequence[float], head: Sequence[float]) -> RatioEstimate:
    """Estimates head / base as exp of the median of all pairwise log ratios.

    The interval inverts the exact rank test. Its ends are the k-th smallest and the k-th largest pairwise ratio, with
    the largest k whose coverage is at least `CONFIDENCE`. With few launches no k reaches that coverage. Then the
    interval is the range of all pairwise ratios, and `confidence` is its coverage (67% for 2 launches on each side).
    Source: Hodges & Lehmann, "Estimates of Location Based on Rank Tests", 1963; Hollander & Wolfe, "Nonparametric
    Statistical Methods", section 4.3.

    Args:
        base: one positive estimate per launch.
        head: the same for head.

    Raises:
        ValueError: a side without values, or a value that is not positive.
    """
    base_logs, head_logs = _logs(base, "base"), _logs(head, "head")
    pairwise = sorted(head_log - base_log for head_log in head_logs for base_log in base_logs)
    ratio = math.exp(median(pairwise))
    if len(base) < 2 or len(head) < 2:
        return RatioEstimate(ratio, None, None, None)
    tails = _rank_sum_tails(len(base), len(head))
    k = min(max(bisect_right(tails, (1 - CONFIDENCE) / 2), 1), len(pairwise) // 2)
    # tails[k - 1] = P(U <= k - 1), the probability that the true ratio lies below the k-th pairwise ratio.
    return RatioEstimate(ratio, math.exp(pairwise[k - 1]), math.exp(pairwise[-k]), 1 - 2 * tails[k - 1])


@dataclass(frozen=True)
class RankTest:
    """One-sided p values of a rank test.

    Attributes:
        p_slower: probability, without a change, of head being at least this much larger than base.
        p_faster: probability, without a change, of head being at least this much smaller than base.
    """

    p_slower: float
    p_faster: float


def rank_test(base: Sequence[float], head: Sequence[float]) -> RankTest:
    """Computes both one-sided p values of the Mann-Whitney U test.

    Clocks have a finite resolution, so ties are common. The null distribution is therefore counted over all ways to
    distribute the mid-ranks to the two sides, instead of read from a table for untied values. With more than 40 values
    in total, the normal approximation with corrections for ties and continuity is used. Source: Mann & Whitney, 1947;
    the counting is the shift algorithm of Streitberg & Roehmel, 1986.

    Raises:
        ValueError: a side without values, or a value that is not finite.
    """
    for name, side in (("base", base), ("head", head)):
        if not side or not all(map(math.isfinite, side)):
            raise ValueError(f"got {name}={list(side)[:5]}: expected at least one value, all finite")
    doubled = _doubled_ranks([*base, *head])
    if len(doubled) > _EXACT_UP_TO:
        from scipy.stats import mannwhitneyu  # importing it takes longer than a short comparison

        return RankTest(
            *(
                float(mannwhitneyu(head, base, alternative=side, method="asymptotic").pvalue)
                for side in ("greater", "less")
            )
        )
    return _exact_test(tuple(sorted(doubled)), len(head), sum(doubled[len(base) :]))


@lru_cache(maxsize=4096)
def _exact_test(ranks: tuple[int, ...], size: int, observed: int) -> RankTest:
    chances = _chances_of_sums(ranks, size)
    return RankTest(p_slower=_share(chances[observed:]), p_faster=_share(chances[: observed + 1]))


def signed_rank_p(differences: np.ndarray) -> float:
    """Returns the one-sided p value of the Wilcoxon signed-rank test (1945).

    It is the probability of a sum of positive ranks at least this large if the differences are symmetric around 0. It
    is exact also for tied ranks, for which scipy's test would have to try all signs.
    """
    nonzero = [d for d in differences.tolist() if d]
    doubled = _doubled_ranks([abs(d) for d in nonzero])
    positive = sum(rank for rank, d in zip(doubled, nonzero, strict=True) if d > 0)
    return _share(_chances_of_sums(tuple(sorted(doubled)))[positive:])


def paired_bounds(logs: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """Returns (ratio, low, high) of paired log ratios.

    The ratio is exp of the median of all Walsh averages (Hodges & Lehmann, 1963). low and high are one-sided bounds,
    each at `confidence`, which invert the exact signed-rank test. With too few pairs they are 0 and infinity.
    """
    log_ratios = np.asarray(logs)
    walsh = np.sort(np.add.outer(log_ratios, log_ratios)[np.triu_indices(len(log_ratios))]) / 2
    k = _bound_rank(len(log_ratios), confidence)
    low, high = (math.exp(float(walsh[k - 1])), math.exp(float(walsh[-k]))) if k else (0.0, math.inf)
    return math.exp(float(np.median(walsh))), low, high


@lru_cache(maxsize=256)
def _bound_rank(n: int, confidence: float) -> int:
    """Returns the largest k such that the k-th Walsh average of n pairs is a bound at `confidence`, else 0."""
    tails = np.cumsum(_chances_of_sums(tuple(range(1, n + 1))))  # P(a sum of positive ranks <= 0, 1, ...)
    return int(np.searchsorted(tails, 1 - confidence, side="right"))


def _logs(values: Sequence[float], name: str) -> list[float]:
    if not values or not all(math.isfinite(v) and v > 0 for v in values):
        raise ValueError(
            f"got {name}={list(values)[:5]}: expected at least one value, all finite and above 0"
        )
    return [math.log(v) for v in values]


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Returns twice the mid-rank of each value, which is an integer also for tied values."""
    ascending = sorted(values)
    return [bisect_left(ascending, value) + bisect_right(ascending, value) + 1 for value in values]


@lru_cache(maxsize=4096)  # without ties, all cases of a comparison share one distribution
def _chances_of_sums(ranks: tuple[int, ...], size: int | None = None) -> np.ndarray:
    """Returns the probability of each sum 0, 1, ... of a random subset of the ranks.

    The subset has `size` elements, or any number if None. The shift algorithm of Streitberg & Roehmel (1986) decides
    for one rank after another whether it belongs to the subset.
    """
    chances = np.zeros((1 if size is None else size + 1, sum(ranks) + 1))
    chances[0, 0] = 1
    for index, rank in enumerate(ranks):
        shifted = np.zeros_like(chances)
        shifted[:, rank:] = chances[:, : chances.shape[1] - rank]
        if size is None:
            chances = (chances + shifted) / 2
        else:
            # Row k holds subsets that contain k of the ranks so far; each remaining rank is equally likely to follow.
            probability = (size - np.arange(size + 1)[:, None]) / (len(ranks) - index)
            chances = chances * (1 - probability) + np.vstack(
                [np.zeros_like(shifted[:1]), (shifted * probability)[:-1]]
            )
    return np.asarray(chances[-1])


def _share(chances: np.ndarray) -> float:
    return min(1.0, float(chances.sum()))


@lru_cache(maxsize=64)
def _rank_sum_tails(m: int, n: int) -> tuple[float, ...]:
    """Returns P(U <= u) for u = 0, 1, ... of the Mann-Whitney U of m and n untied values."""
    if m + n > _EXACT_UP_TO:
        normal = NormalDist(m * n / 2, math.sqrt(m * n * (m + n + 1) / 12))
        return tuple(normal.cdf(u + 0.5) for u in range(m * n + 1))
    min_sum = n * (n + 1) // 2
    chances = _chances_of_sums(tuple(range(1, m + n + 1)), n)[min_sum : min_sum + m * n + 1]
    return tuple(np.cumsum(chances).tolist())


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
    """Whether all launches of one side exceed all of the other by more than the spread ever seen within one build.

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
