"""How the terminal is written to: consoles, params, tables whose figures are never cut, foreign text made harmless.

Numbers do not wrap; where a terminal is narrower than they need, the lines run over its edge instead. Text
from files is shown without markup and without the control characters that would move a cursor.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from dtbench.model import Param
from dtbench.model.errors import plain
from dtbench.text.units import format_size

# A title and a cell per row.
Column = tuple[str, Sequence[str | Text]]

# Wide enough that nothing wraps where no terminal reads along.
_PIPE_WIDTH = 10_000
# Of a table, or lines of one kind: nobody reads more of them, and to lay out a hundred thousand takes a minute.
MAX_ROWS = 1000
MAX_TABLES = 100


def new_console() -> Console:
    """The terminal; as wide as its lines where nobody reads along."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def print_columns(
    console: Console, words: Iterable[Column], figures: Iterable[Column] = (), remarks: Iterable[Column] = ()
) -> None:
    """A table, whole, over the terminal's edge if need be.

    words, remarks: columns of text, which may break between words where the terminal is narrow; without rules and
    bold heads where something else reads along. figures: columns of numbers between them, which never wrap.
    """
    plain = not console.is_terminal
    table = Table(
        box=None if plain else box.SIMPLE_HEAD, pad_edge=False, header_style="" if plain else "bold"
    )
    rows = []
    for columns, numeric in ((words, False), (figures, True), (remarks, False)):
        for title, cells in columns:
            shown = [cell if isinstance(cell, Text) else as_text(cell) for cell in cells]
            longest = [word for cell in (as_text(title), *shown) for word in cell.plain.split()]
            if numeric:
                table.add_column(as_text(title), justify="right", no_wrap=True)
            else:
                table.add_column(as_text(title), min_width=max(map(cell_len, longest), default=0))
            rows.append(shown)
    for row in zip(*rows, strict=True):
        table.add_row(*row)
    if not console.is_terminal and table.box is None:
        _print_plain(console, table)
        return
    # What a table needs at least: its figures whole and each word of its text on one line.
    wide = console.options.update(width=_PIPE_WIDTH)
    needed = Measurement.get(console, wide, table).minimum
    width = console.width
    console.width = max(width, needed)
    console.print(table, crop=False)
    console.width = width


def _print_plain(console: Console, table: Table) -> None:
    """As rich would print it, which takes a second for a thousand rows."""
    columns = [[str(column.header), *map(str, column.cells)] for column in table.columns]
    widths = [max(map(cell_len, cells)) for cells in columns]
    right = [column.justify == "right" for column in table.columns]
    for row in zip(*columns, strict=True):
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        parts = [gap + cell if r else cell + gap for cell, gap, r in zip(row, gaps, right, strict=True)]
        console.file.write("  ".join(parts) + "\n")


def print_rest(console: Console, total: int, what: str, remedy: str, shown: int = MAX_ROWS) -> None:
    """Says how many are not shown, if there are more than that, and how to see them."""
    if total > shown:
        print_line(console, f"... and {total - shown:,} more {what}; {remedy}")


def print_line(console: Console, line: str, style: str = "") -> None:
    """One line of text, which the terminal may wrap."""
    console.print(as_text(line, style), soft_wrap=True)


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
