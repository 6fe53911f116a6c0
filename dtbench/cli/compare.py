"""`dtbench compare` on the command line."""

from __future__ import annotations

from pathlib import Path

import click

from dtbench.cli import options


@click.command("compare")
@click.argument("base", type=options.FILE, metavar="BASE")
@click.argument("new", required=False, type=options.FILE)
@click.option("--reference", is_flag=True, help="Compare BASE with public systems of its kind instead.")
@click.option("--system", metavar="NAME", help="With --reference: the public system to compare with.")
@options.JSON
@options.EXPORT
def compare_command(
    base: Path,
    new: Path | None,
    reference: bool,
    system: str | None,
    as_json: bool,
    exports: tuple[tuple[str, Path], ...],
) -> int:
    """What became slower or faster from BASE to NEW. Exit code 1 if anything became slower.

    BASE is a run file, or the name of a baseline that `dtbench run --save-baseline` has kept.

    With --reference, BASE's bus bandwidths beside published ones of the same GPUs, ranks and hosts.

    \b
    Examples:
      dtbench compare before.jsonl after.jsonl
      dtbench compare run.jsonl --reference --system 8xA100-SXM4-40GB
    """
    from dtbench.records.run import read_run

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
    from dtbench.comparison.comparison_table import print_comparison
    from dtbench.comparison.runs import compare
    from dtbench.records import baselines
    from dtbench.records.exports import write_exports

    base = base if base.exists() else baselines.find(base)
    comparison = compare(*([read_run(path, with_samples=False)] for path in (base, new)))
    print_comparison(comparison, as_json)
    if exports:
        write_exports(comparison.points, exports)
    return comparison.exit_code


def _compare_with_reference(run: Path, system: str | None, as_json: bool) -> int:
    import msgspec

    from dtbench.comparison import references
    from dtbench.records.run import read_run
    from dtbench.reporting.public import public_systems
    from dtbench.text.terminal import print_json

    comparison = references.compare_with_reference(
        read_run(run, with_samples=False), public_systems(), system
    )
    if as_json:
        print_json(msgspec.to_builtins(comparison))
    else:
        for line in references.comparison_lines(comparison):
            click.echo(line)
    return comparison.exit_code
