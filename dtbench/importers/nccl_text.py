"""The text that nccl-tests and rccl-tests print, from NCCL 1's tests to nccl-tests 2.20.

Columns are bound by the header above them. A row is found wherever it begins in a line, so that it
does not matter which tags a launcher put before it. NCCL's own messages end up inside rows, because
a row is printed in three parts: a row stays open until it has all its columns.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from functools import lru_cache

from dtbench.importers.model import (
    COLLECTIVES,
    DTYPES,
    Device,
    Figure,
    Log,
    Problem,
    Row,
    Table,
    amount,
    printed,
)
from dtbench.importers.text import hosts_in, lines_of, pattern, value_of, without_nccl

# The programs' names -> ours. Those without ours count bytes in ways of their own.
PROGRAMS = {name: name for name in COLLECTIVES} | {"alltoall": "all_to_all", "alltoallv": "", "hypercube": ""}
REDOPS = ("sum", "prod", "max", "min", "avg", "mulsum", "none")
_TIMES = {"(ns)": 1e-9, "(us)": 1e-6, "(ms)": 1e-3, "(s)": 1.0}
_BANDWIDTHS = {"(MB/s)": 1e6, "(GB/s)": 1e9, "(MiB/s)": 2.0**20, "(GiB/s)": 2.0**30}

_NAMES = "|".join(sorted(PROGRAMS, key=len, reverse=True))
_PROGRAM = pattern(rf"\b({_NAMES})_perf(?:_mpi)?\b")
_SCRIPT = pattern(rf"nccl_tests\S*\s(?:.*\s)?-t\s+({_NAMES})\b")
_STATED = pattern(r"Collective test (starting|concluded):\s*(\S+)")
_HEADER = pattern(
    r"(?:^|[\s#>:)|\]])(?:size|bytes)\s+(?:count|N)\s+type\s.*\b(?:time|cputime)\s+algbw\s+busbw\b"
)
_UNITS = pattern(r"\(B\)\s+\(elements\)\s+(.*)$")
_START = pattern(r"(?<![\w.])(\d{1,20}) +(\d{1,20}) +([A-Za-z][A-Za-z0-9_]*)(?= )")
_RANK = pattern(
    r"Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?Pid\s+(\d{1,10})\s+on\s+(\S+)\s+device\s+(\d{1,4})"
    r"\s+\[[0-9a-fA-Fx:.]*\]\s*(.*)$"
)
_DEVICE = pattern(r"#\s+Device\s+(\d{1,4})\s+->\s+(\d{1,4})\s+\[[0-9a-fA-Fx]*\]\s*(.*)$")
_CONFIG = pattern(r"\bnThreads?\s+\d+\s+nGpus\s+\d+\s+minBytes\b")
_ITERS = pattern(r"(?<!warmup )(?<!agg )\biters:\s+(\d{1,9})")
_VERSION = pattern(r"\b(nccl|rccl)-tests(?::)?\s+[Vv]ersion:?\s+(\S+)(?:.*\bnccl-library=(\d{4,6}))?")
_LIBRARY = pattern(r"\b(NCCL|RCCL) version\s*:?\s*(\d+\.\d+[\w.+-]*)")
_BAD = pattern(r"Out of bounds values\s*:\s*(\d{1,18})\s+(OK|FAILED)")
_AVERAGE = pattern(r"Avg bus bandwidth\s*:\s*(\S+)")
_ELISION = pattern(r"(?:#\s*)?(?:\.\.\.|…|\[\.\.\.\]|<snip>|\[snip\])")
_FAILURE = pattern(r"Test (?:CUDA |NCCL |HIP )?failure\b.*|\b(?:Cuda|HIP|NCCL) failure\b.*")
_STAMP = pattern(r"\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")


@dataclass
class _Columns:
    """What a header says. groups: the columns of each placement, from its time on."""

    redop: bool
    root: bool
    groups: list[list[str]]
    after: int = 0  # columns of the whole row, behind its placements
    stamp: bool = False
    time_unit: float = 1e-6
    bandwidth_unit: float = 1e9
    error_column: bool = False
    cpu_time: bool = False


@dataclass
class _Open:
    """A row whose columns are not all there yet. tag: what its launcher puts before each line."""

    line: int
    tag: re.Pattern[str]
    size: int
    count: int
    dtype: str
    words: list[str] = field(default_factory=list)
    blank: bool = False  # a wide gap stands where the first placement should


_HEADERLESS = (
    "rows without the header above them, which says what their columns are: give the log from its header on, and "
    "--ranks N where it lists no ranks"
)


def applies(text: str) -> bool:
    """Whether the text may hold such output."""
    return any(word in text for word in ("algbw", "minBytes", " Pid ")) or bool(_START.search(text))


def read(text: str, log: Log) -> None:
    """Adds the tables of a text to its log."""
    _Reader(text, log).read()


class _Reader:
    def __init__(self, text: str, log: Log) -> None:
        self.lines = lines_of(text)
        self.log = log
        self.hosts = hosts_in(self.lines)
        self.table: Table | None = None
        self.columns: _Columns | None = None
        self.open: _Open | None = None
        # What stands before a table and belongs to it.
        self.devices: list[Device] = []
        self.programs: set[str] = set()
        self.stated: str | None = None
        self.versions: dict[str, str] = {}
        self.iterations: int | None = None
        self.blocking = False
        self.roots: set[int] = set()  # processes that said they were rank 0 since the last table ended

    def read(self) -> None:
        for number, line in enumerate(self.lines, start=1):
            if not line:
                continue
            text = without_nccl(line, self.hosts)
            if self._row(number, text) or self._rest(text):
                continue
            if text is not line and "version" not in line and "failure" not in line:
                continue  # one of NCCL's messages, of which a log may have millions
            takers = (self._header, self._units, self._device, self._footer, self._about)
            any(take(number, line) for take in takers)
        self._close("the log ends inside it")

    # ------------------------------------------------------------------------------ the table's frame

    def _header(self, number: int, line: str) -> bool:
        match = _HEADER.search(line)
        if match is None:
            return False
        self._close("a new table begins inside it")
        words = line[match.start() :].lstrip(" #>:)|]").split()
        self.columns = _columns(words)
        self._new_table(number)
        return True

    def _new_table(self, number: int, like: Table | None = None) -> Table:
        """Opens a table: `like` the one whose rows it goes on with, else by what stands above it."""
        before, columns = self.table, self.columns
        assert columns is not None
        table = Table("nccl-tests", number)
        table.devices = self.devices
        table.versions = dict(self.versions)
        table.tool = "rccl-tests" if "rccl-tests" in self.versions else "nccl-tests"
        table.iterations = self.iterations
        table.mode = "isolated" if self.blocking else "back_to_back"
        table.error_column, table.redop_column = columns.error_column, columns.redop
        only = next(iter(self.programs)) if len(self.programs) == 1 else None
        name_table(table, only if self.stated is None else self.stated)
        if like is not None:
            table.devices, table.collective, table.refusal = like.devices, like.collective, like.refusal
            table.continues = like
        self.programs, self.stated = set(), None
        table.mixed = len(self.roots) > 1
        if before is not None and table.mixed and not (before.rows or before.ended):
            self.log.tables.remove(before)
        self.log.tables.append(table)
        self.table = table
        return table

    def _units(self, number: int, line: str) -> bool:
        match = _UNITS.search(line)
        if match is None or self.columns is None or self.table is None:
            return False
        units = match[1].split()
        times = {u for u in units if u in _TIMES}
        bandwidths = {u for u in units if u in _BANDWIDTHS}
        foreign = [u for u in units if u.startswith("(") and u not in {*_TIMES, *_BANDWIDTHS, "(%)"}]
        if foreign or len(times) != 1 or len(bandwidths) != 1:
            self.table.refusal = (
                f"line {number} gives the units {' '.join(units)[:80]}: expected one unit of time "
                f"({', '.join(_TIMES)}) and one of bandwidth ({', '.join(_BANDWIDTHS)})"
            )
            return True
        self.columns.time_unit = _TIMES[times.pop()]
        self.columns.bandwidth_unit = _BANDWIDTHS[bandwidths.pop()]
        return True

    def _device(self, number: int, line: str) -> bool:
        match = _RANK.search(line)
        if match:
            device = Device(
                int(match[1]), int(match[2] or 0), match[4], int(match[5]), match[6].strip(), int(match[3])
            )
            self.hosts.add(match[4])
        else:
            match = _DEVICE.search(line)
            if match is None:
                return False
            device = Device(int(match[1]), 0, "", int(match[2]), match[3].strip(), 0)
        if device.rank == 0 and device.group == 0:
            self.roots.add(device.pid)
        # A list of devices that has gone to a table, or that already has this rank, is another's.
        used = self.table is not None and self.table.devices is self.devices
        if used or any(d.rank == device.rank for d in self.devices):
            self.devices = []
        self.devices.append(device)
        return True

    def _footer(self, number: int, line: str) -> bool:
        table, bad, average = self.table, _BAD.search(line), _AVERAGE.search(line)
        if table is None or not (bad or average):
            return False
        self._close("the table ends inside it")
        table.ended = True
        if bad:
            table.failed_values = int(bad[1])
        elif average:
            busbw = printed(average[1])
            table.average_busbw, table.average_line = busbw and busbw.scaled(1e9), number
            self.programs, self.blocking, self.roots = set(), False, set()
        return True

    def _about(self, number: int, line: str) -> bool:
        """Lines that say what is measured. What stands before a table belongs to it."""
        failure = _FAILURE.search(line)
        if failure:
            self.log.failures.append(Problem(number, failure[0].strip()[:160]))
            return True
        stated = _STATED.search(line)
        if stated:
            name = _PROGRAM.match(stated[2])
            program = name[1] if name else stated[2]
            if stated[1] == "starting":
                self.stated = program
            elif self.table is not None and self.table.collective is None and not self.table.refusal:
                name_table(self.table, program)
            return True
        if _CONFIG.search(line):
            iterations = _ITERS.search(line)
            self.iterations = int(iterations[1]) if iterations else None
            return True
        version, library = _VERSION.search(line), _LIBRARY.search(line)
        if version:
            self.versions[f"{version[1]}-tests"] = version[2][:60]
            if version[3]:
                self.versions["nccl"] = library_version(int(version[3]))
        elif library:
            self.versions["nccl"] = library[2][:60]
        if "Blocking Enabled" in line:
            self.blocking = True
        if self.table is not None and _ELISION.match(line.rsplit(">:", 1)[-1].strip()):
            self.table.elided = True
        named = {m[1] for m in _PROGRAM.finditer(line)} | {m[1] for m in _SCRIPT.finditer(line)}
        self.programs |= named
        return bool(version or library)

    # --------------------------------------------------------------------------------------- its rows

    def _row(self, number: int, text: str) -> bool:
        """Whether a row begins in the line."""
        match = _START.search(text)
        if match is None:
            return False
        if match[3] not in DTYPES and (self.columns is None or not _looks_like_values(text[match.end() :])):
            return False
        if self.columns is None:
            if not self.log.tables:
                self.log.tables.append(Table("nccl-tests", number, refusal=_HEADERLESS))
            return True
        self._close("another row begins inside it")
        if self.table is not None and self.table.ended:
            self._new_table(number, self.table)  # a further cycle, printed without another header
        before = text[: match.start()].rstrip()
        size, count = int(match[1]), int(match[2])
        self.open = _Open(number, _tag(before), size, count, match[3])
        self._feed(text[match.end() :])
        return True

    def _rest(self, text: str) -> bool:
        """Whether the line goes on with the open row."""
        if self.open is None:
            return False
        tag = self.open.tag.match(text)
        rest = text[tag.end() :] if tag else text
        words = rest.split()
        if not words or not value_of(words[0])[0] or not all(value_of(word)[1] for word in words[:-1]):
            return False
        self._feed(rest)
        return True

    def _feed(self, rest: str) -> None:
        """Adds the line's values to the open row, which is closed once it has them all."""
        row, columns = self.open, self.columns
        assert row is not None and columns is not None
        if columns.stamp:
            rest = _STAMP.sub("", rest)
        if not row.words:  # with trace replay the first placement is left blank
            row.blank = bool(re.match(r"(?:\s+\S+){0,2}\s{30,}\S", rest))
        for word in rest.split():
            value, whole = value_of(word)
            if not row.words and word in REDOPS:
                row.words.append(word)
            elif value:
                row.words.append(value)
                if not whole:
                    break
            elif len(row.words) >= _needed(row, columns):
                row.words.append(word)  # columns of text, after the numbers
            else:
                break
        if len(row.words) >= _needed(row, columns):
            self.open = None
            self._take(row, columns)

    def _take(self, row: _Open, columns: _Columns) -> None:
        table = self.table
        assert table is not None
        words = list(row.words)
        redop = words.pop(0) if words and words[0] in REDOPS else ""
        groups = columns.groups[1:] if row.blank else columns.groups
        width = sum(map(len, groups))
        root = None
        if columns.root and len(words) > width and re.fullmatch(r"[+-]?[0-9]{1,9}", words[0]):
            root = int(words.pop(0))
        extra = [word for word in words[width + columns.after :] if value_of(word)[0]]
        dtype = DTYPES.get(row.dtype, (row.dtype, 0))[0]
        made = Row(row.line, row.size, row.count, dtype, redop, root, [])
        for index, names in enumerate(groups):
            values = dict(zip(names, words, strict=False))
            words = words[len(names) :]
            in_place = index == 1 or (row.blank and len(columns.groups) == 2)
            made.figures.append(_figure(values, columns, in_place))
        if extra:
            for figure in made.figures:
                figure.fail(f"it has {len(extra)} value(s) more than the header has columns")
        table.rows.append(made)

    def _close(self, why: str) -> None:
        if self.open is not None and self.columns is not None:
            row, self.open = self.open, None
            self.log.say(
                row.line,
                f"the row of {row.size} bytes is incomplete and was left out: {why}, "
                f"after {len(row.words)} of {_needed(row, self.columns)} values",
            )


