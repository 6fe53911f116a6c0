"""The command line: `program` is the group of commands and turns errors into exit codes; every other file is a command
or the options of several. Nothing imports this package but `__main__` and the installed script."""

from dtbench.cli.program import cli, main

__all__ = ["cli", "main"]
