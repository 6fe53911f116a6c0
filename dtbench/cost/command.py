"""`dtbench calibrate`, `validate` and `regret` on the command line."""

from __future__ import annotations

from pathlib import Path

import click

from dtbench import flags


@click.command("calibrate")
@flags.RUNS
@click.option("-o", "--output", required=True, type=flags.FILE, help="The topology file to write.")
def calibrate_command(runs: tuple[Path, ...], output: Path) -> None:
    """Fits the cost model to run files, into a topology.

    To their collectives and changes of placement, per mesh dim.

    \b
    Example:
      dtbench calibrate run.jsonl -o topology.json
    """
    from dtbench.cost.calibration import calibrate, write_topology
    from dtbench.files.run import read_run

    write_topology(calibrate([read_run(path) for path in runs]), output)
    click.echo(f"the topology is in {output}")


@click.command("validate")
@click.argument("files", nargs=-1, required=True, type=flags.FILE, metavar="TOPOLOGY RUN...")
@click.option("--same", is_flag=True, help="Allow runs that the topology was fitted on, which flatters it.")
@click.option(
    "--split", is_flag=True, help="Take one RUN and no topology: fit every second size, predict the rest."
)
@flags.JSON
def validate_command(files: tuple[Path, ...], same: bool, split: bool, as_json: bool) -> None:
    """How well a topology predicts runs that it was not fitted on.

    Beside it stand PyTorch's constants, and the noise between launches.

    \b
    Examples:
      dtbench validate topology.json another-run.jsonl
      dtbench validate --split run.jsonl
    """
    from dtbench.cost.calibration import read_topology
    from dtbench.cost.calibration.validate import validate, validate_split
    from dtbench.cost.tables import print_validation
    from dtbench.files.run import read_run

    if split:
        if len(files) != 1 or same:
            raise click.UsageError("--split takes one RUN, and neither a topology nor --same")
        print_validation(validate_split(read_run(files[0])), as_json)
        return
    if len(files) < 2:
        raise click.UsageError("give a TOPOLOGY and at least one RUN, or --split and one RUN")
    topology, runs = read_topology(files[0]), [read_run(path) for path in files[1:]]
    print_validation(validate(topology, runs, same=same), as_json)


@click.command("regret")
@flags.RUNS
@flags.TOPOLOGY
@flags.JSON
def regret_command(runs: tuple[Path, ...], topology: Path, as_json: bool) -> None:
    """What the choices of each cost model cost more than the best.

    RUNs are of the suite `regret`.

    \b
    Example:
      dtbench run regret --topology topology.json -o ways.jsonl
      dtbench regret ways.jsonl --topology topology.json
    """
    from dtbench.cost.calibration import read_topology
    from dtbench.cost.regret import regret
    from dtbench.cost.tables import print_regret
    from dtbench.files.run import read_run

    print_regret(regret([read_run(path) for path in runs], read_topology(topology)), as_json)
