"""Profiling cases whose ranks are simulated: each call is the host's work alone, and is taken apart.

The recorded calls, those that nobody records and the calibration of the recording are taken in turn, in
rounds of milliseconds, and only the quickest rounds count: a shared machine changes its speed between any
two seconds.

torch's profiler records every Python call, every call of a C function from Python and every op that
passes torch's dispatcher, nested in one tree. Each costs 0.2 to 0.6 us to record: `frame_overheads` says
how much here, and the self times are corrected for it.
"""

from __future__ import annotations

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
    from_brackets,
    named_pieces,
)
from dtbench.records.profile import CallStages
from dtbench.suite import Workload
from dtbench.suite.case import FLOOR
from dtbench_core.interop import stopwatch

# A block of calls lasts about so long: above the clock's and the loop's cost, below most disturbances.
_BLOCK_NS = 400_000
_MOST_CALLS, _LEAST_CALLS, _BLOCKS = 50, 4, 5
# After a swap of functions Python finds its way anew: its caches of names settle within some 50 calls.
_WARMUP_CALLS = 60
_KEPT_ROUNDS = 0.25
# Rounds of counters and, which cost a tenth of a second each, of frames; and where few do.
_ROUNDS, _FRAME_ROUNDS = 60, 16
_QUICK_ROUNDS, _QUICK_FRAME_ROUNDS = 16, 8
# Of frames so many calls are recorded at once.
_FRAME_CALLS = 20
# The floor inside a class of tensors: it has no stages to tell apart.
WRAPPED = "wrapped"
# torch's names of what it records.
PYTHON, C_CALL, OP = "PyCall", "PyCCall", "TorchOp"
_CALIBRATION_CALLS = 100
_ADDRESS = re.compile(r" of .* object at 0x[0-9a-f]+| at 0x[0-9a-f]+")
_BUILT_IN = re.compile(r"<?built-in (function|method) ")
_PLACE = re.compile(r"^(?P<file>[^()]*?)\((?P<line>\d+)\): (?P<name>.*)$", re.DOTALL)
COUNTER = "counter"
# Brackets per calibration: the quickest of some rounds of it agree within nanoseconds.
_BRACKETS = 50


# A call that is not recorded: ns, and in how many of them this process ran on a CPU.
TimedCall = tuple[float, float]


def mean_of(calls: Sequence[TimedCall]) -> TimedCall:
    """A call of mean times."""
    return fmean(wall_ns for wall_ns, _ in calls), fmean(ran_ns for _, ran_ns in calls)


