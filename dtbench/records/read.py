"""Strict reading of JSON from files that may come from anywhere.

msgspec checks every field for type and range. Its message becomes one line that a terminal can show.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from dtbench.errors import UnreadableRunError, plain
from dtbench.file_kinds import refuse_other_kind

_T = TypeVar("_T")
_Json = Any  # what stands in a file, before it is checked


class BadFieldError(ValueError):
    """A text that is no JSON object, or a field of the wrong type or range; the message names it."""


def decode(data: bytes) -> dict[str, _Json]:
    """A JSON object: UTF-8, without NaN and infinities.

    Raises:
        BadFieldError: anything else.
    """
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise BadFieldError(f"not JSON ({plain(str(error))})") from error
    except RecursionError as error:
        raise BadFieldError("nested too deeply") from error
    if not isinstance(value, dict):
        raise BadFieldError(f"{abbreviate(value)}, expected a JSON object")
    return value


def convert(value: object, kind: type[_T], name: str = "") -> _T:
    """`value` as a struct or dataclass of type `kind`; fields that it does not know are left out.

    name: what `value` is called in messages; the fields are named below it.

    Raises:
        BadFieldError: a field that is missing, of the wrong type or out of range.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadFieldError(field_fault(error, name)) from error
    except RecursionError as error:
        raise BadFieldError("nested too deeply") from error


def field_fault(error: msgspec.ValidationError, name: str = "") -> str:
    """`rows[1].size: expected int, got str`, from msgspec's "Expected `int`, got `str` - at `$.rows[1].size`"."""
    what, _, path = plain(str(error)).replace("`", "").partition(" - at ")
    field = (
        f"{name}{path.removeprefix('$')}".lstrip(".") if path.startswith("$") else f"{path} {name}".strip()
    )
    return f"{field}: {what[:1].lower()}{what[1:]}" if field else what


@contextlib.contextmanager
def open_file(path: Path, what: str, max_bytes: int | None = None) -> Iterator[BinaryIO]:
    """A regular file of at most `max_bytes`, open for reading.

    Raises:
        UnreadableRunError: for anything else, before more than its head is read: `path` and what was expected (`what`).
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited on for ever
            raise UnreadableRunError(f"{path} is not a regular file: expected {what}")
        refuse_other_kind(path, what, programs=True)
        with path.open("rb") as file:
            if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
                raise UnreadableRunError(f"{path} has more than {max_bytes} bytes: expected {what}")
            yield file
    except OSError as error:
        raise UnreadableRunError(f"cannot read {path}: {error.strerror or error}; expected {what}") from error
    except ValueError as error:  # a null byte in the name
        raise UnreadableRunError(f"{str(path)!r} is not the path of a file: {error}") from error


def read_bytes(path: Path, what: str, max_bytes: int) -> bytes:
    """All of a file.

    what: what it should hold, in words, for messages.

    Raises:
        UnreadableRunError: no regular file, or too large.
    """
    with open_file(path, what, max_bytes) as file:
        return file.read()


def read_lines(path: Path, what: str, max_bytes: int, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers from 1; see `read_bytes`.

    Raises:
        UnreadableRunError: no regular file, too large, or a line too long.
    """
    with open_file(path, what, max_bytes) as file:
        for number, data in enumerate(iter(lambda: file.readline(max_line_bytes + 1), b""), 1):
            if len(data) > max_line_bytes:
                raise UnreadableRunError(
                    f"{path}: line {number} is longer than {max_line_bytes} bytes: expected {what}"
                )
            yield number, data


def read_json(path: Path, what: str, max_bytes: int) -> dict[str, _Json]:
    """The JSON object in a file; see `read_bytes`.

    Raises:
        UnreadableRunError: no regular file, too large, or no JSON object.
    """
    try:
        return decode(read_bytes(path, what, max_bytes))
    except BadFieldError as error:
        raise UnreadableRunError(f"{path} is not {what}: {error}") from error


def abbreviate(value: object) -> str:
    """A value from a foreign file, short and without characters that would move a terminal's cursor."""
    if value is None:
        return "missing"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