@lru_cache(2**10)
def _tag(before: str) -> re.Pattern[str]:
    """What the lines of a process begin with, by the beginning of one: numbers in it may count up."""
    return pattern(re.sub(r"\d+", r"\\d+", re.escape(before)) if len(before) < 256 else "")


def _columns(words: list[str]) -> _Columns:
    stamp = words[-1] == "timestamp"
    words = words[:-1] if stamp else words
    starts = [i for i, word in enumerate(words) if word in ("time", "cputime")]
    groups = [words[a:b] for a, b in itertools.pairwise([*starts, len(words)])]
    after = max(len(groups[-1]) - len(groups[0]), 0)  # for the whole row, such as the algorithm
    groups[-1] = groups[-1][: len(groups[-1]) - after]
    first = words[: starts[0]]
    return _Columns(
        redop="redop" in first or "op" in first,
        root="root" in first,
        groups=groups,
        after=after,
        stamp=stamp,
        time_unit=1e-3 if words[0] == "bytes" else 1e-6,  # NCCL 1's tests print ms, and no line of units
        error_column=any(name in ("error", "res") for group in groups for name in group),
        cpu_time=words[starts[0]] == "cputime",
    )


def _needed(row: _Open, columns: _Columns) -> int:
    """How many values a row has to have after its type; a blank redop or root is not one."""
    groups = columns.groups[1:] if row.blank else columns.groups
    has_redop = bool(row.words) and row.words[0] in REDOPS
    # Where the redop is blank (alltoall of nccl-tests 2.0 to 2.12) there is no column of roots either.
    return sum(map(len, groups)) + int(has_redop) + int(columns.root and (has_redop or not columns.redop))


