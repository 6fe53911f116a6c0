"""Python and C++ frames of calls as spans, from torch.profiler.

torch's profiler records every Python call, every call of a C function from Python and every op that
passes torch's dispatcher, nested in one tree. Each costs 0.2 to 0.6 us to record: `frame_overheads` says
how much here, and the self times are corrected for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dtbench.bench.clock import HostClock
from dtbench.profile.spans import Overhead, Span

# torch's names of what it records.
PYTHON, C_CALL, OP = "PyCall", "PyCCall", "TorchOp"
_CALIBRATION_CALLS = 100
_ADDRESS = re.compile(r" of .* object at 0x[0-9a-f]+| at 0x[0-9a-f]+")
_PLACE = re.compile(r"^(?P<file>[^()]*?)\((?P<line>\d+)\): (?P<name>.*)$", re.DOTALL)


def profiled_call(run: Callable[[], object]) -> object:
    """The root of every tree; the profiler finds it by its name."""
    return run()


def recorded_calls(
    run: Callable[[], object], before: Callable[[], None] | None, warmup: int, calls: int
) -> list[Span]:
    """One tree of frames per call; the root is `profiled_call`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        for number in range(warmup + calls):
            if before is not None:
                before()
            if number < warmup:
                run()
            else:
                profiled_call(run)
    return _roots(_tree(profiler), profiled_call.__name__)


def _tree(profiler: Any) -> Sequence[Any]:
    tree: Sequence[Any] = profiler.profiler.kineto_results.experimental_event_tree()
    return tree


def _roots(events: Sequence[Any], name: str) -> list[Span]:
    """The trees below every call of the function, in the order of time."""
    found: list[Span] = []
    stack = list(events)
    while stack:
        event = stack.pop()
        if _kind(event) == PYTHON and event.name.endswith(f": {name}"):
            found.append(_span(event))
        else:
            stack += event.children
    return sorted(found, key=lambda span: span.start_ns)


def _kind(event: Any) -> str:
    return str(event.typed[0]).rpartition(".")[2]


def _span(event: Any) -> Span:
    """The event and all below it. torch leaves an end out where the recording ended first."""
    top = Span(event.name, _kind(event), event.start_time_ns, event.end_time_ns)
    stack = [(event, top)]
    while stack:
        of, span = stack.pop()
        for child in sorted(of.children, key=lambda c: c.start_time_ns):
            end_ns = min(max(child.end_time_ns, child.start_time_ns), span.end_ns)
            made = Span(child.name, _kind(child), child.start_time_ns, end_ns)
            span.children.append(made)
            stack.append((child, made))
    return top


def short_name(name: str) -> str:
    """`/usr/lib/torch/distributed/tensor/_dispatch.py(759): wrap` -> `_dispatch.py: wrap`, and C functions
    without the address of what they belong to."""
    place = _PLACE.match(name)
    if place is not None and place["name"] == profiled_call.__name__:
        return "one call"
    if place is not None:
        return f"{place['file'].rpartition('/')[2]}: {place['name']}"
    if name.startswith("<built-in"):
        bare = _ADDRESS.sub("", name).strip("<>")
        return bare.removeprefix("built-in function ").removeprefix("built-in method ") + " (C)"
    return _ADDRESS.sub("", name)


# --------------------------------------------------------------------------------- what recording costs


def _nothing() -> None:
    return None


def frame_overheads() -> Mapping[str, Overhead]:
    """What recording one event of each kind costs here and now."""
    import torch

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
    bare_ns = _loop_ns(call)
    with_ns, spans = _timed_recording(call)
    total_ns = max(with_ns - bare_ns - sum(cost.total_ns for cost in below), 0.0)
    if kind != PYTHON:
        return Overhead(0.0, total_ns)
    durations = sorted(span.duration_ns for span in spans)
    inside_ns = min(max(durations[len(durations) // 2] - bare_ns, 0.0), total_ns) if durations else 0.0
    return Overhead(inside_ns, total_ns - inside_ns)


def _timed_recording(call: Callable[[], object]) -> tuple[float, list[Span]]:
    """(ns per call under the profiler, what it recorded of the calls)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], with_stack=True) as profiler:
        took_ns = _loop_ns(call)
    return took_ns, _roots(_tree(profiler), getattr(call, "__name__", ""))


def _loop_ns(call: Callable[[], object]) -> float:
    """ns per call, the quickest of some rounds."""
    clock = HostClock()
    return min(clock.measure(call, _CALIBRATION_CALLS) for _ in range(3)) * 1e9
