"""Columns of logs are assigned by name, in text and CSV; unknown columns are recorded and never become times."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from dtbench.errors import UnreadableRunError, UsageError
from dtbench.importers import convert
from dtbench.importers.import_logs import parse
from dtbench.tests.made_up_logs import (
    NCCL,
    PLACES,
    SIZES,
    LogLayout,
    rccl_csv,
    read,
    table,
    time_us,
    widened,
)
from dtbench.tests.test_import_logs import (
    assert_as_printed,
    assert_as_printed_or_left_out,
    faults,
    line_of,
    only,
    run_of,
)

TUNING = ("algo", "proto", "nchannels")


def test_text_columns_of_newer_versions_are_assigned_by_name() -> None:
    """nccl-tests -I, timestamps, and rccl-tests -A: its header has them behind the algorithm, its rows before it."""
    lines = []
    for line in table().splitlines():
        if "algbw" in line:
            line = line.replace("#wrong", "#wrong #bitdiff i_min i_max i_p99 i_cv%") + "  timestamp"
        elif "(elements)" in line:
            line += "  (us) (us) (us) (%)  %Y-%m-%d %H:%M:%S"
        elif re.match(r" +\d", line):
            line = re.sub(r"( 0)(?=  |$)", r"\1 0 1.00 99.0 98.0 3.50", line) + "  2026-01-01 12:00:00"
        lines.append(line)
    assert_as_printed(only("\n".join(lines)))
    lines = [
        line + ("  algo proto nchannels timestamp" if "algbw" in line else "")
        for line in table().splitlines()
    ]
    lines = [
        line + ("  2026-01-01 12:00:00  RING* LL 2" if re.match(r" +\d", line) else "") for line in lines
    ]
    assert_as_printed(only("\n".join(lines)))
    # NCCL's messages inside a row, whose last part has the algorithm.
    lines = [
        line.replace("#wrong\n", "#wrong algo\n")
        for line in table(layout=LogLayout(cut=lambda _: NCCL)).splitlines(True)
    ]
    assert_as_printed(only("".join(lines)))
    # rccl-tests: the time by events beside the host's, which it does not have at every size.
    text = table()
    for at in (10, 6):
        text = widened(text, at, ["hipevt"], lambda size: ["N/A" if size < 8192 else f"{size / 1e3:.2f}"])
    assert_as_printed(only(text))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("values", [("RING", "LL", "2"), ("N/A", "N/A", "N/A"), ("TREE", "SIMPLE", "16")])
def test_unused_columns_are_recorded_at_any_position(
    place: int, named: bool, values: tuple[str, ...]
) -> None:
    log = read(widened(table(), place, TUNING if named else (), lambda _: values))
    assert_as_printed(log.tables[0])
    assert all((row.redop, row.root) == ("sum", -1) for row in log.tables[0].rows)
    names = TUNING if named else [f"column {place + i}" for i in (1, 2, 3)]
    assert {name: list(kept) for name, kept in log.tables[0].unused_columns.items()} == {
        name: [value] for name, value in zip(names, values, strict=True)
    }
    assert f"columns not used: {names[0]} ({values[0]})" in str(log.problems[0])
    header, _ = convert.to_run([log], [])
    assert header.imported[0].aside == {name: (value,) for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_unknown_column_never_becomes_a_time(place: int) -> None:
    other = widened(table(), place, ["speed"], lambda size: [f"{size / 7:.2f}"])
    log = read(other)
    assert_as_printed(log.tables[0])
    assert list(log.tables[0].unused_columns) == ["speed"]
    unnamed = widened(table(), place, [], lambda size: [f"{size / 7:.2f}"])
    assert_as_printed(read(unnamed).tables[0])
    # Of one row alone it is that row which is in doubt.
    row = line_of(table(), SIZES[4])
    lines = [
        a if i == row else b
        for i, (a, b) in enumerate(zip(unnamed.splitlines(), table().splitlines(), strict=True), 1)
    ]
    assert list(faults("\n".join(lines))) == [row]
    # The header names it, and a row lacks it.
    lines = [
        b if i == row else a
        for i, (a, b) in enumerate(zip(other.splitlines(), table().splitlines(), strict=True), 1)
    ]
    log = read("\n".join(lines))
    assert_as_printed_or_left_out(log.tables[0])


@pytest.mark.parametrize("at", [6, 7, 8, 10, 11])
def test_unnamed_column_inside_a_placement_is_not_inferred(at: int) -> None:
    for value in ("2", "31.25", "x"):
        assert len(faults(widened(table(), at, [], lambda _, value=value: [value]))) == len(SIZES)


def test_rows_with_an_extra_placement_are_refused() -> None:
    def again(size: int) -> list[str]:
        return table(sizes=[size]).splitlines()[-4].split()[5:9]

    reasons = faults(widened(table(), 13, [], again))
    assert len(reasons) == len(SIZES) and all(
        "4 value(s) more" in why for of in reasons.values() for why in of
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (["time", "algbw", "busbw", "#wrong"], ["busbw", "#wrong", "time", "algbw"]),
        (["size", "count", "type"], ["count", "size", "type"]),
        (["size", "count", "type"], ["type", "size", "count"]),
        (["redop", "root"], ["root", "redop"]),
    ],
)
def test_reordered_columns_are_assigned_by_name(old: list[str], new: list[str]) -> None:
    lines = []
    for line in table().splitlines():
        words = line.split()
        lead = int("algbw" in words)
        if lead or (words and words[0].isdigit()):
            names = ["size", "count", "type", "redop", "root", *["time", "algbw", "busbw", "#wrong"] * 2]
            order = [names.index(name) for name in new]
            starts = [i for i, name in enumerate(names) if name == old[0]]
            before = list(words)
            for start in starts:
                for k, place in enumerate(order):
                    words[lead + start + k] = before[lead + start + place - starts[0]]
        lines.append(" ".join(words))
    assert_as_printed(only("\n".join(lines)))


MPI_HEAD = (
    "numCycle,collective,nodes,ranks,ranksPerNode,gpusPerRank,size,type,redop,inplace,time,algbw,busbw,#wrong"
)
MPI_ROW = '0,"AllReduce",1,8,8,1,{}'
CSV = {
    "14 columns": (MPI_HEAD, MPI_ROW),
    "13 names, 14 values": (MPI_HEAD.replace("nodes,", "").lower().replace("numcycle", "numCycle"), MPI_ROW),
    "12 names, 13 values": (
        "collective, ranks, rankspernode, gpusperrank, size, type, redop, inplace, time, algbw, busbw, #wrong",
        '"AllReduce", 1, 8, 8, 1, {}',
    ),
    "without MPI": (MPI_HEAD.replace("nodes,ranks,ranksPerNode,gpusPerRank", "gpus"), '0,"AllReduce",8,{}'),
    "GPUs per process": (MPI_HEAD, '0,"AllReduce",1,2,2,4,{}'),
    "in front": ("algo,proto,nchannels," + MPI_HEAD, "RING,LL,2," + MPI_ROW),
    "behind": (MPI_HEAD + ",algo,proto,nchannels", MPI_ROW + ",RING,LL,2"),
    "in front, without names": (MPI_HEAD, "RING,LL,2," + MPI_ROW),
    "behind, without names": (MPI_HEAD, MPI_ROW + ",RING,LL,2"),
}


@pytest.mark.parametrize("form", CSV)
def test_rccl_csv_forms_are_read(form: str) -> None:
    log = read(rccl_csv(*CSV[form]))
    (one,) = log.tables
    assert (log.format, one.collective, one.ranks, one.refusal) == ("rccl-tests CSV", "all_reduce", 8, "")
    assert [(row.size_bytes, row.dtype, row.redop) for row in one.rows[::2]] == [
        (s, "float32", "sum") for s in SIZES
    ]
    for row, figure in one.figures:
        assert not figure.fault and figure.wrong == 0 and figure.time is not None
        assert figure.time.value == pytest.approx(time_us(row.size_bytes, figure.in_place) * 1e-6)
    assert [figure.in_place for _, figure in one.figures] == [False, True] * len(SIZES)
    assert len(one.unused_columns) == (3 if "in front" in form or "behind" in form else 0)
    assert read(rccl_csv(*CSV[form]), ranks=4).tables[0].refusal.startswith("--ranks 4 contradicts the log")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda row: row + ",5", "1 value(s) more than the header has columns"),
        (lambda row: row.rsplit(",", 1)[0], "it has 13 values, expected the 14"),
        (lambda row: row.replace('"0"', '"3"'), "wrong elements: 3"),
        (lambda row: row.replace('"0"', '"N/A"'), ""),
        (lambda row: row.replace(",4194304,", ",4194404,"), "but the row has"),
        (lambda row: row.replace(",4194304,", ",x,"), "its size is 'x'"),
        (lambda row: row.replace(",4194304,", ",-4194304,"), "its size is '-4194304'"),
        (lambda row: row.replace(",4194304,", ",4e6,"), "its size is '4e6'"),
        (lambda row: row.replace('"sum",0', '"sum",2'), "its inplace is '2'"),
    ],
)
def test_invalid_csv_row_is_reported_alone(change: Callable[[str], str], reason: str) -> None:
    lines = rccl_csv(MPI_HEAD, MPI_ROW).splitlines()
    at = next(i for i, line in enumerate(lines) if ",4194304," in line)
    lines[at] = change(lines[at])
    log = read("\n".join(lines))
    told = [*log.problems, *(f"line {row.line}: {f.fault}" for row, f in log.tables[0].figures if f.fault)]
    assert [f"line {at + 1}: " in str(one) and reason in str(one) for one in told] == (
        [True] if reason else []
    )


@pytest.mark.parametrize("old", ["time", "algbw", "inplace"])
def test_header_without_a_placement_column_is_ignored(old: str) -> None:
    """Half of the placements would pass for the other half."""
    for text in (table(), rccl_csv(MPI_HEAD, MPI_ROW)):
        if old in text:
            with pytest.raises((UsageError, UnreadableRunError)):
                run_of(text.replace(old, "x", 1))


@pytest.mark.parametrize(
    "names", ["size count size type", "size " * 999 + "count type", "type " * 1600 + "count"]
)
def test_absurd_headers_do_not_raise(names: str) -> None:
    text = table().replace("size         count      type", names)
    log = parse((text * 2).encode(), "x.log")
    assert not any(
        figure.time and figure.time.value > 1e-3 for one in log.tables for _, figure in one.figures
    )
