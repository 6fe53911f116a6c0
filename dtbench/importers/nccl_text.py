"""The text that nccl-tests and rccl-tests print, from nccl-tests 2.0 to 2.20.

Columns are bound by the header above them. A row is found wherever it begins in a line, so that it
does not matter which tags a launcher put before it. NCCL's own messages end up inside rows, because
a row is printed in three parts: a row stays open until it has all its columns.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache

from dtbench.importers.model import (
    COLLECTIVES,
    DTYPES,
    ListedRank,
    Log,
    LogFigure,
    LogRow,
    LogTable,
    Problem,
    amount,
    printed,
)
from dtbench.importers.text import lines_of, pattern, value_of, without_nccl

# The programs' names -> ours. Those without ours count bytes in ways of their own.
PROGRAMS = {name: name for name in COLLECTIVES} | {"alltoall": "all_to_all", "alltoallv": "", "hypercube": ""}
REDOPS = ("sum", "prod", "max", "min", "avg", "mulsum", "none")
_UNITS_READ = {"(us)", "(GB/s)"}

_NAMES = "|".join(sorted(PROGRAMS, key=len, reverse=True))
_PROGRAM = pattern(rf"\b({_NAMES})_perf(?:_mpi)?\b")
_STATED = pattern(r"Collective test (starting|concluded):\s*(\S+)")
_HEADER = pattern(r"(?:^|[\s#>:)|\]])size\s+count\s+type\s.*\b(?:time|cputime)\s+algbw\s+busbw\b")
_UNITS = pattern(r"\(B\)\s+\(elements\)\s+(.*)$")
_START = pattern(r"(?<![\w.])(\d{1,20}) +(\d{1,20}) +([A-Za-z][A-Za-z0-9_]*)(?= )")
_RANK = pattern(
    r"Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?Pid\s+(\d{1,10})\s+on\s+(\S+)\s+device\s+(\d{1,4})"
    r"\s+\[[0-9a-fA-Fx:.]*\]\s*(.*)$"
)
_VERSION = pattern(r"\b(nccl|rccl)-tests(?::)?\s+[Vv]ersion:?\s+(\S+)(?:.*\bnccl-library=(\d{4,6}))?")
_LIBRARY = pattern(r"\b(NCCL|RCCL) version\s*:?\s*(\d+\.\d+[\w.+-]*)")
_BAD = pattern(r"Out of bounds values\s*:\s*(\d{1,18})\s+(OK|FAILED)")
_AVERAGE = pattern(r"Avg bus bandwidth\s*:")
_FAILURE = pattern(r"Test (?:CUDA |NCCL |HIP )?failure\b.*|\b(?:Cuda|HIP|NCCL) failure\b.*")


@dataclass
class _HeaderColumns:
    """What a header says. groups: the columns of each placement, from its time on."""

    redop: bool
    root: bool
    groups: list[list[str]]
    after: int  # columns of the whole row, behind its placements
    error_column: bool

    @property
    def values(self) -> int:
        """How many all placements have together."""
        return sum(map(len, self.groups))


@dataclass
class _OpenRow:
    """A row whose columns are not all there yet. tag: what its launcher puts before each line."""

    line: int
    tag: re.Pattern[str]
    size: int
    count: int
    dtype: str
    words: list[str] = field(default_factory=list)


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
        self.table: LogTable | None = None
        self.columns: _HeaderColumns | None = None
        self.open: _OpenRow | None = None
        # What stands before a table and belongs to it.
        self.devices: list[ListedRank] = []
        self.programs: set[str] = set()
        self.stated: str | None = None
        self.versions: dict[str, str] = {}
        self.blocking = False
        self.roots: set[int] = set()  # processes that said they were rank 0 since the last table ended

    def read(self) -> None:
        for number, line in enumerate(self.lines, start=1):
            if not line:
                continue
            text = without_nccl(line)
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
        before, only = self.table, next(iter(self.programs)) if len(self.programs) == 1 else None
        table = LogTable("rccl-tests" if "rccl-tests" in self.versions else "nccl-tests", number)
        table.devices, table.versions = self.devices, dict(self.versions)
        table.mode = "isolated" if self.blocking else "back_to_back"
        table.error_column, table.mixed = self.columns.error_column, len(self.roots) > 1
        name_table(table, only if self.stated is None else self.stated)
        if "cputime" in words:
            table.refusal = "its times are the host's (cputime): run nccl-tests without -C"
        if before is not None and table.mixed and not (before.rows or before.ended):
            self.log.tables.remove(before)
        self.programs, self.stated = set(), None
        self.log.tables.append(table)
        self.table = table
        return True

    def _units(self, number: int, line: str) -> bool:
        match = _UNITS.search(line)
        if match is None or self.table is None:
            return False
        if set(match[1].split()) != _UNITS_READ and not self.table.refusal:
            self.table.refusal = (
                f"line {number} gives the units {match[1][:80]}: expected {' and '.join(sorted(_UNITS_READ))}"
            )
        return True

    def _device(self, number: int, line: str) -> bool:
        match = _RANK.search(line)
        if match is None:
            return False
        device = ListedRank(
            int(match[1]), int(match[2] or 0), match[4], int(match[5]), match[6].strip(), int(match[3])
        )
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
        else:
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
        version, library = _VERSION.search(line), _LIBRARY.search(line)
        if version:
            self.versions[f"{version[1]}-tests"] = version[2][:60]
            if version[3]:
                self.versions["nccl"] = library_version(int(version[3]))
        elif library:
            self.versions["nccl"] = library[2][:60]
        if "Blocking Enabled" in line:
            self.blocking = True
        self.programs |= {m[1] for m in _PROGRAM.finditer(line)}
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
                self.log.tables.append(LogTable("nccl-tests", number, refusal=_HEADERLESS))
            return True
        self._close("another row begins inside it")
        if self.table is not None and self.table.ended:  # a further cycle, printed without another header
            self.table = replace(self.table, line=number, rows=[], ended=False)
            self.log.tables.append(self.table)
        before = text[: match.start()].rstrip()
        size, count = int(match[1]), int(match[2])
        self.open = _OpenRow(number, _tag(before), size, count, match[3])
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

    def _take(self, row: _OpenRow, columns: _HeaderColumns) -> None:
        assert self.table is not None
        words = list(row.words)
        redop = words.pop(0) if words and words[0] in REDOPS else ""
        root = None
        if columns.root and len(words) > columns.values and re.fullmatch(r"[+-]?[0-9]{1,9}", words[0]):
            root = int(words.pop(0))
        extra = [word for word in words[columns.values + columns.after :] if value_of(word)[0]]
        dtype = DTYPES.get(row.dtype, (row.dtype, 0))[0]
        taken = LogRow(row.line, row.size, row.count, dtype, redop, root, [])
        for index, names in enumerate(columns.groups):
            values = dict(zip(names, words, strict=False))
            words = words[len(names) :]
            taken.figures.append(_figure(values, index == 1))
        if extra:
            for figure in taken.figures:
                figure.fail(f"it has {len(extra)} value(s) more than the header has columns")
        self.table.rows.append(taken)

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


def _columns(words: list[str]) -> _HeaderColumns:
    starts = [i for i, word in enumerate(words) if word in ("time", "cputime")]
    groups = [words[a:b] for a, b in itertools.pairwise([*starts, len(words)])]
    after = max(len(groups[-1]) - len(groups[0]), 0)  # for the whole row, such as the algorithm
    groups[-1] = groups[-1][: len(groups[-1]) - after]
    first = words[: starts[0]]
    return _HeaderColumns(
        redop="redop" in first,
        root="root" in first,
        groups=groups,
        after=after,
        error_column=any("error" in group for group in groups),
    )


def _needed(row: _OpenRow, columns: _HeaderColumns) -> int:
    """How many values a row has to have after its type; a blank redop or root is not one."""
    has_redop = bool(row.words) and row.words[0] in REDOPS
    # Where the redop is blank (alltoall of nccl-tests 2.0 to 2.12) there is no column of roots either.
    return columns.values + int(has_redop) + int(columns.root and (has_redop or not columns.redop))


def _figure(values: dict[str, str], in_place: bool) -> LogFigure:
    units = {"time": 1e-6, "algbw": 1e9, "busbw": 1e9}
    time, algbw, busbw = (amount(values.get(name, ""), unit) for name, unit in units.items())
    figure = LogFigure(in_place, time, algbw, busbw)
    if time is None or algbw is None or busbw is None:
        bad = [f"{k} {v[:20]}" for k, v in values.items() if amount(v) is None and k in units]
        figure.fail(f"it has no number for {', '.join(bad) or 'time, algbw or busbw'}")
    text = values.get("#wrong", values.get("error", "N/A"))
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


def name_table(table: LogTable, program: str | None) -> None:
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
