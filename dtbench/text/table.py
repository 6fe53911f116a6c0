"""Tables for the terminal and the HTML page. A column has one unit, shown in its header, and aligned numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dtbench.text.units import MISSING

# Cells longer than this many characters may wrap.
LONG = 40
# Largest number of rows of a table on the page. Formatting a hundred thousand rows takes longer than reading them.
MAX_ROWS = 2000


@dataclass(frozen=True)
class TableColumn:
    """A column of a table.

    Attributes:
        header: title without the unit.
        cells: formatted values.
        numeric: whether the cells are numbers, which are aligned to the right.
        unit: unit of all cells.
        only_on_screen: whether the column is left out in print, since paper is too narrow for all columns.
        styles: style of each cell on a terminal, e.g. "red".
    """

    header: str
    cells: Sequence[str]
    numeric: bool = False
    unit: str = ""
    only_on_screen: bool = False
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
        return ", ".join(f"“{column.header}”" for column in self.columns if column.only_on_screen)

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
    return replace(
        table,
        columns=[c for c in table.columns if not any(c is column for column in constant)],
        note=(f"{table.note} In every row: {words}." if words else table.note).strip(),
    )
