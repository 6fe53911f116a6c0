"""Profiles the host time of calls on simulated ranks (torch's fake process group, whose collectives do nothing).

A round takes some milliseconds. It contains recorded calls, calls without recording, and a calibration, which measures
the cost of recording. Only the fastest rounds count, since a shared machine changes its speed within seconds.

torch's profiler records every Python call, every C function called from Python and every op of torch's dispatcher as
one tree. Recording one event costs 0.2 to 0.6 us. `frame_overheads` measures that cost, to subtract it from the self
times.
"""

import math
import re
import timeit
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median, median_high
from time import process_time_ns
from typing import Any

import torch
from msgspec.structs import replace
from torch.profiler import ProfilerActivity, profile

from dtbench.engine.clock import HostClock
from dtbench.engine.measure import Subject
from dtbench.profile.stages import (
    Overhead,
    Pieces,
    Span,
    break_down,
    fold,
    frame_pieces,
    named_pieces,
    spans_from_log,
)
from dtbench.records.profile import CallStages
from dtbench.suite.case import FLOOR, Workload
from dtbench_core.interop import stopwatch

# Duration of a block of calls: well above the clock's and the loop's cost, and shorter than most disturbances.
_BLOCK_NS = 400_000
_MAX_CALLS, _MIN_CALLS, _BLOCKS = 50, 4, 5
# Replacing functions clears Python's inline caches. They settle within some 50 calls.
_WARMUP_CALLS = 60
_KEPT_ROUNDS = 0.25  # share of the rounds, the fastest ones
# Number of rounds with counters, and of rounds with frames, which take 0.1 s each. --quick runs fewer.
_ROUNDS, _QUICK_ROUNDS = (60, 16), (16, 8)
_FRAME_CALLS = 20  # maximum number of calls in one recording with frames
# The impl that runs the plain op inside a tensor subclass. It has no stages, so it is not profiled.
WRAPPED = "wrapped"
# torch's names for the kinds of events.
PYTHON, C_CALL, OP = "PyCall", "PyCCall", "TorchOp"
_CALIBRATION_CALLS = 100
_ADDRESS = re.compile(r" of .* object at 0x[0-9a-f]+| at 0x[0-9a-f]+")
_BUILT_IN = re.compile(r"<?built-in (function|method) ")
_PLACE = re.compile(r"^(?P<file>[^()]*?)\((?P<line>\d+)\): (?P<name>.*)$", re.DOTALL)
COUNTER = "counter"
_TIMED_INTERVALS = 50  # recorded intervals per calibration; the fastest calibrations agree within nanoseconds


# A call without recording: (nanoseconds, nanoseconds in which this process had the CPU).
TimedCall = tuple[float, float]


def mean_of(calls: Sequence[TimedCall]) -> TimedCall:
    """Returns the mean of the times and the mean of the CPU times."""
    return fmean(wall_ns for wall_ns, _ in calls), fmean(cpu_ns for _, cpu_ns in calls)


