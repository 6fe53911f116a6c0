"""Times a case on all ranks together: the adaptive schedule of the measuring loop, and its votes.

Ranks agree on counts and failures through `RankGroup.agree`, never through the collectives that are measured: each rank
votes, rank 0 decides, and all ranks act on the decision. So all ranks make the same number of calls, and a failure on
one rank is known to all before the next phase.

The impls of a case are sampled in turn, round by round, and each round starts with another impl. A disturbance of the
machine then affects all impls equally.
"""

import functools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypedDict, TypeVar, cast

from dtbench.engine.budget import Deadlines
from dtbench.engine.clock import Clock
from dtbench.engine.clock_offsets import Offset, lateness_s, mean_offset
from dtbench.engine.failure import ActiveCase
from dtbench.engine.measure import ImplOutcome, SamplingSchedule, Subject, measure, release_memory, to_result
from dtbench.engine.rank_votes import RankGroup
from dtbench.engine.tasks import Task
from dtbench.records.result import Result, Status
from dtbench.suite import Case
from dtbench.suite.case import Instrument
from dtbench.suite.registry import World

# The warm-up ends when a block of calls improves on the previous one by less than this fraction.
STEADY_GAIN = 0.10
MAX_WARMUP_BLOCKS = 10
# Calls are repeated until a sample is long enough. The margin keeps the next sample from being too short again; the
# number of calls grows at most tenfold at once, as in `timeit`.
LENGTH_MARGIN = 1.1
MAX_GROWTH = 10
# To find out how long a sample takes, this many are timed. The shortest counts: an interruption only lengthens one.
SAMPLES_PER_LENGTH = 3
# Seconds between votes: long enough not to disturb fast cases, short enough to stop a slow one near its timeout.
VOTE_INTERVAL_S = 0.25
# A case fails if fewer samples than this fit into the rest of its timeout.
MIN_SAMPLES = 2

_V = TypeVar("_V")
_D = TypeVar("_D")


@dataclass(frozen=True)
class Budget:
    """How much to measure per impl.

    Attributes:
        samples_s: seconds of samples.
        min_samples: lower bound of the number of samples.
        max_samples: upper bound of the number of samples.
        warmup_s: seconds of warm-up.
    """

    samples_s: float
    min_samples: int
    max_samples: int
    warmup_s: float


@dataclass(frozen=True)
class Instruments:
    """The clocks and other functions that a measurement uses; tests replace them by fakes.

    Attributes:
        clocks: the clock of each kind of case.
        barrier: a barrier of all ranks.
        budget: how much to measure.
        boot_id: boot id of the host's operating system, whose monotonic clock gives the start times of samples.
        gpu_state: returns clocks and throttling of this rank's GPU; None without a GPU.
        clock_offset: returns the offset of this rank's monotonic clock to rank 0's, or None. All ranks call it at once.
        monotonic: returns the time in seconds, for timeouts.
    """

    clocks: Mapping[Instrument, Clock]
    barrier: Callable[[], None]
    budget: Budget
    boot_id: str | None = None
    gpu_state: Callable[[], Mapping[str, Any] | None] = lambda: None
    clock_offset: Callable[[], Offset | None] = lambda: None
    monotonic: Callable[[], float] = time.monotonic


# impl -> status, reason, and the rank that reported it; None if rank 0 decided it for all.
_Failures = dict[str, tuple[Status, str, int | None]]
_Outcomes = dict[str, ImplOutcome]  # by impl
_ByRank = dict[str, tuple[float, ...]]  # seconds of each sample


class RankSamples(TypedDict):
    """The measurements of an impl on one rank, as sent to rank 0.

    Attributes:
        counters: the workload's counters.
        samples: seconds per call of each sample, None if it raised. None on a rank that does not measure the impl.
        started: start of each sample, ns on the host's monotonic clock.
        boot_id: boot id of the host's operating system.
        offset: offset to rank 0's clock and its uncertainty, ns.
        error_ns: uncertainty of `started`.
        throttled: the reasons why the GPU was throttled; None if it was not.
    """

    counters: dict[str, float] | None
    samples: list[float | None] | None
    started: list[int | None]
    boot_id: str | None
    offset: tuple[float, float] | None
    error_ns: float
    throttled: str | None


class AllFailed(Exception):  # noqa: N818 - ends a measurement, on all ranks at once
    """No impl of the case is left to measure."""


class TooSlow(Exception):  # noqa: N818 - rank 0's decision, not an error
    """The rest of the timeout is too short for the next step; the message lists the times per call."""


