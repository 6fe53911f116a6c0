"""`dtbench preflight` on the command line."""

from __future__ import annotations

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
@click.option("--timeout", "timeout_s", default=60.0, metavar="SECONDS", help="Limit of the whole check.")
@options.JSON
def preflight_command(expect: Path | None, as_json: bool, **choices: options.Given) -> int:
    """Finds links, hosts and ranks slower than their peers.

    Pairs of ranks, the collectives of each mesh dim, computation and copies, in seconds; suspects are measured again
    before they are reported. Joins the ranks of torchrun or srun, or starts its own. Exits with 1 where something
    is slow, with 3 where it has no peers, and writes no files.

    \b
    Examples:
      dtbench preflight --nproc 4
      torchrun --nproc-per-node 8 --no-python dtbench preflight --mesh dp=2,tp=4
      srun dtbench preflight --expect topology.json
    """
    from dtbench.engine.options import RunRequest
    from dtbench.preflight.preflight import PreflightRequest, preflight

    return preflight(PreflightRequest(RunRequest(**choices), expect, as_json))
