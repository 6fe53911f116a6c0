"""`dtbench run`: a rank of somebody's world joins it; otherwise this process starts the ranks itself."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence
from pathlib import Path

from dtbench.engine.failure import INTERRUPTED, ActiveCase, Diagnosis
from dtbench.engine.job import (
    Job,
    count_kept,
    exit_code_of,
    open_run_file,
    output_of,
    prepare,
    report_failure,
    run_to_resume,
    say_complete,
    say_ended,
    words_on_kept,
)
from dtbench.engine.launch import Note, start_ranks
from dtbench.engine.options import RunRequest, remaining
from dtbench.engine.place import find_place
from dtbench.engine.progress import make_progress, said_if_slow, say
from dtbench.engine.rank import quiet_torch
from dtbench.engine.scratch import sweep
from dtbench.engine.session import Session
from dtbench.machine.device import choose_device, count_ranks
from dtbench.machine.provenance import local_rank_info
from dtbench.records import baselines
from dtbench.records.atomic import refuse_taken
from dtbench.suite import ResultKey, Run
from dtbench.suite.errors import EXIT_INTERRUPTED, EXIT_OK, UsageError, complain
from dtbench.text.units import plural

# Starts of new ranks in a row without a result, after which more of them would find nothing either: it is the
# machine that fails, not a case.
MAX_FRUITLESS = 5


def run(options: RunRequest, argv: Sequence[str]) -> int:
    """Does what the options say; the exit code.

    argv: the command line without the program's name, which the ranks are started with again.
    """
    place = find_place()
    if place is not None:
        Session(options, place, argv).go()
    sweep()  # here, as there may be nothing left to measure
    if options.baseline is not None:
        baselines.find(options.baseline)
    if options.save_baseline is not None:
        baselines.named(options.save_baseline)
    with said_if_slow(f"loading torch and {', '.join(options.suites) or 'the suites'}"):
        job = job_here(options)
    output = output_of(options)
    before = run_to_resume(job, output) if options.resume else None
    if before is None:
        refuse_taken(output, resumable=True)
    elif before.complete:
        return say_complete(before)
    if job.alone:
        return measure_alone(job, argv, output, before)
    ranks = plural(job.plan.world_size, "process")
    doing = "which load torch and meet" if job.plan.world_size > 1 else "which loads torch"
    say(f"starting {ranks}, {doing}")
    return _measure_in_ranks(job, argv, output, {result.key for result in before.results} if before else ())


def job_here(options: RunRequest) -> Job:
    """What the options ask for on this machine, on ranks of our own.

    Raises:
        UsageError: options that cannot be followed.
    """
    quiet_torch()
    device_type = choose_device(options.device)
    job = prepare(options, device_type, count_ranks(options.ranks, device_type, options.backend))
    if job.alone:
        refuse_rank_options(job)
    if job.simulated and options.ranks is None:
        # Ranks beside the one that measures would only wait, unless the cases follow from their number.
        single = prepare(options, device_type, 1)
        if [task.label for task in single.tasks] == [task.label for task in job.tasks]:
            return single
    return job


# --------------------------------------------------------------------------------- with ranks


def _measure_in_ranks(job: Job, argv: Sequence[str], output: Path, done: Container[ResultKey]) -> int:
    code = EXIT_OK
    for launch in range(job.options.launches):
        last = launch + 1 == job.options.launches
        # What a refined launch lacks is known to its ranks only.
        if not (last or job.plan.refine or remaining(job.tasks, done, launch)):
            continue
        note = _measure_launch(job, argv, launch, output)
        code = EXIT_INTERRUPTED if note.code is None else note.code
        if not note.whole:
            break
    return code


def _measure_launch(job: Job, argv: Sequence[str], launch: int, output: Path) -> Note:
    """One launch: while cases cost it its ranks, new ones go on with those that are left."""

    def report(diagnosis: Diagnosis, case: ActiveCase) -> str | None:
        return report_failure(diagnosis, case, output, goes_on=job.options.on_failure == "continue")

    fruitless, good, now_s, began_s = 0, 0, time.monotonic(), None
    while True:
        note = start_ranks(argv, job.plan.world_size, launch, output, report, began_s=began_s)
        if note.lost is None:
            return note
        fruitless = 0 if note.good > good else fruitless + 1
        good = max(good, note.good)
        if fruitless == MAX_FRUITLESS:
            kept = words_on_kept(count_kept(output), output)
            complain(f"{note.lost}, like {MAX_FRUITLESS} starts in a row that measured nothing: {kept}")
            return note
        complain(f"{note.lost}: recorded as failed; going on with new ranks")
        began_s = now_s


# --------------------------------------------------------------------------------- without


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


def measure_alone(job: Job, argv: Sequence[str], output: Path, before: Run | None) -> int:
    """Measures what is left of the job's one suite, which needs no ranks: it answers its cases in this process, or
    in some of its own. Writes each result as it comes; the exit code.

    Raises:
        OutputError: the file cannot be written.
    """
    suite = job.suites[0]
    assert suite.measure is not None
    progress = make_progress()

    with open_run_file(job, argv, output, [local_rank_info("cpu")], before) as writer:
        tasks = [(task.case, task.impls) for task in remaining(job.tasks, writer.results, 0)]
        total = sum(len(impls) for _, impls in tasks)
        progress.begin(f"{plural(total, 'result')} to measure, into {output}", total)
        try:
            suite.measure(job.plan, tasks, lambda result: progress.result(writer.append(result)))
            writer.end()
        except KeyboardInterrupt:
            progress.close()
            report_failure(INTERRUPTED, ActiveCase(), output, writer)
            return EXIT_INTERRUPTED
        finally:
            progress.close()
        results = writer.results.values()
    say_ended(job.options, output, None)
    return exit_code_of(results)
