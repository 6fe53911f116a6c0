"""How the terminal is written to: consoles, params, tables whose figures are never cut, foreign text made harmless.

Numbers do not wrap; where a terminal is narrower than they need, the lines run over its edge instead. Text
from files is shown without markup and without the control characters that would move a cursor.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtbench.suite import Param
from dtbench.suite.errors import plain
from dtbench.text.units import format_size

# A title and a cell per row.
Column = tuple[str, Sequence[str | Text]]

# Wide enough that nothing wraps where no terminal reads along.
_PIPE_WIDTH = 10_000
# What a table is made to fit where no terminal says its width; COLUMNS says another.
_READABLE_WIDTH = 120
# Of a table, or lines of one kind: nobody reads more of them, and to lay out a hundred thousand takes a minute.
MAX_ROWS = 1000
MAX_TABLES = 100
# What a column that may be left out has to get, or it is unreadable.
_EXTRA_WIDTH = 24
# What a column of words gets before there is room for such a one: names in shreds are none.
_EASY_WIDTH = 40
# Between columns: a cell's padding and the box's divider.
_GAP = 2


def new_console() -> Console:
    """The terminal; as wide as its lines where nobody reads along and `COLUMNS` says nothing."""
    # Of NO_COLOR alone rich would still print in bold.
    colors: Literal["auto"] | None = None if os.environ.get("NO_COLOR") else "auto"
    console = Console(highlight=False, markup=False, emoji=False, color_system=colors)
    if not console.is_terminal:
        console.width = _told_width() or _PIPE_WIDTH
    return console


def _told_width() -> int:
    """What `COLUMNS` says, or 0."""
    told = os.environ.get("COLUMNS", "")
    return int(told) if told.isdecimal() else 0


def readable_width(console: Console) -> int:
    """Of the terminal; where something else reads along, of `COLUMNS`, else what a wide terminal has."""
    return console.width if console.is_terminal else _told_width() or _READABLE_WIDTH


def width_of(console: Console, words: Iterable[Column], figures: Iterable[Column]) -> int:
    """The least width that `print_columns` makes of them."""
    columns = [_Measured.of(*column) for column in words]
    columns += [_Measured.of(*column, numeric=True) for column in figures]
    if console.is_terminal:
        return _needed(columns)
    return _natural(columns)


def print_columns(
    console: Console,
    words: Iterable[Column],
    figures: Iterable[Column] = (),
    remarks: Iterable[Column] = (),
    extras: Sequence[Column] = (),
) -> None:
    """A table, whole, over the terminal's edge if need be.

    words, remarks: columns of text, which may break between words where the terminal is narrow; without rules and
    bold heads where something else reads along. figures: columns of numbers between them, which never wrap. extras:
    last columns, of text, that are left out where they do not fit; a line then names them.
    """
    columns = [
        *(_Measured.of(*column) for column in words),
        *(_Measured.of(*column, numeric=True) for column in figures),
        *(_Measured.of(*column) for column in remarks),
    ]
    optional = [_Measured.of(*column, least=_EXTRA_WIDTH) for column in extras]
    if not console.is_terminal and _natural([*columns, *optional]) <= console.width:
        _print_plain(console, [*columns, *optional])
        return
    easy = [
        column if column.numeric else replace(column, least=min(column.natural, _EASY_WIDTH))
        for column in columns
    ]
    shown = len(optional)
    while shown and _needed([*easy, *optional[:shown]]) > console.width:
        shown -= 1
    fits = _needed([*easy, *optional[:shown]]) <= console.width
    _print_ruled(console, [*(easy if fits else columns), *optional[:shown]])
    if shown < len(extras):
        left_out = ", ".join(title for title, _ in extras[shown:])
        print_prose(console, f"left out, as the terminal is narrow: {left_out}")


@dataclass(frozen=True)
class _Measured:
    """A column. least, natural: the width that it needs, every word or figure on one line, and that it would like."""

    title: Text
    cells: list[Text]
    numeric: bool
    least: int
    natural: int

    @classmethod
    def of(
        cls, title: str, cells: Sequence[str | Text], *, numeric: bool = False, least: int = 0
    ) -> _Measured:
        shown = [cell if isinstance(cell, Text) else as_text(cell) for cell in cells]
        whole = [as_text(title), *shown]
        natural = max(cell_len(cell.plain) for cell in whole)
        longest = max(cell_len(word) for cell in whole for word in (*cell.plain.split(), ""))
        return cls(
            whole[0], shown, numeric, natural if numeric else max(longest, min(least, natural)), natural
        )


def _needed(columns: Sequence[_Measured]) -> int:
    return sum(column.least for column in columns) + _GAP * (len(columns) - 1)


def _natural(columns: Sequence[_Measured]) -> int:
    return sum(column.natural for column in columns) + _GAP * (len(columns) - 1)


def _print_ruled(console: Console, columns: Sequence[_Measured]) -> None:
    """What is left of the terminal's width goes to the columns that lack most of theirs."""
    widths = [column.least for column in columns]
    spare = console.width - _needed(columns)
    while spare > 0:
        lacks = [column.natural - width for column, width in zip(columns, widths, strict=True)]
        if max(lacks, default=0) <= 0:
            break
        widths[lacks.index(max(lacks))] += 1
        spare -= 1
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for column, width in zip(columns, widths, strict=True):
        justify: Literal["right", "left"] = "right" if column.numeric else "left"
        table.add_column(column.title, justify=justify, no_wrap=column.numeric, width=width)
    for row in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*row)
    width = console.width
    console.width = max(width, _needed(columns) + _GAP)
    console.print(table, crop=False)
    console.width = width


