"""`dtbench coverage` on the command line."""

from __future__ import annotations

from pathlib import Path

import click

from dtbench.cli import options
from dtbench.suite.errors import EXIT_OK, EXIT_REGRESSION


@click.command("coverage")
@options.RUNS
@click.option("--base", type=options.FILE, help="What must not become worse: exit code 1 if something did.")
@click.option(
    "-o",
    "--output",
    "outputs",
    multiple=True,
    type=options.FILE,
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
    from dtbench.comparison import op_verdicts as verdicts
    from dtbench.records.run import read_run
    from dtbench.records.verdicts import read_baseline, write_baseline

    for path in outputs:
        if path.suffix not in (".md", ".json"):
            raise click.UsageError(f"-o {path}: expected a file that ends in .md or .json")
    read = [read_run(path, with_samples=False) for path in runs]
    if len(read) > 1 and (base or any(path.suffix == ".json" for path in outputs)):
        raise click.UsageError("-o FILE.json and --base are about one run: give one RUN")
    found = verdicts.merged(read)
    head, rows = verdicts.summary_rows(found)
    for row in [head, *rows]:
        click.echo("  ".join(f"{cell:>10}" for cell in row))
    for line in verdicts.not_judged_lines(found):
        click.echo(line)
    for path in outputs:
        if path.suffix == ".md":
            path.write_text(verdicts.markdown(read))
        else:
            write_baseline(verdicts.baseline_of(read[0]), path)
    if base is None:
        return EXIT_OK
    worse, better = verdicts.became_worse(read_baseline(base), verdicts.baseline_of(read[0]))
    for line in worse:
        click.echo(f"worse: {line}")
    click.echo(
        f"{len(worse)} worse than {base}, {better} better" + (" (-o FILE.json keeps that)" if better else "")
    )
    return EXIT_REGRESSION if worse else EXIT_OK
