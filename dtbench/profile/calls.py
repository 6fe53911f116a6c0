"""Profiling cases whose ranks are simulated: each call is the host's work alone, and is taken apart.

The recorded calls, those that nobody records and the calibration of the recording are taken in turn, in
rounds of milliseconds, and only the quickest rounds count: a shared machine changes its speed between any
two seconds.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns

from dtbench.model import Workload
from dtbench.profile import counters, frames
from dtbench.profile.flame import Graph
from dtbench.profile.spans import Overhead, Span, quickest
from dtbench.profile.stages import Breakdown, break_down, frame_pieces, named_pieces

# A block of calls lasts about so long: above the clock's and the loop's cost, below most disturbances.
_BLOCK_NS = 400_000
_MOST_CALLS, _LEAST_CALLS, _BLOCKS = 50, 4, 5
# After a swap of functions Python finds its way anew: its caches of names settle within some 50 calls.
_WARMUP_CALLS = 60
_KEPT_ROUNDS = 0.25
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
    """Calls a workload in blocks."""

    def __init__(self, workload: Workload) -> None:
        self.run, self.before = workload.run, workload.before
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
        return _mean(blocks[: max(1, len(blocks) // 2)])

    def _block_ns(self, calls: int) -> float:
        if self.before is not None:
            self.before()
        run = self.run
        start = perf_counter_ns()
        for _ in range(calls):
            run()
        return (perf_counter_ns() - start) / calls


@dataclass
class Profiled:
    """What is known of the cases so far. traced: label -> calls as recorded, for the trace."""

    breakdowns: list[Breakdown] = field(default_factory=list)
    graphs: list[Graph] = field(default_factory=list)
    traced: dict[str, list[Span]] = field(default_factory=dict)

    def add(self, label: str, impl: str, workload: Workload, effort: Effort, floor: float | None) -> None:
        """Takes the calls of one impl of a case apart. floor: ns of the plain op, if that is known.

        The core's table is that of its own counters, other impls' that of frames; the flame graphs are
        of frames, which go deeper.
        """
        caller = Caller(workload)
        quiet_ns = floor_ns(caller, effort)
        shown, calls = by_frames(caller, effort, label, impl)
        shown = shown.at_pace(quiet_ns)
        self.graphs.append(Graph(label, f"{label} ({impl})", shown.folded))
        self.traced[f"{label} ({impl}), frames"] = calls
        if impl == "core":
            shown, calls = by_counters(caller, effort, label)
            shown = shown.at_pace(quiet_ns)
            self.traced[f"{label} (core), counters"] = calls
        self.breakdowns.append(dataclasses.replace(shown, floor_ns=floor))


def by_counters(caller: Caller, effort: Effort, label: str) -> tuple[Breakdown, list[Span]]:
    """The core's stages by its own counters, and some calls for the trace."""
    recorder = counters.Counters(caller.run, caller.before)

    def round_() -> Round:
        whole = caller.whole_ns()
        calls = recorder.calls(caller.warmup, caller.calls)
        return Round(whole, quickest(calls), {counters.KIND: counters.bracket_overhead()})

    best = _best_rounds(round_, effort.rounds)
    made = break_down(
        [call for one in best for call in one.calls],
        _mean([one.whole_ns for one in best]),
        _typical_overheads(best),
        named_pieces,
        ignored=counters.bookkeeping(),
        label=label,
        impl="core",
        source="the core's counters",
    )
    return made, best[0].calls[:TRACED_CALLS]


def by_frames(caller: Caller, effort: Effort, label: str, impl: str) -> tuple[Breakdown, list[Span]]:
    """The stages by torch's Python and C++ frames, and some calls for the trace."""
    traced = min(TRACED_CALLS, caller.calls)

    def round_() -> Round:
        whole = caller.whole_ns()
        calls = frames.recorded_calls(caller.run, caller.before, caller.warmup // 4, traced)
        # Recording takes long enough for the machine to change: a call alone before it and after it.
        return Round((whole + caller.whole_ns()) / 2, quickest(calls), frames.frame_overheads())

    best = _best_rounds(round_, effort.frame_rounds)
    made = break_down(
        [call for one in best for call in one.calls],
        _mean([one.whole_ns for one in best]),
        _typical_overheads(best),
        frame_pieces,
        rename=frames.short_name,
        label=label,
        impl=impl,
        source="Python and C++ frames",
    )
    return made, best[0].calls[:TRACED_CALLS]


def floor_ns(caller: Caller, effort: Effort) -> float:
    """Of a call that nobody records, in the quickest of some blocks: short ones meet a quiet moment."""
    return _mean(sorted(caller.whole_ns() for _ in range(effort.rounds))[: max(1, effort.rounds // 4)])


def _best_rounds(round_: Callable[[], Round], count: int) -> list[Round]:
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        rounds = [round_() for _ in range(count)]
    finally:
        if enabled:
            gc.enable()
    rounds.sort(key=lambda one: one.burden_ns)
    return rounds[: max(1, round(count * _KEPT_ROUNDS))]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _typical_overheads(rounds: Sequence[Round]) -> dict[str, Overhead]:
    return {
        kind: Overhead(
            statistics.median(one.overheads[kind].inside_ns for one in rounds),
            statistics.median(one.overheads[kind].outside_ns for one in rounds),
        )
        for kind in rounds[0].overheads
    }
