"""The statistics of dtbench: pure functions of numbers.

Why these: 99% and more of the variance of a host-latency benchmark lies between processes, so what
is compared are launches (one estimate each), not samples; the minimum and the lower quartile are
steady estimators of a launch, the mean is not. Ratios are compared on the log scale, where 2x
faster and 2x slower are equally far from no change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np

from dtbench.model import Timing

_T = TypeVar("_T")

# The order statistics of the rank sum are counted exactly up to this many launches in all; beyond,
# the normal approximation is good to well below the 1% that decides (Mann & Whitney 1947 found it
# good from 8 + 8 on).
_EXACT_UP_TO = 40


def summarize(samples_s: Sequence[float]) -> Timing:
    """The order statistics of one launch's samples.

    Quantiles interpolate linearly between the order statistics (definition 7 of Hyndman & Fan,
    "Sample Quantiles in Statistical Packages", 1996; numpy's default).

    Raises:
        ValueError: no samples, or one that is negative or not finite.
    """
    if not samples_s:
        raise ValueError("got no samples to summarize: expected at least one")
    times = np.asarray(samples_s, dtype=np.float64)
    if not np.isfinite(times).all() or times.min() < 0:
        raise ValueError(f"got a sample of {_first_bad(samples_s)} s: expected finite times of at least 0")
    # Interpolation may round to just outside its neighbours; a Timing's figures are in order.
    quantiles = np.clip(np.quantile(times, [0.25, 0.5, 0.75, 0.95]), times.min(), times.max())
    p25, median, p75, p95 = (float(q) for q in np.maximum.accumulate(quantiles))
    return Timing(
        min=float(times.min()),
        p25=p25,
        median=median,
        p75=p75,
        p95=p95,
        max=float(times.max()),
        mean=math.fsum(samples_s) / len(samples_s),
        n=len(samples_s),
    )


def _first_bad(samples_s: Sequence[float]) -> float:
    return next(s for s in samples_s if not math.isfinite(s) or s < 0)


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean: the mean that fits ratios (Fleming & Wallace, CACM 29(3), 1986).

    Raises:
        ValueError: no values, or one that is not positive.
    """
    return math.exp(math.fsum(_logs(values, "values")) / len(values))


@dataclass(frozen=True)
class RatioEstimate:
    """new / base, with its interval; `confidence` is what the interval really reaches.

    low, high, confidence: None where a side has fewer than two launches and no interval exists.
    """

    ratio: float
    low: float | None
    high: float | None
    confidence: float | None


def hodges_lehmann_ratio(
    base: Sequence[float], new: Sequence[float], *, confidence: float = 0.95
) -> RatioEstimate:
    """By which factor `new` differs from `base`: exp of the median of all pairwise log ratios.

    The interval inverts the exact rank test: the k-th smallest and k-th largest pairwise ratio, with
    the largest k whose coverage is at least `confidence`. With few launches no k reaches it; then the
    interval is the whole range of pairwise ratios, and the result's `confidence` says how little
    that is (2 against 2 launches: 67%). Source: Hodges & Lehmann, "Estimates of Location Based on
    Rank Tests", 1963; Hollander & Wolfe, "Nonparametric Statistical Methods", section 4.3.

    base, new: one positive estimate per launch.

    Raises:
        ValueError: a side without values, or a value that is not positive.
    """
    old_logs, new_logs = _logs(base, "base"), _logs(new, "new")
    pairwise = np.sort(np.subtract.outer(new_logs, old_logs), axis=None)
    ratio = math.exp(float(np.median(pairwise)))
    if len(base) < 2 or len(new) < 2:
        return RatioEstimate(ratio, None, None, None)
    tails = _rank_sum_tails(len(base), len(new))
    k = 1
    while k < len(pairwise) // 2 and 1 - 2 * tails[k] >= confidence:
        k += 1
    # tails[k - 1] = P(U <= k - 1): the chance that the truth lies below the k-th pairwise ratio.
    return RatioEstimate(
        ratio, math.exp(float(pairwise[k - 1])), math.exp(float(pairwise[-k])), 1 - 2 * tails[k - 1]
    )


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
        if len(side) == 0 or not np.isfinite(side).all():
            raise ValueError(f"got {name}={list(side)[:5]}: expected at least one value, all finite")
    doubled = _doubled_ranks(np.concatenate([base, new]))
    observed = int(doubled[len(base) :].sum())
    if len(doubled) > _EXACT_UP_TO:
        return _normal_rank_test(doubled, len(new), observed)
    counts = _subset_sums(tuple(doubled.tolist()), len(new))
    total = math.comb(len(doubled), len(new))
    at_least = sum(count for s, count in counts.items() if s >= observed)
    at_most = sum(count for s, count in counts.items() if s <= observed)
    return RankTest(p_slower=at_least / total, p_faster=at_most / total)


def bootstrap_interval(
    samples: Sequence[_T],
    estimator: Callable[[Sequence[_T]], float],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> tuple[float, float]:
    """The percentile bootstrap interval of `estimator`; the same seed gives the same interval.

    samples: what is drawn with replacement: the independent units, such as launches, never the
        samples inside one of them. Resamples for which the estimator raises ValueError or
        ZeroDivisionError, or gives no finite number, are left out.

    Source: Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13.

    Raises:
        ValueError: fewer than two samples, or an estimator that fails on most resamples.
    """
    if len(samples) < 2:
        raise ValueError(f"got {len(samples)} samples: a bootstrap interval needs at least 2")
    rng = np.random.default_rng(seed)
    estimates: list[float] = []
    for picks in rng.integers(len(samples), size=(resamples, len(samples))).tolist():
        try:
            estimate = estimator([samples[i] for i in picks])
        except (ValueError, ZeroDivisionError):
            continue
        if math.isfinite(estimate):
            estimates.append(estimate)
    if len(estimates) < resamples / 2:
        raise ValueError(
            f"the estimator gave a finite number on only {len(estimates)} of {resamples} resamples: "
            f"no interval can be stated"
        )
    tail = (1 - confidence) / 2
    low, high = np.quantile(estimates, [tail, 1 - tail])
    return float(low), float(high)


def _logs(values: Sequence[float], name: str) -> list[float]:
    bad = [v for v in values if not (math.isfinite(v) and v > 0)]
    if bad or not values:
        raise ValueError(
            f"got {name}={list(values)[:5]}: expected at least one value, all finite and above 0"
        )
    return [math.log(v) for v in values]


def _doubled_ranks(values: np.ndarray) -> np.ndarray:
    """Twice the mid-rank of each value, an integer also where values tie."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (2 * last - counts + 1)[inverse.ravel()]


@lru_cache(maxsize=64)  # without ties, all cases of a comparison share one distribution
def _subset_sums(ranks: tuple[int, ...], size: int) -> dict[int, int]:
    """Sum of ranks -> how many subsets of `size` ranks have it."""
    ways: list[dict[int, int]] = [{0: 1}] + [{} for _ in range(size)]
    for rank in ranks:
        for taken in range(size, 0, -1):
            into = ways[taken]
            for total, count in ways[taken - 1].items():
                into[total + rank] = into.get(total + rank, 0) + count
    return ways[size]


@lru_cache(maxsize=64)
def _rank_sum_tails(m: int, n: int) -> tuple[float, ...]:
    """P(U <= u) for u = 0, 1, ... of the Mann-Whitney U of m and n values without ties."""
    if m + n > _EXACT_UP_TO:
        mean, sd = m * n / 2, math.sqrt(m * n * (m + n + 1) / 12)
        return tuple(_normal_cdf((u + 0.5 - mean) / sd) for u in range(m * n + 1))
    counts = _subset_sums(tuple(range(1, m + n + 1)), n)
    least = n * (n + 1) // 2
    total = math.comb(m + n, n)
    tails: list[float] = []
    running = 0
    for u in range(m * n + 1):
        running += counts.get(least + u, 0)
        tails.append(running / total)
    return tuple(tails)


def _normal_rank_test(doubled: np.ndarray, n: int, observed: int) -> RankTest:
    m = len(doubled) - n
    ranks = doubled / 2
    mean = n * (len(doubled) + 1) / 2
    # The variance of a sum drawn without replacement; it holds the correction for ties.
    sd = math.sqrt(m * n / len(doubled) * float(np.var(ranks, ddof=1)))
    if sd == 0:  # all values are equal
        return RankTest(1.0, 1.0)
    above = observed / 2 - mean
    return RankTest(
        p_slower=min(1.0, 1 - _normal_cdf((above - 0.5) / sd)),
        p_faster=min(1.0, _normal_cdf((above + 0.5) / sd)),
    )


def _normal_cdf(z: float) -> float:
    return math.erfc(-z / math.sqrt(2)) / 2
