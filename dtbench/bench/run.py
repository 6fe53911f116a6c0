"""`dtbench run`: a rank of somebody's world joins it; otherwise this process starts the ranks itself."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from dtbench.bench.alone import measure_alone
from dtbench.bench.options import DEFAULT_CPU_RANKS, RunOptions, remaining
from dtbench.bench.session import (
    Session,
    check_resume,
    choose_device,
    output_of,
    prepare,
    quiet_torch,
    report_end,
    say_complete,
)
from dtbench.errors import (
    EXIT_OK,
    OutputError,
    UsageError,
)
from dtbench.mesh import ranks_of
from dtbench.model import ResultKey
from dtbench.world.launch import Launched, start_ranks
from dtbench.world.ranks import find_place
from dtbench.world.watch import INTERRUPTED, Diagnosis


def run(options: RunOptions, argv: Sequence[str]) -> int:
    """Does what the options say; the exit code.

    argv: the command line without the program's name, which the ranks are started with again.
    """
    place = find_place()
    if place is not None:
        Session(options, place, argv).go()
    return _run_here(options, argv)


def _run_here(options: RunOptions, argv: Sequence[str]) -> int:
    quiet_torch()
    device_type = choose_device(options)
    nproc = count_ranks(options, device_type)
    job = prepare(options, device_type, nproc)
    output = output_of(options)
    if job.suites[0].world == "own":
        return measure_alone(job, argv, output)
    done: frozenset[ResultKey] = frozenset()
    if options.resume:
        run_before = check_resume(job, output)
        if run_before.complete:
            return say_complete(run_before)
        done = frozenset(result.key for result in run_before.results)
    else:
        check_output(output)
    code = EXIT_OK
    for launch in range(options.launches):
        last = launch + 1 == options.launches
        # What a refined launch lacks is known to its ranks only.
        if not (last or job.plan.refine or remaining(job.tasks, done, launch)):
            continue
        launched = start_ranks(argv, nproc, launch, output)
        if not launched.note.reported:
            return _report(launched, output, launch)
        code = launched.code
        if not launched.note.whole:
            break
    return code


def _report(launched: Launched, output: Path, launch: int) -> int:
    """No rank was left to say the last line."""
    diagnosis = Diagnosis(launched.died, launched.rank) if launched.died else INTERRUPTED
    report_end(diagnosis, launched.note.case, output, None, launch)
    return diagnosis.code


def count_ranks(options: RunOptions, device_type: str) -> int:
    """--nproc, or as many as the mesh holds, or one per GPU, or 4 on CPUs.

    Raises:
        UsageError: more ranks than GPUs.
    """
    wanted = options.nproc or (ranks_of(options.mesh) if options.mesh else None)
    if device_type == "cpu":
        return wanted or DEFAULT_CPU_RANKS
    import torch

    gpus = torch.cuda.device_count()
    if wanted is not None and wanted > gpus:
        raise UsageError(
            f"{wanted} ranks are asked for, this host has {gpus} GPUs: expected at most one rank per GPU; "
            f"give --nproc {gpus}, or --device cpu"
        )
    return wanted or gpus


def check_output(output: Path) -> None:
    """Refuses, before anything is started, a file that could not be made.

    Raises:
        OutputError: it exists, or its folder does not or may not be written.
    """
    if output.exists():
        raise OutputError(f"{output} exists already: give another -o, or --resume to go on with it")
    folder = output.parent
    if not folder.is_dir():
        raise OutputError(f"cannot make {output}: there is no folder {folder}; make it or give another -o")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OutputError(f"cannot make {output}: {folder} may not be written; give another -o")
