"""Profiling cases of real ranks: this rank's part. Every rank records; rank 0 merges and writes."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

from dtbench.bench.options import Task
from dtbench.bench.progress import say
from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, DtbenchError, UsageError, complain
from dtbench.mesh import Mesh, format_mesh, groups_in
from dtbench.profile import clocks, sections, trace
from dtbench.profile.folder import as_json, check_folder, write_folder
from dtbench.profile.recording import RankRecording
from dtbench.profile.request import DATA_NAME, TABLE_NAME, TRACE_NAME, Request
from dtbench.world.failure import Diagnosis, Now
from dtbench.world.rank import Rank
from dtbench.world.ranks import Place, StoreRanks

# The store takes values of any size, but one message at a time.
_CHUNK_BYTES = 2**20
_GATHER_TIMEOUT = timedelta(minutes=5)


class RankProfile:
    """This rank's part in a profile. `go` never returns."""

    def __init__(self, request: Request, place: Place) -> None:
        self._request = request
        self._place = place
        self._rank = Rank(place, self._report)
        self._now = self._rank.now
        self._events: list[dict[str, Any]] = []
        self._uncertainty_us = 0.0
        self._plain_us: dict[str, list[float]] = {}
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
            rank.join(device_type)
            self._profile(tasks, device_type)
        rank.exit()

    def _profile(self, tasks: Sequence[Task], device_type: str) -> None:
        rank, ranks = self._rank, self._rank.ranks
        self._epoch_ns = int(ranks.agree(time.time_ns(), lambda votes: votes[0]))
        host_clock = self._host_clock(rank.store, [info["boot_id"] for info in rank.infos])
        plan = self._request.options.plan("cuda" if device_type == "cuda" else "cpu", ranks.size)
        if ranks.rank == 0:
            check_folder(self._request.folder)
            count = f"{len(tasks)} case{'s' if len(tasks) > 1 else ''}"
            say(f"{count} to profile on {ranks.size} {device_type} ranks ({format_mesh(plan.mesh)})")
        timeout_s = self._request.options.timeout_s
        with _sampler(rank.device) as sampler, rank.process_group(plan.mesh, timeout_s) as (world, barrier):
            for task in tasks:
                self._profile_task(task, world, ranks, barrier, plan.mesh)
        rank.code = self._gather(rank.store, ranks, rank.infos, host_clock, sampler)

    # ---- one case ----

    def _profile_task(
        self, task: Task, world: Any, ranks: StoreRanks, barrier: Callable[[], None], mesh: Mesh
    ) -> None:
        now, case = self._now, task.case
        now.suite, now.name, now.params, now.impls = task.suite.name, case.name, case.params, task.impls
        for impl in task.impls:
            now.case = now.case + 1
            section = f"{task.label} ({impl})"
            recording = RankRecording(section, case, impl, ranks, now, barrier, self._epoch_ns, self._request)
            with self._rank.limit(self._request.options.timeout_s):
                bad = recording.run(world).get(impl)
            if bad is None:
                self._groups[section] = groups_in(mesh, case.params.get("mesh_dim"))
                self._plain_us[section] = recording.plain_us
                self._events += recording.events
                self._uncertainty_us = max(self._uncertainty_us, recording.uncertainty_us)
                continue
            self._failed |= bad.status != "skipped"
            if self._place.rank == 0:
                complain(f"{section}: {bad.status}, {bad.reason} (rank {bad.rank})")
        now.suite = ""

    # ---- all ranks' traces ----

    def _host_clock(self, store: Any, boot_ids: Sequence[str | None]) -> clocks.Offset:
        """From this rank's host clock to rank 0's; ranks of other hosts ask in turn."""
        mine = self._place.rank
        for rank, boot_id in enumerate(boot_ids):
            if rank == 0 or (boot_id is not None and boot_id == boot_ids[0]):
                continue
            if mine == 0:
                clocks.answer(store, rank)
            elif mine == rank:
                return clocks.ask(store, rank)
        return clocks.SAME_CLOCK

    def _gather(
        self,
        store: Any,
        ranks: StoreRanks,
        infos: Sequence[Mapping[str, Any]],
        host_clock: clocks.Offset,
        sampler: Any,
    ) -> int:
        """Hands this rank's trace to rank 0, which writes the folder. The exit code."""
        counters = {} if sampler is None else self._counters(sampler, host_clock)
        mine = {
            "events": self._events,
            "shift_us": host_clock.ns / 1e3,
            "uncertainty_us": self._uncertainty_us + host_clock.uncertainty_ns / 1e3,
            "counters": counters,
            "plain_us": self._plain_us,
            "reasons": sorted(sampler.reasons) if sampler is not None else [],
        }
        if ranks.rank != 0:
            send(store, f"trace/{ranks.rank}", mine)
            return int(ranks.agree(None, lambda votes: None))
        gathered = [mine, *(receive(store, f"trace/{rank}") for rank in range(1, ranks.size))]
        try:
            code = self._write(gathered, infos)
        except DtbenchError as error:
            complain(str(error))
            code = error.exit_code
        self._rank.note(code=code, reported=True, whole=True)
        return int(ranks.agree(None, lambda votes: code))

    def _counters(self, sampler: Any, host_clock: clocks.Offset) -> Mapping[str, Any]:
        from dtbench.profile.gpu import counters_of

        shift_us = (host_clock.ns - self._epoch_ns) / 1e3
        return {
            name: [(at + shift_us, value) for at, value in samples]
            for name, samples in counters_of(sampler.samples).items()
        }

    def _write(self, gathered: Sequence[Mapping[str, Any]], infos: Sequence[Mapping[str, Any]]) -> int:
        from dtbench.profile.text import section_tables

        traces = [
            trace.RankTrace(
                rank=rank,
                host=info["host"],
                device=info["device"],
                events=given["events"],
                shift_us=given["shift_us"],
                uncertainty_us=given["uncertainty_us"],
                counters=given["counters"],
            )
            for rank, (given, info) in enumerate(zip(gathered, infos, strict=True))
        ]
        # Of each iteration the slowest rank's time.
        plain = {
            section: [
                max(turn) for turn in zip(*(given["plain_us"][section] for given in gathered), strict=True)
            ]
            for section in gathered[0]["plain_us"]
        }
        if not plain:
            complain("nothing could be profiled: no profile was written")
            return EXIT_CASE_FAILED
        found = sections.sections_of(traces, self._groups, plain)
        lines = section_tables(found, {t.rank: t.uncertainty_us for t in traces})
        throttled = {rank: given["reasons"] for rank, given in enumerate(gathered) if given["reasons"]}
        lines += [f"rank {rank} was throttled: {', '.join(reasons)}" for rank, reasons in throttled.items()]
        for line in lines:
            say(line)
        data = {
            "kind": "profile of ranks",
            "sections": [s.to_json() for s in found],
            "clock_us": {t.rank: t.uncertainty_us for t in traces},
            "throttled": throttled,
        }
        files = {
            TABLE_NAME: "\n".join(lines) + "\n",
            DATA_NAME: as_json(data),
            TRACE_NAME: as_json(trace.merge(traces, {"made by": "dtbench profile"})),
        }
        folder = self._request.folder
        write_folder(folder, files)
        say(f"{folder}: {', '.join(files)}; open the trace at https://ui.perfetto.dev or chrome://tracing")
        return EXIT_CASE_FAILED if self._failed else EXIT_OK

    def _report(self, diagnosis: Diagnosis) -> None:
        report_failure(diagnosis, self._now)


