"""Reads the text output of nccl-tests and rccl-tests, from nccl-tests 2.0 to 2.20.

The header above a row names its columns. A row may begin anywhere in a line, so that the tags of launchers do not
matter. The tools print a row in three parts, and NCCL's messages may come between them. So a row stays open until it
has all its columns.
"""

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache

from dtbench.importers.columns import DATA_CHECKS, MEASURED, REDOPS, Names, Row, add_rows, placement_columns
from dtbench.importers.model import (
    COLLECTIVES,
    DTYPES,
    ListedRank,
    Log,
    LogTable,
    Problem,
    clean_lines,
    leading_value,
    pattern,
    strip_nccl_message,
)

# Name of a program -> collective. Programs with an empty entry count bytes differently from any collective.
PROGRAMS = {name: name for name in COLLECTIVES} | {"alltoall": "all_to_all", "alltoallv": "", "hypercube": ""}
_UNITS_READ = {"(us)", "(GB/s)"}
_NUMBERS = (*MEASURED, *DATA_CHECKS, "redop", "root")

_NAMES = "|".join(sorted(PROGRAMS, key=len, reverse=True))
_PROGRAM = pattern(rf"\b({_NAMES})_perf(?:_mpi)?\b")
_STATED = pattern(r"Collective test (starting|concluded):\s*(\S+)")
_HEADER = pattern(r"(?:^|[\s#>:)|\]])((?:size|count|type)\s.*)$")
_UNITS = pattern(r"\(B\)\s+\(elements\)\s+(.*)$")
_FIRST_COLUMNS = {"size": r"\d{1,20}", "count": r"\d{1,20}", "type": r"[A-Za-z][A-Za-z0-9_]*"}
_MAIN_COLUMNS: Names = ("size", "count", "type")
_WORD = pattern(r"[\w.+*/%#-]+")  # a word of a row; messages contain other characters, too
_TIMESTAMP = pattern(r" \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b")
_RANK = pattern(
    r"Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?Pid\s+(\d{1,10})\s+on\s+(\S+)\s+device\s+(\d{1,4})"
    r"\s+\[[0-9a-fA-Fx:.]*\]\s*(.*)$"
)
_VERSION = pattern(r"\b(nccl|rccl)-tests(?::)?\s+[Vv]ersion:?\s+(\S+)(?:.*\bnccl-library=(\d{4,6}))?")
_LIBRARY = pattern(r"\b(NCCL|RCCL) version\s*:?\s*(\d+\.\d+[\w.+-]*)")
_OUT_OF_BOUNDS = pattern(r"Out of bounds values\s*:\s*(\d{1,18})\s+(OK|FAILED)")
_AVERAGE = pattern(r"Avg bus bandwidth\s*:")
_FAILURE = pattern(r"Test (?:CUDA |NCCL |HIP )?failure\b.*|\b(?:Cuda|HIP|NCCL) failure\b.*")


@dataclass
class _HeaderColumns:
    """The columns that a header defines.

    Attributes:
        names: names of all columns.
        lead: number of columns up to and including the size, count and type.
        trailing: number of columns behind the buffer placements, such as the algorithm.
        start: pattern of the first `lead` columns of a row.
    """

    names: Names
    lead: int
    trailing: int
    start: re.Pattern[str]


@dataclass
class _OpenRow:
    """A row that still lacks columns.

    Attributes:
        line: number of the line in which it began.
        tag: pattern of the text that the launcher puts before each line of the same process.
        words: its values so far.
    """

    line: int
    tag: re.Pattern[str]
    words: list[str]


def applies(text: str) -> bool:
    return any(word in text for word in ("algbw ", "minBytes", " Pid ")) or bool(
        _row_start(_MAIN_COLUMNS).search(text)
    )


def read(text: str, log: Log) -> None:
    _Reader(log).read(text)


