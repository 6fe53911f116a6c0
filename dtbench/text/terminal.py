"""How the terminal is written to: consoles, params, tables whose figures are never cut, foreign text made harmless.

Numbers do not wrap; where a terminal is narrower than they need, the lines run over its edge instead. Text
from files is shown without markup and without the control characters that would move a cursor.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

import msgspec
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dtbench.errors import plain
from dtbench.suite import Param
from dtbench.text.table import TableColumn
from dtbench.text.units import format_size

# A title and a cell per row.
Column = tuple[str, Sequence[str]]

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


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Rich would end with exit code 1, a regression: the program says what it means that a reader has gone."""
        raise BrokenPipeError


def new_console() -> Console:
    """The terminal; as wide as its lines where nobody reads along and `COLUMNS` says nothing."""
    # Of NO_COLOR alone rich would still print in bold.
    console = _Console(
        highlight=False,
        markup=False,
        emoji=False,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )
    if not console.is_terminal:
        console.width = _width_by_columns() or _PIPE_WIDTH
    return console


def _width_by_columns() -> int:
    """What `COLUMNS` says, or 0."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() else 0


def readable_width(console: Console) -> int:
    """Of the terminal; where something else reads along, of `COLUMNS`, else what a wide terminal has."""
    return console.width if console.is_terminal else _width_by_columns() or _READABLE_WIDTH


def width_of(console: Console, columns: Sequence[TableColumn]) -> int:
    """The least width that `print_table` makes of them."""
    return _width([_least(one) if console.is_terminal else _natural(one) for one in columns])


def print_columns(
    console: Console,
    words: Iterable[Column],
    figures: Iterable[Column] = (),
    remarks: Iterable[Column] = (),
    extras: Sequence[Column] = (),
) -> None:
    """As `print_table`. words, remarks: columns of text; figures: columns of numbers between them; extras: last
    columns, of text, that are left out where they do not fit."""
    print_table(
        console,
        [
            *(TableColumn(*column) for column in words),
            *(TableColumn(*column, True) for column in figures),
            *(TableColumn(*column) for column in remarks),
        ],
        [TableColumn(*column) for column in extras],
    )


def print_table(console: Console, columns: Sequence[TableColumn], extras: Sequence[TableColumn] = ()) -> None:
    """A table, whole, over the terminal's edge if need be; without rules and bold heads where no terminal reads along.

    Words may break between words, numbers never wrap. extras: last columns that are left out where they do not fit;
    a line then names them.
    """
    natural = _width([_natural(one) for one in (*columns, *extras)])
    if not console.is_terminal and natural <= console.width:
        _print_plain(console, [*columns, *extras])
        return
    easy = [max(_least(one), min(_natural(one), _EASY_WIDTH)) for one in columns]
    easy += [max(_least(one), _EXTRA_WIDTH) for one in extras]
    shown = [*columns, *extras]
    while len(shown) > len(columns) and _width(easy[: len(shown)]) > console.width:
        shown.pop()
    _print_ruled(console, shown)
    if omitted := ", ".join(one.header for one in extras[len(shown) - len(columns) :]):
        print_prose(console, f"columns omitted (narrow terminal): {omitted}")


def _natural(column: TableColumn) -> int:
    """The width that holds every cell on one line."""
    return max(cell_len(printable(cell)) for cell in (column.title, *column.cells))


def _least(column: TableColumn) -> int:
    """The width that holds every word; of figures, every cell on one line."""
    if column.numeric:
        return _natural(column)
    words = " ".join(map(printable, (column.title, *column.cells))).split()
    return max(map(cell_len, words), default=0)


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _print_ruled(console: Console, columns: Sequence[TableColumn]) -> None:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for one in columns:
        table.add_column(
            as_text(one.title),
            justify="right" if one.numeric else "left",
            no_wrap=one.numeric,
            min_width=_least(one),
        )
    texts = [map(as_text, one.cells, one.styles or [""] * len(one.cells)) for one in columns]
    for row in zip(*texts, strict=True):
        table.add_row(*row)
    width = console.width
    console.width = max(width, width_of(console, columns) + _GAP)
    console.print(table, crop=False)
    console.width = width


def _print_plain(console: Console, columns: Sequence[TableColumn]) -> None:
    """As rich would print it, which takes a second for a thousand rows; whole, without rules."""
    widths = [_natural(one) for one in columns]
    for row in zip(*([one.title, *one.cells] for one in columns), strict=True):
        parts = []
        for cell, one, width in zip(map(printable, row), columns, widths, strict=True):
            gap = " " * (width - cell_len(cell))
            parts.append(gap + cell if one.numeric else cell + gap)
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
    try:  # Indented in C: with an indent json.dumps runs in Python.
        text = msgspec.json.format(json.dumps(value, allow_nan=False), indent=2)
    except msgspec.DecodeError:  # half of a surrogate pair, as a path may hold
        text = json.dumps(value, allow_nan=False, indent=2)
    sys.stdout.write(text + "\n")


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
