"""Completion in a shell is click's: `eval "$(_DTBENCH_COMPLETE=bash_source dtbench)"`, or zsh_source, fish_source."""

from __future__ import annotations

import os

import click
from click.shell_completion import CompletionItem, shell_complete

VARIABLE = "_DTBENCH_COMPLETE"  # set, it makes the program print the script, or answer instead of running


def answer(cli: click.Command) -> int | None:
    """Answers a shell that asks; the exit code, or None where none asks."""
    asked = os.environ.get(VARIABLE)
    return None if asked is None else shell_complete(cli, {}, "dtbench", VARIABLE, asked)


def suites(context: click.Context, parameter: click.Parameter, begun: str) -> list[CompletionItem]:
    """The built-in suites and files."""
    from dtbench.suite.suites import read_builtin

    found = [
        CompletionItem(name, help=what) for name, what in read_builtin().items() if name.startswith(begun)
    ]
    return [*found, CompletionItem(begun, type="file")]
