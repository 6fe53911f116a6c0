"""What a rank does in a run: measure with the others what is left to measure, and, on rank 0, write it down.

The way of a case: all ranks agree on the tasks (`_agree_on_tasks`), `Sweep` measures one after another in a live
world, and rank 0's `Recorder` writes each result and shows it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from dtbench.engine import budget
from dtbench.engine.before import Before, find_before
from dtbench.engine.clock import clocks_of
from dtbench.engine.clocks import Offset
from dtbench.engine.failure import ActiveCase, Diagnosis
from dtbench.engine.job import (
    Job,
    exit_code_of,
    open_run_file,
    output_of,
    prepare,
    report_failure,
    run_to_resume,
    same_on_all_ranks,
    say_complete,
    say_ended,
)
from dtbench.engine.launch import AGAIN, launch_number, start_again
from dtbench.engine.options import RunRequest, Task, further_tasks, remaining
from dtbench.engine.place import Place
from dtbench.engine.progress import make_progress, say
from dtbench.engine.rank import Rank
from dtbench.engine.ranks import AloneRanks, backend_of, simulated_world
from dtbench.engine.runner import Sweep, budget_of
from dtbench.engine.sampling import Budget, Instruments, Ranks
from dtbench.machine import provenance as machine
from dtbench.machine.device import choose_device, is_gpu
from dtbench.records.run import RunWriter, read_header
from dtbench.suite import Param, Result
from dtbench.suite.errors import UsageError
from dtbench.suite.mesh import format_mesh
from dtbench.text.units import format_seconds, plural

if TYPE_CHECKING:
    import torch

# How often the suites may ask for more cases in a launch; bisection from steps of 4x down to below 2x asks
# twice. A suite without an end would measure for ever.
MAX_REFINEMENTS = 8
# A case that a suite wants beside those that it lists: suite, name, params and impls.
_Further = tuple[str, str, dict[str, Param], list[str]]


class Session:
    """This rank's part in one launch of a run. `go` never returns."""

    def __init__(self, options: RunRequest, place: Place, argv: Sequence[str]) -> None:
        self._options = options
        self._argv = argv
        self._launch = launch_number()
        self._output = output_of(options)
        self._began_s = float(os.environ.get(AGAIN) or time.monotonic())
        self._recorder: Recorder | None = None  # on rank 0
        self._rank = Rank(place, self._report, self._launch)

    def go(self) -> NoReturn:
        """Measures and exits."""
        place = self._rank.place
        with self._rank as rank:
            job = prepare(self._options, choose_device(self._options.device), place.world_size)
            if job.alone:
                name = job.suites[0].name
                raise UsageError(
                    f"{name} needs no ranks, but a launcher has started some: run `dtbench run {name}` without it"
                )
            try:
                self._run(job)
            finally:
                if self._recorder is not None:
                    self._recorder.progress.close()
        if self._launch + 1 < self._options.launches and not rank.ours:
            start_again(self._launch + 1, self._output)
        rank.exit()

    def _run(self, job: Job) -> None:
        rank, device_type = self._rank, job.plan.device_type
        sends = any(task.suite.world == "ranks" for task in job.tasks)
        transport = backend_of(device_type, self._options.backend) if sends else None
        rank.join(device_type, transport, same_on_all_ranks(job) | {"launch": str(self._launch)})
        # Each rank has named the file by its own clock.
        self._output = Path(*rank.ranks.agree([str(self._output)], lambda votes: votes[0]))
        if rank.place.rank == 0:
            self._recorder = Recorder(job, self._open(job), self._launch)
            self._recorder.compare_with(self._options.baseline)
        tasks = self._agree_on_tasks(job)
        if self._recorder is not None:
            self._recorder.begin(tasks)
        self._measure(job, tasks)
        rank.conclude(lambda: self._on_rank_0.end())

    def _open(self, job: Job) -> RunWriter:
        if self._launch > 0 or os.environ.get(AGAIN):
            return RunWriter.resume(self._output)
        before = run_to_resume(job, self._output) if self._options.resume else None
        if before is not None and before.complete:
            self._rank.stop_all(say_complete(before))
        return open_run_file(job, self._argv, self._output, self._rank.infos, before)

    @property
    def _on_rank_0(self) -> Recorder:
        assert self._recorder is not None
        return self._recorder

    def _measure(self, job: Job, tasks: Sequence[Task]) -> None:
        rank, quick = self._rank, job.plan.quick
        sweep = Sweep(
            launch=self._launch,
            timeout_s=self._options.timeout_s,
            now=rank.now,
            record=lambda result: self._on_rank_0.record(result),
            starting=self._starting,
            limit=rank.limit,
            go_on=self._go_on(tasks),
        )
        simulated = [task for task in tasks if task.suite.world == "simulated"]
        real = [task for task in tasks if task.suite.world == "ranks"]
        instruments = functools.partial(instruments_of, rank.device)
        if simulated and rank.place.rank == 0:
            with simulated_world(rank.device) as world:
                tools = instruments(barrier=lambda: None, budget=budget_of("simulated", quick))
                sweep.measure(simulated, world, AloneRanks(), tools)
            rank.store.delete_key("now")
        rank.wait_for_all()
        # A resumed run may have its sweep whole and its refinement not.
        real = real or self._agree_on_more(job)
        if not real:
            return
        with rank.process_group(job.plan.mesh, self._options.timeout_s) as (group, barrier):
            tools = instruments(
                barrier=barrier,
                budget=budget_of("ranks", quick),
                clock_offset=functools.partial(rank.clock_offset, time.perf_counter_ns),
            )
            for _ in range(MAX_REFINEMENTS):
                sweep.measure(real, group, rank.ranks, tools)
                real = self._agree_on_more(job)
                if not real:
                    break

    # ---- what all ranks agree on ----

    def _agree_on_tasks(self, job: Job) -> list[Task]:
        """What is left to measure, by rank 0's file."""
        ranks = self._rank.ranks
        chosen: list[list[str]] = ranks.agree(None, lambda _votes: self._on_rank_0.impls_left())
        pairs = zip(job.tasks, chosen, strict=True)
        return [Task(task.suite, task.case, tuple(impls)) for task, impls in pairs if impls]

    def _agree_on_more(self, job: Job) -> list[Task]:
        """What the suites want to measure beyond their cases, as rank 0 finds from its results; names and params
        travel, and each rank builds the cases of them."""
        if not job.plan.refine:
            return []
        suites = {suite.name: suite for suite in job.suites}
        wanted: list[_Further] = self._rank.ranks.agree(None, lambda _votes: self._on_rank_0.further())
        tasks = []
        for name, case, params, impls in wanted:
            refinement = suites[name].refinement
            assert refinement is not None
            tasks.append(Task(suites[name], refinement.case(job.plan, case, params), tuple(impls)))
        return tasks

    def _go_on(self, tasks: Sequence[Task]) -> Callable[[Task, Ranks], bool]:
        """Whether --budget has time for a task, as rank 0 finds."""
        if self._options.budget_s is None:
            return lambda _task, _ranks: True
        deadlines = budget.Deadlines(tasks, self._began_s + self._options.budget_s)
        return lambda task, ranks: bool(
            ranks.agree(None, lambda _votes: deadlines.allows(task, time.monotonic()))
        )

    # ---- which case is in hand, for whoever reports its failure ----

    def _starting(self, task: Task) -> None:
        rank = self._rank
        if self._recorder is not None:
            rank.note(case=rank.now, good=self._recorder.good)
            if task.suite.world == "simulated":  # the other ranks do not see which case it is
                rank.store.set("now", msgspec.json.encode(rank.now).decode())

    def _case_in_hand(self) -> ActiveCase:
        rank = self._rank
        if not rank.now.name and rank.place.rank != 0 and rank.joined:
            with suppress(RuntimeError, msgspec.MsgspecError):  # rank 0 may have died in its simulated world
                store = rank.connect(False)
                if store.check(["now"]):
                    return msgspec.json.decode(store.get("now"), type=ActiveCase)
        return rank.now

    def _report(self, diagnosis: Diagnosis, _case: ActiveCase) -> str | None:
        """On the lowest living rank, in a helper thread: the failed result, and the last line where no launcher of
        ours is to go on."""
        writer = None
        if self._recorder is not None:
            writer = self._recorder.writer
            with suppress(Exception):  # whatever the terminal does, the last line comes
                self._recorder.progress.close()
        goes_on = self._rank.ours and self._options.on_failure == "continue"
        return report_failure(diagnosis, self._case_in_hand(), self._output, writer, goes_on=goes_on)


