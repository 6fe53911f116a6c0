"""The text that nccl-tests and rccl-tests print, from nccl-tests 2.0 to 2.20.

Columns are bound by the header above them, in its order. A row is found wherever it begins in a line, so that it
does not matter which tags a launcher put before it. NCCL's own messages end up inside rows, because
a row is printed in three parts: a row stays open until it has all its columns.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from dtbench.importers.columns import CHECKS, REDOPS, TIMED, Names, Row, add_rows, groups_of
from dtbench.importers.model import COLLECTIVES, DTYPES, ListedRank, Log, LogTable, Problem
from dtbench.importers.text import lines_of, pattern, value_of, without_nccl

# The programs' names -> ours. Those without ours count bytes in ways of their own.
PROGRAMS = {name: name for name in COLLECTIVES} | {"alltoall": "all_to_all", "alltoallv": "", "hypercube": ""}
_UNITS_READ = {"(us)", "(GB/s)"}
_NUMBERS = (*TIMED, *CHECKS, "redop", "root")

_NAMES = "|".join(sorted(PROGRAMS, key=len, reverse=True))
_PROGRAM = pattern(rf"\b({_NAMES})_perf(?:_mpi)?\b")
_STATED = pattern(r"Collective test (starting|concluded):\s*(\S+)")
_HEADER = pattern(r"(?:^|[\s#>:)|\]])((?:size|count|type)\s.*)$")
_UNITS = pattern(r"\(B\)\s+\(elements\)\s+(.*)$")
_STARTS = {"size": r"\d{1,20}", "count": r"\d{1,20}", "type": r"[A-Za-z][A-Za-z0-9_]*"}
_USUAL: Names = ("size", "count", "type")
_WORD = pattern(r"[\w.+*/%#-]+")  # of a row; messages have other signs, too
_TIMESTAMP = pattern(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b")
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
    """What a header says. lead: how many columns up to the size, count and type. after: columns of the whole row,
    such as the algorithm, behind its placements."""

    names: Names
    lead: int
    after: int
    start: re.Pattern[str]


@dataclass
class _OpenRow:
    """A row whose columns are not all there yet. tag: what its launcher puts before each line."""

    line: int
    tag: re.Pattern[str]
    words: list[str]


_HEADERLESS = (
    "rows without the header above them, which says what their columns are: give the log from its header on, and "
    "--ranks N where it lists no ranks"
)


def applies(text: str) -> bool:
    return any(word in text for word in ("algbw ", "minBytes", " Pid ")) or bool(_start(_USUAL).search(text))


def read(text: str, log: Log) -> None:
    _Reader(text, log).read()


class _Reader:
    def __init__(self, text: str, log: Log) -> None:
        self.lines = lines_of(text)
        self.log = log
        self.table: LogTable | None = None
        self.columns: _HeaderColumns | None = None
        self.open: _OpenRow | None = None
        self.read_rows: list[tuple[LogTable, _HeaderColumns, list[Row]]] = []
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
        for table, columns, rows in self.read_rows:
            add_rows(self.log, table, columns.names, rows, columns.after)

    def _header(self, number: int, line: str) -> bool:
        match = _HEADER.search(line)
        words = match[1].split() if match else []
        names = tuple("time" if word == "cputime" else word for word in words if word != "timestamp")
        if not set(names[:9]) >= {*_USUAL} or not groups_of(names):
            return False
        self._close("a new table begins inside it")
        self.columns = _columns(names)
        before, only = self.table, next(iter(self.programs)) if len(self.programs) == 1 else None
        table = LogTable("rccl-tests" if "rccl-tests" in self.versions else "nccl-tests", number)
        table.devices, table.versions = self.devices, dict(self.versions)
        table.mode = "isolated" if self.blocking else "back_to_back"
        table.error_column, table.mixed = "error" in names, len(self.roots) > 1
        name_table(table, only if self.stated is None else self.stated)
        if "cputime" in words:
            table.refusal = "its times are the host's (cputime): run nccl-tests without -C"
        if before is not None and table.mixed and not (self.read_rows[-1][2] or before.ended):
            self.log.tables.remove(before)
        self.programs, self.stated = set(), None
        self._add(table, self.columns)
        return True

    def _add(self, table: LogTable, columns: _HeaderColumns) -> None:
        self.table = table
        self.log.tables.append(table)
        self.read_rows.append((table, columns, []))

    def _units(self, number: int, line: str) -> bool:
        match = _UNITS.search(line)
        if match is None or self.table is None:
            return False
        # (%) is of the iterations' variation, and a timestamp has its format here.
        units = {word for word in match[1].split() if word.startswith("(")} - {"(%)"}
        if units != _UNITS_READ and not self.table.refusal:
            expected = " and ".join(sorted(_UNITS_READ))
            self.table.refusal = f"line {number} gives the units {match[1][:80]}: expected {expected}"
        return True

    def _device(self, number: int, line: str) -> bool:
        match = _RANK.search(line)
        if match is None:
            return False
        rank, group, pid, host, index, name = match.groups()
        device = ListedRank(int(rank), int(group or 0), host, int(index), name.strip())
        if device.rank == 0 and device.group == 0:
            self.roots.add(int(pid))
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

    def _row(self, number: int, text: str) -> bool:
        """Whether a row begins in the line."""
        columns = self.columns
        match = (columns.start if columns else _start(_USUAL)).search(text)
        if match is None:
            return False
        words = text[match.end() :].split()
        values = len(words) >= 3 and (words[0] in REDOPS or value_of(words[0])[0])
        if match["type"] not in DTYPES and (columns is None or not values):
            return False
        if columns is None:
            if not self.log.tables:
                self.log.tables.append(LogTable("nccl-tests", number, refusal=_HEADERLESS))
            return True
        self._close("another row begins inside it")
        if self.table is not None and self.table.ended:  # a further cycle, printed without another header
            self._add(replace(self.table, line=number, rows=[], aside={}, ended=False), columns)
        self.open = _OpenRow(number, _tag(text[: match.start()].rstrip()), match[0].split())
        self._feed(text[match.end() :])
        return True

    def _rest(self, text: str) -> bool:
        """Whether the line goes on with the open row."""
        if self.open is None or self.columns is None:
            return False
        tag = self.open.tag.match(text)
        rest = text[tag.end() :] if tag else text
        words = rest.split()
        left = _needed(self.open, self.columns) - len(self.open.words)
        if not words or not value_of(words[0])[0] or not all(value_of(word)[1] for word in words[:left][:-1]):
            return False
        self._feed(rest)
        return True

    def _feed(self, rest: str) -> None:
        """Adds the line's values to the open row, which is closed once it has them all."""
        row, columns = self.open, self.columns
        assert row is not None and columns is not None
        words = _TIMESTAMP.sub(" ", rest).split()
        expected = len(columns.names) - columns.after - columns.lead
        # A whole row, maybe with unnamed columns.
        if len(words) >= expected and all(map(_WORD.fullmatch, words)):
            row.words += words
            words = []
        for word in words:
            value, whole = value_of(word)
            name = columns.names[len(row.words)] if len(row.words) < len(columns.names) else ""
            if name == "redop" and word in REDOPS:
                row.words.append(word)
            elif value:
                row.words.append(value)
                if not whole:
                    break
            elif name not in _NUMBERS or len(row.words) >= _needed(row, columns):
                row.words.append(word)  # a column of text
            else:
                break
        if len(row.words) >= _needed(row, columns):
            self.open = None
            if blank := len(columns.names) - columns.after - _needed(row, columns):
                at = columns.names.index("redop")
                row.words[at:at] = [""] * blank
            self.read_rows[-1][2].append((row.line, row.words))

    def _close(self, why: str) -> None:
        if self.open is not None and self.columns is not None:
            row, self.open = self.open, None
            self.log.say(
                row.line,
                f"the row of {row.words[self.columns.names.index('size')]} bytes is incomplete and was left out: "
                f"{why}, after {len(row.words)} of {_needed(row, self.columns)} values",
                leaves_out=True,
            )


