"""`dtbench export` on the command line."""

from pathlib import Path
from typing import cast

import click

from dtbench.cli import options


@click.command("export")
@click.argument("topology", type=options.FILE)
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Choice(["torch", "inductor", "autoparallel"]),
    help="The program that imports the module.",
)
@click.option("-o", "--output", required=True, type=options.FILE, help="The Python module to write.")
def export_command(topology: Path, target: str, output: Path) -> None:
    """Writes a topology as a Python module for torch itself.

    The module installs its constants in one of these cost models:

    \b
    --to torch         torch.distributed.tensor, which chooses redistributions
    --to inductor      the scheduler of torch.compile, which overlaps collectives
    --to autoparallel  its runtimes per collective, nodes and ranks per node

    The module imports only torch. Its first lines describe how to use it.

    \b
    Example:
      dtbench export topology.json --to torch -o mine.py
    """
    from dtbench.cost.export.module import Target, export
    from dtbench.records.topology import read_topology

    export(read_topology(topology), cast(Target, target), output)
    click.echo(f"wrote the module to {output}; its first lines describe how to use it")
