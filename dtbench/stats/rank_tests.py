"""Rank tests, and the Hodges-Lehmann ratios whose intervals invert them; exact also where values tie."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist, median

import numpy as np

# The order statistics of the rank sum are counted exactly up to this many launches in all; beyond,
# the normal approximation is good to well below the 1% that decides (Mann & Whitney 1947 found it
# good from 8 + 8 on).
_EXACT_UP_TO = 40
CONFIDENCE = 0.95  # that the interval of a ratio is to reach


@dataclass(frozen=True)
class RatioEstimate:
    """new / base, with its interval; `confidence` is what the interval really reaches.

    low, high, confidence: None where a side has fewer than two launches and no interval exists.
    """

    ratio: float
    low: float | None
    high: float | None
    confidence: float | None


def hodges_lehmann_ratio(base: Sequence[float], new: Sequence[float]) -> RatioEstimate:
    """By which factor `new` differs from `base`: exp of the median of all pairwise log ratios.

    The interval inverts the exact rank test: the k-th smallest and k-th largest pairwise ratio, with
    the largest k whose coverage is at least `CONFIDENCE`. With few launches no k reaches it; then the
    interval is the whole range of pairwise ratios, and the result's `confidence` says how little
    that is (2 against 2 launches: 67%). Source: Hodges & Lehmann, "Estimates of Location Based on
    Rank Tests", 1963; Hollander & Wolfe, "Nonparametric Statistical Methods", section 4.3.

    base, new: one positive estimate per launch.

    Raises:
        ValueError: a side without values, or a value that is not positive.
    """
    old_logs, new_logs = _logs(base, "base"), _logs(new, "new")
    pairwise = sorted(new - old for new in new_logs for old in old_logs)
    ratio = math.exp(median(pairwise))
    if len(base) < 2 or len(new) < 2:
        return RatioEstimate(ratio, None, None, None)
    tails = _rank_sum_tails(len(base), len(new))
    k = min(max(bisect_right(tails, (1 - CONFIDENCE) / 2), 1), len(pairwise) // 2)
    # tails[k - 1] = P(U <= k - 1): the chance that the truth lies below the k-th pairwise ratio.
    return RatioEstimate(ratio, math.exp(pairwise[k - 1]), math.exp(pairwise[-k]), 1 - 2 * tails[k - 1])


@dataclass(frozen=True)
class RankTest:
    """One-sided p values: how likely samples so far apart are, if nothing changed."""

    p_slower: float  # of new being this much larger than base
    p_faster: float


def rank_test(base: Sequence[float], new: Sequence[float]) -> RankTest:
    """The Mann-Whitney U test, both one-sided p values, exact also where values tie.

    Ties are common (clocks have a resolution), so the null distribution is counted over all ways to
    deal the mid-ranks out to the two sides, rather than taken from a table without ties. Beyond 40
    values in all, the normal approximation with its correction for ties and continuity is used.
    Source: Mann & Whitney, 1947; the counting is the shift algorithm of Streitberg & Roehmel, 1986.

    Raises:
        ValueError: a side without values, or a value that is not finite.
    """
    for name, side in (("base", base), ("new", new)):
        if not side or not all(map(math.isfinite, side)):
            raise ValueError(f"got {name}={list(side)[:5]}: expected at least one value, all finite")
    doubled = _doubled_ranks([*base, *new])
    observed = sum(doubled[len(base) :])
    if len(doubled) > _EXACT_UP_TO:
        from scipy.stats import mannwhitneyu  # takes longer to load than a short comparison takes

        slower, faster = (
            float(mannwhitneyu(new, base, alternative=side, method="asymptotic").pvalue)
            for side in ("greater", "less")
        )
        return RankTest(slower, faster)
    return _exact_test(tuple(sorted(doubled)), len(new), observed)


@lru_cache(maxsize=4096)
def _exact_test(ranks: tuple[int, ...], size: int, observed: int) -> RankTest:
    chances = _chances_of_sums(ranks, size)
    return RankTest(p_slower=_share(chances[observed:]), p_faster=_share(chances[: observed + 1]))


def signed_rank_p(differences: np.ndarray) -> float:
    """P(a sum of positive ranks at least this large), if the differences are symmetric about 0 (Wilcoxon, 1945).

    Exact where ranks tie too, for which scipy's test would have to try all signs.
    """
    moved = [d for d in differences.tolist() if d]
    doubled = _doubled_ranks([abs(d) for d in moved])
    positive = sum(rank for rank, d in zip(doubled, moved, strict=True) if d > 0)
    return _share(_chances_of_sums(tuple(sorted(doubled)))[positive:])


def paired_bounds(logs: Sequence[float], confidence: float) -> tuple[float, float, float]:
    """(ratio, low, high) of pairs: exp of the median of all Walsh averages of the log ratios (Hodges & Lehmann, 1963).

    low and high are one-sided bounds, each at `confidence`, by inverting the exact signed-rank test; 0 and infinity
    where so few pairs bound nothing.
    """
    of = np.asarray(logs)
    walsh = np.sort(np.add.outer(of, of)[np.triu_indices(len(of))]) / 2
    k = _bound_rank(len(of), confidence)
    low, high = (math.exp(float(walsh[k - 1])), math.exp(float(walsh[-k]))) if k else (0.0, math.inf)
    return math.exp(float(np.median(walsh))), low, high


@lru_cache(maxsize=256)
def _bound_rank(n: int, confidence: float) -> int:
    """The largest k for which the k-th Walsh average of n pairs bounds the ratio; 0 where none does."""
    tails = np.cumsum(_chances_of_sums(tuple(range(1, n + 1))))  # P(a sum of positive ranks <= 0, 1, ...)
    return int(np.searchsorted(tails, 1 - confidence, side="right"))


def _logs(values: Sequence[float], name: str) -> list[float]:
    bad = [v for v in values if not (math.isfinite(v) and v > 0)]
    if bad or not values:
        raise ValueError(
            f"got {name}={list(values)[:5]}: expected at least one value, all finite and above 0"
        )
    return [math.log(v) for v in values]


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the mid-rank of each value, an integer also where values tie."""
    ascending = sorted(values)
    return [bisect_left(ascending, value) + bisect_right(ascending, value) + 1 for value in values]


