"""The contents of a log: tables of rows, each with one figure per buffer placement (in place, out of place)."""

import re
from dataclasses import dataclass, field
from functools import lru_cache

# For these, nccl-tests prints the element count of one rank's part; for the others, that of the whole size.
COUNTED_PER_RANK = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
# torch's names, which this project uses; some tools spell them differently.
COLLECTIVES = ("all_reduce", *COUNTED_PER_RANK, "broadcast", "reduce", "sendrecv")

IN_PLACE = ("all_reduce", "broadcast")  # torch.distributed runs these in place
# The tools' spellings, in lower case and without separators -> name.
SPELLINGS = {name.replace("_", ""): name for name in COLLECTIVES} | {
    "all2all": "all_to_all",
    "alltoallpersonalizedexchange": "all_to_all",  # OSU
    "bcast": "broadcast",
    "pt2pt": "sendrecv",  # DeepSpeed
}
TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# nccl-tests' and rccl-tests' name -> torch's name, bytes per element.
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
    """Returns the collective for a tool's spelling; None if it is unknown."""
    return SPELLINGS.get("".join(char for char in name.lower() if char.isalnum()))


@dataclass(frozen=True, slots=True)
class PrintedNumber:
    """A number from text. It was rounded, so the exact number lies anywhere in [low, high].

    Attributes:
        value: the number as printed.
        half: half a unit of its last digit.
    """

    value: float
    half: float

    @property
    def low(self) -> float:
        return self.value - self.half

    @property
    def high(self) -> float:
        return self.value + self.half

    def scaled(self, factor: float) -> "PrintedNumber":
        return PrintedNumber(self.value * factor, self.half * factor)

    @property
    def coarseness(self) -> float:
        """Relative rounding error: half a unit of the last digit over the number; infinite for 0."""
        return self.half / self.value if self.value > 0 else float("inf")


@lru_cache(2**14)
def parse_number(text: str) -> PrintedNumber | None:
    """Parses a decimal number; None for anything else (nan, inf, N/A, 1_000, 0x10)."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    exponent = int(match[4] or 0) - len(match[3] or "")
    return PrintedNumber(float(text), 0.5 * 10.0**exponent)


@lru_cache(2**14)
def parse_amount(text: str, unit: float = 1.0) -> PrintedNumber | None:
    """Parses a time or bandwidth and multiplies it by `unit`; None if it is negative or not a number."""
    number = parse_number(text)
    return number.scaled(unit) if number is not None and number.value >= 0 else None


@dataclass(slots=True)
class LogFigure:
    """A measurement of a row.

    Attributes:
        time: seconds per call.
        algbw: algorithm bandwidth as printed, bytes per second.
        busbw: bus bandwidth as printed, bytes per second.
        wrong: number of wrong elements, or the largest deviation in old logs; None if the data were not checked.
        fault: the reason why the figure must not be used; empty for a good figure.
        fault_is_wrong_data: whether that reason is wrong data.
        time_is_derived: the time is size over bandwidth, since the log has no time or a coarser one.
        time_is_separate: the time and the bandwidths come from separate measurements.
        samples_s: times of single iterations, if the log has them.
    """

    in_place: bool
    time: PrintedNumber | None
    algbw: PrintedNumber | None = None
    busbw: PrintedNumber | None = None
    wrong: float | None = None
    fault: str = ""
    fault_is_wrong_data: bool = False
    time_is_derived: bool = False
    time_is_separate: bool = False
    samples_s: tuple[float, ...] = ()

    def fail(self, reason: str, *, wrong_data: bool = False) -> None:
        """Records the first fault of the figure; wrong data replace any other fault."""
        if not self.fault or (wrong_data and not self.fault_is_wrong_data):
            self.fault, self.fault_is_wrong_data = reason, wrong_data


@dataclass(slots=True)
class LogRow:
    """A line of a table.

    Attributes:
        line: number of the line in the log, from 1.
        size_bytes: message size as nccl-tests counts it.
        count: number of elements as printed.
        dtype: torch's name of the element type, else the tool's.
        redop: the tool's name of the reduction, or empty.
        root: the root rank.
        figures: one per buffer placement.
    """

    line: int
    size_bytes: int
    count: int | None
    dtype: str
    redop: str
    root: int | None
    figures: list[LogFigure]


@dataclass(frozen=True)
class ListedRank:
    """A line of the list of ranks that nccl-tests prints.

    Attributes:
        group: number of the group of ranks that measures together.
        index: number of the device on its host.
        name: product name of the device.
    """

    rank: int
    group: int
    host: str
    index: int
    name: str


@dataclass
class LogTable:
    """A table of a log. `checks.check` completes the collective and the ranks, and marks faults.

    Attributes:
        tool: the benchmark that printed the table.
        line: number of its first line in the log.
        collective: None until it is known.
        ranks: number of ranks; None until it is known.
        ranks_from: the source of `ranks`.
        devices: the list of ranks above the table.
        refusal: the reason why no row can be used; empty for a usable table.
        error_column: the "wrong" column holds the largest deviation (nccl-tests before 2.13), not a count.
        mode: see `dtbench_suites.collectives`.
        versions: name -> version of the tool and its libraries.
        failed_values: the number in the footer "Out of bounds values".
        ended: whether the table's footer was found.
        mixed: several processes above the table claim to be rank 0.
        started: time at which the benchmark started, as printed.
        sizes_are_parts: sizes are those of one rank's part and have to be multiplied by the number of ranks.
        unused_columns: name of a column that is not read -> its distinct values.
        dim: mesh dim that the ranks form; set by `convert`.
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
    failed_values: int | None = None
    ended: bool = False
    mixed: bool = False
    started: str = ""
    sizes_are_parts: bool = False
    unused_columns: dict[str, dict[str, None]] = field(default_factory=dict)
    dim: str = ""

    @property
    def figures(self) -> list[tuple[LogRow, LogFigure]]:
        return [(row, figure) for row in self.rows for figure in row.figures]


@dataclass(frozen=True)
class Problem:
    """A remark about a log for the user. line: its number from 1, or 0 for the whole log."""

    line: int
    text: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.text}" if self.line else self.text


@dataclass
class Log:
    """The contents of one log file.

    Attributes:
        name: file name without folders.
        sha256: digest of its bytes.
        format: the formats that were recognized.
        dropped_rows: number of rows that could not be added to a table.
        failures: errors that the benchmark itself reported.
    """

    name: str
    sha256: str
    format: str = ""
    tables: list[LogTable] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    dropped_rows: int = 0
    failures: list[Problem] = field(default_factory=list)

    def add_problem(self, line: int, text: str, *, drops_row: bool = False) -> None:
        """Records a remark. drops_row: whether a row was dropped because of it."""
        self.problems.append(Problem(line, text))
        self.dropped_rows += drops_row

    @property
    def rows(self) -> int:
        return self.dropped_rows + sum(len(table.rows) for table in self.tables)

    @property
    def refused(self) -> int:
        """Number of rows that were dropped, belong to a refused table, or have a faulty figure."""
        return self.dropped_rows + sum(
            bool(table.refusal) or any(figure.fault for figure in row.figures)
            for table in self.tables
            for row in table.rows
        )
