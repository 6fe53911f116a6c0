"""Masks secrets in command lines and variables before they are recorded, since run files and reports get shared.

A secret is the value of an option, variable or header with a name such as "token", or the user part of a URL. Only
selected environment variables are recorded at all (`dtbench.machine.provenance`).
"""

import re
from collections.abc import Mapping, Sequence

MASK = "***"
_NAME = r"[\w.-]*(?:tokens?(?!\w)|secret|passw|credential|api[-_]?key|access[-_]?key|authorization)[\w.-]*"
_SECRET_NAME = re.compile(rf"-*{_NAME}", re.IGNORECASE)
# `NAME=VALUE`, `NAME: VALUE`, `--name VALUE`. A number is no secret, e.g. in `--tokens 4096`.
_NAMED_VALUE = re.compile(
    rf"""(?i)((?<![\w.-])(?:{_NAME}["']?\s*[=:]\s*["']?|--?{_NAME}\s+))(?:bearer\s+)?(?!\d+\b)[^\s,;&"']+"""
)
_USER_IN_URL = re.compile(r"(:/{1,2})[^/\s]+@")  # one slash, too: Path turns two slashes into one


def is_secret(name: str) -> bool:
    """Whether the value of a variable or option of this name is a secret."""
    return _SECRET_NAME.fullmatch(name) is not None


def mask(text: str) -> str:
    """Masks everything in a text that looks like a secret."""
    return _USER_IN_URL.sub(rf"\1{MASK}@", _NAMED_VALUE.sub(rf"\1{MASK}", text))


def mask_arguments(argv: Sequence[str]) -> list[str]:
    """Masks the secrets in the arguments of a command line."""
    return [
        MASK if name.startswith("-") and is_secret(name) else mask(arg)
        for name, arg in zip(("", *argv), argv, strict=False)
    ]


def is_unmasked(argv: Sequence[str]) -> bool:
    """Whether no argument is masked."""
    return not any(MASK in argument for argument in argv)


def mask_options(options: Mapping[str, str]) -> dict[str, str]:
    """Masks the secrets in options or variables, given as name -> value."""
    return {name: MASK if is_secret(name) else mask(value) for name, value in options.items()}
