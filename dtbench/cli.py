"""The command line: which commands there are, and how an error becomes one line and an exit code.

A command stands in the `command.py` of its room and is imported when it is called or described. These files import
neither torch nor what their command works with, so that `dtbench --help` is there at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import NoReturn

import click

import dtbench
from dtbench.errors import EXIT_INTERRUPTED, EXIT_OK, DtbenchError

# Task -> command -> its module in this package; the function is called as the command.
_COMMANDS = {
    "Measure": {
        "run": "bench.command",
        "list": "bench.command",
        "profile": "profile.command",
        "doctor": "machine.command",
        "lab": "world.lab.command",
    },
    "Read results": {"show": "show.command", "report": "show.command", "import": "importers.command"},
    "Judge": {"compare": "judge.command", "gate": "judge.gate.command", "coverage": "judge.command"},
    "Model costs": {
        "calibrate": "cost.command",
        "validate": "cost.command",
        "regret": "cost.command",
        "predict": "cost.predict.command",
        "export": "cost.export.command",
    },
}
_MODULES = {name: module for commands in _COMMANDS.values() for name, module in commands.items()}
# Options that had another name: what to give instead.
_RENAMED = {
    "--baseline": "--base",
    "--table": "-o FILE.md",
    "--save": "-o FILE.json",
    "--timeout": "--launch-timeout",
    "--junit": "-o FOLDER, which holds junit.xml",
    "--smaller-is-better": "-o FOLDER, which holds smaller-is-better.json",
}


class _Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return list(_MODULES)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _MODULES:
            return None
        found = getattr(importlib.import_module(f"dtbench.{_MODULES[name]}"), f"{name}_command")
        assert isinstance(found, click.Command)
        return found

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        for task, commands in _COMMANDS.items():
            with formatter.section(task):
                found = [(name, self.get_command(context, name)) for name in commands]
                formatter.write_dl(
                    [(name, command.get_short_help_str(88)) for name, command in found if command]
                )


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110},
    invoke_without_command=True,
)
@click.version_option(dtbench.__version__, prog_name="dtbench")
@click.pass_context
def cli(context: click.Context) -> None:
    """Measures what distributed tensors cost, and turns the measurements into decisions.

    \b
    Exit codes: 0 done, 1 regression, 2 usage or unreadable input, 3 inconclusive,
    4 nothing comparable, 5 a case failed.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main() -> NoReturn:
    """The program. An error that one line explains is printed as one line, with its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = cli.main(prog_name="dtbench", standalone_mode=False)
    except DtbenchError as error:
        code = _refuse(str(error), error.exit_code)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "dtbench"
        message = error.format_message().rstrip(".")
        if isinstance(error, click.NoSuchOption) and error.option_name in _RENAMED:
            message = f"{error.option_name} is gone: give {_RENAMED[error.option_name]}"
        code = _refuse(f"{message}; `{command} --help` shows what there is", error.exit_code)
    except click.ClickException as error:
        code = _refuse(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        code = _refuse("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has gone
        code = EXIT_OK
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code if isinstance(code, int) else EXIT_OK)


def _refuse(text: str, code: int) -> int:
    """One line on stderr, from one rank: in a launched world all ranks come here alike."""
    from dtbench.world.rank import complain_once

    complain_once(text)
    return code
