"""What a rank does in a run: measure with the others what is left to measure, and, on rank 0, write it down.

The way of a case: all ranks agree on the tasks (`_agree_on_tasks`), `TaskSweep` measures one after another in a live
world, and rank 0's `RunRecorder` writes each result and shows it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dtbench.engine import budget
from dtbench.engine.clock import clocks_of
from dtbench.engine.clocks import Offset
from dtbench.engine.failure import ActiveCase, Diagnosis, kept_in, record_failure
from dtbench.engine.findings import findings, next_commands
from dtbench.engine.options import RunRequest
from dtbench.engine.place import AGAIN, BEGAN, RankPlace, launch_number, output_of, start_again
from dtbench.engine.progress import Progress, say, summary_of
from dtbench.engine.rank import LaunchedRank
from dtbench.engine.ranks import AloneRanks, backend_of, simulated_world
from dtbench.engine.sampling import Budget, Instruments, RankGroup, TaskSweep, budget_of
from dtbench.engine.selection import RunJob, prepare, refuse_other_run, same_on_all_ranks
from dtbench.engine.tasks import Task, further_tasks, remaining
from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, OutputError
from dtbench.machine.device import choose_device, is_gpu
from dtbench.machine.host import boot_id
from dtbench.machine.nvml import gpu_state
from dtbench.machine.provenance import build_header
from dtbench.records import baselines
from dtbench.records.result import Result, Run
from dtbench.records.run import RunWriter, read_run
from dtbench.suite import Param
from dtbench.suite.mesh import format_mesh
from dtbench.text.masking import mask_arguments
from dtbench.text.units import plural

if TYPE_CHECKING:
    import torch

# How often the suites may ask for more cases in a launch; bisection from steps of 4x down to below 2x asks
# twice. A suite without an end would measure for ever.
MAX_REFINEMENTS = 8
# A case that a suite wants beside those that it lists: suite, name, params and impls.
_Further = tuple[str, str, dict[str, Param], list[str]]


class Session:
    """This rank's part in one launch of a run. `go` never returns."""

    def __init__(self, request: RunRequest, place: RankPlace, argv: Sequence[str]) -> None:
        self._request = request
        self._argv = argv
        self._launch = launch_number()
        self._output = output_of(request.output)
        self._began_s = float(os.environ.get(BEGAN) or time.monotonic())
        self._recorder: RunRecorder | None = None  # on rank 0
        self._rank = LaunchedRank(place, self._report, self._launch)

    def go(self) -> NoReturn:
        with self._rank as rank:
            self._run(prepare(self._request, choose_device(self._request.device), rank.place.world_size))
        if self._launch + 1 < self._request.launches and not rank.ours:
            start_again(self._launch + 1, self._output)
        rank.exit()

    def _run(self, job: RunJob) -> None:
        rank, device_type = self._rank, job.options.device_type
        sends = any(task.suite.world == "ranks" for task in job.tasks)
        transport = backend_of(device_type, self._request.backend) if sends else None
        rank.join(device_type, transport, same_on_all_ranks(job) | {"launch": str(self._launch)})
        # Each rank has named the file by its own clock.
        self._output = Path(*rank.ranks.agree([str(self._output)], lambda votes: votes[0]))
        if rank.place.rank == 0:
            self._recorder = RunRecorder(job, self._open(job), self._launch)
        tasks = self._agree_on_tasks(job)
        if self._recorder is not None:
            self._recorder.begin(tasks, self._began_s)
        self._measure(job, tasks)
        rank.conclude(lambda: self._on_rank_0.end())

    def _open(self, job: RunJob) -> RunWriter:
        if self._launch > 0 or os.environ.get(AGAIN):
            return RunWriter.resume(self._output)
        before = run_to_resume(job, self._output)
        if before is not None and before.complete:
            self._rank.stop_all(say_complete(before))
        return open_run_file(job, self._argv, self._output, self._rank.infos, before)

    @property
    def _on_rank_0(self) -> RunRecorder:
        assert self._recorder is not None
        return self._recorder

    def _measure(self, job: RunJob, tasks: Sequence[Task]) -> None:
        rank, quick = self._rank, job.options.quick
        sweep = TaskSweep(
            launch=self._launch,
            timeout_s=self._request.timeout_s,
            now=rank.now,
            record=lambda result: self._on_rank_0.record(result),
            starting=self._starting,
            limit=rank.limit,
            go_on=self._go_on(tasks),
        )
        simulated, real = ([t for t in tasks if t.suite.world == kind] for kind in ("simulated", "ranks"))
        instruments = functools.partial(instruments_of, rank.device)
        if simulated and rank.place.rank == 0:
            with simulated_world(rank.device) as world:
                tools = instruments(barrier=lambda: None, budget=budget_of("simulated", quick))
                sweep.measure(simulated, world, AloneRanks(), tools)
        rank.wait_for_all()
        # A resumed run may have its sweep whole and its refinement not.
        real = real or self._agree_on_more(job)
        if not real:
            return
        with rank.process_group(job.options.mesh, self._request.timeout_s) as (group, barrier):
            tools = instruments(
                barrier=barrier,
                budget=budget_of("ranks", quick),
                clock_offset=functools.partial(rank.clock_offset, time.perf_counter_ns),
            )
            for _ in range(MAX_REFINEMENTS):
                sweep.measure(real, group, rank.ranks, tools)
                if not (real := self._agree_on_more(job)):
                    break

    # ---- what all ranks agree on ----

    def _agree_on_tasks(self, job: RunJob) -> list[Task]:
        """What is left to measure, by rank 0's file."""
        ranks = self._rank.ranks
        chosen: list[list[str]] = ranks.agree(None, lambda _votes: self._on_rank_0.impls_left())
        pairs = zip(job.tasks, chosen, strict=True)
        return [Task(task.suite, task.case, tuple(impls)) for task, impls in pairs if impls]

    def _agree_on_more(self, job: RunJob) -> list[Task]:
        """What the suites want to measure beyond their cases, as rank 0 finds from its results; names and params
        travel, and each rank builds the cases of them."""
        if not job.options.refine:
            return []
        suites = {suite.name: suite for suite in job.suites}
        wanted: list[_Further] = self._rank.ranks.agree(None, lambda _votes: self._on_rank_0.further())
        tasks = []
        for name, case, params, impls in wanted:
            refinement = suites[name].refinement
            assert refinement is not None
            tasks.append(Task(suites[name], refinement.case(job.options, case, params), tuple(impls)))
        return tasks

    def _go_on(self, tasks: Sequence[Task]) -> Callable[[Task, RankGroup], bool]:
        """Whether --budget has time for a task, as rank 0 finds."""
        if self._request.budget_s is None:
            return lambda _task, _ranks: True
        deadlines = budget.Deadlines(tasks, self._began_s + self._request.budget_s, self._request.quick)
        ended: set[str] = set()  # suites: what comes after a refusal is refused, too

        def go_on(task: Task, ranks: RankGroup) -> bool:
            def decide(_votes: object) -> bool:
                return deadlines.allows(task, time.monotonic())

            suite = task.suite.name
            if suite not in ended and not ranks.agree(None, decide):
                ended.add(suite)
            return suite not in ended

        return go_on

    # ---- for whoever reports a failure ----

    def _starting(self, _task: Task) -> None:
        if self._recorder is not None:
            self._rank.note(case=self._rank.now, good=self._recorder.good)

    def _report(self, diagnosis: Diagnosis, case: ActiveCase) -> None:
        """Under another's launcher, on the lowest living rank, in a helper thread: the failed result and the last
        line."""
        writer = None if self._recorder is None else self._recorder.writer
        record_failure(diagnosis, case, self._output, writer)


