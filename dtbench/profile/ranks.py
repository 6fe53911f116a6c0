"""Profiling cases of real ranks: this rank's part. Every rank records; rank 0 merges and writes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from dtbench.engine import clocks
from dtbench.engine.clock import HostClock
from dtbench.engine.failure import ActiveCase, Diagnosis
from dtbench.engine.options import RunRequest, Task
from dtbench.engine.place import RankPlace
from dtbench.engine.progress import say
from dtbench.engine.rank import LaunchedRank
from dtbench.engine.ranks import LiveWorld, backend_of
from dtbench.engine.sampling import CollectiveSchedule, RankGroup
from dtbench.engine.workers import scratch
from dtbench.machine.device import choose_device, gpus
from dtbench.profile import trace
from dtbench.profile.profile import ProfileRequest
from dtbench.profile.text import TRACE, section_tables, write_profile
from dtbench.records.atomic import refuse_taken
from dtbench.records.profile import ITERATION, RanksProfile
from dtbench.suite import DeviceType
from dtbench.suite.errors import EXIT_CASE_FAILED, EXIT_OK, UsageError, complain
from dtbench.suite.mesh import Mesh, format_mesh, groups_in
from dtbench.text.units import plural

if TYPE_CHECKING:
    import torch

# Iterations of a section: some, to tell a habit from an accident; few, since each is drawn.
LEAST_ITERATIONS, MOST_ITERATIONS, ITERATIONS_S = 3, 10, 0.2
WARMUP_CALLS = 3
# Marks that tie the profiler's clock to the host's; the tightest decides.
_MARKS = 20
_MARK = "dtbench clock"


class RankRecording(CollectiveSchedule):
    """The schedule of one impl on ranks: iterations without torch's profiler, for what it costs, and with it.

    plain_us: of each iteration without the profiler. events: what the profiler recorded, as Chrome trace events on
    this host's clock since the epoch. uncertainty_us: of that.
    """

    def __init__(
        self,
        task: Task,
        impl: str,
        ranks: RankGroup,
        now: ActiveCase,
        barrier: Callable[[], None],
        epoch_ns: int,
        options: RunRequest,
    ) -> None:
        super().__init__(task.case, [impl], ranks, now)
        self.section = f"{task.label} ({impl})"
        self.plain_us: list[float] = []
        self.events: list[trace.Event] = []
        self.uncertainty_us = 0.0
        self._recorded = self.live[impl]
        self._barrier, self._epoch_ns = barrier, epoch_ns
        self._most = LEAST_ITERATIONS if options.quick else MOST_ITERATIONS
        self._on_gpu = choose_device(options.device) == "cuda"
        self._clock = HostClock()

    def warm_up(self) -> None:
        self._agree_on_verdicts()
        self._recorded.attempt(lambda: self._recorded.call(WARMUP_CALLS))

    def sample(self) -> None:
        self._agree_on_verdicts()
        took_s = self._recorded.attempt(self._iteration_s)
        count = self.vote(took_s, self._decide_iterations)
        self._recorded.attempt(lambda: self._record(count))
        self._agree_on_verdicts()

    def _agree_on_verdicts(self) -> None:
        self.vote(None, lambda _votes: None)

    finish = _agree_on_verdicts

    def _decide_iterations(self, votes: list[float | None]) -> int:
        slowest_s = max(took_s for took_s in votes if took_s is not None)
        return int(min(max(ITERATIONS_S / max(slowest_s, 1e-6), LEAST_ITERATIONS), self._most))

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
                with record_function(f"{ITERATION} {self.section} #{number}"):
                    self._iterate()
            for _ in range(_MARKS):
                before = time.time_ns()
                with record_function(_MARK):
                    pass
                marks.append((before - self._epoch_ns, time.time_ns() - self._epoch_ns))
        events = events_of(profiler, self._epoch_ns)
        drawn = sorted((e["ts"], e["dur"]) for e in events if e["name"] == _MARK and e.get("ph") == "X")
        offset = clocks.from_marks(
            [
                (before, ts * 1e3, (ts + dur) * 1e3, after)
                for (before, after), (ts, dur) in zip(marks, drawn, strict=True)
            ]
        )
        self.uncertainty_us = offset.uncertainty_ns / 1e3
        others = (e for e in events if e["name"] != _MARK)
        self.events += [e | {"ts": e["ts"] + offset.ns / 1e3} if "ts" in e else e for e in others]


def events_of(profiler: torch.profiler.profile, epoch_ns: int) -> list[trace.Event]:
    """What the profiler recorded, as Chrome trace events with `ts` in us since the epoch given."""
    with scratch() as folder:
        path = folder / "trace.json"
        profiler.export_chrome_trace(str(path))
        exported = json.loads(path.read_text("utf-8", "replace"))
    # Whole nanoseconds first: microseconds since 1970 have no room for fractions in a double.
    base_us = (int(exported.get("baseTimeNanoseconds", 0)) - epoch_ns) / 1e3
    kept = []
    for event in exported["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") not in ("Trace", None):
            kept.append(event | {"ts": event["ts"] + base_us})
        elif event.get("ph") == "M" and event.get("name") == "thread_name":
            kept.append({key: event[key] for key in ("ph", "name", "pid", "tid", "args")})
    return kept


# What a rank hands over: its trace, and section -> us of each iteration without the profiler.
_Part = tuple[trace.RankTrace, dict[str, list[float]]]


class RankProfile:
    """This rank's part in a profile. `go` never returns."""

    def __init__(self, request: ProfileRequest, place: RankPlace) -> None:
        self._request = request
        self._place = place
        self._rank = LaunchedRank(place, report_failure)
        self._recordings: list[RankRecording] = []
        self._groups: dict[str, list[list[int]]] = {}
        self._failed = False

    def go(self) -> NoReturn:
        with self._rank as rank:
            device_type = choose_device(self._request.options.device)
            tasks = self._request.tasks(device_type, self._place.world_size)
            if tasks[0].suite.world != "ranks":
                raise UsageError(
                    f"{tasks[0].suite.name} needs no ranks, but a launcher has started some: profile it without it"
                )
            rank.join(device_type, backend_of(device_type, self._request.options.backend))
            parts = self._profile(tasks, device_type)
            rank.conclude(lambda: self._write(parts))
        rank.exit()

    def _profile(self, tasks: Sequence[Task], device_type: DeviceType) -> list[_Part]:
        """On rank 0 what each rank has recorded."""
        import torch.distributed as dist

        rank, ranks, options = self._rank, self._rank.ranks, self._request.options
        epoch_ns = int(ranks.agree(time.time_ns(), lambda votes: votes[0]))
        host_clock = rank.clock_offset(time.time_ns)
        plan = options.resolve(device_type, ranks.size)
        if ranks.rank == 0:
            refuse_taken(self._request.folder, "remove it")
            where = f"{ranks.size} {device_type} ranks ({format_mesh(plan.mesh)})"
            say(f"{plural(len(tasks), 'case')} to profile on {where}")
        with rank.process_group(plan.mesh, options.timeout_s) as (world, barrier):
            for task in tasks:
                self._profile_task(task, world, barrier, plan.mesh, epoch_ns)
            gathered: list[_Part | None] | None = [None] * ranks.size if ranks.rank == 0 else None
            dist.gather_object(self._part(host_clock), gathered)
        return [part for part in gathered or [] if part is not None]

    def _profile_task(
        self, task: Task, world: LiveWorld, barrier: Callable[[], None], mesh: Mesh, epoch_ns: int
    ) -> None:
        now, case, options = self._rank.now, task.case, self._request.options
        for impl in task.impls:
            now.begin(task.suite.name, case.name, case.params, task.impls)
            recording = RankRecording(task, impl, self._rank.ranks, now, barrier, epoch_ns, options)
            with self._rank.limit(options.timeout_s):
                bad = recording.run(world).get(impl)
            if bad is None:
                self._groups[recording.section] = groups_in(mesh, case.params.get("mesh_dim"))
                self._recordings.append(recording)
                continue
            self._failed |= bad.status != "skipped"
            if self._place.rank == 0:
                complain(f"{recording.section}: {bad.status}, {bad.reason} (rank {bad.rank})")
        now.end()

    def _part(self, host_clock: clocks.Offset) -> _Part:
        recordings, info = self._recordings, self._rank.infos[self._place.rank]
        marks_us = max((recording.uncertainty_us for recording in recordings), default=0.0)
        own = trace.RankTrace(
            rank=self._place.rank,
            host=info["host"],
            device=info["device"],
            events=[event for recording in recordings for event in recording.events],
            shift_us=host_clock.ns / 1e3,
            uncertainty_us=host_clock.uncertainty_ns / 1e3 + marks_us,
        )
        return own, {recording.section: recording.plain_us for recording in recordings}

    def _write(self, parts: Sequence[_Part]) -> int:
        """On rank 0: the folder. The exit code."""
        if not self._groups:
            complain("nothing could be profiled: no profile was written")
            return EXIT_CASE_FAILED
        traces = [own for own, _ in parts]
        # Of each iteration the slowest rank's time.
        plain = {
            section: list(map(max, zip(*(plain_us[section] for _, plain_us in parts), strict=True)))
            for section in self._groups
        }
        record = RanksProfile(
            sections=tuple(trace.sections_of(traces, self._groups, plain)),
            clock_us={str(t.rank): t.uncertainty_us for t in traces},
        )
        write_profile(self._request.folder, section_tables(record), record, {TRACE: trace.merge(traces)})
        return EXIT_CASE_FAILED if self._failed else EXIT_OK


def report_failure(diagnosis: Diagnosis, now: ActiveCase) -> None:
    """The last line of a profile that could not be finished."""
    complain(f"{diagnosis.during(now)}: no profile was written")
