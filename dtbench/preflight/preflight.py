"""Starting ranks, or joining those that a launcher started; rank 0 leads the examination and says what it found."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dtbench.bench.options import RunOptions
from dtbench.bench.run import count_ranks
from dtbench.bench.session import choose_device
from dtbench.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_REGRESSION,
    DtbenchError,
    UsageError,
    complain,
)
from dtbench.files.atomic import refuse_taken
from dtbench.files.preflight import DimRow, FindingRow, LinkRow, PreflightFile
from dtbench.mesh import Mesh
from dtbench.preflight.examine import LEVEL, NAMED, Answers, Command, Examination, World, examine
from dtbench.preflight.expected import Expected, compare_with, read_expected
from dtbench.preflight.show import write_all
from dtbench.world.failure import Diagnosis, Now
from dtbench.world.launch import start_ranks
from dtbench.world.rank import Rank, quiet_torch
from dtbench.world.ranks import Place, backend_of, find_place

DEFAULT_TIMEOUT_S = 60.0
# Where a pool of measurements is to be written instead, for the self-test; how often each is repeated.
POOL, POOL_REPS = "DTBENCH_PREFLIGHT_POOL", "DTBENCH_PREFLIGHT_POOL_REPS"


@dataclass(frozen=True)
class Request:
    """What is asked for. outputs: files, by their endings a page, JSON or JUnit."""

    options: RunOptions
    outputs: tuple[Path, ...] = ()
    expect: Path | None = None
    as_json: bool = False
    argv: Sequence[str] = field(default=(), repr=False)


def preflight(request: Request) -> int:
    """Examines the world, or starts one here; the exit code: 1 where something is named.

    Raises:
        UsageError: a world of one rank, or options that cannot be followed.
    """
    quiet_torch()
    expected = None if request.expect is None else read_expected(request.expect)
    place = find_place()
    if place is not None:
        _Lead(request, place, expected).go()
    device_type = choose_device(request.options)
    nproc = count_ranks(request.options, device_type)
    request.options.plan("cuda" if device_type == "cuda" else "cpu", nproc)
    _refuse_one(nproc)
    for path in request.outputs:
        refuse_taken(path)
    note = start_ranks(request.argv, nproc, 0, Path(), _report)
    return EXIT_INTERRUPTED if note.code is None else note.code


def _refuse_one(ranks: int) -> None:
    if ranks < 2:
        raise UsageError(
            "a preflight compares ranks with each other, and a world of one has none to compare: start 2 or more"
        )


def _report(diagnosis: Diagnosis, now: Now) -> None:
    where = f" during {now.name}" if now.name else ""
    complain(f"preflight: {diagnosis.sentence}{where}: no verdict")


class _Lead:
    """This rank's part. `go` never returns."""

    def __init__(self, request: Request, place: Place, expected: Expected | None) -> None:
        self._request = request
        self._expected = expected
        self._rank = Rank(place, lambda diagnosis: _report(diagnosis, self._rank.now))

    def go(self) -> NoReturn:
        with self._rank as rank:
            _refuse_one(rank.place.world_size)
            options = self._request.options
            device_type = choose_device(options)
            plan = options.plan("cuda" if device_type == "cuda" else "cpu", rank.place.world_size)
            rank.join(device_type, backend_of(device_type))
            rank.now.suite, rank.now.name = "preflight", "the first round"
            began = time.monotonic()
            with rank.limit(options.timeout_s):
                found = self._examine(plan.mesh, options.timeout_s)
            code = self._end(found, time.monotonic() - began) if rank.place.rank == 0 else None
            rank.code = int(rank.ranks.agree(code, lambda votes: votes[0]))
        rank.exit()

    def _examine(self, mesh: Mesh, timeout_s: float) -> Examination | None:
        """On rank 0 what was found."""
        from dtbench.preflight.part import Part

        rank, ranks = self._rank, self._rank.ranks
        ended: list[Examination] = []
        talk = _talk(World(names_of(rank.infos), mesh))

        def next_command(votes: list[Any]) -> Command | None:
            try:
                return talk.send(None if votes[0] is None else votes)  # type: ignore[arg-type]
            except StopIteration as end:
                ended.append(end.value)
                return None

        with rank.process_group(mesh, timeout_s) as (world, barrier):
            part = Part(world, barrier)
            answer: Any = None
            while (command := ranks.agree(answer, next_command)) is not None:
                rank.now.name = str(command.get("kind") or command.get("dim") or command["do"])
                rank.now.step += 1
                answer = part.do(command)
        return ended[0] if ended else None

    def _end(self, found: Examination | None, seconds: float) -> int:
        assert found is not None
        if POOL in os.environ:
            return EXIT_OK
        code = EXIT_OK
        try:
            device_type = str(self._rank.device).partition(":")[0]
            if self._expected is not None:
                compare_with(self._expected, found, device_type)
            file = file_of(found, seconds, device_type)
            write_all(file, self._request.outputs, self._request.as_json)
            code = EXIT_REGRESSION if file.findings else EXIT_OK
        except DtbenchError as error:
            complain(str(error))
            code = error.exit_code
        self._rank.note(code=code, reported=True, whole=True)
        return code


def _talk(world: World) -> Generator[Command, Answers, Examination]:
    if POOL not in os.environ:
        return examine(world)
    from dtbench.preflight.selftest import gather_pool

    return gather_pool(world, Path(os.environ[POOL]), int(os.environ[POOL_REPS]))


def file_of(found: Examination, seconds: float, device: str) -> PreflightFile:
    """An examination as its file holds it."""
    return PreflightFile(
        time=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        seconds=seconds,
        device=device,
        hosts=found.world.hosts,
        mesh=found.world.mesh,
        links=tuple(
            LinkRow(kind=kind, ranks=pair, rate=of.rate(pair), lost=of.lost(pair))
            for kind, of in found.pairs.items()
            for pair in sorted(of.exchanges)
        ),
        dims=tuple(
            DimRow(
                dim=dim,
                groups=tuple(map(tuple, of.groups)),
                size_bytes=of.size_bytes,
                times_s=tuple(of.times_s),
                alone_s=of.alone_s,
            )
            for dim, of in found.dims.items()
        ),
        work_s={kind: tuple(times) for kind, times in found.work_s.items()},
        findings=tuple(FindingRow(**vars(one)) for one in found.findings),
        notes=tuple(found.notes),
        named=NAMED,
        level=LEVEL,
    )


def names_of(infos: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """By rank the name of its host; hosts of one name are told apart by their kernels."""
    keys = [(info["host"], info["boot_id"]) for info in infos]
    known: dict[str, list[Any]] = {}
    for name, kernel in keys:
        if kernel not in known.setdefault(name, []):
            known[name].append(kernel)
    return tuple(
        name if len(known[name]) == 1 else f"{name}#{known[name].index(kernel)}" for name, kernel in keys
    )
