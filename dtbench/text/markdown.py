"""GitHub Markdown: tables, and text from other sources without HTML or Markdown markup."""

import html
import re
from collections.abc import Collection, Sequence

from dtbench.errors import plain

_MARKS = frozenset("\\`*_[]|~")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_ .,:()/+=%-]*(?:\[[\w ]+\])?")


def escaped(text: str) -> str:
    """Returns text on one line that GitHub shows literally: markup and HTML are written as entities."""
    escaped_html = html.escape(plain(text), quote=False)
    return "".join(f"&#{ord(char)};" if char in _MARKS else char for char in escaped_html)


def name(text: str) -> str:
    """Returns the name of an op or a program. It is escaped only if it contains unusual characters."""
    return text if _PLAIN_NAME.fullmatch(text) else escaped(text)


def code(text: str) -> str:
    """Formats text as inline code on one line."""
    return f"`{plain(text).replace('`', '&#96;')}`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numeric: Collection[str] = ()) -> list[str]:
    """Returns the lines of a table.

    Args:
        head: titles of the columns.
        rows: cells in Markdown.
        numeric: titles of the columns that are aligned to the right.
    """
    rule = "|".join("---:" if title in numeric else "---" for title in head)
    return [_line(head), f"|{rule}|", *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
