"""A rank's part in a run: measures with the other ranks; rank 0 also writes and prints the results.

Once the ranks have joined, they agree on the tasks that the run file still lacks. They measure these one after another,
first on simulated ranks and then in a process group. All end with the exit code of rank 0.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from dtbench.engine import budget
from dtbench.engine.clock import clocks_of
from dtbench.engine.clock_offsets import Offset
from dtbench.engine.failure import ActiveCase, Diagnosis, describe_kept_results, record_failure
from dtbench.engine.findings import findings, next_commands
from dtbench.engine.launch_files import LaunchSpec
from dtbench.engine.options import RunRequest
from dtbench.engine.progress import Progress, format_status_counts, print_status
from dtbench.engine.rank import LaunchedRank
from dtbench.engine.rank_env import RankEnv, output_of, start_next_launch
from dtbench.engine.rank_votes import AloneRanks, simulated_world, vote_of_rank_0
from dtbench.engine.sampling import Budget, Instruments, default_budget, measure_tasks
from dtbench.engine.selection import Selection, agreement_of, refuse_other_run, select
from dtbench.engine.tasks import Task, refinement_tasks, remaining
from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, OutputError
from dtbench.machine.backends import resolve_backend
from dtbench.machine.device import is_gpu
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

# Limit of refinement rounds per launch. Bisecting steps of 4x to below 2x takes two. A suite that always asks for more
# sizes would never end.
MAX_REFINEMENTS = 8


class Session:
    """This rank's part in one launch of a run."""

    def __init__(self, request: RunRequest, place: RankEnv, spec: LaunchSpec) -> None:
        self._request = request
        self._spec = spec
        self._output = output_of(request.output)
        self._recorder: RunRecorder | None = None  # on rank 0
        self._rank = LaunchedRank(place, self._record_failure, spec.launch, spec.report_path)

    def run(self) -> NoReturn:
        """Measures with the other ranks, and ends this process."""
        request, spec = self._request, self._spec
        with self._rank as rank:
            selection = select(request, rank.env.world_size)
            options = selection.options
            communicates = any(task.world == "ranks" for task in selection.tasks)
            backend = resolve_backend(options.device_type, request.backend) if communicates else None
            rank.join(options.device_type, backend, agreement_of(selection) | {"launch": str(spec.launch)})
            # Under another launcher, each rank has named the file by its own time. All use the name of rank 0.
            self._output = Path(rank.ranks.agree(str(self._output), vote_of_rank_0))
            if rank.env.rank == 0:
                self._recorder = RunRecorder(selection, spec, self._output, rank)
            # Rank 0 chooses the tasks and impls that its run file lacks.
            impls = [] if self._recorder is None else self._recorder.remaining_impls()
            chosen = zip(selection.tasks, rank.ranks.agree(impls, vote_of_rank_0), strict=True)
            tasks = [dataclasses.replace(task, impls=tuple(impls)) for task, impls in chosen if impls]
            end_s = None if request.budget_s is None else spec.start_s + request.budget_s
            simulated, real = ([t for t in tasks if t.world == kind] for kind in ("simulated", "ranks"))
            measure = functools.partial(
                measure_tasks,
                launch=spec.launch,
                timeout_s=request.timeout_s,
                active_case=rank.active_case,
                record=None if self._recorder is None else self._recorder.record,
                around_case=self._around_case,
                deadlines=None if end_s is None else budget.Deadlines(tasks, end_s, options.quick),
            )
            if simulated and rank.env.rank == 0:
                instruments = make_instruments(
                    rank.device, barrier=lambda: None, budget=default_budget("simulated", options.quick)
                )
                with simulated_world(rank.device) as world:
                    measure(simulated, world, AloneRanks(), instruments)
            rank.wait_for_all()
            # A resumed run may have measured its listed sizes, but not those that refine them.
            real = real or self._agree_on_added_tasks(selection)
            if real:
                with rank.process_group(options.mesh, request.timeout_s) as (group, barrier):
                    instruments = make_instruments(
                        rank.device,
                        barrier=barrier,
                        budget=default_budget("ranks", options.quick),
                        clock_offset=functools.partial(rank.clock_offset, time.perf_counter_ns),
                    )
                    for _ in range(MAX_REFINEMENTS):
                        measure(real, group, rank.ranks, instruments)
                        real = self._agree_on_added_tasks(selection)
                        if not real:
                            break
            rank.conclude(None if self._recorder is None else self._recorder.end())
        if spec.launch + 1 < request.launches and not rank.is_ours:
            start_next_launch(spec.launch + 1, self._output)
        rank.exit()

    def _agree_on_added_tasks(self, selection: Selection) -> list[Task]:
        """Returns the tasks that refine the suites' sweeps, chosen by rank 0 from its results.

        Rank 0 sends names and params, from which each rank builds the cases.
        """
        if not selection.options.refine:
            return []
        added = [] if self._recorder is None else self._recorder.added_cases()
        refined = {suite.name: (suite, suite.refinement) for suite in selection.suites if suite.refinement}
        return [
            Task(suite, refinement.case(selection.options, case, params), tuple(impls))
            for name, case, params, impls in self._rank.ranks.agree(added, vote_of_rank_0)
            for suite, refinement in [refined[name]]
        ]

    @contextmanager
    def _around_case(self) -> Iterator[None]:
        """Reports the case to our launcher, and ends all ranks if it takes longer than --timeout."""
        if self._recorder is not None:
            self._rank.report(case=self._rank.active_case, ok_results=self._recorder.ok_results)
        with self._rank.limit(self._request.timeout_s):
            yield

    def _record_failure(self, diagnosis: Diagnosis, case: ActiveCase) -> None:
        """Records the failed result and prints the last line, in a helper thread.

        Not called if our launcher receives a report, since it then does this.
        """
        record_failure(
            diagnosis, case, self._output, None if self._recorder is None else self._recorder.writer
        )