def _print_plain(console: Console, columns: Sequence[_Measured]) -> None:
    """As rich would print it, which takes a second for a thousand rows; whole, without rules."""
    for row in zip(*([column.title, *column.cells] for column in columns), strict=True):
        parts = []
        for cell, column in zip(row, columns, strict=True):
            gap = " " * (column.natural - cell_len(cell.plain))
            parts.append(gap + cell.plain if column.numeric else cell.plain + gap)
        console.file.write("  ".join(parts).rstrip() + "\n")


def print_rest(console: Console, total: int, what: str, remedy: str, shown: int = MAX_ROWS) -> None:
    """Says how many are not shown, if there are more than that, and how to see them."""
    if total > shown:
        print_line(console, f"... and {total - shown:,} more {what}; {remedy}")


def print_line(console: Console, line: str, style: str = "") -> None:
    """One line of text, which the terminal may wrap."""
    console.print(as_text(line, style), soft_wrap=True)


def print_prose(console: Console, text: str, style: str = "", width: int | None = None) -> None:
    """A sentence, broken between words where the terminal, or `width`, is narrower; else one line where nobody reads
    along."""
    console.print(as_text(text, style), width=width)


def as_text(text: str, style: str = "") -> Text:
    """Foreign text, without markup and made harmless."""
    return Text(printable(text), style=style, overflow="fold")


def printable(text: str) -> str:
    """Without control characters (an escape sequence in a file could rewrite the screen), and `encodable`."""
    return encodable(plain(text))


def encodable(text: str) -> str:
    """Such that the terminal's encoding can spell it."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("µ", "u").encode(encoding, "backslashreplace").decode(encoding)
    return text


def print_json(value: object) -> None:
    """Strict JSON: neither NaN nor infinity."""
    sys.stdout.write(json.dumps(value, allow_nan=False, indent=2) + "\n")


def split_params(all_params: Sequence[Mapping[str, Param]]) -> tuple[list[str], dict[str, Param]]:
    """(names whose values differ between cases, name -> value where all cases have one and the same)."""
    names = list(dict.fromkeys(name for params in all_params for name in params))
    values = {name: {param_text(name, params.get(name)) for params in all_params} for name in names}
    varying = [name for name in names if len(values[name]) > 1]
    return varying, {name: all_params[0][name] for name in names if name not in varying}


def param_text(name: str, value: Param | None) -> str:
    """A param's value; one that counts bytes with its unit, `-` where a case has none."""
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool) and (name == "size" or name.endswith("_bytes")):
        return format_size(value)
    return str(value)


def titled(title: str, same: Mapping[str, Param]) -> str:
    """With the params that all cases of a table share, so that they need no column."""
    fixed = ", ".join(f"{name}={param_text(name, value)}" for name, value in same.items())
    return f"{title}; {fixed}" if fixed else title
