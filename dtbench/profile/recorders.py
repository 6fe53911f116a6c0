"""What records calls as spans: torch.profiler, and the core's own counters.

torch's profiler records every Python call, every call of a C function from Python and every op that
passes torch's dispatcher, nested in one tree. Each costs 0.2 to 0.6 us to record: `frame_overheads` says
how much here, and the self times are corrected for it.
"""

from __future__ import annotations

import re
import timeit
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median_high
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from dtbench.engine.clock import HostClock
from dtbench.profile.spans import Overhead, Span, from_brackets
from dtbench_core.interop import stopwatch

# torch's names of what it records.
PYTHON, C_CALL, OP = "PyCall", "PyCCall", "TorchOp"
_CALIBRATION_CALLS = 100
_ADDRESS = re.compile(r" of .* object at 0x[0-9a-f]+| at 0x[0-9a-f]+")
_BUILT_IN = re.compile(r"<?built-in (function|method) ")
_PLACE = re.compile(r"^(?P<file>[^()]*?)\((?P<line>\d+)\): (?P<name>.*)$", re.DOTALL)


def profiled_call(run: Callable[[], object]) -> object:
    """The root of every tree; the profiler finds it by its name."""
    return run()


def recorded_calls(
    run: Callable[[], object], before: Callable[[], None] | None, warmup: int, calls: int
) -> list[Span]:
    """One tree of frames per call; the root is `profiled_call`."""

    def call_them() -> None:
        for number in range(warmup + calls):
            if before is not None:
                before()
            if number < warmup:
                run()
            else:
                profiled_call(run)

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
    below = sorted(event.children, key=lambda child: child.start_time_ns)
    children = [_span(child, end_ns) for child in below]
    return Span(event.name, _kind(event), event.start_time_ns, end_ns, children)


def short_name(name: str) -> str:
    """`/usr/lib/torch/distributed/tensor/_dispatch.py(759): wrap` -> `_dispatch.py: wrap`, and C functions
    without the address of what they belong to."""
    if place := _PLACE.match(name):
        function = place["name"]
        return "one call" if function == profiled_call.__name__ else f"{Path(place['file']).name}: {function}"
    bare = _ADDRESS.sub("", name)
    return f"{_BUILT_IN.sub('', bare.strip('<>'))} (C)" if _BUILT_IN.match(bare) else bare


def _nothing() -> None:
    return None


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
    spans = _recorded(lambda: loops.append(_loop_ns(call)), getattr(call, "__name__", ""))
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


# --------------------------------------------------------------------------------- the core's counters

COUNTER = "counter"
# Brackets per calibration: the quickest of some rounds of it agree within nanoseconds.
_BRACKETS = 50


class Counters:
    """Records calls of one workload. Made once: finding what to put stopwatches around takes milliseconds."""

    def __init__(self, run: Callable[[], object], before: Callable[[], None] | None) -> None:
        self._timer = stopwatch.StageTimer()
        self._timed = stopwatch.stopwatch(run, "entry", self._timer.log)
        self._before = before

    def calls(self, warmup: int, calls: int) -> list[Span]:
        """One tree per call; its root is the call as a whole, at stage "entry"."""
        roots: list[Span] = []
        with self._timer as log:
            for number in range(warmup + calls):
                if self._before is not None:
                    self._before()
                log.clear()
                self._timed()
                if number >= warmup:
                    roots += from_brackets(log, stopwatch.NAMES, COUNTER)
        return roots


def bracket_overhead() -> Overhead:
    """What one bracket of the counters costs here and now."""
    log: list[int] = []

    def nothing(*args: object, **kwargs: object) -> None:
        return None

    timed = stopwatch.stopwatch(nothing, "glue", log)
    bare_ns = _per_call_ns(nothing)
    with_ns = _per_call_ns(timed)
    recorded = sorted(log[at + 2] - log[at + 1] for at in range(0, len(log), 4))
    inside_ns = recorded[len(recorded) // 2] - bare_ns
    return Overhead(max(inside_ns, 0.0), max(with_ns - bare_ns - max(inside_ns, 0.0), 0.0))


def _per_call_ns(function: Callable[..., object]) -> float:
    """Of a call with three arguments, as the dispatch's functions take; without the loop's own time."""
    full, empty = (
        min(timeit.repeat(statement, globals={"f": function}, number=_BRACKETS, repeat=3))
        for statement in ("f(1, 2, 3)", "pass")
    )
    return max(full - empty, 0.0) / _BRACKETS * 1e9
