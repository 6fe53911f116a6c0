"""Secrets in what users type are masked before it is written: run files and reports are passed around.

A secret is the value of an option, variable or header whose name says so, and what stands before the host of a URL.
Of the environment only chosen variables are recorded at all (`dtbench.machine.provenance`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MASK = "***"
_NAME = r"[\w.-]*(?:tokens?(?!\w)|secret|passw|credential|api[-_]?key|access[-_]?key|authorization)[\w.-]*"
_SECRET_NAME = re.compile(rf"-*{_NAME}", re.IGNORECASE)
# `NAME=VALUE`, `NAME: VALUE`, `--name VALUE`; a number of tokens is none.
_NAMED_VALUE = re.compile(
    rf"""(?i)((?<![\w.-])(?:{_NAME}["']?\s*[=:]\s*["']?|--?{_NAME}\s+))(?:bearer\s+)?(?!\d+\b)[^\s,;&"']+"""
)
_USER_IN_URL = re.compile(r"(:/{1,2})[^/\s]+@")  # paths have one slash of two


def is_secret(name: str) -> bool:
    """Whether a variable or option of this name holds a secret."""
    return _SECRET_NAME.fullmatch(name) is not None


def mask(text: str) -> str:
    """The text without what looks like a secret."""
    return _USER_IN_URL.sub(rf"\1{MASK}@", _NAMED_VALUE.sub(rf"\1{MASK}", text))


def mask_arguments(argv: Sequence[str]) -> list[str]:
    """The arguments of a command line."""
    after = ("", *argv)
    return [
        MASK if name.startswith("-") and is_secret(name) else mask(arg)
        for name, arg in zip(after, argv, strict=False)
    ]


def is_whole(argv: Sequence[str]) -> bool:
    """Whether `mask_arguments` left these as they were."""
    return not any(MASK in word for word in argv)


def mask_options(options: Mapping[str, str]) -> dict[str, str]:
    """Options of a command line, or variables, by their names, each with what may be shown of its value."""
    return {name: MASK if is_secret(name) else mask(value) for name, value in options.items()}
