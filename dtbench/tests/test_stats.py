"""The statistics against scipy, numpy and values worked out by hand."""

import itertools
import math
import tracemalloc
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from dtbench import stats
from dtbench.cost.calibration import intervals
from dtbench.cost.calibration.times import QUANTILE, SizeTimes, points_of
from dtbench.grouping import group_by
from dtbench.records.run import read_run
from dtbench.stats import hodges_lehmann_ratio, rank_test, rank_tests, resample, summarize

times = st.floats(1e-9, 1e3)
sides = st.lists(times, min_size=1, max_size=7)
# Few different values, so that most draws have ties.
tied_sides = st.lists(st.sampled_from([1.0, 2.0, 3.0]), min_size=2, max_size=6)


# ------------------------------------------------------------------------------- one launch a side


def test_launches_differ_is_what_committed_launches_differ_by_at_most() -> None:
    ratios = []
    for path in sorted((Path(__file__).parents[2] / "results").glob("*.jsonl")):
        timed = (r for r in read_run(path).results if r.status == "ok" and r.estimate_s)
        for results in group_by(timed, lambda result: result.case_key).values():
            pairs = combinations([r.estimate_s for r in results if r.estimate_s], 2)
            ratios += [max(pair) / min(pair) for pair in pairs]
    assert len(ratios) == 709
    assert max(ratios) < stats.MAX_LAUNCH_SPREAD == pytest.approx(max(ratios), rel=0.02)


@pytest.mark.parametrize(
    ("base", "head", "is_beyond"),
    [
        ([1.0], [3.1], False),
        ([1.0], [3.3], True),
        ([3.3], [1.0], True),
        ([1.0, 1.1], [3.6, 4.0, 3.7], True),
        ([1.0, 4.0], [4.1], False),  # one launch of base took as long
        ([1e-8], [9e-8], False),  # less than the clock tells apart
    ],
)
def test_single_launches_tell_a_change_beyond_what_launches_differ_by(
    base: list[float], head: list[float], is_beyond: bool
) -> None:
    assert stats.exceeds_launch_spread(base, head) is is_beyond


# ------------------------------------------------------------------------------- summaries


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=30))
def test_a_summary_is_in_order_and_agrees_with_numpy(samples: list[float]) -> None:
    times = summarize(samples)
    assert times.min <= times.p25 <= times.median <= times.p75 <= times.p95 <= times.max
    assert (times.min, times.max, times.n) == (min(samples), max(samples), len(samples))
    assert (times.median, times.mean) == pytest.approx((float(np.median(samples)), float(np.mean(samples))))


@pytest.mark.parametrize("samples", [[], [1.0, -1.0], [math.nan], [math.inf, 1.0]])
def test_summarize_refuses_invalid_samples(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        summarize(samples)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e300), min_size=1, max_size=30), st.sampled_from([0.05, 0.25, 0.5, 0.75, 0.95]))
def test_quantiles_are_numpys_to_the_last_bit(samples: list[float], share: float) -> None:
    theirs = stats.quantile(samples, share)
    assert theirs == float(np.quantile(np.array(samples), share))
    assert stats.batch_quantiles([np.array(samples)] * 2, [share, None]) == [theirs, None]
    # The reference for timing_quantiles: numpy's quantiles, in order and within the samples.
    quantiles = np.clip(np.quantile(samples, [0.25, 0.5, 0.75, 0.95]), min(samples), max(samples))
    expected = [min(samples), *np.maximum.accumulate(quantiles).tolist(), max(samples)]
    assert stats.timing_quantiles(samples) == expected


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=30))
def test_an_order_statistic_is_a_value(samples: list[float]) -> None:
    assert stats.order_statistic(samples, 0.25) == sorted(samples)[len(samples) // 4]


# -------------------------------------------------------------------------------- bootstrap


@pytest.mark.parametrize("shape", [(7,), (5, 3)])
def test_an_interval_is_that_of_the_values_drawn_again(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).lognormal(size=shape)
    drawn = stats.resample(values, 200, np.random.default_rng(2))
    assert np.array_equal(
        drawn, values[np.random.default_rng(2).integers(len(values), size=(200, len(values)))]
    )
    means = drawn.mean(axis=1)
    assert np.array_equal(
        stats.interval(means, 0.9), np.quantile(means, [(1 - 0.9) / 2, (1 + 0.9) / 2], axis=0)
    )
    indices = np.array([0, 1, 1, 1, 2, 2, 5, 5, 6, 9])
    assert stats.interval(indices, 0.8, interpolated=False).tolist() == [0, 6]


# ----------------------------------------------------------------------------------- ratios


@pytest.mark.parametrize(
    ("base", "new", "ratio", "interval", "confidence"),
    [
        # The pairwise ratios are 2, 3, 4 and 1, 1.5, 2: their middle is 2. Of 5 over 2 orders, two are extreme.
        ([1.0, 2.0], [2.0, 3.0, 4.0], 2.0, (1.0, 4.0), 1 - 2 / 10),
        # Few launches say how little their interval covers.
        ([1.0], [2.0], 2.0, (None, None), None),
        ([1.0], [2.0, 2.0], 2.0, (None, None), None),
        ([1.0, 1.1], [2.0, 2.2], None, None, 2 / 3),
        ([1.0, 1.1, 1.2], [2.0, 2.2, 2.3], None, None, 0.9),
    ],
)
def test_hodges_lehmann_ratio_matches_hand_computed_values(
    base: list[float],
    new: list[float],
    ratio: float | None,
    interval: tuple[float | None, float | None] | None,
    confidence: float | None,
) -> None:
    estimate = hodges_lehmann_ratio(base, new)
    assert ratio is None or estimate.ratio == pytest.approx(ratio)
    assert interval is None or (estimate.low, estimate.high) == pytest.approx(interval)
    assert estimate.confidence == pytest.approx(confidence)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    # The largest k with P(U <= k - 1) <= 2.5% in the table of critical values (Mann & Whitney): the
    # two-sided 5% critical value of U, plus one.
    [(4, 4, 1), (5, 5, 3), (6, 6, 6), (8, 8, 14), (10, 10, 24), (5, 8, 7), (20, 20, 128)],
)
def test_hodges_lehmann_interval_matches_published_critical_values(m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m * n)
    base, new = rng.lognormal(size=m).tolist(), rng.lognormal(size=n).tolist()
    ratios = sorted(b / a for a, b in product(base, new))
    estimate = hodges_lehmann_ratio(base, new)
    assert (estimate.low, estimate.high) == pytest.approx((ratios[k - 1], ratios[-k]))
    assert estimate.confidence is not None and estimate.confidence >= 0.95


