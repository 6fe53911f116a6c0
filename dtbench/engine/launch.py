"""`dtbench run`: a rank of somebody's world joins it; otherwise this process starts the ranks and waits for them.

A rank is always `dtbench run` with the same arguments, whoever starts it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from dtbench.engine.failure import INTERRUPTED, Diagnosis, Report, kept_in, record_failure
from dtbench.engine.options import RunRequest
from dtbench.engine.place import AGAIN, BEGAN, LAUNCH, NOTE, OUTPUT, Note, find_place, output_of
from dtbench.engine.progress import say, say_if_slow
from dtbench.engine.rank import quiet_torch
from dtbench.engine.selection import RunJob, prepare
from dtbench.engine.session import Session, run_to_resume, say_complete
from dtbench.engine.tasks import remaining
from dtbench.engine.workers import LAUNCHER, answered, ending_signals, how_ended, scratch
from dtbench.errors import (
    EXIT_CASE_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_OWN_FAULT,
    EXIT_USAGE,
    WorldBrokenError,
    complain,
)
from dtbench.machine.device import choose_device, count_ranks
from dtbench.machine.limits import refuse_local_ranks
from dtbench.records import baselines
from dtbench.records.atomic import refuse_taken
from dtbench.text.units import plural

# Starts of new ranks in a row without a result, after which it is the machine that fails, not a case.
MAX_FRUITLESS = 5
# What the survivors of a fault get to write the last line in before they are killed. They need the
# answers of all ranks (2 s) and a few seconds for a slow disk.
_SHUTDOWN_S = 15
# The exit codes of a rank that ends by its own will, having said why.
_SAID_WHY = (EXIT_USAGE, EXIT_CASE_FAILED, EXIT_INTERRUPTED, EXIT_OWN_FAULT)


def run(request: RunRequest, argv: Sequence[str]) -> int:
    """Does what the request says; the exit code.

    argv: the command line without the program's name, which the ranks are started with again.
    """
    began_s, place = time.monotonic(), find_place()
    if place is not None:
        Session(request, place, argv).go()
    if request.save_baseline is not None:
        baselines.named(request.save_baseline)
    with say_if_slow(f"loading torch and {', '.join(request.suites) or 'the suites'}"):
        job = job_here(request)
    output = output_of(request.output)
    before = run_to_resume(job, output)
    if before is None:
        refuse_taken(output, resumable=True)
    elif before.complete:
        return say_complete(before)
    say(f"starting {plural(job.options.world_size, 'process')}, loading torch")
    done = {result.key for result in before.results} if before else set()
    code = EXIT_OK
    for launch in range(request.launches):
        last = launch + 1 == request.launches
        # What a refined launch lacks is known to its ranks only.
        if last or job.options.refine or remaining(job.tasks, done, launch):
            os.environ[BEGAN] = str(began_s)
            note = _measure_launch(job, argv, launch, output)
            code = EXIT_INTERRUPTED if note.code is None else note.code
            if not note.whole:
                break
    return code


def job_here(request: RunRequest) -> RunJob:
    """What the request asks for on this machine, on ranks of our own.

    Raises:
        UsageError: options that cannot be followed.
    """
    quiet_torch()
    device_type = choose_device(request.device)
    job = prepare(request, device_type, count_ranks(request.ranks, device_type, request.backend))
    if job.simulated and request.ranks is None:
        # Ranks beside the one that measures would only wait, unless the cases follow from their number.
        single = prepare(request, device_type, 1)
        if [task.label for task in single.tasks] == [task.label for task in job.tasks]:
            return single
    return job


def _measure_launch(job: RunJob, argv: Sequence[str], launch: int, output: Path) -> Note:
    """One launch: while cases cost it its ranks, new ones go on with those that are left."""
    fruitless, good, again = 0, 0, False
    while True:
        note = start_ranks(argv, job.options.world_size, launch, output, again=again)
        if note.diagnosis is None:
            return note
        fruitless = 0 if note.good > good else fruitless + 1
        good = max(good, note.good)
        goes_on = job.request.on_failure == "continue" and fruitless < MAX_FRUITLESS
        if not record_failure(note.diagnosis, note.case, output, goes_on=goes_on):
            if fruitless == MAX_FRUITLESS:
                complain(f"{MAX_FRUITLESS} starts in a row gave no result: {kept_in(output)}")
            return note
        again = True


def start_ranks(
    arguments: Sequence[str],
    nproc: int,
    launch: int,
    output: Path,
    report: Report = lambda _diagnosis, _case: None,
    *,
    again: bool = False,
) -> Note:
    """Starts `nproc` fresh ranks of `dtbench ARGUMENTS` here and waits for them; their last note, with the launch's
    exit code.

    They are started through torch's elastic launcher, which waits for them, hosts their store and ends
    the others when one dies. Its log and its tables are not shown: the ranks say what happened.

    report: called with what ended the ranks and what they were doing. again: whether others of this launch were lost.

    Raises:
        UsageError: fewer files may be open than they need, or they could not meet.
        WorldBrokenError: they cannot be started.
    """
    refuse_local_ranks(nproc)
    with scratch() as folder:
        note_path = str(folder / "note.json")
        os.environ.update({LAUNCH: str(launch), OUTPUT: str(output), NOTE: note_path})
        os.environ.update({LAUNCHER: str(os.getpid()), AGAIN: "1" if again else ""})
        # Ranks that share cores and each start a thread per core would measure the fight for them.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        failures: list[tuple[int, int]] = []
        ended_by = run_elastic(
            [sys.executable, "-P", "-m", "dtbench", *arguments],
            str(folder),
            failures.extend,
            shutdown_s=_SHUTDOWN_S,
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=f"dtbench-{os.getpid()}-{launch}",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",  # no look-up of this host's name, which may hang
        )
        note = Note.read(note_path)
    if note.code is not None:  # over, whatever came after
        return dataclasses.replace(note, diagnosis=None)
    # Refused, or no note can be written.
    if note.diagnosis is None and failures and failures[0][1] in _SAID_WHY:
        return dataclasses.replace(note, code=failures[0][1])
    diagnosis = INTERRUPTED if ended_by else note.diagnosis or _diagnose(failures)
    report(diagnosis, note.case)
    return dataclasses.replace(note, code=diagnosis.code, diagnosis=diagnosis)


def _diagnose(failures: Sequence[tuple[int, int]]) -> Diagnosis:
    """failures: (rank, exit code), first to last: those that the launcher ended for the first come after it."""
    if not failures or failures[0][1] == EXIT_INTERRUPTED:
        return INTERRUPTED
    rank, code = failures[0]
    return Diagnosis(f"rank {rank} {how_ended(code)}", rank)


def run_elastic(
    command: Sequence[str],
    folder: str,
    on_failure: Callable[[list[tuple[int, int]]], None],
    *,
    shutdown_s: float,
    **chosen: Any,
) -> int:
    """Runs the command on ranks through torch's elastic launcher, without its log, which repeats what ranks say.
    The signal that ended it, 0 if none did.

    folder: for its logs. on_failure: called with (rank, exit code) of the ranks that failed, first to last, while
    it still serves the store. shutdown_s: what ranks get to end by themselves before it kills them. chosen: of
    its `LaunchConfig`.

    Raises:
        WorldBrokenError: they cannot be started.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if "shutdown_timeout" in {of.name for of in dataclasses.fields(LaunchConfig)}:  # torch 2.11 lacks it
        chosen["shutdown_timeout"] = shutdown_s
    config = LaunchConfig(
        rdzv_backend="c10d",
        max_restarts=0,
        signals_to_handle="",  # `interrupt` answers them
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        **chosen,
    )

    def interrupt(number: int, _frame: FrameType | None) -> NoReturn:
        # Ranks get a SIGTERM, which ends one that still imports without a traceback.
        raise SignalException(f"got signal {number}", sigval=signal.SIGTERM)

    logged = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        # The launcher fills in `${local_rank}`, and reads `$$` as `$`.
        with answered(ending_signals(), interrupt):
            elastic_launch(config, command[0])(*(word.replace("$", "$$") for word in command[1:]))
    except ChildFailedError as error:
        on_failure(
            [
                (rank, failure.exitcode)
                for rank, failure in sorted(error.failures.items(), key=lambda item: item[1].timestamp)
            ]
        )
    except SignalException as end:
        return int(end.sigval)
    except (RuntimeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        count = chosen["nproc_per_node"]
        raise WorldBrokenError(f"cannot start {count} ranks: {type(error).__name__}: {reason}") from error
    finally:
        logging.disable(logged)
    return 0
