"""`dtbench suite` on the command line, which creates and checks your own suites."""

from pathlib import Path

import click

from dtbench.cli import options
from dtbench.cli.run import options_of, run_command

NEW_SUITE = '''"""A suite: `dtbench run` measures the cases that it yields."""

import torch
from dtbench.suite import Case, RunOptions, Workload, World, suite


@suite("{name}", world="ranks", help="a matrix product on every rank")
def cases(options: RunOptions):
    for n in (256, 512):
        yield Case("matmul", {{"n": n}}, build={{"plain": lambda world, n=n: matmul(world, n)}})


def matmul(world: World, n: int) -> Workload:
    x = torch.randn(n, n, device=world.device)
    return Workload(run=lambda: x @ x)
'''


@click.group("suite")
def suite_command() -> None:
    """Creates a suite of your own, and checks one.

    \b
    Example:
      dtbench suite new mine.py && dtbench suite check mine.py
    """


@suite_command.command("new")
@click.argument("file", type=options.FILE)
def new(file: Path) -> None:
    """Writes a template with two cases.

    \b
    Example:
      dtbench suite new mine.py && dtbench suite check mine.py
    """
    from dtbench.records.atomic import check_output_path, write_atomically

    if file.suffix != ".py" or not file.stem.isidentifier():
        raise click.UsageError(f"got {file}, expected the name of a Python module, such as mine.py")
    check_output_path(file, path_option="another FILE")
    write_atomically(file, NEW_SUITE.format(name=file.stem), lambda _head: False, "suite")
    click.echo(f"the suite is in {file}; `dtbench suite check {file}` tries it")


@suite_command.command("check")
@click.argument("file", type=options.FILE)
@click.option("--nproc", type=int, default=2, help="Number of ranks to start on this host.")
@click.pass_context
def check(context: click.Context, /, file: Path, nproc: int) -> int:
    """Checks each case of a suite file and lists errors.

    Builds and briefly runs each case on ranks.

    \b
    Example:
      dtbench suite check mine.py
    """
    from dtbench.engine.launch import run
    from dtbench.engine.workers import scratch

    if file.suffix != ".py":
        raise click.UsageError(f"got {file}, expected the .py file of a suite")
    with scratch() as folder:
        words = [str(file), "--quick", "--nproc", str(nproc), "--brief", "-o", str(folder / "check.jsonl")]
        return run(options_of(**run_command.make_context("run", list(words)).params), ["run", *words])
