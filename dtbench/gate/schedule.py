"""Decides which launches are needed, and when to stop. The launches themselves are made by a given function.

    screening rounds   first stage: base, head and base again, in random order
    fresh pairs        second stage, for undecided benchmarks: base and head, in random order

After five screening rounds, clearly unchanged benchmarks pass. From the second fresh pair on, a benchmark may pass by
its rounds and pairs together. Two tests of the fresh pairs alone, after 10 and after 22, decide small slowdowns. With
many benchmarks the second test comes later.

A slowdown is decided earlier only if head is at least twice as slow in every round and pair, beyond chance. Without a
change, head is the slowest launch in one of three rounds and one of two pairs. The significance level is split over
this check and the two tests.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Literal

from dtbench.gate.benchmark import Benchmark, Key
from dtbench.gate.verdict import compared_case, has_moved, passes, trust_of
from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.records.gate import Trust
from dtbench.stats import FAMILY_P, Effect, change_threshold, paired_effect, significance_level
from dtbench.text.units import plural

ArmName = Literal["base", "head", "null"]

SCREEN_ROUNDS = 5
# Additional rounds if a control moved, to distinguish chance from a disturbed machine.
MORE_ROUNDS = 5
# Number of fresh pairs from which on a benchmark may pass, and the numbers after which they are tested.
FIRST_PASS_LOOK = 2
TEST_LOOKS = (10, 22)
LOOKS = len(TEST_LOOKS) + 1  # the tests, and the check for gross slowdowns
# Ratio of a gross slowdown. Unchanged collectives, whose times scatter most (CV of 40 %), reach it in one pair of ten.
GROSS = 2.0
# Three launches per screening round, and two per fresh pair.
MOST_LAUNCHES = 3 * SCREEN_ROUNDS + 2 * TEST_LOOKS[-1]
# A speedup of at least this share in the screening rounds is not passed as "same" but confirmed by fresh pairs.
SCREEN_GAIN = 0.04


class OutOfTimeError(Exception):
    """The budget is too short for another launch."""


@dataclass(frozen=True)
class LaunchTimes:
    """The times of one launch of an arm.

    Attributes:
        times_s: benchmark -> estimate, seconds; also of the controls.
        bad: benchmark -> why it failed.
        samples_s: benchmark -> its samples, seconds. Launches took samples of equal index at about the same time.
    """

    times_s: Mapping[Key, float]
    bad: Mapping[Key, str] = field(default_factory=dict)
    samples_s: Mapping[Key, Sequence[float]] = field(default_factory=dict)


# Launches the benchmarks once per arm, together, in this order.
LaunchArms = Callable[[Sequence[ArmName], Sequence[Benchmark]], Sequence[LaunchTimes]]


Pair = tuple[float, float]  # base and head, seconds
Pairs = defaultdict[Key, list[Pair]]


@dataclass
class Evidence:
    """The measured pairs.

    Attributes:
        screen: benchmark -> base and head in each screening round.
        repeated: benchmark -> base and base again in each screening round.
        fresh: benchmark -> base and head in each fresh pair.
        control: base and head in each round and pair, geometric mean of all controls.
        null: base and base again in each round, geometric mean of all benchmarks.
        launches: number of launches.
        stopped: why measuring ended early.
    """

    screen: Pairs = field(default_factory=lambda: defaultdict(list))
    repeated: Pairs = field(default_factory=lambda: defaultdict(list))
    fresh: Pairs = field(default_factory=lambda: defaultdict(list))
    control: list[Pair] = field(default_factory=list)
    null: list[Pair] = field(default_factory=list)
    launches: int = 0
    stopped: str = ""


class GateSchedule:
    """Makes the timed launches of a gate and decides the verdicts from their times.

    Args:
        benchmarks: the benchmarks to decide.
        control: the control benchmarks.
        launch: makes launches and returns their times.
        seed: seed of the order of launches.
        say: prints a progress line.
    """

    def __init__(
        self,
        benchmarks: Sequence[Benchmark],
        control: Sequence[Benchmark],
        launch: LaunchArms,
        seed: int,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._benchmarks, self._control = list(benchmarks), list(control)
        self._launch, self._random, self._say = launch, random.Random(seed), say
        self.evidence = Evidence()
        self._verdicts: dict[Key, ComparedCase] = {}

    def run(self) -> tuple[list[ComparedCase], Trust]:
        """Launches until every benchmark has a verdict or the budget is spent; returns the verdicts in order."""
        try:
            self._screen()
            self._confirm()
        except OutOfTimeError as error:
            self.evidence.stopped = str(error)
        for benchmark in self._undecided():
            self._decide_inconclusive(benchmark)
        ended = [self._verdicts[b.key] for b in self._benchmarks]
        control, null = (self._effect(pairs) for pairs in (self.evidence.control, self.evidence.null))
        return ended, trust_of(control, null, [j.ratio for j in ended if j.ratio is not None])

    # ---- stages ----

    def _screen(self) -> None:
        self._rounds(SCREEN_ROUNDS)
        if any(has_moved(self._effect(pairs)) for pairs in (self.evidence.control, self.evidence.null)):
            self._say("identical code changed its time: five more rounds, to distinguish chance from drift")
            self._rounds(MORE_ROUNDS)
        for benchmark in self._undecided():
            effect, base_s, _ = figures = effect_and_times(self.evidence.screen[benchmark.key])
            gain = effect.ratio < 1 - SCREEN_GAIN and effect.high < 1
            if passes(benchmark, effect, base_s) and not gain:
                self._decide(compared_case(benchmark, Verdict.SAME, "", "screen", figures))
        self._decide_gross()

    def _rounds(self, count: int) -> None:
        for number in range(count):
            launches = self._launch_arms(
                ["base", "head", "null"], self.evidence.screen, f"screen {number + 1} of {count}"
            )
            for benchmark in self._undecided():
                self.evidence.repeated[benchmark.key].append(
                    pair_of(launches["base"], launches["null"], benchmark.key)
                )
            _compare(self.evidence.null, launches["base"], launches["null"], self._undecided())

    def _confirm(self) -> None:
        family = max(len(self._undecided()), 1)
        # n pairs that all agree have p = 2**-n. The last test has at least two more pairs than its level needs.
        last = max(TEST_LOOKS[-1], math.ceil(-math.log2(FAMILY_P / family / LOOKS)) + 2)
        alpha = significance_level(family, LOOKS)
        for number in range(1, last + 1):
            if not self._undecided():
                return
            self._launch_arms(["base", "head"], self.evidence.fresh, f"fresh pair {number} of at most {last}")
            self._decide_gross()
            if number >= FIRST_PASS_LOOK:
                is_test = number in (*TEST_LOOKS[:-1], last)
                for benchmark in self._undecided():
                    self._look(benchmark, alpha if is_test else None, number == last)

    def _decide_gross(self) -> None:
        """Decides benchmarks whose head is slower by the gross ratio in every round and pair, beyond chance."""
        # The level is split over all benchmarks, since this check also uses the screening, which times all of them.
        alpha = significance_level(len(self._benchmarks), LOOKS)
        for benchmark in self._undecided():
            screened, fresh = (pairs[benchmark.key] for pairs in (self.evidence.screen, self.evidence.fresh))
            effect, base_s, _ = figures = effect_and_times(screened + fresh)
            gross_ratio = max(GROSS, 1 + change_threshold(base_s, benchmark.floor_s))
            in_rounds = zip(screened, self.evidence.repeated[benchmark.key], strict=True)
            gross = all(
                head >= gross_ratio * max(base, base_again) for (base, head), (_, base_again) in in_rounds
            )
            gross &= all(head >= gross_ratio * base for base, head in fresh)
            if gross and 3.0 ** -len(screened) * 2.0 ** -len(fresh) <= alpha:
                reason = f"at least {gross_ratio:.3g}x slower in each of {effect.pairs} pairs, so no more were measured"
                self._decide(compared_case(benchmark, Verdict.SLOWER, reason, "gross", figures, alpha))

    def _look(self, benchmark: Benchmark, alpha: float | None, last: bool) -> None:
        screened, confirmed = (pairs[benchmark.key] for pairs in (self.evidence.screen, self.evidence.fresh))
        fresh, base_s, _ = figures = effect_and_times(confirmed)
        all_pairs, all_base_s, _ = all_figures = effect_and_times(screened + confirmed)
        threshold = change_threshold(base_s, benchmark.floor_s)
        if alpha is not None and fresh.p_slower < alpha and fresh.ratio > 1 + threshold:
            self._decide(compared_case(benchmark, Verdict.SLOWER, "", "confirmed", figures, alpha))
        elif alpha is not None and fresh.p_faster < alpha and fresh.ratio < 1 / (1 + threshold):
            self._decide(compared_case(benchmark, Verdict.FASTER, "", "confirmed", figures, alpha))
        elif passes(benchmark, all_pairs, all_base_s) and (last or fresh.ratio > 1 / (1 + threshold)):
            self._decide(compared_case(benchmark, Verdict.SAME, "", "confirmed", all_figures))
        elif last and passes(benchmark, fresh, base_s, share=1.0):
            self._decide(compared_case(benchmark, Verdict.SAME, "", "confirmed", figures, alpha))

    # ---- parts ----

    def _launch_arms(self, arms: list[ArmName], evidence: Pairs, stage: str) -> dict[ArmName, LaunchTimes]:
        """Launches the undecided benchmarks once per arm and adds the pairs of base and head to `evidence`."""
        benchmarks = self._undecided()
        self._say(f"{stage}: {plural(len(benchmarks), 'benchmark')}")
        self._random.shuffle(arms)
        launches = dict(zip(arms, self._launch(arms, benchmarks), strict=True))
        self.evidence.launches += len(launches)
        for arm, launch in launches.items():
            self._decide_untimed("head" if arm == "head" else "base", launch)
        for benchmark in self._undecided():
            evidence[benchmark.key].append(pair_of(launches["base"], launches["head"], benchmark.key))
        _compare(self.evidence.control, launches["base"], launches["head"], self._control)
        return launches

    def _decide_untimed(self, side: str, launch: LaunchTimes) -> None:
        """Decides the benchmarks that have no time in this launch."""
        for benchmark in self._undecided():
            time_s = launch.times_s.get(benchmark.key)
            if benchmark.key in launch.bad:
                self._decide(
                    compared_case(benchmark, Verdict.FAILED, f"in {side}: {launch.bad[benchmark.key]}")
                )
            elif time_s is None:
                self._decide(
                    compared_case(benchmark, Verdict.FAILED, f"a launch of {side} returned no time for it")
                )
            elif not 0 < time_s < math.inf:
                reason = f"a launch of {side} measured {time_s:g} s: below the resolution of the clock, or not a time"
                self._decide(compared_case(benchmark, Verdict.INCONCLUSIVE, reason))

    def _undecided(self) -> list[Benchmark]:
        return [b for b in self._benchmarks if b.key not in self._verdicts]

    def _decide(self, verdict: ComparedCase) -> None:
        self._verdicts[verdict.key] = verdict

    def _effect(self, pairs: Sequence[Pair]) -> Effect | None:
        return effect_and_times(pairs)[0] if pairs else None

    def _decide_inconclusive(self, benchmark: Benchmark) -> None:
        pairs = self.evidence.screen[benchmark.key] + self.evidence.fresh[benchmark.key]
        why = self.evidence.stopped or "neither slower nor within its tolerance"
        if not pairs:
            self._decide(compared_case(benchmark, Verdict.INCONCLUSIVE, f"{why}; it was not measured"))
            return
        tested = self.evidence.fresh[benchmark.key]
        if len(tested) < TEST_LOOKS[0]:
            why += f"; only {len(tested)} of the {TEST_LOOKS[0]} fresh pairs that a test needs were measured"
            tested = pairs
        effect, base_s, _ = effect_and_times(tested)
        smallest = effect.smallest_detectable(alpha := significance_level(len(self._benchmarks), LOOKS))
        # A detectable change below the measured ratio would contradict the verdict.
        if tested is not pairs and abs(effect.ratio - 1) < smallest < math.inf:
            shown = f"{max(smallest, change_threshold(base_s, benchmark.floor_s)):.1%}"
            why += f"; a test of {len(tested)} fresh pairs with this spread detects a change of {shown} in 4 of 5 cases"
        self._decide(compared_case(benchmark, Verdict.INCONCLUSIVE, why, "", effect_and_times(pairs), alpha))


def pair_of(base: LaunchTimes, head: LaunchTimes, key: Key) -> Pair:
    """Returns the times of a benchmark in two launches, seconds.

    Head's time is base's estimate times the median ratio of samples of equal index. Noise that lasts longer than two
    samples affects both, so it cancels in the ratio. The median ignores shorter noise. If samples are missing or
    invalid, the estimates of both launches are returned.
    """
    base_s, base_samples, head_samples = (
        base.times_s[key],
        base.samples_s.get(key, ()),
        head.samples_s.get(key, ()),
    )
    if (
        not base_samples
        or len(base_samples) != len(head_samples)
        or not all(0 < t < math.inf for t in (*base_samples, *head_samples))
    ):
        return base_s, head.times_s[key]
    return base_s, base_s * math.exp(
        median(math.log(h / b) for b, h in zip(base_samples, head_samples, strict=True))
    )


def _compare(
    pairs: list[Pair], first_launch: LaunchTimes, second_launch: LaunchTimes, benchmarks: Sequence[Benchmark]
) -> None:
    """Appends the geometric mean time of each launch over the benchmarks that both measured, if there are any."""
    times = [first_launch.times_s, second_launch.times_s]
    keys = [b.key for b in benchmarks if all(0 < t.get(b.key, 0.0) < math.inf for t in times)]
    if keys:
        first, second = zip(*(pair_of(first_launch, second_launch, key) for key in keys), strict=True)
        pairs.append((geometric_mean(first), geometric_mean(second)))


def effect_and_times(pairs: Sequence[Pair]) -> tuple[Effect, float, float]:
    """Returns the effect of the pairs, base's median time and head's time, seconds.

    Head's time is base's median times the ratio of the effect, so that drift between pairs cancels.
    """
    base, head = [b for b, _ in pairs], [h for _, h in pairs]
    effect, base_s = paired_effect(base, head), median(base)
    return effect, base_s, base_s * effect.ratio
