"""The one CSV format of `dtbench plan`: commas, UTF-8, a line of titles, a row per measurement.

Case, spaces and punctuation of titles do not matter. A column that is not listed here is an error, so that nothing a
table says is passed over in silence.
"""

from __future__ import annotations

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
_WHAT = "a table of measured steps in CSV"
_WITHOUT_OTHERS = (
    *("nodes", "model", "attention heads", "layers", "zero", "precision"),
    *("sequence parallel", "flash attention", "overlap", "training"),
)
# Column -> other titles of it, as published tables write them.
TITLES: Mapping[str, Sequence[str]] = {
    "gpus": ("n_gpus",),
    **dict.fromkeys(_WITHOUT_OTHERS, ()),
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
# Columns whose title says a unit -> its titles, and what one is in seconds, bytes or parameters.
UNITS: Mapping[str, Mapping[str, float]] = {
    "iteration time": {"iteration time (s)": 1.0, "iteration time (ms)": 1e-3},
    "memory": {"memory (GiB)": 2**30, "memory (GB)": 1e9, "gpu_mem_gb": 1e9},
    "bytes": {"bytes": 1, "size (B)": 1},
    "time": {"time (s)": 1.0, "time (ms)": 1e-3, "time (us)": 1e-6, "time (ns)": 1e-9},
}
# Read, and not used.
UNUSED = (
    "notes",
    "release",
    "techniques",
    "Parameters (billion)",
    "NumParams",
    "mfu_pct",
    "Model TFLOP / sec / GPU",
    *("table", "device", "dtype", "type", "count", "busbw (GB/s)"),  # of nccl-tests
)
_EMPTY = {"", "n/a", "na", "-", "none", "null", "nan"}


@dataclass(frozen=True)
class CsvRow:
    """cells: column -> text, of those that say something. units: column -> what one is."""

    path: Path
    line: int
    cells: Mapping[str, str]
    units: Mapping[str, float]

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def number(self, column: str) -> float:
        """Above 0, in seconds or bytes where the column has a unit.

        Raises:
            UsageError: anything else; the line is named.
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
        """A whole number of at least 1; the default where nothing is said."""
        if default is not None and not self.text(column):
            return default
        value = self.number(column)
        if value != int(value):
            raise self.wrong(f"{column} is {value:g}, expected a whole number from 1 to 2^40")
        return int(value)

    def flag(self, column: str) -> bool:
        text = self.text(column).lower()
        if text not in ("yes", "no", "true", "false"):
            raise self.wrong(f"{column} is {ascii(text)[:40]}, expected yes or no")
        return text in ("yes", "true")

    def wrong(self, what: str) -> UsageError:
        return UsageError(f"{self.path}: line {self.line}: {what}")


@dataclass(frozen=True)
class CsvTable:
    """At least one row. unused: titles of columns that say nothing that is used."""

    path: Path
    columns: frozenset[str]
    rows: Sequence[CsvRow]
    unused: Sequence[str]

    def require(self, *columns: str) -> None:
        """Raises UsageError where one of the columns, each one name or several with " or ", is missing."""
        for wanted in columns:
            if not self.columns.intersection(wanted.split(" or ")):
                raise UsageError(f"{self.path} has no column {wanted}: expected {', '.join(columns)}")


def _plain(title: str) -> str:
    """`# GPUs` and `n_gpus` are `gpus` and `ngpus`; `Tokens / sec / GPU` is `tokens/sec/gpu`."""
    return re.sub(r"[^a-z0-9/]", "", title.lower())


_COLUMNS = {_plain(title): column for column, others in TITLES.items() for title in (column, *others)}
_COLUMNS |= {_plain(title): column for column, titles in UNITS.items() for title in titles}
_SCALES = {_plain(title): scale for titles in UNITS.values() for title, scale in titles.items()}
_UNUSED = {_plain(title) for title in UNUSED}


def read_table(path: Path) -> CsvTable:
    """A table of steps or of collectives; of a column that stands twice the first is read (nccl-tests: out of place).

    Raises:
        UnreadableRunError: a file that cannot be read, or is no table.
        UsageError: a column that is not known.
    """
    try:
        text = read_bytes(path, _WHAT, MAX_FILE_BYTES).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=None), strict=True)
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(cells)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableRunError(f"{path} is not {_WHAT}: {str(error)[:120]}") from error
    if len(lines) < 2:
        raise UnreadableRunError(f"{path} has no rows below a line of titles: expected {_WHAT}")
    titles = [_plain(title) for title in lines[0][1]]
    places: dict[str, int] = {}
    units: dict[str, float] = {}
    for place, title in enumerate(titles):
        if title in _COLUMNS:
            places.setdefault(_COLUMNS[title], place)
            units.setdefault(_COLUMNS[title], _SCALES.get(title, 1))
        elif lines[0][1][place] and title not in _UNUSED:
            raise UsageError(
                f"{path}: column {ascii(lines[0][1][place])[:40]} is not known: expected some of "
                f"{', '.join([*TITLES, *(title for titles in UNITS.values() for title in titles)])}"
            )
    rows = []
    for line, values in lines[1:]:
        cells = {column: values[place] for column, place in places.items() if place < len(values)}
        filled = {column: text for column, text in cells.items() if text.lower() not in _EMPTY}
        rows.append(CsvRow(path, line, filled, units))
    return CsvTable(
        path, frozenset(places), rows, [title for title in lines[0][1] if _plain(title) in _UNUSED]
    )