def _figure(values: dict[str, str], columns: _Columns, in_place: bool) -> Figure:
    names = ("cputime" if columns.cpu_time else "time", "algbw", "busbw")
    units = (columns.time_unit, columns.bandwidth_unit, columns.bandwidth_unit)
    time, algbw, busbw = (amount(values.get(name, ""), unit) for name, unit in zip(names, units, strict=True))
    figure = Figure(in_place, time, algbw, busbw)
    if columns.cpu_time:
        figure.time = None  # it is the host's; the bandwidths are the device's
    if time is None or algbw is None or busbw is None:
        bad = [f"{k} {v[:20]}" for k, v in values.items() if amount(v) is None and k in names]
        figure.fail(f"it has no number for {', '.join(bad) or 'time, algbw or busbw'}")
    text = next((values[name] for name in ("#wrong", "error", "res") if name in values), "N/A")
    wrong = printed(text)
    if wrong is not None:
        figure.wrong = wrong.value
    elif text.upper() != "N/A":
        figure.fail(f"its check of the data says {text[:20]}", wrong_data=True)
    return figure


def library_version(code: int) -> str:
    """NCCL's version from its number: 22807 is 2.28.7; before 2.9 it was 2804 for 2.8.4."""
    if code >= 10000:
        return f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    return f"{code // 1000}.{code // 100 % 10}.{code % 100}"


def name_table(table: Table, program: str | None) -> None:
    """Gives the table the collective of an nccl-tests program, or the reason why it is not read."""
    name = PROGRAMS.get(program or "")
    if name:
        table.collective = name
    elif name == "":
        table.refusal = (
            f"{program!r} is not read: its bandwidths do not count bytes as those of a collective do"
        )
    elif program is not None:
        table.refusal = f"{program[:40]!r} is no program of nccl-tests that is known here"


def _looks_like_values(rest: str) -> bool:
    words = rest.split()
    return len(words) >= 3 and (words[0] in REDOPS or bool(value_of(words[0])[0]))