class RunRecorder:
    """On rank 0: the run file, what is left to do by it, and the terminal."""

    def __init__(self, job: RunJob, writer: RunWriter, launch: int) -> None:
        self.writer = writer
        self.progress = Progress()
        self._job = job
        self._launch = launch
        self.good = sum(result.status == "ok" for result in writer.results.values())

    def left(self, tasks: Iterable[Task]) -> list[Task]:
        return remaining(tasks, self.writer.results, self._launch)

    def impls_left(self) -> list[list[str]]:
        """Of each task of the job."""
        impls = {id(task.case): list(task.impls) for task in self.left(self._job.tasks)}
        return [impls.get(id(task.case), []) for task in self._job.tasks]

    def further(self) -> list[_Further]:
        """What the suites want beyond the job's tasks, by the results so far."""
        job, results = self._job, list(self.writer.results.values())
        more = further_tasks(job.suites, job.options, job.texts, results, self._launch)
        left = self.left(more)
        if left:
            self.progress.more([budget.impl_s(t, job.options.quick) for t in left for _ in t.impls])
        return [(t.suite.name, t.case.name, dict(t.case.params), list(t.impls)) for t in left]

    def begin(self, tasks: Sequence[Task], began_s: float) -> None:
        """The first line. began_s: when the run was, on the monotonic clock."""
        options, request = self._job.options, self._job.request
        expected, quick = self._job.expected(tasks), options.quick
        estimates = [budget.impl_s(task, quick) for task in expected for _ in task.impls]
        alone = dict.fromkeys(task.suite.name for task in tasks if task.suite.world == "simulated")
        ranks = f"on {options.world_size} {options.device_type} ranks ({format_mesh(options.mesh)})"
        if self._job.simulated:
            ranks = "in one process, which simulates its ranks"
        elif alone:
            ranks += f", {' and '.join(alone)} in one process"
        words = [
            f"{plural(len(estimates), 'result')} to measure {ranks},",
            f"launch {self._launch + 1} of {request.launches}," if request.launches > 1 else "",
            "" if request.brief else f"into {self.writer.path}:",
            budget.forecast(expected, self._job.tasks, quick, self._job.processes),
        ]
        end_s = None if request.budget_s is None else began_s + request.budget_s
        self.progress.begin(" ".join(word for word in words if word), estimates, end_s)

    def record(self, result: Result) -> None:
        try:
            written = self.writer.append(result)
        except OutputError as error:
            raise OutputError(f"{error}: {kept_in(self.writer.path)}") from error
        self.good += written.status == "ok"
        self.progress.result(written)

    def end(self) -> int:
        """When all is measured: the end of the file and the last lines. The exit code."""
        request, results = self._job.request, self.writer.results
        last = self._launch + 1 >= request.launches
        if last:
            self.writer.end()
        self.writer.close()
        if last:
            left = self.left(self._job.tasks)
            if request.budget_s is not None and left:
                say(f"left out for --budget: {budget.name_left_out(self._job.tasks, left)}")
            say_ended(request, self.writer.path)
        return exit_code_of(results.values())


