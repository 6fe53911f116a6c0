"""`dtbench gpu-check` on the command line: what it runs stands beside the tests, in a checkout."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import click

from dtbench.cli import options
from dtbench.model.errors import UsageError

# They run in this order; dtbench/tests/gpu_check/parts.py has what each is.
PARTS = ("tests", "suites", "truth", "gate", "profile", "report")


@click.command("gpu-check")
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Only this part; repeatable.")
@click.option(
    "--rehearse", is_flag=True, help="On this CPU with a fake GPU: do the commands work? No figure counts."
)
@click.option("-o", "--output", "folder", type=options.FILE, required=True, help="The folder for everything.")
def gpu_check_command(parts: tuple[str, ...], rehearse: bool, folder: Path) -> int:
    """All that one GPU can show: tests, suites, clocks, gate, profile, a report.

    Works in a checkout. Each part ends within eight minutes. What is not done is gone on with by the same command.

    \b
    Examples:
      dtbench gpu-check -o results/gpu
      dtbench gpu-check --rehearse -o rehearsal
    """
    if importlib.util.find_spec("dtbench.tests") is None:
        raise UsageError(
            "gpu-check runs from a checkout of dtbench, whose tests this installation lacks: clone it and `make gpu`"
        )
    check = importlib.import_module("dtbench.tests.gpu_check.check")
    setting = importlib.import_module("dtbench.tests.gpu_check.parts").Setting(folder, rehearse)
    code: int = check.check(setting, parts, lambda text: click.echo(f"gpu-check: {text}", err=True))
    return code
