"""Builders for table columns: text, times, bandwidths, ratios, percentages and counts."""

import math
from collections.abc import Callable, Iterable, Sequence

from dtbench.text.table import TableColumn
from dtbench.text.units import (
    MISSING,
    Unit,
    bandwidth_unit,
    format_factor,
    format_speedup,
    time_unit,
    typical,
)

# Ratios above this one are marked.
MARKED = 1.05


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


def speeds(header: str, ratios: Sequence[float | None]) -> TableColumn:
    """Returns a column of ratios of times as speedups; slowdowns of more than 5% are marked."""
    return TableColumn(
        header,
        [
            f"{'▲ ' if ratio is not None and ratio > MARKED else ''}{format_speedup(ratio)}"
            for ratio in ratios
        ],
        True,
    )


def numbers(
    header: str, values: Iterable[float | None], format_value: Callable[[float], str], unit: str = ""
) -> TableColumn:
    """Returns a column of numbers."""
    return TableColumn(header, [MISSING if v is None else format_value(v) for v in values], True, unit)


def ratios(header: str, values: Sequence[float | None]) -> TableColumn:
    """Returns a column of factors."""
    return numbers(header, values, format_factor)


def percents(header: str, shares: Sequence[float | None], digits: int = 1, unit: str = "%") -> TableColumn:
    return numbers(header, shares, lambda share: f"{100 * share:.{digits}f}", unit)


def counts(header: str, values: Sequence[float | None]) -> TableColumn:
    return numbers(header, values, lambda value: f"{value:,.0f}".replace(",", "\u202f"))


def aligned(values: Sequence[float | None], scale: float = 1.0, decimals: int | None = None) -> list[str]:
    """Formats the values / `scale` with a common number of decimals, so that the decimal points align."""
    if decimals is None:
        decimals = _decimals([v for v in values if v is not None], scale)
    return [MISSING if v is None else f"{v / scale:.{decimals}f}" for v in values]


def _decimals(values: Sequence[float], scale: float) -> int:
    """Returns the number of decimals, 0 to 4, that gives the typical value three significant digits."""
    typical_value = typical(abs(v) / scale for v in values)
    return 0 if typical_value is None else min(max(2 - math.floor(math.log10(typical_value)), 0), 4)
