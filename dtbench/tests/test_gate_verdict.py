"""The statistics of a gate, against enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from dtbench.gate.benchmark import Benchmark
from dtbench.gate.verdict import compared_case, exit_code_of, has_moved, passes, rises, trust_of
from dtbench.records.comparison import Counts, Verdict
from dtbench.records.gate import Trust
from dtbench.stats import Effect, change_threshold, paired_effect, signed_rank_p, significance_level

ANY = Benchmark(("s", "n", "core", ()), "s n [core]", "simulated", "min")


def enumerated_p(differences: np.ndarray) -> float:
    """The same, by trying every sign."""
    moved = differences[differences != 0]
    order = np.abs(moved)
    ranks = np.array([(np.sum(order < x) + np.sum(order <= x) + 1) / 2 for x in order])
    observed = ranks[moved > 0].sum()
    sums = [
        sum(r for r, s in zip(ranks, signs, strict=True) if s)
        for signs in itertools.product((0, 1), repeat=len(moved))
    ]
    return sum(s >= observed - 1e-9 for s in sums) / len(sums)


NORMAL = [np.random.default_rng(n).normal(s, 1.0, n) for n in range(1, 10) for s in (-0.5, 0.0, 0.5, 3.0)]
TIED = [[1.0, 1.0, -1.0, 2.0, 3.0, 0.0], [0.5] * 4, [1.0, -1.0], [2.0, 2.0, -2.0, 1.0, 1.0]]


@pytest.mark.parametrize("differences", [*NORMAL, *TIED])
def test_the_signed_rank_test_is_exact_with_ties_and_zeros(differences: list[float]) -> None:
    values = np.array(differences)
    assert signed_rank_p(values) == pytest.approx(enumerated_p(values))


@pytest.mark.parametrize("n", [5, 6, 8, 10, 11])
def test_bounds_cover_as_they_say(n: int) -> None:
    """The k-th Walsh average lies above the truth as often as the signed-rank sum is below k."""
    sums = [
        sum(r for r, s in zip(range(1, n + 1), signs, strict=True) if s)
        for signs in itertools.product((0, 1), repeat=n)
    ]
    k = max(k for k in range(1, n * n) if sum(s <= k - 1 for s in sums) / 2**n <= 0.05)
    logs = np.random.default_rng(n).normal(0.01, 0.02, n)
    walsh = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    effect = paired_effect([1.0] * n, list(np.exp(logs)))
    assert effect.low == pytest.approx(math.exp(walsh[k - 1]))
    assert effect.high == pytest.approx(math.exp(walsh[-k]))
    assert effect.ratio == pytest.approx(math.exp(np.median(walsh)))
    assert effect.sd == pytest.approx(np.std(logs, ddof=1))


def test_four_pairs_have_no_bound_of_95_percent() -> None:
    effect = paired_effect([1.0] * 4, [1.0, 1.01, 0.99, 1.0])
    assert (effect.low, effect.high) == (0.0, math.inf)
    assert paired_effect([1.0], [1.0]).sd == math.inf


@pytest.mark.parametrize(
    ("base", "head"),
    [([], []), ([1.0], [1.0, 2.0]), ([1.0], [math.nan]), ([1.0], [math.inf]), ([0.0], [1.0])],
)
def test_what_is_no_time_has_no_effect(base: list[float], head: list[float]) -> None:
    with pytest.raises(ValueError, match="got"):
        paired_effect(base, head)


def test_a_change_matters_above_2_percent_its_floor_and_a_fifth_of_a_microsecond() -> None:
    assert change_threshold(1e-3) == 0.02
    assert change_threshold(1e-6) == pytest.approx(0.2)
    assert change_threshold(1e-3, floor_s=1e-4) == pytest.approx(0.1)


def test_a_pass_needs_a_small_effect_and_a_bound_within_the_tolerance() -> None:
    def effect(ratio: float, high: float) -> Effect:
        return Effect(ratio, 0.9, high, 0.01, 5)

    assert passes(ANY, effect(1.015, 1.049), 1e-3)
    assert not passes(ANY, effect(1.016, 1.049), 1e-3)
    assert not passes(ANY, effect(1.0, 1.051), 1e-3)
    wide = Benchmark(ANY.key, ANY.label, "simulated", "min", tolerance=0.10)
    assert passes(wide, effect(1.0, 1.051), 1e-3)
    assert not passes(wide, effect(1.0, math.inf), 1e-3)


def test_the_level_shrinks_with_the_family_and_the_looks() -> None:
    assert significance_level(1, 1) == 0.01
    assert significance_level(50, 1) == pytest.approx(0.001)
    assert significance_level(50, 2) == pytest.approx(0.0005)


def test_only_hard_counters_that_rise_count() -> None:
    base = {"python_calls": 41.0, "allocations": 2.0, "skew_s": 0.1, "collectives": 1.0}
    head = {"python_calls": 43.0, "allocations": 1.0, "skew_s": 0.2, "collectives": 1.0, "bytes_copied": 9.0}
    assert rises(base, head) == {"python_calls": Counts(41.0, 43.0)}
    assert rises(base, head, frozenset({"python_calls"})) == {}


def test_what_moves_by_chance_is_trusted_and_what_moves_always_is_not() -> None:
    always = paired_effect([1.0] * 5, [1.02, 1.015, 1.02, 1.03, 1.02])
    once = paired_effect([1.0] * 5, [1.03, 1.02, 0.98, 1.03, 1.02])
    scattered = paired_effect([1.0] * 5, [1.5, 1.04, 0.98, 1.4, 0.97])
    little = paired_effect([1.0] * 5, [1.004, 1.005, 1.004, 1.003, 1.006])
    faster = paired_effect([1.0] * 5, [0.98, 0.97, 0.98, 0.97, 0.98])
    assert once.ratio > 1.01 and scattered.p_slower >= once.p_slower > 0.04
    effects = (always, once, little, faster, scattered, None)
    assert [has_moved(e) for e in effects] == [True, False, False, True, True, False]
    assert "control" in trust_of(always, little, measured=True).reasons[0]
    assert "itself" in trust_of(little, faster, measured=True).reasons[0]
    assert (
        trust_of(always, little, True, [1.02, 1.03])
        .reasons[-1]
        .startswith("the machine drifted: all is 1.02x slower in head")
    )
    assert len(trust_of(always, little, True, [1.0, 1.0]).reasons) == 1
    assert trust_of(None, None, measured=True).reasons
    assert not trust_of(None, None, measured=False).reasons


@pytest.mark.parametrize(
    ("verdicts", "trusted", "code"),
    [
        ([Verdict.SAME, Verdict.FASTER], True, 0),
        ([Verdict.SAME, Verdict.SLOWER, Verdict.FAILED, Verdict.MISSING], True, 1),
        ([Verdict.SAME, Verdict.FAILED, Verdict.MISSING, Verdict.INCONCLUSIVE], True, 5),
        ([Verdict.SAME, Verdict.MISSING, Verdict.INCONCLUSIVE], True, 4),
        ([Verdict.SAME, Verdict.NEW], True, 4),
        ([Verdict.SAME, Verdict.INCONCLUSIVE], True, 3),
        ([Verdict.SAME], False, 3),
        ([Verdict.SLOWER], False, 3),
        ([], True, 4),
    ],
)
def test_exit_codes(verdicts: list[Verdict], trusted: bool, code: int) -> None:
    trust = Trust(reasons=() if trusted else ("moved",))
    assert exit_code_of([compared_case(ANY, v, stage="confirmed") for v in verdicts], trust) == code


def test_what_was_counted_needs_no_trust_and_new_ones_may_be_allowed() -> None:
    counted = [compared_case(ANY, Verdict.SLOWER, stage="counters")]
    assert exit_code_of(counted, Trust(reasons=("moved",))) == 1
    assert (
        exit_code_of(
            [compared_case(ANY, Verdict.NEW), compared_case(ANY, Verdict.SAME)], Trust(), allow_new=True
        )
        == 0
    )
    assert exit_code_of([compared_case(ANY, Verdict.NEW)], Trust(), allow_new=True) == 4
