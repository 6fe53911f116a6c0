"""`dtbench run` and `list` on the command line."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import click

from dtbench.cli import options
from dtbench.engine.options import (
    CALIBRATION_LAUNCHES,
    RunRequest,
    parse_duration,
    parse_size,
    parse_sizes,
    split_words,
)
from dtbench.errors import UsageError
from dtbench.suite.registry import read_builtin

# Suites, and the values of options that suites declare.
_Words = tuple[tuple[str, ...], dict[str, str]]

# Options that may change with --resume, since no result depends on them.
_CHANGEABLE_ON_RESUME = {"resume", "output", "budget_s", "timeout_s", "on_failure", "brief", "save_baseline"}
# Options that help shows first.
_FIRST = ("--mesh", "--nproc", "--size", "--dtype", "--filter", "--budget")


class _Run(options.AdvancedCommand):
    first: tuple[str, ...] = (*_FIRST, "--launches", "--resume", "--output")

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the suites below the options."""
        with formatter.section("Suites"):
            formatter.write_dl(list(read_builtin().items()))


class _List(_Run):
    first: tuple[str, ...] = (*_FIRST, "--json")


_OPTIONS = (
    click.argument(
        "words",
        nargs=-1,
        type=click.UNPROCESSED,
        metavar="[SUITE[/TEXT]]...",
        callback=lambda _context, _parameter, words: split_words(words),
    ),
    options.IMPL,
    options.MESH,
    options.NPROC,
    options.DEVICE,
    options.BACKEND,
    options.SIZE,
    click.option(
        "-b", "--minbytes", metavar="SIZE", help="As in nccl-tests: the smallest size; requires -e."
    ),
    click.option(
        "-e", "--maxbytes", metavar="SIZE", help="As in nccl-tests: the largest size; 128M is 2^27 bytes."
    ),
    click.option(
        "-f",
        "--stepfactor",
        metavar="N",
        type=click.IntRange(2),
        default=2,
        help="As in nccl-tests: the factor from one size to the next.",
    ),
    click.option(
        "--max-size",
        "max_size_bytes",
        metavar="SIZE",
        type=parse_size,
        help="For a calibration run: the largest payload you plan. Sweeps go from 1 KiB to SIZE by 4x, with --refine "
        f"and --launches {CALIBRATION_LAUNCHES}.",
    ),
    click.option(
        "--refine/--no-refine",
        default=None,
        show_default="with --max-size",
        help="Add sizes between two sizes if interpolating between them errs by over 10 % and by more than the noise "
        "(collectives, redistribute).",
    ),
    options.DTYPE,
    options.FILTER,
    click.option("--quick", is_flag=True, help="Fewer sizes and samples."),
    click.option(
        "--launches",
        type=int,
        metavar="K",
        show_default=f"{CALIBRATION_LAUNCHES} with --max-size, else 1",
        help="Repeat everything K times, each with newly started ranks.",
    ),
    click.option(
        "--budget",
        "budget_s",
        metavar="TIME",
        type=parse_duration,
        help="Measure for about this time, e.g. 3m or 90s. Every suite keeps its share of the time. A curve gets at "
        "least three sizes or none.",
    ),
    options.TIMEOUT,
    click.option(
        "--on-failure",
        type=click.Choice(["continue", "stop"]),
        default="continue",
        help="After a hang or a lost rank: continue with new ranks, or stop.",
    ),
    click.option("--brief", is_flag=True, hidden=True, help="At the end print only the counts."),
    click.option(
        "--resume",
        is_flag=True,
        help="Continue the run in -o FILE with the options it was started with. If FILE does not exist, start it. "
        "--budget may differ.",
    ),
    click.option(
        "--save-baseline",
        metavar="NAME",
        help="Keep the run in .dtbench/baselines, for `dtbench compare NAME RUN`.",
    ),
    click.option(
        "-o", "--output", type=options.FILE, show_default="run-TIME.jsonl", help="The run file to write."
    ),
)