@dataclass
class _Reader:
    """Adds the tables of a text to a log.

    Lines before a table describe it. The fields after `read_rows` collect them until the table's header is found.

    Attributes:
        log: the log to complete.
        table: the table that the current line belongs to.
        columns: columns of that table.
        open_row: the row that still lacks columns.
        read_rows: the complete rows of each table.
        devices: the list of ranks.
        programs: programs whose names occurred.
        stated: the collective that nccl-tests says it is starting.
        versions: name -> version of the tool and its libraries.
        blocking: whether each call is timed on its own.
        roots: processes that were listed as rank 0 since the last table ended.
    """

    log: Log
    table: LogTable | None = None
    columns: _HeaderColumns | None = None
    open_row: _OpenRow | None = None
    read_rows: list[tuple[LogTable, _HeaderColumns, list[Row]]] = field(default_factory=list)
    devices: list[ListedRank] = field(default_factory=list)
    programs: set[str] = field(default_factory=set)
    stated: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    blocking: bool = False
    roots: set[int] = field(default_factory=set)

    def read(self, text: str) -> None:
        for number, line in enumerate(clean_lines(text), start=1):
            if not line:
                continue
            output = strip_nccl_message(line)
            if self._row(number, output) or self._continue_row(output):
                continue
            if output is not line and "version" not in line and "failure" not in line:
                continue  # a message of NCCL; skipped early, since a log may contain millions
            any(
                handle(number, line)
                for handle in (self._header, self._units, self._device, self._footer, self._metadata)
            )
        self._close("the log ends inside it")
        for table, columns, rows in self.read_rows:
            add_rows(self.log, table, columns.names, rows, columns.trailing)

    def _header(self, number: int, line: str) -> bool:
        match = _HEADER.search(line)
        words = match[1].split() if match else []
        names = tuple("time" if word == "cputime" else word for word in words if word != "timestamp")
        if not set(names[:9]) >= {*_MAIN_COLUMNS} or not placement_columns(names):
            return False
        self._close("a new table begins inside it")
        self.columns = _columns(names)
        previous, program = self.table, next(iter(self.programs)) if len(self.programs) == 1 else None
        table = LogTable(
            "rccl-tests" if "rccl-tests" in self.versions else "nccl-tests",
            number,
            devices=self.devices,
            error_column="error" in names,
            mode="isolated" if self.blocking else "back_to_back",
            versions=dict(self.versions),
            mixed=len(self.roots) > 1,
        )
        name_table(table, program if self.stated is None else self.stated)
        if "cputime" in words:
            table.refusal = "its times are the host's (cputime): run nccl-tests without -C"
        if previous is not None and table.mixed and not (self.read_rows[-1][2] or previous.ended):
            self.log.tables.remove(previous)
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
        # (%) is the unit of the iterations' variation; the unit of a timestamp is its format.
        units = {word for word in match[1].split() if word.startswith("(")} - {"(%)"}
        if units != _UNITS_READ and not self.table.refusal:
            self.table.refusal = (
                f"line {number} has the units {match[1][:80]}: expected {' and '.join(sorted(_UNITS_READ))}"
            )
        return True

    def _device(self, number: int, line: str) -> bool:
        match = _RANK.search(line)
        if match is None:
            return False
        rank, group, pid, host, index, name = match.groups()
        device = ListedRank(int(rank), int(group or 0), host, int(index), name.strip())
        if device.rank == 0 and device.group == 0:
            self.roots.add(int(pid))
        # A new list begins if the current one already belongs to a table or contains this rank.
        used = self.table is not None and self.table.devices is self.devices
        if used or any(listed.rank == device.rank for listed in self.devices):
            self.devices = []
        self.devices.append(device)
        return True

    def _footer(self, number: int, line: str) -> bool:
        table, out_of_bounds, average = self.table, _OUT_OF_BOUNDS.search(line), _AVERAGE.search(line)
        if table is None or not (out_of_bounds or average):
            return False
        self._close("the table ends inside it")
        table.ended = True
        if out_of_bounds:
            table.failed_values = int(out_of_bounds[1])
        else:
            self.programs, self.blocking, self.roots = set(), False, set()
        return True

    def _metadata(self, number: int, line: str) -> bool:
        """Reads a line about the benchmark: an error, the program, versions or the mode."""
        if failure := _FAILURE.search(line):
            self.log.failures.append(Problem(number, failure[0].strip()[:160]))
            return True
        if stated := _STATED.search(line):
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
        self.blocking = self.blocking or "Blocking Enabled" in line
        self.programs |= {match[1] for match in _PROGRAM.finditer(line)}
        return bool(version or library)

    def _row(self, number: int, text: str) -> bool:
        """Begins a row if the line contains the start of one, and returns whether it does."""
        columns = self.columns
        match = (columns.start if columns else _row_start(_MAIN_COLUMNS)).search(text)
        if match is None:
            return False
        words = text[match.end() :].split()
        values = len(words) >= 3 and (words[0] in REDOPS or leading_value(words[0])[0])
        if match["type"] not in DTYPES and (columns is None or not values):
            return False
        if columns is None:
            if not self.log.tables:
                self.log.tables.append(
                    LogTable(
                        "nccl-tests",
                        number,
                        refusal="rows without the header that names their columns: give the log from its header on, "
                        "and --ranks N if it lists no ranks",
                    )
                )
            return True
        self._close("another row begins inside it")
        if self.table is not None and self.table.ended:  # a further cycle, which has no header of its own
            self._add(replace(self.table, line=number, rows=[], unused_columns={}, ended=False), columns)
        self.open_row = _OpenRow(number, _tag_pattern(text[: match.start()].rstrip()), match[0].split())
        self._add_values(text[match.end() :])
        return True

    def _continue_row(self, text: str) -> bool:
        """Adds the line to the open row if it continues it, and returns whether it does."""
        if self.open_row is None or self.columns is None:
            return False
        tag = self.open_row.tag.match(text)
        untagged = text[tag.end() :] if tag else text
        words = untagged.split()
        missing = _required_values(self.open_row, self.columns) - len(self.open_row.words)
        if (
            not words
            or not leading_value(words[0])[0]
            or not all(leading_value(word)[1] for word in words[:missing][:-1])
        ):
            return False
        self._add_values(untagged)
        return True

    def _add_values(self, text: str) -> None:
        """Adds the values in the text to the open row, and completes the row once it has all of them."""
        row, columns = self.open_row, self.columns
        assert row is not None and columns is not None
        words = _TIMESTAMP.sub(" ", text).split()
        expected = len(columns.names) - columns.trailing - columns.lead
        # The line contains the complete row, possibly with columns that the header does not name.
        if len(words) >= expected and all(map(_WORD.fullmatch, words)):
            row.words += words
            words = []
        for word in words:
            value, is_entire_word = leading_value(word)
            name = columns.names[len(row.words)] if len(row.words) < len(columns.names) else ""
            if name == "redop" and word in REDOPS:
                row.words.append(word)
            elif value:
                row.words.append(value)
                if not is_entire_word:
                    break
            elif name not in _NUMBERS or len(row.words) >= _required_values(row, columns):
                row.words.append(word)  # a column of text
            else:
                break
        if len(row.words) >= _required_values(row, columns):
            self.open_row = None
            if blank := len(columns.names) - columns.trailing - _required_values(row, columns):
                position = columns.names.index("redop")
                row.words[position:position] = [""] * blank
            self.read_rows[-1][2].append((row.line, row.words))

    def _close(self, reason: str) -> None:
        """Drops the open row, which is incomplete for the given reason."""
        if self.open_row is not None and self.columns is not None:
            row, self.open_row = self.open_row, None
            self.log.add_problem(
                row.line,
                f"incomplete row of {row.words[self.columns.names.index('size')]} bytes dropped: {reason}, after "
                f"{len(row.words)} of {_required_values(row, self.columns)} values",
                drops_row=True,
            )


