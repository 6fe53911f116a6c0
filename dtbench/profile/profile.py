"""`dtbench profile`: from the options to the folder with tables, frames and trace."""

from __future__ import annotations

import os
from collections.abc import Sequence

from dtbench.engine.launch import start_ranks
from dtbench.engine.measure import Subject, measure
from dtbench.engine.options import Task
from dtbench.engine.place import find_place
from dtbench.engine.progress import said_if_slow, say
from dtbench.engine.rank import quiet_torch
from dtbench.engine.ranks import SIMULATED_RANKS
from dtbench.machine.device import choose_device, count_ranks
from dtbench.profile.request import ProfileRequest
from dtbench.records.atomic import refuse_taken
from dtbench.records.profile import Calls
from dtbench.suite.errors import EXIT_CASE_FAILED, EXIT_INTERRUPTED, EXIT_OK, complain
from dtbench.text.units import plural


def profile(request: ProfileRequest, argv: Sequence[str]) -> int:
    """Does what the request says; the exit code. argv: what ranks are started with again."""
    # Before torch loads: kineto tells stderr of every start and stop otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    quiet_torch()
    place = find_place()
    if place is not None:
        from dtbench.profile.ranks import RankProfile

        RankProfile(request, place).go()
    with said_if_slow("loading torch and the suite"):
        device_type = choose_device(request.options.device)
        nproc = count_ranks(request.options.ranks, device_type, request.options.backend)
        tasks = request.tasks(device_type, nproc)
    refuse_taken(request.folder, "remove it")
    if tasks[0].suite.world == "simulated":
        return _profile_calls(request, tasks, device_type)
    from dtbench.profile.ranks import report_failure

    note = start_ranks(argv, nproc, 0, request.folder, report_failure)
    return EXIT_INTERRUPTED if note.code is None else note.code


def _profile_calls(request: ProfileRequest, tasks: Sequence[Task], device_type: str) -> int:
    """Cases of simulated ranks, in this process."""
    from dtbench.engine.ranks import device_of, simulated_world
    from dtbench.profile import calls
    from dtbench.profile.speedscope import speedscope
    from dtbench.profile.text import SPEEDSCOPE, stage_tables, write_profile

    say(
        f"{plural(len(tasks), 'case')} to profile on {SIMULATED_RANKS} simulated ranks, into {request.folder}"
    )
    tables, folded, failed = [], {}, False
    with simulated_world(device_of(device_type, 0)) as world:
        for task in tasks:
            floor_ns = None
            impls = sorted(set(task.impls) - {calls.WRAPPED}, key=lambda impl: (impl != calls.FLOOR, impl))
            for impl in impls:
                subject = Subject(task.case, impl)
                recording = calls.CallRecording(task.label, subject, request.options.quick, floor_ns)
                measure([subject], world, recording)
                floor_ns = recording.floor_ns
                if subject.bad is None:
                    tables += recording.tables
                    folded |= recording.folded
                    continue
                skipped = subject.bad[0] == "skipped"
                failed |= not skipped
                (say if skipped else complain)(f"{task.label} ({impl}): {', '.join(subject.bad)}")
    if not tables:
        complain("nothing could be profiled: no profile was written")
        return EXIT_CASE_FAILED
    files = {SPEEDSCOPE: speedscope(folded, request.folder.name)}
    write_profile(request.folder, stage_tables(tables), Calls(cases=tuple(tables)), files)
    return EXIT_CASE_FAILED if failed else EXIT_OK
