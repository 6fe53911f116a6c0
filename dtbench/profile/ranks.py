"""Profiles cases on real ranks. Each rank records and reads its own traces; rank 0 combines them."""

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
from dtbench.engine.rank_votes import LiveWorld
from dtbench.engine.sampling import CollectiveSchedule
from dtbench.engine.tasks import Task
from dtbench.engine.workers import scratch
from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, UsageError, print_error
from dtbench.machine.backends import resolve_backend
from dtbench.machine.device import choose_device, gpus
from dtbench.profile.output import section_tables, write_profile
from dtbench.profile.request import ProfileRequest
from dtbench.records.atomic import check_output_path
from dtbench.records.profile import RanksProfile, RanksSection
from dtbench.suite import DeviceType
from dtbench.suite.mesh import Mesh, format_mesh
from dtbench.text.units import plural
from dtbench.traces.communication import Call
from dtbench.traces.job import build_job
from dtbench.traces.rank_trace import RankTrace, read_rank

# Recorded iterations of an impl: as many as fit into ITERATIONS_S, within these limits.
MIN_ITERATIONS, MAX_ITERATIONS, ITERATIONS_S = 3, 10, 0.2
WARMUP_CALLS = 3
# Label used as the mesh dim of the barriers between iterations, to remove them from the tables.
_BARRIERS = "between iterations"
_MAX_FILE_NAME = 200  # characters, without the rank


@dataclass(frozen=True)
class Recorded:
    """One impl of a case, recorded on one rank.

    Attributes:
        label: name of case and impl.
        plain_us: time of each iteration without torch's profiler, microseconds.
        trace: the trace of this rank.
        file: content of the trace's file.
    """

    label: str
    plain_us: list[float]
    trace: RankTrace
    file: bytes


