"""Markdown as GitHub reads it: tables, and foreign text that is neither HTML nor marks of its own."""

from __future__ import annotations

import html
import re
from collections.abc import Collection, Sequence

from dtbench.errors import plain

_MARKS = frozenset("\\`*_[]|~")
_USUAL_NAME = re.compile(r"[A-Za-z0-9_ .,:()/+=%-]*(?:\[[\w ]+\])?")


def escaped(text: str) -> str:
    """Foreign text as it is: on one line, its marks and its HTML spelled as entities."""
    shown = html.escape(plain(text), quote=False)
    return "".join(f"&#{ord(c)};" if c in _MARKS else c for c in shown)


def name(text: str) -> str:
    """The name of an op or a program as it is written, `escaped` where it holds more than such names do."""
    return text if _USUAL_NAME.fullmatch(text) else escaped(text)


def code(text: str) -> str:
    """Foreign text as code, on one line."""
    return f"`{plain(text).replace('`', '&#96;')}`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Collection[str] = ()) -> list[str]:
    """The lines of a table; cells are Markdown. numeric: the columns that are aligned to the right."""
    rule = "|".join("---:" if title in numeric else "---" for title in head)
    return [_line(head), f"|{rule}|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