@lru_cache(2**10)
def _tag(before: str) -> re.Pattern[str]:
    """What the lines of a process begin with, by the beginning of one: numbers in it may count up."""
    return pattern(re.sub(r"\d+", r"\\d+", re.escape(before)) if len(before) < 256 else "")


def _columns(names: Names) -> _HeaderColumns:
    lead = max(map(names.index, _USUAL)) + 1
    after = next(i for i, name in enumerate(reversed(names)) if name in (*TIMED, *CHECKS))
    return _HeaderColumns(names, lead, after, _start(names[:lead]))


@lru_cache(2**8)
def _start(names: Names) -> re.Pattern[str]:
    """How a row begins: with the columns up to the size, count and type."""
    kinds = (
        rf"(?P<{n}>{_STARTS[n]})" if n in _STARTS and n not in names[:i] else r"\S+"
        for i, n in enumerate(names)
    )
    return pattern(rf"(?<![\w.]){' +'.join(kinds)}(?= )")


def _needed(row: _OpenRow, columns: _HeaderColumns) -> int:
    """How many values a row has to have. Where its redop is blank (alltoall of nccl-tests 2.0 to 2.12), its root is."""
    blank = "redop" in columns.names and not set(REDOPS) & set(row.words)
    return len(columns.names) - columns.after - blank * (1 + ("root" in columns.names))


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
