"""`dtbench import` on the command line."""

import sys
from pathlib import Path

import click

from dtbench.cli import options
from dtbench.suite.mesh import parse_mesh


@click.command("import")
@click.argument("files", nargs=-1, required=True, type=options.FILE, metavar="FILE...")
@click.option("-o", "--output", required=True, type=options.FILE, help="The run file to write.")
@click.option(
    "--mesh",
    metavar="DIMS",
    type=parse_mesh,
    show_default="the logs' own ranks",
    help="The mesh, e.g. dp=16,tp=8. Each log is assigned to the mesh dim with the same number of ranks.",
)
@click.option("--dim", metavar="NAME", help="Assign all logs to this dim of --mesh.")
@click.option(
    "--collective", metavar="NAME", help="The collective of logs that do not name it, e.g. all_reduce."
)
@click.option("--ranks", type=click.IntRange(1), help="The number of ranks of logs that do not state it.")
def import_command(files: tuple[Path, ...], output: Path, **of_logs: options.OptionValue) -> int:
    """Reads logs of other benchmarks into a run file.

    Supports nccl-tests, rccl-tests, DeepSpeed, OSU and ml-engineering; - is standard input. Each row is checked (size /
    time = algbw, busbw / algbw = the collective's factor, wrong data). A row that fails is recorded with the reason and
    without a time, and the exit code is 5. Logs may be those of Docker or Kubernetes.

    \b
    Examples:
      dtbench import all_reduce.log -o run.jsonl
      dtbench import tp/*.log --mesh dp=16,tp=8 --dim tp -o tp.jsonl
    """
    from dtbench.importers.import_logs import import_logs

    code, lines = import_logs(files, output, sys.argv[1:], **of_logs)
    for line in lines:
        click.echo(line)
    return code
