"""How one case is timed on every rank of a world: the adaptive schedule of the measuring loop, and what is voted.

The ranks talk about counts and verdicts through `RankGroup.agree`, never through the collectives that are
being measured: each rank casts a vote, rank 0 decides, all ranks act on the decision. So they always
make the same number of calls, and a fault on one of them is known to all before the next phase.

The impls of a case are sampled in turn, round by round, each round starting with another impl: what
disturbs the machine for a while disturbs all of them.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar, cast

from dtbench.engine.budget import Deadlines
from dtbench.engine.clock import Clock
from dtbench.engine.clock_offsets import Offset, lateness_s, mean_offset
from dtbench.engine.failure import ActiveCase
from dtbench.engine.measure import ImplOutcome, SamplingSchedule, Subject, measure, release_memory, to_result
from dtbench.engine.ranks import RankGroup
from dtbench.engine.tasks import Task
from dtbench.records.result import Result, Status
from dtbench.suite import Case
from dtbench.suite.case import Instrument
from dtbench.suite.registry import World

# A block of warm-up calls that is less than this much faster than the one before ends the warm-up.
STEADY_GAIN = 0.10
MAX_WARMUP_BLOCKS = 10
# Where calls are repeated until a sample is long enough: so much longer, or the next is too short again; and
# at most so many times as many calls at once, as `timeit` has it.
SPARE_LENGTH = 1.1
MAX_GROWTH = 10
# A length is judged by the fastest of so many samples: of one, an interruption would pass for a long call.
SAMPLES_OF_A_LENGTH = 3
# Rounds between two decisions take about so long: rare enough not to disturb fast cases, often
# enough to stop a slow one near its timeout.
CHUNK_S = 0.25
# A case is given up when fewer samples than this fit into what is left of its timeout.
FEWEST_SAMPLES = 2

_V = TypeVar("_V")
_D = TypeVar("_D")


@dataclass(frozen=True)
class Budget:
    """How much to measure, per impl: seconds of samples, bounds of their number, seconds of warm-up."""

    samples_s: float
    least: int
    most: int
    warmup_s: float


@dataclass(frozen=True)
class Instruments:
    """What a measurement is made with; tests replace each by a fake.

    barrier: all ranks of the world leave it together. kernel: names the running kernel, whose monotonic clock
    says when samples began. gpu_state: clocks and throttling of this rank's GPU, None without one.
    clock_offset: from this rank's monotonic clock to rank 0's, None where nobody asks; all ranks call it at once.
    """

    clocks: Mapping[Instrument, Clock]
    barrier: Callable[[], None]
    budget: Budget
    kernel: str | None = None
    gpu_state: Callable[[], Mapping[str, Any] | None] = lambda: None
    clock_offset: Callable[[], Offset | None] = lambda: None
    monotonic: Callable[[], float] = time.monotonic


# impl -> its status, the reason, and the rank that said so; None where rank 0 decided it.
_Verdicts = dict[str, tuple[Status, str, int | None]]
_Outcomes = dict[str, ImplOutcome]  # by impl
_ByRank = dict[str, tuple[float, ...]]  # of each sample, seconds


class RankPart(TypedDict):
    """What a rank has of an impl, as it travels.

    samples: seconds per call, None for one that raised; None in all on a rank that only waits. started: of each sample,
    ns on the kernel's clock. offset: (ns to rank 0's clock, how far off that may be). error_ns: of `started`.
    """

    counters: dict[str, float] | None
    samples: list[float | None] | None
    started: list[int | None]
    kernel: str | None
    offset: tuple[float, float] | None
    error_ns: float
    throttled: str | None


class GaveUp(Exception):  # noqa: N818 - ends a measurement, on all ranks at once
    """Every impl of the case has its verdict."""


class TooSlow(Exception):  # noqa: N818 - rank 0's decision, not an error
    """What is left of the timeout does not hold what comes next; the message says why."""


class CollectiveSchedule(SamplingSchedule):
    """What schedules share whose ranks act together: each verdict on an impl is a vote of all. Used once."""

    def __init__(self, case: Case, impls: Sequence[str], ranks: RankGroup, now: ActiveCase) -> None:
        self.case = case
        self.ranks = ranks
        self.live = {impl: self._subject(impl) for impl in impls}
        self.outcomes: _Outcomes = {}
        self._now = now
        self._ended: list[Subject] = []  # to be closed

    def run(self, world: World) -> _Outcomes:
        """Measures the impls; their outcomes."""
        try:
            measure(list(self.live.values()), world, self)
        except GaveUp:
            pass
        finally:
            self._now.impl = None
            release_memory()
        return self.outcomes

    def vote(self, mine: _V, decide: Callable[[list[_V]], _D]) -> _D:
        """Agrees on the verdicts since the last vote, then on what `decide` makes of all ranks' `mine`.

        `decide` runs on rank 0 with the impls that are left.

        Raises:
            GaveUp: no impl is left.
        """

        def decide_all(votes: list[tuple[dict[str, tuple[Status, str]], _V]]) -> tuple[_Verdicts, _D | None]:
            bad = _worst([ended for ended, _ in votes])
            self._end(bad)
            try:
                return bad, decide([one for _, one in votes]) if self.live else None
            except TooSlow as reason:
                return bad | {impl: ("failed", str(reason), None) for impl in self.live}, None

        ended = {impl: subject.bad for impl, subject in self.live.items() if subject.bad is not None}
        bad, decision = self.ranks.agree((ended, mine), decide_all)
        self._now.raised = self._now.raised_in = None
        self._end(bad)
        if self._ended:
            for subject in self._ended:
                subject.close()
            self._ended.clear()
            release_memory()
        if not self.live:
            raise GaveUp
        return cast(_D, decision)

    def _end(self, bad: _Verdicts) -> None:
        for impl, (status, reason, rank) in bad.items():
            self.outcomes[impl] = ImplOutcome(status, reason, rank)
            if impl in self.live:
                subject = self.live.pop(impl)
                subject.bad = (status, reason)
                self._ended.append(subject)

    def _subject(self, impl: str) -> Subject:
        def entering() -> None:
            self._now.impl = impl

        def raised(reason: str) -> None:
            if self._now.raised is None:
                self._now.raised, self._now.raised_in = reason, impl
            self.ranks.raised(reason)

        return Subject(self.case, impl, entering, raised)


class Adaptive(CollectiveSchedule):
    """The schedule of `dtbench run`: as many samples as the budget and the timeout hold, the impls in turn."""

    def __init__(
        self,
        case: Case,
        impls: Sequence[str],
        ranks: RankGroup,
        instruments: Instruments,
        now: ActiveCase,
        timeout_s: float,
    ) -> None:
        super().__init__(case, impls, ranks, now)
        self._with = instruments
        self._clock = instruments.clocks[case.instrument]
        self._timeout_s = timeout_s
        self._deadline = instruments.monotonic() + timeout_s
        self._alone = case.calls_per_sample == 1 and not case.sample_s and case.clock == "device"
        self._calls = dict.fromkeys(impls, case.calls_per_sample)
        self._samples: dict[str, list[float | None]] = {impl: [] for impl in impls}
        self._started: dict[str, list[int | None]] = {impl: [] for impl in impls}
        self._error_ns = dict.fromkeys(impls, 0.0)  # of when they began, on this rank's clock
        self._offset: Offset | None = None
        self._throttled: str | None = None
        self._call_s: dict[str, float] = {}  # on rank 0: the slowest rank's time per call

    # ---- the phases ----

    def warm_up(self) -> None:
        """One call of each, voted on singly: the first that takes most of the timeout ends the case. Then blocks."""
        self.vote(None, lambda _votes: None)
        for impl in list(self.live):
            if impl in self.live:
                self.vote({impl: self._fastest_of(impl, 1)}, self._learn)
        if self.case.sample_s:
            self._lengthen_samples()
        sizes = dict.fromkeys(self.live, max(self.case.warmup_calls - 1, 1))
        fastest: dict[str, float] = {}
        spent: dict[str, float] = {}

        def decide(votes: list[dict[str, float | None]]) -> dict[str, int]:
            self._learn(votes)
            again: dict[str, int] = {}
            for impl in [i for i in sizes if i in self.live]:
                call_s, before = self._call_s[impl], fastest.get(impl, math.inf)
                fastest[impl] = call_s
                spent[impl] = spent.get(impl, 0.0) + sizes[impl] * self._warm_calls(impl) * call_s
                if call_s < (1 - STEADY_GAIN) * before and spent[impl] < self._with.budget.warmup_s:
                    again[impl] = sizes[impl]
            return again

        for _ in range(MAX_WARMUP_BLOCKS):
            took = {impl: self._fastest_of(impl, samples) for impl, samples in sizes.items()}
            again = self.vote(took, decide)
            sizes = {impl: samples for impl, samples in again.items() if impl in self.live}
            if not sizes:
                return

    def _lengthen_samples(self) -> None:
        """More and more calls per sample until the slowest rank's lasts `sample_s`: a barrier, a first call whose
        caches others have used, and reading the clock then count for nothing in it."""
        shortest_s = self.case.sample_s
        growing = self._calls

        def decide(votes: list[dict[str, float | None]]) -> dict[str, int]:
            self._learn(votes)
            longer = {}
            for impl in [i for i in growing if i in self.live]:
                calls, call_s = self._calls[impl], max(self._call_s[impl], 1e-9)
                if calls * call_s < shortest_s:
                    longer[impl] = min(MAX_GROWTH * calls, math.ceil(SPARE_LENGTH * shortest_s / call_s))
            return longer

        while growing:
            took = {i: self._fastest_of(i, SAMPLES_OF_A_LENGTH) for i in growing if i in self.live}
            growing = self.vote(took, decide)
            self._calls |= growing

    def sample(self) -> None:
        """Rounds of one sample per impl, a vote every quarter of a second."""
        total = self.vote(None, lambda _votes: self._choose_total())
        before, offset = self._with.gpu_state(), self._with.clock_offset()
        done = 0
        while rounds := self.vote(None, functools.partial(self._next_rounds, done, total)):
            self._rounds(range(done, done + rounds))
            done += rounds
        after = self._with.clock_offset()
        self._offset = mean_offset(offset, after) if offset and after else None
        reasons = [r for state in (before, self._with.gpu_state()) if state for r in state["throttled_by"]]
        self._throttled = ", ".join(dict.fromkeys(reasons)) or None

    def finish(self) -> None:
        """Gathers what the ranks have: on rank 0 the outcomes are whole; elsewhere they hold the status alone."""
        mine = {impl: self._part(impl, subject) for impl, subject in self.live.items()}
        gathered: list[dict[str, RankPart]] = []
        self.vote(mine, gathered.extend)
        for impl in self.live:
            parts = [of[impl] for of in gathered]
            self.outcomes[impl] = combine_ranks(parts, self._calls[impl]) if parts else ImplOutcome("ok")

    def _part(self, impl: str, subject: Subject) -> RankPart:
        count, participates = subject.workload.counters, subject.workload.participates
        counters = {} if count is None else subject.attempt(lambda: dict(count()))
        if counters is not None and self.case.sample_s:
            counters["calls_per_sample"] = self._calls[impl]
        return {
            "counters": counters,
            "samples": self._samples[impl] if participates else None,
            "started": self._started[impl],
            "kernel": self._with.kernel,
            "offset": None if self._offset is None else (self._offset.ns, self._offset.uncertainty_ns),
            "error_ns": self._error_ns[impl],
            "throttled": self._throttled,
        }

    # ---- calls ----

    def _fastest_of(self, impl: str, samples: int) -> float | None:
        """Of so many samples, seconds per call; None if one raised."""
        subject, calls = self.live[impl], self._warm_calls(impl)
        return subject.attempt(lambda: min([self._one_sample(subject, calls) for _ in range(samples)]))

    def _warm_calls(self, impl: str) -> int:
        """Calls per sample of the warm-up: those of a sample where its length is what was asked for."""
        return self._calls[impl] if self.case.sample_s else 1

    def _one_sample(self, subject: Subject, calls: int) -> float:
        self._now.step += 1
        subject.ready()
        self._clock.settle(cold=self._alone)
        if self.case.clock == "device":
            self._with.barrier()
        return self._clock.measure(subject.workload.run, calls)

    def _rounds(self, rounds: range) -> None:
        """What failed here has None for a sample: other ranks may not have failed, and expect the other impls."""
        order = list(self.live)
        for number in rounds:
            turn = number % len(order)
            for impl in order[turn:] + order[:turn]:
                sample = functools.partial(self._one_sample, self.live[impl], self._calls[impl])
                took = self.live[impl].attempt(sample)
                self._samples[impl].append(took)
                self._started[impl].append(None if took is None else self._clock.started_ns)
                self._error_ns[impl] = max(self._error_ns[impl], self._clock.error_ns)

    # ---- what rank 0 decides ----

    def _learn(self, votes: list[dict[str, float | None]]) -> None:
        """Keeps the slowest rank's time per call; raises when not even one more call would fit."""
        for impl in votes[0]:
            took = [of_rank for vote in votes if (of_rank := vote[impl]) is not None]
            if took:
                self._call_s[impl] = max(took)
        if self._left_s() < max((self._call_s.get(impl, 0.0) for impl in self.live), default=0.0):
            raise self._too_slow()

    def _left_s(self) -> float:
        return self._deadline - self._with.monotonic()

    def _round_s(self) -> float:
        return max(sum(self._call_s[impl] * self._calls[impl] for impl in self.live), 1e-9)

    def _choose_total(self) -> int:
        budget, total = self._with.budget, self.case.samples
        if total is None:
            wanted = budget.samples_s * len(self.live) / self._round_s()
            total = int(min(max(wanted, budget.least), budget.most))
        fit = int(self._left_s() / self._round_s())
        if fit < min(total, FEWEST_SAMPLES):
            raise self._too_slow()
        return min(total, fit)

    def _next_rounds(self, done: int, total: int, _votes: list[None]) -> int:
        if 0 < done < total and self._left_s() < self._round_s():
            if done < FEWEST_SAMPLES:
                raise self._too_slow()
            return 0
        return min(max(int(CHUNK_S / self._round_s()), 1), total - done)

    def _too_slow(self) -> TooSlow:
        calls = ", ".join(f"{impl} {self._call_s[impl]:.2g} s" for impl in self.live if impl in self._call_s)
        limit = f"--timeout {self._timeout_s:g} s"
        return TooSlow(f"the case does not fit into {limit} (per call: {calls}); give it more")


