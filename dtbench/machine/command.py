"""`dtbench doctor` on the command line."""

from __future__ import annotations

import click

from dtbench import flags


@click.command("doctor")
@flags.JSON
def doctor_command(as_json: bool) -> None:
    """What will disturb a measurement here, and the remedies.

    \b
    Example:
      dtbench doctor
    """
    from dtbench.machine.doctor import examine
    from dtbench.machine.tables import print_findings

    print_findings(examine(), as_json)