class RunRecorder:
    """Rank 0's view of the run: writes results to the run file, finds what the file lacks, and prints progress."""

    def __init__(self, selection: Selection, spec: LaunchSpec, output: Path, rank: LaunchedRank) -> None:
        """Opens the run file, or creates it, and prints the first line. Ends all ranks if the run is complete."""
        request, options = selection.request, selection.options
        is_continued = spec.launch > 0 or spec.is_restart
        previous = None if is_continued else run_to_resume(selection, output)
        if is_continued:
            self.writer = RunWriter.resume(output)
        elif previous is None:
            header = build_header(
                argv=spec.argv,
                options=options,
                suites=selection.suite_names,
                mesh=() if selection.is_simulated else options.mesh,
                ranks=rank.rank_facts,
                backend=resolve_backend(options.device_type, request.backend),
                launches=request.launches,
            )
            self.writer = RunWriter.create(output, header)
        elif previous.complete:
            rank.stop_all(say_complete(previous))
        else:
            self.writer = RunWriter.resume(previous, {"argv": mask_arguments(spec.argv)})
        self.ok_results = sum(result.status == "ok" for result in self.writer.results.values())
        self._selection, self._launch = selection, spec.launch
        tasks = self._remaining(selection.tasks)
        affordable = selection.affordable(tasks)
        estimates_s = [budget.impl_s(task, options.quick) for task in affordable for _ in task.impls]
        real = {task.suite.name for task in tasks if task.world == "ranks"}
        simulated = dict.fromkeys(
            f"part of {task.suite.name}" if task.suite.name in real else task.suite.name
            for task in tasks
            if task.world == "simulated"
        )
        ranks = f"on {options.world_size} {options.device_type} ranks ({format_mesh(options.mesh)})"
        if selection.is_simulated:
            ranks = "in one process, which simulates its ranks"
        elif simulated:
            ranks += f", {' and '.join(simulated)} in one process"
        words = [
            f"{plural(len(estimates_s), 'result')} to measure {ranks},",
            f"launch {spec.launch + 1} of {request.launches}," if request.launches > 1 else "",
            "" if request.brief else f"into {self.writer.path}:",
            budget.forecast(affordable, selection.tasks, options.quick, selection.measuring_processes),
        ]
        self._progress = Progress(
            " ".join(filter(None, words)),
            estimates_s,
            None if request.budget_s is None else spec.start_s + request.budget_s,
        )

    def _remaining(self, tasks: Iterable[Task]) -> list[Task]:
        return remaining(tasks, self.writer.results, self._launch)

    def remaining_impls(self) -> list[list[str]]:
        """Returns the impls that are still to be measured, for each task of the selection."""
        impls = {id(task.case): list(task.impls) for task in self._remaining(self._selection.tasks)}
        return [impls.get(id(task.case), []) for task in self._selection.tasks]

    def added_cases(self) -> list[tuple[str, str, dict[str, Param], list[str]]]:
        """Returns suite, name, params and impls of the cases that refine the suites' sweeps.

        The suites choose them by the results so far.
        """
        selection, results = self._selection, list(self.writer.results.values())
        options = selection.options
        tasks = self._remaining(
            refinement_tasks(selection.suites, options, selection.filters, results, self._launch)
        )
        if tasks:
            self._progress.more([budget.impl_s(task, options.quick) for task in tasks for _ in task.impls])
        return [(t.suite.name, t.case.name, dict(t.case.params), list(t.impls)) for t in tasks]

    def record(self, result: Result) -> None:
        try:
            written = self.writer.append(result)
        except OutputError as error:
            raise OutputError(f"{error}: {describe_kept_results(self.writer.path)}") from error
        self.ok_results += written.status == "ok"
        self._progress.result(written)

    def end(self) -> int:
        """Closes the run file. After the last launch, also completes it and prints the last lines.

        Returns:
            The exit code.

        Raises:
            OutputError: the file cannot be written, or the baseline cannot be kept.
        """
        request, results = self._selection.request, self.writer.results
        is_last = self._launch + 1 >= request.launches
        if is_last:
            self.writer.end()
        self.writer.close()
        if is_last:
            tasks = self._remaining(self._selection.tasks)
            if request.budget_s is not None and tasks:
                print_status(f"left out for --budget: {budget.format_left_out(self._selection.tasks, tasks)}")
            _print_findings(request, self.writer.path)
        return exit_code_of(results.values())


