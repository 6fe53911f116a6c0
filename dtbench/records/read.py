"""Strict reading of JSON from files that may come from anywhere.

`decode` takes the text apart, `into` makes a typed struct (or dataclass) of what it held. Neither lets pass
what its writer could not have written; messages name the field, show its value escaped and say what was
expected.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import msgspec

from dtbench.suite.errors import UnreadableRunError
from dtbench.suite.fields import MAX_INT

_T = TypeVar("_T")
_Json = Any  # what stands in a file, before it is checked


class BadFieldError(ValueError):
    """A text that is no strict JSON, or a field of the wrong type or range; the message names it."""


# ----------------------------------------------------------------------------------------- JSON


def decode(data: bytes) -> dict[str, _Json]:
    """A JSON object: no key twice, no NaN, no number beyond 64 bits, no half of a surrogate pair.

    Raises:
        BadFieldError: anything else.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_bounded,
        )
        if "\\u" in text:  # the escape of half a surrogate pair is JSON, but no text one can print
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except json.JSONDecodeError as error:
        raise BadFieldError(f"not JSON ({error.msg} at character {error.pos + 1})") from error
    except UnicodeError as error:
        raise BadFieldError(f"not UTF-8 ({error})") from error
    except RecursionError as error:
        raise BadFieldError("nested too deeply") from error
    if not isinstance(value, dict):
        raise BadFieldError(f"{shown(value)}, expected a JSON object")
    return value


def _no_duplicates(pairs: list[tuple[str, _Json]]) -> dict[str, _Json]:
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise BadFieldError(f"the key {shown(twice)} appears twice in one object")
    return made


def _no_constant(name: str) -> None:
    raise BadFieldError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise BadFieldError(f"the number {text[:40]} is out of range")
    return value


def _bounded(text: str) -> int:
    if len(text) > 20 or abs(int(text)) > MAX_INT:
        raise BadFieldError(f"the integer {text[:40]} is out of range, expected at most 64 bits")
    return int(text)


# ---------------------------------------------------------------------------------------- typed structs


def into(value: object, kind: type[_T], name: str = "") -> _T:
    """`value` as a struct or dataclass of type `kind`; fields that it does not know are left out.

    name: what `value` is called in messages; the fields are named below it.

    Raises:
        BadFieldError: a field that is missing, of the wrong type or out of range.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadFieldError(_fault(str(error), value, kind, name)) from error
    except RecursionError as error:
        raise BadFieldError("nested too deeply") from error


@contextlib.contextmanager
def opened(path: Path, what: str, max_bytes: int | None = None) -> Iterator[BinaryIO]:
    """A regular file of at most `max_bytes`, open for reading.

    Raises:
        UnreadableRunError: for anything else, before a byte is read: `path` and what was expected (`what`).
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited on for ever
            raise UnreadableRunError(f"{path} is not a regular file: expected {what}")
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
    with opened(path, what, max_bytes) as file:
        return file.read()


