"""`dtbench calibrate` and `export` on the command line, which fit, score and export topologies."""

from pathlib import Path

import click

from dtbench.cli import options
from dtbench.cost.export.targets import DEFAULT_DTYPES, TARGETS
from dtbench.engine.options import DTYPES, parse_dtypes
from dtbench.suite.mesh import Mesh, parse_mesh


@click.command("calibrate")
@options.RUNS
@click.option("-o", "--output", type=options.FILE, help="The topology file to write.")
@click.option(
    "--validate",
    type=options.FILE,
    metavar="TOPOLOGY",
    help="Instead: score the predictions of TOPOLOGY for RUNs that it was not fitted to.",
)
@click.option(
    "--same",
    is_flag=True,
    help="With --validate: also score RUNs that TOPOLOGY was fitted to. Their errors are too small.",
)
@click.option(
    "--split", is_flag=True, help="Instead: fit to every second size of a RUN and score the other sizes."
)
@options.JSON
def calibrate_command(
    runs: tuple[Path, ...], output: Path | None, validate: Path | None, same: bool, split: bool, as_json: bool
) -> None:
    """Fits the cost model to runs and writes a topology, or scores one.

    Uses the suites collectives and redistribute. Prints latency and bandwidth of each mesh dim with their intervals,
    the constants of PyTorch's cost model, and the errors of both models. --validate also prints the noise between
    launches.

    For runs of the suite bucketer, prints the smallest bucket of gradients within 5% of the best rate, as
    bucket_cap_mb, with its interval. These runs need no -o.

    \b
    Examples:
      dtbench calibrate run.jsonl -o topology.json
      dtbench calibrate --validate topology.json another-run.jsonl
      dtbench calibrate --split run.jsonl
      dtbench calibrate buckets.jsonl
    """
    if split and validate is not None:
        raise click.UsageError("--validate and --split exclude each other: give one of them")
    if same and validate is None:
        raise click.UsageError("--same requires --validate TOPOLOGY")
    if split and len(runs) != 1:
        raise click.UsageError(f"got {len(runs)} files, expected a single RUN with --split")
    if not split and validate is None:
        _fit(runs, output, as_json)
        return
    if output is not None:
        raise click.UsageError(
            f"-o is the topology to write, but {'--split' if split else '--validate'} writes none: "
            "leave it out, or give --json"
        )
    from dtbench.cost.calibration.validate import score_runs, score_split
    from dtbench.cost.show import print_validation
    from dtbench.records.run import read_run
    from dtbench.records.topology import read_topology

    if validate is None:
        validation = score_split(read_run(runs[0]))
    else:
        validation = score_runs(read_topology(validate), [read_run(path) for path in runs], allow_fitted=same)
    print_validation(validation, as_json)


def _fit(paths: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    from dtbench.cost.bucket_size import MEASURE, bucket_choices
    from dtbench.cost.calibration import calibrate
    from dtbench.cost.show import print_buckets, print_topology
    from dtbench.records.run import read_run
    from dtbench.records.topology import write_topology

    if output is not None and as_json:
        raise click.UsageError(
            "--json is not used with -o, since the topology is JSON; it is for --validate, --split and bucket sizes"
        )
    runs = [read_run(path) for path in paths]
    buckets = bucket_choices(runs)
    if output is not None:
        topology = calibrate(runs)
        write_topology(topology, output)
        print_topology(topology)
        click.echo(f"wrote the topology to {output}")
        # After a topology, only recommended sizes are printed, without advice on how to measure more.
        buckets = [choice for choice in buckets if choice.bucket_cap_mb is not None]
    elif not buckets:
        raise click.UsageError(
            "missing -o: give the topology file to write, or --validate or --split; or give a run with several "
            f"bucket sizes: {MEASURE}"
        )
    if buckets:
        print_buckets(buckets, as_json)


@click.command("export")
@click.argument("topology", type=options.FILE)
@click.option(
    "--to",
    "target",
    required=True,
    metavar="TARGET",
    type=click.Choice([*TARGETS]),
    help="The program that reads the export, listed above.",
)
@click.option(
    "--mesh",
    metavar="DIMS",
    type=parse_mesh,
    default=None,
    show_default="the topology's",
    help="The mesh of the job, outermost dim first: pp=2,dp=4,tp=8.",
)
@click.option(
    "--dtype",
    "dtypes",
    metavar="LIST",
    type=parse_dtypes,
    default=",".join(DEFAULT_DTYPES),
    help=f"Dtypes of the job's tensors: {', '.join(DTYPES)}.",
)
@click.option("-o", "--output", required=True, type=options.FILE, help="The file or folder to write.")
def export_command(
    topology: Path, target: str, mesh: Mesh | None, dtypes: tuple[str, ...], output: Path
) -> None:
    """Writes a topology in the form that another program reads.

    \b
    --to torch             DTensor, which chooses redistributions
    --to inductor          torch.compile, which overlaps collectives
    --to inductor-profile  the profile-guided estimates of torch.compile
    --to autoparallel      the NCCL cost model of meta-pytorch/autoparallel
    --to primus            the performance projection of AMD-AGI/Primus
    --to astra-sim         the analytical network of ASTRA-sim
    --to aiconfigurator    ai-dynamo's aiconfigurator, which plans inference

    --mesh and --dtype are for inductor-profile: the trace lists every process group of the mesh, with each dtype.

    \b
    Examples:
      dtbench export topology.json --to torch -o mine.py
      dtbench export topology.json --to inductor-profile --mesh tp=8 -o p.json
    """
    from dtbench.cost.export.targets import ExportRequest, export
    from dtbench.records.topology import read_topology

    for note in export(ExportRequest(read_topology(topology), output, mesh or (), dtypes), target):
        click.echo(note, err=True)
    click.echo(f"wrote the {TARGETS[target].form} to {output}, for {TARGETS[target].taker}")
