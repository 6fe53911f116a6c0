"""Tables for the terminal and the HTML page. A column has one unit, shown in its header, and aligned numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dtbench.text.units import Unit, bandwidth_unit, significant, time_unit, typical

MISSING = "–"
# Cells longer than this many characters may wrap.
LONG = 40
# Largest number of rows of a table on the page. Formatting a hundred thousand rows takes longer than reading them.
MAX_ROWS = 2000
# Ratios above this one are marked.
MARKED = 1.05


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    Attributes:
        header: title without the unit.
        cells: formatted values.
        numeric: whether the cells are numbers, which are aligned to the right.
        unit: unit of all cells.
        screen: whether the column is left out in print, since paper is too narrow for all columns.
        styles: style of each cell on a terminal, e.g. "red".
    """

    header: str
    cells: Sequence[str]
    numeric: bool = False
    unit: str = ""
    screen: bool = False
    styles: Sequence[str] = ()

    @property
    def title(self) -> str:
        """Header with the unit, for terminals."""
        return f"{self.header} [{self.unit}]" if self.unit else self.header

    @cached_property  # the template reads it for every cell
    def may_wrap(self) -> bool:
        """Whether the column has long texts, which may wrap to leave room for the columns after them."""
        return not self.numeric and any(len(cell) > LONG for cell in self.cells)


@dataclass(frozen=True)
class Table:
    """A table of the HTML page.

    Attributes:
        caption: describes the content.
        columns: the columns.
        folded: whether the table is collapsed until its caption is clicked.
        note: text below the table.
        max_rows: number of rows after which the table is cut.
        total: number of all rows if the columns hold only the first `MAX_ROWS`.
        ids: anchor of each row.
        tags: word of each row by which it can be filtered.
        filter: id of the filter fields, which the URL can name; "" for a table without filter.
    """

    caption: str
    columns: Sequence[TableColumn]
    folded: bool = False
    note: str = ""
    max_rows: int = 2**31
    total: int = 0
    ids: Sequence[str] = ()
    tags: Sequence[str] = ()
    filter: str = ""

    @property
    def screen_only(self) -> str:
        """Headers of the columns that are left out in print."""
        return ", ".join(f"“{column.header}”" for column in self.columns if column.screen)

    @property
    def total_rows(self) -> int:
        return max(self.total, len(self.columns[0].cells)) if self.columns else 0

    @property
    def is_collapsed(self) -> bool:
        """Whether the table starts collapsed. A table with a single row does, too."""
        return self.folded or (self.total_rows == 1 and not self.filter)

    @property
    def rows(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Anchor, tag and cells of each row, for the template."""
        rows = list(zip(*(column.cells[: self.max_rows] for column in self.columns), strict=True))
        blanks = [""] * len(rows)
        return list(zip(self.ids or blanks, self.tags or blanks, rows, strict=False))


def compact(table: Table) -> Table:
    """Moves text columns with the same cell in every row into the note.

    Tables with fewer than four rows, or that do not hold all rows, stay unchanged.
    """
    if table.total_rows < 4 or table.total_rows > len(table.columns[0].cells):
        return table
    constant = [c for c in table.columns[1:] if not c.numeric and len(set(c.cells)) == 1]
    words = ", ".join(f"{c.header.lower()} {c.cells[0]}" for c in constant if c.cells[0] != MISSING)
    columns = [c for c in table.columns if not any(c is column for column in constant)]
    note = f"{table.note} In every row: {words}." if words else table.note
    return replace(table, columns=columns, note=note.strip())


def text(header: str, cells: Sequence[object]) -> TableColumn:
    """Returns a column of text; empty cells get a dash."""
    return TableColumn(header, [str(cell) if cell not in ("", None) else MISSING for cell in cells])


def sizes(header: str, cells: Sequence[str]) -> TableColumn:
    """Returns a column of sizes that identify a case, each in its own unit, aligned to the right."""
    return TableColumn(header, cells, numeric=True)


def times(columns: Sequence[tuple[str, Sequence[float | None]]]) -> list[TableColumn]:
    """Returns columns of times with a common unit and number of decimals. Values are seconds."""
    return _in_one_unit(columns, time_unit(_present_values(columns)))


def bandwidths(columns: Sequence[tuple[str, Sequence[float | None]]]) -> list[TableColumn]:
    """Returns columns of bandwidths with a common unit (kB/s, MB/s or GB/s). Values are bytes per second."""
    return _in_one_unit(columns, bandwidth_unit(_present_values(columns)))


def _present_values(columns: Sequence[tuple[str, Sequence[float | None]]]) -> list[float]:
    return [value for _, values in columns for value in values if value is not None]


def _in_one_unit(columns: Sequence[tuple[str, Sequence[float | None]]], unit: Unit) -> list[TableColumn]:
    decimals = _decimals(_present_values(columns), unit.scale)
    return [
        TableColumn(header, aligned(values, unit.scale, decimals), True, unit.name)
        for header, values in columns
    ]


def factor(value: float) -> str:
    """Formats a factor, e.g. "0.74×" or "36.9×"."""
    return f"{value:.2f}×" if value < 10 else f"{significant(value, 3)}×"


def faster(ratio: float | None, than: str = "") -> str:
    """Describes a ratio of times: 0.51 is "1.96× faster", 1.1 "1.10× slower", 1.001 "as fast".

    Args:
        than: what the time is compared with, e.g. "torch" for "1.96× faster than torch".
    """
    if ratio is None or ratio <= 0:
        return MISSING
    if factor(max(ratio, 1 / ratio)) == "1.00×":
        return f"as fast as {than}" if than else "as fast"
    words = f"{factor(1 / ratio)} faster" if ratio <= 1 else f"{factor(ratio)} slower"
    return f"{words} than {than}" if than else words


def speeds(header: str, ratios: Sequence[float | None]) -> TableColumn:
    """Returns a column of ratios of times as speedups; slowdowns of more than 5% are marked."""
    cells = [f"{'▲ ' if ratio is not None and ratio > MARKED else ''}{faster(ratio)}" for ratio in ratios]
    return TableColumn(header, cells, True)


def figures(
    header: str, values: Iterable[float | None], format_value: Callable[[float], str], unit: str = ""
) -> TableColumn:
    """Returns a column of numbers."""
    return TableColumn(header, [MISSING if v is None else format_value(v) for v in values], True, unit)


def ratios(header: str, values: Sequence[float | None]) -> TableColumn:
    """Returns a column of factors."""
    return figures(header, values, factor)


def percents(header: str, shares: Sequence[float | None], digits: int = 1, unit: str = "%") -> TableColumn:
    return figures(header, shares, lambda share: f"{100 * share:.{digits}f}", unit)


def counts(header: str, values: Sequence[float | None]) -> TableColumn:
    return figures(header, values, lambda value: f"{value:,.0f}".replace(",", "\u202f"))


def aligned(values: Sequence[float | None], scale: float = 1.0, decimals: int | None = None) -> list[str]:
    """Formats the values / `scale` with a common number of decimals, so that the decimal points align."""
    if decimals is None:
        decimals = _decimals([v for v in values if v is not None], scale)
    return [MISSING if v is None else f"{v / scale:.{decimals}f}" for v in values]


def _decimals(values: Sequence[float], scale: float) -> int:
    """Returns the number of decimals, 0 to 4, that gives the typical value three significant digits."""
    typical_value = typical(abs(v) / scale for v in values)
    return 0 if typical_value is None else min(max(2 - math.floor(math.log10(typical_value)), 0), 4)