class CollectiveSchedule(SamplingSchedule):
    """The base of schedules whose ranks act together: they vote on the failure of each impl. Use each instance once.

    Attributes:
        live: the impls that have not failed.
        outcomes: the impls that have failed; after `finish`, all impls.
    """

    def __init__(self, case: Case, impls: Sequence[str], ranks: RankGroup, active_case: ActiveCase) -> None:
        self.case = case
        self.ranks = ranks
        self.live = {impl: self._subject(impl) for impl in impls}
        self.outcomes: _Outcomes = {}
        self._active_case = active_case
        self._failed: list[Subject] = []  # to be closed

    def run(self, world: World) -> _Outcomes:
        """Measures the impls and returns their outcomes."""
        try:
            measure(list(self.live.values()), world, self)
        except AllFailed:
            pass
        finally:
            self._active_case.impl = None
            release_memory()
        return self.outcomes

    def vote(self, vote: _V, decide: Callable[[list[_V]], _D]) -> _D:
        """Agrees on the failures since the last vote, then on a decision.

        Args:
            vote: this rank's vote, JSON data.
            decide: returns the decision on the votes of all ranks. Runs on rank 0, with `live` up to date.

        Raises:
            AllFailed: no impl is left.
        """

        def decide_all(votes: list[tuple[dict[str, tuple[Status, str]], _V]]) -> tuple[_Failures, _D | None]:
            failures = _gravest([failures for failures, _ in votes])
            self._remove_failed(failures)
            try:
                return failures, decide([vote for _, vote in votes]) if self.live else None
            except TooSlow as reason:
                return failures | {impl: ("failed", str(reason), None) for impl in self.live}, None

        local_failures = {
            impl: subject.failure for impl, subject in self.live.items() if subject.failure is not None
        }
        failures, decision = self.ranks.agree((local_failures, vote), decide_all)
        self._active_case.failure = self._active_case.failed_impl = None
        self._remove_failed(failures)
        if self._failed:
            for subject in self._failed:
                subject.close()
            self._failed.clear()
            release_memory()
        if not self.live:
            raise AllFailed
        return cast(_D, decision)

    def _remove_failed(self, failures: _Failures) -> None:
        for impl, (status, reason, rank) in failures.items():
            self.outcomes[impl] = ImplOutcome(status, reason, rank)
            if impl in self.live:
                subject = self.live.pop(impl)
                subject.failure = (status, reason)
                self._failed.append(subject)

    def _subject(self, impl: str) -> Subject:
        def on_start() -> None:
            self._active_case.impl = impl

        def on_failure(error: str) -> None:
            if self._active_case.failure is None:
                self._active_case.failure, self._active_case.failed_impl = error, impl
            self.ranks.report_failure(error)

        return Subject(self.case, impl, on_start, on_failure)


