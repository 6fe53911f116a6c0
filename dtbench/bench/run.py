"""`dtbench run`: a rank of somebody's world joins it; otherwise this process starts the ranks itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from dtbench.bench.options import DEFAULT_CPU_RANKS, RunOptions, remaining
from dtbench.bench.progress import make_progress, say, summary_of
from dtbench.bench.session import (
    Job,
    Session,
    check_resume,
    choose_device,
    exit_code_of,
    open_run_file,
    output_of,
    prepare,
    report_failure,
    say_complete,
    say_kept,
)
from dtbench.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError, complain
from dtbench.files.atomic import refuse_taken
from dtbench.files.run import read_run
from dtbench.machine.device import gpus
from dtbench.mesh import ranks_of
from dtbench.model import ResultKey
from dtbench.world.failure import INTERRUPTED, Diagnosis, Now
from dtbench.world.launch import Note, start_ranks
from dtbench.world.rank import quiet_torch
from dtbench.world.ranks import find_place

# Starts of new ranks in a row without a result, after which more of them would find nothing either: it is the
# machine that fails, not a case.
MAX_FRUITLESS = 5


def run(options: RunOptions, argv: Sequence[str]) -> int:
    """Does what the options say; the exit code.

    argv: the command line without the program's name, which the ranks are started with again.
    """
    place = find_place()
    if place is not None:
        Session(options, place, argv).go()
    return _run_here(options, argv)


def _run_here(options: RunOptions, argv: Sequence[str]) -> int:
    job = job_here(options)
    output = output_of(options)
    done: frozenset[ResultKey] = frozenset()
    if options.resume:
        run_before = check_resume(job, output)
        if run_before.complete:
            return say_complete(run_before)
        done = frozenset(result.key for result in run_before.results)
    else:
        refuse_taken(output, resumable=True)
    if job.alone:
        return measure_alone(job, argv, output)
    code = EXIT_OK

    for launch in range(options.launches):
        last = launch + 1 == options.launches
        # What a refined launch lacks is known to its ranks only.
        if not (last or job.plan.refine or remaining(job.tasks, done, launch)):
            continue
        note = _measure_launch(options, argv, job.plan.world_size, launch, output)
        code = EXIT_INTERRUPTED if note.code is None else note.code
        if not note.whole:
            break
    return code


def job_here(options: RunOptions) -> Job:
    """What the options ask for on this machine, on ranks of our own.

    Raises:
        UsageError: options that cannot be followed.
    """
    quiet_torch()
    device_type = choose_device(options)
    job = prepare(options, device_type, count_ranks(options, device_type))
    if job.alone:
        refuse_rank_options(job)
    return job


def _measure_launch(options: RunOptions, argv: Sequence[str], nproc: int, launch: int, output: Path) -> Note:
    """One launch: while cases cost it its ranks, new ones go on with those that are left."""

    def report(diagnosis: Diagnosis, now: Now) -> str | None:
        return report_failure(diagnosis, now, output, goes_on=options.on_failure == "continue")

    fruitless, good, now_s, began_s = 0, 0, time.monotonic(), None
    while True:
        note = start_ranks(argv, nproc, launch, output, report, began_s=began_s)
        if note.lost is None:
            return note
        good_before, good = good, sum(result.status == "ok" for result in read_run(output).results)
        fruitless = fruitless + 1 if good == good_before else 0
        if fruitless == MAX_FRUITLESS:
            complain(
                f"{note.lost}, like {MAX_FRUITLESS} starts in a row that measured nothing: {say_kept(output)}"
            )
            return note
        complain(f"{note.lost}: recorded as failed; going on with new ranks")
        began_s = now_s


def refuse_rank_options(job: Job) -> None:
    """For a suite that needs no ranks.

    Raises:
        UsageError: options that are about ranks.
    """
    refused = [
        option
        for option, given in (
            ("--nproc", job.options.nproc is not None),
            ("--mesh", job.options.mesh is not None),
            ("--max-size", job.options.max_size_bytes is not None),
            ("--launches", job.options.launches != 1 and job.options.max_size_bytes is None),
            ("--device cuda", job.options.device == "cuda"),
        )
        if given
    ]
    if refused:
        raise UsageError(f"{job.suites[0].name} starts no ranks: leave {', '.join(refused)} out")


def measure_alone(job: Job, argv: Sequence[str], output: Path) -> int:
    """Measures what is left of the job's one suite, which needs no ranks: it answers its cases in this process, or
    in some of its own. Writes each result as it comes; the exit code.

    Raises:
        OutputError: the file cannot be written.
    """
    from dtbench.machine.provenance import local_rank_info

    suite = job.suites[0]
    assert suite.measure is not None
    progress = make_progress()

    with open_run_file(job, argv, output, [local_rank_info("cpu")]) as writer:
        tasks = [(task.case, task.impls) for task in remaining(job.tasks, writer.done, 0)]
        total = sum(len(impls) for _, impls in tasks)
        progress.begin(f"{total} results to measure, into {output}", total)
        try:
            suite.measure(job.plan, tasks, lambda result: progress.result(writer.append(result)))
            writer.end()
        except KeyboardInterrupt:
            progress.close()
            report_failure(INTERRUPTED, Now(), output, writer)
            return EXIT_INTERRUPTED
        finally:
            progress.close()
    run = read_run(output)
    say(f"{output}: {summary_of(run.results)}")
    return exit_code_of(run)


def count_ranks(options: RunOptions, device_type: str) -> int:
    """--nproc, or as many as the mesh holds, or one per GPU, or 4 on CPUs.

    Raises:
        UsageError: more ranks than GPUs.
    """
    wanted = options.nproc or (ranks_of(options.mesh) if options.mesh else None)
    if device_type == "cpu":
        return wanted or DEFAULT_CPU_RANKS
    count = gpus().count()
    if wanted is not None and wanted > count and options.backend != "gloo":
        raise UsageError(
            f"{wanted} ranks are asked for, this host has {count} GPUs: expected at most one rank per GPU; "
            f"give --nproc {count}, --backend gloo (ranks then share GPUs), or --device cpu"
        )
    return wanted or count