def read_lines(path: Path, what: str, max_bytes: int, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers from 1; see `read_bytes`.

    Raises:
        UnreadableRunError: no regular file, too large, or a line too long.
    """
    with opened(path, what, max_bytes) as file:
        for number, data in enumerate(iter(lambda: file.readline(max_line_bytes + 1), b""), 1):
            if len(data) > max_line_bytes:
                raise UnreadableRunError(
                    f"{path}: line {number} is longer than {max_line_bytes} bytes: expected {what}"
                )
            yield number, data


def read_json(path: Path, what: str, max_bytes: int) -> dict[str, _Json]:
    """The JSON object in a file; see `read_bytes`.

    Raises:
        UnreadableRunError: no regular file, too large, or no strict JSON.
    """
    try:
        return decode(read_bytes(path, what, max_bytes))
    except BadFieldError as error:
        raise UnreadableRunError(f"{path} is not {what}: {error}") from error


_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def _fault(message: str, value: _Json, kind: object, name: str) -> str:
    """msgspec's message in this project's words: the field by its path, its value, and what was expected.

    msgspec does not say which key of a mapping it means (`[...]`), so its items are tried one by one.
    """
    what, _, path = message.rpartition(" - at `")
    if not what:
        what, path = message, ""
    of_key = " - at `key` in `" in message
    what = what.partition(" - at `key` in")[0]
    for field, index in _STEP.findall(path):
        kind = _plain(kind)
        if index == "...":
            return _fault_of_item(value, kind, name)
        if index:
            value, name = value[int(index)], f"{name}[{index}]"
            kind = _of_items(kind, int(index))
        else:
            value, kind = value[field], _fields(kind)[field]
            name = _join(name, field)
    if of_key:
        return _fault_of_key(value, kind, name)
    if missing := _MISSING.match(what):
        wanted = _words(_fields(_plain(kind))[missing[1]])
        return f"{_join(name, missing[1])} is missing, expected {wanted}"
    if not what.startswith(("Expected", "Invalid", "Integer", "Number")):  # by a __post_init__, field first
        return _join(name, what)
    return f"{name or 'it'} is {shown(value)}, expected {_words(kind)}"


def _fault_of_item(value: Mapping[str, _Json], kind: object, name: str) -> str:
    of_items = typing.get_args(kind)[1]
    for key, item in value.items():
        try:
            msgspec.convert(item, of_items)
        except msgspec.ValidationError as error:
            return _fault(str(error), item, of_items, _join(name, _key(key)))
    return f"{name} is {shown(value)}"


def _fault_of_key(value: Mapping[str, _Json], kind: object, name: str) -> str:
    of_keys = typing.get_args(_plain(kind))[0]
    for key in value:
        try:
            msgspec.convert(key, of_keys)
        except msgspec.ValidationError:
            return f"{name} has the key {shown(key)}, expected {_words(of_keys)}"
    return f"{name} is {shown(value)}"


def _join(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field


def _key(key: str) -> str:
    return ascii(key)[1:-1][:60]


def _plain(kind: object) -> object:
    """The type without its bounds, and without None beside it."""
    while True:
        if typing.get_origin(kind) is Annotated:
            kind = typing.get_args(kind)[0]
            continue
        others = [one for one in typing.get_args(kind) if one is not type(None)]
        if not _is_union(kind) or len(others) != 1:
            return kind
        kind = others[0]


def _is_union(kind: object) -> bool:
    return type(None) in typing.get_args(kind) or "Union" in type(kind).__name__


def _of_items(kind: object, index: int) -> object:
    args = typing.get_args(kind)
    return args[index] if typing.get_origin(kind) is tuple and args[-1] is not ... else args[0]


@functools.cache
def _fields(kind: object) -> dict[str, object]:
    there = isinstance(kind, type) and (
        hasattr(kind, "__struct_fields__") or hasattr(kind, "__dataclass_fields__")
    )
    return typing.get_type_hints(kind, include_extras=True) if there else {}


def _words(kind: object) -> str:
    """What a type takes, for a message."""
    if typing.get_origin(kind) is Annotated:
        inner, *notes = typing.get_args(kind)
        meta = next(note for note in notes if isinstance(note, msgspec.Meta))
        return meta.description or _words(inner) + _bounds(meta, inner)
    args = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(str, args))
    if _is_union(kind):
        words = dict.fromkeys(_words(one) for one in args if one is not type(None))
        return " or ".join(words) + (" or null" if type(None) in args else "")
    plain = typing.get_origin(kind) or kind
    if plain is tuple and args[-1] is not ...:
        return f"a list of {len(args)}"
    names = {str: "a string", bool: "true or false", int: "an integer", float: "a number"}
    if plain in names:
        return names[plain]
    return "a list" if isinstance(plain, type) and issubclass(plain, Sequence) else "an object"


def _bounds(meta: msgspec.Meta, inner: object) -> str:
    if meta.min_length:
        return " that is not empty"
    least = f" of at least {meta.ge:g}" if meta.ge is not None else ""
    above = f" above {meta.gt:g}" if meta.gt is not None else ""
    most = (
        f"{',' if least or above else ''} at most {meta.le:g}"
        if inner is float and meta.le is not None
        else ""
    )
    return least + above + most


def shown(value: object) -> str:
    """A value from a foreign file, short and without characters that would move a terminal's cursor."""
    if value is None:
        return "missing"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
