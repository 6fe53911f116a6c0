"""The gate's schedule on launches of known noise, its statistics against enumeration, and sampling in a launch."""

import itertools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from dtbench.engine.clock import HostClock
from dtbench.engine.tasks import Task
from dtbench.gate import sampler
from dtbench.gate.benchmark import Benchmark
from dtbench.gate.sampler import Sampling, measure_in_turns, sampling_for
from dtbench.gate.schedule import LOOKS, ArmName, GateSchedule, LaunchTimes, OutOfTimeError, pair_of
from dtbench.gate.verdict import compared_case, exit_code_of, has_moved, passes, rises, trust_of
from dtbench.records.comparison import ComparedCase, Counts, Verdict
from dtbench.records.gate import Trust
from dtbench.records.result import Result
from dtbench.stats import Effect, change_threshold, paired_effect, signed_rank_p, significance_level
from dtbench.suite import Case, Workload
from dtbench.suite.registry import Suite

# Scatter of a launch's minimum: 1.5 to 2.1% over 80 processes of one build.
NOISE = 0.018
TIME_S = 1e-3


def benchmarks(count: int, suite: str = "s") -> list[Benchmark]:
    return [
        Benchmark((suite, f"b{i}", "core", ()), f"{suite} b{i} [core]", "simulated", "min")
        for i in range(count)
    ]


(ANY,) = benchmarks(1)
CONTROL = benchmarks(3, "control")


class KnownLaunches:
    """Launches whose times are known.

    Args:
        factors: factor of head's time, by the benchmark's name.
        noise: sd of the logarithm of a time.
        drift: relative slowdown that each launch adds to all later ones.
        control: factor of the control's time in head.
        null: factor of all times in the null arm.
        launches: launches that the budget suffices for.
        odd: changes the times of a launch.
    """

    def __init__(
        self,
        factors: dict[str, float] | None = None,
        *,
        noise: float = NOISE,
        seed: int = 0,
        drift: float = 0.0,
        control: float = 1.0,
        null: float = 1.0,
        launches: int = 10**6,
        odd: Callable[
            [ArmName, LaunchTimes, Sequence[Benchmark]], LaunchTimes
        ] = lambda _arm, launch, _benchmarks: launch,
    ) -> None:
        self.factors, self.noise, self.drift = factors or {}, noise, drift
        self.control, self.null, self.left, self.odd = control, null, launches, odd
        self.random = random.Random(seed)
        self.arms: list[ArmName] = []
        self.measured: Counter[str] = Counter()

    def __call__(self, arms: Sequence[ArmName], benchmarks: Sequence[Benchmark]) -> list[LaunchTimes]:
        return [self.odd(arm, self._launch(arm, benchmarks), benchmarks) for arm in arms]

    def _launch(self, arm: ArmName, benchmarks: Sequence[Benchmark]) -> LaunchTimes:
        if len(self.arms) >= self.left:
            raise OutOfTimeError("the budget of 5 s is spent")
        self.arms.append(arm)
        self.measured.update(b.key[1] for b in benchmarks)
        base_s = TIME_S * math.exp(self.drift * len(self.arms))
        control, usual = self.control if arm == "head" else 1.0, self.null if arm == "null" else 1.0
        factors = self.factors if arm == "head" else {}
        times = [(b.key, control, self.noise / 4) for b in CONTROL]
        times += [(b.key, factors.get(b.key[1], usual), self.noise) for b in benchmarks]
        return LaunchTimes({key: base_s * f * self.random.lognormvariate(0, sd) for key, f, sd in times})


def judge(machine: KnownLaunches, count: int = 1, seed: int = 0) -> tuple[list[ComparedCase], Trust]:
    return GateSchedule(benchmarks(count), CONTROL, machine, seed).run()


def test_equal_arms_take_five_rounds() -> None:
    machine = KnownLaunches(noise=0.001)
    judged, trust = judge(machine, 4)
    assert {j.verdict for j in judged} == {Verdict.SAME}
    assert Counter(machine.arms) == {"base": 5, "head": 5, "null": 5} and not trust.reasons


def test_a_slow_benchmark_is_measured_on_alone_with_fresh_pairs() -> None:
    machine = KnownLaunches({"b1": 1.10}, noise=0.001)
    judged, _ = judge(machine, 3)
    assert [j.verdict for j in judged] == [Verdict.SAME, Verdict.SLOWER, Verdict.SAME]
    assert machine.measured == {"b0": 15, "b1": 15 + 2 * 10, "b2": 15}
    effect = judged[1].effect
    assert effect and (effect.pairs, effect.ratio) == (10, pytest.approx(1.10, abs=0.005))


