"""The command line: which commands there are, and how an error becomes one line and an exit code.

A command stands in a file of this package and is imported when it is called or described. These files import
neither torch nor what their command works with, so that `dtbench --help` is there at once.
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import platform
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import click
from click.exceptions import Exit
from click.shell_completion import shell_complete

from dtbench._version import __version__
from dtbench.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_OWN_FAULT,
    EXIT_USAGE,
    DtbenchError,
    UnknownOptionError,
    describe,
    is_out_of_memory,
    nearest,
)
from dtbench.machine.limits import refuse_deleted_folder
from dtbench.text.clean import clean_output
from dtbench.text.masking import mask, mask_arguments

# Task -> the commands that the first screen shows for it.
_COMMANDS = {
    "Measure": ("run", "list", "profile", "preflight", "doctor"),
    "Read results": ("show", "report", "import"),
    "Judge": ("compare", "gate"),
    "Model costs": ("calibrate", "plan", "export"),
}
_SHOWN = tuple(name for names in _COMMANDS.values() for name in names)
_HIDDEN = ("suite",)  # for suites of one's own, as their guide says
# A command stands in a file of this package that bears its name; but these.
_MODULES = {"list": "run", "report": "show", "import": "import_logs"}
_COMPLETE = "_DTBENCH_COMPLETE"  # set by a shell that asks, as click does it
# They end with what they read: to look for garbage in it, again and again, takes as long as all their work.
_READERS = {"show", "report", "compare", "calibrate"}


class _Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return [*_SHOWN]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in (*_SHOWN, *_HIDDEN):
            return None
        module = importlib.import_module(f"dtbench.cli.{_MODULES.get(name, name)}")
        command = getattr(module, f"{name}_command")
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in (*_SHOWN, *_HIDDEN) and name[:1].isalnum() and not context.resilient_parsing:
            raise click.NoSuchCommand(name, possibilities=(*_SHOWN, *_HIDDEN), ctx=context)
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        column = max(map(len, _SHOWN))
        for task, commands in _COMMANDS.items():
            with formatter.section(task):
                shown = [(name, self.get_command(context, name)) for name in commands]
                helps = [(name.ljust(column), of.get_short_help_str(80)) for name, of in shown if of]
                formatter.write_dl(helps)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True, "max_content_width": 110},
    invoke_without_command=True,
)
@click.version_option(__version__, prog_name="dtbench")
@click.pass_context
def cli(context: click.Context) -> None:
    """Measures what distributed tensors cost, and turns the measurements into decisions.

    \b
    Exit codes: 0 done, 1 regression, 2 usage or unreadable input, 3 inconclusive,
    4 nothing comparable, 5 a case failed, 70 an internal error.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())
    else:
        refuse_deleted_folder()
    if context.invoked_subcommand in _READERS and gc.isenabled():
        gc.disable()
        context.call_on_close(gc.enable)


def main(invoke: Callable[[], object] | None = None) -> NoReturn:
    """Runs the program. An error that one line explains is printed as one line, with its exit code.

    Args:
        invoke: returns the exit code; by default the command on the command line.
    """
    with clean_output():
        code = _run(invoke or _invoke)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
    sys.exit(code)


def _invoke() -> object:
    if (request := os.environ.get(_COMPLETE)) is not None:
        return shell_complete(cli, {}, "dtbench", _COMPLETE, request)
    # Not `cli.main`, which ends with 1, a regression, where a reader has gone.
    with cli.make_context("dtbench", sys.argv[1:]) as context:
        return cli.invoke(context)