class RankRecording(CollectiveSchedule):
    """Runs iterations of one impl without torch's profiler, then with it, to measure the profiler's overhead.

    Attributes:
        recorded: the result; unset until `sample` has succeeded.
    """

    recorded: Recorded

    def __init__(
        self, task: Task, impl: str, rank: LaunchedRank, barrier: Callable[[], None], options: RunRequest
    ) -> None:
        super().__init__(task.case, [impl], rank.ranks, rank.active_case)
        self.label = f"{task.label} ({impl})"
        self._impl, self._rank, self._barrier = self.live[impl], rank.ranks.rank, barrier
        self._max_iterations = MIN_ITERATIONS if options.quick else MAX_ITERATIONS
        self._on_gpu = choose_device(options.device) == "cuda"

    def warm_up(self) -> None:
        self._agree_on_failures()
        self._impl.attempt(lambda: self._impl.call(WARMUP_CALLS))

    def sample(self) -> None:
        self._agree_on_failures()
        count = self.vote(self._impl.attempt(self._iteration_s), self._decide_iterations)
        self._impl.attempt(lambda: self._record(count))
        self._agree_on_failures()

    def _agree_on_failures(self) -> None:
        self.vote(None, lambda _votes: None)

    finish = _agree_on_failures

    def _decide_iterations(self, votes: list[float | None]) -> int:
        slowest_s = max(iteration_s for iteration_s in votes if iteration_s is not None)
        return int(min(max(ITERATIONS_S / max(slowest_s, 1e-6), MIN_ITERATIONS), self._max_iterations))

    def _get_ready(self) -> None:
        self._impl.prepare()
        self._barrier()

    def _iterate(self) -> None:
        self._impl.workload.run()
        if self._on_gpu:
            gpus().synchronize()

    def _iteration_s(self) -> float:
        self._get_ready()
        return HostClock().measure(self._iterate, 1)

    def _record(self, count: int) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        from dtbench.traces.hook.dtbench_recorder import about

        plain_us = [self._iteration_s() * 1e6 for _ in range(count)]
        with profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            record_shapes=True,
        ) as profiler:
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
    """Records this rank's part of a profile."""

    def __init__(self, request: ProfileRequest, place: RankEnv, report_path: str = "") -> None:
        self._request, self._place = request, place
        self._rank = LaunchedRank(place, report_failure, report_path=report_path)
        self._recorded: list[Recorded] = []
        self._failed = False

    def run_and_exit(self) -> NoReturn:
        """Profiles all cases, writes the folder on rank 0 and exits."""
        with self._rank as rank:
            device_type = choose_device(self._request.options.device)
            tasks = self._request.tasks(self._place.world_size)
            if tasks[0].world != "ranks":
                raise UsageError(
                    f"{tasks[0].suite.name} needs no ranks, but a launcher has started some: profile it without a "
                    "launcher"
                )
            rank.join(device_type, resolve_backend(device_type, self._request.options.backend))
            parts = self._profile(tasks, device_type)
            rank.conclude(self._write(parts) if rank.env.rank == 0 else None)
        rank.exit()

    def _profile(self, tasks: Sequence[Task], device_type: DeviceType) -> list[list[Recorded]]:
        """Profiles the cases. On rank 0, returns the recordings of all ranks; on other ranks, returns nothing."""
        import torch.distributed as dist

        rank, ranks, options = self._rank, self._rank.ranks, self._request.options
        self._mesh = options.resolve(device_type, ranks.size).mesh
        if ranks.rank == 0:
            check_output_path(self._request.folder, "remove it")
            print_status(
                f"{plural(len(tasks), 'case')} to profile on {ranks.size} {device_type} ranks "
                f"({format_mesh(self._mesh)})"
            )
        with rank.process_group(self._mesh, options.timeout_s) as (world, barrier):
            for task in tasks:
                self._profile_task(task, world, barrier)
            gathered: list[list[Recorded]] | None = [[]] * ranks.size if ranks.rank == 0 else None
            dist.gather_object(self._recorded, gathered)
        return gathered or []

    def _profile_task(self, task: Task, world: LiveWorld, barrier: Callable[[], None]) -> None:
        active_case, case, options = self._rank.active_case, task.case, self._request.options
        for impl in task.impls:
            active_case.begin(task.suite.name, case.name, case.params, task.impls)
            recording = RankRecording(task, impl, self._rank, barrier, options)
            with self._rank.limit(options.timeout_s):
                failure = recording.run(world).get(impl)
            if failure is None:
                self._recorded.append(recording.recorded)
            else:
                self._failed |= failure.status != "skipped"
                if self._place.rank == 0:
                    print_error(
                        f"{recording.label}: {failure.status}, {failure.reason} (rank {failure.rank})"
                    )
        active_case.end()

    def _write(self, parts: Sequence[Sequence[Recorded]]) -> int:
        """Writes the folder and returns the exit code.

        Args:
            parts: the recordings of each rank. All ranks recorded the same cases and impls in the same order.
        """
        if not self._recorded:
            print_error("nothing could be profiled: no profile was written")
            return EXIT_CASE_FAILED
        record = RanksProfile(
            sections=tuple(
                self._section(number, recordings)
                for number, recordings in enumerate(zip(*parts, strict=True), 1)
            )
        )
        write_profile(
            self._request.folder,
            section_tables(record.sections),
            record,
            {recorded.trace.source: recorded.file for part in parts for recorded in part},
            "https://ui.perfetto.dev",
        )
        return EXIT_CASE_FAILED if self._failed else EXIT_OK

    def _section(self, number: int, recordings: Sequence[Recorded]) -> RanksSection:
        """Combines the recordings of one impl on all ranks."""
        label = recordings[0].label
        name = re.sub(r"[^A-Za-z0-9_.+=]+", "-", f"{number} {label}")[:_MAX_FILE_NAME].strip("-") + "-"
        for trace in (recorded.trace for recorded in recordings):
            trace.source = f"{name if len(self._recorded) > 1 else ''}rank{trace.rank}.json.gz"
            trace.calls = list(_select_calls(trace, self._mesh))
        job = build_job([recorded.trace for recorded in recordings], label)

        def without_barriers(rows: Iterable[Any]) -> tuple[Any, ...]:
            return tuple(row for row in rows if row.mesh_dim != _BARRIERS)

        return RanksSection(
            job=structs.replace(
                job,
                ranks=tuple(structs.replace(rank, dims=without_barriers(rank.dims)) for rank in job.ranks),
                collectives=without_barriers(job.collectives),
                waits=without_barriers(job.waits),
            ),
            plain_us=max(fmean(recorded.plain_us) for recorded in recordings),
            profiled_us=max((rank.step_s or 0.0) * 1e6 for rank in job.ranks),
        )


def _select_calls(trace: RankTrace, mesh: Mesh) -> Iterator[Call]:
    """Yields the calls of iterations, and the barriers between iterations, which are used to align the clocks.

    If a mesh has only one dim, that dim uses the default group, whose name in a trace is not the dim's.
    """
    for call in trace.calls:
        dim = mesh[0][0] if len(mesh) == 1 else call.group.mesh_dim
        dim = _BARRIERS if call.collective == "barrier" else dim
        if dim == _BARRIERS or any(start <= call.start < end for start, end in trace.steps.spans):
            yield call._replace(group=call.group._replace(mesh_dim=dim))


def report_failure(diagnosis: Diagnosis, active_case: ActiveCase) -> None:
    """Prints why the ranks could not finish the profile."""
    print_error(f"{diagnosis.message_during(active_case)}: no profile was written")
