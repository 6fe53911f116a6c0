"""Profiles a training job: records it or reads its traces, analyzes them and writes the profile's folder."""

import contextlib
import io
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import json, structs, to_builtins

from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, DtbenchError
from dtbench.file_kinds import JOB_FILE, is_profile, kind_of
from dtbench.records.atomic import check_output_path, replace_file
from dtbench.records.job import Job, JobAnalysis
from dtbench.reporting.job_tables import print_job
from dtbench.text.terminal import print_json
from dtbench.traces.analysis import Topology, analyze
from dtbench.traces.job import is_trace, load_job, read_job
from dtbench.traces.recording import STEPS, WARMUP, record


@dataclass(frozen=True)
class JobRequest:
    """The options of `dtbench profile` for a job.

    Attributes:
        paths: traces, folders of traces, or the profile of a job; ignored if there is a command.
        command: the program to run and record; empty to read `paths`.
        folder: the folder to write. None: a name with the current time for a command, no folder for traces.
        topology: the bandwidths that the job's collectives are compared with.
        bases: profiles or traces of the base, one for each launch.
        model_and_layout: the values of `--model` and `--layout`.
        steps: steps to record; 0 records the whole run.
        warmup: steps before the recorded ones.
        timeout_s: seconds without a step after which a rank ends the job; 0 for no limit.
        delay: a rank, and the seconds by which its first collective of each step is delayed.
        redirect_stdout: whether to send the command's stdout to stderr, so that stdout holds only the results.
    """

    paths: Sequence[Path] = ()
    command: Sequence[str] = ()
    folder: Path | None = None
    topology: Topology | None = None
    bases: Sequence[Path] = ()
    model_and_layout: tuple[str, str] | None = None
    steps: int = STEPS
    warmup: int = WARMUP
    timeout_s: int = 0
    delay: tuple[int, float] | None = None
    redirect_stdout: bool = False


@dataclass(frozen=True)
class JobProfile:
    """The result of profiling a job.

    Attributes:
        job: the figures read from its traces.
        analysis: what follows from them.
        folder: the folder that was written, if any.
        exit_code: the command's, if it failed; else that of the comparison with the base.
    """

    job: Job
    analysis: JobAnalysis
    folder: Path | None
    exit_code: int


def profile_job(request: JobRequest) -> JobProfile:
    """Records the command, or reads traces or a profile, then analyzes the job and writes the folder.

    Raises:
        UsageError: no traces, traces of several runs, bases without common ranks, or a layout that does not fit.
        UnreadableRunError: a file that is neither a trace nor a profile.
        OutputError: the folder exists or cannot be written.
        DtbenchError: the command wrote no trace.
    """
    bases, folder = [job_in([base]) for base in request.bases], request.folder
    if request.command and folder is None:
        folder = Path(time.strftime("profile-%Y%m%dT%H%M%SZ", time.gmtime()))
    if folder:
        check_output_path(folder, "remove it")
    if request.model_and_layout:  # a mistake in them ends before the command runs
        from dtbench.cost.plan.training import find_model
        from dtbench.traces.required_volume import compare_volumes, read_layout

        model, layout = find_model(request.model_and_layout[0]), read_layout(request.model_and_layout[1])
    code, job = _record(request, folder) if request.command and folder else (EXIT_OK, job_in(request.paths))
    analysis = analyze(job, request.topology, bases)
    if request.model_and_layout:
        analysis = structs.replace(analysis, volumes=tuple(compare_volumes(job, model, layout)))
    if folder and not request.command:
        folder.mkdir()
        replace_file(folder / JOB_FILE, json.encode(job))
    if folder:
        replace_file(folder / "table.txt", job_text(job, analysis).encode("utf-8", "replace"))
    return JobProfile(job, analysis, folder, code or analysis.exit_code)


def job_in(paths: Sequence[Path]) -> Job:
    """Reads the profile of a job, logs of NCCL's inspector, or traces."""
    if len(paths) == 1 and is_profile(paths[0]):
        return load_job(paths[0])
    files = [file for path in paths for file in (sorted(path.iterdir()) if path.is_dir() else [path])]
    logs = [file for file in files if kind_of(file) == "inspector"]
    if not logs or any(map(is_trace, files)):
        return read_job(paths)
    from dtbench.traces.inspector import read_logs  # imports pandas, which traces do not need

    # A file of another kind is refused if it was named, and skipped in a folder.
    return read_logs([file for file in files if file in logs or file in paths])


def print_profile(profile: JobProfile, as_json: bool) -> None:
    """Prints tables, or one JSON document with the job's fields and its analysis."""
    if as_json:
        print_json({**to_builtins(profile.job), "analysis": to_builtins(profile.analysis)})
    else:
        print_job(profile.job, profile.analysis)


def job_text(job: Job, analysis: JobAnalysis) -> str:
    """Returns the tables of a job as plain text."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        print_job(job, analysis)
    return text.getvalue()


def _record(request: JobRequest, folder: Path) -> tuple[int, Job]:
    """Runs and records the command, and writes the job that its traces show. Returns its exit code and the job."""
    folder.mkdir()
    stdout = os.dup(1)
    if request.redirect_stdout:
        os.dup2(2, 1)
    try:
        recording = record(
            request.command,
            folder,
            steps=request.steps,
            warmup=request.warmup,
            timeout_s=request.timeout_s,
            delay=request.delay,
        )
    finally:
        os.dup2(stdout, 1)
        with contextlib.suppress(OSError):  # the folder holds traces, so it stays
            folder.rmdir()
    if not recording.traces:
        error = DtbenchError(f"no rank wrote a trace, so there is no profile: {' '.join(recording.notes)}")
        error.exit_code = recording.exit_code or EXIT_CASE_FAILED
        raise error
    job = read_job(recording.traces, folder.name, request.command)
    job = structs.replace(job, notes=(*recording.notes, *job.notes))
    replace_file(folder / JOB_FILE, json.encode(job))  # kept even if comparing it fails
    return recording.exit_code, job
