"""`dtbench gate` on the command line."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from dtbench.cli import options
from dtbench.engine.options import LAUNCH_TIMEOUT_S, RunRequest, parse_duration, split_target
from dtbench.errors import EXIT_INTERRUPTED, OutputError, plain, print_error
from dtbench.suite.mesh import Mesh

if TYPE_CHECKING:
    from dtbench.records.gate import Gate


class GateCommand(options.AdvancedCommand):
    first = ("--base", "--head", "--impl", "--budget", "--allow-new", "-o", "--json")


@click.command("gate", cls=GateCommand)
@click.argument("words", nargs=-1, metavar="[SUITE/TEXT]...")
@click.option(
    "--base",
    required=True,
    metavar="ARM",
    help="The side to compare with: rev:REVISION, python:PATH, env:A=1,B=2 or backend:NAME.",
)
@click.option("--head", required=True, metavar="ARM", help="The side to check.")
@click.option(
    "--impl",
    "impls",
    metavar="LIST",
    type=lambda text: tuple(filter(None, text.split(","))),
    default="",
    show_default="all",
    help="Compare only these implementations, such as core.",
)
@options.MESH
@options.NPROC
@options.DEVICE
@options.SIZE
@options.DTYPE
@click.option("--budget", "budget_s", metavar="TIME", type=parse_duration, help="Time limit: 5m, 90s.")
@click.option(
    "--launch-timeout", "timeout_s", default=LAUNCH_TIMEOUT_S, metavar="SECONDS", help="Limit per launch."
)
@click.option("--allow-new", is_flag=True, help="Accept benchmarks that base does not have.")
@click.option(
    "--counters",
    type=click.Choice(["judge", "report"]),
    default="judge",
    help="Whether more operations per call (Python calls, allocations, collectives) are a regression.",
)
@click.option("--seed", type=int, show_default="random", help="Seed of the order of launches.")
@click.option(
    "-o",
    "--output",
    "folder",
    type=options.FILE,
    show_default="gate-TIME",
    help="The folder to create for gate.json, junit.xml, smaller-is-better.json (for github-action-benchmark) "
    "and the output of launches.",
)
@options.EXPORT
@options.JSON
@click.option(
    "--history", type=options.FILE, help="Folder to which head's times are appended, for `dtbench report`."
)
def gate_command(
    words: tuple[str, ...],
    base: str,
    head: str,
    mesh: Mesh | None,
    nproc: int | None,
    device: Literal["auto", "cpu", "cuda"],
    sizes_bytes: tuple[int, ...] | None,
    dtypes: tuple[str, ...],
    as_json: bool,
    history: Path | None,
    exports: options.Exports,
    **choices: Any,
) -> int:
    """Checks whether HEAD is slower than BASE.

    Starts both repeatedly, in random order, until each benchmark has a verdict.

    \b
    An ARM is rev:origin/main (a git revision), python:PATH (another build of
    torch), env:NCCL_ALGO=Ring (variables; `env:` alone changes nothing) or
    backend:NAME (as in run --backend).
    Exit codes: 0 no regression, 1 regression, 2 usage, 3 inconclusive or
    untrusted, 4 a benchmark is in one arm only, 5 a benchmark or arm failed.

    \b
    Examples:
      dtbench gate --base rev:origin/main --head rev:HEAD dispatch/add
      dtbench gate --base env: --head env:NCCL_ALGO=Ring collectives/all_reduce
      dtbench gate --base backend:nccl-legacy --head backend:nccl2 collectives
    """
    import signal

    from dtbench.gate import outputs
    from dtbench.gate.benchmark import SuiteSelection
    from dtbench.gate.gate import gate
    from dtbench.gate.history import append, history_file
    from dtbench.gate.options import GateOptions
    from dtbench.records.exports import write_exports

    options = GateOptions(
        base,
        head,
        tuple(SuiteSelection(*split_target(word)) for word in words),
        RunRequest(mesh=mesh, nproc=nproc, device=device, sizes_bytes=sizes_bytes, dtypes=dtypes),
        **choices,
    )
    history_path = None if history is None else history_file(history)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cancelled CI job cleans up as after Ctrl-C
    try:
        report = gate(options, _say)
    except KeyboardInterrupt:
        print_error("interrupted")
        return EXIT_INTERRUPTED
    _publish(report, as_json)
    write_exports(outputs.gate_points(report), exports)
    if history_path is not None:
        _say(
            f"head's times are in {history_path}"
            if append(history_path, report)
            else f"no times to append to {history_path}"
        )
    return report.exit_code


def _say(text: str) -> None:
    click.echo(f"gate: {plain(text)}", err=True)


def _publish(report: "Gate", as_json: bool) -> None:
    """Prints the result and, in a GitHub job, appends it to the summary."""
    from dtbench.gate import outputs
    from dtbench.records.gate import encode_gate

    for line in [encode_gate(report)] if as_json else outputs.lines(report):
        click.echo(line)
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(summary).open("a", encoding="utf-8") as file:
                file.write(outputs.markdown(report))
        except OSError as error:
            raise OutputError(f"cannot append to GITHUB_STEP_SUMMARY: {error.strerror or error}") from error