def test_false_alarms_are_rare_at_usual_noise() -> None:
    """At most 0.5 % of benchmarks and 2 % of runs."""
    runs = 60
    judged = [judge(KnownLaunches(seed=seed, drift=0.002), 20, seed)[0] for seed in range(runs)]
    alarms = [sum(case.verdict == Verdict.SLOWER for case in cases) for cases in judged]
    assert sum(alarms) <= 0.005 * runs * 20 and sum(map(bool, alarms)) <= 0.02 * runs


@pytest.mark.parametrize(
    ("factor", "noise", "drift", "low", "high"),
    [
        pytest.param(1.03, NOISE, 0.002, 0.80, 1.0, id="+3 %"),
        pytest.param(1.05, NOISE, 0.002, 0.95, 1.0, id="+5 %"),
        pytest.param(1.0, 0.3, 0.0, 0.0, 0.05, id="too much noise"),
    ],
)
def test_share_of_gates_that_find_a_regression(
    factor: float, noise: float, drift: float, low: float, high: float
) -> None:
    gates = 75
    machines = (KnownLaunches({"b0": factor}, seed=seed, noise=noise, drift=drift) for seed in range(gates))
    verdicts = Counter(judge(machine, 1, seed)[0][0].verdict for seed, machine in enumerate(machines))
    assert low <= verdicts[Verdict.SLOWER] / gates <= high
    assert noise == NOISE or verdicts[Verdict.INCONCLUSIVE] >= 0.6 * gates


@pytest.mark.parametrize(
    ("factor", "noise", "verdict"),
    [
        (1.018, 0.0005, Verdict.SAME),  # sure, and too small to matter
        (0.97, 0.003, Verdict.SAME),  # a small gain
        (0.90, 0.003, Verdict.FASTER),
    ],
)
def test_verdict_depends_on_the_size_of_the_change(factor: float, noise: float, verdict: Verdict) -> None:
    (judged,), _ = judge(KnownLaunches({"b0": factor}, noise=noise))
    assert judged.verdict == verdict
    assert judged.effect and min(judged.effect.p_slower or 1, judged.effect.p_faster or 1) < 0.05


@pytest.mark.parametrize(
    ("factor", "count", "pairs"),
    # 3**-5 * 2**-k, the chance of head being the slowest in all, below a third of 1 %, or of 5 % over 50 benchmarks.
    [(20.0, 1, 6), (2.5, 1, 6), (20.0, 50, 9), (1.9, 1, 10)],
)
def test_gross_regression_ends_the_measurement_early(factor: float, count: int, pairs: int) -> None:
    machine = KnownLaunches({"b0": factor})
    judged, _ = judge(machine, count)
    assert (judged[0].verdict, judged[0].effect and judged[0].effect.pairs) == (Verdict.SLOWER, pairs)
    assert judged[0].stage == ("gross" if factor > 2 else "confirmed")
    assert machine.measured["b0"] == 3 * 5 + 2 * (pairs - 5 if factor > 2 else pairs)
    assert Verdict.SLOWER not in {case.verdict for case in judged[1:]}


def test_single_slow_launches_are_called_gross_no_more_often_than_the_level() -> None:
    """In each round and pair one launch is 20x slower; that it is always the head's happens by chance alone."""
    runs, gross = 2000, 0
    for seed in range(runs):
        rng, pairs = random.Random(seed), itertools.count()

        def launch(
            arms: Sequence[ArmName],
            benchmarks: Sequence[Benchmark],
            rng: random.Random = rng,
            pairs: Iterator[int] = pairs,
        ) -> list[LaunchTimes]:
            if len(arms) == 2 and next(pairs):
                raise OutOfTimeError("the budget holds one pair")
            slow = rng.choice(sorted(arms))
            return [
                LaunchTimes({b.key: TIME_S * (20 if arm == slow else 1) for b in benchmarks}) for arm in arms
            ]

        judged, _ = GateSchedule(benchmarks(1), [], launch, seed).run()
        gross += judged[0].stage == "gross"
    assert 0 < gross <= significance_level(1, LOOKS) * runs  # 3**-5 / 2 of them are expected: 4


