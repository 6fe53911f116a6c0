"""Completion on the command line: the script for a shell, and what completes a suite."""

from __future__ import annotations

import os

import click
from click.shell_completion import CompletionItem, get_completion_class, shell_complete

VARIABLE = "_DTBENCH_COMPLETE"  # of click: set by the script, it makes the program answer instead of running


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion_command(context: click.Context, /, shell: str) -> None:
    """The script that lets a shell complete commands, options, suites and files.

    \b
    Examples:
      eval "$(dtbench completion bash)"
      dtbench completion fish > ~/.config/fish/completions/dtbench.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "dtbench", VARIABLE).source())


def answer(cli: click.Command) -> int | None:
    """Answers a shell that asks; the exit code, or None where none asks."""
    asked = os.environ.get(VARIABLE)
    return None if asked is None else shell_complete(cli, {}, "dtbench", VARIABLE, asked)


def suites(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The built-in suites and files."""
    from dtbench.suite import read_builtin

    found = [
        CompletionItem(name, help=what) for name, what in read_builtin().items() if name.startswith(begun)
    ]
    return [*found, CompletionItem(begun, type="file")]