class Adaptive(CollectiveSchedule):
    """The schedule of `dtbench run`: as many samples as budget and timeout allow, from the impls in turn."""

    def __init__(
        self,
        case: Case,
        impls: Sequence[str],
        ranks: RankGroup,
        instruments: Instruments,
        active_case: ActiveCase,
        timeout_s: float,
    ) -> None:
        super().__init__(case, impls, ranks, active_case)
        self._instruments = instruments
        self._clock = instruments.clocks[case.instrument]
        self._timeout_s = timeout_s
        self._deadline = instruments.monotonic() + timeout_s
        self._cold = case.calls_per_sample == 1 and not case.sample_s and case.clock == "device"
        self._calls = dict.fromkeys(impls, case.calls_per_sample)
        # impl -> seconds per call, begin and its uncertainty on this rank's clock in ns, for each sample
        self._samples: dict[str, list[tuple[float | None, int | None, float]]] = {impl: [] for impl in impls}
        self._offset: Offset | None = None
        self._throttled: str | None = None
        self._call_s: dict[str, float] = {}  # on rank 0: time per call on the slowest rank

    # ---- the phases of the measuring loop ----

    def warm_up(self) -> None:
        """Makes one call of each impl, then blocks of calls until they stop getting faster.

        The ranks vote after each first call, since a first call may take most of the timeout.
        """
        self.vote(None, lambda _votes: None)
        for impl in list(self.live):
            if impl in self.live:
                self.vote({impl: self._time(impl, self._warmup_calls(impl))}, self._update_call_times)
        if self.case.sample_s:
            self._lengthen_samples()
        sizes = dict.fromkeys(self.live, max(self.case.warmup_calls - 1, 1))
        fastest: dict[str, float] = {}
        spent: dict[str, float] = {}

        def next_blocks(votes: list[dict[str, float | None]]) -> dict[str, int]:
            self._update_call_times(votes)
            blocks: dict[str, int] = {}
            for impl in [impl for impl in sizes if impl in self.live]:
                call_s, previous_s = self._call_s[impl], fastest.get(impl, math.inf)
                fastest[impl] = call_s
                spent[impl] = spent.get(impl, 0.0) + sizes[impl] * self._warmup_calls(impl) * call_s
                is_faster = call_s < (1 - STEADY_GAIN) * previous_s
                if is_faster and spent[impl] < self._instruments.budget.warmup_s:
                    blocks[impl] = sizes[impl]
            return blocks

        for _ in range(MAX_WARMUP_BLOCKS):
            times = {impl: self._time(impl, self._warmup_calls(impl), n) for impl, n in sizes.items()}
            blocks = self.vote(times, next_blocks)
            sizes = {impl: samples for impl, samples in blocks.items() if impl in self.live}
            if not sizes:
                return

    def _lengthen_samples(self) -> None:
        """Raises the calls per sample until a sample on the slowest rank lasts `sample_s`.

        The barrier, reading the clock, and a first call with cold caches are then negligible.
        """
        min_s = self.case.sample_s
        growing = self._calls

        def longer_samples(votes: list[dict[str, float | None]]) -> dict[str, int]:
            self._update_call_times(votes)
            longer = {}
            for impl in [impl for impl in growing if impl in self.live]:
                calls, call_s = self._calls[impl], max(self._call_s[impl], 1e-9)
                if calls * call_s < min_s:
                    longer[impl] = min(MAX_GROWTH * calls, math.ceil(LENGTH_MARGIN * min_s / call_s))
            return longer

        while growing:
            times = {
                impl: self._time(impl, self._calls[impl], SAMPLES_PER_LENGTH)
                for impl in growing
                if impl in self.live
            }
            growing = self.vote(times, longer_samples)
            self._calls |= growing

    def sample(self) -> None:
        """Takes rounds of one sample per impl, with a vote every quarter of a second."""
        total = self.vote(None, lambda _votes: self._choose_total())
        state_before, offset_before = self._instruments.gpu_state(), self._instruments.clock_offset()
        done = 0
        while rounds := self.vote(None, functools.partial(self._next_rounds, done, total)):
            # Until the next vote, an impl that failed on this rank gets None as its samples. This rank still samples
            # the other impls, since the other ranks expect it there.
            order = list(self.live)
            for first in (number % len(order) for number in range(done, done + rounds)):
                for impl in order[first:] + order[:first]:
                    seconds = self._time(impl, self._calls[impl])
                    started_ns = None if seconds is None else self._clock.started_ns
                    self._samples[impl].append((seconds, started_ns, self._clock.error_ns))
            done += rounds
        offset_after = self._instruments.clock_offset()
        self._offset = mean_offset(offset_before, offset_after) if offset_before and offset_after else None
        states = filter(None, (state_before, self._instruments.gpu_state()))
        reasons = (reason for state in states for reason in state["throttled_by"])
        self._throttled = ", ".join(dict.fromkeys(reasons)) or None

    def finish(self) -> None:
        """Gathers the samples of all ranks. Only rank 0 gets complete outcomes; other ranks get the status."""
        samples: dict[str, RankSamples] = {}
        for impl, subject in self.live.items():
            own_samples, counters = self._samples[impl], subject.counters()
            if counters is not None and self.case.sample_s:
                counters["calls_per_sample"] = self._calls[impl]
            samples[impl] = {
                "counters": counters,
                "samples": [seconds for seconds, *_ in own_samples]
                if subject.workload.participates
                else None,
                "started": [started_ns for _, started_ns, _ in own_samples],
                "boot_id": self._instruments.boot_id,
                "offset": None if self._offset is None else (self._offset.ns, self._offset.uncertainty_ns),
                "error_ns": max((error_ns for *_, error_ns in own_samples), default=0.0),
                "throttled": self._throttled,
            }
        gathered: list[dict[str, RankSamples]] = []
        self.vote(samples, gathered.extend)
        for impl in self.live:
            by_rank = [samples[impl] for samples in gathered]
            self.outcomes[impl] = combine_ranks(by_rank, self._calls[impl]) if by_rank else ImplOutcome("ok")

    # ---- calls ----

    def _time(self, impl: str, calls: int, samples: int = 1) -> float | None:
        """Returns seconds per call of the fastest of `samples` samples; None if a call raised."""
        subject, clock = self.live[impl], self._clock

        def fastest_s() -> float:
            times = []
            for _ in range(samples):
                self._active_case.samples_begun += 1
                subject.prepare()
                clock.settle(cold=self._cold)
                if self.case.clock == "device":
                    self._instruments.barrier()
                times.append(clock.measure(subject.workload.run, calls))
            return min(times)

        return subject.attempt(fastest_s)

    def _warmup_calls(self, impl: str) -> int:
        """Returns the calls per sample of the warm-up: several only if the case sets `sample_s`."""
        return self._calls[impl] if self.case.sample_s else 1

    # ---- rank 0's decisions ----

    def _update_call_times(self, votes: list[dict[str, float | None]]) -> None:
        """Sets the time per call on the slowest rank. Raises TooSlow if not even one more call fits."""
        for impl in votes[0]:
            times = [call_s for vote in votes if (call_s := vote[impl]) is not None]
            if times:
                self._call_s[impl] = max(times)
        if self._remaining_s() < max((self._call_s.get(impl, 0.0) for impl in self.live), default=0.0):
            raise self._too_slow()

    def _remaining_s(self) -> float:
        return self._deadline - self._instruments.monotonic()

    def _round_s(self) -> float:
        return max(sum(self._call_s[impl] * self._calls[impl] for impl in self.live), 1e-9)

    def _choose_total(self) -> int:
        budget, total = self._instruments.budget, self.case.samples
        if total is None:
            affordable = budget.samples_s * len(self.live) / self._round_s()
            total = int(min(max(affordable, budget.min_samples), budget.max_samples))
        fitting = int(self._remaining_s() / self._round_s())
        if fitting < min(total, MIN_SAMPLES):
            raise self._too_slow()
        return min(total, fitting)

    def _next_rounds(self, done: int, total: int, _votes: list[None]) -> int:
        """Returns the number of rounds before the next vote; 0 ends the samples."""
        if 0 < done < total and self._remaining_s() < self._round_s():
            if done < MIN_SAMPLES:
                raise self._too_slow()
            return 0
        return min(max(int(VOTE_INTERVAL_S / self._round_s()), 1), total - done)

    def _too_slow(self) -> TooSlow:
        calls = ", ".join(f"{impl} {self._call_s[impl]:.2g} s" for impl in self.live if impl in self._call_s)
        return TooSlow(
            f"the case does not fit into --timeout {self._timeout_s:g} s (per call: {calls}); raise the timeout"
        )


