"""Profiling cases of real ranks: this rank's part. Every rank records and reads its traces; rank 0 joins and writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NoReturn

from msgspec import structs

from dtbench.engine.clock import HostClock
from dtbench.engine.failure import ActiveCase, Diagnosis
from dtbench.engine.options import RunRequest
from dtbench.engine.progress import print_status
from dtbench.engine.rank import LaunchedRank
from dtbench.engine.rank_env import RankEnv
from dtbench.engine.ranks import LiveWorld, choose_backend
from dtbench.engine.sampling import CollectiveSchedule
from dtbench.engine.tasks import Task
from dtbench.engine.workers import scratch
from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, UsageError, complain
from dtbench.machine.device import choose_device, gpus
from dtbench.profile.folder import write_profile
from dtbench.profile.request import ProfileRequest
from dtbench.profile.tables import section_tables
from dtbench.records.atomic import refuse_taken
from dtbench.records.profile import RanksProfile, RanksSection
from dtbench.suite import DeviceType
from dtbench.suite.mesh import Mesh, format_mesh
from dtbench.text.units import plural
from dtbench.traces.communication import Call
from dtbench.traces.job import build_job
from dtbench.traces.rank_trace import RankTrace, read_rank

# Iterations of a section: some, to tell a habit from an accident; few, since each is drawn.
LEAST_ITERATIONS, MOST_ITERATIONS, ITERATIONS_S = 3, 10, 0.2
WARMUP_CALLS = 3
_BETWEEN = "between iterations"  # the mesh dim of barriers
_LONGEST_NAME = 200  # of a file, less the rank


@dataclass(frozen=True)
class Recorded:
    """A section of one rank. plain_us: of each iteration without torch's profiler. file: the trace as it wrote it."""

    label: str
    plain_us: list[float]
    trace: RankTrace
    file: bytes


class RankRecording(CollectiveSchedule):
    """The schedule of one impl on ranks: iterations without torch's profiler, for what it costs, and with it."""

    recorded: Recorded

    def __init__(
        self, task: Task, impl: str, rank: LaunchedRank, barrier: Callable[[], None], options: RunRequest
    ) -> None:
        super().__init__(task.case, [impl], rank.ranks, rank.active_case)
        self.label = f"{task.label} ({impl})"
        self._impl, self._rank, self._barrier = self.live[impl], rank.ranks.rank, barrier
        self._most = LEAST_ITERATIONS if options.quick else MOST_ITERATIONS
        self._on_gpu = choose_device(options.device) == "cuda"
        self._clock = HostClock()

    def warm_up(self) -> None:
        self._agree_on_verdicts()
        self._impl.attempt(lambda: self._impl.call(WARMUP_CALLS))

    def sample(self) -> None:
        self._agree_on_verdicts()
        took_s = self._impl.attempt(self._iteration_s)
        count = self.vote(took_s, self._decide_iterations)
        self._impl.attempt(lambda: self._record(count))
        self._agree_on_verdicts()

    def _agree_on_verdicts(self) -> None:
        self.vote(None, lambda _votes: None)

    finish = _agree_on_verdicts

    def _decide_iterations(self, votes: list[float | None]) -> int:
        slowest_s = max(took_s for took_s in votes if took_s is not None)
        return int(min(max(ITERATIONS_S / max(slowest_s, 1e-6), LEAST_ITERATIONS), self._most))

    def _get_ready(self) -> None:
        self._impl.prepare()
        self._barrier()

    def _iterate(self) -> None:
        self._impl.workload.run()
        if self._on_gpu:
            gpus().synchronize()

    def _iteration_s(self) -> float:
        self._get_ready()
        return self._clock.measure(self._iterate, 1)

    def _record(self, count: int) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        from dtbench.traces.hook.dtbench_recorder import about

        plain_us = [self._iteration_s() * 1e6 for _ in range(count)]
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        with profile(activities=activities, record_shapes=True) as profiler:
            for number in range(count):
                self._get_ready()
                with record_function(f"ProfilerStep#{number}"):
                    self._iterate()
            profiler.add_metadata_json("dtbench", about())
            profiler.add_metadata_json(
                "dtbench_window", f'{{"asked": {count}, "whole": {count}, "warm": true}}'
            )
        with scratch() as folder:
            path = folder / "trace.json.gz"
            profiler.export_chrome_trace(str(path))
            self.recorded = Recorded(self.label, plain_us, read_rank(path, self._rank), path.read_bytes())


