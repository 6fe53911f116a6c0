"""The core's own counters as spans: `dtbench_core.interop.stopwatch` around the calls of a workload."""

from __future__ import annotations

import timeit
from collections.abc import Callable

from dtbench.profile.spans import Overhead, Span, from_brackets
from dtbench_core.interop import stopwatch

KIND = "counter"
# Brackets per calibration: the quickest of some rounds of it agree within nanoseconds.
_CALIBRATION_CALLS = 50


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
                    roots += from_brackets(log, stopwatch.NAMES, KIND)
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
        min(timeit.repeat(statement, globals={"f": function}, number=_CALIBRATION_CALLS, repeat=3))
        for statement in ("f(1, 2, 3)", "pass")
    )
    return max(full - empty, 0.0) / _CALIBRATION_CALLS * 1e9