# Time of a launch of unchanged code over its usual time: collectives scatter by 40 %; one launch in three or ten is
# slow; tails without a variance, and without a mean of their logarithm.
TAILS: dict[str, Callable[[random.Random], float]] = {
    "CV 40 %": lambda r: r.lognormvariate(0, 0.385),
    "bimodal": lambda r: r.lognormvariate(0, NOISE) * (20 if r.random() < 1 / 3 else 1),
    "seldom slow": lambda r: r.lognormvariate(0, NOISE) * (3 if r.random() < 0.1 else 1),
    "heavy": lambda r: math.exp(math.copysign(min(abs(10 * math.tan(math.pi * (r.random() - 0.5))), 300), 1)),
}


@pytest.mark.parametrize("tail", TAILS)
def test_noise_of_any_kind_is_seldom_called_gross(tail: str) -> None:
    """Before the first test at most 0.5 % of benchmarks are called slower, and none gross."""
    runs, cases = 15, list[ComparedCase]()
    for seed in range(runs):
        rng = random.Random(f"{tail} {seed}")

        def odd(
            _arm: ArmName, launch: LaunchTimes, benchmarks: Sequence[Benchmark], rng: random.Random = rng
        ) -> LaunchTimes:
            return LaunchTimes(launch.times_s | {b.key: TIME_S * TAILS[tail](rng) for b in benchmarks})

        cases += judge(KnownLaunches(odd=odd, seed=seed, launches=3 * 5 + 2 * 10), 20, seed)[0]
    assert sum(case.verdict is Verdict.SLOWER for case in cases) <= 0.005 * runs * 20
    assert "gross" not in {case.stage for case in cases}


@pytest.mark.parametrize(
    ("samples", "ratio"),
    [
        ((3.0, 2.2, 4.4), 1.1),
        # Without samples in pairs it is the ratio of their times.
        (None, 1.3),
        ((1.3,), 1.3),
        *(((1.3, bad, 1.3), 1.3) for bad in (0.0, -1.0, math.inf, math.nan)),
    ],
)
def test_ratio_of_two_launches_is_the_median_ratio_of_their_samples(
    samples: tuple[float, ...] | None, ratio: float
) -> None:
    base = LaunchTimes({ANY.key: 1.0}, {}, {ANY.key: (1.0, 2.0, 4.0)})
    head = LaunchTimes({ANY.key: 1.3}, {}, {ANY.key: samples} if samples else {})
    assert pair_of(base, head, ANY.key) == pytest.approx((1.0, ratio))
    assert pair_of(head, base, ANY.key) == pytest.approx((1.3, 1.3 / ratio))


@pytest.mark.parametrize("noise", [0.0, 1e-4, NOISE])
@pytest.mark.parametrize(("launches", "fresh"), [(3, 0), (9, 0), (15, 0), (15 + 2 * 9, 9)])
def test_spent_budget_before_the_first_test_promises_no_change_to_be_found(
    launches: int, fresh: int, noise: float
) -> None:
    (judged,), _ = judge(KnownLaunches({"b0": 1.2}, launches=launches, noise=noise))
    assert judged.verdict == Verdict.INCONCLUSIVE and judged.effect
    assert judged.reason.endswith(f"{fresh} of the 10 fresh pairs that a test needs were measured")
    assert "finds" not in judged.reason and "budget of 5 s" in judged.reason
    if judged.high is None or not noise:
        assert judged.effect.smallest_detectable is None
    assert judge(KnownLaunches(launches=0))[0][0].reason.endswith("it was not measured")


def test_detectable_change_is_stated_by_inconclusive_gates_only() -> None:
    promises = []
    for seed in range(60):
        (case,), _ = judge(KnownLaunches({"b0": 1 + seed / 300}, noise=0.2, seed=seed))
        found = re.search(r"detects a change of ([\d.]+)% in 4 of 5", case.reason)
        assert not found or (case.verdict is Verdict.INCONCLUSIVE and case.low is not None)
        promises += [float(found[1]) / 100] if found else []
    assert len(promises) > 10 and min(promises) >= 0.02


@pytest.mark.parametrize(
    ("moves", "message"),
    [({"control": 1.03}, "control"), ({"control": 1.30}, "control"), ({"null": 1.03}, "itself")],
)
def test_moving_control_or_null_makes_the_run_untrusted(moves: dict[str, float], message: str) -> None:
    machine = KnownLaunches(noise=0.002, **moves)
    _, trust = judge(machine)
    assert message in trust.reasons[0]
    assert len(machine.arms) >= 30, "five more rounds tell whether by chance"


