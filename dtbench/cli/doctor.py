"""`dtbench doctor` on the command line."""

from __future__ import annotations

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
    """Checks this machine for sources of noise, with remedies.

    \b
    Example:
      dtbench doctor
    """
    from dtbench.machine.doctor import examine

    print_findings(examine(), as_json)


def print_findings(findings: Sequence[MachineFinding], as_json: bool = False) -> None:
    """What disturbs a measurement first, each with effect and remedy; then what is in order."""
    from dtbench.text.table import TableColumn
    from dtbench.text.terminal import new_console, print_json, print_line, print_table

    if as_json:
        print_json([asdict(finding) for finding in findings])
        return
    console = new_console()
    marks = {True: ("ok", "green"), False: ("NOISE", "red"), None: ("unknown", "yellow")}
    words, styles = zip(*(marks[f.ok] for f in findings), strict=True)
    print_table(
        console,
        [
            TableColumn("", words, styles=styles),
            TableColumn("check", [f.check for f in findings]),
            TableColumn("found", [f.got for f in findings]),
        ],
    )
    bad = [f for f in findings if f.ok is False]
    for finding in bad:
        print_line(console, f"{finding.check}: {finding.got}")
        print_line(console, f"    effect: {finding.effect}")
        print_line(console, f"    remedy: {finding.remedy}")
    print_line(console, f"{len(bad)} of {len(findings)} checks found a source of noise")
