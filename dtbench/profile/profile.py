"""`dtbench profile`: from the options to the folder with tables, flame graph and trace."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dtbench.engine.launch import start_ranks
from dtbench.engine.measure import Subject, measure
from dtbench.engine.options import Task
from dtbench.engine.place import find_place
from dtbench.engine.progress import said_if_slow, say
from dtbench.engine.rank import quiet_torch
from dtbench.engine.ranks import SIMULATED_RANKS
from dtbench.machine.device import count_ranks
from dtbench.profile.request import FLAME_NAME, Request
from dtbench.records.atomic import refuse_taken
from dtbench.records.profile import Calls
from dtbench.suite.errors import EXIT_CASE_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError, complain
from dtbench.text.units import plural

if TYPE_CHECKING:
    from dtbench.profile.calls import Profiled


def quiet_profiler() -> None:
    """Before torch loads: kineto tells stderr of every start and stop otherwise."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    quiet_torch()


def profile(request: Request, argv: Sequence[str]) -> int:
    """Does what the request says; the exit code. argv: what ranks are started with again."""
    quiet_profiler()
    place = find_place()
    if place is not None:
        from dtbench.profile.world import RankProfile

        RankProfile(request, place).go()
    with said_if_slow("loading torch and the suite"):
        device_type = request.device_type()
        nproc = count_ranks(request.options.ranks, device_type, request.options.backend)
        tasks = request.tasks(device_type, nproc)
    refuse_taken(request.folder, "remove it")
    if tasks[0].suite.world == "simulated":
        if request.nvtx:
            raise UsageError("--nvtx marks iterations of ranks, and these cases start none: leave --nvtx out")
        return _profile_calls(request, tasks, device_type)
    from dtbench.profile.world import report_failure

    note = start_ranks(argv, nproc, 0, request.folder, report_failure)
    return EXIT_INTERRUPTED if note.code is None else note.code


def _profile_calls(request: Request, tasks: Sequence[Task], device_type: str) -> int:
    """Cases of simulated ranks, in this process."""
    from dtbench.engine.ranks import device_of, simulated_world
    from dtbench.profile import calls

    say(
        f"{plural(len(tasks), 'case')} to profile on {SIMULATED_RANKS} simulated ranks, into {request.folder}"
    )
    profiled, effort = calls.Profiled(), calls.QUICK if request.options.quick else calls.FULL
    failed = False
    with simulated_world(device_of(device_type, 0)) as world:
        for task in tasks:
            floor_ns = None
            for impl in sorted(
                set(task.impls) - {calls.WRAPPED}, key=lambda name: (name != calls.FLOOR, name)
            ):
                subject = Subject(task.case, impl)
                recording = calls.Recording(task.label, subject, effort, profiled, floor_ns)
                measure([subject], world, recording)
                floor_ns = recording.floor_ns
                if subject.bad is not None:
                    failed |= subject.bad[0] != "skipped"
                    tell = say if subject.bad[0] == "skipped" else complain
                    tell(f"{task.label} ({impl}): {', '.join(subject.bad)}")
    if not profiled.calls:
        complain("nothing could be profiled: no profile was written")
        return EXIT_CASE_FAILED
    _write_calls(request, profiled)
    return EXIT_CASE_FAILED if failed else EXIT_OK


def _write_calls(request: Request, profiled: Profiled) -> None:
    from dtbench.profile import flame, trace
    from dtbench.profile.frames import short_name
    from dtbench.profile.text import stage_tables, write_and_tell

    lines = stage_tables(profiled.calls)
    target = f"{request.options.suites[0]}/{request.case}".rstrip("/")
    record = Calls(cases=tuple(profiled.calls))
    drawn = flame.draw(profiled.graphs, f"Where the time of {target} goes")
    write_and_tell(
        request.folder, lines, record, trace.of_calls(profiled.traced, short_name), {FLAME_NAME: drawn}
    )
