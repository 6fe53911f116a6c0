"""Profiling cases whose ranks are simulated: each call is the host's work alone, and is taken apart.

The recorded calls, those that nobody records and the calibration of the recording are taken in turn, in
rounds of milliseconds, and only the quickest rounds count: a shared machine changes its speed between any
two seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import NamedTuple

import msgspec

from dtbench.engine.clock import HostClock
from dtbench.engine.measure import Subject
from dtbench.profile import recorders
from dtbench.profile.spans import Overhead, Span, quickest
from dtbench.profile.stages import Breakdown, Pieces, break_down, frame_pieces, named_pieces
from dtbench.records.profile import CallStages
from dtbench.suite import Workload
from dtbench_core.interop import stopwatch

# A block of calls lasts about so long: above the clock's and the loop's cost, below most disturbances.
_BLOCK_NS = 400_000
_MOST_CALLS, _LEAST_CALLS, _BLOCKS = 50, 4, 5
# After a swap of functions Python finds its way anew: its caches of names settle within some 50 calls.
_WARMUP_CALLS = 60
_KEPT_ROUNDS = 0.25
# Rounds of counters and, which cost a tenth of a second each, of frames; and where few do.
_ROUNDS, _FRAME_ROUNDS = 60, 16
_QUICK_ROUNDS, _QUICK_FRAME_ROUNDS = 16, 4
# Of frames so many calls are recorded at once.
_FRAME_CALLS = 20
# The floor beside the impls: the plain op on the local tensors.
FLOOR = "local"
# The floor inside a class of tensors: it has no stages to tell apart.
WRAPPED = "wrapped"


class Caller:
    """Calls a workload in blocks; making it warms the workload up."""

    def __init__(self, workload: Workload) -> None:
        self.run, self.before = workload.run, workload.before
        self._clock = HostClock()
        first_ns = self._block_ns(1)
        call_ns = first_ns if self.before is not None else min(self._block_ns(1) for _ in range(20))
        self.calls = int(min(max(_BLOCK_NS / call_ns, _LEAST_CALLS), _MOST_CALLS))
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


@dataclass(frozen=True)
class Recorder:
    """What records calls, what that costs, and how their spans become stages; see `break_down`."""

    source: str
    record: Callable[[], list[Span]]
    calibrate: Callable[[], Mapping[str, Overhead]]
    pieces: Pieces
    ignored: str = ""
    rename: Callable[[str], str] = str


class RecordedRound(NamedTuple):
    """A call alone, the calls as recorded, and what recording a span cost meanwhile."""

    whole_ns: float
    calls: list[Span]
    overheads: Mapping[str, Overhead]


class CallRecording:
    """The schedule of one impl of a case: its calls are recorded and taken apart.

    The core's table is that of its own counters, other impls' that of frames; speedscope gets the frames, which
    go deeper. Of the plain op only `floor_ns` is taken. floor_ns: the plain op's, if it is known.
    """

    def __init__(self, label: str, subject: Subject, quick: bool, floor_ns: float | None) -> None:
        self.floor_ns = floor_ns
        self.tables: list[CallStages] = []
        self.folded: dict[str, Mapping[tuple[str, ...], float]] = {}
        self._label, self._subject = label, subject
        self._rounds = _QUICK_ROUNDS if quick else _ROUNDS
        self._frame_rounds = _QUICK_FRAME_ROUNDS if quick else _FRAME_ROUNDS

    def warm_up(self) -> None: ...

    def sample(self) -> None:
        self._subject.attempt(self._record)

    def finish(self) -> None: ...

    def _record(self) -> None:
        caller, impl = Caller(self._subject.workload), self._subject.impl
        if impl == FLOOR:
            blocks = sorted(caller.whole_ns() for _ in range(self._rounds))
            self.floor_ns = fmean(blocks[: max(1, round(self._rounds * _KEPT_ROUNDS))])
            return
        calls = min(_FRAME_CALLS, caller.calls)
        of_frames = Recorder(
            "Python and C++ frames",
            partial(recorders.recorded_calls, caller.run, caller.before, caller.warmup // 4, calls),
            recorders.frame_overheads,
            frame_pieces,
            rename=recorders.short_name,
        )
        shown = taken_apart(caller, of_frames, self._frame_rounds)
        self.folded[f"{self._label} ({impl})"] = shown.folded
        if impl == "core":
            core = recorders.Counters(caller.run, caller.before)
            of_counters = Recorder(
                "the core's counters",
                partial(core.calls, caller.warmup, caller.calls),
                lambda: {recorders.COUNTER: recorders.bracket_overhead()},
                named_pieces,
                ignored=stopwatch.BOOKKEEPING,
            )
            shown = taken_apart(caller, of_counters, self._rounds)
        self.tables.append(
            msgspec.structs.replace(shown.call, label=self._label, impl=impl, floor_ns=self.floor_ns)
        )


def taken_apart(caller: Caller, recorder: Recorder, count: int) -> Breakdown:
    """The table of the quickest of `count` rounds."""

    def one_round() -> RecordedRound:
        before_ns = caller.whole_ns()
        calls = quickest(recorder.record())
        # Recording takes long enough for the machine to change: a call alone before it and after it.
        return RecordedRound((before_ns + caller.whole_ns()) / 2, calls, recorder.calibrate())

    def slowness(one: RecordedRound) -> float:
        return one.whole_ns + fmean(call.duration_ns for call in one.calls)

    best = sorted((one_round() for _ in range(count)), key=slowness)[: max(1, round(count * _KEPT_ROUNDS))]
    overheads = {
        kind: Overhead(
            median(one.overheads[kind].inside_ns for one in best),
            median(one.overheads[kind].outside_ns for one in best),
        )
        for kind in best[0].overheads
    }
    calls = [call for one in best for call in one.calls]
    whole_ns = fmean(one.whole_ns for one in best)
    return break_down(
        calls, whole_ns, overheads, recorder.source, recorder.pieces, recorder.ignored, recorder.rename
    )