class Recorder:
    """On rank 0: the run file, what is left to do by it, and the terminal."""

    def __init__(self, job: Job, writer: RunWriter, launch: int) -> None:
        self.writer = writer
        self.progress = make_progress()
        self._job = job
        self._launch = launch
        self.good = sum(result.status == "ok" for result in writer.results.values())
        self._before: Before | None = None

    def compare_with(self, baseline: str | None) -> None:
        """The baseline of that name or file, else the last run of such cases.

        Raises:
            UsageError: there is no such baseline.
        """
        self._before = find_before(read_header(self.writer.path), self.writer.path, baseline)

    def left(self, tasks: Iterable[Task]) -> list[Task]:
        return remaining(tasks, self.writer.results, self._launch)

    def impls_left(self) -> list[list[str]]:
        """Of each task of the job."""
        impls = {id(task.case): list(task.impls) for task in self.left(self._job.tasks)}
        return [impls.get(id(task.case), []) for task in self._job.tasks]

    def further(self) -> list[_Further]:
        """What the suites want beyond the job's tasks, by the results so far."""
        job, results = self._job, list(self.writer.results.values())
        more = further_tasks(job.suites, job.plan, job.options.filter, results, self._launch)
        left = self.left(more)
        if left:
            self.progress.more(sum(len(task.impls) for task in left))
        return [(t.suite.name, t.case.name, dict(t.case.params), list(t.impls)) for t in left]

    def begin(self, tasks: Sequence[Task]) -> None:
        """The first line."""
        plan, launches = self._job.plan, self._job.options.launches
        total = sum(len(task.impls) for task in tasks)
        alone = dict.fromkeys(task.suite.name for task in tasks if task.suite.world == "simulated")
        ranks = f"on {plan.world_size} {plan.device_type} ranks ({format_mesh(plan.mesh)})"
        if self._job.simulated:
            ranks = "in one process, which simulates its ranks"
        elif alone:
            ranks += f", of {' and '.join(alone)} in one process"
        words = [
            f"{plural(total, 'result')} to measure {ranks},",
            f"launch {self._launch + 1} of {launches}," if launches > 1 else "",
            "" if self._job.options.brief else f"into {self.writer.path}:",
            budget.forecast(tasks, self._job.listed, plan.quick),
        ]
        self.progress.begin(" ".join(word for word in words if word), total)

    def record(self, result: Result) -> None:
        written = self.writer.append(result)
        self.good += written.status == "ok"
        change = None if self._before is None else self._before.change([written])
        self.progress.result(written, "" if change is None else change.words)

    def end(self) -> int:
        """When all is measured: the end of the file and the last line. The exit code."""
        options, writer = self._job.options, self.writer
        results = writer.results
        last = self._launch + 1 >= options.launches
        if last:
            writer.end()
        writer.close()
        self.progress.close()
        if last:
            left = self.left(self._job.listed)
            if options.budget_s is not None and left:
                say(f"left out for --budget: {budget.name_left_out(self._job.listed, left)}")
            if moved := writer.clock_moved_s:
                say(
                    f"the clock was set {format_seconds(abs(moved))} {'ahead' if moved > 0 else 'back'} meanwhile, or "
                    "the host slept: the file's stamps show it, its times are of another clock"
                )
            say_ended(options, writer.path, self._before)
        return exit_code_of(results.values())


def instruments_of(
    device: torch.device,
    *,
    barrier: Callable[[], None],
    budget: Budget,
    clock_offset: Callable[[], Offset | None] = lambda: None,
) -> Instruments:
    """The clocks and the GPU's state of the device. barrier: of all ranks. clock_offset: see `Instruments`."""
    gpu_state = functools.partial(machine.gpu_state, device.index or 0) if is_gpu(device) else lambda: None
    return Instruments(clocks_of(device), barrier, budget, machine.boot_id(), gpu_state, clock_offset)
