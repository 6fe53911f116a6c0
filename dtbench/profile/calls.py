"""Profiling cases whose ranks are simulated: each call is the host's work alone, and is taken apart.

The recorded calls, those that nobody records and the calibration of the recording are taken in turn, in
rounds of milliseconds, and only the quickest rounds count: a shared machine changes its speed between any
two seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean, median

import msgspec

from dtbench.engine.clock import HostClock
from dtbench.engine.measure import Subject
from dtbench.profile import counters, frames
from dtbench.profile.flame import Graph
from dtbench.profile.spans import Overhead, Span, quickest
from dtbench.profile.stages import Breakdown, break_down, frame_pieces, named_pieces
from dtbench.records.profile import Call
from dtbench.suite import Workload
from dtbench_core.interop import stopwatch

# A block of calls lasts about so long: above the clock's and the loop's cost, below most disturbances.
_BLOCK_NS = 400_000
_MOST_CALLS, _LEAST_CALLS, _BLOCKS = 50, 4, 5
# After a swap of functions Python finds its way anew: its caches of names settle within some 50 calls.
_WARMUP_CALLS = 60
_KEPT_ROUNDS = 0.25
# The floor beside the impls: the plain op on the local tensors.
FLOOR = "local"
# The floor inside a class of tensors: it has no stages to tell apart.
WRAPPED = "wrapped"
# Calls in the trace: enough to see that they are alike.
TRACED_CALLS = 20


@dataclass(frozen=True)
class Effort:
    """How much is measured. rounds of counters; rounds of frames, which cost a tenth of a second each."""

    rounds: int
    frame_rounds: int


FULL, QUICK = Effort(60, 16), Effort(16, 4)


@dataclass(frozen=True)
class Round:
    """One round: a call alone, the calls as recorded, and what recording a span cost meanwhile."""

    whole_ns: float
    calls: list[Span]
    overheads: Mapping[str, Overhead]

    @property
    def burden_ns(self) -> float:
        """How slow the machine was."""
        return self.whole_ns + sum(call.duration_ns for call in self.calls) / len(self.calls)


class Caller:
    """Calls a workload in blocks; making it warms the workload up."""

    def __init__(self, workload: Workload) -> None:
        self.run, self.before = workload.run, workload.before
        self._clock = HostClock()
        first = self._block_ns(1)
        again = first if self.before is not None else min(self._block_ns(1) for _ in range(20))
        self.calls = int(min(max(_BLOCK_NS / again, _LEAST_CALLS), _MOST_CALLS))
        self.warmup = 0 if self.before is not None else min(_WARMUP_CALLS, self.calls)

    def whole_ns(self) -> float:
        """Of one call; the mean of the quicker half of some blocks, as recorded calls are chosen."""
        if self.before is None:
            self._block_ns(self.warmup)
        size = 1 if self.before is not None else max(self.calls // _BLOCKS, 1)
        blocks = sorted(self._block_ns(size) for _ in range(max(self.calls // size, _BLOCKS)))
        return fmean(blocks[: max(1, len(blocks) // 2)])

    def _block_ns(self, calls: int) -> float:
        if self.before is not None:
            self.before()
        return self._clock.measure(self.run, calls) * 1e9


@dataclass
class Profiled:
    """What is known of the cases so far. traced: label -> calls as recorded, for the trace."""

    calls: list[Call] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    traced: dict[str, list[Span]] = field(default_factory=dict)


class Recording:
    """The schedule of one impl of a case: its calls are recorded and taken apart, and go into `profiled` once
    it is found right.

    The core's table is that of its own counters, other impls' that of frames; the flame graphs are of frames,
    which go deeper. Of the plain op only `floor_ns` is taken: of a call that nobody records, in the quickest of
    some blocks, since short ones meet a quiet moment. floor_ns: the plain op's, if it is known.
    """

    def __init__(
        self, label: str, subject: Subject, effort: Effort, profiled: Profiled, floor_ns: float | None
    ) -> None:
        self.floor_ns = floor_ns
        self._label, self._subject, self._effort, self._profiled = label, subject, effort, profiled
        self._caller: Caller | None = None
        self._made = Profiled()

    def warm_up(self) -> None:
        self._caller = self._subject.attempt(lambda: Caller(self._subject.workload))

    def sample(self) -> None:
        self._subject.attempt(self._record)

    def finish(self) -> None:
        if self._subject.bad is None:
            self._profiled.calls += self._made.calls
            self._profiled.graphs += self._made.graphs
            self._profiled.traced |= self._made.traced

    def _record(self) -> None:
        caller, effort, impl = self._caller, self._effort, self._subject.impl
        assert caller is not None
        quickest_ns = sorted(caller.whole_ns() for _ in range(effort.rounds))[: max(1, effort.rounds // 4)]
        quiet_ns = fmean(quickest_ns)
        if impl == FLOOR:
            self.floor_ns = quiet_ns
            return
        name = f"{self._label} ({impl})"
        frames_of = partial(frames.recorded_calls, caller.run, caller.before, caller.warmup // 4)
        shown, self._made.traced[f"{name}, frames"] = taken_apart(
            caller,
            effort.frame_rounds,
            lambda: frames_of(min(TRACED_CALLS, caller.calls)),
            frames.frame_overheads,
            partial(
                break_down,
                about=(self._label, impl, "Python and C++ frames"),
                pieces=frame_pieces,
                rename=frames.short_name,
            ),
        )
        shown = shown.at_pace(quiet_ns)
        self._made.graphs.append(Graph(self._label, name, shown.folded))
        if impl == "core":
            recorder = counters.Counters(caller.run, caller.before)
            shown, self._made.traced[f"{name}, counters"] = taken_apart(
                caller,
                effort.rounds,
                lambda: recorder.calls(caller.warmup, caller.calls),
                lambda: {counters.KIND: counters.bracket_overhead()},
                partial(
                    break_down,
                    about=(self._label, impl, "the core's counters"),
                    pieces=named_pieces,
                    ignored=stopwatch.BOOKKEEPING,
                ),
            )
            shown = shown.at_pace(quiet_ns)
        self._made.calls.append(msgspec.structs.replace(shown.call, floor_ns=self.floor_ns))


def taken_apart(
    caller: Caller,
    count: int,
    record: Callable[[], list[Span]],
    calibrate: Callable[[], Mapping[str, Overhead]],
    take_apart: Callable[[Sequence[Span], float, Mapping[str, Overhead]], Breakdown],
) -> tuple[Breakdown, list[Span]]:
    """The table of the quickest of `count` rounds, and some calls of the quickest for the trace."""

    def round_() -> Round:
        before_ns = caller.whole_ns()
        calls = quickest(record())
        # Recording takes long enough for the machine to change: a call alone before it and after it.
        return Round((before_ns + caller.whole_ns()) / 2, calls, calibrate())

    rounds = sorted((round_() for _ in range(count)), key=lambda one: one.burden_ns)
    best = rounds[: max(1, round(count * _KEPT_ROUNDS))]
    calls = [call for one in best for call in one.calls]
    overheads = {
        kind: Overhead(
            median(one.overheads[kind].inside_ns for one in best),
            median(one.overheads[kind].outside_ns for one in best),
        )
        for kind in best[0].overheads
    }
    made = take_apart(calls, fmean(one.whole_ns for one in best), overheads)
    return made, best[0].calls[:TRACED_CALLS]
