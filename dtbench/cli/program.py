"""The command line: the group of commands, and the translation of errors into one line and an exit code.

Each command has a file in this package, imported when the command is called or described. These files import neither
torch nor other slow modules at the top, so that `dtbench --help` starts fast.
"""

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

# Section of `dtbench --help` -> its commands.
_COMMANDS = {
    "Measure": ("run", "list", "profile", "preflight", "doctor"),
    "Read results": ("show", "report", "import"),
    "Compare": ("compare", "gate"),
    "Model costs": ("calibrate", "plan", "export"),
}
_SHOWN = tuple(name for names in _COMMANDS.values() for name in names)
_HIDDEN = ("suite",)  # described in the guide to writing suites
# Commands whose file has another name.
_MODULES = {"list": "run", "report": "show", "import": "import_logs", "export": "calibrate"}
_COMPLETE = "_DTBENCH_COMPLETE"  # the variable that a shell sets to request completion, named as in click
# These commands run without garbage collection, which would take as long as their work and free little.
_READERS = {"show", "report", "compare", "calibrate"}


class _Commands(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return [*_SHOWN]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in (*_SHOWN, *_HIDDEN):
            return None
        command = getattr(
            importlib.import_module(f"dtbench.cli.{_MODULES.get(name, name)}"), f"{name}_command"
        )
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
        for task, names in _COMMANDS.items():
            with formatter.section(task):
                formatter.write_dl(
                    [
                        (name.ljust(column), command.get_short_help_str(80))
                        for name in names
                        if (command := self.get_command(context, name))
                    ]
                )


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
    """Runs the program and exits. A DtbenchError is printed as one line.

    Args:
        invoke: returns the exit code; by default runs the command line.
    """
    with clean_output():
        code = _run(invoke or _invoke)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
    sys.exit(code)


def _invoke() -> object:
    if (request := os.environ.get(_COMPLETE)) is not None:
        return shell_complete(cli, {}, "dtbench", _COMPLETE, request)
    # Not `cli.main`, whose exit code for a closed pipe is 1, the code of a regression.
    with cli.make_context("dtbench", sys.argv[1:]) as context:
        return cli.invoke(context)


def _run(invoke: Callable[[], object]) -> int:
    try:
        code = invoke()
        if sys.stdout is not None:
            sys.stdout.flush()
    except Exit as ended:  # --help, --version
        code = ended.exit_code
    except UnknownOptionError as error:  # from `run` or `list`, whose suites define options
        code = _refuse(f"{error}{_nearest_run_option(error)}", error.exit_code)
    except DtbenchError as error:
        code = _refuse(str(error), error.exit_code)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "dtbench"
        code = _refuse(f"{_explain(error)}; `{command} --help` lists the options", error.exit_code)
    except click.ClickException as error:
        code = _refuse(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        code = _refuse("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the program that reads the output has exited, such as `head`
        code = EXIT_OK
        _drop_output()
    except Exception as error:
        why = _external_cause(error)
        code = _refuse(why, EXIT_USAGE) if why else _own_fault(error)
    return code if isinstance(code, int) else EXIT_OK


def _explain(error: click.UsageError) -> str:
    """Returns the message of an error, with the nearest existing name or the expected range of a number."""
    if isinstance(error, click.BadParameter) and isinstance(error.param, click.Option):
        option, value_type, usual = error.param.opts[0], error.param.type, error.param.default
        kinds = {"integer": "a whole number", "float": "a number"}
        value, is_not, _ = error.message.partition(" is not ")
        if is_not and (expected := kinds.get(value_type.name.removesuffix(" range"))):
            lowest, highest = getattr(value_type, "min", None), getattr(value_type, "max", None)
            if lowest is not None:
                expected += f" {'above' if getattr(value_type, 'min_open', False) else 'from'} {lowest:g}"
                expected += " on" if highest is None else f" to {highest:.10g}"
            example = usual if isinstance(usual, int | float) else int(lowest or 1)
            return f"{option}: got {value}, expected {expected}, such as {option} {example}"
    if (
        isinstance(error, click.MissingParameter)
        and isinstance(error.param, click.Option)
        and error.param.help
    ):
        return f"{error.format_message().rstrip('.')}: {error.param.help.rstrip('.')}"
    if isinstance(error, click.NoSuchOption | click.NoSuchCommand) and error.possibilities:
        return f"{error.message} Did you mean {error.possibilities[0]!r}?"
    return error.format_message().rstrip(".")


def _nearest_run_option(error: UnknownOptionError) -> str:
    from dtbench.cli.run import run_command

    return nearest(
        error.option,
        [
            *(name for option in run_command.params for name in (*option.opts, *option.secondary_opts)),
            *error.suite_options,
        ],
    )


def _drop_output() -> None:
    """Discards all further standard output, including what the interpreter flushes at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# errno of failed writes to standard output. Failed writes to files have other messages.
_NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# errno of a failed check whether a path exists.
_UNREADABLE = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ESTALE)


def _external_cause(error: Exception) -> str:
    """Returns the message for an error that the operating system caused; "" for other errors."""
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
    """Writes the traceback of an unexpected error to a file, for a bug report."""
    location = "the traceback could not be saved"
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
                f"{mask_arguments(sys.argv[1:])}\n{''.join(traceback.format_exception(error))}"
            )
        location = file.name
    return _refuse(f"an internal error, please report it with {location}: {describe(error)}", EXIT_OWN_FAULT)


def _refuse(text: str, code: int) -> int:
    """Prints one line on stderr and returns the code. Under a launcher only one rank prints it."""
    from dtbench.engine.rank import complain_from_one_rank

    complain_from_one_rank(mask(text))
    return code
