"""`dtbench preflight` on the command line."""

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
    help="Topology of `dtbench calibrate`. Mesh dims slower than in it are reported, too.",
)
@click.option("--timeout", "timeout_s", default=60.0, metavar="SECONDS", help="Limit of the whole check.")
@options.JSON
def preflight_command(expect: Path | None, as_json: bool, **choices: options.OptionValue) -> int:
    """Finds links, hosts and ranks slower than their peers.

    Measures pairs of ranks, collectives of each mesh dim, computation and copies within seconds. Suspects are measured
    again before they are reported. Joins the ranks of torchrun or srun, or starts its own. Exit code 1 if something is
    slow, 3 if something has no peers. Writes no files.

    \b
    Examples:
      dtbench preflight --nproc 4
      torchrun --nproc-per-node 8 --no-python dtbench preflight --mesh dp=2,tp=4
      srun dtbench preflight --expect topology.json
    """
    from dtbench.engine.options import RunRequest
    from dtbench.preflight.preflight import PreflightRequest, preflight

    return preflight(PreflightRequest(RunRequest(**choices), expect, as_json))