# --------------------------------------------------------------------------------- helpers


def report_failure(diagnosis: Diagnosis, now: Now) -> None:
    """The last line of a profile that came to nothing."""
    where = f" during {now.label}" if now.suite and diagnosis.blames_case else ""
    complain(f"{diagnosis.sentence}{where}: no profile was written")


def send(store: Any, key: str, value: Any) -> None:
    """Puts JSON data into the store, compressed and in pieces."""
    data = gzip.compress(as_json(value).encode(), compresslevel=3)
    pieces = [data[i : i + _CHUNK_BYTES] for i in range(0, len(data), _CHUNK_BYTES)]
    for number, piece in enumerate(pieces):
        store.set(f"{key}/{number}", piece)
    store.set(f"{key}/count", str(len(pieces)))


def receive(store: Any, key: str) -> Any:
    """What another rank has sent, or will."""
    store.wait([f"{key}/count"], _GATHER_TIMEOUT)
    count = int(store.get(f"{key}/count"))
    data = b"".join(bytes(store.get(f"{key}/{number}")) for number in range(count))
    for number in range(count):
        store.delete_key(f"{key}/{number}")
    return json.loads(gzip.decompress(data))


@contextlib.contextmanager
def _sampler(device: Any) -> Iterator[Any]:
    """NVML's readings of the device meanwhile; None without a GPU."""
    if device.type == "cpu":
        yield None
        return
    from dtbench.profile.gpu import Sampler

    with Sampler(device.index) as sampler:
        yield sampler
