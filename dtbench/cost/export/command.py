"""`dtbench export` on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import click

_FILE = click.Path(path_type=Path)


@click.command()
@click.argument("topology", type=_FILE)
@click.option("--to", "target", required=True, type=click.Choice(["torch", "inductor"]), help="Its reader.")
@click.option("-o", "--output", required=True, type=_FILE, help="The Python module to write.")
def export(topology: Path, target: str, output: Path) -> None:
    """Writes a calibrated TOPOLOGY as a Python module that puts its constants into torch itself.

    \b
    --to torch     the cost model of torch.distributed.tensor, which chooses shardings and redistributions
    --to inductor  the overlap scheduler of torch.compile, which asks how long a collective runs

    The module imports torch alone; its first lines say how to use it.
    """
    from dtbench.cost.export.module import Target
    from dtbench.cost.export.module import export as write
    from dtbench.files.topology import read_topology

    write(read_topology(topology), cast(Target, target), output)
    click.echo(f"the module is in {output}; its first lines say how to use it")
