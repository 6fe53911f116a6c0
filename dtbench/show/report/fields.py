"""Fields of JSON files from elsewhere: taken only if they are what they should be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dtbench.files.read import BadFieldError, shown


def number(of: Mapping[str, Any], name: str, *, least: float = -math.inf) -> float:
    """A finite number, at least so large."""
    value = of.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise BadFieldError(f"{name} is {shown(value)}, expected a number" + _at_least(least))
    return float(value)


def optional(of: Mapping[str, Any], name: str, *, least: float = -math.inf) -> float | None:
    """The same, or None where it is null or absent."""
    return None if of.get(name) is None else number(of, name, least=least)


def text(of: Mapping[str, Any], name: str) -> str:
    value = of.get(name)
    if not isinstance(value, str):
        raise BadFieldError(f"{name} is {shown(value)}, expected text")
    return value


def texts(of: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """A list of texts; none where it is absent."""
    value = of.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise BadFieldError(f"{name} is {shown(value)}, expected a list of texts")
    return tuple(value)


def mapping(of: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    return as_mapping(of.get(name), name)


def as_mapping(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise BadFieldError(f"{name} is {shown(value)}, expected an object")
    return value


def mappings(of: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """A list of objects."""
    value = of.get(name)
    if not isinstance(value, list):
        raise BadFieldError(f"{name} is {shown(value)}, expected a list")
    return [as_mapping(one, name) for one in value]


def _at_least(least: float) -> str:
    return "" if least == -math.inf else f" of at least {least:g}"