@pytest.mark.parametrize(
    ("time_s", "verdict"),
    [
        (math.nan, Verdict.INCONCLUSIVE),
        (math.inf, Verdict.INCONCLUSIVE),
        (0.0, Verdict.INCONCLUSIVE),
        (None, Verdict.FAILED),
    ],
)
def test_invalid_time_never_passes(time_s: float | None, verdict: str) -> None:
    def odd(arm: ArmName, launch: LaunchTimes, _benchmarks: Sequence[Benchmark]) -> LaunchTimes:
        times = {**launch.times_s}
        if arm == "head" and times.pop(ANY.key, None) and time_s is not None:
            times[ANY.key] = time_s
        return LaunchTimes(times)

    judged, _ = judge(KnownLaunches(noise=0.001, odd=odd), 2)
    assert [case.verdict for case in judged] == [verdict, Verdict.SAME]


def test_benchmark_that_fails_in_a_launch_is_not_measured_again() -> None:
    def odd(arm: ArmName, launch: LaunchTimes, selected: Sequence[Benchmark]) -> LaunchTimes:
        return LaunchTimes(
            launch.times_s, {selected[0].key: "it broke"} if arm == "head" and len(selected) == 2 else {}
        )

    machine = KnownLaunches(noise=0.001, odd=odd)
    judged, _ = judge(machine, 2)
    assert [(j.verdict, j.reason) for j in judged] == [
        (Verdict.FAILED, "in head: it broke"),
        (Verdict.SAME, ""),
    ]
    assert machine.measured["b0"] <= 3


def enumerated_p(differences: np.ndarray) -> float:
    """Returns the same p-value by trying every sign."""
    moved = differences[differences != 0]
    order = np.abs(moved)
    ranks = np.array([(np.sum(order < x) + np.sum(order <= x) + 1) / 2 for x in order])
    signs = np.array([*itertools.product((0, 1), repeat=len(moved))])
    return float(np.mean(signs @ ranks >= ranks[moved > 0].sum() - 1e-9))


NORMAL = [np.random.default_rng(n).normal(s, 1.0, n) for n in range(1, 10) for s in (-0.5, 0.0, 0.5, 3.0)]
TIED = [[1.0, 1.0, -1.0, 2.0, 3.0, 0.0], [0.5] * 4, [1.0, -1.0], [2.0, 2.0, -2.0, 1.0, 1.0]]


@pytest.mark.parametrize("differences", [*NORMAL, *TIED])
def test_the_signed_rank_test_is_exact_with_ties_and_zeros(differences: list[float]) -> None:
    values = np.array(differences)
    assert signed_rank_p(values) == pytest.approx(enumerated_p(values))


@pytest.mark.parametrize("n", [5, 6, 8, 10, 11])
def test_bounds_are_the_walsh_averages_of_the_signed_rank_test(n: int) -> None:
    """The k-th Walsh average lies above the truth as often as the signed-rank sum is below k."""
    sums = [
        sum(rank * sign for rank, sign in enumerate(signs, 1))
        for signs in itertools.product((0, 1), repeat=n)
    ]
    k = max(k for k in range(1, n * n) if sum(s <= k - 1 for s in sums) / 2**n <= 0.05)
    logs = np.random.default_rng(n).normal(0.01, 0.02, n)
    walsh = sorted((a + b) / 2 for i, a in enumerate(logs) for b in logs[i:])
    effect = paired_effect([1.0] * n, list(np.exp(logs)))
    assert (effect.low, effect.high, effect.ratio) == pytest.approx(
        np.exp([walsh[k - 1], walsh[-k], np.median(walsh)])
    )
    assert effect.sd == pytest.approx(np.std(logs, ddof=1))


def test_four_pairs_have_no_bound_of_95_percent() -> None:
    effect = paired_effect([1.0] * 4, [1.0, 1.01, 0.99, 1.0])
    assert (effect.low, effect.high, paired_effect([1.0], [1.0]).sd) == (0.0, math.inf, math.inf)


@pytest.mark.parametrize(
    ("base", "head"),
    [([], []), ([1.0], [1.0, 2.0]), ([1.0], [math.nan]), ([1.0], [math.inf]), ([0.0], [1.0])],
)
def test_effect_of_invalid_times_is_an_error(base: list[float], head: list[float]) -> None:
    with pytest.raises(ValueError, match="got"):
        paired_effect(base, head)


