"""`dtbench run` and `list` on the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from dtbench import flags
from dtbench.bench import flags as of_runs
from dtbench.bench.options import (
    CALIBRATION_LAUNCHES,
    RunOptions,
    parse_duration,
    parse_size,
    split_words,
)
from dtbench.completion import suites
from dtbench.suite import read_builtin


class _WithSuites(click.Command):
    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The suites stand below the options."""
        with formatter.section("Suites"):
            formatter.write_dl(list(read_builtin().items()))


_OPTIONS = (
    click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SUITE]...", shell_complete=suites),
    of_runs.IMPL,
    of_runs.MESH,
    of_runs.NPROC,
    of_runs.DEVICE,
    of_runs.BACKEND,
    of_runs.SIZE,
    click.option(
        "--max-size",
        "max_size_bytes",
        metavar="SIZE",
        type=parse_size,
        help="A run to calibrate with: the largest payload you plan. Sweeps go from 1 KiB to it by 4x, with "
        "--refine and --launches 5.",
    ),
    click.option(
        "--refine/--no-refine",
        default=None,
        show_default="with --max-size",
        help="Measure further sizes where neighbours miss a size between them by over 10 % and over its noise "
        "(collectives, redistribute).",
    ),
    of_runs.DTYPE,
    of_runs.FILTER,
    click.option("--quick", is_flag=True, help="Fewer sizes and samples."),
    click.option(
        "--launches",
        type=int,
        metavar="K",
        show_default=f"{CALIBRATION_LAUNCHES} with --max-size, else 1",
        help="Repeat everything in K fresh worlds.",
    ),
    click.option(
        "--budget",
        "budget_s",
        metavar="TIME",
        type=parse_duration,
        help="About so long: 3m, 90s. Every suite keeps its share, for the sizes and cases that say most.",
    ),
    of_runs.TIMEOUT,
    click.option(
        "--on-failure",
        type=click.Choice(["continue", "stop"]),
        default="continue",
        help="Where a case hangs or kills a rank: record it and go on with new ranks, or end the run.",
    ),
    click.option("--resume", is_flag=True, help="Go on with the run in -o FILE."),
    click.option(
        "-o", "--output", type=flags.FILE, show_default="run-TIME.jsonl", help="The run file to write."
    ),
)


def _of_a_run(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of `run`, which `list` takes too."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.command(
    "run", cls=_WithSuites, context_settings={"ignore_unknown_options": True}
)  # suites have some, too
@_of_a_run
def run_command(words: tuple[str, ...], **given: Any) -> int:
    """Measures the suites, named or paths of .py files, into a run file.

    Starts its own ranks, or joins the world of torchrun or Slurm when started by them. A suite may have
    options of its own, which `dtbench list SUITE` shows.

    \b
    Examples:
      dtbench run --budget 3m
      dtbench run collectives --size 1KiB:16MiB:4x --nproc 4 -o run.jsonl
      dtbench run collectives redistribute --max-size 64MiB -o run.jsonl
    """
    from dtbench.bench.run import run

    return run(_options(words, **given), sys.argv[1:])


def _options(words: tuple[str, ...], launches: int | None, **given: Any) -> RunOptions:
    suites, own = split_words(words)
    if launches is None:
        launches = 1 if given["max_size_bytes"] is None else CALIBRATION_LAUNCHES
    return RunOptions(suites=suites, suite_options=own, launches=launches, **given)


@click.command("list", cls=_WithSuites, context_settings={"ignore_unknown_options": True})
@_of_a_run
@flags.JSON
@click.pass_context
def list_command(context: click.Context, /, as_json: bool, words: tuple[str, ...], **given: Any) -> None:
    """The suites; with a suite or an option of `run`, the cases that this run would measure.

    \b
    Examples:
      dtbench list
      dtbench list collectives --mesh dp=2,tp=2 --filter all_reduce
    """
    asked = any(context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in given)
    if not words and not asked:
        _list_suites(as_json)
        return
    from dtbench.bench.run import job_here

    job = job_here(_options(words, **given))
    if as_json:
        listing = [
            {
                "suite": s.name,
                "world": s.world,
                "help": s.help,
                "cases": [
                    {"name": t.case.name, "params": dict(t.case.params), "impls": list(t.impls)}
                    for t in job.tasks
                    if t.suite is s
                ],
            }
            for s in job.suites
        ]
        click.echo(json.dumps(listing, indent=2))
        return
    for suite in job.suites:
        for name, text in suite.options.items():
            click.echo(f"--{name}: {text}")
    for task in job.tasks:
        click.echo(f"{task.label}  [{', '.join(task.impls)}]")


def _list_suites(as_json: bool) -> None:
    known = read_builtin()
    if as_json:
        click.echo(json.dumps([{"suite": name, "help": text} for name, text in known.items()], indent=2))
        return
    for name, text in known.items():
        click.echo(f"{name:{max(map(len, known))}}  {text}")


NEW_SUITE = '''"""A suite of one's own: `dtbench run` measures what it yields."""

import torch
from dtbench.model import Case, Plan, Workload
from dtbench.suite import World, suite


@suite("{name}", world="ranks", help="a matrix product on every rank")
def cases(plan: Plan):
    for n in (256, 512):
        yield Case("matmul", {{"n": n}}, build={{"plain": lambda world, n=n: matmul(world, n)}})


def matmul(world: World, n: int) -> Workload:
    x = torch.randn(n, n, device=world.device)
    return Workload(run=lambda: x @ x)
'''


@click.command("new-suite")
@click.argument("file", type=flags.FILE)
def new_suite_command(file: Path) -> None:
    """Writes a suite of two cases to begin with.

    \b
    Example:
      dtbench new-suite mine.py && dtbench check-suite mine.py
    """
    from dtbench.files.atomic import refuse_taken, write_atomically

    if file.suffix != ".py" or not file.stem.isidentifier():
        raise click.UsageError(f"got {file}, expected the name of a Python module, such as mine.py")
    refuse_taken(file)
    write_atomically(file, NEW_SUITE.format(name=file.stem), lambda _head: False, "suite")
    click.echo(f"the suite is in {file}; `dtbench check-suite {file}` tries it")


@click.command("check-suite")
@click.argument("file", type=flags.FILE)
@click.option("--nproc", type=click.IntRange(1), default=2, help="Ranks to start.")
@click.pass_context
def check_suite_command(context: click.Context, /, file: Path, nproc: int) -> int:
    """Builds and runs each case of a suite file once, shortly, and says what is wrong.

    \b
    Example:
      dtbench check-suite mine.py
    """
    from dtbench.bench.run import run
    from dtbench.scratch import scratch

    if file.suffix != ".py":
        raise click.UsageError(f"got {file}, expected the .py file of a suite")
    with scratch() as folder:
        words = [str(file), "--quick", "--nproc", str(nproc), "-o", str(folder / "check.jsonl")]
        given = run_command.make_context("run", list(words)).params
        return run(_options(**given), ["run", *words])
