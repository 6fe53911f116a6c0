"""The errors a user of dtbench can meet, and the exit code of each.

    DtbenchError                a mistake or a fault that has a one-line explanation   exit 2
    +-- UsageError              options that cannot be followed                        exit 2
    |   +-- UnknownOptionError  an option that neither `run` nor a suite of it has      exit 2
    |   +-- RankMismatchError   what differs between ranks, found by all of them        exit 2
    +-- UnreadableRunError      a file that is not ours, too new, or damaged           exit 2
    +-- OutputError             a place that cannot be written (full, forbidden, taken) exit 2
    +-- WorldBrokenError        a rank died or hung: the run cannot go on              exit 5
    +-- ArmError                an arm of a gate that cannot be built or started       exit 5

Every message says what was got, what was expected and what to do. Any other exception is a fault of ours (exit 70).
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb
from typing import Final

# Exit codes of the command line. 0 and 1 follow every comparison tool; 2 is click's for bad usage.
EXIT_OK: Final = 0
EXIT_REGRESSION: Final = 1
EXIT_USAGE: Final = 2
EXIT_INCONCLUSIVE: Final = 3
EXIT_NOTHING: Final = 4
EXIT_CASE_FAILED: Final = 5
EXIT_OWN_FAULT: Final = 70  # sysexits.h's EX_SOFTWARE
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, the shell's convention

_MAX_REASON_CHARS = 400
# What torch's allocators of GPUs and of CPUs (c10/core/impl/alloc_cpu.cpp) and C++ say.
_OUT_OF_MEMORY = ("OutOfMemoryError", "can't allocate memory", "std::bad_alloc")


class DtbenchError(Exception):
    """A fault that one line explains; the command line prints it without a traceback."""

    exit_code = EXIT_USAGE


class UsageError(DtbenchError):
    """Options that cannot be followed."""


class UnknownOptionError(UsageError):
    """An option, with its dashes, that neither `run` nor a suite of the run has; the suites have `of_suites`."""

    def __init__(self, option: str, of_suites: Sequence[str], message: str) -> None:
        super().__init__(message)
        self.option = option
        self.of_suites = of_suites


class RankMismatchError(UsageError):
    """What has to be the same on all ranks and is not, or what one of them was refused. All ranks raise it at once."""


class UnreadableRunError(DtbenchError):
    """A file that is not a dtbench run, is of a newer schema, or is damaged before its end."""


class OutputError(DtbenchError):
    """A place that cannot be written: no permission, no space, or taken by another file."""


class WorldBrokenError(DtbenchError):
    """A rank died or hung, so the remaining cases cannot be measured in this world."""

    exit_code = EXIT_CASE_FAILED


class ArmError(DtbenchError):
    """An arm of a gate that cannot be built, or whose interpreter cannot run the harness."""

    exit_code = EXIT_CASE_FAILED


def describe(error: BaseException) -> str:
    """The error as one line: its type and the first line of its message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    kind = plain(type(error).__name__)
    text = f"{kind}: {lines[0]}" if lines else kind
    if is_out_of_memory(error):
        text = f"ran out of memory: {text}"
    return text if len(text) <= _MAX_REASON_CHARS else text[: _MAX_REASON_CHARS - 3] + "..."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch's allocators or C++ say so."""
    text = f"{type(error).__name__}: {error}"
    return isinstance(error, MemoryError) or any(sign in text for sign in _OUT_OF_MEMORY)


def nearest(name: str, names: Iterable[str]) -> str:
    """`. Did you mean 'dispatch'?`: the name that is spelled most like `name`; empty where none is."""
    near = get_close_matches(name, list(names), n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def format_location(error: BaseException, source: object) -> str:
    """` (FILE:LINE)`, where in a file the error arose; empty where it did not pass through there.

    source: the path of the file, or a function in it.
    """
    code = getattr(source, "__code__", None)
    path = getattr(code, "co_filename", source)
    lines = [line for frame, line in walk_tb(error.__traceback__) if frame.f_code.co_filename == path]
    return f" ({Path(str(path)).name}:{lines[-1]})" if lines else ""


def last_line(text: str) -> str:
    """The last line that a program said."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_MAX_REASON_CHARS] if lines else "it said nothing"


def plain(text: str) -> str:
    """Foreign text without characters that would move a terminal's cursor or end a line."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def print_error(text: str) -> None:
    """The program's own line on stderr. A reader that has gone away (`| head`) does not end the program."""
    with suppress(OSError, ValueError):
        print(f"dtbench: {text}", file=sys.stderr, flush=True)  # noqa: T201