@lru_cache(2**10)
def _tag_pattern(prefix: str) -> re.Pattern[str]:
    """Returns a pattern of the prefix of a process's lines, in which all numbers may vary."""
    return pattern(re.sub(r"\d+", r"\\d+", re.escape(prefix)) if len(prefix) < 256 else "")


def _columns(names: Names) -> _HeaderColumns:
    lead = max(map(names.index, _MAIN_COLUMNS)) + 1
    trailing = next(i for i, name in enumerate(reversed(names)) if name in (*MEASURED, *DATA_CHECKS))
    return _HeaderColumns(names, lead, trailing, _row_start(names[:lead]))


@lru_cache(2**8)
def _row_start(names: Names) -> re.Pattern[str]:
    """Returns a pattern of the beginning of a row, up to its size, count and type."""
    kinds = (
        rf"(?P<{name}>{_FIRST_COLUMNS[name]})"
        if name in _FIRST_COLUMNS and name not in names[:index]
        else r"\S+"
        for index, name in enumerate(names)
    )
    return pattern(rf"(?<![\w.]){' +'.join(kinds)}(?= )")


def _required_values(row: _OpenRow, columns: _HeaderColumns) -> int:
    """Returns the number of values that a row must have.

    If the reduction is blank (alltoall of nccl-tests 2.0 to 2.12), the root is blank, too.
    """
    blank = "redop" in columns.names and not set(REDOPS) & set(row.words)
    return len(columns.names) - columns.trailing - blank * (1 + ("root" in columns.names))


def library_version(code: int) -> str:
    """Converts NCCL's version number to text: 22807 is 2.28.7, and in the format before 2.9, 2804 is 2.8.4."""
    minors = 100 if code >= 10000 else 10
    return f"{code // (100 * minors)}.{code // 100 % minors}.{code % 100}"


def name_table(table: LogTable, program: str | None) -> None:
    """Sets the table's collective to that of an nccl-tests program, or refuses the table."""
    name = PROGRAMS.get(program or "")
    if name:
        table.collective = name
    elif name == "":
        table.refusal = (
            f"{program!r} is not supported: its bandwidths count bytes unlike those of any collective"
        )
    elif program is not None:
        table.refusal = f"{program[:40]!r} is not a supported program of nccl-tests"