def _worst(votes: Sequence[Mapping[str, tuple[Status, str]]]) -> _Verdicts:
    """impl -> status, reason and rank of the gravest verdict any rank has; the lowest rank's if equal."""
    gravity = ("skipped", "wrong", "failed")
    worst: _Verdicts = {}
    for rank, bad in enumerate(votes):
        for impl, (status, reason) in bad.items():
            if impl not in worst or gravity.index(status) > gravity.index(worst[impl][0]):
                worst[impl] = (status, reason, rank)
    return worst


def combine_ranks(parts: Sequence[RankPart], calls: int = 1) -> ImplOutcome:
    """The outcome of an impl from what each rank has: its samples (None: it only waited), when they
    began, its counters, what throttled it. A round that some rank missed is left out.

    The counters are the lowest participating rank's. Where several ranks take part, `skew_s` is added:
    the median over samples of the difference between the slowest and the fastest rank. The rank with
    the shortest time in a collective is the one that came last. `arrival_error_s`, where clocks had to be compared,
    is how far off a rank's arrivals may be, either way.
    """
    own = {rank: part["samples"] for rank, part in enumerate(parts) if part["samples"] is not None}
    if not own:
        return ImplOutcome("failed", "no rank takes part in it: expected `participates` on at least one rank")
    whole = [i for i, row in enumerate(zip(*own.values(), strict=True)) if None not in row]
    rounds = [tuple(s for samples in own.values() if (s := samples[i]) is not None) for i in whole]
    if not rounds:
        return ImplOutcome("failed", "no sample was completed by all ranks")
    counters: dict[str, float] = dict(parts[min(own)]["counters"] or {})
    by_rank: _ByRank = {}
    arrivals: _ByRank = {}
    if len(own) > 1:
        counters["skew_s"] = statistics.median(max(row) - min(row) for row in rounds)
        by_rank = {str(r): tuple(column) for r, column in zip(own, zip(*rounds, strict=True), strict=True)}
        arrivals = _arrivals({rank: parts[rank] for rank in own}, whole, calls)
        error_ns = max(parts[rank]["error_ns"] + (parts[rank]["offset"] or [0, 0])[1] for rank in own)
        if arrivals and error_ns:
            counters["arrival_error_s"] = error_ns * 1e-9 / calls
    throttled = {rank: part["throttled"] for rank, part in enumerate(parts) if part["throttled"]}
    if throttled:
        counters["throttled"] = 1.0
    reason = "; ".join(f"the GPU of rank {rank} was throttled: {why}" for rank, why in throttled.items())
    return ImplOutcome("ok", reason, None, tuple(max(row) for row in rounds), by_rank, arrivals, counters)


