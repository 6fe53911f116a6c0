"""`dtbench profile` on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from dtbench.cli import options


@click.command("profile")
@click.argument("target", metavar="SUITE[/CASE]")
@options.IMPL
@options.FILTER
@options.MESH
@options.NPROC
@options.DEVICE
@options.BACKEND
@click.option("--quick", is_flag=True, help="Fewer cases and rounds.")
@options.TIMEOUT
@click.option("-o", "--output", type=options.FILE, show_default="profile-TIME", help="The folder to make.")
def profile_command(target: str, filter: str, output: Path | None, **choices: options.Given) -> int:
    """Profiles a case by stage, or traces all ranks.

    Writes a table and, of ranks, a trace for Perfetto or, of single calls, frames
    for speedscope, which draws flame graphs.

    \b
    Examples:
      dtbench profile dispatch/add -o add
      dtbench profile tensor_parallel --filter "pass=forward" --nproc 2
    """
    from dtbench.engine.options import RunRequest
    from dtbench.profile.profile import make_request, profile

    return profile(make_request(target, filter, output, RunRequest(**choices)), sys.argv[1:])