class RankProfile:
    """This rank's part in a profile. `go` never returns."""

    def __init__(self, request: ProfileRequest, place: RankEnv, report_path: str = "") -> None:
        self._request, self._place = request, place
        self._rank = LaunchedRank(place, report_failure, report_path=report_path)
        self._recorded: list[Recorded] = []
        self._failed = False

    def go(self) -> NoReturn:
        with self._rank as rank:
            device_type = choose_device(self._request.options.device)
            tasks = self._request.tasks(device_type, self._place.world_size)
            if tasks[0].suite.world != "ranks":
                raise UsageError(
                    f"{tasks[0].suite.name} needs no ranks, but a launcher has started some: profile it without it"
                )
            rank.join(device_type, choose_backend(device_type, self._request.options.backend))
            parts = self._profile(tasks, device_type)
            rank.conclude(self._write(parts) if rank.env.rank == 0 else None)
        rank.exit()

    def _profile(self, tasks: Sequence[Task], device_type: DeviceType) -> list[list[Recorded]]:
        """On rank 0 what each rank has recorded."""
        import torch.distributed as dist

        rank, ranks, options = self._rank, self._rank.ranks, self._request.options
        plan = options.resolve(device_type, ranks.size)
        self._mesh = plan.mesh
        if ranks.rank == 0:
            refuse_taken(self._request.folder, "remove it")
            print_status(
                f"{plural(len(tasks), 'case')} to profile on {ranks.size} {device_type} ranks "
                f"({format_mesh(plan.mesh)})"
            )
        with rank.process_group(plan.mesh, options.timeout_s) as (world, barrier):
            for task in tasks:
                self._profile_task(task, world, barrier)
            gathered: list[list[Recorded]] | None = [[]] * ranks.size if ranks.rank == 0 else None
            dist.gather_object(self._recorded, gathered)
        return gathered or []

    def _profile_task(self, task: Task, world: LiveWorld, barrier: Callable[[], None]) -> None:
        now, case, options = self._rank.active_case, task.case, self._request.options
        for impl in task.impls:
            now.begin(task.suite.name, case.name, case.params, task.impls)
            recording = RankRecording(task, impl, self._rank, barrier, options)
            with self._rank.limit(options.timeout_s):
                bad = recording.run(world).get(impl)
            if bad is None:
                self._recorded.append(recording.recorded)
            else:
                self._failed |= bad.status != "skipped"
                if self._place.rank == 0:
                    complain(f"{recording.label}: {bad.status}, {bad.reason} (rank {bad.rank})")
        now.end()

    def _write(self, parts: Sequence[Sequence[Recorded]]) -> int:
        """On rank 0: the folder. The exit code. parts: of each rank the same sections."""
        if not self._recorded:
            complain("nothing could be profiled: no profile was written")
            return EXIT_CASE_FAILED
        sections = enumerate(zip(*parts, strict=True), 1)
        record = RanksProfile(sections=tuple(self._section(number, of) for number, of in sections))
        write_profile(
            self._request.folder,
            section_tables(record.sections),
            record,
            {recorded.trace.source: recorded.file for part in parts for recorded in part},
            "https://ui.perfetto.dev",
        )
        return EXIT_CASE_FAILED if self._failed else EXIT_OK

    def _section(self, number: int, ranks: Sequence[Recorded]) -> RanksSection:
        label = ranks[0].label
        name = re.sub(r"[^A-Za-z0-9_.+=]+", "-", f"{number} {label}")[:_LONGEST_NAME].strip("-") + "-"
        for trace in (one.trace for one in ranks):
            trace.source = f"{name if len(self._recorded) > 1 else ''}rank{trace.rank}.json.gz"
            trace.calls = list(_calls(trace, self._mesh))
        job = build_job([one.trace for one in ranks], label)

        def kept(rows: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(row for row in rows if row.mesh_dim != _BETWEEN)

        return RanksSection(
            job=structs.replace(
                job,
                ranks=tuple(structs.replace(rank, dims=kept(rank.dims)) for rank in job.ranks),
                collectives=kept(job.collectives),
                waits=kept(job.waits),
            ),
            plain_us=max(fmean(rank.plain_us) for rank in ranks),
            profiled_us=max((rank.step_s or 0.0) * 1e6 for rank in job.ranks),
        )


def _calls(trace: RankTrace, mesh: Mesh) -> Iterator[Call]:
    """Those of iterations, and barriers, which bring all ranks' clocks together. A mesh of one dim has the group of all
    ranks, which no trace names so."""
    for call in trace.calls:
        dim = mesh[0][0] if len(mesh) == 1 else call.group.mesh_dim
        dim = _BETWEEN if call.collective == "barrier" else dim
        if dim == _BETWEEN or any(start <= call.start < end for start, end in trace.steps.spans):
            yield call._replace(group=call.group._replace(mesh_dim=dim))


def report_failure(diagnosis: Diagnosis, now: ActiveCase) -> None:
    """The last line of a profile that could not be finished."""
    complain(f"{diagnosis.message_during(now)}: no profile was written")
