"""`dtbench doctor` on the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from dtbench import flags

if TYPE_CHECKING:
    from dtbench.machine.doctor import Finding


@click.command("doctor")
@flags.JSON
def doctor_command(as_json: bool) -> None:
    """What will disturb a measurement here, and the remedies.

    \b
    Example:
      dtbench doctor
    """
    from dtbench.machine.doctor import examine

    print_findings(examine(), as_json)


def print_findings(findings: Sequence[Finding], as_json: bool = False) -> None:
    """What disturbs a measurement first, each with effect and remedy; then what is in order."""
    from rich.text import Text

    from dtbench.terminal import (
        add_words,
        as_text,
        new_console,
        new_table,
        print_json,
        print_line,
        print_table,
    )

    if as_json:
        print_json([asdict(finding) for finding in findings])
        return
    console = new_console()
    table = new_table(plain=not console.is_terminal)
    add_words(table, "", ["DISTURBS"])
    add_words(table, "check", [f.check for f in findings])
    add_words(table, "found", [f.got for f in findings])
    for finding in findings:
        mark = {True: "ok", False: "DISTURBS", None: "unknown"}[finding.ok]
        style = {True: "green", False: "red", None: "yellow"}[finding.ok]
        table.add_row(Text(mark, style=style), as_text(finding.check), as_text(finding.got))
    print_table(console, table)
    bad = [f for f in findings if f.ok is False]
    for finding in bad:
        print_line(console, f"{finding.check}: {finding.got}")
        print_line(console, f"    effect: {finding.effect}")
        print_line(console, f"    remedy: {finding.remedy}")
    print_line(console, f"{len(bad)} of {len(findings)} checks found something that disturbs a measurement")