@pytest.mark.parametrize("bad", [[], [0.0], [math.nan], [math.inf]])
@pytest.mark.parametrize("swap", [False, True])
def test_ratios_and_rank_tests_need_times(bad: list[float], swap: bool) -> None:
    base, new = ([1.0], bad) if swap else (bad, [1.0])
    with pytest.raises(ValueError, match="above 0"):
        hodges_lehmann_ratio(base, new)
    if bad != [0.0]:
        with pytest.raises(ValueError, match="at least one value"):
            rank_test(base, new)


# -------------------------------------------------------------------------------- rank test


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**6), min_size=2, max_size=14, unique=True), st.data())
def test_rank_test_without_ties_equals_scipys_exact_test(values: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(values) - 1))
    base, new = values[:cut], values[cut:]
    test = rank_test(base, new)
    assert (test.p_slower, test.p_faster) == pytest.approx(
        [
            scipy.stats.mannwhitneyu(new, base, alternative=alternative, method="exact").pvalue
            for alternative in ("greater", "less")
        ]
    )


@settings(deadline=None, max_examples=40)
@given(tied_sides, tied_sides)
def test_rank_test_with_ties_equals_the_exact_permutation_test(base: list[float], new: list[float]) -> None:
    def rank_sum(x: list[float], y: list[float]) -> float:
        return float(scipy.stats.rankdata([*x, *y])[: len(x)].sum())

    test = rank_test(base, new)
    assert (test.p_slower, test.p_faster) == pytest.approx(
        [
            scipy.stats.permutation_test(
                (new, base), rank_sum, alternative=alternative, n_resamples=np.inf, vectorized=False
            ).pvalue
            for alternative in ("greater", "less")
        ]
    )


def test_the_interval_of_many_launches_is_near_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(5)
    base, new = rng.lognormal(size=20).tolist(), rng.lognormal(size=20).tolist()
    exact = hodges_lehmann_ratio(base, new)
    monkeypatch.setattr(rank_tests, "_EXACT_UP_TO", 10)
    monkeypatch.setattr(rank_tests, "_rank_sum_tails", rank_tests._rank_sum_tails.__wrapped__)
    assert hodges_lehmann_ratio(base, new).confidence == pytest.approx(exact.confidence, abs=2e-3)


# --- bootstrap of a calibrated quantile ---


def _of_one_launch(samples_us: np.ndarray) -> SizeTimes:
    return points_of({1024: {("r", 0): samples_us}})[0]


def test_bootstrap_of_many_samples_does_not_draw_each() -> None:
    samples = np.arange(1.0, 20_001)
    tracemalloc.start()
    try:
        repetitions = intervals._repetitions([_of_one_launch(samples)], 400, np.random.default_rng(0))
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert repetitions.shape == (400, 1) and peak_bytes < 20 * samples.nbytes


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 20, 101])
def test_bootstrap_is_distributed_as_quantiles_of_drawn_samples(count: int) -> None:
    rng = np.random.default_rng(count)
    values = rng.lognormal(size=count)
    alike = [_of_one_launch(values), _of_one_launch(rng.permutation(values))]
    first, second = intervals._repetitions(alike, 20_000, rng).T
    drawn = np.quantile(resample(values, 20_000, rng), QUANTILE, axis=1)
    # Beyond what rounds differently.
    ordered = np.sort(values)
    limits = np.concatenate([ordered, *(ordered[:-1] + np.diff(ordered) * part for part in (0.2, 0.5, 0.8))])
    for pair in itertools.combinations([first, second, drawn], 2):
        shares = [[np.mean(quantiles <= limit * (1 + 1e-9)) for limit in limits] for quantiles in pair]
        assert np.abs(np.subtract(*shares)).max() < 0.02
    # Sizes are drawn independently of each other.
    assert count == 1 or abs(np.corrcoef(first, second)[0, 1]) < 0.05
