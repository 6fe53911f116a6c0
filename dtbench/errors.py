"""Exceptions with a one-line explanation for the user, and their exit codes.

    DtbenchError                base class of all errors below                           exit 2
    +-- UsageError              invalid options                                          exit 2
    |   +-- UnknownOptionError  neither `run` nor a suite has the option                 exit 2
    |   +-- RankMismatchError   ranks were started with different settings               exit 2
    +-- UnreadableRunError      a file of another kind, of a newer schema, or damaged    exit 2
    +-- OutputError             a path that cannot be written, or already exists         exit 2
    +-- WorldBrokenError        a rank died or hung, so the run cannot continue          exit 5
    +-- ArmError                an arm of a gate cannot be built or started              exit 5

A message states what was got, what was expected and what to do. Any other exception is a bug in dtbench (exit 70).
"""

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb
from typing import Final

# Exit codes of the command line. 0 and 1 are the convention of diff; click exits with 2 on wrong usage.
EXIT_OK: Final = 0
EXIT_REGRESSION: Final = 1
EXIT_USAGE: Final = 2
EXIT_INCONCLUSIVE: Final = 3
EXIT_NOTHING: Final = 4
EXIT_CASE_FAILED: Final = 5
EXIT_OWN_FAULT: Final = 70  # sysexits.h's EX_SOFTWARE
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, the shell's convention

_MAX_REASON_CHARS = 400
# Texts in the errors of torch's allocators for GPUs and CPUs (c10/core/impl/alloc_cpu.cpp) and of C++.
_OUT_OF_MEMORY = ("OutOfMemoryError", "can't allocate memory", "std::bad_alloc")


class DtbenchError(Exception):
    """An error whose message explains it; the command line prints it without a traceback."""

    exit_code = EXIT_USAGE


class UsageError(DtbenchError):
    """Invalid options."""


class UnknownOptionError(UsageError):
    """An option that neither `run` nor a suite of the run has.

    Attributes:
        option: the option with its dashes.
        suite_options: the options that the suites have.
    """

    def __init__(self, option: str, suite_options: Sequence[str], message: str) -> None:
        super().__init__(message)
        self.option = option
        self.suite_options = suite_options


class RankMismatchError(UsageError):
    """Settings differ between ranks, or one rank refused its settings. All ranks raise this error together."""


class UnreadableRunError(DtbenchError):
    """A file is not of the expected kind, is of a newer schema, or is damaged before its last line."""


class OutputError(DtbenchError):
    """A path cannot be written: no permission, no space, or another file exists there."""


class WorldBrokenError(DtbenchError):
    """A rank died or hung, so these ranks cannot measure the remaining cases."""

    exit_code = EXIT_CASE_FAILED


class ArmError(DtbenchError):
    """An arm of a gate cannot be built, or its interpreter cannot run the harness."""

    exit_code = EXIT_CASE_FAILED


def describe(error: BaseException) -> str:
    """Returns the error's type and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = plain(type(error).__name__)
    text = f"{kind}: {lines[0]}" if lines else kind
    if is_out_of_memory(error):
        text = f"ran out of memory: {text}"
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 3] + "..."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch's allocators or C++ ran out of memory."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY)


def nearest(name: str, names: Iterable[str]) -> str:
    """Returns a hint on the most similar name, e.g. ". Did you mean 'dispatch'?"; "" if no name is similar."""
    near = get_close_matches(name, list(names), n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def format_location(error: BaseException, source: object) -> str:
    """Returns the line of a file where the error arose, as " (FILE:LINE)"; "" if its traceback lacks the file.

    Args:
        source: path of the file, or a function in it.
    """
    path = getattr(getattr(source, "__code__", None), "co_filename", source)
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    return f" ({Path(str(path)).name}:{lines[-1]})" if lines else ""


def last_line(text: str) -> str:
    """Returns the last non-empty line of a program's output."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_MAX_REASON_CHARS] if lines else "it printed nothing"


def plain(text: str) -> str:
    """Escapes unprintable characters, including line ends, in untrusted text."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def print_error(text: str) -> None:
    """Prints a line to stderr. Ignores a closed stderr, as in `dtbench ... |& head`."""
    with suppress(OSError, ValueError):
        print(f"dtbench: {text}", file=sys.stderr, flush=True)  # noqa: T201
