"""The CSV of rccl-tests (-Z csv -x FILE): a header, then a row per size and placement."""

from __future__ import annotations

import csv
import math

from dtbench.importers.columns import TIMED, Names, Row, add_rows, groups_of, values_of
from dtbench.importers.model import Log, LogTable, collective_of
from dtbench.importers.text import lines_of

_NEEDED = {"size", "type", *TIMED}


def applies(text: str) -> bool:
    return any(_is_header(line) for line in text.split("\n") if "," in line)


def read(text: str, log: Log) -> None:
    blocks: list[tuple[int, Names, list[Row]]] = []
    inside = False
    for number, line in enumerate(lines_of(text), 1):
        if _is_header(line):
            blocks.append((number, tuple(field.lower() for field in _fields(line)), []))
            inside = True
        elif inside := inside and line.count(",") >= len(_NEEDED):
            blocks[-1][2].append((number, _fields(line)))
    for number, names, rows in blocks:
        log.tables.append(_table(log, number, names, rows))


def _table(log: Log, number: int, names: Names, rows: list[Row]) -> LogTable:
    table = LogTable("rccl-tests", number, ended=True)
    # With MPI its headers before May 2026 lack the column of nodes that the rows have (ROCm/rocm-systems#6004).
    at = names.index("rankspernode") - 1 if "rankspernode" in names and "nodes" not in names else 0
    if at > 0 and all(len(words) > len(names) for _, words in rows):
        names = (*names[:at], "nodes", *names[at:])
    names = add_rows(log, table, names, rows)
    said = ("collective", "ranks", "gpusperrank", "gpus")
    about = {tuple(values_of(names, words).get(name, "") for name in said) for _, words in rows}
    for collective, *counts in about:
        # Processes times the GPUs of each; without MPI the GPUs of the one process.
        known = [int(count) for count in counts if count.isdecimal() and len(count) < 8]
        table.collective, table.ranks = collective_of(collective), math.prod(known) if known else None
        table.ranks_from = "its columns of ranks and GPUs"
        if collective and table.collective is None:
            table.refusal = f"{collective[:40]!r} is no collective that is known here"
    if len(about) > 1 and table.rows:
        table.refusal = "its rows are of several collectives or numbers of ranks: give a file each"
    return table


def _is_header(line: str) -> bool:
    names = tuple(field.lower() for field in _fields(line)) if "algbw" in line.lower() else ()
    placements = len(groups_of(names))  # two, or one that `inplace` tells
    return set(names) >= _NEEDED and placements + ("inplace" in names) == 2


def _fields(line: str) -> list[str]:
    return [field.strip() for field in next(csv.reader([line], skipinitialspace=True), [])]
