"""Markdown as GitHub reads it: tables, and foreign text that is neither HTML nor marks of its own."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence

from dtbench.model.errors import plain

_MARKS = frozenset("\\`*_[]|~")


def escaped(text: str) -> str:
    """Foreign text as it is: on one line, its marks and its HTML spelled as entities."""
    shown = html.escape(plain(text), quote=False)
    return "".join(f"&#{ord(c)};" if c in _MARKS else c for c in shown)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Collection[str] = ()) -> list[str]:
    """The lines of a table; cells are Markdown. numeric: the columns that are aligned to the right."""
    rule = "|".join("---:" if title in numeric else "---" for title in head)
    return [_line(head), f"|{rule}|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