def _gravest(votes: Sequence[Mapping[str, tuple[Status, str]]]) -> _Failures:
    """Returns each impl's gravest failure over all ranks; among equally grave ones that of the lowest rank."""
    order = ("skipped", "wrong", "failed")
    gravest: _Failures = {}
    for rank, failures in enumerate(votes):
        for impl, (status, reason) in failures.items():
            if impl not in gravest or order.index(status) > order.index(gravest[impl][0]):
                gravest[impl] = (status, reason, rank)
    return gravest


def combine_ranks(by_rank: Sequence[RankSamples], calls: int = 1) -> ImplOutcome:
    """Returns the outcome of an impl from the samples of each rank. Leaves out rounds that a rank missed.

    A sample is the time of the slowest rank. The counters are those of the lowest participating rank. With several
    participating ranks, two counters are added:

        skew_s: the median difference between the slowest and the fastest rank. The rank with the shortest time in a
            collective arrived last.
        arrival_error_s: the uncertainty of a rank's arrival, if clocks had to be compared.
    """
    samples = {
        rank: measured["samples"] for rank, measured in enumerate(by_rank) if measured["samples"] is not None
    }
    if not samples:
        return ImplOutcome("failed", "no rank takes part in it: expected `participates` on at least one rank")
    complete = [i for i, row in enumerate(zip(*samples.values(), strict=True)) if None not in row]
    rounds = [tuple(s for column in samples.values() if (s := column[i]) is not None) for i in complete]
    if not rounds:
        return ImplOutcome("failed", "no sample was completed by all ranks")
    counters: dict[str, float] = dict(by_rank[min(samples)]["counters"] or {})
    rank_samples_s: _ByRank = {}
    rank_arrivals_s: _ByRank = {}
    if len(samples) > 1:
        counters["skew_s"] = statistics.median(max(row) - min(row) for row in rounds)
        rank_samples_s = dict(zip(map(str, samples), zip(*rounds, strict=True), strict=True))
        rank_arrivals_s = _arrivals({rank: by_rank[rank] for rank in samples}, complete, calls)
        error_ns = max(by_rank[rank]["error_ns"] + (by_rank[rank]["offset"] or [0, 0])[1] for rank in samples)
        if rank_arrivals_s and error_ns:
            counters["arrival_error_s"] = error_ns * 1e-9 / calls
    throttled = {
        rank: measured["throttled"] for rank, measured in enumerate(by_rank) if measured["throttled"]
    }
    if throttled:
        counters["throttled"] = 1.0
    reason = "; ".join(f"the GPU of rank {rank} was throttled: {why}" for rank, why in throttled.items())
    return ImplOutcome("ok", reason, None, tuple(map(max, rounds)), rank_samples_s, rank_arrivals_s, counters)