def _add_run_options(command: Callable[..., object]) -> Callable[..., object]:
    """Adds the options of `run` to a command. `list` has the same options."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


# Suites declare further options.
@click.command("run", cls=_Run, context_settings={"ignore_unknown_options": True})
@_add_run_options
@click.pass_context
def run_command(context: click.Context, /, words: _Words, **values: options.OptionValue) -> int:
    """Measures suites and writes the results to a run file.

    SUITE is a name or the path of a .py file. SUITE/TEXT measures only the cases whose line in `dtbench list SUITE`
    contains TEXT. Starts its own ranks, or joins those of torchrun, srun or mpirun if started by them. A suite may have
    options of its own, which `dtbench list SUITE` shows.

    \b
    Examples:
      dtbench run --budget 3m
      dtbench run dispatch/add my_suite.py
      dtbench run collectives --size 1KiB:16MiB:4x --nproc 4 -o run.jsonl
      dtbench run collectives redistribute --max-size 64MiB -o run.jsonl
    """
    from dtbench.engine.launch import run

    argv = sys.argv[1:]
    if values["resume"] and values["output"] is not None and options.typed(context) <= _CHANGEABLE_ON_RESUME:
        argv = _original_argv(values["output"])
        original = run_command.make_context("run", argv[1:], parent=context.parent)
        words, values = original.params.pop("words"), original.params
    return run(options_of(words, **values), argv)


def _original_argv(output: Path) -> list[str]:
    """Returns the command line that began the run, followed by the options of this one, which take precedence.

    Raises:
        UnreadableRunError: the file is not a run.
        UsageError: the file does not have the complete command.
    """
    from dtbench.records.run import read_header
    from dtbench.text.masking import is_unmasked

    argv = read_header(output).argv
    if argv[:1] != ("run",) or not is_unmasked(argv):
        raise UsageError(
            f"{output} does not have the complete command that began it: repeat its suites and options with --resume"
        )
    return [*argv, *sys.argv[2:]]


def options_of(
    words: _Words,
    launches: int | None,
    minbytes: str | None,
    maxbytes: str | None,
    stepfactor: int,
    **values: options.OptionValue,
) -> RunRequest:
    if minbytes is not None or maxbytes is not None:
        if minbytes is None or maxbytes is None or values["sizes_bytes"] is not None:
            raise UsageError(
                "-b and -e require each other and exclude --size: expected the smallest and the largest size, such as "
                "-b 8 -e 128M -f 2"
            )
        # In nccl-tests, K, M and G are powers of 1024 (src/common.cu, parsesize).
        first, last = (re.sub(r"(?<=\d)[KMGkmg]$", r"\g<0>iB", text) for text in (minbytes, maxbytes))
        if parse_size(first) > parse_size(last):
            raise UsageError(f"-b {minbytes} is above -e {maxbytes}: swap them")
        values["sizes_bytes"] = parse_sizes(f"{first}:{last}:{stepfactor}x")
    if launches is None:
        launches = 1 if values["max_size_bytes"] is None else CALIBRATION_LAUNCHES
    return RunRequest(suites=words[0], suite_options=words[1], launches=launches, **values)


@click.command("list", cls=_List, context_settings={"ignore_unknown_options": True})
@_add_run_options
@options.JSON
@click.pass_context
def list_command(
    context: click.Context,
    /,
    as_json: bool,
    words: _Words,
    **values: options.OptionValue,
) -> None:
    """Lists suites, or the cases that `run` would measure.

    \b
    Examples:
      dtbench list
      dtbench list collectives/all_reduce --mesh dp=2,tp=2
    """
    if not options.typed(context) - {"as_json"}:
        _list_suites(as_json)
        return
    from dtbench.engine.selection import select

    selection = select(options_of(words, **values))
    tasks = selection.affordable(selection.tasks)
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
            for s in selection.suites
        ]
        click.echo(json.dumps(listing, indent=2))
        return
    for suite in selection.suites:
        for name, text in suite.options.items():
            click.echo(f"--{name}: {text}")
    for task in tasks:
        click.echo(f"{task.label}  [{', '.join(task.impls)}]")


def _list_suites(as_json: bool) -> None:
    suites = read_builtin()
    if as_json:
        click.echo(json.dumps([{"suite": name, "help": text} for name, text in suites.items()], indent=2))
    else:
        for name, text in suites.items():
            click.echo(f"{name:{max(map(len, suites))}}  {text}")
