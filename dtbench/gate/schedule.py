"""Which launches a verdict needs, and when to stop. Pure: launches are made by a function it is given.

    rounds of the screen   base, head and base again, in random order: five of them pass what is clearly fine
    fresh pairs            base and head, for what the screen does not pass; they alone can call it a little slower

Fresh pairs may let a benchmark pass from the second on, and are tested after 10 and 22. What the screen saw may help to
pass a benchmark; it condemns none but what is at least twice as slow in every round and pair so far, which ends as soon
as chance would not do so: the three launches of a round stand in random order, so that head is the slowest in one of
three, and in one of two of a pair, whatever the noise is. The level is split over these three looks.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Literal

from dtbench.gate.benchmark import Benchmark, Key
from dtbench.gate.verdict import has_moved, judged, passes, trust_of
from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.records.gate import Trust
from dtbench.stats import FAMILY_P, Effect, change_threshold, paired_effect, significance_level
from dtbench.text.units import plural

ArmName = Literal["base", "head", "null"]

SCREEN_ROUNDS = 5
# Where something moved that nobody touched, as many rounds again tell chance from a disturbed machine.
MORE_ROUNDS = 5
# From here on each pair may let a benchmark pass. Only at the test's looks may it be called slower or faster.
FIRST_PASS_LOOK = 2
TEST_LOOKS = (10, 22)
LOOKS = len(TEST_LOOKS) + 1
# What is unmistakable: of unchanged collectives, whose times scatter most (CV of 40 %), one pair in ten.
GROSS = 2.0
# Of base, head and base again in each round of the screen, and of base and head in each pair.
MOST_LAUNCHES = 3 * SCREEN_ROUNDS + 2 * TEST_LOOKS[-1]
# A gain is worth fresh pairs where the screen shows so much of it in every pair.
SCREEN_GAIN = 0.04


class OutOfTimeError(Exception):
    """The budget does not hold another launch."""


@dataclass(frozen=True)
class LaunchTimes:
    """One launch of one arm. times_s: the estimates, control included. samples_s: what was sampled in turn with the
    launches beside it, the first with the first. bad: what failed, and why.
    """

    times_s: Mapping[Key, float]
    bad: Mapping[Key, str] = field(default_factory=dict)
    samples_s: Mapping[Key, Sequence[float]] = field(default_factory=dict)


# Makes one launch of the benchmarks per arm, next to each other, in this order.
LaunchArms = Callable[[Sequence[ArmName], Sequence[Benchmark]], Sequence[LaunchTimes]]


Pair = tuple[float, float]  # base and head, seconds
Pairs = defaultdict[Key, list[Pair]]


@dataclass
class Evidence:
    """What was measured: the pairs of each benchmark in the screen, there of base against itself, and the fresh ones;
    null: base against itself as a whole."""

    screen: Pairs = field(default_factory=lambda: defaultdict(list))
    itself: Pairs = field(default_factory=lambda: defaultdict(list))
    fresh: Pairs = field(default_factory=lambda: defaultdict(list))
    control: list[Pair] = field(default_factory=list)
    null: list[Pair] = field(default_factory=list)
    launches: int = 0
    stopped: str = ""


class GateSchedule:
    """A gate's launches. `run` makes them and returns the verdicts, in the order of the benchmarks."""

    def __init__(
        self,
        benchmarks: Sequence[Benchmark],
        control: Sequence[Benchmark],
        launch: LaunchArms,
        seed: int,
        say: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self._benchmarks = list(benchmarks)
        self._control = list(control)
        self._launch = launch
        self._random = random.Random(seed)
        self._say = say
        self.evidence = Evidence()
        self._judged: dict[Key, ComparedCase] = {}

    def run(self) -> tuple[list[ComparedCase], Trust]:
        """Launches until every benchmark has its verdict or the budget is spent."""
        if self._benchmarks:
            try:
                self._screen()
                self._confirm()
            except OutOfTimeError as error:
                self.evidence.stopped = str(error)
        for benchmark in self._left():
            self._leave_undecided(benchmark)
        ended = [self._judged[b.key] for b in self._benchmarks]
        control, null = (self._effect(pairs) for pairs in (self.evidence.control, self.evidence.null))
        return ended, trust_of(control, null, bool(ended), [j.ratio for j in ended if j.ratio is not None])

    # ---- stages ----

    def _screen(self) -> None:
        self._rounds(SCREEN_ROUNDS)
        if any(has_moved(self._effect(pairs)) for pairs in (self.evidence.control, self.evidence.null)):
            self._say("an unchanged benchmark moved: five more rounds, to tell chance from drift")
            self._rounds(MORE_ROUNDS)
        for benchmark in self._left():
            effect, base_s, _ = figures = effect_and_times(self.evidence.screen[benchmark.key])
            gain = effect.ratio < 1 - SCREEN_GAIN and effect.high < 1
            if passes(benchmark, effect, base_s) and not gain:
                self._end(judged(benchmark, Verdict.SAME, "", "screen", figures))
        self._end_gross()

    def _rounds(self, count: int) -> None:
        for number in range(count):
            launches = self._together(
                ["base", "head", "null"], self.evidence.screen, f"screen {number + 1} of {count}"
            )
            for benchmark in self._left():
                key = benchmark.key
                self.evidence.itself[key].append(pair_of(launches["base"], launches["null"], key))
            _compare(self.evidence.null, launches["base"], launches["null"], self._left())

    def _confirm(self) -> None:
        family = len(self._left())
        if not family:
            return
        last = max(TEST_LOOKS[-1], fewest_pairs(family))
        looks = [*TEST_LOOKS[:-1], last]
        alpha = significance_level(family, LOOKS)
        for number in range(1, last + 1):
            if not self._left():
                return
            self._together(["base", "head"], self.evidence.fresh, f"fresh pair {number} of at most {last}")
            self._end_gross()
            if number >= FIRST_PASS_LOOK:
                for benchmark in self._left():
                    self._look(benchmark, alpha if number in looks else None, number == last)

    def _end_gross(self) -> None:
        """What is gross in all that was measured, where chance would not make it so."""
        alpha = significance_level(len(self._benchmarks), LOOKS)  # the screen has chosen none of them
        for benchmark in self._left():
            screened, fresh = (e[benchmark.key] for e in (self.evidence.screen, self.evidence.fresh))
            effect, base_s, _ = figures = effect_and_times(screened + fresh)
            least = max(GROSS, 1 + change_threshold(base_s, benchmark.floor_s))
            in_rounds = zip(screened, self.evidence.itself[benchmark.key], strict=True)
            gross = all(head >= least * max(base, again) for (base, head), (_, again) in in_rounds)
            gross &= all(head >= least * base for base, head in fresh)
            if gross and 3.0 ** -len(screened) * 2.0 ** -len(fresh) <= alpha:
                reason = f"at least {least:.3g}x slower in each of {effect.pairs} pairs: no more were needed"
                self._end(judged(benchmark, Verdict.SLOWER, reason, "gross", figures, alpha))

    def _look(self, benchmark: Benchmark, alpha: float | None, last: bool) -> None:
        screened, confirmed = (e[benchmark.key] for e in (self.evidence.screen, self.evidence.fresh))
        fresh, base_s, _ = figures = effect_and_times(confirmed)
        whole, whole_base_s, _ = of_all = effect_and_times(screened + confirmed)
        matters = change_threshold(base_s, benchmark.floor_s)
        if alpha is not None and fresh.p_slower < alpha and fresh.ratio > 1 + matters:
            self._end(judged(benchmark, Verdict.SLOWER, "", "confirmed", figures, alpha))
        elif alpha is not None and fresh.p_faster < alpha and fresh.ratio < 1 / (1 + matters):
            self._end(judged(benchmark, Verdict.FASTER, "", "confirmed", figures, alpha))
        elif passes(benchmark, whole, whole_base_s) and (last or fresh.ratio > 1 / (1 + matters)):
            self._end(judged(benchmark, Verdict.SAME, "", "confirmed", of_all))
        elif last and passes(benchmark, fresh, base_s, share=1.0):
            self._end(judged(benchmark, Verdict.SAME, "", "confirmed", figures, alpha))

    # ---- parts ----

    def _together(self, arms: list[ArmName], evidence: Pairs, stage: str) -> dict[ArmName, LaunchTimes]:
        """Launches of the arms next to each other, of all benchmarks that are left; keeps base and head as pairs."""
        benchmarks = self._left()
        self._say(f"{stage}: {plural(len(benchmarks), 'benchmark')}")
        self._random.shuffle(arms)
        launches = dict(zip(arms, self._launch(arms, benchmarks), strict=True))
        self.evidence.launches += len(launches)
        for arm, launch in launches.items():
            self._sort_out("head" if arm == "head" else "base", launch, benchmarks)
        for benchmark in self._left():
            evidence[benchmark.key].append(pair_of(launches["base"], launches["head"], benchmark.key))
        _compare(self.evidence.control, launches["base"], launches["head"], self._control)
        return launches

    def _sort_out(self, who: str, launch: LaunchTimes, benchmarks: Sequence[Benchmark]) -> None:
        """What has no time in this launch has its verdict."""
        for benchmark in benchmarks:
            key = benchmark.key
            if key in self._judged:
                continue
            time_s = launch.times_s.get(key)
            if key in launch.bad:
                self._end(judged(benchmark, Verdict.FAILED, f"in {who}: {launch.bad[key]}"))
            elif time_s is None:
                self._end(judged(benchmark, Verdict.FAILED, f"a launch of {who} gave no time of it"))
            elif not 0 < time_s < math.inf:
                reason = f"a launch of {who} measured {time_s:g} s: below what the clock resolves, or no time"
                self._end(judged(benchmark, Verdict.INCONCLUSIVE, reason))

    def _left(self) -> list[Benchmark]:
        return [b for b in self._benchmarks if b.key not in self._judged]

    def _end(self, verdict: ComparedCase) -> None:
        self._judged[verdict.key] = verdict

    def _effect(self, pairs: Sequence[Pair]) -> Effect | None:
        return effect_and_times(pairs)[0] if pairs else None

    def _leave_undecided(self, benchmark: Benchmark) -> None:
        pairs = self.evidence.screen[benchmark.key] + self.evidence.fresh[benchmark.key]
        why = self.evidence.stopped or "neither slower nor within its tolerance"
        if not pairs:
            self._end(judged(benchmark, Verdict.INCONCLUSIVE, f"{why}; it was not measured"))
            return
        tested = self.evidence.fresh[benchmark.key]
        if len(tested) < TEST_LOOKS[0]:
            why += f"; {len(tested)} of the {TEST_LOOKS[0]} fresh pairs that a test needs were measured"
            tested = pairs
        effect, base_s, _ = effect_and_times(tested)
        smallest = effect.smallest_detectable(alpha := significance_level(len(self._benchmarks), LOOKS))
        # Less than what was measured and not found is no promise.
        if tested is not pairs and abs(effect.ratio - 1) < smallest < math.inf:
            shown = f"{max(smallest, change_threshold(base_s, benchmark.floor_s)):.1%}"
            why += (
                f"; a test of {len(tested)} fresh pairs of this spread finds a change of {shown} 4 times in 5"
            )
        self._end(judged(benchmark, Verdict.INCONCLUSIVE, why, "", effect_and_times(pairs), alpha))


def pair_of(base: LaunchTimes, head: LaunchTimes, key: Key) -> Pair:
    """What the launches say of a benchmark: base's estimate, and head's as far from it as samples taken together are
    from each other in the median. Noise that lasts longer than two samples is in both, and the median
    leaves out what is not; the estimates themselves where nothing was sampled in turn, or a sample is no time.
    """
    base_s, ours, theirs = base.times_s[key], base.samples_s.get(key, ()), head.samples_s.get(key, ())
    if not ours or len(ours) != len(theirs) or not all(0 < t < math.inf for t in (*ours, *theirs)):
        return base_s, head.times_s[key]
    return base_s, base_s * math.exp(median(math.log(h / b) for b, h in zip(ours, theirs, strict=True)))


def _compare(
    pairs: list[Pair], one: LaunchTimes, other: LaunchTimes, benchmarks: Sequence[Benchmark]
) -> None:
    """Adds two launches as a whole, by the benchmarks that both measured, if there are any."""
    times = [one.times_s, other.times_s]
    keys = [b.key for b in benchmarks if all(0 < t.get(b.key, 0.0) < math.inf for t in times)]
    if keys:
        first, second = zip(*(pair_of(one, other, key) for key in keys), strict=True)
        pairs.append((geometric_mean(first), geometric_mean(second)))


def effect_and_times(pairs: Sequence[Pair]) -> tuple[Effect, float, float]:
    """The effect of the pairs, the median of base, and this times the effect: head's, without what drifted between the
    pairs."""
    base, head = [b for b, _ in pairs], [h for _, h in pairs]
    effect, base_s = paired_effect(base, head), median(base)
    return effect, base_s, base_s * effect.ratio


def fewest_pairs(family: int) -> int:
    """How many pairs the test of one of so many benchmarks needs to be able to speak at all, and two more:
    n pairs that all agree have p = 2**-n."""
    return math.ceil(-math.log2(FAMILY_P / family / LOOKS)) + 2
