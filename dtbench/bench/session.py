"""What a rank does in a run: measure with the others what is left to measure, and, on rank 0, write it down."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from dtbench.bench import budget
from dtbench.bench.options import (
    RunOptions,
    Task,
    further_tasks,
    list_tasks,
    refuse_foreign_options,
    refuse_other_run,
    remaining,
)
from dtbench.bench.progress import Progress, make_progress, say, summary_of
from dtbench.bench.runner import Sweep, budget_of
from dtbench.bench.sampling import Instruments, Ranks
from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, DtbenchError, UsageError, complain
from dtbench.files.run import RunWriter, read_run
from dtbench.machine.device import gpus, is_gpu, rehearsing
from dtbench.masking import mask_arguments
from dtbench.mesh import format_mesh
from dtbench.model import Plan, Result, Run
from dtbench.suite import Suite, load
from dtbench.units import format_seconds
from dtbench.world.clocks import Offset
from dtbench.world.failure import Diagnosis, Now
from dtbench.world.launch import AGAIN, OUTPUT, launch_number, start_again
from dtbench.world.rank import Rank
from dtbench.world.ranks import AloneRanks, Place, backend_of, simulated_world

# How often the suites may ask for more cases in a launch; bisection from steps of 4x down to below 2x asks
# twice. A suite without an end would measure for ever.
MAX_REFINEMENTS = 8


@dataclass(frozen=True)
class Job:
    """What a run is to do, the same on every rank and in the launcher."""

    options: RunOptions
    plan: Plan
    suites: tuple[Suite, ...]
    tasks: tuple[Task, ...]  # to measure, in this order
    listed: tuple[Task, ...]  # all that the options name; --budget may leave some out

    @property
    def suite_names(self) -> list[str]:
        """As the header has them."""
        return [suite.name for suite in self.suites]

    @property
    def alone(self) -> bool:
        """Whether its suite, which is then the only one, needs no ranks."""
        return self.suites[0].world == "own"


def prepare(options: RunOptions, device_type: str, world_size: int) -> Job:
    """Validates all that can be validated before ranks exist.

    Raises:
        UsageError: options that cannot be followed.
    """
    plan = options.plan("cuda" if device_type == "cuda" else "cpu", world_size)
    suites = tuple({suite.name: suite for suite in load(options.suites)}.values())
    refuse_foreign_options(suites, options.suite_options)
    listed = tasks = list_tasks(suites, plan, options.filter)
    if options.budget_s is not None:
        if suites[0].world == "own":
            raise UsageError(f"--budget is for suites that time something: leave it out for {suites[0].name}")
        tasks = budget.choose(listed, options.budget_s, plan.quick)
    return Job(options, plan, suites, tuple(tasks), tuple(listed))


def refuse_without_ranks(job: Job) -> None:
    """Checks that there is something for ranks to do.

    Raises:
        UsageError: a suite that needs none.
    """
    if job.alone:
        name = job.suites[0].name
        raise UsageError(
            f"{name} needs no ranks, but a launcher has started some: run `dtbench run {name}` without it"
        )


def choose_device(options: RunOptions) -> str:
    """The device type to measure on.

    Raises:
        UsageError: --device cuda without CUDA.
    """
    if options.device == "cpu" or rehearsing():
        return "cpu"
    if gpus().count():
        return "cuda"
    if options.device == "cuda":
        raise UsageError(
            "--device cuda: torch finds no CUDA device here; expected a GPU, its driver and a CUDA build "
            "of torch; use --device cpu, or ask `dtbench doctor`"
        )
    return "cpu"


class Session:
    """This rank's part in one launch of a run. `go` never returns."""

    def __init__(self, options: RunOptions, place: Place, argv: Sequence[str]) -> None:
        self._options = options
        self._argv = argv
        self._launch = launch_number()
        self._output = output_of(options)
        self._began = float(os.environ.get(AGAIN) or time.monotonic())
        self._writer: RunWriter | None = None
        self._progress: Progress | None = None
        self._rank = Rank(place, self._report, self._launch)
        self._now = self._rank.now

    def go(self) -> NoReturn:
        """Measures and exits."""
        place = self._rank.place
        with self._rank as rank:
            job = prepare(self._options, choose_device(self._options), place.world_size)
            refuse_without_ranks(job)
            try:
                self._run(job)
            finally:
                if self._progress is not None:
                    self._progress.close()
        if self._launch + 1 < self._options.launches and not rank.ours:
            start_again(self._launch + 1, self._output)
        rank.exit()

    # ---- the run ----

    def _run(self, job: Job) -> None:
        rank = self._rank
        sends = any(task.suite.world == "ranks" for task in job.tasks)
        rank.join(
            job.plan.device_type, backend_of(job.plan.device_type, self._options.backend) if sends else None
        )
        if rank.place.rank == 0:
            self._writer = self._open(job, rank.infos)
        tasks = self._agree_on_tasks(job, rank.ranks)
        if rank.place.rank == 0:
            self._begin(job, tasks)
        sweep = Sweep(
            launch=self._launch,
            timeout_s=self._options.timeout_s,
            now=self._now,
            record=self._record,
            starting=self._starting,
            limit=rank.limit,
            go_on=self._go_on(tasks),
        )
        self._measure(job, tasks, sweep)
        rank.code = int(rank.ranks.agree(None, lambda votes: self._close(job)))

    def _measure(self, job: Job, tasks: Sequence[Task], sweep: Sweep) -> None:
        rank, quick = self._rank, job.plan.quick
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
        real = real or self._agree_on_more(job, rank.ranks)
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
                real = self._agree_on_more(job, rank.ranks)
                if not real:
                    break

    def _agree_on_more(self, job: Job, ranks: Ranks) -> list[Task]:
        """What the suites want to measure beyond their cases, as rank 0 finds from the file; names and
        params travel, and each rank builds the cases of them."""
        if not job.plan.refine:
            return []

        def decide(_votes: list[Any]) -> list[Any]:
            assert self._writer is not None and self._progress is not None
            results = read_run(self._output).results
            more = further_tasks(job.suites, job.plan, job.options.filter, results, self._launch)
            left = remaining(more, self._writer.done, self._launch)
            if left:
                self._progress.more(sum(len(task.impls) for task in left))
            return [[t.suite.name, t.case.name, dict(t.case.params), list(t.impls)] for t in left]

        suites = {suite.name: suite for suite in job.suites}
        tasks = []
        for name, case, params, impls in ranks.agree(None, decide):
            refinement = suites[name].refinement
            assert refinement is not None
            tasks.append(Task(suites[name], refinement.case(job.plan, case, params), tuple(impls)))
        return tasks

    def _agree_on_tasks(self, job: Job, ranks: Ranks) -> list[Task]:
        """What is left to measure, as rank 0 reads it from the file."""

        def decide(_votes: list[Any]) -> list[list[str]]:
            assert self._writer is not None
            left = remaining(job.tasks, self._writer.done, self._launch)
            impls = {id(task.case): list(task.impls) for task in left}
            return [impls.get(id(task.case), []) for task in job.tasks]

        # Ranks that list other cases would wait in different collectives.
        mine = [task.label for task in job.tasks] if ranks.size > 1 else []
        different = ranks.agree(
            hashlib.sha256("\n".join(mine).encode("utf-8", "replace")).hexdigest(),
            lambda votes: [r for r, v in enumerate(votes) if v != votes[0]],
        )
        if different:
            raise UsageError(
                f"ranks {different} list other cases than rank 0: expected the same suites and options on "
                f"every rank; a suite's cases may depend on its plan only"
            )
        chosen: list[list[str]] = ranks.agree(None, decide)
        return [
            Task(task.suite, task.case, tuple(impls))
            for task, impls in zip(job.tasks, chosen, strict=True)
            if impls
        ]

    # ---- rank 0's file and terminal ----

    def _open(self, job: Job, infos: Sequence[Mapping[str, Any]]) -> RunWriter:
        if self._launch > 0 or os.environ.get(AGAIN):
            return RunWriter.resume(self._output)
        if self._options.resume:
            run = check_resume(job, self._output)
            if run.complete:
                self._rank.stop_all(say_complete(run))
        return open_run_file(job, self._argv, self._output, infos)

    def _go_on(self, tasks: Sequence[Task]) -> Callable[[Task, Any], bool]:
        """Whether --budget has time for a task, as rank 0 finds."""
        if self._options.budget_s is None:
            return lambda _task, _ranks: True
        deadlines = budget.Deadlines(tasks, self._began + self._options.budget_s)
        return lambda task, ranks: bool(
            ranks.agree(None, lambda _votes: deadlines.allows(task, time.monotonic()))
        )

    def _begin(self, job: Job, tasks: Sequence[Task]) -> None:
        self._progress = make_progress()
        plan = job.plan
        launches = self._options.launches
        total = sum(len(task.impls) for task in tasks)
        words = [
            f"{total} results to measure on {plan.world_size} {plan.device_type} ranks",
            f"({format_mesh(plan.mesh)}),",
            f"launch {self._launch + 1} of {launches}," if launches > 1 else "",
            f"into {self._output}:",
            budget.forecast(tasks, job.listed, plan.quick),
        ]
        self._progress.begin(" ".join(word for word in words if word), total)

    def _starting(self, task: Task) -> None:
        if self._rank.place.rank == 0:
            self._rank.note(case=self._now.as_json())
            if task.suite.world == "simulated":  # the other ranks do not see which case it is
                self._rank.store.set("now", json.dumps(self._now.as_json()))

    def _record(self, result: Result) -> None:
        assert self._writer is not None and self._progress is not None
        self._progress.result(self._writer.append(result))

    def _close(self, job: Job) -> int:
        """On rank 0, when all is measured: the end of the file and the last line. The exit code."""
        assert self._writer is not None and self._progress is not None
        last = self._launch + 1 >= self._options.launches
        if last:
            self._writer.end()
        self._writer.close()
        self._progress.close()
        run = read_run(self._output)
        code = exit_code_of(run)
        if last:
            left = remaining(job.listed, self._writer.done, self._launch)
            if self._options.budget_s is not None and left:
                say(f"left out for --budget: {budget.name_left_out(job.listed, left)}")
            if moved := self._writer.clock_moved_s:
                say(
                    f"the clock was set {format_seconds(abs(moved))} {'ahead' if moved > 0 else 'back'} meanwhile, or "
                    "the host slept: the file's stamps show it, its times are of another clock"
                )
            say(f"{self._output}: {summary_of(run.results)}")
        self._rank.note(code=code, reported=True, whole=True)
        return code

    # ---- failures ----

    def _report(self, diagnosis: Diagnosis) -> str | None:
        """On the lowest living rank, in a helper thread: the failed result, and the last line where no launcher of
        ours is to go on."""
        if self._progress is not None:
            with suppress(Exception):  # whatever the terminal does, the last line comes
                self._progress.close()
        goes_on = self._rank.ours and self._options.on_failure == "continue"
        return report_failure(diagnosis, self._case_in_hand(), self._output, self._writer, goes_on=goes_on)

    def _case_in_hand(self) -> Now:
        if not self._now.suite and self._rank.place.rank != 0:
            with suppress(RuntimeError, ValueError):  # rank 0 may have died in its simulated world
                store = self._rank.connect(False)
                if store.check(["now"]):
                    return Now(**json.loads(store.get("now")))
        return self._now