class Caller:
    """Calls a workload in blocks. Its construction warms the workload up."""

    def __init__(self, workload: Workload) -> None:
        self.run, self.before = workload.run, workload.before
        first_ns, _ = self._block(1)
        call_ns = first_ns if self.before is not None else min(self._block(1)[0] for _ in range(20))
        self.calls = int(min(max(_BLOCK_NS / call_ns, _MIN_CALLS), _MAX_CALLS))
        self.warmup = 0 if self.before is not None else min(_WARMUP_CALLS, self.calls)

    def time_call(self) -> TimedCall:
        """Returns the mean over the faster half of several blocks, or of the recorded calls."""
        if self.before is None:
            self._block(self.warmup)
        size = 1 if self.before is not None else max(self.calls // _BLOCKS, 1)
        blocks = sorted(self._block(size) for _ in range(max(self.calls // size, _BLOCKS)))
        return mean_of(blocks[: max(1, len(blocks) // 2)])

    def _block(self, calls: int) -> TimedCall:
        if self.before is not None:
            self.before()
        start_ns = process_time_ns()
        wall_ns = HostClock().measure(self.run, calls) * 1e9
        return wall_ns, (process_time_ns() - start_ns) / calls


class CallRecording:
    """Records the calls of one impl of a case and breaks them down by stage.

    Stages of the core come from its own counters, and stages of other impls from frames. The flame graph always shows
    frames, which are more detailed. The plain op has no stages; only its time is measured.

    Attributes:
        floor: time of a call of the plain op; None until it is measured.
        tables: the table of the impl.
        folded: impl -> stacks, for the flame graph.
    """

    def __init__(self, label: str, subject: Subject, quick: bool, floor: TimedCall | None) -> None:
        self.floor = floor
        self.tables: list[CallStages] = []
        self.folded: dict[str, Mapping[tuple[str, ...], float]] = {}
        self._label, self._subject = label, subject
        self._rounds, self._frame_rounds = _QUICK_ROUNDS if quick else _ROUNDS

    def warm_up(self) -> None: ...

    def sample(self) -> None:
        self._subject.attempt(self._record)

    finish = warm_up

    def _record(self) -> None:
        caller, impl = Caller(self._subject.workload), self._subject.impl
        if impl == FLOOR:
            calls = sorted(caller.time_call() for _ in range(self._rounds))
            self.floor = mean_of(calls[: round(self._rounds * _KEPT_ROUNDS)])
            return
        table, spans, fitted = record_rounds(
            caller, self._frame_rounds, partial(recorded_calls, caller), frame_overheads, frame_pieces
        )
        self.folded[f"{self._label} ({impl})"] = fold(
            spans, fitted, short_name, total_ns=table.whole_ns - table.unattributed_ns
        )
        source = "Python and C++ frames"
        if impl == "core":
            table, *_ = record_rounds(
                caller,
                self._rounds,
                counters(caller),
                counter_overheads,
                named_pieces,
                stopwatch.BOOKKEEPING,
            )
            source = "the core's counters"
        floor_ns, cpu_ns = self.floor or (None, math.inf)
        self.tables.append(
            replace(
                table,
                label=self._label,
                impl=impl,
                source=source,
                floor_ns=floor_ns,
                on_cpu=min(table.on_cpu, cpu_ns / (floor_ns or 1.0)),
            )
        )


def record_rounds(
    caller: Caller,
    rounds: int,
    record: Callable[[], list[Span]],
    calibrate: Callable[[], Mapping[str, Overhead]],
    pieces: Pieces,
    ignored: str = "",
) -> tuple[CallStages, list[Span], Mapping[str, Overhead]]:
    """Returns the table, the recorded calls and the fitted cost of recording a span. Only the fastest rounds count.

    Args:
        caller: calls the workload without recording.
        rounds: number of rounds.
        record: records some calls.
        calibrate: measures the current cost of recording a span.
        pieces, ignored: as in `break_down`.
    """

    def run_round() -> tuple[TimedCall, list[Span], Mapping[str, Overhead]]:
        first = caller.time_call()
        # Disturbances only lengthen a call, so the faster half counts.
        calls = sorted(record(), key=lambda call: call.duration_ns)
        calls = calls[: max(1, len(calls) // 2)]
        # The speed may change while recording, so calls without recording are timed before and after it.
        return mean_of([first, caller.time_call()]), calls, calibrate()

    by_speed = sorted(
        (run_round() for _ in range(rounds)),
        key=lambda round_: round_[0][0] + fmean(call.duration_ns for call in round_[1]),
    )
    timed_calls, calls, costs = zip(*by_speed[: round(rounds * _KEPT_ROUNDS)], strict=True)
    overheads = {
        kind: Overhead(
            median(cost[kind].inside_ns for cost in costs), median(cost[kind].outside_ns for cost in costs)
        )
        for kind in costs[0]
    }
    spans = [call for round_calls in calls for call in round_calls]
    whole_ns, cpu_ns = mean_of(timed_calls)
    table, fitted = break_down(spans, whole_ns, overheads, pieces, ignored)
    return replace(table, on_cpu=min(cpu_ns / whole_ns, 1.0)), spans, fitted


def profiled_call(run: Callable[[], object]) -> object:
    """Calls the workload. Recorded trees start at this function, which is found by its name."""
    return run()


def recorded_calls(caller: Caller) -> list[Span]:
    """Returns one tree of frames for each call, with `profiled_call` as its root."""
    warmup = caller.warmup // 4

    def run_calls() -> None:
        for number in range(warmup + min(_FRAME_CALLS, caller.calls)):
            if caller.before is not None:
                caller.before()
            if number < warmup:
                caller.run()
            else:
                profiled_call(caller.run)

    return _record_trees(run_calls, profiled_call.__name__)


def _record_trees(work: Callable[[], object], name: str) -> list[Span]:
    """Returns the trees of all calls of the function with that name, in order of time."""
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        work()
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    calls: list[Span] = []
    while stack:
        event = stack.pop()
        if _kind(event) == PYTHON and event.name.endswith(f": {name}"):
            calls.append(_span(event, event.end_time_ns))
        else:
            stack += event.children
    return sorted(calls, key=lambda span: span.start_ns)


def _kind(event: Any) -> str:
    return str(event.typed[0]).rpartition(".")[2]


def _span(event: Any, until_ns: float) -> Span:
    """Converts an event and its children. torch omits the end of an event if the recording ended first."""
    end_ns = min(max(event.end_time_ns, event.start_time_ns), until_ns)
    children = [
        _span(child, end_ns) for child in sorted(event.children, key=lambda child: child.start_time_ns)
    ]
    return Span(event.name, _kind(event), event.start_time_ns, end_ns, children)


def short_name(name: str) -> str:
    """Shortens the name of a frame, e.g. `/usr/lib/torch/_dispatch.py(759): wrap` to `_dispatch.py: wrap`.

    Names of C functions lose the address of their object.
    """
    if place := _PLACE.match(name):
        function = place["name"]
        return "one call" if function == profiled_call.__name__ else f"{Path(place['file']).name}: {function}"
    plain_name = _ADDRESS.sub("", name)
    return f"{_BUILT_IN.sub('', plain_name.strip('<>'))} (C)" if _BUILT_IN.match(plain_name) else plain_name


def _nothing(*_args: object, **_kwargs: object) -> None:
    """A function whose recorded calls show what recording costs."""


def frame_overheads() -> Mapping[str, Overhead]:
    """Measures the current cost of recording one event, for each kind of event."""
    small = torch.zeros(1)
    negate = torch.neg
    python = _cost(_nothing, PYTHON)
    c_call = _cost(lambda: hash(1), C_CALL, below=(python,))
    return {
        PYTHON: python,
        C_CALL: c_call,
        OP: _cost(lambda: negate(small), OP, below=(python, c_call)),
    }


def _cost(call: Callable[[], object], kind: str, below: Sequence[Overhead] = ()) -> Overhead:
    """Measures the cost of recording the innermost event of a call.

    For ops, the whole cost counts as outside the event: torch reads the clock directly before and after the op, and the
    op's own time is unknown.

    Args:
        call: makes the event.
        kind: the kind of the event.
        below: costs of the other events that the call makes.
    """
    times_ns = [_time_loop_ns(call)]
    spans = _record_trees(lambda: times_ns.append(_time_loop_ns(call)), call.__name__)
    bare_ns, recorded_ns = times_ns
    total_ns = max(recorded_ns - bare_ns - sum(cost.total_ns for cost in below), 0.0)
    if kind != PYTHON or not spans:
        return Overhead(0.0, total_ns)
    inside_ns = min(max(median_high(span.duration_ns for span in spans) - bare_ns, 0.0), total_ns)
    return Overhead(inside_ns, total_ns - inside_ns)


def _time_loop_ns(call: Callable[[], object]) -> float:
    """Returns nanoseconds per call, the minimum of three rounds."""
    return min(HostClock().measure(call, _CALIBRATION_CALLS) for _ in range(3)) * 1e9


def counters(caller: Caller) -> Callable[[], list[Span]]:
    """Returns a function that records some calls with the core's counters. The root of each tree is named "entry"."""
    timer = stopwatch.StageTimer()  # made once, since finding the functions to time takes milliseconds
    timed = stopwatch.stopwatch(caller.run, "entry", timer.log)

    def record() -> list[Span]:
        roots: list[Span] = []
        with timer as log:
            for number in range(caller.warmup + caller.calls):
                if caller.before is not None:
                    caller.before()
                log.clear()
                timed()
                if number >= caller.warmup:
                    roots += spans_from_log(log, stopwatch.NAMES, COUNTER)
        return roots

    return record


def counter_overheads() -> Mapping[str, Overhead]:
    """Measures the cost of one timed interval (start and end reading) of the core's counters."""
    log: list[int] = []

    bare_ns = _time_call_ns(_nothing)
    timed_ns = _time_call_ns(stopwatch.stopwatch(_nothing, "glue", log))
    recorded_ns = median_high(log[index + 2] - log[index + 1] for index in range(0, len(log), 4))
    inside_ns = max(recorded_ns - bare_ns, 0.0)
    return {COUNTER: Overhead(inside_ns, outside_ns=max(timed_ns - bare_ns - inside_ns, 0.0))}


def _time_call_ns(function: Callable[..., object]) -> float:
    """Returns the nanoseconds of a call, without the cost of the loop.

    The call has three arguments, like those of the core's dispatch functions.
    """
    full, empty = (
        min(timeit.repeat(statement, globals={"f": function}, number=_TIMED_INTERVALS, repeat=3))
        for statement in ("f(1, 2, 3)", "pass")
    )
    return max(full - empty, 0.0) / _TIMED_INTERVALS * 1e9
