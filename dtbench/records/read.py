"""Reads JSON from untrusted files.

msgspec checks type and range of every field. Its message is reduced to a single printable line.
"""

import contextlib
import gzip
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from dtbench.errors import UnreadableRunError, plain
from dtbench.file_kinds import refuse_other_kind

_T = TypeVar("_T")
_Json = Any  # an unchecked value from a file


class BadFieldError(ValueError):
    """A text is not a JSON object, or a field has the wrong type or range. The message names the field."""


def decode(data: bytes) -> dict[str, _Json]:
    """Decodes a JSON object in UTF-8; NaN and infinities are not allowed.

    Raises:
        BadFieldError: the data are not such an object.
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
    """Converts `value` to a struct or dataclass of type `kind`, ignoring unknown fields.

    Args:
        name: prefix of field names in messages.

    Raises:
        BadFieldError: a field is missing, has the wrong type or is out of range.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadFieldError(field_fault(error, name)) from error
    except RecursionError as error:
        raise BadFieldError("nested too deeply") from error


def field_fault(error: msgspec.ValidationError, name: str = "") -> str:
    """Rewrites msgspec's "Expected `int`, got `str` - at `$.rows[1].size`" to `rows[1].size: expected int, got str`."""
    fault, _, path = plain(str(error)).replace("`", "").partition(" - at ")
    field = (
        f"{name}{path.removeprefix('$')}".lstrip(".") if path.startswith("$") else f"{path} {name}".strip()
    )
    return f"{field}: {fault[:1].lower()}{fault[1:]}" if field else fault


@contextlib.contextmanager
def open_file(path: Path, expected: str, max_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Opens a regular file of at most `max_bytes` for reading.

    Args:
        expected: description of the expected contents, for messages.

    Raises:
        UnreadableRunError: the file cannot be opened, is not regular, is too large, or is of another known kind.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe could block forever
            raise UnreadableRunError(f"{path} is not a regular file: expected {expected}")
        refuse_other_kind(path, expected, programs=True)
        with path.open("rb") as file:
            if max_bytes is not None and os.fstat(file.fileno()).st_size > max_bytes:
                raise UnreadableRunError(f"{path} has more than {max_bytes} bytes: expected {expected}")
            yield file
    except OSError as error:
        raise UnreadableRunError(
            f"cannot read {path}: {error.strerror or error}; expected {expected}"
        ) from error
    except ValueError as error:  # a null byte in the name
        raise UnreadableRunError(f"{str(path)!r} is not the path of a file: {error}") from error


def read_bytes(path: Path, expected: str, max_bytes: int) -> bytes:
    """Reads an entire file; see `open_file`.

    Raises:
        UnreadableRunError: see `open_file`.
    """
    with open_file(path, expected, max_bytes) as file:
        return file.read()


def read_lines(
    path: Path, expected: str, max_bytes: int, max_line_bytes: int, *, allow_gzip: bool = False
) -> Iterator[tuple[int, bytes]]:
    """Yields the number (from 1) and contents of each line of a file; see `open_file`.

    Args:
        allow_gzip: whether the file may be compressed. `max_bytes` then limits the compressed size, and a damaged file
            raises EOFError or zlib.error.

    Raises:
        UnreadableRunError: see `open_file`; or a line is too long.
    """
    with open_file(path, expected, max_bytes) as file:
        stream = gzip.GzipFile(fileobj=file) if allow_gzip and file.read(2) == b"\x1f\x8b" else file
        file.seek(0)
        for number, data in enumerate(iter(lambda: stream.readline(max_line_bytes + 1), b""), 1):
            if len(data) > max_line_bytes:
                raise UnreadableRunError(
                    f"{path}: line {number} is longer than {max_line_bytes} bytes: expected {expected}"
                )
            yield number, data


def read_json(path: Path, expected: str, max_bytes: int) -> dict[str, _Json]:
    """Reads the JSON object in a file; see `open_file`.

    Raises:
        UnreadableRunError: see `open_file`; or the file does not contain a JSON object.
    """
    try:
        return decode(read_bytes(path, expected, max_bytes))
    except BadFieldError as error:
        raise UnreadableRunError(f"{path} is not {expected}: {error}") from error


def abbreviate(value: object) -> str:
    """Formats a value from an untrusted file for a message: at most 60 characters, all printable."""
    if value is None:
        return "missing"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