# --------------------------------------------------------------------------------- shared with the launcher


def output_of(options: RunOptions) -> Path:
    """The run file: -o, or a name by the time in the current folder."""
    if options.output is not None:
        return options.output
    given = os.environ.get(OUTPUT)
    return Path(given) if given else Path(time.strftime("run-%Y%m%dT%H%M%SZ.jsonl", time.gmtime()))


def exit_code_of(run: Run) -> int:
    """0, or 5 where a result failed or is wrong, or there is none."""
    good = run.results and all(r.status not in ("failed", "wrong") for r in run.results)
    return EXIT_OK if good else EXIT_CASE_FAILED


def check_resume(job: Job, output: Path) -> Run:
    """The run to go on with.

    Raises:
        UnreadableRunError: it is no run.
        UsageError: it was asked for something else.
    """
    run = read_run(output)
    refuse_other_run(run.header, job.plan, job.suite_names, job.options.launches, output)
    return run


def open_run_file(
    job: Job, argv: Sequence[str], output: Path, ranks: Sequence[Mapping[str, Any]]
) -> RunWriter:
    """The file of the run to go on with, or a new one. ranks: what each says of itself.

    Raises:
        OutputError: it cannot be written.
    """
    from dtbench.machine.provenance import provenance

    if job.options.resume:
        return RunWriter.resume(output, {"argv": mask_arguments(argv)})
    header = provenance(
        argv=argv,
        plan=job.plan,
        suites=job.suite_names,
        mesh=() if job.alone else job.plan.mesh,
        ranks=ranks,
        backend=None if job.alone else backend_of(job.plan.device_type, job.options.backend),
        launches=job.options.launches,
    )
    return RunWriter.create(output, header)


