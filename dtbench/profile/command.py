"""`dtbench profile` on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from dtbench import flags
from dtbench.bench import flags as of_runs
from dtbench.completion import suites


@click.command("profile")
@click.argument("target", metavar="SUITE[/CASE]", shell_complete=suites)
@of_runs.IMPL
@of_runs.FILTER
@of_runs.MESH
@of_runs.NPROC
@of_runs.DEVICE
@of_runs.BACKEND
@click.option("--nvtx", is_flag=True, help="On a GPU: NVTX ranges around the iterations, for Nsight.")
@click.option("--quick", is_flag=True, help="Fewer cases and rounds.")
@of_runs.TIMEOUT
@click.option("-o", "--output", type=flags.FILE, show_default="profile-TIME", help="The folder to make.")
def profile_command(target: str, filter: str, nvtx: bool, output: Path | None, **given: Any) -> int:
    """Where the time of a case goes: by stage, or one trace of all ranks.

    Writes a table, a trace for Perfetto and, of single calls, a flame graph.

    \b
    Examples:
      dtbench profile dispatch/add -o add
      dtbench profile tensor_parallel --filter "pass=forward" --nproc 2
    """
    from dtbench.bench.options import RunOptions
    from dtbench.profile.profile import profile
    from dtbench.profile.request import make_request

    return profile(make_request(target, filter, output, nvtx, RunOptions(**given)), sys.argv[1:])
