"""The Markdown tables of ml-engineering's all_reduce_bench.py and torch-dist-bench.py.

The older ones give bandwidths and no time: it is derived, where the bandwidth has digits enough.
"""

from __future__ import annotations

import re

from dtbench.importers.model import COLLECTIVES, TIMES, Log, LogFigure, LogRow, LogTable, Printed, amount
from dtbench.importers.text import lines_of, pattern

_TITLE = pattern(
    r"average bandwidth(?: and the per-call latency)? of (?:(\w+)|\d+ collectives) over (\d{1,7}) ranks"
)
_SIZE = pattern(r"(\d{1,18}(?:\.\d{1,3})?)\s?(B|[KMGT]i?B)")
_BANDWIDTH = pattern(r"(\S+?)\s?(GBps|MBps|GB/s)")
_TIME = pattern(r"(\S+?)\s?(us|µs|ms)")
# "KB" in older versions is 2**10 too (their function fmt_bytes).
_POWERS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BANDWIDTHS = {"GBps": 1e9, "GB/s": 1e9, "MBps": 1e6}
_TIMES = TIMES | {"µs": TIMES["us"]}
# torch-dist-bench.py's table of several collectives: GBps and microseconds, without units.
_COMBINED = pattern(r"(\w+) (busbw|median)")
# torch.distributed has no collective that sends and receives.
_NAMES = tuple(name for name in COLLECTIVES if name != "sendrecv")


def applies(text: str) -> bool:
    """Whether the text may hold such a table."""
    return "payload" in text and any(_header(line) for line in lines_of(text))


def read(text: str, log: Log) -> None:
    """Adds the tables of a text to its log."""
    tables: list[LogTable] = []
    columns: list[str] = []
    title: re.Match[str] | None = None
    for number, line in enumerate(lines_of(text), start=1):
        title = _TITLE.search(line) or title
        cells = _cells(line)
        if header := _header(line):
            columns, tables = header, _tables(header, title, number)
            title = None
            log.tables += tables
        elif not tables or set("".join(cells)) <= set("-: "):
            continue
        elif len(cells) < 2 or not _SIZE.fullmatch(cells[0]):
            tables = [] if cells else tables
        else:
            _add(tables, number, columns, cells)


def _header(line: str) -> list[str]:
    cells = [cell.lower() for cell in _cells(line)]
    if cells[:3] == ["payload", "busbw", "algbw"] or _collectives(cells):
        return cells
    return []


def _collectives(columns: list[str]) -> list[str]:
    """Those of a table of several; empty for other tables."""
    pairs = [_COMBINED.fullmatch(column) for column in columns[1:]]
    if columns[:1] != ["payload"] or not pairs or not all(pairs):
        return []
    return list(dict.fromkeys(pair[1] for pair in pairs if pair))


def _tables(columns: list[str], title: re.Match[str] | None, number: int) -> list[LogTable]:
    tables = []
    # all_reduce_bench.py knows one collective only; its table without the line above names none.
    for name in _collectives(columns) or [(title and title[1]) or "all_reduce"]:
        table = LogTable("ml-engineering", number, ended=True)
        if title is not None:
            table.ranks, table.ranks_from = int(title[2]), "its title"
        if name in _NAMES:
            table.collective = name
        else:
            table.refusal = f"{name[:40]!r} is no collective that is known here"
        tables.append(table)
    return tables


def _add(tables: list[LogTable], number: int, columns: list[str], cells: list[str]) -> None:
    row = dict(zip(columns, cells, strict=False))
    surplus = len(cells) - len(columns)
    if not _collectives(columns):
        tables[0].rows.append(_row(number, row, surplus))
        return
    for table, name in zip(tables, _collectives(columns), strict=True):
        busbw, median = row.get(f"{name} busbw", ""), row.get(f"{name} median", "")
        if busbw or median:  # a collective that does not have this payload leaves both blank
            own = {"payload": cells[0], "latency median": f"{median}us"}
            table.rows.append(_row(number, own | {"busbw": f"{busbw}GBps"} if busbw else own, surplus))


def _cells(line: str) -> list[str]:
    start = line.find("|")
    if start < 0:
        return []
    return [cell.strip() for cell in line[start:].strip().strip("|").split("|")]


def _row(number: int, cells: dict[str, str], surplus: int) -> LogRow:
    size = _SIZE.fullmatch(cells["payload"])
    assert size is not None
    size_bytes = float(size[1]) * _POWERS[size[2][0]]
    busbw, algbw = (_scaled(_BANDWIDTH, cells.get(k, ""), _BANDWIDTHS) for k in ("busbw", "algbw"))
    time = _scaled(_TIME, cells.get("latency median", ""), _TIMES)
    figure = LogFigure(True, time, algbw, busbw, time_is_separate=time is not None)
    if surplus:
        figure.fail(f"it has {abs(surplus)} cell(s) {'more' if surplus > 0 else 'less'} than its header")
    elif size_bytes % 1:
        figure.fail(f"its payload {cells['payload'][:20]} is no whole number of bytes")
    elif time is None and (busbw is None or algbw is None):
        figure.fail("it has no number for busbw, algbw or the latency's median")
    elif busbw is None and cells.get("busbw"):
        figure.fail(f"its busbw is {cells['busbw'][:20]}")
    return LogRow(number, int(size_bytes), None, "float32", "", None, [figure])


def _scaled(pattern: re.Pattern[str], cell: str, units: dict[str, float]) -> Printed | None:
    match = pattern.fullmatch(cell)
    return amount(match[1], units[match[2]]) if match else None
