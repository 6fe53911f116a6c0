"""Profiles cases of a suite. Simulated ranks run in this process; each real rank has its own process."""

import contextlib
import os
from collections.abc import Mapping, Sequence

import msgspec

from dtbench.engine.launch import start_ranks
from dtbench.engine.launch_files import LaunchSpec
from dtbench.engine.measure import Subject, measure
from dtbench.engine.progress import print_status, print_status_if_slow
from dtbench.engine.rank import silence_torch
from dtbench.engine.rank_env import find_rank_env
from dtbench.engine.tasks import Task
from dtbench.errors import EXIT_CASE_FAILED, EXIT_INTERRUPTED, EXIT_OK, print_error
from dtbench.machine.device import choose_device, count_ranks
from dtbench.profile.output import SPEEDSCOPE, speedscope, stage_tables, write_profile
from dtbench.profile.ranks import RankProfile, report_failure
from dtbench.profile.request import ProfileRequest
from dtbench.records.atomic import check_output_path
from dtbench.records.profile import CallsProfile, CallStages
from dtbench.suite.case import FLOOR, DeviceType
from dtbench.text.units import plural


def profile(request: ProfileRequest) -> int:
    """Profiles the cases, writes the folder and returns the exit code.

    Does not return in a process that a launcher started as a rank.
    """
    # Must be set before torch is loaded. Otherwise, Kineto writes to stderr at each start and stop.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    silence_torch()
    if (place := find_rank_env()) is not None:
        RankProfile(request, place).run_and_exit()
    with print_status_if_slow("loading torch and the suite"):
        device_type = choose_device(request.options.device)
        nproc = count_ranks(request.options.ranks, device_type, request.options.backend)
        tasks = request.tasks(nproc)
    check_output_path(request.folder, "remove it")
    if tasks[0].world == "simulated":
        return _profile_calls(request, tasks, device_type)
    report = start_ranks(LaunchSpec(command="profile", request=request), nproc)
    if report.diagnosis is not None:
        report_failure(report.diagnosis, report.case)
    return EXIT_INTERRUPTED if report.exit_code is None else report.exit_code


def _profile_calls(request: ProfileRequest, tasks: Sequence[Task], device_type: DeviceType) -> int:
    """Profiles cases of simulated ranks and returns the exit code."""
    import torch

    from dtbench.engine.rank_votes import select_device, simulated_world
    from dtbench.profile import calls

    print_status(
        f"{plural(len(tasks), 'case')} to profile on simulated ranks, on one thread, into {request.folder}"
    )
    tables: list[CallStages] = []
    folded: dict[str, Mapping[tuple[str, ...], float]] = {}
    failed = False
    with simulated_world(select_device(device_type, 0)) as world, contextlib.ExitStack() as stack:
        # Waiting for torch's threads takes longer than most stages, and varies.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for task in tasks:
            floor = None
            for impl in sorted(set(task.impls) - {calls.WRAPPED}, key=lambda impl: (impl != FLOOR, impl)):
                subject = Subject(task.case, impl)
                recording = calls.CallRecording(task.label, subject, request.options.quick, floor)
                measure([subject], world, recording)
                floor = recording.floor
                if subject.failure is None:
                    tables += recording.tables
                    folded |= recording.folded
                else:
                    skipped = subject.failure[0] == "skipped"
                    failed |= not skipped
                    (print_status if skipped else print_error)(
                        f"{task.label} ({impl}): {', '.join(subject.failure)}"
                    )
    if not tables:
        print_error("nothing could be profiled: no profile was written")
        return EXIT_CASE_FAILED
    write_profile(
        request.folder,
        stage_tables(tables),
        CallsProfile(cases=tuple(tables)),
        {SPEEDSCOPE: msgspec.json.encode(speedscope(folded, request.folder.name))},
        "https://www.speedscope.app",
    )
    return EXIT_CASE_FAILED if failed else EXIT_OK
