"""dtbench from Python: measure, read, compare, calibrate and report, in a program or a notebook.

`import dtbench` offers these by name and loads neither torch nor pandas until one that needs it is called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, DtbenchError, UsageError
from dtbench.records.result import Header, Result, Run
from dtbench.records.topology import CalibratedTopology
from dtbench.suite import Case, Workload
from dtbench.suite.registry import Suite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from dtbench.comparison.run_comparison import Comparison
    from dtbench.engine.ranks import LiveWorld, RankGroup
    from dtbench.stats.frame import Runs

Function = Callable[[], object]
_calls = itertools.count()
# A sample of a function: long against reading the clock and against what a cold first call costs, some 5 us, and short
# enough for a hundred of them.
SAMPLE_S = 2e-3
# Seconds of samples of each function, and how many at least; slow ones take longer than that.
SAMPLES_S, FEWEST, MOST = 0.25, 10, 100
# Half of the samples within this share of the median, or the figure is called scattered; torch.utils.benchmark warns
# from the same 10 % on (`Measurement.meets_confidence`).
SCATTERED = 0.10


@dataclasses.dataclass(frozen=True)
class Results(Run):
    """A run, which `print` and a notebook show as a table."""

    def __repr__(self) -> str:
        from dtbench.engine.progress import format_status_counts

        return f"<Results {self.path}: {format_status_counts(self.results)}>"

    def __str__(self) -> str:
        from dtbench.reporting.run_tables import tables_of

        return tables_of(self)

    def plot(self, suite: str | None = None, *, y: str = "time", ax: Axes | None = None) -> Axes:
        """Draws a suite with matplotlib: curves over size where it sweeps one, else a row per case, with a
        point per implementation.

        suite: which one, where there are several. y: time, up to the samples' upper quartile, algbw or busbw. ax: where
        to draw; None makes a figure.

        Raises:
            UsageError: nothing to draw, or several suites and none chosen.
        """
        from dtbench.reporting.plot import plot

        return plot(self.results, suite, y, ax)

    def _repr_html_(self) -> str:
        from dtbench.stats.frame import PARAM, results_frame
        from dtbench.text.units import format_bandwidth, format_seconds, format_spread

        frame = results_frame(self)
        frame["time"] = [format_seconds(r.estimate_s) for r in self.results]
        frame["spread"] = [format_spread(r.spread) for r in self.results]
        if frame["busbw_Bps"].notna().any():
            frame["busbw"] = [format_bandwidth(r.busbw_Bps) for r in self.results]
        params = [name for name in frame.columns if name.startswith(PARAM)]
        kept = ["suite", "name", "impl", *params, "status", "time", "spread", "busbw", "reason"]
        shown = frame[[name for name in kept if name in frame]].dropna(axis="columns", how="all")
        return str(shown.to_html(index=False, max_rows=60, na_rep=""))


def run(
    what: str | Path | Suite | Function | Mapping[str, Function] | Sequence[str | Path],
    *,
    nproc: int | None = None,
    output: str | Path | None = None,
    progress: bool = True,
    clock: Literal["host", "device"] = "device",
    timeout_s: float = 60.0,
    **options: object,
) -> Results:
    """Measures suites or functions.

    what: names of suites or paths of suite files: measured in `nproc` ranks of their own, as `dtbench run` does.
        A function without arguments, or several by name, which are sampled in turn, a sample being as many calls as
        last 2 ms, their mean; or a `Suite`: measured in this process. Where torch.distributed is initialised, all
        ranks of its default group have to make this call, and all of them get the results.
    output: the run file to write; without it the results are in memory only.
    progress: show how far it is, in one line that is renewed.
    clock: what a function's time is: "host", of the calling thread alone; "device", of the work it starts.
    timeout_s: of each case, seconds.
    options: of suites by name: those of `dtbench run`, such as mesh="dp=2,tp=2", size="1KiB:1MiB:4x",
        impl="core", quick=True, launches=5.

    Raises:
        UsageError: options that cannot be followed. OutputError: `output` exists or cannot be written.
        WorldBrokenError: ranks were lost before anything was measured; or a call raised on this rank of a process
            group, and the others, which may wait for it in a collective, did not come within `timeout_s`.
    """
    if isinstance(what, (str, Path)) or (isinstance(what, Sequence) and what):
        names = [what] if isinstance(what, (str, Path)) else what
        options = {"nproc": nproc, "timeout": timeout_s, **options}
        return _run_in_ranks([str(name) for name in names], options, output, progress)
    if nproc is not None or options:
        words = ", ".join([*(["nproc"] if nproc is not None else []), *options])
        raise UsageError(
            f"{words}: for suites by name or file; functions and suites given as objects are measured in this process, "
            "or in the ranks of its process group"
        )
    if isinstance(what, Suite):
        return _run_here(what, output, progress, timeout_s)
    return _run_here(_suite_of(what, clock), output, progress, timeout_s, functions=True)


def load(path: str | Path) -> Results:
    """Reads a run file.

    Raises:
        UnreadableRunError: it is none.
    """
    from dtbench.records.run import read_run

    return Results(**vars(read_run(path)))


def compare(base: Runs, new: Runs) -> Comparison:
    """What became slower or faster from `base` to `new`, as `dtbench compare` judges.

    base, new: a run, the path of a run file, or several of either, whose launches then count together.

    Raises:
        UnreadableRunError: a file that is no run.
    """
    from dtbench.comparison.compare_runs import compare_runs
    from dtbench.stats.frame import as_runs

    return compare_runs(as_runs(base), as_runs(new))


def calibrate(runs: Runs, output: str | Path | None = None) -> CalibratedTopology:
    """Fits the cost model to runs of the suites `collectives` and `redistribute`.

    output: the topology file to write, if any.

    Raises:
        UsageError: no usable results, or runs that are not of one machine, mesh and backend.
        OutputError: the file cannot be written.
    """
    from dtbench.cost import calibration
    from dtbench.records.topology import write_topology
    from dtbench.stats.frame import as_runs

    topology = calibration.calibrate(as_runs(runs))
    if output is not None:
        write_topology(topology, Path(output))
    return topology


def report(
    of: Run | str | Path | Iterable[Run | str | Path],
    output: str | Path,
    *,
    base: Runs = (),
    topology: str | Path | None = None,
) -> Path:
    """Writes one HTML page of what was measured; its path.

    of: runs, or paths of what `dtbench report` takes: run files, topologies, the JSON of a gate, profiles.
    base: what to compare the runs with.

    Raises:
        UnreadableRunError: a file that is none of these. OutputError: the page cannot be written.
    """
    from dtbench.reporting.html import gather, write_report
    from dtbench.stats.frame import as_runs

    several = [of] if isinstance(of, (Run, str, Path)) else list(of)
    runs = [one for one in several if isinstance(one, Run)]
    paths = [Path(one) for one in several if not isinstance(one, Run)]
    sources = gather(paths, (), None if topology is None else Path(topology))
    sources = dataclasses.replace(sources, runs=(*runs, *sources.runs), baseline=tuple(as_runs(base)))
    write_report(sources, Path(output))
    return Path(output)


def _run_in_ranks(
    names: Sequence[str], options: Mapping[str, object], output: str | Path | None, progress: bool
) -> Results:
    from dtbench.engine.rank_env import find_rank_env

    if find_rank_env() is not None:
        raise UsageError(
            "this process is a rank itself: give functions or a Suite, which are measured in its process group, or "
            "start `dtbench run` under the launcher"
        )
    with tempfile.TemporaryDirectory(prefix="dtbench-") as folder:
        path = Path(folder) / "run.jsonl" if output is None else Path(output)
        code, last = _follow([*_words(names, options), "-o", str(path)], progress)
        if code not in (EXIT_OK, EXIT_CASE_FAILED) or not path.is_file():
            message = last.removeprefix("dtbench: ")
            error = UsageError(message) if code == UsageError.exit_code else DtbenchError(message)
            error.exit_code = code
            raise error
        return load(path)


def _words(names: Sequence[str], options: Mapping[str, object]) -> list[str]:
    """The command line: names of options as Python spells them, switches as True or False."""
    words = ["run", *names]
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{dashed}"] if value else []
        elif value is not None:
            words += [f"--{dashed}", str(value)]
    return words


def _follow(words: Sequence[str], progress: bool) -> tuple[int, str]:
    """Runs dtbench in a process of its own and shows its lines, each in place of the one before; the exit code and
    the last line. An interrupt is handed on, so that what was measured is kept."""
    from dtbench.engine.progress import ProgressLine

    last, line, errors = "", ProgressLine(progress), []
    command = [sys.executable, "-P", "-m", "dtbench", *words]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # an interrupt of the terminal reaches it through us
    ) as process:
        assert process.stdout is not None
        try:
            for text in process.stdout:
                last = text.rstrip() or last
                if last.startswith("dtbench: "):
                    errors.append(last)  # what ends the run is raised; to show it too would be twice
                else:
                    line.show(last)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            raise
        finally:
            code = process.wait()
            for error in errors if code in (EXIT_OK, EXIT_CASE_FAILED) else ():
                line.show(error)
            line.close()
    return code, last


def _suite_of(what: object, clock: Literal["host", "device"]) -> Suite:
    functions = what if isinstance(what, Mapping) else {getattr(what, "__name__", "function"): what}
    wrong = [name for name, function in functions.items() if not callable(function)]
    if wrong or not functions:
        subject = wrong[0] if isinstance(what, Mapping) and wrong else what
        raise UsageError(
            f"{subject!r:.80} cannot be measured: expected the name or file of a suite, a Suite, a "
            f"function without arguments, or a mapping of names to such functions"
        )
    build = {
        str(name): (lambda _world, function=function: Workload(function))
        for name, function in functions.items()
    }
    name = next(iter(build)) if len(build) == 1 else "functions"
    cases = [Case(name, {}, build, clock=clock, sample_s=SAMPLE_S)]
    return Suite("functions", lambda _plan: iter(cases), "ranks", "functions of a program")


def _run_here(
    suite: Suite, output: str | Path | None, progress: bool, timeout_s: float, functions: bool = False
) -> Results:
    from dtbench.engine.failure import ActiveCase
    from dtbench.engine.options import RunRequest
    from dtbench.engine.progress import ProgressLine, format_result
    from dtbench.engine.sampling import Budget, default_budget, measure_tasks
    from dtbench.engine.session import make_instruments
    from dtbench.engine.tasks import list_tasks
    from dtbench.machine.provenance import build_header, local_rank_info
    from dtbench.records.atomic import refuse_taken

    with _world(suite, timeout_s) as (world, ranks, barrier):
        if output is not None and ranks.rank == 0:
            refuse_taken(Path(output))
        device = world.device
        plan = RunRequest().resolve("cuda" if device.type == "cuda" else "cpu", world.world_size)
        results: list[Result] = []
        infos = ranks.agree(local_rank_info(str(device)), lambda votes: votes)
        header = build_header(
            argv=[], options=plan, suites=[suite.name], mesh=plan.mesh, ranks=infos, backend=None, launches=1
        )
        line = ProgressLine(progress and ranks.rank == 0)
        of_functions = Budget(SAMPLES_S, FEWEST, MOST, SAMPLES_S)
        budget = of_functions if functions else default_budget(suite.world, quick=False)
        tools = make_instruments(device, barrier=barrier, budget=budget)

        tasks = list_tasks([suite], plan)
        try:
            for result in measure_tasks(
                tasks, world, ranks, tools, launch=0, timeout_s=timeout_s, active_case=ActiveCase()
            ):
                results.append(_with_doubts(result) if functions else result)
                line.show(format_result(results[-1]))
        finally:
            line.close()
        return _shared(header, results, ranks, output)


def _with_doubts(result: Result) -> Result:
    """With a warning where the samples of a function are few or scattered, and torch's threads as a counter."""
    import msgspec
    import torch

    counters = {**result.counters, "threads": torch.get_num_threads()}
    doubts = [result.reason] if result.reason else []
    if result.status == "ok" and (time_s := result.time_s) is not None:
        if time_s.n < FEWEST:
            doubts.append(f"only {time_s.n} samples, expected {FEWEST}: give it a larger timeout_s")
        spread = (time_s.p75 - time_s.p25) / time_s.median if time_s.median else 0.0
        if spread > SCATTERED:
            doubts.append(
                f"scattered: half of the samples span {spread:.0%} of the median; the load is {os.getloadavg()[0]:.1f} "
                f"on {os.cpu_count()} cores, and torch has {counters['threads']} threads: wait until the machine is "
                "quiet, or call torch.set_num_threads(1)"
            )
    return msgspec.structs.replace(result, counters=counters, reason="; ".join(doubts))


