"""`dtbench gpu-check` on the command line."""

from __future__ import annotations

from pathlib import Path

import click

from dtbench import flags
from dtbench.gpu.parts import PARTS


@click.command("gpu-check")
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice([part.name for part in PARTS]),
    show_default="all",
    help="Only this part; repeatable.",
)
@click.option(
    "--rehearse", is_flag=True, help="On this CPU with a fake GPU: do the commands work? No figure counts."
)
@click.option("-o", "--output", "folder", type=flags.FILE, required=True, help="The folder for everything.")
def gpu_check_command(parts: tuple[str, ...], rehearse: bool, folder: Path) -> int:
    """All that one GPU can show: tests, suites, clocks, gate, profile, a report.

    Each part ends within eight minutes. What is not done is gone on with by the same command.

    \b
    Examples:
      dtbench gpu-check -o results/gpu
      dtbench gpu-check --rehearse -o rehearsal
    """
    from dtbench.gpu.check import check
    from dtbench.gpu.parts import Setting

    return check(Setting(folder, rehearse), parts, lambda text: click.echo(f"gpu-check: {text}", err=True))
