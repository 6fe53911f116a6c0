"""`dtbench calibrate` on the command line: to fit a topology, and to judge one."""

from __future__ import annotations

from pathlib import Path

import click

from dtbench.cli import options


@click.command("calibrate")
@options.RUNS
@click.option("-o", "--output", type=options.FILE, help="The topology file to write.")
@click.option(
    "--validate",
    type=options.FILE,
    metavar="TOPOLOGY",
    help="Instead: how well it predicts RUNs that it was not fitted on.",
)
@click.option(
    "--same", is_flag=True, help="With --validate: allow runs that it was fitted on, which flatters it."
)
@click.option("--split", is_flag=True, help="Instead: fit every second size of one RUN, predict the rest.")
@click.option(
    "--regret",
    type=options.FILE,
    metavar="TOPOLOGY",
    help="Instead: what the choices of each cost model cost more than the best, in RUNs of the suite regret.",
)
@options.JSON
def calibrate_command(
    runs: tuple[Path, ...],
    output: Path | None,
    validate: Path | None,
    same: bool,
    split: bool,
    regret: Path | None,
    as_json: bool,
) -> None:
    """Fits the cost model to run files, into a topology; or judges one.

    Fits to their collectives and changes of placement. Prints per mesh dim latency and bandwidth with their intervals,
    and PyTorch's constants beside them, with how far either is off. Beside a validated topology stands the noise
    between launches, too.

    \b
    Examples:
      dtbench calibrate run.jsonl -o topology.json
      dtbench calibrate --validate topology.json another-run.jsonl
      dtbench calibrate --split run.jsonl
      dtbench run regret --topology topology.json -o ways.jsonl
      dtbench calibrate --regret topology.json ways.jsonl
    """
    from dtbench.records.run import read_run
    from dtbench.records.topology import read_topology

    asked = {"--validate": validate is not None, "--split": split, "--regret": regret is not None}
    given = [name for name, is_given in asked.items() if is_given]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} exclude each other: give one of them")
    if same and validate is None:
        raise click.UsageError("--same is for --validate TOPOLOGY")
    if given and output is not None:
        raise click.UsageError(
            f"-o is the topology to fit, {given[0]} writes none: leave it out, or give --json"
        )
    if split and len(runs) != 1:
        raise click.UsageError(f"--split takes one RUN and no topology, got {len(runs)} files")
    if not given:
        _fit(runs, output, as_json)
    elif regret is not None:
        from dtbench.cost.regret import regret as score
        from dtbench.cost.tables import print_regret

        topology = read_topology(regret)
        print_regret(score([read_run(path) for path in runs], topology), as_json)
    else:
        from dtbench.cost.calibration.validate import validate as score_models
        from dtbench.cost.calibration.validate import validate_split
        from dtbench.cost.tables import print_validation

        if validate is None:
            found = validate_split(read_run(runs[0]))
        else:
            topology = read_topology(validate)
            found = score_models(topology, [read_run(path) for path in runs], same=same)
        print_validation(found, as_json)


def _fit(runs: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    from dtbench.cost.calibration import calibrate
    from dtbench.cost.tables import print_topology
    from dtbench.records.run import read_run
    from dtbench.records.topology import write_topology

    if output is None:
        raise click.UsageError(
            "-o missing: give the topology file to write, or --validate, --split or --regret"
        )
    if as_json:
        raise click.UsageError("--json is for --validate, --split and --regret: the topology is JSON itself")
    topology = calibrate([read_run(path) for path in runs])
    write_topology(topology, output)
    print_topology(topology)
    click.echo(f"the topology is in {output}")