@pytest.mark.parametrize(
    ("time_s", "floor_s", "threshold"), [(1e-3, 0.0, 0.02), (1e-6, 0.0, 0.2), (1e-3, 1e-4, 0.1)]
)
def test_change_matters_above_2_percent_its_floor_and_a_fifth_of_a_microsecond(
    time_s: float, floor_s: float, threshold: float
) -> None:
    assert change_threshold(time_s, floor_s=floor_s) == pytest.approx(threshold)


@pytest.mark.parametrize(
    ("ratio", "high", "tolerance", "is_pass"),
    [
        (1.015, 1.049, 0.05, True),
        (1.016, 1.049, 0.05, False),
        (1.0, 1.051, 0.05, False),
        (1.0, 1.051, 0.10, True),
        (1.0, math.inf, 0.10, False),
    ],
)
def test_a_pass_needs_a_small_effect_and_a_bound_within_the_tolerance(
    ratio: float, high: float, tolerance: float, is_pass: bool
) -> None:
    assert passes(replace(ANY, tolerance=tolerance), Effect(ratio, 0.9, high, 0.01, 5), 1e-3) == is_pass


def test_the_level_shrinks_with_the_family_and_the_looks() -> None:
    levels = [significance_level(family, looks) for family, looks in ((1, 1), (50, 1), (50, 2))]
    assert levels == pytest.approx([0.01, 0.001, 0.0005])


def test_only_hard_counters_that_rise_count() -> None:
    base = {"python_calls": 41.0, "allocations": 2.0, "skew_s": 0.1, "collectives": 1.0, "instructions": 1e5}
    head = {"python_calls": 43.0, "allocations": 1.0, "skew_s": 0.2, "collectives": 1.0, "instructions": 2e5}
    head["bytes_copied"] = 9.0
    assert rises(base, head) == {"python_calls": Counts(41.0, 43.0)}
    assert rises(base, head, frozenset({"python_calls"})) == {}


def test_consistent_move_is_not_trusted() -> None:
    heads = (
        (1.02, 1.015, 1.02, 1.03, 1.02),
        (1.03, 1.02, 0.98, 1.03, 1.02),
        (1.004, 1.005, 1.004, 1.003, 1.006),
        (0.98, 0.97, 0.98, 0.97, 0.98),
        (1.5, 1.04, 0.98, 1.4, 0.97),
    )
    always, once, little, faster, scattered = (paired_effect([1.0] * 5, head) for head in heads)
    assert once.ratio > 1.01 and scattered.p_slower >= once.p_slower > 0.04
    moved = [has_moved(effect) for effect in (always, once, little, faster, scattered, None)]
    assert moved == [True, False, False, True, True, False]
    assert "control" in trust_of(always, little).reasons[0]
    assert "itself" in trust_of(little, faster).reasons[0]
    drift = "the machine drifted: everything became 1.02x slower in head"
    assert trust_of(always, little, [1.02, 1.03]).reasons[-1].startswith(drift)
    assert len(trust_of(always, little, [1.0, 1.0]).reasons) == 1
    assert trust_of(None, None).reasons


@pytest.mark.parametrize(
    ("compared", "trusted", "allow_new", "code"),
    [
        ([(Verdict.SLOWER, "counters")], False, False, 1),  # counts do not depend on trust
        ([(Verdict.NEW, ""), (Verdict.SAME, "")], True, True, 0),
        ([(Verdict.NEW, "")], True, True, 4),
        *(
            ([(verdict, "confirmed") for verdict in verdicts], trusted, False, code)
            for verdicts, trusted, code in [
                ([Verdict.SAME, Verdict.FASTER], True, 0),
                ([Verdict.SAME, Verdict.SLOWER, Verdict.FAILED, Verdict.MISSING], True, 1),
                ([Verdict.SAME, Verdict.FAILED, Verdict.MISSING, Verdict.INCONCLUSIVE], True, 5),
                ([Verdict.SAME, Verdict.MISSING, Verdict.INCONCLUSIVE], True, 4),
                ([Verdict.SAME, Verdict.NEW], True, 4),
                ([Verdict.SAME, Verdict.INCONCLUSIVE], True, 3),
                ([Verdict.SAME], False, 3),
                ([Verdict.SLOWER], False, 3),
                ([], True, 4),
            ]
        ),
    ],
)
def test_exit_code_follows_from_verdicts_and_trust(
    compared: list[tuple[Verdict, str]], trusted: bool, allow_new: bool, code: int
) -> None:
    cases = [compared_case(ANY, verdict, stage=stage) for verdict, stage in compared]
    assert exit_code_of(cases, Trust(reasons=() if trusted else ("moved",)), allow_new=allow_new) == code


