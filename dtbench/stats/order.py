"""Quantiles of samples, the estimate of a launch, intervals from bootstrap replicates, and ratios of variants."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from dtbench.grouping import group_by
from dtbench.records.comparison import Change
from dtbench.records.result import Result, Run, estimator_of
from dtbench.records.timing import SHARES, summarize
from dtbench.suite import Case

_K = TypeVar("_K", bound=Hashable)
# Coverage of the interval of a variant's ratio, and its number of replicates. These determine the 2.5% quantile to half
# a percent.
VARIANT_CONFIDENCE, REPLICATES = 0.95, 1000


def order_statistic(values: Collection[float], share: float) -> float:
    """Returns the sorted value at index floor(n * share), without interpolation.

    Raises:
        IndexError: no values.
    """
    return sorted(values)[int(len(values) * share)]


def estimate_s(samples_s: Sequence[float], case: Case | Result) -> float:
    """Returns the estimate of a launch from its samples, the order statistic that `estimator_of` names.

    Raises:
        ValueError: no samples, or one that is negative or not finite.
    """
    return float(getattr(summarize(samples_s), estimator_of(case)))


def estimates_s(samples_s: Sequence[NDArray[np.float64]], results: Sequence[Result]) -> list[float | None]:
    """Returns `estimate_s` for each set of samples; None for an empty one."""
    return batch_quantiles(
        samples_s,
        [
            SHARES[estimator_of(result)] if len(samples) else None
            for samples, result in zip(samples_s, results, strict=True)
        ],
    )


def batch_quantiles(
    samples: Sequence[NDArray[np.float64]], levels: Sequence[float | None]
) -> list[float | None]:
    """Returns the quantile of each set of samples at its level; None where the level is None.

    Sets of equal length are computed together, since numpy's overhead per call exceeds its work.
    """
    quantiles: list[float | None] = [None] * len(samples)
    keys = (
        None if level is None else (len(values), level) for values, level in zip(samples, levels, strict=True)
    )
    for (_, level), indices in index_blocks(keys):
        block = np.quantile(np.stack([samples[index] for index in indices]), level, axis=1)
        for index, value in zip(indices, block.tolist(), strict=True):
            quantiles[index] = value
    return quantiles


def index_blocks(keys: Iterable[_K | None]) -> Iterator[tuple[_K, list[int]]]:
    """Yields the indices of equal keys in blocks, for vectorized work. Keys that are None are skipped."""
    key_by_index = {index: key for index, key in enumerate(keys) if key is not None}
    for key, indices in group_by(key_by_index, key_by_index.__getitem__).items():
        # Blocks of 256 make numpy's overhead per call small and still keep arrays small.
        for first in range(0, len(indices), 256):
            yield key, indices[first : first + 256]


Array = NDArray[np.float64]


def resample(values: Array, count: int, rng: np.random.Generator) -> Array:
    """Draws `count` samples of n values each, with replacement, from n values.

    Args:
        values: shape (n, ...).

    Returns:
        Shape (count, n, ...).
    """
    return np.asarray(values[rng.integers(len(values), size=(count, len(values)))])


def interval(replicates: Array | NDArray[np.intp], share: float, *, interpolated: bool = True) -> Array:
    """Returns [low, high], between which the central `share` of the replicates lies; per column if there are several.

    Args:
        interpolated: interpolate between replicates. False takes both ends from the replicates themselves, which is
            needed if these are indices.
    """
    return np.asarray(
        np.quantile(
            replicates,
            [(1 - share) / 2, (1 + share) / 2],
            axis=0,
            method="linear" if interpolated else "inverted_cdf",
        )
    )


def variants(
    runs: Iterable[Run], suite: str, base: str, param: str = ""
) -> Iterator[tuple[Result, float, Change | None]]:
    """Compares the implementations of each case of a suite, or its cases that differ in one param alone, with a base.

    Args:
        base: the implementation, or the value of the param, that the others are compared with.
        param: name of the param; "" compares implementations.

    Yields:
        The result of the case's first launch; its time in seconds, median over launches; and that time over the time of
        the base, with its 95% interval. The last is None for the base itself, or if no launch measured both.
    """
    timed = (
        ((run.header.run_id, result.launch), result)
        for run in runs
        for result in run.ok(suite)
        if (not param or param in result.params) and result.size_bytes and result.estimate_s
    )
    by_case = {
        key: dict(entries)
        for key, entries in group_by(
            timed,
            lambda entry: (
                (entry[1].name, tuple(p for p in entry[1].case_key[3] if p[0] != param)),
                str(entry[1].params[param]) if param else entry[1].impl,
            ),
        ).items()
    }
    for (case, value), launches in by_case.items():
        change = resampled_ratio(by_case.get((case, base), {}), launches) if value != base else None
        time_s = median(result.estimate_s or 0.0 for result in launches.values())
        yield next(iter(launches.values())), time_s, change


def resampled_ratio(
    base: Mapping[tuple[str, int], Result], head: Mapping[tuple[str, int], Result]
) -> Change | None:
    """Estimates head / base as the median over the launches that measured both; None if no launch did.

    The interval is a percentile bootstrap (Efron & Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13).
    It resamples the launches and, within each, the samples of both cases. The ranks of a launch measure both cases, so
    what distinguishes the launches cancels in the ratio. Few launches, one above all, give too narrow an interval.

    Args:
        base: (run_id, launch) -> result with a time above 0. Without samples, the ratio has no interval.
        head: the same for head.
    """
    rng = np.random.default_rng(0)
    pairs = [(base[launch], head[launch]) for launch in base if launch in head]
    if not pairs:
        return None
    ratio = median((b.estimate_s or 0.0) / (a.estimate_s or 1.0) for a, b in pairs)
    if any(min(a.samples_s, default=0.0) <= 0 or not b.samples_s for a, b in pairs):
        return Change(ratio=ratio, pairs=len(pairs))
    ratios = np.array([_replicates(b, rng) / _replicates(a, rng) for a, b in pairs])  # (launches, replicates)
    drawn = np.take_along_axis(ratios, rng.integers(len(pairs), size=ratios.shape), axis=0)
    low, high = interval(np.median(drawn, axis=0), VARIANT_CONFIDENCE).tolist()
    return Change(ratio=ratio, low=low, high=high, confidence=VARIANT_CONFIDENCE, pairs=len(pairs))


def _replicates(result: Result, rng: np.random.Generator) -> Array:
    """Returns the launch's estimate for each resampling of its samples: (replicates,)."""
    samples = resample(np.asarray(result.samples_s), REPLICATES, rng)
    return np.asarray(np.quantile(samples, SHARES[estimator_of(result)], axis=1))
