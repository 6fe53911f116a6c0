"""`dtbench run` and `list` on the command line."""

from __future__ import annotations

import sys
from typing import Any

import click

from dtbench import flags
from dtbench.bench import flags as of_runs
from dtbench.bench.options import (
    CALIBRATION_LAUNCHES,
    DEFAULT_CPU_RANKS,
    RunOptions,
    list_tasks,
    parse_duration,
    parse_size,
    split_words,
)
from dtbench.suite import load, read_builtin


class _WithSuites(click.Command):
    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """The suites stand below the options."""
        with formatter.section("Suites"):
            formatter.write_dl(list(read_builtin().items()))


@click.command(
    "run", cls=_WithSuites, context_settings={"ignore_unknown_options": True}
)  # suites have some, too
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[SUITE]...")
@of_runs.IMPL
@of_runs.MESH
@of_runs.NPROC
@of_runs.DEVICE
@of_runs.SIZE
@click.option(
    "--max-size",
    "max_size_bytes",
    metavar="SIZE",
    type=parse_size,
    help="A run to calibrate with: the largest payload you plan. Sweeps go from 1 KiB to it by 4x, with "
    "--refine and --launches 5.",
)
@click.option(
    "--refine/--no-refine",
    default=None,
    show_default="with --max-size",
    help="Measure further sizes where neighbours miss a size between them by over 10 % and over its noise "
    "(collectives, redistribute).",
)
@of_runs.DTYPE
@of_runs.FILTER
@click.option("--quick", is_flag=True, help="Fewer sizes and samples.")
@click.option(
    "--launches",
    type=int,
    metavar="K",
    show_default=f"{CALIBRATION_LAUNCHES} with --max-size, else 1",
    help="Repeat everything in K fresh worlds.",
)
@click.option(
    "--budget",
    "budget_s",
    metavar="TIME",
    type=parse_duration,
    help="About so long: 3m, 90s. Every suite keeps its share, for the sizes and cases that say most.",
)
@of_runs.TIMEOUT
@click.option(
    "--on-failure",
    type=click.Choice(["continue", "stop"]),
    default="continue",
    help="Where a case hangs or kills a rank: record it and go on with new ranks, or end the run.",
)
@click.option("--resume", is_flag=True, help="Go on with the run in -o FILE.")
@click.option("-o", "--output", type=flags.FILE, show_default="run-TIME.jsonl", help="The run file to write.")
def run_command(words: tuple[str, ...], launches: int | None, **given: Any) -> int:
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

    suites, own = split_words(words)
    if launches is None:
        launches = 1 if given["max_size_bytes"] is None else CALIBRATION_LAUNCHES
    return run(RunOptions(suites=suites, suite_options=own, launches=launches, **given), sys.argv[1:])


@click.command("list")
@click.argument("suite", required=False)
@flags.JSON
def list_command(suite: str | None, as_json: bool) -> None:
    """The suites, or the cases of one, as 4 CPU ranks would measure them.

    \b
    Examples:
      dtbench list
      dtbench list collectives
    """
    import json

    if suite is None:
        known = read_builtin()
        if as_json:
            click.echo(json.dumps([{"suite": name, "help": text} for name, text in known.items()], indent=2))
        else:
            for name, text in known.items():
                click.echo(f"{name:{max(map(len, known))}}  {text}")
        return
    from dtbench.world.rank import quiet_torch

    quiet_torch()
    suites = load([suite])
    tasks = list_tasks(suites, RunOptions().plan("cpu", DEFAULT_CPU_RANKS))
    if as_json:
        listing = [
            {
                "suite": s.name,
                "world": s.world,
                "help": s.help,
                "cases": [
                    {"name": t.case.name, "params": dict(t.case.params), "impls": list(t.impls)}
                    for t in tasks
                    if t.suite is s
                ],
            }
            for s in suites
        ]
        click.echo(json.dumps(listing, indent=2))
        return
    for name, text in suites[0].options.items():
        click.echo(f"--{name}: {text}")
    for task in tasks:
        click.echo(f"{task.label}  [{', '.join(task.impls)}]")
