"""A table as the terminal and the page show it: one unit per column in its header, figures of a column aligned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dtbench.text.units import Unit, bandwidth_unit, significant, time_unit, typical

MISSING = "–"
LONG = 40  # characters
MAX_ROWS = 2000  # of a table on a page; to format a hundred thousand takes longer than to read them
MARKED = 1.05  # ratios above bear a mark


@dataclass(frozen=True)
class TableColumn:
    """screen: not printed on paper, which is too narrow for all. styles: of each cell on a terminal."""

    header: str
    cells: Sequence[str]
    numeric: bool = False
    unit: str = ""
    screen: bool = False
    styles: Sequence[str] = ()

    @property
    def title(self) -> str:
        """On a terminal."""
        return f"{self.header} [{self.unit}]" if self.unit else self.header

    @cached_property  # asked for every cell
    def long(self) -> bool:
        """Words that may stand on two lines, so that what follows them is seen."""
        return not self.numeric and any(len(cell) > LONG for cell in self.cells)


@dataclass(frozen=True)
class Table:
    """caption: what it holds, in words. folded: shown behind its caption. most: rows after which it is cut. total: how
    many rows there are, where the columns hold only the first `MAX_ROWS`.

    ids, tags: per row the anchor that leads to it and the word it is filtered by; of tables with `filter`,
    an id that the address may name, there are fields to filter by.
    """

    caption: str
    columns: Sequence[TableColumn]
    folded: bool = False
    note: str = ""
    most: int = 2**31
    total: int = 0
    ids: Sequence[str] = ()
    tags: Sequence[str] = ()
    filter: str = ""

    @property
    def screen_only(self) -> str:
        """The columns that are not printed."""
        return ", ".join(f"“{column.header}”" for column in self.columns if column.screen)

    @property
    def total_rows(self) -> int:
        return max(self.total, len(self.columns[0].cells)) if self.columns else 0

    @property
    def closed(self) -> bool:
        """Whether it is shown behind its caption: one row is, too."""
        return self.folded or (self.total_rows == 1 and not self.filter)

    @property
    def rows(self) -> list[tuple[str, str, tuple[str, ...]]]:
        """Anchor, tag and the cells per row, as the template writes them."""
        rows = list(zip(*(c.cells[: self.most] for c in self.columns), strict=True))
        nothing = [""] * len(rows)
        return list(zip(self.ids or nothing, self.tags or nothing, rows, strict=False))


def compact(table: Table) -> Table:
    """Without the columns of words that say the same in every row of several, which the note says once; as it is where
    the columns do not hold all rows."""
    if table.total_rows < 4 or table.total_rows > len(table.columns[0].cells):
        return table
    same = [c for c in table.columns[1:] if not c.numeric and len(set(c.cells)) == 1]
    words = ", ".join(f"{c.header.lower()} {c.cells[0]}" for c in same if c.cells[0] != MISSING)
    kept = [c for c in table.columns if not any(c is one for one in same)]
    note = f"{table.note} In every row: {words}." if words else table.note
    return replace(table, columns=kept, note=note.strip())


def text(header: str, cells: Sequence[object]) -> TableColumn:
    return TableColumn(header, [str(cell) if cell not in ("", None) else MISSING for cell in cells])


def sizes(header: str, cells: Sequence[str]) -> TableColumn:
    """Sizes that name a case, each in its own unit, right-aligned."""
    return TableColumn(header, cells, numeric=True)


def times(columns: Sequence[tuple[str, Sequence[float | None]]]) -> list[TableColumn]:
    """Columns of seconds that are compared with each other: one unit and one number of decimals for all."""
    return _in_one_unit(columns, time_unit(_there(columns)))


def bandwidths(columns: Sequence[tuple[str, Sequence[float | None]]]) -> list[TableColumn]:
    """Columns of bytes per second, all in one unit of 10^3, 10^6 or 10^9 bytes per second."""
    return _in_one_unit(columns, bandwidth_unit(_there(columns)))


def _there(columns: Sequence[tuple[str, Sequence[float | None]]]) -> list[float]:
    return [value for _, values in columns for value in values if value is not None]


def _in_one_unit(columns: Sequence[tuple[str, Sequence[float | None]]], unit: Unit) -> list[TableColumn]:
    decimals = _decimals(_there(columns), unit.scale)
    return [
        TableColumn(header, aligned(values, unit.scale, decimals), True, unit.name)
        for header, values in columns
    ]


def factor(value: float) -> str:
    """Such as 0.74× or 36.9×."""
    return f"{value:.2f}×" if value < 10 else f"{significant(value, 3)}×"


def faster(ratio: float | None, than: str = "") -> str:
    """Of a time over another: 0.51 is 1.96× faster (than that), 1.1 is 1.10× slower, 1.001 as fast (as that)."""
    if ratio is None or ratio <= 0:
        return MISSING
    if factor(max(ratio, 1 / ratio)) == "1.00×":
        return f"as fast as {than}" if than else "as fast"
    words = f"{factor(1 / ratio)} faster" if ratio <= 1 else f"{factor(ratio)} slower"
    return f"{words} than {than}" if than else words


def speeds(header: str, ratios: Sequence[float | None]) -> TableColumn:
    """How much faster one is than another; what is slower by more than 5 % bears a mark."""
    cells = [f"{'▲ ' if r is not None and r > MARKED else ''}{faster(r)}" for r in ratios]
    return TableColumn(header, cells, True)


def figures(
    header: str, values: Iterable[float | None], written: Callable[[float], str], unit: str = ""
) -> TableColumn:
    """Numbers, each as `written` has it."""
    return TableColumn(header, [MISSING if v is None else written(v) for v in values], True, unit)


def ratios(header: str, values: Sequence[float | None]) -> TableColumn:
    """Factors with two decimals."""
    return figures(header, values, factor)


def percents(header: str, shares: Sequence[float | None], digits: int = 1, unit: str = "%") -> TableColumn:
    return figures(header, shares, lambda share: f"{100 * share:.{digits}f}", unit)


def counts(header: str, values: Sequence[float | None]) -> TableColumn:
    return figures(header, values, lambda value: f"{value:,.0f}".replace(",", "\u202f"))


def aligned(values: Sequence[float | None], scale: float = 1.0, decimals: int | None = None) -> list[str]:
    """The values over `scale`, all with the same number of decimals, so that their points align."""
    if decimals is None:
        decimals = _decimals([v for v in values if v is not None], scale)
    return [MISSING if v is None else f"{v / scale:.{decimals}f}" for v in values]


def _decimals(values: Sequence[float], scale: float) -> int:
    """So many, 0 to 4, that the `typical` value has three significant digits."""
    usual = typical(abs(v) / scale for v in values)
    return 0 if usual is None else min(max(2 - math.floor(math.log10(usual)), 0), 4)
