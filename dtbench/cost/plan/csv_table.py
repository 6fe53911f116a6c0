"""Reads the CSV tables of `dtbench plan`: commas, UTF-8, a line of titles, a row per measurement.

Case, spaces and punctuation of titles are ignored. A column that is not listed here is an error, so that no information
in a table is ignored silently.
"""

import csv
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtbench.cost.plan.models import MAX_VALUE
from dtbench.errors import UnreadableRunError, UsageError
from dtbench.records.read import read_bytes

MAX_FILE_BYTES = 2**24
MIN_VALUE = 1e-9
_FILE_KIND = "a table of measured steps in CSV"
_WITHOUT_ALIASES = (
    *("nodes", "model", "attention heads", "layers", "zero", "precision"),
    *("sequence parallel", "flash attention", "overlap", "training"),
)
# Column -> its other titles in published tables.
TITLES: Mapping[str, Sequence[str]] = {
    "gpus": ("n_gpus",),
    **dict.fromkeys(_WITHOUT_ALIASES, ()),
    "system": ("GPU",),
    "hidden": ("hidden size",),
    "sequence length": ("SeqLen (T)",),
    "global batch": ("gbs", "GlobalBatchSize"),
    "micro batch": ("mbs", "MicroBatchSize"),
    "gradient accumulation": ("GA", "grad_acc", "GradAccum"),
    "tensor parallel": ("tp", "tensor parallelism"),
    "pipeline parallel": ("pp", "pipeline parallelism"),
    "data parallel": ("dp", "data parallelism"),
    "context parallel": ("cp",),
    "expert parallel": ("ep",),
    "fsdp": ("Sharding Strategy",),
    "interleaved chunks": ("VP",),
    "recomputation": ("Activation Checkpointing",),
    "tokens/s": ("tok_per_s", "Throughput (T/s)"),
    "tokens/s/gpu": ("tok_per_s_per_gpu", "Tokens / sec / GPU"),
    "collective": ("op",),
}
# Column with a unit in its title -> title -> that unit in seconds or bytes.
UNITS: Mapping[str, Mapping[str, float]] = {
    "iteration time": {"iteration time (s)": 1.0, "iteration time (ms)": 1e-3},
    "memory": {"memory (GiB)": 2**30, "memory (GB)": 1e9, "gpu_mem_gb": 1e9},
    "bytes": {"bytes": 1, "size (B)": 1},
    "time": {"time (s)": 1.0, "time (ms)": 1e-3, "time (us)": 1e-6, "time (ns)": 1e-9},
}
# Titles of columns that are accepted, but not used.
UNUSED = (
    "notes",
    "release",
    "techniques",
    "Parameters (billion)",
    "NumParams",
    "mfu_pct",
    "Model TFLOP / sec / GPU",
    *("table", "device", "dtype", "type", "count", "busbw (GB/s)"),  # printed by nccl-tests
)
_EMPTY = {"", "n/a", "na", "-", "none", "null", "nan"}


@dataclass(frozen=True)
class CsvRow:
    """A row of a table.

    Attributes:
        line: number of its line in the file.
        cells: column -> text, without empty cells.
        units: column -> its unit in seconds or bytes.
    """

    path: Path
    line: int
    cells: Mapping[str, str]
    units: Mapping[str, float]

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def number(self, column: str) -> float:
        """Returns a number above 0, in seconds or bytes if the column has a unit.

        Raises:
            UsageError: the cell has no such number.
        """
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not MIN_VALUE <= value <= MAX_VALUE:
            raise self.wrong(f"{column} is {ascii(text)[:40]}, expected a number from 1e-9 to 2^40")
        return value * self.units.get(column, 1)

    def count(self, column: str, default: int | None = None) -> int:
        """Returns an integer of at least 1, or the default for an empty cell."""
        if default is not None and not self.text(column):
            return default
        value = self.number(column)
        if value != int(value):
            raise self.wrong(f"{column} is {value:g}, expected an integer from 1 to 2^40")
        return int(value)

    def flag(self, column: str) -> bool:
        text = self.text(column).lower()
        if text not in ("yes", "no", "true", "false"):
            raise self.wrong(f"{column} is {ascii(text)[:40]}, expected yes or no")
        return text in ("yes", "true")

    def wrong(self, message: str) -> UsageError:
        return UsageError(f"{self.path}: line {self.line}: {message}")


@dataclass(frozen=True)
class CsvTable:
    """A table with at least one row.

    Attributes:
        columns: names of the columns that are used.
        unused: titles of columns that are not used.
    """

    path: Path
    columns: frozenset[str]
    rows: Sequence[CsvRow]
    unused: Sequence[str]

    def require(self, *columns: str) -> None:
        """Raises UsageError if a column is missing. Alternatives are separated by " or "."""
        for column in columns:
            if not self.columns.intersection(column.split(" or ")):
                raise UsageError(f"{self.path} has no column {column}: expected {', '.join(columns)}")


def _normalized(title: str) -> str:
    """Normalizes a title: `# GPUs` -> `gpus`, `Tokens / sec / GPU` -> `tokens/sec/gpu`."""
    return re.sub(r"[^a-z0-9/]", "", title.lower())


_COLUMNS = {_normalized(title): column for column, aliases in TITLES.items() for title in (column, *aliases)}
_COLUMNS |= {_normalized(title): column for column, titles in UNITS.items() for title in titles}
_SCALES = {_normalized(title): scale for titles in UNITS.values() for title, scale in titles.items()}
_UNUSED = {_normalized(title) for title in UNUSED}


def read_table(path: Path) -> CsvTable:
    """Reads a table of steps or collectives. The first of duplicate columns is used (nccl-tests: out of place).

    Raises:
        UnreadableRunError: the file cannot be read, or is not a table.
        UsageError: a column is unknown.
    """
    try:
        text = read_bytes(path, _FILE_KIND, MAX_FILE_BYTES).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=None), strict=True)
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(cells)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableRunError(f"{path} is not {_FILE_KIND}: {str(error)[:120]}") from error
    if len(lines) < 2:
        raise UnreadableRunError(f"{path} has no rows below a line of titles: expected {_FILE_KIND}")
    titles = [_normalized(title) for title in lines[0][1]]
    indices: dict[str, int] = {}
    units: dict[str, float] = {}
    for index, title in enumerate(titles):
        if title in _COLUMNS:
            indices.setdefault(_COLUMNS[title], index)
            units.setdefault(_COLUMNS[title], _SCALES.get(title, 1))
        elif lines[0][1][index] and title not in _UNUSED:
            raise UsageError(
                f"{path}: unknown column {ascii(lines[0][1][index])[:40]}, expected some of "
                f"{', '.join([*TITLES, *(title for titles in UNITS.values() for title in titles)])}"
            )
    rows = []
    for line, values in lines[1:]:
        cells = {column: values[index] for column, index in indices.items() if index < len(values)}
        filled = {column: text for column, text in cells.items() if text.lower() not in _EMPTY}
        rows.append(CsvRow(path, line, filled, units))
    return CsvTable(
        path, frozenset(indices), rows, [title for title in lines[0][1] if _normalized(title) in _UNUSED]
    )
