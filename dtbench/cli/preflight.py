"""`dtbench preflight` on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dtbench.cli import options


@click.command("preflight")
@options.MESH
@options.NPROC
@options.DEVICE
@click.option(
    "--expect",
    type=options.FILE,
    metavar="FILE|MACHINE",
    help="A topology, an earlier preflight's JSON, or a machine of `plan --machines`: also name what is slower.",
)
@click.option("--timeout", "timeout_s", default=60.0, metavar="SECONDS", help="For all of it; then it ends.")
@click.option(
    "-o",
    "--output",
    "outputs",
    type=options.FILE,
    multiple=True,
    help="A .html page, .json or JUnit .xml; repeatable.",
)
@options.JSON
def preflight_command(
    outputs: tuple[Path, ...], expect: Path | None, as_json: bool, **given: options.Given
) -> int:
    """Which link, host or rank is slower than its peers.

    Pairs of ranks, the collectives of each mesh dim, computation and copies, in seconds; what looks slow is measured
    again before it is named. Joins the ranks of torchrun or srun, or starts its own. Exits with 1 where
    something is slow, and leaves nothing behind.

    \b
    Examples:
      dtbench preflight --nproc 4
      torchrun --nproc-per-node 8 --no-python dtbench preflight --mesh dp=2,tp=4
      srun dtbench preflight --expect topology.json -o preflight.html
      torchrun --nproc-per-node 8 --no-python dtbench preflight --expect h100-8x
    """
    from dtbench.engine.options import RunRequest
    from dtbench.preflight.show import check_outputs

    check_outputs(outputs)
    from dtbench.preflight.preflight import Request, preflight

    return preflight(Request(RunRequest(**given), outputs, expect, as_json, sys.argv[1:]))
