"""The history that `dtbench gate --history` appends to: JSON Lines, one revision each, of one kind of machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from dtbench.errors import UnreadableRunError
from dtbench.records.read import BadFieldError, abbreviate, convert, decode, read_lines

MAX_FILE_BYTES = 256 * 2**20
MAX_LINE_BYTES = 16 * 2**20

_Seconds = Annotated[float, Meta(gt=0, lt=1e6, description="seconds above 0")]


class HistoryLine(Struct, frozen=True, kw_only=True):
    """A revision: seconds by benchmark, on a machine described by what has to agree for times to be comparable."""

    kind: Literal["history"] = "history"
    schema: Literal[1] = 1
    machine: Mapping[str, object]
    time: str = ""
    revision: str
    torch: str | None = None
    times_s: Mapping[str, _Seconds]


def read_history(path: Path, machine: Mapping[str, object] | None = None) -> list[HistoryLine]:
    """The revisions in a file, oldest first. A last line cut short is left out.

    machine: the one they have to be of; None takes that of the first line.

    Raises:
        UnreadableRunError: damaged, too large, of a newer schema, or of another machine.
    """
    lines: list[HistoryLine] = []
    try:
        for number, data in read_lines(path, "a history of `dtbench gate`", MAX_FILE_BYTES, MAX_LINE_BYTES):
            if not data.endswith(b"\n"):
                break
            try:
                line = convert(decode(data), HistoryLine)
            except BadFieldError as error:
                raise BadFieldError(f"line {number}: {error}") from error
            machine = line.machine if machine is None else machine
            if line.machine != machine:
                raise BadFieldError(
                    f"line {number} was measured on {abbreviate(line.machine)}, expected {abbreviate(dict(machine))}: "
                    "times of another machine are no baseline"
                )
            lines.append(line)
    except ValueError as error:
        raise UnreadableRunError(f"{path} is no history of `dtbench gate`: {error}") from error
    return lines
