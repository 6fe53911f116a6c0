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
    metavar="TOPOLOGY",
    help="What `dtbench calibrate` wrote: also name the mesh dims that are slower.",
)
@click.option("--timeout", "timeout_s", default=60.0, metavar="SECONDS", help="For all of it; then it ends.")
@options.JSON
def preflight_command(expect: Path | None, as_json: bool, **choices: options.Given) -> int:
    """Which link, host or rank is slower than its peers.

    Pairs of ranks, the collectives of each mesh dim, computation and copies, in seconds; what looks slow is measured
    again before it is named. Joins the ranks of torchrun or srun, or starts its own. Exits with 1 where
    something is slow, with 3 where it has no peers, and leaves nothing behind.

    \b
    Examples:
      dtbench preflight --nproc 4
      torchrun --nproc-per-node 8 --no-python dtbench preflight --mesh dp=2,tp=4
      srun dtbench preflight --expect topology.json
    """
    from dtbench.engine.options import RunRequest
    from dtbench.preflight.preflight import preflight

    return preflight(RunRequest(**choices), expect, as_json, sys.argv[1:])
