"""Tables of measured steps and of measured all-reduces, in CSV, as they come out of scripts and spreadsheets.

What a table says is used, or refused: a column that is not known is an error, and a row that the model cannot express
is left out, counted and named.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dtbench.cost.plan.columns import BYTES, COLUMNS, SECONDS, TIMES, UNUSED, find_columns
from dtbench.cost.plan.models import MAX_VALUE
from dtbench.records.read import read_bytes
from dtbench.suite.errors import UnreadableRunError, UsageError

MAX_FILE_BYTES = 2**24
_WHAT = "a table of measured steps in CSV"
_MODEL = ("hidden", "attention heads", "layers")
_NOT_SAID = {"", "n/a", "na", "-", "none", "null", "nan"}


@dataclass(frozen=True)
class Table:
    """lines: number in the file and cells of each row. at, units: column -> its place, and its unit in lower case.
    ignored: titles left out by name."""

    path: Path
    lines: Sequence[tuple[int, Sequence[str]]]
    at: Mapping[str, int]
    units: Mapping[str, str]
    ignored: Sequence[str] = ()

    @property
    def is_all_reduce(self) -> bool:
        return "bytes" in self.at

    def text(self, cells: Sequence[str], column: str) -> str:
        at = self.at.get(column, len(cells))
        text = cells[at] if at < len(cells) else ""
        return "" if text.lower() in _NOT_SAID else text

    def number(self, line: int, cells: Sequence[str], column: str, whole: bool = True) -> float:
        """A whole number from 1 to 2^40, or any above 0.

        Raises:
            UsageError: anything else.
        """
        text = self.text(cells, column)
        try:
            value = float(text.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", text) else text)
        except ValueError:
            value = math.nan
        if not 0 < value <= MAX_VALUE or (whole and value != int(value)):
            wanted = "a whole number from 1 to 2^40" if whole else "a number above 0"
            raw = cells[self.at[column]] if self.at.get(column, len(cells)) < len(cells) else ""
            raise self.wrong(line, f"{column} is {ascii(raw)[:40]}, expected {wanted}")
        return value

    def count(self, line: int, cells: Sequence[str], column: str, default: int) -> int:
        """A whole number, or the default where the table does not say."""
        return int(self.number(line, cells, column)) if self.text(cells, column) else default

    def seconds(self, line: int, cells: Sequence[str], column: str) -> float:
        unit = self.units[column]
        if unit not in SECONDS:
            raise UsageError(
                f"{self.path}: the unit of {column} is {ascii(unit)[:20] if unit else 'not said'}, expected one of "
                f"{', '.join(SECONDS)}, as in {column} (ms)"
            )
        found = self.number(line, cells, column, whole=False) * SECONDS[unit]
        if found < 1e-9:
            raise self.wrong(line, f"{column} is {found:.2g} s, expected a nanosecond or more")
        return found

    def wrong(self, line: int, what: str) -> UsageError:
        return UsageError(f"{self.path}: line {line}: {what}")


def read_table(path: Path, ignore: Collection[str] = ()) -> Table:
    """A table with at least one row, of steps or of all-reduces.

    ignore: titles of columns that are left out.

    Raises:
        UnreadableRunError: a file that cannot be read, or is no table.
        UsageError: a table without the columns, or with one that is not known.
    """
    try:
        text = read_bytes(path, _WHAT, MAX_FILE_BYTES).decode("utf-8-sig")
        delimiter = _delimiter(text)
        reader = csv.reader(io.StringIO(text, newline=None), strict=True, delimiter=delimiter)
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(cells)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableRunError(f"{path} is not {_WHAT}: {str(error)[:120]}") from error
    while lines and sum(map(bool, lines[0][1])) < 2:  # words above the titles
        lines.pop(0)
    lines = [(number, cells) for number, cells in lines if any(cells)]
    if len(lines) < 2:
        raise UnreadableRunError(f"{path} has no rows below a line of titles: expected {_WHAT}")
    if delimiter == ";":  # as spreadsheets write it where the comma is in the numbers
        lines[1:] = [(n, [re.sub(r"^(\d+),(\d+)$", r"\1.\2", c) for c in cells]) for n, cells in lines[1:]]
    titles = ["" if title in ignore else title for title in lines[0][1]]
    for name in ignore:
        if name not in lines[0][1]:
            raise UsageError(
                f"{path} has no column {name!r} to ignore: it has {', '.join(lines[0][1])[:400]}"
            )
    at, units, unknown = find_columns(titles, lines[1][1])
    if "bytes" not in at:
        _check_columns(path, at, unknown)
    return Table(path, lines[1:], at, units, tuple(ignore))


def _check_columns(path: Path, at: Collection[str], unknown: Sequence[str]) -> None:
    """Enough of them, and none that is not known."""
    needed = [("gpus", "nodes"), ("global batch",), ("micro batch", "gradient accumulation"), TIMES]
    needed += [] if "model" in at else [(name,) for name in _MODEL]
    for names in needed:
        if not any(name in at for name in names):
            also = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise UsageError(
                f"{path} has no column {names[0]!r}{also}: expected {', '.join(name for name, *_ in needed)}; or size "
                "and time of all-reduces"
            )
    if unknown:
        named = ", ".join(map(repr, unknown[:8]))
        raise UsageError(
            f"{path}: not known: {'column' if len(unknown) == 1 else 'columns'} {named[:400]}; known are "
            f"{', '.join((*COLUMNS, *UNUSED))}; --ignore COLUMN leaves one out"
        )


def _delimiter(text: str) -> str:
    titles = max(text.split("\n")[:8], key=lambda line: max(map(line.count, ",;\t")))
    return max(",;\t", key=titles.count)


# -------------------------------------------------------------------------------------- all-reduce


def all_reduces(table: Table) -> list[tuple[int, float]]:
    """(bytes, seconds), ascending; of a size that stands more than once the median.

    Raises:
        UsageError: a value that cannot be, or fewer than 3 sizes.
    """
    unit = table.units["bytes"]
    if unit not in BYTES:
        raise UsageError(f"{table.path}: the unit of the sizes is {ascii(unit)[:20]}, expected B, KiB or MiB")
    times: defaultdict[int, list[float]] = defaultdict(list)
    for line, cells in table.lines:
        size = int(table.number(line, cells, "bytes")) * BYTES[unit]
        times[size].append(table.seconds(line, cells, "time"))
    if len(times) < 3:
        raise UsageError(
            f"{table.path} has {len(times)} sizes, expected at least 3: most are predicted from the others"
        )
    return sorted((size, median(of)) for size, of in times.items())
