"""Terminal output: lines, tables and JSON.

Numbers never wrap. On a terminal that is too narrow for them, lines extend beyond its edge. Text from files is shown
without markup and without control characters, which could move the cursor.
"""

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

# (title, one cell per row).
Column = tuple[str, Sequence[str]]

# Width of output that does not go to a terminal, wide enough that nothing wraps.
_PIPE_WIDTH = 10_000
# Width that tables fit into if the output does not go to a terminal and COLUMNS is not set.
_READABLE_WIDTH = 120
# Largest number of rows of a table or of similar lines. Laying out a hundred thousand rows takes a minute.
MAX_ROWS = 1000
MAX_TABLES = 100
# Smallest readable width of an optional column.
_EXTRA_WIDTH = 24
# Width that text columns get before there is room for optional columns, so that names do not break.
_EASY_WIDTH = 40
# Width between columns: the padding of a cell and the divider of the box.
_GAP = 2


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Lets the program handle a closed pipe. Rich would exit with code 1, which means a regression."""
        raise BrokenPipeError


def new_console() -> Console:
    """Returns a console for standard output. Without a terminal its width is `COLUMNS`, else unlimited."""
    # With NO_COLOR alone, rich would still print bold text.
    console = _Console(
        highlight=False,
        markup=False,
        emoji=False,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )
    if not console.is_terminal:
        console.width = _columns_variable() or _PIPE_WIDTH
    return console


def _columns_variable() -> int:
    """Returns the value of `COLUMNS`, or 0 if it is not set."""
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdecimal() else 0


def readable_width(console: Console) -> int:
    """Returns the width of the terminal; without a terminal `COLUMNS`, else that of a wide terminal."""
    return console.width if console.is_terminal else _columns_variable() or _READABLE_WIDTH


def width_of(console: Console, columns: Sequence[TableColumn]) -> int:
    """Returns the smallest width in which `print_table` can print the columns."""
    return _width([_least(column) if console.is_terminal else _natural(column) for column in columns])


def print_columns(
    console: Console,
    words: Iterable[Column],
    figures: Iterable[Column] = (),
    remarks: Iterable[Column] = (),
    extras: Sequence[Column] = (),
) -> None:
    """Prints a table, see `print_table`.

    Args:
        words: text columns at the left.
        figures: columns of numbers after them.
        remarks: text columns after the numbers.
        extras: text columns at the right, left out on a terminal that is too narrow for them.
    """
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
    """Prints a table in full, beyond the edge of the terminal if necessary.

    Text may wrap between words, numbers never wrap. Without a terminal, the table has no rules and no bold header.

    Args:
        extras: columns at the right that are left out on a narrow terminal. A line below the table then names them.
    """
    if not console.is_terminal and width_of(console, [*columns, *extras]) <= console.width:
        _print_plain(console, [*columns, *extras])
        return
    easy = [max(_least(column), min(_natural(column), _EASY_WIDTH)) for column in columns]
    easy += [max(_least(column), _EXTRA_WIDTH) for column in extras]
    shown = [*columns, *extras]
    while len(shown) > len(columns) and _width(easy[: len(shown)]) > console.width:
        shown.pop()
    _print_ruled(console, shown)
    if omitted := ", ".join(column.header for column in extras[len(shown) - len(columns) :]):
        print_prose(console, f"columns omitted (narrow terminal): {omitted}")


def _natural(column: TableColumn) -> int:
    """Returns the width in which every cell fits on one line."""
    return max(cell_len(printable(cell)) for cell in (column.title, *column.cells))


def _least(column: TableColumn) -> int:
    """Returns the width in which every word fits; for numbers, every cell on one line."""
    if column.numeric:
        return _natural(column)
    return max(map(cell_len, " ".join(map(printable, (column.title, *column.cells))).split()), default=0)


def _width(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _print_ruled(console: Console, columns: Sequence[TableColumn]) -> None:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0), header_style="bold"
    )
    for column in columns:
        table.add_column(
            as_text(column.title),
            justify="right" if column.numeric else "left",
            no_wrap=column.numeric,
            min_width=_least(column),
        )
    texts = [map(as_text, column.cells, column.styles or [""] * len(column.cells)) for column in columns]
    for row in zip(*texts, strict=True):
        table.add_row(*row)
    width = console.width
    console.width = max(width, width_of(console, columns) + _GAP)
    console.print(table, crop=False)
    console.width = width


def _print_plain(console: Console, columns: Sequence[TableColumn]) -> None:
    """Prints without rich, which takes a second for a thousand rows."""
    widths = [_natural(column) for column in columns]
    for row in zip(*([column.title, *column.cells] for column in columns), strict=True):
        parts = []
        for cell, column, width in zip(map(printable, row), columns, widths, strict=True):
            gap = " " * (width - cell_len(cell))
            parts.append(gap + cell if column.numeric else cell + gap)
        console.file.write("  ".join(parts).rstrip() + "\n")


def print_rest(console: Console, total: int, noun: str, remedy: str, shown: int = MAX_ROWS) -> None:
    """Prints how many of `total` items are not shown, and how to see them, if there are more than `shown`."""
    if total > shown:
        print_line(console, f"... and {total - shown:,} more {noun}; {remedy}")


def print_line(console: Console, line: str, style: str = "") -> None:
    """Prints one line of text, which the terminal may wrap."""
    console.print(as_text(line, style), soft_wrap=True)


def print_prose(console: Console, text: str, style: str = "", width: int | None = None) -> None:
    """Prints text, wrapped between words at `width`, which defaults to that of the console."""
    console.print(as_text(text, style), width=width)


def as_text(text: str, style: str = "") -> Text:
    """Returns text for rich without markup or control characters."""
    return Text(printable(text), style=style, overflow="fold")


def printable(text: str) -> str:
    """Removes control characters, with which text of a file could rewrite the screen, and makes it `encodable`."""
    return encodable(plain(text))


def encodable(text: str) -> str:
    """Replaces characters that the encoding of standard output lacks."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.replace("µ", "u").encode(encoding, "backslashreplace").decode(encoding)
    return text


def print_json(value: object) -> None:
    """Prints strict JSON, without NaN and infinity."""
    try:  # msgspec indents in C; with an indent, json.dumps would run in Python.
        text = msgspec.json.format(json.dumps(value, allow_nan=False), indent=2)
    except msgspec.DecodeError:  # half of a surrogate pair, which a path may contain
        text = json.dumps(value, allow_nan=False, indent=2)
    sys.stdout.write(text + "\n")


def split_params(all_params: Sequence[Mapping[str, Param]]) -> tuple[list[str], dict[str, Param]]:
    """Returns (names of the params that differ between cases, name -> value of the params that do not)."""
    names = list(dict.fromkeys(name for params in all_params for name in params))
    values = {name: {param_text(name, params.get(name)) for params in all_params} for name in names}
    varying = [name for name in names if len(values[name]) > 1]
    return varying, {name: all_params[0][name] for name in names if name not in varying}


def param_text(name: str, value: Param | None) -> str:
    """Formats the value of a param, with a unit if it is a number of bytes; "-" for None."""
    if value is None:
        return "-"
    if isinstance(value, int) and not isinstance(value, bool) and (name == "size" or name.endswith("_bytes")):
        return format_size(value)
    return str(value)


def titled(title: str, shared: Mapping[str, Param]) -> str:
    """Appends the params that all cases of a table share, so that they need no column."""
    params = ", ".join(f"{name}={param_text(name, value)}" for name, value in shared.items())
    return f"{title}; {params}" if params else title
