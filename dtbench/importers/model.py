"""What is found in a log: tables of rows, each row with one figure per placement of its buffers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

# In nccl-tests the count of these is one rank's part of the size; elsewhere it is the whole.
PARTS = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
# Names of this project, which are torch's; the tools have their own for some.
COLLECTIVES = ("all_reduce", *PARTS, "broadcast", "reduce", "sendrecv")

IN_PLACE = ("all_reduce", "broadcast")  # as torch.distributed calls them
# As the tools spell them, in small letters and without what joins the words.
SPELT = {name.replace("_", ""): name for name in COLLECTIVES} | {
    "all2all": "all_to_all",
    "alltoallpersonalizedexchange": "all_to_all",  # OSU
    "bcast": "broadcast",
    "pt2pt": "sendrecv",  # DeepSpeed
}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# As nccl-tests and rccl-tests name them -> torch's name, bytes per element.
DTYPES = {
    "int8": ("int8", 1),
    "uint8": ("uint8", 1),
    "int32": ("int32", 4),
    "uint32": ("uint32", 4),
    "int64": ("int64", 8),
    "uint64": ("uint64", 8),
    "half": ("float16", 2),
    "float": ("float32", 4),
    "double": ("float64", 8),
    "bfloat16": ("bfloat16", 2),
    "f8e4m3": ("float8_e4m3fn", 1),
    "f8e5m2": ("float8_e5m2", 1),
    "fp8_e4m3": ("float8_e4m3fn", 1),
    "fp8_e5m2": ("float8_e5m2", 1),
}
ITEMSIZE = dict(DTYPES.values())

_NUMBER = re.compile(r"([+-]?)(\d{1,30})(?:\.(\d{0,30}))?(?:[eE]([+-]?\d{1,2}))?", re.ASCII)


def collective_of(name: str) -> str | None:
    """The collective that a tool calls so; None where it is not known here."""
    return SPELT.get("".join(c for c in name.lower() if c.isalnum()))


@dataclass(frozen=True, slots=True)
class Printed:
    """A number as text gives it: rounded, so that the true one lies anywhere in [low, high]."""

    value: float
    half: float  # half a unit of the last digit

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half

    def scaled(self, factor: float) -> Printed:
        return Printed(self.value * factor, self.half * factor)

    @property
    def coarseness(self) -> float:
        """Half a unit of the last digit, as a share of the number; infinite for 0."""
        return self.half / self.value if self.value > 0 else float("inf")


@lru_cache(2**14)
def printed(text: str) -> Printed | None:
    """A decimal number with its rounding; None for anything else (nan, inf, N/A, 1_000, 0x10)."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    exponent = int(match[4] or 0) - len(match[3] or "")
    return Printed(float(text), 0.5 * 10.0**exponent)


@lru_cache(2**14)
def amount(text: str, unit: float = 1.0) -> Printed | None:
    """A printed number of at least 0 in this unit, as times and bandwidths are."""
    number = printed(text)
    return number.scaled(unit) if number is not None and number.value >= 0 else None


@dataclass(slots=True)
class LogFigure:
    """One measurement of a row. `fault`: why it is no measurement; its numbers then say nothing.

    time: seconds per call. algbw, busbw: bytes per second, as printed. wrong: wrong elements (or, in
    old logs, the largest deviation), None where data were not checked. time_is_derived: it is S over
    the bandwidth, as the log gives no time or a coarser one. samples_s: single iterations, where the log has them.
    """

    in_place: bool
    time: Printed | None
    algbw: Printed | None = None
    busbw: Printed | None = None
    wrong: float | None = None
    fault: str = ""
    fault_is_wrong_data: bool = False
    time_is_derived: bool = False
    time_is_separate: bool = False  # of another measurement than the bandwidths
    samples_s: tuple[float, ...] = ()

    def fail(self, reason: str, *, wrong_data: bool = False) -> None:
        """Keeps the first reason; wrong data outdo what is merely inconsistent."""
        if not self.fault or (wrong_data and not self.fault_is_wrong_data):
            self.fault, self.fault_is_wrong_data = reason, wrong_data


@dataclass(slots=True)
class LogRow:
    """One line of a table. size_bytes: S as nccl-tests counts it. count: elements as printed."""

    line: int
    size_bytes: int
    count: int | None
    dtype: str
    redop: str
    root: int | None
    figures: list[LogFigure]


@dataclass(frozen=True)
class ListedRank:
    rank: int
    group: int
    host: str
    index: int
    name: str


@dataclass
class LogTable:
    """One table of a log, in the words of the log until `checks.check` has been over it.

    collective, ranks: what the log states; None where it does not. ranks_from: where `ranks` is from.
    refusal: why no row of it can be used. error_column: the wrong column holds the largest deviation
    (nccl-tests before 2.13), not a count. mode: see `dtbench_suites.collectives`. aside: columns that are not
    read -> what they hold. dim: of a mesh, which `convert` chooses.
    """

    tool: str
    line: int
    rows: list[LogRow] = field(default_factory=list)
    collective: str | None = None
    ranks: int | None = None
    ranks_from: str = ""
    devices: list[ListedRank] = field(default_factory=list)
    refusal: str = ""
    error_column: bool = False
    mode: str = "back_to_back"
    device_type: str = "cuda"
    versions: dict[str, str] = field(default_factory=dict)
    failed_values: int | None = None  # of the footer "Out of bounds values"
    ended: bool = False
    mixed: bool = False  # several processes said they were rank 0 above it
    started: str = ""
    sizes_are_parts: bool = False  # sizes are one rank's part of S, until the ranks are known
    aside: dict[str, dict[str, None]] = field(default_factory=dict)
    dim: str = ""

    @property
    def figures(self) -> list[tuple[LogRow, LogFigure]]:
        return [(row, figure) for row in self.rows for figure in row.figures]


@dataclass(frozen=True)
class Problem:
    """Something a reader of the log must know. line: counted from 1; 0 where none is meant."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line else self.text


@dataclass
class Log:
    """A file, read. name: without its folders; sha256: of its bytes. left_out: rows that no table can hold."""

    name: str
    sha256: str
    format: str = ""
    tables: list[LogTable] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    left_out: int = 0
    failures: list[Problem] = field(default_factory=list)  # where the benchmark itself said it failed

    def say(self, line: int, text: str, *, leaves_out: bool = False) -> None:
        """leaves_out: whether a row is left out for it."""
        self.problems.append(Problem(line, text))
        self.left_out += leaves_out

    @property
    def rows(self) -> int:
        return self.left_out + sum(len(table.rows) for table in self.tables)

    @property
    def refused(self) -> int:
        """Rows that are left out, or of which a figure is no measurement."""
        return self.left_out + sum(
            bool(table.refusal) or any(figure.fault for figure in row.figures)
            for table in self.tables
            for row in table.rows
        )