def say_complete(run: Run) -> int:
    """There is nothing to resume; the exit code."""
    say(f"{run.path} is complete already: {summary_of(run.results)}; nothing to go on with")
    return exit_code_of(run)


def report_failure(
    diagnosis: Diagnosis, now: Now, output: Path, writer: RunWriter | None = None, *, goes_on: bool = False
) -> str | None:
    """Records the case that was in hand as failed and prints the run's last line.

    goes_on: whether new ranks may follow; what happened to the case is then given back, not printed.
    """
    where = ""
    if now.suite and diagnosis.blames_case:
        where = f" during {now.label}"
        with suppress(DtbenchError, ValueError):
            _record_failed(diagnosis, now, output, writer)
    if where and goes_on:
        return f"{diagnosis.sentence}{where}"
    complain(f"{diagnosis.sentence}{where}: {say_kept(output)}")
    return None


def say_kept(output: Path) -> str:
    """`3 results are in x.jsonl; go on with --resume -o x.jsonl`."""
    try:
        count = len(read_run(output).results)
    except DtbenchError:
        return "nothing was measured"
    results = "1 result is" if count == 1 else f"{count} results are"
    return f"{results} in {output}; go on with --resume -o {output}"


def _record_failed(diagnosis: Diagnosis, now: Now, output: Path, writer: RunWriter | None) -> None:
    with contextlib.ExitStack() as stack:
        if writer is None:
            writer = stack.enter_context(RunWriter.resume(output))
        for impl in now.blamed:
            result = Result(
                suite=now.suite,
                name=now.name,
                impl=impl,
                params=now.params,
                status="failed",
                reason=diagnosis.sentence,
                rank=diagnosis.rank,
                launch=now.launch,
            )
            if result.key not in writer.done:
                writer.append(result)


# --------------------------------------------------------------------------------- the real instruments


def instruments_of(
    device: Any,
    *,
    barrier: Callable[[], None],
    budget: Any,
    clock_offset: Callable[[], Offset | None] = lambda: None,
) -> Instruments:
    """The clocks and the GPU's state of the device. barrier: of all ranks. budget: a `sampling.Budget`.
    clock_offset: see `Instruments`."""
    from dtbench.bench.clock import clocks_of
    from dtbench.machine import provenance as machine

    gpu_state = functools.partial(machine.gpu_state, device.index or 0) if is_gpu(device) else lambda: None
    return Instruments(clocks_of(device), barrier, budget, machine.boot_id(), gpu_state, clock_offset)