def _run(invoke: Callable[[], object]) -> int:
    try:
        code = invoke()
        if sys.stdout is not None:
            sys.stdout.flush()
    except Exit as ended:  # --help, --version
        code = ended.exit_code
    except UnknownOptionError as error:  # of `run` or `list`, whose suites have options too
        code = _refuse(f"{error}{_nearest_of_run(error)}", error.exit_code)
    except DtbenchError as error:
        code = _refuse(str(error), error.exit_code)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "dtbench"
        code = _refuse(f"{_explain(error)}; `{command} --help` lists the options", error.exit_code)
    except click.ClickException as error:
        code = _refuse(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        code = _refuse("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has gone
        code = EXIT_OK
        _drop_output()
    except Exception as error:
        why = _outside(error)
        code = _refuse(why, EXIT_USAGE) if why else _own_fault(error)
    return code if isinstance(code, int) else EXIT_OK


def _explain(error: click.UsageError) -> str:
    """The error's message; of an unknown name with the nearest that exists, of a number with what was expected."""
    if isinstance(error, click.BadParameter) and isinstance(error.param, click.Option):
        option, of, usual = error.param.opts[0], error.param.type, error.param.default
        kinds = {"integer": "a whole number", "float": "a number"}
        value, is_not, _ = error.message.partition(" is not ")
        if is_not and (expected := kinds.get(of.name.removesuffix(" range"))):
            least, most = getattr(of, "min", None), getattr(of, "max", None)
            if least is not None:
                expected += f" {'above' if getattr(of, 'min_open', False) else 'from'} {least:g}"
                expected += " on" if most is None else f" to {most:.10g}"
            such = usual if isinstance(usual, int | float) else int(least or 1)
            return f"{option}: got {value}, expected {expected}, such as {option} {such}"
    if (
        isinstance(error, click.MissingParameter)
        and isinstance(error.param, click.Option)
        and error.param.help
    ):
        return f"{error.format_message().rstrip('.')}: {error.param.help.rstrip('.')}"
    if isinstance(error, click.NoSuchOption | click.NoSuchCommand) and error.possibilities:
        return f"{error.message} Did you mean {error.possibilities[0]!r}?"
    return error.format_message().rstrip(".")


def _nearest_of_run(error: UnknownOptionError) -> str:
    from dtbench.cli.run import run_command

    names = [name for option in run_command.params for name in (*option.opts, *option.secondary_opts)]
    return nearest(error.option, [*names, *error.of_suites])


def _drop_output() -> None:
    """Nothing more is written to standard output, by the interpreter's end neither."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# Of standard output, which has no room left: files are written with errors of their own.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# What is wrong with a path that was given, where it is only asked whether something is there.
_UNREADABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ESTALE)


def _outside(error: Exception) -> str:
    """The line where not dtbench is at fault but what it runs on; "" for any other error."""
    if is_out_of_memory(error):
        return "out of memory: give fewer or smaller files, or more memory"
    if not isinstance(error, OSError) or error.errno is None:
        return ""
    why = os.strerror(error.errno)
    if error.errno in _NOT_WRITTEN:
        _drop_output()
        return f"cannot write the output: {why.lower()}; make space, or write elsewhere"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files: raise the limit (ulimit -n)"
    if error.errno in _UNREADABLE and error.filename is not None:
        return f"cannot read {error.filename}: {why}; give another file or folder"
    return ""


def _own_fault(error: Exception) -> int:
    """An unexpected error: its traceback goes to a file, to be reported with."""
    kept = "".join(traceback.format_exception(error))
    where = "the traceback could not be kept"
    with suppress(OSError):
        with tempfile.NamedTemporaryFile(
            "w",
            prefix="dtbench-fault-",
            suffix=".txt",
            delete=False,
            encoding="utf-8",
            errors="backslashreplace",
        ) as file:
            file.write(
                f"dtbench {__version__}, Python {platform.python_version()}, {platform.platform()}\n"
                f"{mask_arguments(sys.argv[1:])}\n{kept}"
            )
        where = file.name
    return _refuse(f"an internal error, please report it with {where}: {describe(error)}", EXIT_OWN_FAULT)


def _refuse(text: str, code: int) -> int:
    """One line on stderr, from one rank: in a launched world all ranks come here alike."""
    from dtbench.engine.rank import complain_from_one_rank

    complain_from_one_rank(mask(text))
    return code