def _arrivals(by_rank: Mapping[int, RankSamples], rounds: Sequence[int], calls: int) -> _ByRank:
    """Returns how late each rank began these rounds, seconds per call; empty if a rank lacks a start time."""
    started_ns = {
        rank: [ns for i in rounds if (ns := measured["started"][i]) is not None]
        for rank, measured in by_rank.items()
    }
    if any(len(times) < len(rounds) for times in started_ns.values()):
        return {}
    late = lateness_s(
        started_ns,
        boot_ids={rank: measured["boot_id"] for rank, measured in by_rank.items()},
        offsets={
            rank: Offset(*measured["offset"]) for rank, measured in by_rank.items() if measured["offset"]
        },
    )
    # Rounded to nanoseconds: more digits would only enlarge the file.
    return {str(rank): tuple(round(float(s) / calls, 9) for s in late[rank]) for rank in late}


def default_budget(world: str, quick: bool) -> Budget:
    """Returns how much is measured per impl of a case.

    Host latencies are microseconds, so many rounds are affordable, and a stable quartile needs them. Collectives
    between processes on one machine take milliseconds. They vary so much between launches that five samples say as
    much as thirty. With this budget, the whole `--quick` run takes minutes on two cores.
    """
    seconds = 0.02 if quick else 0.10
    min_samples, max_samples = (20, 50) if world == "simulated" else (5, 30)
    return Budget(seconds, min_samples, max_samples, seconds)


def measure_tasks(
    tasks: Sequence[Task],
    world: World,
    ranks: RankGroup,
    instruments: Instruments,
    *,
    launch: int,
    timeout_s: float,
    active_case: ActiveCase,
    record: Callable[[Result], object] | None,
    around_case: Callable[[], AbstractContextManager[object]] = nullcontext,
    deadlines: Deadlines | None = None,
) -> None:
    """Measures the tasks, all ranks together.

    In a single process, cases with several `passes` come first. All of them are measured once before the next pass.

    Args:
        launch: number of the launch, for the results.
        timeout_s: limit of a case, seconds.
        active_case: describes what is measured, for the diagnosis of a failure.
        record: called with each result as it comes; None on all ranks except rank 0, which alone gets complete results.
        around_case: returns the context to enter around each case.
        deadlines: skips tasks for which no time is left; None measures all.
    """

    def measure_once(task: Task) -> _Outcomes:
        active_case.begin(task.suite.name, task.case.name, task.case.params, task.impls)
        with around_case():
            outcomes = Adaptive(task.case, task.impls, ranks, instruments, active_case, timeout_s).run(world)
        active_case.end()
        return outcomes

    def has_time(task: Task) -> bool:
        return deadlines is None or deadlines.agree(task, ranks)

    def record_all(task: Task, passes: Sequence[_Outcomes]) -> None:
        """Joins the samples of all passes; an impl that failed in a pass has failed."""
        if record is None:
            return
        for impl in task.impls:
            outcomes = [outcomes[impl] for outcomes in passes]
            outcome = next((outcome for outcome in outcomes if outcome.status != "ok"), outcomes[0])
            if len(outcomes) > 1 and outcome.status == "ok":
                outcome = replace(outcome, samples_s=tuple(s for o in outcomes for s in o.samples_s))
            record(to_result(task, impl, outcome, launch))

    repeated = [task for task in tasks if task.case.passes > 1 and ranks.size == 1 and has_time(task)]
    passes = [
        [measure_once(task) for task in repeated]
        for _ in range(max((task.case.passes for task in repeated), default=0))
    ]
    for task, *outcomes in zip(repeated, *passes, strict=True):
        record_all(task, outcomes)
    # Right after them the other cases of their suites, since each suite has its share of the time at one stretch.
    begun = {task.suite.name for task in repeated}
    for task in sorted(tasks, key=lambda task: task.suite.name not in begun):
        if task not in repeated and has_time(task):
            record_all(task, [measure_once(task)])
