"""What a run is to do and what becomes of it: the same to its ranks and to the launcher that starts them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtbench.engine import budget
from dtbench.engine.before import Before
from dtbench.engine.failure import ActiveCase, Diagnosis
from dtbench.engine.findings import findings, next_commands
from dtbench.engine.launch import OUTPUT
from dtbench.engine.options import (
    RunRequest,
    Task,
    list_tasks,
    refuse_foreign_options,
    refuse_other_run,
)
from dtbench.engine.progress import say, summary_of
from dtbench.engine.ranks import backend_of
from dtbench.machine.provenance import provenance
from dtbench.records import baselines
from dtbench.records.run import RunWriter, read_run
from dtbench.suite import DeviceType, Result, Run, RunOptions
from dtbench.suite.errors import (
    EXIT_CASE_FAILED,
    EXIT_OK,
    DtbenchError,
    UnreadableRunError,
    UsageError,
    complain,
)
from dtbench.suite.mesh import format_mesh
from dtbench.suite.suites import Suite, load
from dtbench.text.masking import mask_arguments, mask_options


@dataclass(frozen=True)
class Job:
    """What a run is to do, the same on every rank and in the launcher."""

    options: RunRequest
    plan: RunOptions
    suites: tuple[Suite, ...]
    tasks: tuple[Task, ...]  # to measure, in this order
    listed: tuple[Task, ...]  # all that the options name; --budget may leave some out

    @property
    def suite_names(self) -> list[str]:
        """As the header has them."""
        return [suite.name for suite in self.suites]

    @property
    def simulated(self) -> bool:
        """Whether one process measures all of it, which simulates its ranks."""
        return all(task.suite.world == "simulated" for task in self.tasks)

    @property
    def alone(self) -> bool:
        """Whether its suite, which is then the only one, needs no ranks."""
        return self.suites[0].world == "own"


def prepare(options: RunRequest, device_type: DeviceType, world_size: int) -> Job:
    """Validates all that can be validated before ranks exist.

    Raises:
        UsageError: options that cannot be followed.
    """
    plan = options.resolve(device_type, world_size)
    suites = tuple({suite.name: suite for suite in load(options.suites)}.values())
    refuse_foreign_options(suites, options.suite_options)
    listed = tasks = list_tasks(suites, plan, options.filter)
    if options.budget_s is not None:
        if suites[0].world == "own":
            raise UsageError(f"--budget is for suites that time something: leave it out for {suites[0].name}")
        tasks = budget.choose(listed, options.budget_s, plan.quick)
    return Job(options, plan, suites, tuple(tasks), tuple(listed))


def same_on_all_ranks(job: Job) -> dict[str, str]:
    """What ranks have to agree in, by the names that users know; else they would wait in different collectives, or
    measure different things."""
    options, plan = job.options, job.plan
    files = {
        Path(suite.cases.__code__.co_filename) for suite in job.suites if hasattr(suite.cases, "__code__")
    }
    listed = [f"{task.label} {','.join(task.impls)}" for task in job.tasks]
    return {
        "suites": " ".join(job.suite_names),
        "--mesh": format_mesh(plan.mesh),
        "--device": plan.device_type,
        "--backend": options.backend,
        "--impl": ",".join(plan.impls),
        "--size": ",".join(map(str, plan.sizes_bytes)),
        "--dtype": ",".join(plan.dtypes),
        "--filter": options.filter,
        "--quick": str(plan.quick),
        "--refine": str(plan.refine),
        "--launches": str(options.launches),
        "--budget": str(options.budget_s),
        "--timeout": f"{options.timeout_s:g}",
        "--on-failure": options.on_failure,
        "--resume": str(options.resume),
        **{f"--{name}": value for name, value in mask_options(plan.options).items()},
        **{f"the file {path.name} with sha256": _digest(path) for path in sorted(files)},
        "a list": f"of {len(listed)} cases, sha256 {hashlib.sha256(repr(listed).encode()).hexdigest()[:12]}",
    }


def _digest(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    except OSError:
        return "none"


def output_of(options: RunRequest) -> Path:
    """The run file: -o, or a name by the time in the current folder."""
    if options.output is not None:
        return options.output
    given = os.environ.get(OUTPUT)
    return Path(given) if given else Path(time.strftime("run-%Y%m%dT%H%M%SZ.jsonl", time.gmtime()))


def run_to_resume(job: Job, output: Path) -> Run:
    """The run to go on with.

    Raises:
        UnreadableRunError: it is no run.
        UsageError: it was asked for something else.
    """
    run = read_run(output)
    refuse_other_run(run.header, job.plan, job.suite_names, job.options.launches, output)
    return run


def open_run_file(
    job: Job, argv: Sequence[str], output: Path, ranks: Sequence[Mapping[str, Any]], before: Run | None
) -> RunWriter:
    """The file of the run to go on with, or a new one. ranks: what each says of itself.

    Raises:
        OutputError: it cannot be written.
    """
    if before is not None:
        return RunWriter.resume(before, {"argv": mask_arguments(argv)})
    header = provenance(
        argv=argv,
        plan=job.plan,
        suites=job.suite_names,
        mesh=() if job.alone or job.simulated else job.plan.mesh,
        ranks=ranks,
        backend=None if job.alone else backend_of(job.plan.device_type, job.options.backend),
        launches=job.options.launches,
    )
    return RunWriter.create(output, header)


def exit_code_of(results: Iterable[Result]) -> int:
    """0, or 5 where a result failed or is wrong, or there is none."""
    statuses = {result.status for result in results}
    return EXIT_OK if statuses and not statuses & {"failed", "wrong"} else EXIT_CASE_FAILED


def say_ended(options: RunRequest, path: Path, before: Before | None) -> None:
    """The last lines of a run that is whole: what it found, what became of it, what to type next.

    Raises:
        OutputError: the baseline cannot be kept.
    """
    run = read_run(path)
    lines = [] if options.brief else findings(run)
    if before is not None and (summary := before.summary(run.results)):
        lines.append(summary)
    of = ", ".join(options.suites) if options.brief else path  # whose file is not kept
    lines.append(f"{of}: {summary_of(run.results)}")
    if options.save_baseline is not None:
        kept = baselines.save(path, options.save_baseline)
        lines.append(f"kept as the baseline {options.save_baseline}: {kept}")
    for line in lines if options.brief else [*lines, *next_commands(run)]:
        say(line)


def say_complete(run: Run) -> int:
    """There is nothing to resume; the exit code."""
    say(f"{run.path} is complete already: {summary_of(run.results)}; nothing to go on with")
    return exit_code_of(run.results)


def report_failure(
    diagnosis: Diagnosis,
    case: ActiveCase,
    output: Path,
    writer: RunWriter | None = None,
    *,
    goes_on: bool = False,
) -> str | None:
    """Records the case that was in hand as failed and prints the run's last line.

    writer: the open file, where this process has it. goes_on: whether new ranks may follow; what happened to the case
    is then given back, not printed.

    Raises:
        OutputError: the failed case cannot be recorded.
    """
    failed = diagnosis.blames_case and bool(case.name)
    count: int | None = None
    with suppress(UnreadableRunError, ValueError), contextlib.ExitStack() as stack:
        if writer is None:
            run = read_run(output)
            count = len(run.results)
            writer = stack.enter_context(RunWriter.resume(run)) if failed else None
        if writer is not None:
            if failed:
                _record_failed(diagnosis, case, writer)
            count = len(writer.results)
    if failed and goes_on:
        return diagnosis.during(case)
    complain(f"{diagnosis.during(case)}: {words_on_kept(count, output)}")
    return None


def words_on_kept(count: int | None, output: Path) -> str:
    """`3 results are in x.jsonl; go on with --resume -o x.jsonl`. count: None where there is no run."""
    if count is None:
        return "nothing was measured"
    results = "1 result is" if count == 1 else f"{count} results are"
    return f"{results} in {output}; go on with --resume -o {output}"


def count_kept(output: Path) -> int | None:
    """How many results are in the file; None where there is no run."""
    with suppress(DtbenchError):
        return len(read_run(output).results)
    return None


def _record_failed(diagnosis: Diagnosis, case: ActiveCase, writer: RunWriter) -> None:
    for impl in case.blamed:
        result = Result(
            suite=case.suite,
            name=case.name,
            impl=impl,
            params=case.params,
            status="failed",
            reason=diagnosis.sentence,
            rank=diagnosis.rank,
            launch=case.launch,
        )
        if result.key not in writer.results:
            writer.append(result)