def run_to_resume(job: RunJob, output: Path) -> Run | None:
    """The run to go on with; None where --resume is not given, or has no file yet: the first of a launcher's attempts
    is given it too.

    Raises:
        UnreadableRunError: it is no run.
        UsageError: it was asked for something else.
    """
    if not job.request.resume or not os.path.lexists(output):
        return None
    run = read_run(output)
    refuse_other_run(run.header, job.options, job.suite_names, job.request.launches, output)
    return run


def open_run_file(
    job: RunJob, argv: Sequence[str], output: Path, ranks: Sequence[Mapping[str, Any]], before: Run | None
) -> RunWriter:
    """The file of the run to go on with, or a new one. ranks: what each says of itself.

    Raises:
        OutputError: it cannot be written.
    """
    if before is not None:
        return RunWriter.resume(before, {"argv": mask_arguments(argv)})
    header = build_header(
        argv=argv,
        options=job.options,
        suites=job.suite_names,
        mesh=() if job.simulated else job.options.mesh,
        ranks=ranks,
        backend=backend_of(job.options.device_type, job.request.backend),
        launches=job.request.launches,
    )
    return RunWriter.create(output, header)


def exit_code_of(results: Iterable[Result]) -> int:
    """0, or 5 where a result failed or is wrong, or there is none."""
    statuses = {result.status for result in results}
    return EXIT_OK if statuses and not statuses & {"failed", "wrong"} else EXIT_CASE_FAILED


def say_ended(request: RunRequest, path: Path) -> None:
    """The last lines of a run that is whole: its findings, and what to type next.

    Raises:
        OutputError: the baseline cannot be kept.
    """
    run = read_run(path)
    lines = [] if request.brief else findings(run)
    of = ", ".join(request.suites) if request.brief else path  # whose file is not kept
    lines.append(f"{of}: {summary_of(run.results)}")
    if request.save_baseline is not None:
        kept = baselines.save(path, request.save_baseline)
        lines.append(f"kept as the baseline {request.save_baseline}: {kept}")
    for line in lines if request.brief else [*lines, *next_commands(run)]:
        say(line)


def say_complete(run: Run) -> int:
    """There is nothing to resume; the exit code."""
    say(f"{run.path} is complete already: {summary_of(run.results)}; there is nothing left to measure")
    return exit_code_of(run.results)


def instruments_of(
    device: torch.device,
    *,
    barrier: Callable[[], None],
    budget: Budget,
    clock_offset: Callable[[], Offset | None] = lambda: None,
) -> Instruments:
    """The clocks and the GPU's state of the device. barrier: of all ranks. clock_offset: see `Instruments`."""
    read_gpu_state = functools.partial(gpu_state, device.index or 0) if is_gpu(device) else lambda: None
    return Instruments(clocks_of(device), barrier, budget, boot_id(), read_gpu_state, clock_offset)
