"""The statistics of dtbench: pure functions of numbers.

Why these: 99% and more of the variance of a host-latency benchmark lies between processes, so what
is compared are launches (one estimate each), not samples; the minimum and the lower quartile are
steady estimators of a launch, the mean is not. Ratios are compared on the log scale, where 2x
faster and 2x slower are equally far from no change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dtbench.model import Case, Result, Timing, estimator_of

_K = TypeVar("_K", bound=Hashable)

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


def estimate_s(samples_s: Sequence[float], of: Case | Result) -> float:
    """What stands for these samples: the order statistic that `dtbench.model.estimator_of` names.

    Raises:
        ValueError: no samples, or one that is negative or not finite.
    """
    return float(getattr(summarize(samples_s), estimator_of(of)))


def estimates_s(samples_s: Sequence[NDArray[np.float64]], of: Sequence[Result]) -> list[float | None]:
    """`estimate_s` of many; None where there are no samples."""
    found: list[float | None] = [None] * len(samples_s)
    pairs = zip(samples_s, of, strict=True)
    keys = ((len(samples), estimator_of(one)) if len(samples) else None for samples, one in pairs)
    for (_, estimator), places in blocks_of(keys):
        times = np.stack([samples_s[place] for place in places])
        estimates = times.min(axis=1)
        if estimator == "p25":
            estimates = np.clip(np.quantile(times, 0.25, axis=1), estimates, times.max(axis=1))
        for place, estimate in zip(places, estimates, strict=True):
            found[place] = float(estimate)
    return found


def blocks_of(keys: Iterable[_K | None]) -> Iterator[tuple[_K, list[int]]]:
    """The places of equal keys, a few hundred at a time, for work on many at once. Those of None are left out."""
    found: dict[_K, list[int]] = {}
    for place, key in enumerate(keys):
        if key is not None:
            found.setdefault(key, []).append(place)
    for key, places in found.items():
        for first in range(
            0, len(places), 256
        ):  # so many that numpy's calls cost little, and arrays stay small
            yield key, places[first : first + 256]


def _first_bad(samples_s: Sequence[float]) -> float:
    return next(s for s in samples_s if not math.isfinite(s) or s < 0)


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
    pairwise = sorted(new - old for new in new_logs for old in old_logs)
    ratio = math.exp(median(pairwise))
    if len(base) < 2 or len(new) < 2:
        return RatioEstimate(ratio, None, None, None)
    tails = _rank_sum_tails(len(base), len(new))
    k = 1
    while k < len(pairwise) // 2 and 1 - 2 * tails[k] >= confidence:
        k += 1
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


@lru_cache(maxsize=256)
def signed_rank_tails(n: int) -> np.ndarray:
    """P(a sum of positive ranks <= s) for s = 0, 1, ... of n differences without ties."""
    return np.cumsum(_chances_of_sums(tuple(range(1, n + 1))))


def _logs(values: Sequence[float], name: str) -> list[float]:
    bad = [v for v in values if not (math.isfinite(v) and v > 0)]
    if bad or not values:
        raise ValueError(
            f"got {name}={list(values)[:5]}: expected at least one value, all finite and above 0"
        )
    return [math.log(v) for v in values]


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice the mid-rank of each value, an integer also where values tie."""
    counts = Counter(values)
    ranks, below = {}, 0
    for value in sorted(counts):
        ranks[value] = 2 * below + counts[value] + 1
        below += counts[value]
    return [ranks[value] for value in values]


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
        mean, sd = m * n / 2, math.sqrt(m * n * (m + n + 1) / 12)
        return tuple(_normal_cdf((u + 0.5 - mean) / sd) for u in range(m * n + 1))
    least = n * (n + 1) // 2
    chances = _chances_of_sums(tuple(range(1, m + n + 1)), n)[least : least + m * n + 1]
    return tuple(np.cumsum(chances).tolist())


def _normal_cdf(z: float) -> float:
    return math.erfc(-z / math.sqrt(2)) / 2
