"""The Markdown tables of ml-engineering's all_reduce_bench.py and torch-dist-bench.py.

The older ones give bandwidths and no time: it is derived, where the bandwidth has digits enough.
"""

from __future__ import annotations

import re

from dtbench.importers.model import Figure, Log, Printed, Row, Table, printed
from dtbench.importers.text import lines_of

_TITLE = re.compile(r"average bandwidth(?: and the per-call latency)? of (\w+) over (\d{1,7}) ranks")
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,3})?)\s?(B|[KMGT]i?B)")
_BANDWIDTH = re.compile(r"(\S+?)\s?(GBps|MBps|GB/s)")
_TIME = re.compile(r"(\S+?)\s?(us|µs|ms)")
# "KB" in older versions is 2**10 too (their function fmt_bytes).
_POWERS = {"B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BANDWIDTHS = {"GBps": 1e9, "GB/s": 1e9, "MBps": 1e6}
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3}
_NAMES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
)


def applies(text: str) -> bool:
    """Whether the text may hold such a table."""
    return any(_header(line) for line in lines_of(text))


def read(text: str, log: Log) -> None:
    """Adds the tables of a text to its log."""
    table: Table | None = None
    columns: list[str] = []
    title: re.Match[str] | None = None
    for number, line in enumerate(lines_of(text), start=1):
        title = _TITLE.search(line) or title
        found = _header(line)
        if found:
            columns, table = found, _table(title, number)
            title = None
            log.tables.append(table)
            continue
        cells = _cells(line)
        if table is None or set("".join(cells)) <= set("-: "):
            continue
        if len(cells) < 2 or not _SIZE.fullmatch(cells[0]):
            table = None if cells else table
            continue
        table.rows.append(_row(number, dict(zip(columns, cells, strict=False)), len(cells) - len(columns)))


def _header(line: str) -> list[str]:
    cells = [cell.lower() for cell in _cells(line)]
    return cells if cells[:3] == ["payload", "busbw", "algbw"] else []


def _cells(line: str) -> list[str]:
    start = line.find("|")
    if start < 0:
        return []
    return [cell.strip() for cell in line[start:].strip().strip("|").split("|")]


def _table(title: re.Match[str] | None, number: int) -> Table:
    table = Table("ml-engineering", number, ended=True)
    if title is None:  # all_reduce_bench.py knows one collective only; its table alone names none
        return table
    table.ranks, table.ranks_from = int(title[2]), "its title"
    if title[1] in _NAMES:
        table.collective = title[1]
    else:
        table.refusal = f"{title[1][:40]!r} is no collective that is known here"
    return table


def _row(number: int, cells: dict[str, str], surplus: int) -> Row:
    size = _SIZE.fullmatch(cells["payload"])
    assert size is not None
    size_bytes = float(size[1]) * _POWERS[size[2][0]]
    busbw, algbw = (_scaled(_BANDWIDTH, cells.get(k, ""), _BANDWIDTHS) for k in ("busbw", "algbw"))
    time = _scaled(_TIME, cells.get("latency median", ""), _TIMES)
    figure = Figure(True, time, algbw, busbw, time_is_separate=time is not None)
    if surplus:
        figure.fail(f"it has {abs(surplus)} cell(s) {'more' if surplus > 0 else 'less'} than its header")
    elif size_bytes % 1:
        figure.fail(f"its payload {cells['payload'][:20]} is no whole number of bytes")
    elif (busbw is None or algbw is None) and (time is None or cells.get("busbw")):
        figure.fail("it has no number for busbw or algbw")
    return Row(number, int(size_bytes), None, "float32", "", None, [figure])


def _scaled(pattern: re.Pattern[str], cell: str, units: dict[str, float]) -> Printed | None:
    match = pattern.fullmatch(cell)
    number = printed(match[1]) if match else None
    return number.scaled(units[match[2]]) if match and number else None
