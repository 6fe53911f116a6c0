"""Which launches a verdict needs, and when to stop. Pure: launches are made by a function it is given.

    rounds of the screen   base, head and base again, in random order: five of them pass what is clearly fine
    fresh pairs            base and head, for what the screen does not pass; they alone can call it slower

Fresh pairs may let a benchmark pass from the second on, and are tested after 10 and 20: the level of the test is split
over these. What the screen saw may help to pass a benchmark, never to condemn it. A pair counts for the
benchmarks that found quiet moments in both of its launches.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from dtbench.gate.benchmark import Benchmark, Key
from dtbench.gate.verdict import (
    FAMILY_P,
    Effect,
    Judged,
    Trust,
    alpha_of,
    effect_of,
    geometric_means,
    has_moved,
    passes,
    smallest_change,
    trust_of,
)

ArmName = Literal["base", "head", "null"]

SCREEN_ROUNDS = 5
# Where something moved that nobody touched, as many rounds again tell chance from a disturbed machine.
MORE_ROUNDS = 5
# A launch in which the control is slower than in its neighbours by so much was disturbed (a core that is shared
# with another program is slower by 40 to 70%) and is made again, at most so many times.
# The control knows nothing of the arms, so both are chosen alike; and one that does differ between them
# stays and is seen. So is one in which most benchmarks found too few quiet moments, however the control fared: of
# 108 launches beside other tenants' work, all with less than three quarters of such benchmarks measured what
# the undisturbed ones did, and one of five with more was 8% off. At most half of all launches are repeats.
DISTURBED = 0.05
DISTURBED_SHARE = 0.75
TRIES = 4
# From here on each pair may let a benchmark pass. Only at the test's looks may it be called slower or faster.
FIRST_PASS_LOOK = 2
TEST_LOOKS = (10, 20)
# A gain is worth fresh pairs where the screen shows so much of it in every pair.
SCREEN_GAIN = 0.04


class OutOfTimeError(Exception):
    """The budget does not hold another launch."""


@dataclass(frozen=True)
class Launch:
    """One launch of one arm. times_s: the estimates, control included. bad: what failed, and why. disturbed: which
    of its benchmarks found too few quiet moments.
    """

    times_s: Mapping[Key, float]
    bad: Mapping[Key, str] = field(default_factory=dict)
    disturbed: frozenset[Key] = frozenset()

    @property
    def disturbed_share(self) -> float:
        """Of all its benchmarks."""
        return len(self.disturbed) / max(len(self.times_s), 1)


# Makes one launch of the benchmarks per arm, next to each other, in this order; True says that they take the
# place of disturbed ones.
LaunchArms = Callable[[Sequence[ArmName], Sequence[Benchmark], bool], Sequence[Launch]]


Pair = tuple[float, float]  # base and head, seconds


@dataclass
class Pairs:
    """What was measured of one benchmark. quiet: both launches of the pair found quiet moments. loud: one did not."""

    quiet: list[Pair] = field(default_factory=list)
    loud: list[Pair] = field(default_factory=list)

    def add(self, pair: Pair, *, quiet: bool) -> None:
        (self.quiet if quiet else self.loud).append(pair)

    @property
    def counted(self) -> list[Pair]:
        """The quiet ones if they are enough; a machine that is hardly ever quiet is taken as it is."""
        enough = len(self.quiet) >= min(SCREEN_ROUNDS, len(self.loud))
        return self.quiet if enough else self.quiet + self.loud


@dataclass
class Evidence:
    """What was measured: the pairs of each benchmark in the screen and the fresh ones; null: base against itself."""

    screen: dict[Key, Pairs] = field(default_factory=dict)
    fresh: dict[Key, Pairs] = field(default_factory=dict)
    control: Pairs = field(default_factory=Pairs)
    null: Pairs = field(default_factory=Pairs)
    launches: int = 0
    repeated: int = 0  # of them, in the place of disturbed ones
    stopped: str = ""


class Schedule:
    """A gate's launches. `run` makes them and returns the verdicts, in the order of the benchmarks."""

    def __init__(
        self,
        benchmarks: Sequence[Benchmark],
        control: Sequence[Benchmark],
        launch: LaunchArms,
        seed: int,
        say: Callable[[str], None] = lambda _text: None,
        prepare: Callable[[int], None] = lambda _rounds: None,
    ) -> None:
        """prepare: is told how many rounds or pairs are sure to follow."""
        self._benchmarks = list(benchmarks)
        self._control = list(control)
        self._launch = launch
        self._random = random.Random(seed)
        self._say = say
        self._prepare = prepare
        self.evidence = Evidence()
        self._judged: dict[Key, Judged] = {}

    def run(self) -> tuple[list[Judged], Trust]:
        """Launches until every benchmark has its verdict or the budget is spent."""
        if self._benchmarks:
            try:
                self._screen()
                self._confirm()
            except OutOfTimeError as error:
                self.evidence.stopped = str(error)
        for benchmark in self._left():
            self._judge(benchmark, self._undecided(benchmark))
        trust = trust_of(
            self._effect(self.evidence.control), self._effect(self.evidence.null), bool(self._benchmarks)
        )
        return [self._judged[b.key] for b in self._benchmarks], trust

    # ---- stages ----

    def _screen(self) -> None:
        self._rounds(SCREEN_ROUNDS)
        moved = [self._effect(pairs) for pairs in (self.evidence.control, self.evidence.null)]
        if any(has_moved(effect) for effect in moved):
            self._say("something moved that nobody touched: five more rounds tell whether by chance")
            self._rounds(MORE_ROUNDS)
        for _ in range(MORE_ROUNDS):
            short = [b for b in self._left() if 0 < len(self.evidence.screen[b.key].quiet) < SCREEN_ROUNDS]
            if not short:
                break
            self._rounds(1, short)
        for benchmark in self._left():
            effect, base_s, head_s = effect_and_times(self.evidence.screen[benchmark.key].counted)
            gain = effect.ratio < 1 - SCREEN_GAIN and effect.high < 1
            if passes(benchmark, effect, base_s) and not gain:
                self._judge(benchmark, Judged(benchmark, "PASS", "", "screen", effect, base_s, head_s))

    def _rounds(self, count: int, short: Sequence[Benchmark] = ()) -> None:
        """Rounds of all that is left, or of those that fell short of quiet ones."""
        self._prepare(count)
        for number in range(count):
            arms: list[ArmName] = ["base", "head", "null"]
            self._random.shuffle(arms)
            wanted = short or self._left()
            what = "again, for want of quiet moments" if short else f"{number + 1} of {count}"
            self._say(f"screen {what}: {len(wanted)} benchmarks")
            made = self._together(arms, wanted)
            self._keep(self.evidence.screen, wanted, made["base"], made["head"])
            _compare(self.evidence.null, made["base"], made["null"], self._among_left(wanted))

    def _confirm(self) -> None:
        left = self._left()
        if not left:
            return
        family = len(left)
        last = max(TEST_LOOKS[-1], fewest_pairs(family))
        looks = [*TEST_LOOKS[:-1], last]
        alpha = alpha_of(family, len(looks))
        self._prepare(FIRST_PASS_LOOK)
        for number in range(1, last + 1):
            left = self._left()
            if not left:
                return
            self._say(f"fresh pair {number} of at most {last}: {len(left)} benchmarks")
            arms: list[ArmName] = ["base", "head"]
            self._random.shuffle(arms)
            made = self._together(arms, left)
            self._keep(self.evidence.fresh, left, made["base"], made["head"])
            if number >= FIRST_PASS_LOOK:
                for benchmark in self._left():
                    self._look(benchmark, alpha if number in looks else None, number == last)

    def _look(self, benchmark: Benchmark, alpha: float | None, last: bool) -> None:
        screened, confirmed = (e[benchmark.key].counted for e in (self.evidence.screen, self.evidence.fresh))
        fresh, base_s, head_s = effect_and_times(confirmed)
        whole, whole_base_s, whole_head_s = effect_and_times(screened + confirmed)
        matters = smallest_change(benchmark, base_s)
        figures = (fresh, base_s, head_s, alpha)
        if alpha is not None and fresh.p_slower < alpha and fresh.ratio > 1 + matters:
            self._judge(benchmark, Judged(benchmark, "REGRESSION", "", "confirmed", *figures))
        elif alpha is not None and fresh.p_faster < alpha and fresh.ratio < 1 / (1 + matters):
            self._judge(benchmark, Judged(benchmark, "IMPROVED", "", "confirmed", *figures))
        elif passes(benchmark, whole, whole_base_s) and (last or fresh.ratio > 1 / (1 + matters)):
            done = Judged(benchmark, "PASS", "", "confirmed", whole, whole_base_s, whole_head_s)
            self._judge(benchmark, done)
        elif last and passes(benchmark, fresh, base_s, share=1.0):
            self._judge(benchmark, Judged(benchmark, "PASS", "", "confirmed", *figures))

    # ---- parts ----

    def _together(self, arms: Sequence[ArmName], benchmarks: Sequence[Benchmark]) -> dict[ArmName, Launch]:
        """Launches of the arms next to each other, those that were disturbed made again."""
        made = self._each(arms, benchmarks, again=False)
        for _ in range(TRIES - 1):
            controls = {arm: time_s for arm in arms if (time_s := self._control_s(made[arm])) is not None}
            if len(controls) < len(made):
                break
            most = (1 + DISTURBED) * min(controls.values())
            slow = [
                arm for arm in arms if controls[arm] > most or made[arm].disturbed_share > DISTURBED_SHARE
            ]
            if not slow or 2 * self.evidence.repeated + len(slow) > self.evidence.launches:
                break
            made |= self._each(slow, benchmarks, again=True)
            self.evidence.repeated += len(slow)
        return made

    def _control_s(self, launch: Launch) -> float | None:
        keys = [b.key for b in self._control]
        if not keys or not all(0 < launch.times_s.get(key, 0.0) < math.inf for key in keys):
            return None
        return geometric_means([launch.times_s], keys)[0]

    def _each(
        self, arms: Sequence[ArmName], benchmarks: Sequence[Benchmark], *, again: bool
    ) -> dict[ArmName, Launch]:
        made = dict(zip(arms, self._launch(arms, benchmarks, again), strict=True))
        self.evidence.launches += len(made)
        for arm, launch in made.items():
            self._sort_out("head" if arm == "head" else "base", launch, benchmarks)
        return made

    def _sort_out(self, who: str, launch: Launch, benchmarks: Sequence[Benchmark]) -> None:
        """What has no time in this launch has its verdict."""
        for benchmark in benchmarks:
            key = benchmark.key
            if key in self._judged:
                continue
            time_s = launch.times_s.get(key)
            if key in launch.bad:
                self._judge(benchmark, Judged(benchmark, "FAILED", f"in {who}: {launch.bad[key]}"))
            elif time_s is None:
                self._judge(benchmark, Judged(benchmark, "FAILED", f"a launch of {who} gave no time of it"))
            elif not 0 < time_s < math.inf:
                reason = f"a launch of {who} measured {time_s:g} s: below what the clock resolves, or no time"
                self._judge(benchmark, Judged(benchmark, "INCONCLUSIVE", reason))

    def _keep(
        self, evidence: dict[Key, Pairs], measured: Sequence[Benchmark], base: Launch, head: Launch
    ) -> None:
        for benchmark in self._among_left(measured):
            key = benchmark.key
            quiet = key not in base.disturbed | head.disturbed
            evidence.setdefault(key, Pairs()).add((base.times_s[key], head.times_s[key]), quiet=quiet)
        _compare(self.evidence.control, base, head, self._control)

    def _among_left(self, benchmarks: Sequence[Benchmark]) -> list[Benchmark]:
        return [b for b in benchmarks if b.key not in self._judged]

    def _left(self) -> list[Benchmark]:
        return self._among_left(self._benchmarks)

    def _judge(self, benchmark: Benchmark, judged: Judged) -> None:
        self._judged[benchmark.key] = judged

    def _effect(self, pairs: Pairs) -> Effect | None:
        return effect_and_times(pairs.counted)[0] if pairs.counted else None

    def _undecided(self, benchmark: Benchmark) -> Judged:
        stages = (self.evidence.screen, self.evidence.fresh)
        pairs = [pair for stage in stages for pair in stage.get(benchmark.key, Pairs()).counted]
        why = self.evidence.stopped or "neither slower nor within its tolerance"
        if not pairs:
            return Judged(benchmark, "INCONCLUSIVE", f"{why}; it was not measured")
        effect, base_s, head_s = effect_and_times(pairs)
        smallest = effect.smallest_detectable
        found = f"with {effect.pairs} pairs of this spread a change of {smallest:.1%} would be found"
        reason = f"{why}; {found if math.isfinite(smallest) else 'one pair shows nothing'}"
        return Judged(benchmark, "INCONCLUSIVE", reason, "", effect, base_s, head_s)


def _compare(pairs: Pairs, one: Launch, other: Launch, benchmarks: Sequence[Benchmark]) -> None:
    """Adds two launches as a whole, by the benchmarks that both measured in quiet, if there are any."""
    times = [one.times_s, other.times_s]
    keys = [b.key for b in benchmarks if all(0 < t.get(b.key, 0.0) < math.inf for t in times)]
    quiet = [key for key in keys if key not in one.disturbed | other.disturbed]
    if keys:
        first, second = geometric_means(times, quiet or keys)
        pairs.add((first, second), quiet=bool(quiet))


def effect_and_times(pairs: Sequence[Pair]) -> tuple[Effect, float, float]:
    """The effect of the pairs, and the medians of base and head."""
    base, head = [b for b, _ in pairs], [h for _, h in pairs]
    return effect_of(base, head), median(base), median(head)


def fewest_pairs(family: int) -> int:
    """How many pairs the test of one of so many benchmarks needs to be able to speak at all, and two more:
    n pairs that all agree have p = 2**-n."""
    return math.ceil(-math.log2(FAMILY_P / family / len(TEST_LOOKS))) + 2
