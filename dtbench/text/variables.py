"""Lists of variables on the command line, of an arm of a gate or of a sweep."""

from __future__ import annotations

import re

from dtbench.suite.errors import UsageError
from dtbench.text.masking import mask, mask_variables

# An arm that set these would not measure what it says.
_OWN_VARIABLES = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def parse_variables(text: str) -> dict[str, str]:
    """`A=1,B=x,y` -> {"A": "1", "B": "x,y"}: a comma begins a variable where a name and = follow.

    Raises:
        UsageError: no list of variables, or one that every launch sets itself, or one twice.
    """
    if not text:
        return {}
    variables: dict[str, str] = {}
    for part in re.split(r",(?=[A-Za-z_]\w*=)", text):
        match = re.fullmatch(r"([A-Za-z_]\w*)=(.*)", part, re.DOTALL)
        if match is None or "\0" in part:
            raise UsageError(f"{mask(part)!r} is no variable: expected NAME=VALUE")
        if match[1] in _OWN_VARIABLES or match[1].startswith("DTBENCH_GATE"):
            raise UsageError(f"the list sets {match[1]}, which every launch sets itself: leave it out")
        if match[1] in variables:
            raise UsageError(f"the list sets {match[1]} twice: give it once")
        variables[match[1]] = match[2]
    return variables


def masked_list(text: str) -> str:
    """The list, each value as `mask_variables` shows it.

    Raises:
        UsageError: as `parse_variables`.
    """
    return ",".join(f"{name}={value}" for name, value in mask_variables(parse_variables(text)).items())
