"""`dtbench compare` and `coverage` on the command line."""

from __future__ import annotations

from pathlib import Path

import click

from dtbench import flags
from dtbench.errors import EXIT_OK, EXIT_REGRESSION
from dtbench.files import flags as of_files


@click.command("compare")
@click.argument("base", type=flags.FILE)
@click.argument("new", required=False, type=flags.FILE)
@click.option("--reference", is_flag=True, help="Compare BASE with public systems of its kind instead.")
@click.option("--system", metavar="NAME", help="With --reference: the public system to compare with.")
@flags.JSON
@of_files.EXPORT
def compare_command(
    base: Path,
    new: Path | None,
    reference: bool,
    system: str | None,
    as_json: bool,
    exports: tuple[tuple[str, Path], ...],
) -> int:
    """What became slower or faster from BASE to NEW. Exit code 1 if anything became slower.

    With --reference, BASE's bus bandwidths beside published ones of the same GPUs, ranks and hosts.

    \b
    Examples:
      dtbench compare before.jsonl after.jsonl
      dtbench compare run.jsonl --reference --system 8xA100-SXM4-40GB
    """
    from dtbench.files.run import read_run

    if reference == (new is not None):
        raise click.UsageError("give BASE and NEW, or --reference and one run")
    if new is None:
        if exports:
            raise click.UsageError(
                "--export writes the times of NEW: give BASE and NEW, or use `dtbench show`"
            )
        return _compare_with_reference(base, system, as_json)
    if system is not None:
        raise click.UsageError("--system goes with --reference")
    from dtbench.files.exports import write_exports
    from dtbench.judge.compare import compare
    from dtbench.judge.tables import print_comparison

    comparison = compare(*([read_run(path, with_samples=False)] for path in (base, new)))
    print_comparison(comparison, as_json)
    if exports:
        write_exports(comparison.points, exports)
    return comparison.exit_code


def _compare_with_reference(run: Path, system: str | None, as_json: bool) -> int:
    from dtbench.files.run import read_run
    from dtbench.judge import references
    from dtbench.terminal import print_json

    comparison = references.compare_with_reference(
        read_run(run, with_samples=False), references.read_systems(), system
    )
    if as_json:
        print_json(comparison.to_json())
    else:
        for line in references.lines(comparison):
            click.echo(line)
    return comparison.exit_code


@click.command("coverage")
@flags.RUNS
@click.option("--base", type=flags.FILE, help="What must not become worse: exit code 1 if something did.")
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    type=flags.FILE,
    help="FILE.md: the verdicts of all ops as a page; FILE.json: the core's verdicts, for --base. Repeatable.",
)
def coverage_command(runs: tuple[Path, ...], base: Path | None, outputs: tuple[Path, ...]) -> int:
    """Is every op right? Verdicts in a table, checked against a base.

    RUNs are of `dtbench run coverage`, or of `dtbench run compat`.

    \b
    Examples:
      dtbench run coverage --impl core -o run.jsonl
      dtbench coverage run.jsonl --base results/coverage-core.json
    """
    from dtbench.files.run import read_run
    from dtbench.judge import op_verdicts as verdicts

    for path in outputs:
        if path.suffix not in (".md", ".json"):
            raise click.UsageError(f"-o {path}: expected a file that ends in .md or .json")
    read = [read_run(path, with_samples=False) for path in runs]
    if len(read) > 1 and (base or any(path.suffix == ".json" for path in outputs)):
        raise click.UsageError("-o FILE.json and --base are about one run: give one RUN")
    head, rows = verdicts.summary_rows(verdicts.merged(read))
    for row in [head, *rows]:
        click.echo("  ".join(f"{cell:>10}" for cell in row))
    for path in outputs:
        if path.suffix == ".md":
            path.write_text(verdicts.markdown(read))
        else:
            verdicts.write_baseline(verdicts.baseline_of(read[0]), path)
    if base is None:
        return EXIT_OK
    worse, better = verdicts.became_worse(verdicts.read_baseline(base), verdicts.baseline_of(read[0]))
    for line in worse:
        click.echo(f"worse: {line}")
    click.echo(
        f"{len(worse)} worse than {base}, {better} better" + (" (-o FILE.json keeps that)" if better else "")
    )
    return EXIT_REGRESSION if worse else EXIT_OK