def run_to_resume(selection: Selection, output: Path) -> Run | None:
    """Returns the run to continue; None without --resume, or if the file does not exist yet.

    Raises:
        UnreadableRunError: the file is not a run.
        UsageError: the run was begun with other options.
    """
    if not selection.request.resume or not os.path.lexists(output):
        return None
    run = read_run(output)
    refuse_other_run(
        run.header,
        selection.options,
        selection.suite_names,
        selection.request.launches,
        resolve_backend(selection.options.device_type, selection.request.backend),
        output,
    )
    return run


def exit_code_of(results: Iterable[Result]) -> int:
    """Returns 0, or 5 if a result failed or is wrong, or if the run has no results."""
    statuses = {result.status for result in results}
    return EXIT_OK if statuses and not statuses & {"failed", "wrong"} else EXIT_CASE_FAILED


def _print_findings(request: RunRequest, path: Path) -> None:
    """Prints the last lines of a complete run: its findings, and the commands to continue with."""
    run = read_run(path)
    lines = [] if request.brief else findings(run)
    name = ", ".join(request.suites) if request.brief else path  # a brief run's file is temporary
    lines.append(f"{name}: {format_status_counts(run.results)}")
    if request.save_baseline is not None:
        baseline_path = baselines.save(path, request.save_baseline)
        lines.append(f"kept as the baseline {request.save_baseline}: {baseline_path}")
    for line in lines if request.brief else [*lines, *next_commands(run)]:
        print_status(line)


def say_complete(run: Run) -> int:
    """Prints that nothing is left to measure. Returns the exit code."""
    print_status(
        f"{run.path} is complete already: {format_status_counts(run.results)}; there is nothing left to measure"
    )
    return exit_code_of(run.results)


def make_instruments(
    device: "torch.device",
    *,
    barrier: Callable[[], None],
    budget: Budget,
    clock_offset: Callable[[], Offset | None] = lambda: None,
) -> Instruments:
    """Returns the instruments for a device. For the arguments, see `Instruments`."""
    read_gpu_state = functools.partial(gpu_state, device.index or 0) if is_gpu(device) else lambda: None
    return Instruments(clocks_of(device), barrier, budget, boot_id(), read_gpu_state, clock_offset)
