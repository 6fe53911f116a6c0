"""The records that rccl-tests writes with -Z json: one object per placement and size.

They came as a list, as lines, and as fragments without their brackets, by version: each object is
read for itself.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from dtbench.fields import Count
from dtbench.files.read import BadFieldError, decode, into, shown
from dtbench.importers.model import Figure, Log, Row, Table, collective_of, decimal, is_number
from dtbench.importers.nccl_text import DTYPES
from dtbench.importers.text import lines_of, pattern

_OBJECT = pattern(r"\{[^{}]*\}")


class _Record(Struct, frozen=True):
    """One placement at one size: us, GB/s; `wrong` is a number, a number as text, or N/A."""

    name: str
    ranks: Count
    gpusPerRank: Count  # noqa: N815 - as the tool spells it
    nodes: Count
    numCycle: Count  # noqa: N815
    size: Count
    type: str
    redop: str
    inPlace: bool | Count  # noqa: N815
    time: Any
    algBw: Any  # noqa: N815
    busBw: Any  # noqa: N815
    wrong: Any


def applies(text: str) -> bool:
    """Whether the text may hold such records."""
    return '"numCycle"' in text and '"algBw"' in text


def read(text: str, log: Log) -> None:
    """Adds a table per collective, ranks and cycle to its log."""
    tables: dict[tuple[object, ...], Table] = {}
    rows: dict[tuple[object, ...], Row] = {}
    for number, line in enumerate(lines_of(text), start=1):
        for match in _OBJECT.finditer(line):
            try:
                record = into(decode(match[0].encode("utf-8", "replace")), _Record)
                key = (record.name, record.ranks, record.gpusPerRank, record.nodes, record.numCycle)
                place = (*key, record.size, record.type, record.redop)
                if key not in tables:
                    tables[key] = _table(record, number)
                if place not in rows:
                    rows[place] = _row(record, number)
                    tables[key].rows.append(rows[place])
                rows[place].figures.append(_figure(record))
            except BadFieldError as error:
                log.say(number, f"a record that is not of rccl-tests was left out: {str(error)[:100]}")
        if line.count("{") > line.count("}"):
            log.say(number, "a record that is cut was left out")
    log.tables += tables.values()


def _table(record: _Record, number: int) -> Table:
    table = Table("rccl-tests", number, redop_column=True, ended=True)
    table.collective = collective_of(record.name)
    if table.collective is None:
        table.refusal = f"{shown(record.name)} is no collective of rccl-tests that is known here"
    if record.gpusPerRank == 1:  # with more it is not said which of both counts the ranks
        table.ranks, table.ranks_from = record.ranks, "its records"
    return table


def _row(record: _Record, number: int) -> Row:
    dtype = DTYPES.get(record.type, (record.type[:20], 0))[0]
    return Row(number, record.size, None, dtype, record.redop[:20], None, [])


def _figure(record: _Record) -> Figure:
    time, algbw, busbw = (decimal(value) for value in (record.time, record.algBw, record.busBw))
    figure = Figure.of(bool(record.inPlace), time, algbw, busbw)
    if time is None or algbw is None or busbw is None:
        figure.fail("it has no number for time, algBw or busBw")
    wrong = record.wrong
    if isinstance(wrong, str) and wrong.strip().isascii() and wrong.strip().isdigit():
        wrong = int(wrong)
    if is_number(wrong):
        figure.wrong = float(wrong)
    elif wrong not in (None, "N/A"):
        figure.fail(f"its check of the data says {shown(wrong)}", wrong_data=True)
    return figure