def _shared(
    header: Header, results: Sequence[Result], ranks: RankGroup, output: str | Path | None
) -> Results:
    """Rank 0's results on every rank, and in the file."""
    import msgspec

    from dtbench.records.read import into
    from dtbench.records.run import RunWriter

    lines = [msgspec.to_builtins(line) for line in (header, *results)]
    head, *rows = ranks.agree(None, lambda _votes: lines)
    path = Path(output) if output is not None else Path(f"{time.strftime('%H:%M:%S')} in memory")
    if output is not None and ranks.rank == 0:
        with RunWriter.create(path, header) as writer:
            for result in results:
                writer.append(result)
            writer.end()
    return Results(path, into(head, Header), tuple(into(row, Result) for row in rows), complete=True)


@contextlib.contextmanager
def _world(suite: Suite, timeout_s: float) -> Iterator[tuple[LiveWorld, RankGroup, Callable[[], None]]]:
    """The world of this process, the votes of its ranks and their barrier: of the process group that is there, else
    of this rank alone."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from dtbench.engine.ranks import (
        AloneRanks,
        LiveWorld,
        StoreRanks,
        make_barrier,
        simulated_world,
        world_of_one,
    )
    from dtbench.machine.device import gpus
    from dtbench.suite.mesh import default_mesh

    there = dist.is_initialized()
    on_gpu = gpus().count() and (not there or "nccl" in dist.get_backend())
    device = gpus().current() if on_gpu else torch.device("cpu")
    if suite.world == "simulated":
        if there:
            raise UsageError(
                f"{suite.name} simulates a process group, but this process has one: call "
                f"torch.distributed.destroy_process_group() before, or give the suite's name"
            )
        with simulated_world(device) as world:
            yield world, AloneRanks(), lambda: None
    elif there:
        size, rank = dist.get_world_size(), dist.get_rank()
        store = PrefixStore(f"dtbench/{next(_calls)}", dist.distributed_c10d._get_default_store())
        ranks: RankGroup = StoreRanks(store, rank, size, None, timedelta(seconds=timeout_s))
        yield LiveWorld(rank, size, device, default_mesh(size)), ranks, make_barrier(device)
    else:
        with world_of_one(device) as (world, barrier):
            yield world, AloneRanks(), barrier