class Caller:
    """CallsProfile a workload in blocks; making it warms the workload up."""

    def __init__(self, workload: Workload) -> None:
        self.run, self.before = workload.run, workload.before
        self._clock = HostClock()
        first_ns, _ = self._block(1)
        call_ns = first_ns if self.before is not None else min(self._block(1)[0] for _ in range(20))
        self.calls = int(min(max(_BLOCK_NS / call_ns, _LEAST_CALLS), _MOST_CALLS))
        self.warmup = 0 if self.before is not None else min(_WARMUP_CALLS, self.calls)

    def whole(self) -> TimedCall:
        """The mean of the quicker half of some blocks, as recorded calls are chosen."""
        if self.before is None:
            self._block(self.warmup)
        size = 1 if self.before is not None else max(self.calls // _BLOCKS, 1)
        blocks = sorted(self._block(size) for _ in range(max(self.calls // size, _BLOCKS)))
        return mean_of(blocks[: max(1, len(blocks) // 2)])

    def _block(self, calls: int) -> TimedCall:
        if self.before is not None:
            self.before()
        began_ns = process_time_ns()
        wall_ns = self._clock.measure(self.run, calls) * 1e9
        return wall_ns, (process_time_ns() - began_ns) / calls


class CallRecording:
    """The schedule of one impl of a case: its calls are recorded and taken apart.

    The core's table is that of its own counters, other impls' that of frames; speedscope gets the frames, which
    go deeper. Of the plain op only `floor` is taken. floor: a call of the plain op, if it is known.
    """

    def __init__(self, label: str, subject: Subject, quick: bool, floor: TimedCall | None) -> None:
        self.floor = floor
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
            calls = sorted(caller.whole() for _ in range(self._rounds))
            self.floor = mean_of(calls[: round(self._rounds * _KEPT_ROUNDS)])
            return
        record: Callable[[], list[Span]] = partial(recorded_calls, caller)
        table, spans, fitted = taken_apart(caller, self._frame_rounds, record, frame_overheads, frame_pieces)
        self.folded[f"{self._label} ({impl})"] = fold(
            spans, fitted, short_name, total_ns=table.whole_ns - table.unattributed_ns
        )
        source = "Python and C++ frames"
        if impl == "core":
            record, own = counters(caller), stopwatch.BOOKKEEPING
            table, *_ = taken_apart(caller, self._rounds, record, bracket_overheads, named_pieces, own)
            source = "the core's counters"
        floor_ns, ran_ns = self.floor or (None, math.inf)
        self.tables.append(
            replace(
                table,
                label=self._label,
                impl=impl,
                source=source,
                floor_ns=floor_ns,
                on_cpu=min(table.on_cpu, ran_ns / (floor_ns or 1.0)),
            )
        )


def taken_apart(
    caller: Caller,
    rounds: int,
    record: Callable[[], list[Span]],
    calibrate: Callable[[], Mapping[str, Overhead]],
    pieces: Pieces,
    ignored: str = "",
) -> tuple[CallStages, list[Span], Mapping[str, Overhead]]:
    """Of the quickest rounds the table, the recorded calls, and the fitted cost of recording a span.

    record: some calls; calibrate: what recording a span costs now; pieces, ignored: see `break_down`.
    """

    def one_round() -> tuple[TimedCall, list[Span], Mapping[str, Overhead]]:
        first = caller.whole()
        calls = sorted(record(), key=lambda call: call.duration_ns)
        # The quicker half: what disturbs a call only ever lengthens it.
        calls = calls[: max(1, len(calls) // 2)]
        # Recording takes long enough for the machine to change: a call alone before it and after it.
        return mean_of([first, caller.whole()]), calls, calibrate()

    taken = sorted(
        (one_round() for _ in range(rounds)), key=lambda one: one[0][0] + fmean(c.duration_ns for c in one[1])
    )
    wholes, calls, costs = zip(*taken[: round(rounds * _KEPT_ROUNDS)], strict=True)
    overheads = {
        kind: Overhead(
            median(of[kind].inside_ns for of in costs), median(of[kind].outside_ns for of in costs)
        )
        for kind in costs[0]
    }
    spans = [call for of in calls for call in of]
    whole_ns, ran_ns = mean_of(wholes)
    table, fitted = break_down(spans, whole_ns, overheads, pieces, ignored)
    return replace(table, on_cpu=min(ran_ns / whole_ns, 1.0)), spans, fitted


def profiled_call(run: Callable[[], object]) -> object:
    """The root of every tree; the profiler finds it by its name."""
    return run()


def recorded_calls(caller: Caller) -> list[Span]:
    """One tree of frames per call; the root is `profiled_call`."""
    warmup = caller.warmup // 4

    def call_them() -> None:
        for number in range(warmup + min(_FRAME_CALLS, caller.calls)):
            if caller.before is not None:
                caller.before()
            if number < warmup:
                caller.run()
            else:
                profiled_call(caller.run)

    return _recorded(call_them, profiled_call.__name__)


def _recorded(work: Callable[[], object], name: str) -> list[Span]:
    """The trees below every call of the function of that name, in the order of time."""
    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        work()
    results: Any = profiler.profiler  # torch gives its events no types
    stack = list(results.kineto_results.experimental_event_tree())
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
    """The event and all below it. torch leaves an end out where the recording ended first."""
    end_ns = min(max(event.end_time_ns, event.start_time_ns), until_ns)
    children = [
        _span(child, end_ns) for child in sorted(event.children, key=lambda child: child.start_time_ns)
    ]
    return Span(event.name, _kind(event), event.start_time_ns, end_ns, children)


def short_name(name: str) -> str:
    """`/usr/lib/torch/distributed/tensor/_dispatch.py(759): wrap` -> `_dispatch.py: wrap`, and C functions
    without the address of what they belong to."""
    if place := _PLACE.match(name):
        function = place["name"]
        return "one call" if function == profiled_call.__name__ else f"{Path(place['file']).name}: {function}"
    bare = _ADDRESS.sub("", name)
    return f"{_BUILT_IN.sub('', bare.strip('<>'))} (C)" if _BUILT_IN.match(bare) else bare


def _nothing(*_args: object, **_kwargs: object) -> None:
    """CallsProfile of it are recorded for what recording costs."""


def frame_overheads() -> Mapping[str, Overhead]:
    """What recording one event of each kind costs here and now."""
    small = torch.zeros(1)
    negate = torch.neg
    python = _cost(_nothing, PYTHON)
    c_call = _cost(lambda: hash(1), C_CALL, below=(python,))
    op = _cost(lambda: negate(small), OP, below=(python, c_call))
    return {PYTHON: python, C_CALL: c_call, OP: op}


def _cost(call: Callable[[], object], kind: str, below: Sequence[Overhead] = ()) -> Overhead:
    """Of the innermost event of `call`, which also makes one event for each of `below`.

    The time inside a recorded op that is the recording's cannot be told from the op's: it counts as
    outside, since torch reads the clock last before an op and first after it.
    """
    loops = [_loop_ns(call)]
    spans = _recorded(lambda: loops.append(_loop_ns(call)), call.__name__)
    bare_ns, with_ns = loops
    total_ns = max(with_ns - bare_ns - sum(cost.total_ns for cost in below), 0.0)
    if kind != PYTHON or not spans:
        return Overhead(0.0, total_ns)
    durations = [span.duration_ns for span in spans]
    inside_ns = min(max(median_high(durations) - bare_ns, 0.0), total_ns)
    return Overhead(inside_ns, total_ns - inside_ns)


def _loop_ns(call: Callable[[], object]) -> float:
    """ns per call, the quickest of some rounds."""
    clock = HostClock()
    return min(clock.measure(call, _CALIBRATION_CALLS) for _ in range(3)) * 1e9


def counters(caller: Caller) -> Callable[[], list[Span]]:
    """What records some calls after a warm-up; a call's tree has the whole call as its root, at stage "entry"."""
    timer = stopwatch.StageTimer()  # made once: finding what to put stopwatches around takes milliseconds
    timed = stopwatch.stopwatch(caller.run, "entry", timer.log)

    def calls() -> list[Span]:
        roots: list[Span] = []
        with timer as log:
            for number in range(caller.warmup + caller.calls):
                if caller.before is not None:
                    caller.before()
                log.clear()
                timed()
                if number >= caller.warmup:
                    roots += from_brackets(log, stopwatch.NAMES, COUNTER)
        return roots

    return calls


def bracket_overheads() -> Mapping[str, Overhead]:
    """What one bracket of the counters costs here and now."""
    log: list[int] = []

    timed = stopwatch.stopwatch(_nothing, "glue", log)
    bare_ns = _per_call_ns(_nothing)
    with_ns = _per_call_ns(timed)
    recorded_ns = median_high(log[at + 2] - log[at + 1] for at in range(0, len(log), 4))
    inside_ns = max(recorded_ns - bare_ns, 0.0)
    return {COUNTER: Overhead(inside_ns, outside_ns=max(with_ns - bare_ns - inside_ns, 0.0))}


def _per_call_ns(function: Callable[..., object]) -> float:
    """Of a call with three arguments, as the dispatch's functions take; without the loop's own time."""
    full, empty = (
        min(timeit.repeat(statement, globals={"f": function}, number=_BRACKETS, repeat=3))
        for statement in ("f(1, 2, 3)", "pass")
    )
    return max(full - empty, 0.0) / _BRACKETS * 1e9
