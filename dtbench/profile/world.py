"""Profiling cases of real ranks: this rank's part. Every rank records; rank 0 merges and writes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from dtbench.engine import clocks
from dtbench.engine.failure import ActiveCase, Diagnosis
from dtbench.engine.options import Task
from dtbench.engine.place import RankPlace
from dtbench.engine.progress import say
from dtbench.engine.rank import LaunchedRank
from dtbench.engine.ranks import LiveWorld, backend_of
from dtbench.machine.device import is_gpu
from dtbench.profile import sections, trace
from dtbench.profile.gpu import Sampler, counters_of
from dtbench.profile.recording import RankRecording
from dtbench.profile.request import Request
from dtbench.profile.text import section_tables, write_and_tell
from dtbench.records.atomic import refuse_taken
from dtbench.records.profile import Ranks
from dtbench.suite import DeviceType
from dtbench.suite.errors import EXIT_CASE_FAILED, EXIT_OK, UsageError, complain
from dtbench.suite.mesh import Mesh, format_mesh, groups_in
from dtbench.text.units import plural


class _Part(NamedTuple):
    """What a rank hands over. plain_us: section -> of each iteration without the profiler; reasons: why its GPU
    was throttled."""

    trace: trace.RankTrace
    plain_us: dict[str, list[float]]
    reasons: list[str]


class RankProfile:
    """This rank's part in a profile. `go` never returns."""

    def __init__(self, request: Request, place: RankPlace) -> None:
        self._request = request
        self._place = place
        self._rank = LaunchedRank(place, report_failure)
        self._recordings: list[RankRecording] = []
        self._groups: dict[str, list[list[int]]] = {}
        self._failed = False

    def go(self) -> NoReturn:
        """Profiles and exits."""
        with self._rank as rank:
            device_type = self._request.device_type()
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

        rank, ranks, request = self._rank, self._rank.ranks, self._request
        self._epoch_ns = int(ranks.agree(time.time_ns(), lambda votes: votes[0]))
        host_clock = rank.clock_offset(time.time_ns)
        plan = request.options.resolve(device_type, ranks.size)
        if ranks.rank == 0:
            refuse_taken(request.folder, "remove it")
            where = f"{ranks.size} {device_type} ranks ({format_mesh(plan.mesh)})"
            say(f"{plural(len(tasks), 'case')} to profile on {where}")
        # NVML's readings of the device meanwhile.
        sampler = Sampler(rank.device.index or 0) if is_gpu(rank.device) else None
        with rank.process_group(plan.mesh, request.options.timeout_s) as (world, barrier):
            with sampler or contextlib.nullcontext():
                for task in tasks:
                    self._profile_task(task, world, barrier, plan.mesh)
            gathered: list[_Part | None] | None = [None] * ranks.size if ranks.rank == 0 else None
            dist.gather_object(self._part(host_clock, sampler), gathered)
        return [part for part in gathered or [] if part is not None]

    def _profile_task(self, task: Task, world: LiveWorld, barrier: Callable[[], None], mesh: Mesh) -> None:
        now, case, request = self._rank.now, task.case, self._request
        for impl in task.impls:
            now.begin(task.suite.name, case.name, case.params, task.impls)
            recording = RankRecording(task, impl, self._rank.ranks, now, barrier, self._epoch_ns, request)
            with self._rank.limit(request.options.timeout_s):
                bad = recording.run(world).get(impl)
            if bad is None:
                self._groups[recording.section] = groups_in(mesh, case.params.get("mesh_dim"))
                self._recordings.append(recording)
                continue
            self._failed |= bad.status != "skipped"
            if self._place.rank == 0:
                complain(f"{recording.section}: {bad.status}, {bad.reason} (rank {bad.rank})")
        now.end()

    def _part(self, host_clock: clocks.Offset, sampler: Sampler | None) -> _Part:
        recordings, info = self._recordings, self._rank.infos[self._place.rank]
        shift_us = (host_clock.ns - self._epoch_ns) / 1e3
        read = {} if sampler is None else counters_of(sampler.samples)
        of_mine = trace.RankTrace(
            rank=self._place.rank,
            host=info["host"],
            device=info["device"],
            events=[event for recording in recordings for event in recording.events],
            shift_us=host_clock.ns / 1e3,
            uncertainty_us=host_clock.uncertainty_ns / 1e3
            + max((recording.uncertainty_us for recording in recordings), default=0.0),
            counters={name: [(at + shift_us, value) for at, value in of] for name, of in read.items()},
        )
        plain_us = {recording.section: recording.plain_us for recording in recordings}
        return _Part(of_mine, plain_us, [] if sampler is None else sorted(sampler.reasons))

    def _write(self, parts: Sequence[_Part]) -> int:
        """On rank 0: the folder. The exit code."""
        if not self._groups:
            complain("nothing could be profiled: no profile was written")
            return EXIT_CASE_FAILED
        traces = [part.trace for part in parts]
        # Of each iteration the slowest rank's time.
        plain = {
            section: [max(turn) for turn in zip(*(part.plain_us[section] for part in parts), strict=True)]
            for section in self._groups
        }
        record = Ranks(
            sections=tuple(sections.sections_of(traces, self._groups, plain)),
            clock_us={str(t.rank): t.uncertainty_us for t in traces},
            throttled={str(part.trace.rank): tuple(part.reasons) for part in parts if part.reasons},
        )
        merged = trace.merge(traces, {"made by": "dtbench profile"})
        write_and_tell(self._request.folder, section_tables(record), record, merged)
        return EXIT_CASE_FAILED if self._failed else EXIT_OK


def report_failure(diagnosis: Diagnosis, now: ActiveCase) -> None:
    """The last line of a profile that came to nothing."""
    complain(f"{diagnosis.during(now)}: no profile was written")