def _arrivals(parts: Mapping[int, RankPart], rounds: Sequence[int], calls: int) -> _ByRank:
    """Per rank how late it began these rounds, per call; empty where some clock does not say."""
    starts = {rank: [part["started"][i] for i in rounds] for rank, part in parts.items()}
    began = {rank: [at for at in times if at is not None] for rank, times in starts.items()}
    if any(len(times) < len(rounds) for times in began.values()):
        return {}
    kernels = {rank: part["kernel"] for rank, part in parts.items()}
    late = lateness_s(began, kernels, {r: Offset(*p["offset"]) for r, p in parts.items() if p["offset"]})
    # Nanoseconds: more digits would only fill the file.
    return {str(rank): tuple(round(float(s) / calls, 9) for s in late[rank]) for rank in late}


def default_budget(world: str, quick: bool) -> Budget:
    """How much is measured per impl of a case.

    Host latencies need rounds enough for a steady quartile, and cost microseconds each; collectives
    between processes on one machine cost milliseconds, and five say what thirty say within the noise
    between launches. Seconds are set so that the whole `--quick` job stays in minutes on two cores.
    """
    seconds = 0.02 if quick else 0.10
    least, most = (20, 50) if world == "simulated" else (5, 30)
    return Budget(samples_s=seconds, least=least, most=most, warmup_s=seconds)


