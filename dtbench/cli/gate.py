"""`dtbench gate` on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dtbench.cli import options
from dtbench.engine.options import LAUNCH_TIMEOUT_S, parse_duration, split_target
from dtbench.suite.errors import EXIT_INTERRUPTED, OutputError, complain, plain

if TYPE_CHECKING:
    from dtbench.gate.comment import PullRequest
    from dtbench.records.gate import Gate


class _Gate(options.AdvancedCommand):
    first = ("--base", "--head", "--impl", "--budget", "--allow-new", "-o", "--resume", "--comment", "--json")


@click.command("gate", cls=_Gate)
@click.argument("words", nargs=-1, metavar="[SUITE/TEXT]...")
@click.option(
    "--base",
    required=True,
    metavar="ARM",
    help="What is compared with: rev:REVISION, python:PATH or env:A=1,B=2.",
)
@click.option("--head", required=True, metavar="ARM", help="What is judged.")
@click.option(
    "--impl",
    "impls",
    metavar="LIST",
    type=lambda text: tuple(filter(None, text.split(","))),
    default="",
    show_default="all",
    help="Judge these implementations only, such as core.",
)
@options.MESH
@options.NPROC
@options.DEVICE
@options.SIZE
@options.DTYPE
@click.option("--budget", "budget_s", metavar="TIME", type=parse_duration, help="At most so long: 5m, 90s.")
@click.option(
    "--launch-timeout", "timeout_s", default=LAUNCH_TIMEOUT_S, metavar="SECONDS", help="Per launch."
)
@click.option("--allow-new", is_flag=True, help="Benchmarks that base lacks are no fault.")
@click.option(
    "--counters",
    type=click.Choice(["judge", "report"]),
    default="judge",
    help="Whether doing more per call (Python calls, allocations, collectives) is a regression.",
)
@click.option("--seed", type=int, show_default="another each time", help="Of the order of the launches.")
@click.option(
    "-o",
    "--output",
    "folder",
    type=options.FILE,
    show_default="gate-TIME",
    help="The folder to make, for the launches, gate.json, junit.xml and smaller-is-better.json, which "
    "github-action-benchmark reads.",
)
@options.EXPORT
@click.option(
    "--comment", is_flag=True, help="In a GitHub job of a pull request: post the verdict there, or renew it."
)
@click.option("--resume", is_flag=True, help="Go on with the gate in -o FOLDER.")
@options.JSON
@click.option("--history", type=options.FILE, help="Folder of earlier results: show change points.")
@click.option("--record", is_flag=True, help="Append head's times to --history.")
def gate_command(
    words: tuple[str, ...],
    base: str,
    head: str,
    as_json: bool,
    history: Path | None,
    record: bool,
    exports: tuple[tuple[str, Path], ...],
    comment: bool,
    **given: Any,
) -> int:
    """Is HEAD slower than BASE? As many launches of both as it takes.

    They take turns in random order.

    \b
    An ARM is rev:origin/main (a git revision), python:PATH (another build of
    torch) or env:NCCL_ALGO=Ring (variables; `env:` alone changes nothing).
    Exit codes: 0 no regression, 1 regression, 2 usage, 3 inconclusive or not to
    be trusted, 4 a benchmark is in one arm only, 5 a benchmark or arm failed.

    \b
    Examples:
      dtbench gate --base rev:origin/main --head rev:HEAD dispatch/add
      dtbench gate --base env: --head env:NCCL_ALGO=Ring collectives/all_reduce
    """
    import signal

    from dtbench.gate.benchmark import Selection
    from dtbench.gate.comment import PullRequest
    from dtbench.gate.gate import GateOptions, gate
    from dtbench.gate.history import look_at

    if record and history is None:
        raise click.UsageError("--record needs --history FOLDER: where to append")
    if history is not None:
        look_at(history, record=record)
    options = GateOptions(base, head, tuple(Selection(*split_target(word)) for word in words), **given)
    pull_request = PullRequest.of_job() if comment else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a cancelled job cleans up as Ctrl-C does
    try:
        report = gate(options, _say)
    except KeyboardInterrupt:
        complain("interrupted" + (f"; go on with --resume -o {options.folder}" if options.folder else ""))
        return EXIT_INTERRUPTED
    _tell(report, as_json, exports, history, record, pull_request)
    return report.exit_code


def _say(text: str) -> None:
    click.echo(f"gate: {plain(text)}", err=True)


def _tell(
    report: Gate,
    as_json: bool,
    exports: Sequence[tuple[str, Path]],
    history: Path | None,
    record: bool,
    pull_request: PullRequest | None,
) -> None:
    """Everywhere it is wanted."""
    from dtbench.gate import outputs
    from dtbench.gate.gate import publish
    from dtbench.records.exports import write_exports

    publish(report, as_json)
    write_exports(outputs.points_of(report), exports)
    if history is not None:
        from dtbench.gate.history import follow

        for line in follow(history, report, record=record):
            click.echo(line, err=as_json)
    if pull_request is not None:
        try:
            _say(f"the verdict is at {pull_request.publish(outputs.markdown(report))}")
        except OutputError as error:  # the verdict is the gate's, whether GitHub takes it or not
            complain(str(error))
