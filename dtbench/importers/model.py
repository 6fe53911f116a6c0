"""The contents of a log: lines of text, and tables.

A row of a table has one measurement per buffer placement (in place, out of place).

The functions on lines remove what container runtimes, terminals and NCCL added to the benchmark's output.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from dtbench.records.read import BadFieldError, decode

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
    return PrintedNumber(float(text), 0.5 * 10.0 ** (int(match[4] or 0) - len(match[3] or "")))


@lru_cache(2**14)
def parse_amount(text: str, unit: float = 1.0) -> PrintedNumber | None:
    """Parses a time or bandwidth and multiplies it by `unit`; None if it is negative or not a number."""
    number = parse_number(text)
    return number.scaled(unit) if number is not None and number.value >= 0 else None


@dataclass(slots=True)
class LogMeasurement:
    """A measurement of a row.

    Attributes:
        time: seconds per call.
        algbw: algorithm bandwidth as printed, bytes per second.
        busbw: bus bandwidth as printed, bytes per second.
        wrong: number of wrong elements, or the largest deviation in old logs; None if the data were not checked.
        fault: the reason why the measurement must not be used; empty for a good measurement.
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
        """Records the first fault of the measurement; wrong data replace any other fault."""
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
        measurements: one per buffer placement.
    """

    line: int
    size_bytes: int
    count: int | None
    dtype: str
    redop: str
    root: int | None
    measurements: list[LogMeasurement]


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
    def measurements(self) -> list[tuple[LogRow, LogMeasurement]]:
        return [(row, measurement) for row in self.rows for measurement in row.measurements]


@dataclass(frozen=True)
class Problem:
    """A remark about a log for the user.

    Attributes:
        line: number of the line, from 1; 0 for the whole log.
    """

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
        """Records a remark.

        Args:
            drops_row: whether a row was dropped for the reason in the remark.
        """
        self.problems.append(Problem(line, text))
        self.dropped_rows += drops_row

    @property
    def rows(self) -> int:
        return self.dropped_rows + sum(len(table.rows) for table in self.tables)

    @property
    def refused(self) -> int:
        """Number of rows that were dropped, belong to a refused table, or have a faulty measurement."""
        return self.dropped_rows + sum(
            bool(table.refusal) or any(measurement.fault for measurement in row.measurements)
            for table in self.tables
            for row in table.rows
        )


def pattern(text: str, flags: int = 0) -> re.Pattern[str]:
    """Compiles an expression whose `\\d` matches ASCII digits only, unlike int() and float()."""
    return re.compile(text, re.ASCII | flags)


# Lines of a table have some 200 characters. Longer lines are cut, since they would be slow to search.
MAX_LINE = 8192
_ESCAPES = pattern(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[@-_])")
# A message of NCCL, anywhere in a line: "host:pid:tid [device] NCCL INFO ...".
_NCCL = pattern(r":\d+:\d+ \[\d+\] (?:\d+\.\d+ \S+ )?NCCL [A-Z]+")
_VALUE = pattern(r"N/A|[+-]?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|[+-]?nan|[+-]?inf", re.IGNORECASE)
# A number directly followed by text. Text that begins with a digit cannot be separated from the number.
_LEADING_VALUE = pattern(r"(N/A|[+-]?\d+(?:\.\d+)?(?:e[+-]\d+)?)(?=[A-Za-z\[(<_])")
# The line format of CRI runtimes (containerd, CRI-O): time, stream, F (full line) or P (partial line), text.
_CRI = pattern(r"\d{4}-\d\d-\d\dT\S+ (?:stdout|stderr) ([FP])(?::\S*)?(?: (.*))?")
_HEAD_LINES = 20  # lines that decide about the format; the first may be a message of the client


def strip_container_log(text: str) -> str:
    """Extracts the program's output from a container runtime's log (Docker's json-file, or CRI)."""
    lines = text.split("\n")
    is_plain = all(_container_text(line) == f"{line}\n" for line in lines[:_HEAD_LINES])
    return text if is_plain else "".join(map(_container_text, lines))


def _container_text(line: str) -> str:
    """Extracts the text from one line of a container's log; returns other lines unchanged."""
    if match := _CRI.fullmatch(line.rstrip("\r")):
        return (match[2] or "") + "\n" * (match[1] == "F")
    try:
        text = decode(line.encode("utf-8", "replace")).get("log") if line.startswith("{") else None
    except BadFieldError:
        text = None
    return text if isinstance(text, str) else f"{line}\n"


def clean_lines(text: str) -> Iterator[str]:
    """Yields the lines without terminal escapes and without the text that a carriage return overwrote."""
    for line in text.split("\n"):
        line = line[:MAX_LINE].rstrip("\r ")
        if "\x1b" in line:
            line = _ESCAPES.sub("", line)
        if "\r" in line:
            line = line.rsplit("\r", 1)[1]
        yield line.replace("\t", " ").replace("\x00", "")


def scan(text: str, kinds: Mapping[str, re.Pattern[str]]) -> Iterator[tuple[int, str, re.Match[str]]]:
    """Yields the number (from 1), the kind and the match of each line that matches one of the patterns.

    Args:
        kinds: kind -> pattern. The first that matches a line determines its kind.
    """
    for number, line in enumerate(clean_lines(text), 1):
        for kind, expression in kinds.items():
            if match := expression.search(line):
                yield number, kind, match
                break


def strip_nccl_message(line: str) -> str:
    """Removes a message of NCCL that was printed into the line, and all text behind it.

    The message begins with the host's name, directly behind the preceding value. The value is kept if the name
    begins with a letter.
    """
    match = _NCCL.search(line)
    if match is None:
        return line
    prefix, space, word = line[: match.start()].rpartition(" ")
    value = _LEADING_VALUE.match(word)
    return prefix + space + (value[1] if value else "")


@lru_cache(2**14)
def leading_value(word: str) -> tuple[str, bool]:
    """Returns the number or "N/A" that begins a word (else ""), and whether it is the entire word."""
    if _VALUE.fullmatch(word):
        return word, True
    value = _LEADING_VALUE.match(word)
    return (value[1], False) if value else ("", False)
