"""What commands that have times to tell take on their command lines: `--export`."""

from __future__ import annotations

from pathlib import Path

import click


def _export(
    _context: click.Context, _option: click.Parameter, given: tuple[str, ...]
) -> list[tuple[str, Path]]:
    """(format, file) of each FORMAT:FILE, found good before anything is measured."""
    from dtbench.files.exports import FORMATS

    wanted = []
    for text in given:
        name, _, file = text.partition(":")
        if name not in FORMATS or not file:
            raise click.BadParameter(
                f"{text!r}: expected FORMAT:FILE, FORMAT one of {', '.join(FORMATS)}; such as bmf:times.json"
            )
        if not Path(file).parent.is_dir():
            raise click.BadParameter(
                f"{text!r}: there is no folder {Path(file).parent}; make it, or name another"
            )
        wanted.append((name, Path(file)))
    return wanted


EXPORT = click.option(
    "--export",
    "exports",
    multiple=True,
    metavar="FORMAT:FILE",
    callback=_export,
    help="Write the times for another tool too: github (github-action-benchmark), bmf (Bencher) or prometheus. "
    "Repeatable.",
)