@lru_cache(maxsize=4096)  # without ties, all cases of a comparison share one distribution
def _chances_of_sums(ranks: tuple[int, ...], size: int | None = None) -> np.ndarray:
    """The chance of each sum 0, 1, ... of a random subset of the ranks: of `size` of them, or of any.

    The shift algorithm of Streitberg & Roehmel, 1986: taking a rank or not, one after another.
    """
    chances = np.zeros((1 if size is None else size + 1, sum(ranks) + 1))
    chances[0, 0] = 1
    for seen, rank in enumerate(ranks):
        shifted = np.zeros_like(chances)
        shifted[:, rank:] = chances[:, : chances.shape[1] - rank]
        if size is None:
            chances = (chances + shifted) / 2
        else:
            # Of the ranks not yet seen each is as likely to be taken: k of them are still wanted.
            wanted = (size - np.arange(size + 1)[:, None]) / (len(ranks) - seen)
            chances = chances * (1 - wanted) + np.vstack(
                [np.zeros_like(shifted[:1]), (shifted * wanted)[:-1]]
            )
    return np.asarray(chances[-1])


def _share(chances: np.ndarray) -> float:
    return min(1.0, float(chances.sum()))


@lru_cache(maxsize=64)
def _rank_sum_tails(m: int, n: int) -> tuple[float, ...]:
    """P(U <= u) for u = 0, 1, ... of the Mann-Whitney U of m and n values without ties."""
    if m + n > _EXACT_UP_TO:
        normal = NormalDist(m * n / 2, math.sqrt(m * n * (m + n + 1) / 12))
        return tuple(normal.cdf(u + 0.5) for u in range(m * n + 1))
    least = n * (n + 1) // 2
    chances = _chances_of_sums(tuple(range(1, m + n + 1)), n)[least : least + m * n + 1]
    return tuple(np.cumsum(chances).tolist())
