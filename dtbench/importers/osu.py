"""The tables of the OSU Micro-Benchmarks' collectives (osu_allreduce, osu_allgather, ...).

They give a time per size and neither a bandwidth nor the number of ranks: nothing in them can be
checked against anything, and the ranks come from the command line, where the log has it.
"""

from __future__ import annotations

import re

from dtbench.importers.model import IN_PLACE, TIMES, Log, LogFigure, LogRow, LogTable, amount, collective_of
from dtbench.importers.text import pattern, scan

_TITLE = pattern(r"\bOSU MPI(-CUDA|-ROCM|-OPENACC)? (.+?) Latency Test(?: v(\S+))?\s*$")
_HEADER = pattern(r"#\s*Size\s+(Avg )?Latency\s*\((\w+)\)(.*)$")
_LAUNCH = pattern(r"\b(?:mpirun\w*|mpiexec\w*|srun)\b.*?\s(?:-np|-n|--np|--ntasks)[ =](\d{1,7})\b.*\bosu_")
_DATATYPE = pattern(r"#\s*Datatype:\s*(\w+)")
_ROW = pattern(r"(?:(?<=[\s:>])|^)(\d{1,18})((?:\s+\S+)+)\s*$")
_LINES = {"launch": _LAUNCH, "title": _TITLE, "datatype": _DATATYPE, "header": _HEADER, "row": _ROW}
# Their sizes are one rank's part of S.
_OF_PARTS = ("all_gather", "all_to_all", "gather", "scatter")
_DATATYPES = {"MPI_FLOAT": "float32", "MPI_INT": "int32", "MPI_CHAR": "int8", "MPI_DOUBLE": "float64"}


def applies(text: str) -> bool:
    """Whether the text may hold such a table."""
    return "OSU MPI" in text and " Latency Test" in text


def read(text: str, log: Log) -> None:
    """Adds the tables of a text to its log; sizes of parts become S once the ranks are known."""
    table: LogTable | None = None
    unit = 0.0
    columns: list[str] = []
    dtype, ranks = "unknown", None
    for number, kind, match in scan(text, _LINES):
        if kind == "launch":
            ranks = int(match[1])
        elif kind == "title":
            table, dtype, unit = _table(match, number), "unknown", 0.0
            if ranks is not None:
                table.ranks, table.ranks_from, ranks = ranks, "the command line", None
            log.tables.append(table)
        elif table is None:
            continue
        elif kind == "datatype":
            dtype = _DATATYPES.get(match[1], match[1][:20])
        elif kind == "header":
            unit = TIMES.get(match[2], 0.0)
            columns = ["avg", *_columns(match[3])]
            if not unit:
                table.refusal = f"line {number} has times in {match[2]}: expected {', '.join(TIMES)}"
        elif unit:
            _add(table, match, number, dtype, unit, columns)


def _table(title: re.Match[str], number: int) -> LogTable:
    table = LogTable("osu", number, ended=True, mode="isolated")
    table.device_type = "cuda" if title[1] else "cpu"
    if title[3]:
        table.versions["osu"] = title[3]
    table.collective = collective_of(title[2])
    table.sizes_are_parts = table.collective in _OF_PARTS
    if table.collective is None:
        table.refusal = f"OSU's {title[2][:40]!r} is no collective that is known here"
    return table


def _columns(rest: str) -> list[str]:
    """The columns behind the average, by their headings, which hold blanks."""
    return [
        word.lower()
        for word in re.findall(r"Min|Max|Iterations|P\d\d|Validation|Overall|Compute|\S+(?= )?", rest)
        if word not in ("Latency(us)", "Tail", "Lat(us)")
    ]


def _add(
    table: LogTable, match: re.Match[str], number: int, dtype: str, unit: float, columns: list[str]
) -> None:
    words = match[2].split()
    values = dict(zip(columns, words, strict=False))
    time = amount(values.get("avg", ""), unit)
    if len(words) != len(columns) and (time is None or len(words) > len(columns)):
        return  # another line that begins with a number
    figure = LogFigure(table.collective in IN_PLACE, time)
    if time is None:
        figure.fail(f"its time is {words[0][:20]}")
    elif len(words) < len(columns):
        figure.fail(f"it has {len(words)} of the {len(columns)} values that its header names")
    if values.get("validation", "pass").lower() != "pass":
        figure.fail("its validation failed", wrong_data=True)
    table.rows.append(LogRow(number, int(match[1]), None, dtype, "", None, [figure]))
