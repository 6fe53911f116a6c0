"""`dtbench profile`: which cases of which suite, and from these to the folder with tables, frames and trace."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from dtbench.engine.launch import start_ranks
from dtbench.engine.measure import Subject, measure
from dtbench.engine.options import RunRequest, split_target
from dtbench.engine.place import OUTPUT, find_place
from dtbench.engine.progress import say, say_if_slow
from dtbench.engine.rank import quiet_torch
from dtbench.engine.ranks import SIMULATED_RANKS
from dtbench.engine.selection import prepare
from dtbench.engine.tasks import Task, matcher
from dtbench.errors import EXIT_CASE_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError, complain
from dtbench.machine.device import choose_device, count_ranks
from dtbench.profile.text import SPEEDSCOPE, PrintJob, speedscope, stage_tables, write_profile
from dtbench.records.atomic import refuse_taken
from dtbench.records.profile import Calls, CallStages
from dtbench.suite import DeviceType
from dtbench.suite.case import FLOOR
from dtbench.text.units import plural

# A profile is read case by case; each takes seconds to measure and some hundred events to draw.
MOST_CASES = 24
_SHOWN = 8


@dataclass(frozen=True)
class ProfileRequest:
    """`dtbench profile`: options as `dtbench run` has them, the case's name ("": all of the suite), the folder."""

    options: RunRequest
    case: str
    folder: Path
    filter_text: str = ""

    def tasks(self, device_type: DeviceType, world_size: int) -> list[Task]:
        """The cases to profile, the same on every rank; raises UsageError as `choose` does, or for no such suite."""
        # The filter comes after the case's name, so that a message can name the nearest.
        return choose(prepare(self.options, device_type, world_size).tasks, self.case, self.filter_text)


def make_request(target: str, filter_text: str, output: Path | None, options: RunRequest) -> ProfileRequest:
    """From the command line. `options` has everything but the suite; without -o the folder is named by
    the time, and ranks take the name that their launcher chose.

    Raises:
        UsageError: a target that is none.
    """
    suite, case = split_target(target)
    named = os.environ.get(OUTPUT) or time.strftime("profile-%Y%m%dT%H%M%SZ", time.gmtime())
    return ProfileRequest(
        options=dataclasses.replace(options, suites=(suite,), filter=""),
        case=case,
        folder=output or Path(named),
        filter_text=filter_text,
    )


def choose(tasks: Sequence[Task], case: str, filter_text: str) -> list[Task]:
    """The tasks of that case (all where it is ""), of those that the text matches.

    Raises:
        UsageError: none, with the names that come nearest; or more than a profile can show.
    """
    suite, matches = tasks[0].suite.name, matcher(filter_text)
    named = [task for task in tasks if case in ("", task.case.name)]
    chosen = [task for task in named if matches(task.label)]
    labels = "; ".join([task.label for task in chosen or named][:_SHOWN])
    if not named:
        near = difflib.get_close_matches(case, {task.case.name for task in tasks}, cutoff=0.0)
        raise UsageError(
            f"{suite} has no case {case!r}: the nearest are {', '.join(near)}; `dtbench list {suite}` shows all"
        )
    if not chosen:
        raise UsageError(
            f"--filter {filter_text!r} matches none of the {len(named)} cases of {suite}, such as {labels}"
        )
    if len({task.suite.world for task in chosen}) > 1:
        raise UsageError(f"of these cases some need ranks and some do not, name some of one kind: {labels}")
    if len(chosen) > MOST_CASES:
        raise UsageError(
            f"{len(chosen)} cases match, a profile shows at most {MOST_CASES}: name one, as in "
            f"{suite}/{chosen[0].case.name}, or narrow them with --filter; they are such as {labels}"
        )
    return chosen


def profile(request: ProfileRequest, argv: Sequence[str], print_job: PrintJob) -> int:
    """Does what the request says; the exit code. argv: what ranks are started with again. print_job: tells of ranks."""
    # Before torch loads: kineto tells stderr of every start and stop otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    quiet_torch()
    place = find_place()
    if place is not None:
        from dtbench.profile.ranks import RankProfile

        RankProfile(request, place, print_job).go()
    with say_if_slow("loading torch and the suite"):
        device_type = choose_device(request.options.device)
        nproc = count_ranks(request.options.ranks, device_type, request.options.backend)
        tasks = request.tasks(device_type, nproc)
    refuse_taken(request.folder, "remove it")
    if tasks[0].suite.world == "simulated":
        return _profile_calls(request, tasks, device_type)
    from dtbench.profile.ranks import report_failure

    note = start_ranks(argv, nproc, 0, request.folder, report_failure)
    return EXIT_INTERRUPTED if note.code is None else note.code


def _profile_calls(request: ProfileRequest, tasks: Sequence[Task], device_type: DeviceType) -> int:
    """Cases of simulated ranks, in this process."""
    import torch

    from dtbench.engine.ranks import device_of, simulated_world
    from dtbench.profile import calls

    say(
        f"{plural(len(tasks), 'case')} to profile on {SIMULATED_RANKS} simulated ranks, on one thread, into "
        f"{request.folder}"
    )
    tables: list[CallStages] = []
    folded: dict[str, Mapping[tuple[str, ...], float]] = {}
    failed = False
    with simulated_world(device_of(device_type, 0)) as world, contextlib.ExitStack() as stack:
        # Waiting for other threads takes longer than the stages, and differs each time.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        for task in tasks:
            floor = None
            impls = sorted(set(task.impls) - {calls.WRAPPED}, key=lambda impl: (impl != FLOOR, impl))
            for impl in impls:
                subject = Subject(task.case, impl)
                recording = calls.CallRecording(task.label, subject, request.options.quick, floor)
                measure([subject], world, recording)
                floor = recording.floor
                if subject.bad is None:
                    tables += recording.tables
                    folded |= recording.folded
                else:
                    skipped = subject.bad[0] == "skipped"
                    failed |= not skipped
                    (say if skipped else complain)(f"{task.label} ({impl}): {', '.join(subject.bad)}")
    if not tables:
        complain("nothing could be profiled: no profile was written")
        return EXIT_CASE_FAILED
    write_profile(
        request.folder,
        stage_tables(tables),
        Calls(cases=tuple(tables)),
        {SPEEDSCOPE: msgspec.json.encode(speedscope(folded, request.folder.name))},
        "https://www.speedscope.app",
    )
    return EXIT_CASE_FAILED if failed else EXIT_OK
