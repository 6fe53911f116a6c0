"""`dtbench show` and `report` on the command line."""

import math
from dataclasses import replace
from pathlib import Path

import click

from dtbench.cli import options
from dtbench.file_kinds import is_profile


@click.command("show")
@click.argument("runs", nargs=-1, required=True, type=options.FILE, metavar="RUN... [SUITE[/TEXT]]...")
@options.JSON
@click.option("--csv", "as_csv", is_flag=True, help="Print one line per result, for spreadsheets.")
@options.FILTER
@click.option(
    "--sort",
    default="",
    metavar="NAME",
    show_default="as measured",
    help="Sort by time, spread, algbw, busbw, core/torch or a param, smallest first; -NAME: largest first.",
)
@options.EXPORT
def show_command(
    runs: tuple[Path, ...], as_json: bool, as_csv: bool, filter: str, sort: str, exports: options.Exports
) -> None:
    """Prints tables of the results in run files, or of a profile.

    \b
    Examples:
      dtbench show run.jsonl
      dtbench show run.jsonl collectives/all_reduce --sort=-busbw
      dtbench show *.jsonl --csv > results.csv
    """
    from dtbench.records.exports import run_points, write_exports
    from dtbench.records.run import read_run
    from dtbench.reporting.run_tables import choose, print_csv, print_runs, print_runs_json

    if profiles := [path for path in runs if is_profile(path)]:
        if len(runs) > 1 or as_csv or filter or sort or exports:
            raise click.UsageError(f"{profiles[0]} is a job's profile: give it alone, with --json at most")
        from dtbench.traces.profile_job import JobRequest, print_profile, profile_job

        print_profile(profile_job(JobRequest(paths=runs)), as_json)
        return
    if (
        len(runs) == 1
        and not (as_json or as_csv or filter or sort or exports)
        and (runs[0] / "table.json").is_file()
    ):
        from dtbench.profile.output import section_tables, stage_tables
        from dtbench.reporting.html import gather

        sources = gather(runs)
        for line in (*stage_tables(sources.calls), *section_tables(sources.ranks)):
            click.echo(line)
        return
    if as_json and as_csv:
        raise click.UsageError("--json and --csv exclude each other: give one of them")
    files = [path for path in runs if path.exists()]
    read = [read_run(path) for path in files]
    suites = {suite for run in read for suite in run.header.suites}
    targets = [path for path in runs if path not in files]
    read += [read_run(path) for path in targets if path.parts[0] not in suites]  # raises for a missing file
    lines = [" ".join([*target.parts, line]) for target in targets for line in filter.split("\n")]
    read = choose(read, "\n".join(lines) or filter, sort)
    if as_csv:
        print_csv(read)
    elif as_json:
        print_runs_json(read)
    else:
        print_runs(read)
    if exports:
        write_exports(run_points(read), exports)


def _peak(text: str) -> tuple[str, float]:
    """Parses `tp=450` (GB/s) into ("tp", bytes per second)."""
    dim, _, rate = text.rpartition("=")
    try:
        value = float(rate) * 1e9
    except ValueError:
        value = 0.0
    if not dim or not 0 < value < math.inf:
        raise click.BadParameter(f"got {text!r}, expected a mesh dim and GB/s, such as tp=450")
    return dim, value


@click.command("report")
@click.argument("files", nargs=-1, type=options.FILE, metavar="FILE...")
@click.option(
    "--base",
    "baseline",
    multiple=True,
    type=options.FILE,
    metavar="RUN",
    help="A run, or the name of a baseline, to compare with; repeatable.",
)
@click.option("--topology", type=options.FILE, help="A topology; may also be one of the FILEs.")
@click.option(
    "--peak",
    "peaks",
    multiple=True,
    type=_peak,
    metavar="DIM=GB/S",
    help="The peak bandwidth of a mesh dim's links, drawn as a limit: tp=450; repeatable.",
)
@click.option("-o", "--output", required=True, type=options.FILE, help="The page to write.")
def report_command(
    files: tuple[Path, ...],
    baseline: tuple[Path, ...],
    topology: Path | None,
    peaks: tuple[tuple[str, float], ...],
    output: Path,
) -> None:
    """Writes an HTML page of results.

    The kind of each FILE is detected: runs, a topology, the JSON of a gate, the folder of a profile, or a history of
    gates. For a folder of runs, shows the last run, and each case over all runs.

    \b
    Examples:
      dtbench report run.jsonl topology.json -o report.html
      dtbench report head.jsonl --base base.jsonl -o report.html
      dtbench report results/nightly -o report.html
    """
    from dtbench.records import baselines
    from dtbench.reporting.html import gather, write_report

    baseline = tuple(map(baselines.find_run_file, baseline))
    sources = gather(files, [path for path in baseline if not is_profile(path)], topology)
    if sources.job:
        from dtbench.traces.analysis import analyze
        from dtbench.traces.job import load_job

        sources = replace(
            sources,
            analysis=analyze(
                sources.job, sources.topology, [load_job(path) for path in baseline if is_profile(path)]
            ),
        )
    dims = {dim for run in sources.runs for dim in run.header.mesh.dim_names}
    if unknown := [dim for dim, _ in peaks if dim not in dims]:
        raise click.UsageError(
            f"--peak names {', '.join(unknown)}, but the mesh dims of the runs are {', '.join(sorted(dims)) or 'none'}"
        )
    write_report(replace(sources, peaks=dict(peaks)), output)
    click.echo(f"the report is in {output}")
