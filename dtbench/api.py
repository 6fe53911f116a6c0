"""The Python API: measure, read, compare, calibrate and report, in a program or a notebook.

`import dtbench` provides these functions. It imports neither torch nor pandas until a function needs them.
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
    from dtbench.engine.rank_votes import LiveWorld, RankGroup
    from dtbench.stats.frame import Runs

Function = Callable[[], object]
_calls = itertools.count()
# Duration of one sample of a function, seconds: long compared with a clock read and a cold first call (about 5 us), and
# short enough for a hundred samples.
SAMPLE_S = 2e-3
# Seconds of sampling per function, and the least and largest number of samples; slow functions take longer.
SAMPLES_S, FEWEST, MOST = 0.25, 10, 100
# A time is called scattered if the interquartile range exceeds this share of the median. torch.utils.benchmark warns
# at the same 10 % (`Measurement.meets_confidence`).
SCATTERED = 0.10


@dataclasses.dataclass(frozen=True)
class Results(Run):
    """A run that prints as a table, also in a notebook."""

    def __repr__(self) -> str:
        from dtbench.engine.progress import format_status_counts

        return f"<Results {self.path}: {format_status_counts(self.results)}>"

    def __str__(self) -> str:
        from dtbench.reporting.run_tables import tables_of

        return tables_of(self)

    def plot(self, suite: str | None = None, *, y: str = "time", ax: Axes | None = None) -> Axes:
        """Plots a suite: curves over size if it sweeps sizes, else one row per case with a point per implementation.

        Args:
            suite: name of the suite; required if the run has several.
            y: "time" (with the samples' upper quartile), "algbw" or "busbw".
            ax: axes to draw on; None makes a figure.

        Raises:
            UsageError: there is nothing to plot, or several suites and none is chosen.
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
        columns = [
            *("suite", "name", "impl"),
            *(name for name in frame.columns if name.startswith(PARAM)),
            *("status", "time", "spread", "busbw", "reason"),
        ]
        return str(
            frame[[name for name in columns if name in frame]]
            .dropna(axis="columns", how="all")
            .to_html(index=False, max_rows=60, na_rep="")
        )


def run(
    target: str | Path | Suite | Function | Mapping[str, Function] | Sequence[str | Path],
    *,
    nproc: int | None = None,
    output: str | Path | None = None,
    progress: bool = True,
    clock: Literal["host", "device"] = "device",
    timeout_s: float = 60.0,
    **options: object,
) -> Results:
    """Measures suites or functions.

    Suites given by name or file run on `nproc` ranks of their own, like `dtbench run`. Functions and `Suite` objects
    run in this process. If torch.distributed is initialised, all ranks of the default group must make this call, and
    all receive the results. Several functions are sampled in turns; a sample is the mean of as many calls as take 2 ms.

    Args:
        target: names of suites, paths of suite files, a `Suite`, a function without arguments, or a mapping of names to
            functions.
        nproc: number of ranks to start, for suites given by name or file.
        output: run file to write; None keeps the results in memory.
        progress: whether to show a progress line.
        clock: for functions: "host" times the calling thread, "device" the work that it starts.
        timeout_s: limit per case, seconds.
        options: for suites given by name or file: options of `dtbench run`, e.g. mesh="dp=2,tp=2",
            size="1KiB:1MiB:4x", impl="core", quick=True, launches=5.

    Raises:
        UsageError: invalid options.
        OutputError: `output` exists or cannot be written.
        WorldBrokenError: ranks were lost before anything was measured; or a call raised on this rank of a process
            group, and the other ranks did not arrive within `timeout_s`.
    """
    if isinstance(target, (str, Path)) or (isinstance(target, Sequence) and target):
        names = [target] if isinstance(target, (str, Path)) else target
        options = {"nproc": nproc, "timeout": timeout_s, **options}
        return _run_in_ranks([str(name) for name in names], options, output, progress)
    if nproc is not None or options:
        words = ", ".join([*(["nproc"] if nproc is not None else []), *options])
        raise UsageError(
            f"{words}: only for suites given by name or file; functions and Suite objects run in this "
            "process, or on the ranks of its process group"
        )
    if isinstance(target, Suite):
        return _run_here(target, output, progress, timeout_s)
    return _run_here(_suite_of(target, clock), output, progress, timeout_s, functions=True)


def load(path: str | Path) -> Results:
    """Reads a run file.

    Raises:
        UnreadableRunError: it is not a run file.
    """
    from dtbench.records.run import read_run

    return Results(**vars(read_run(path)))


def compare(base: Runs, head: Runs) -> Comparison:
    """Compares `head` with `base`, like `dtbench compare`.

    Args:
        base: a run, the path of a run file, or several of these, whose launches are pooled.
        head: the same.

    Raises:
        UnreadableRunError: a file is not a run.
    """
    from dtbench.comparison.run_comparison import compare_runs
    from dtbench.stats.frame import as_runs

    return compare_runs(as_runs(base), as_runs(head))


def calibrate(runs: Runs, output: str | Path | None = None) -> CalibratedTopology:
    """Fits the cost model to runs of the suites `collectives` and `redistribute`.

    Args:
        runs: a run, the path of a run file, or several of these.
        output: topology file to write.

    Raises:
        UsageError: there are no usable results, or the runs differ in machine, mesh or backend.
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
    results: Run | str | Path | Iterable[Run | str | Path],
    output: str | Path,
    *,
    base: Runs = (),
    topology: str | Path | None = None,
) -> Path:
    """Writes an HTML page of results. Returns its path.

    Args:
        results: runs, or paths of files that `dtbench report` accepts: run files, topologies, the JSON of a gate,
            profiles.
        output: page to write.
        base: runs to compare with.
        topology: topology file.

    Raises:
        UnreadableRunError: a file is of another kind.
        OutputError: the page cannot be written.
    """
    from dtbench.reporting.html import gather, write_report
    from dtbench.stats.frame import as_runs

    several = [results] if isinstance(results, (Run, str, Path)) else list(results)
    sources = gather(
        [Path(source) for source in several if not isinstance(source, Run)],
        (),
        None if topology is None else Path(topology),
    )
    runs = (*(source for source in several if isinstance(source, Run)), *sources.runs)
    write_report(dataclasses.replace(sources, runs=runs, baseline=tuple(as_runs(base))), Path(output))
    return Path(output)


def _run_in_ranks(
    names: Sequence[str], options: Mapping[str, object], output: str | Path | None, progress: bool
) -> Results:
    from dtbench.engine.rank_env import find_rank_env

    if find_rank_env() is not None:
        raise UsageError(
            "this process is a rank of a launcher: give functions or a Suite, which run in its process group, or "
            "start `dtbench run` with the launcher"
        )
    with tempfile.TemporaryDirectory(prefix="dtbench-") as folder:
        path = Path(folder) / "run.jsonl" if output is None else Path(output)
        code, last = _follow([*_command_words(names, options), "-o", str(path)], progress)
        if code not in (EXIT_OK, EXIT_CASE_FAILED) or not path.is_file():
            message = last.removeprefix("dtbench: ")
            error = UsageError(message) if code == UsageError.exit_code else DtbenchError(message)
            error.exit_code = code
            raise error
        return load(path)


def _command_words(names: Sequence[str], options: Mapping[str, object]) -> list[str]:
    """Returns the command line of options given as Python arguments; flags are True or False."""
    words = ["run", *names]
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            words += [f"--{dashed}"] if value else []
        elif value is not None:
            words += [f"--{dashed}", str(value)]
    return words


def _follow(words: Sequence[str], progress: bool) -> tuple[int, str]:
    """Runs dtbench as a child process and shows its output in one progress line.

    Forwards an interrupt, so that results are kept. Returns the exit code and the last line.
    """
    from dtbench.engine.progress import ProgressLine

    last, line, errors = "", ProgressLine(progress), []
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "dtbench", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # an interrupt of the terminal is forwarded below
    ) as process:
        assert process.stdout is not None
        try:
            for text in process.stdout:
                last = text.rstrip() or last
                if last.startswith("dtbench: "):
                    errors.append(last)  # raised by the caller if it ended the run
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


def _suite_of(target: object, clock: Literal["host", "device"]) -> Suite:
    functions = target if isinstance(target, Mapping) else {getattr(target, "__name__", "function"): target}
    wrong = [name for name, function in functions.items() if not callable(function)]
    if wrong or not functions:
        subject = wrong[0] if isinstance(target, Mapping) and wrong else target
        raise UsageError(
            f"{subject!r:.80} cannot be measured: expected the name or file of a suite, a Suite, a "
            f"function without arguments, or a mapping of names to such functions"
        )
    build = {
        str(name): (lambda _world, function=function: Workload(function))
        for name, function in functions.items()
    }
    name = next(iter(build)) if len(build) == 1 else "functions"
    return Suite(
        "functions",
        lambda _options: iter([Case(name, {}, build, clock=clock, sample_s=SAMPLE_S)]),
        "ranks",
        "functions of a program",
    )


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
    from dtbench.records.atomic import check_output_path

    with _world(suite, timeout_s) as (world, ranks, barrier):
        if output is not None and ranks.rank == 0:
            check_output_path(Path(output))
        device = world.device
        run_options = RunRequest().resolve("cuda" if device.type == "cuda" else "cpu", world.world_size)
        results: list[Result] = []
        header = build_header(
            argv=[],
            options=run_options,
            suites=[suite.name],
            mesh=run_options.mesh,
            ranks=ranks.agree(local_rank_info(str(device)), lambda votes: votes),
            backend=None,
            launches=1,
        )
        line = ProgressLine(progress and ranks.rank == 0)
        budget = (
            Budget(SAMPLES_S, FEWEST, MOST, SAMPLES_S)
            if functions
            else default_budget(suite.world, quick=False)
        )
        tools = make_instruments(device, barrier=barrier, budget=budget)

        def record(result: Result) -> None:
            results.append(_with_warnings(result) if functions else result)
            line.show(format_result(results[-1]))

        try:
            measure_tasks(
                [task for task in list_tasks([suite], run_options) if task.world == suite.world],
                world,
                ranks,
                tools,
                launch=0,
                timeout_s=timeout_s,
                active_case=ActiveCase(),
                record=record if ranks.rank == 0 else None,
            )
        finally:
            line.close()
        return _shared(header, results, ranks, output)


def _with_warnings(result: Result) -> Result:
    """Adds a warning if the samples are few or scattered, and the number of torch's threads as a counter."""
    import msgspec
    import torch

    counters = {**result.counters, "threads": torch.get_num_threads()}
    warnings = [result.reason] if result.reason else []
    if result.status == "ok" and (time_s := result.time_s) is not None:
        if time_s.n < FEWEST:
            warnings.append(f"only {time_s.n} samples, expected {FEWEST}: give it a larger timeout_s")
        spread = (time_s.p75 - time_s.p25) / time_s.median if time_s.median else 0.0
        if spread > SCATTERED:
            warnings.append(
                f"scattered: half of the samples span {spread:.0%} of the median; the load is {os.getloadavg()[0]:.1f} "
                f"on {os.cpu_count()} cores, and torch has {counters['threads']} threads: wait until the machine is "
                "quiet, or call torch.set_num_threads(1)"
            )
    return msgspec.structs.replace(result, counters=counters, reason="; ".join(warnings))


def _shared(
    header: Header, results: Sequence[Result], ranks: RankGroup, output: str | Path | None
) -> Results:
    """Returns rank 0's results on every rank, and writes them to the file."""
    import msgspec

    from dtbench.records.read import convert
    from dtbench.records.run import RunWriter

    head, *rows = ranks.agree(None, lambda _votes: [*map(msgspec.to_builtins, (header, *results))])
    path = Path(output) if output is not None else Path(f"{time.strftime('%H:%M:%S')} in memory")
    if output is not None and ranks.rank == 0:
        with RunWriter.create(path, header) as writer:
            for result in results:
                writer.append(result)
            writer.end()
    return Results(path, convert(head, Header), tuple(convert(row, Result) for row in rows), complete=True)


@contextlib.contextmanager
def _world(suite: Suite, timeout_s: float) -> Iterator[tuple[LiveWorld, RankGroup, Callable[[], None]]]:
    """Yields the world, rank group and barrier: of the existing process group, or of this rank alone."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    from dtbench.engine.rank_votes import (
        AloneRanks,
        LiveWorld,
        StoreRanks,
        make_barrier,
        simulated_world,
        world_of_one,
    )
    from dtbench.machine.device import gpus
    from dtbench.suite.mesh import default_mesh

    is_initialized = dist.is_initialized()
    on_gpu = gpus().count() and (not is_initialized or "nccl" in dist.get_backend())
    device = gpus().current() if on_gpu else torch.device("cpu")
    if suite.world == "simulated":
        if is_initialized:
            raise UsageError(
                f"{suite.name} simulates a process group, but this process has one: call "
                f"torch.distributed.destroy_process_group() first, or give the suite by name"
            )
        with simulated_world(device) as world:
            yield world, AloneRanks(), lambda: None
    elif is_initialized:
        size, rank = dist.get_world_size(), dist.get_rank()
        store = PrefixStore(f"dtbench/{next(_calls)}", dist.distributed_c10d._get_default_store())
        ranks: RankGroup = StoreRanks(store, rank, size, None, timedelta(seconds=timeout_s))
        yield LiveWorld(rank, size, device, default_mesh(size)), ranks, make_barrier(device)
    else:
        with world_of_one(device) as (world, barrier):
            yield world, AloneRanks(), barrier
