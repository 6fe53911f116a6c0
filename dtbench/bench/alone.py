"""A run of a suite that needs no ranks: it answers its cases in this process, or in some of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtbench.bench.options import remaining
from dtbench.bench.progress import make_progress, say, summary_of
from dtbench.bench.session import Job, check_resume, exit_code_of, say_complete
from dtbench.errors import EXIT_INTERRUPTED, UsageError, complain
from dtbench.files.run import RunWriter, read_run
from dtbench.model import Case, Result


def measure_alone(job: Job, argv: Sequence[str], output: Path) -> int:
    """Measures what is left of the job's one suite and writes each result as it comes; the exit code.

    Raises:
        UsageError: options that are about ranks.
        OutputError: the file cannot be written.
    """
    suite = job.suites[0]
    assert suite.measure is not None
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
        raise UsageError(f"{suite.name} starts no ranks: leave {', '.join(refused)} out")
    writer = _writer(job, argv, output)
    if writer is None:
        return say_complete(read_run(output))
    tasks: list[tuple[Case, tuple[str, ...]]] = [
        (task.case, task.impls) for task in remaining(job.tasks, writer.done, 0)
    ]
    total = sum(len(impls) for _, impls in tasks)
    progress = make_progress()

    def record(result: Result) -> None:
        progress.result(writer.append(result))

    progress.begin(f"{total} results to measure, into {output}", total)
    try:
        suite.measure(job.plan, tasks, record)
        writer.end()
    except KeyboardInterrupt:
        progress.close()
        count = len(read_run(output).results)
        complain(f"interrupted: {count} results are in {output}; go on with --resume -o {output}")
        return EXIT_INTERRUPTED
    finally:
        progress.close()
        writer.close()
    run = read_run(output)
    say(f"{output}: {summary_of(run.results)}")
    return exit_code_of(run)


def _writer(job: Job, argv: Sequence[str], output: Path) -> RunWriter | None:
    """For the run file, new or resumed; None where it is complete."""
    from dtbench.machine.provenance import local_rank_info, provenance

    if job.options.resume:
        if check_resume(job, output).complete:
            return None
        return RunWriter.resume(output, {"argv": list(argv)})
    header = provenance(
        argv=argv,
        plan=job.plan,
        suites=job.suite_names,
        mesh=(),
        ranks=[local_rank_info("cpu")],
        backend=None,
        launches=1,
    )
    return RunWriter.create(output, header)