def measure_tasks(
    tasks: Sequence[Task],
    world: World,
    ranks: RankGroup,
    instruments: Instruments,
    *,
    launch: int,
    timeout_s: float,
    active_case: ActiveCase,
    at_work: Callable[[], AbstractContextManager[object]] = nullcontext,
    deadlines: Deadlines | None = None,
) -> Iterator[Result]:
    """Measures the tasks, all ranks together, and yields the results on rank 0 as they come.

    A single process measures the cases of several passes first, one pass after the other.

    Args:
        launch: number of the launch, for the results.
        timeout_s: limit of a case, seconds.
        active_case: describes what is measured, for the diagnosis of a failure.
        at_work: a context entered around each case.
        deadlines: leaves out tasks without time; None measures all.
    """

    def measure_once(task: Task) -> _Outcomes:
        active_case.begin(task.suite.name, task.case.name, task.case.params, task.impls)
        with at_work():
            schedule = Adaptive(task.case, task.impls, ranks, instruments, active_case, timeout_s)
            outcomes = schedule.run(world)
        active_case.end()
        return outcomes

    def has_time(task: Task) -> bool:
        return deadlines is None or deadlines.agree(task, ranks)

    repeated = [task for task in tasks if task.case.passes > 1 and ranks.size == 1 and has_time(task)]
    passes = [
        [measure_once(task) for task in repeated]
        for _ in range(max((task.case.passes for task in repeated), default=0))
    ]
    for task, *outcomes in zip(repeated, *passes, strict=True):
        yield from _results(task, outcomes, launch)
    for task in tasks:
        if task not in repeated and has_time(task):
            outcomes_once = measure_once(task)
            if ranks.rank == 0:
                yield from _results(task, [outcomes_once], launch)


def _results(task: Task, passes: Sequence[_Outcomes], launch: int) -> Iterator[Result]:
    """Joins the samples of all passes; an impl that failed in a pass has failed."""
    for impl in task.impls:
        outcomes = [outcomes[impl] for outcomes in passes]
        outcome = next((outcome for outcome in outcomes if outcome.status != "ok"), outcomes[0])
        if len(outcomes) > 1 and outcome.status == "ok":
            outcome = replace(outcome, samples_s=tuple(s for outcome in outcomes for s in outcome.samples_s))
        yield to_result(task, impl, outcome, launch)