SUITE = Suite("made_up", lambda _plan: iter(()), "simulated", "", None, {}, False, None)


class SamplerLog:
    """Runs samplings and logs, in order, "turn", "warm", "before" and "take" with the number of the benchmark.

    Args:
        takes_s: seconds that the clock returns, in turn.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes_s: Sequence[float] = (1e-3,)) -> None:
        self.seen: list[str] = []
        self._takes_s = itertools.cycle(takes_s)
        self._kind = "warm"
        self._clock = HostClock()
        monkeypatch.setattr(self._clock, "measure", self._measure)
        monkeypatch.setattr(sampler, "WARMUP_S", 0.0)  # one call

    def _measure(self, run: Callable[[], object], calls: int) -> float:
        self._kind = "take"
        for _ in range(calls):
            run()
        self._kind = "warm"
        return next(self._takes_s)

    def run(self, *samplings: Sampling, before: bool = False, broken: int | None = None) -> list[Result]:
        """Returns the results of one benchmark per sampling; the benchmark `broken` cannot be built."""

        def task(number: int) -> Task:
            def build(_world: object) -> Workload:
                if number == broken:
                    raise RuntimeError("no such op")
                prepare = (lambda: self.seen.append(f"before {number}")) if before else None
                return Workload(run=lambda: self.seen.append(f"{self._kind} {number}"), before=prepare)

            case = Case("x", {"n": number}, {"python": build}, clock="host", samples=2, warmup_calls=0)
            return Task(SUITE, case, ("python",))

        return [
            *measure_in_turns(
                [(task(number), "python", sampling) for number, sampling in enumerate(samplings)],
                None,
                {"host": self._clock},
                lambda _: None,
                lambda turn: self.seen.append(f"turn {turn}"),
            )
        ]


def test_sample_is_the_fastest_of_its_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = SamplerLog(monkeypatch, [3e-3, 1e-3, 2e-3, 6e-3, 5e-3, 4e-3]).run(Sampling(4, 3, 1))
    assert result.samples_s == (1e-3, 4e-3, 1e-3, 4e-3)


ONE, OTHER = ["warm 0", "take 0", "take 0"], ["warm 1", "take 1"]


@pytest.mark.parametrize(
    ("samplings", "before", "seen"),
    [
        (  # a turn is awaited before each sample
            [Sampling(2, 1, 2), Sampling(2, 1, 1)],
            False,
            ["turn 0", *ONE, "turn 0", *OTHER, "turn 1", *ONE, "turn 1", *OTHER],
        ),
        # what must precede a call precedes each take
        ([Sampling(1, 2, 1)], True, ["turn 0", "before 0", "take 0", "before 0", "take 0"]),
    ],
)
def test_launch_awaits_a_turn_before_each_sample(
    monkeypatch: pytest.MonkeyPatch, samplings: list[Sampling], before: bool, seen: list[str]
) -> None:
    machine = SamplerLog(monkeypatch)
    machine.run(*samplings, before=before)
    assert machine.seen == seen


def test_a_benchmark_that_fails_takes_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch beside it, where it does not, would be out of step."""
    machine = SamplerLog(monkeypatch)
    sound, bad = machine.run(Sampling(3, 1, 1), Sampling(3, 1, 1), broken=1)
    assert [what for what in machine.seen if "turn" in what] == [f"turn {n // 2}" for n in range(6)]
    assert (sound.status, bad.status) == ("ok", "failed") and "no such op" in bad.reason


@pytest.mark.parametrize(
    ("own", "call_s", "benchmarks", "sampling"),
    [
        (None, 5e-6, 30, Sampling(20, 3, 100)),
        (None, 44e-6, 30, Sampling(20, 3, 22)),  # a take of at most a millisecond
        (None, 5e-3, 30, Sampling(12, 1, 1)),  # too slow for more takes
        (None, 1.0, 1, Sampling(10, 1, 1)),
        (3, 1.0, 30, Sampling(3, 1, 100)),  # a case that says its samples gets at least these
    ],
)
def test_slow_calls_are_sampled_less(
    own: int | None, call_s: float, benchmarks: int, sampling: Sampling
) -> None:
    assert sampling_for(Case("x", {}, {}, calls_per_sample=100, samples=own), call_s, benchmarks) == sampling
