"""What one rank records of an impl of a case: iterations without torch's profiler, for what it costs, and with it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from dtbench.engine import clocks
from dtbench.engine.clock import HostClock
from dtbench.engine.failure import ActiveCase
from dtbench.engine.options import Task
from dtbench.engine.sampling import CollectiveSchedule, RankGroup
from dtbench.engine.workers import scratch
from dtbench.machine.device import gpus
from dtbench.profile import trace
from dtbench.profile.request import Request
from dtbench.records.profile import ITERATION

if TYPE_CHECKING:
    import torch

# Iterations of a section: some, to tell a habit from an accident; few, since each is drawn.
LEAST_ITERATIONS, MOST_ITERATIONS, ITERATIONS_S = 3, 10, 0.2
QUICK_ITERATIONS = 3
WARMUP_CALLS = 3
# Marks that tie the profiler's clock to the host's; the tightest decides.
_MARKS = 20
_MARK = "dtbench clock"


class RankRecording(CollectiveSchedule):
    """The schedule of one impl on ranks. plain_us: of each iteration without the profiler. events: what the
    profiler recorded, as Chrome trace events on this host's clock since the epoch. uncertainty_us: of that.
    """

    def __init__(
        self,
        task: Task,
        impl: str,
        ranks: RankGroup,
        now: ActiveCase,
        barrier: Callable[[], None],
        epoch_ns: int,
        request: Request,
    ) -> None:
        super().__init__(task.case, [impl], ranks, now)
        self.section = f"{task.label} ({impl})"
        self.plain_us: list[float] = []
        self.events: list[trace.Event] = []
        self.uncertainty_us = 0.0
        self._recorded = self.live[impl]
        self._barrier = barrier
        self._clock = HostClock()
        self._epoch_ns = epoch_ns
        self._request = request
        self._on_gpu = request.device_type() == "cuda"

    def warm_up(self) -> None:
        self._agree_on_verdicts()
        self._recorded.attempt(lambda: self._recorded.call(WARMUP_CALLS))

    def sample(self) -> None:
        self._agree_on_verdicts()
        took_s = self._recorded.attempt(self._iteration_s)
        count = self.vote(took_s, self._decide_iterations)
        self._recorded.attempt(lambda: self._record(count))
        self._agree_on_verdicts()

    def finish(self) -> None:
        self._agree_on_verdicts()

    def _agree_on_verdicts(self) -> None:
        self.vote(None, lambda _votes: None)

    def _decide_iterations(self, votes: list[float | None]) -> int:
        if self._request.options.quick:
            return QUICK_ITERATIONS
        slowest_s = max(took_s for took_s in votes if took_s is not None)
        return int(min(max(ITERATIONS_S / max(slowest_s, 1e-6), LEAST_ITERATIONS), MOST_ITERATIONS))

    def _get_ready(self) -> None:
        self._recorded.ready()
        self._barrier()

    def _iterate(self) -> None:
        self._recorded.workload.run()
        if self._on_gpu:
            gpus().synchronize()

    def _iteration_s(self) -> float:
        self._get_ready()
        return self._clock.measure(self._iterate, 1)

    def _record(self, count: int) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        self.plain_us += [self._iteration_s() * 1e6 for _ in range(count)]
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        marks = []
        with profile(activities=activities) as profiler:
            for number in range(count):
                self._get_ready()
                name = f"{ITERATION} {self.section} #{number}"
                with record_function(name), self._nvtx_range(name):
                    self._iterate()
            for _ in range(_MARKS):
                before = time.time_ns()
                with record_function(_MARK):
                    pass
                marks.append((before, time.time_ns()))
        self._keep(events_of(profiler, self._epoch_ns), marks)

    def _nvtx_range(self, name: str) -> AbstractContextManager[object]:
        """Where it was asked for."""
        if not self._request.nvtx:
            return contextlib.nullcontext()
        from torch.cuda import nvtx

        marked: AbstractContextManager[object] = nvtx.range("{}", name)
        return marked

    def _keep(self, events: list[trace.Event], marks: Sequence[tuple[int, int]]) -> None:
        """The events on this host's clock, less the marks."""
        drawn = sorted(
            (e for e in events if e["name"] == _MARK and e.get("ph") == "X"), key=lambda e: e["ts"]
        )
        known = [
            (before - self._epoch_ns, e["ts"] * 1e3, (e["ts"] + e["dur"]) * 1e3, after - self._epoch_ns)
            for (before, after), e in zip(marks, drawn, strict=True)
        ]
        offset = clocks.from_marks(known)
        self.uncertainty_us = offset.uncertainty_ns / 1e3
        for event in events:
            if event["name"] != _MARK:
                if "ts" in event:
                    event["ts"] += offset.ns / 1e3
                self.events.append(event)


def events_of(profiler: torch.profiler.profile, epoch_ns: int) -> list[trace.Event]:
    """What the profiler recorded, as Chrome trace events with `ts` in us since the epoch given."""
    with scratch() as folder:
        path = folder / "trace.json"
        profiler.export_chrome_trace(str(path))
        made = json.loads(path.read_text("utf-8", "replace"))
    # Whole nanoseconds first: microseconds since 1970 have no room for fractions in a double.
    base_us = (int(made.get("baseTimeNanoseconds", 0)) - epoch_ns) / 1e3
    kept = []
    for event in made["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") not in ("Trace", None):
            kept.append(event | {"ts": event["ts"] + base_us})
        elif event.get("ph") == "M" and event.get("name") == "thread_name":
            kept.append({key: event[key] for key in ("ph", "name", "pid", "tid", "args")})
    return kept
