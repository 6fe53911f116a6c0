"""The tables of DeepSpeed's communication benchmarks (DeepSpeedExamples, benchmarks/communication)."""

from __future__ import annotations

import re

from dtbench.importers.model import (
    IN_PLACE,
    TIMES,
    Log,
    LogFigure,
    LogRow,
    LogTable,
    Printed,
    amount,
    collective_of,
)
from dtbench.importers.text import pattern, scan

_TITLE = pattern(r"-{2,}\s*Performance of (\w+) on (\d{1,7}) devices\s*-{2,}")
_HEADER = pattern(
    r"Size \(Bytes\)\s+Description\s+Duration( \(us\))?\s+Throughput \((\w+)\)\s+BusBW \((\w+)\)"
)
# 31.67 GB   8501054668x4   3176.620 ms   171.272   149.863; with --raw the size and time have no unit.
_ROW = pattern(
    r"(?:(?<=\s)|^)(\S+)(?: ([KMGTPEZ]?B))?\s+(\d{1,18})x(\d{1,3})\s+(\S+)(?: (us|ms|s))?\s+(\S+)\s+(\S+)\s*$"
)
_LINES = {"title": _TITLE, "header": _HEADER, "row": _ROW}
# Its benchmarks; what the sizes of another mean is not known.
_COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "broadcast", "sendrecv")
_BANDWIDTHS = {"Gbps": 1e9 / 8, "GBps": 1e9}


def applies(text: str) -> bool:
    """Whether the text may hold such a table."""
    return _TITLE.search(text) is not None


def read(text: str, log: Log) -> None:
    """Adds the tables of a text to its log."""
    table: LogTable | None = None
    units: tuple[bool, str, str] | None = None
    for number, kind, match in scan(text, _LINES):
        if kind == "title":
            table, units = _table(match[1], int(match[2]), number), None
            log.tables.append(table)
        elif kind == "header" and table is not None:
            units = bool(match[1]), match[2], match[3]
            if unknown := {match[2], match[3]} - set(_BANDWIDTHS):
                table.refusal = (
                    f"line {number} has the unit {unknown.pop()}: expected {' or '.join(_BANDWIDTHS)}"
                )
        elif kind == "row" and table is not None and units is not None:
            table.rows.append(_row(match, number, table, units))


def _table(name: str, ranks: int, number: int) -> LogTable:
    table = LogTable("deepspeed", number, ranks=ranks, ranks_from="its title", ended=True)
    if (collective := collective_of(name)) in _COLLECTIVES:
        table.collective = collective
    else:
        table.refusal = f"{name[:40]!r} is no collective of DeepSpeed's benchmarks that is known here"
    return table


def _row(match: re.Match[str], number: int, table: LogTable, units: tuple[bool, str, str]) -> LogRow:
    raw, throughput_unit, busbw_unit = units
    count, itemsize = int(match[3]), int(match[4])
    time = amount(match[5], TIMES["us" if raw else match[6] or "us"])
    tput = amount(match[7], _BANDWIDTHS.get(throughput_unit, 1.0))
    busbw = amount(match[8], _BANDWIDTHS.get(busbw_unit, 1.0))
    figure = LogFigure(table.collective in IN_PLACE, time, None, busbw)
    if not raw and match[6] is None:
        figure.fail("its time has no unit")
    if time is None or tput is None or busbw is None:
        figure.fail("it has no number for duration, throughput or bus bandwidth")
        size = count * itemsize
    else:
        size = _size(table, count * itemsize, time, tput, figure)
    # The element type is not printed: its width is all that is known.
    return LogRow(number, size, None, f"{8 * itemsize}-bit", "", None, [figure])


def _size(table: LogTable, described: int, time: Printed, tput: Printed, figure: LogFigure) -> int:
    """S in bytes. all_gather describes one rank's part or the whole, by version; all_reduce's
    throughput counts S twice, or once: whichever the printed throughput agrees with.
    """
    ranks = table.ranks or 1
    whole = [described * ranks, described] if table.collective == "all_gather" else [described]
    twice = [2, 1] if table.collective == "all_reduce" else [1]
    for size in whole:
        for times in twice:
            low, high = times * size / time.high, times * size / max(time.low, 1e-300)
            if low <= tput.high * (1 + 1e-6) and high >= tput.low * (1 - 1e-6):
                return size
    figure.fail(
        f"{described} bytes in {time.value:.6g} s are not the throughput of {tput.value / 1e9:.6g} GB/s it gives"
    )
    return whole[0]
