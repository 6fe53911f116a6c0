"""`dtbench doctor` on the command line."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from dtbench.cli import options

if TYPE_CHECKING:
    from dtbench.machine.doctor import MachineFinding


@click.command("doctor")
@options.JSON
def doctor_command(as_json: bool) -> None:
    """Checks this host for sources of noise, and prints remedies.

    \b
    Example:
      dtbench doctor
    """
    from dtbench.machine.doctor import examine

    print_findings(examine(), as_json)


def print_findings(findings: "Sequence[MachineFinding]", as_json: bool = False) -> None:
    """Prints a table of all findings, then the effect and the remedy of each source of noise."""
    from dtbench.text.table import TableColumn
    from dtbench.text.terminal import new_console, print_json, print_line, print_table

    if as_json:
        print_json([asdict(finding) for finding in findings])
        return
    console = new_console()
    marks = {True: ("ok", "green"), False: ("NOISE", "red"), None: ("unknown", "yellow")}
    labels, styles = zip(*(marks[finding.ok] for finding in findings), strict=True)
    print_table(
        console,
        [
            TableColumn("", labels, styles=styles),
            TableColumn("check", [finding.check for finding in findings]),
            TableColumn("found", [finding.got for finding in findings]),
        ],
    )
    noisy = [finding for finding in findings if finding.ok is False]
    for finding in noisy:
        for line in (
            f"{finding.check}: {finding.got}",
            f"    effect: {finding.effect}",
            f"    remedy: {finding.remedy}",
        ):
            print_line(console, line)
    print_line(console, f"{len(noisy)} of {len(findings)} checks found a source of noise")
