"""Logs of every format are read completely, with columns in any order, and faulty rows never become times."""

import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dtbench.errors import UnreadableRunError, UsageError
from dtbench.importers import convert
from dtbench.importers.import_logs import EXPECTED, parse, report
from dtbench.importers.model import LogTable
from dtbench.records.result import Result
from dtbench.tests.made_up_logs import (
    DEEPSPEED,
    DEEPSPEED_ROW,
    ML_ENGINEERING,
    NCCL,
    OSU,
    PLACES,
    SIZES,
    UNRELATED,
    LogLayout,
    document,
    json_text,
    rccl_csv,
    read,
    table,
    time_us,
    widened,
)

GENUINE = Path(__file__).parent / "data" / "nccl-tests"


def only(text: str, name: str = "some.log", **options: object) -> LogTable:
    (log_table,) = read(text, name, **options).tables
    return log_table


def assert_as_printed(log: LogTable, sizes: tuple[int, ...] = SIZES, rel: float = 6e-3) -> None:
    """Asserts that every measurement is right to the printed digits, and none is missing or faulty."""
    keys = [(row.size_bytes, measurement.in_place) for row, measurement in log.measurements]
    assert (log.refusal, keys) == ("", [(size, in_place) for size in sizes for in_place in (False, True)])
    times_s = [
        measurement.time.value if measurement.time and not measurement.fault else None
        for _, measurement in log.measurements
    ]
    assert times_s == pytest.approx([time_us(*key) * 1e-6 for key in keys], rel=rel)


def times_us(log: LogTable) -> list[float]:
    """Returns the times of the first placement, of all rows without a fault."""
    return [row.measurements[0].time.value * 1e6 for row in log.rows if row.measurements[0].time]


def faults(text: str) -> dict[int, list[str]]:
    """Line -> what is wrong with its measurements."""
    return {
        row.line: [measurement.fault for measurement in row.measurements if measurement.fault]
        for log_table in read(text).tables
        for row in log_table.rows
        if any(measurement.fault for measurement in row.measurements)
    }


def run_of(text: str) -> list[Result]:
    return convert.to_run([read(text)], [])[1]


def line_of(text: str, size: int) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if re.match(rf" +{size} ", line))


# --------------------------------------------------------------------------------- nccl-tests' text


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv")


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("era", ["modern", "error"])
def test_every_collective_is_read_from_every_layout(collective: str, era: str) -> None:
    sizes = tuple(size // 48 * 48 for size in SIZES)
    log = only(table(collective, 12, sizes, layout=LogLayout(era)))
    assert (log.collective, log.ranks) == (collective, 12)
    assert_as_printed(log, sizes)


TAGS = ("", "   [1,0]<stdout>: ", "(head, rank=0, pid=3808) [1,0]<stdout>:", "0: ", "> ")
CUTS = {
    "whole rows": lambda part: "",
    "NCCL glued to every part": lambda part: NCCL,
    "other lines inside a row": lambda part: "\n" + UNRELATED + NCCL if part < 2 else "",
}


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("cut", CUTS)
def test_tagged_and_interrupted_rows_are_read(tag: str, cut: str) -> None:
    log = only(table(hosts=2, layout=LogLayout(tag=tag, cut=CUTS[cut])))
    assert (log.collective, log.ranks) == ("all_reduce", 8)
    assert {device.host for device in log.devices} == {"node-7", "node-8"}
    assert_as_printed(log)


@pytest.mark.parametrize(
    ("collective", "name", "options", "refusal", "ranks"),
    [
        ("all_reduce", "all_reduce.log", {}, "give --ranks N", None),
        ("all_reduce", "all_reduce.log", {"ranks": 72}, "", 72),
        ("all_reduce", "some.log", {"collective": "all_reduce", "ranks": 8}, "expected 1.75 x", None),
        ("all_gather", "all_gather.log", {}, "", 72),  # size over count is the number of ranks
        ("all_reduce", "some.log", {"ranks": 72}, "give --collective", None),
        ("all_reduce", "all_gather.log", {"ranks": 72}, "contradicts its rows", None),
    ],
)
def test_missing_ranks_and_collective_are_requested_from_the_user(
    collective: str, name: str, options: dict[str, Any], refusal: str, ranks: int | None
) -> None:
    log = only(
        table(collective, 72, tuple(1728 * s for s in SIZES), layout=LogLayout(head=False)), name, **options
    )
    assert refusal in log.refusal and bool(log.refusal) == bool(refusal)
    assert ranks is None or log.ranks == ranks


def test_truncated_list_of_ranks_is_overridden() -> None:
    text = re.sub(r"^#  Rank +([4-9]|1\d).*\n", "", table(ranks=16), flags=re.MULTILINE)
    log = read(text, ranks=16)
    assert only(text).refusal and "the list is assumed to be cut short" in str(log.problems[0])
    assert log.tables[0].ranks == 16
    assert_as_printed(log.tables[0])


BARE = table(ranks=2, layout=LogLayout(head=False))


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("$ mpirun -np 2 ./build/all_reduce_perf -g 1\n" + BARE, "some.log", {}),
        (BARE + "# Collective test concluded: all_reduce_perf\n", "some.log", {}),
        (BARE, "mine_allreduce_2n.log", {}),
        (BARE, "some.log", {"collective": "all_reduce"}),
    ],
)
def test_collective_comes_from_log_user_or_file_name(text: str, name: str, options: dict[str, Any]) -> None:
    log = read(text, name, ranks=2, **options)
    is_guessed = "from the file name" in str(log.problems)
    assert (log.tables[0].collective, is_guessed) == ("all_reduce", name != "some.log")


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast"])
@pytest.mark.parametrize("change", [("61.94 ", "60.94 "), ("(us)", "(ms)"), ("{}_perf", "x")])
def test_conflicting_ranks_are_reported_first(collective: str, change: tuple[str, str]) -> None:
    log = read(table(collective, 4).replace(change[0].format(collective), change[1]), ranks=8)
    # Bandwidths of a broadcast do not depend on the ranks: a wrong row is a problem of its own.
    is_row = collective == "broadcast" and "61.94" in change[0]
    assert "4 ranks are listed, --ranks gives 8" in (
        str(log.problems[0]) if is_row else log.tables[0].refusal
    )
    assert bool(log.tables[0].refusal) != is_row


TABLE = table()
ROWS = "\n".join(line for line in TABLE.splitlines() if re.match(r" +\d", line))
SIDE_BY_SIDE = re.sub(r"Group  0", "Group  1", TABLE, count=4)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        (f"== 1 node ==\n{ROWS}", "rows without the header that names their columns"),
        (TABLE.replace("  time ", "cputime "), "its times are the host's"),
        (TABLE.replace("(us)", "(ms)"), "expected (GB/s) and (us)"),
        (TABLE.replace("(us)", "(ms)", 1), "expected (GB/s) and (us)"),
        (SIDE_BY_SIDE, "several groups of ranks ran at the same time"),
        (table("reduce", 1), "a single rank does not communicate"),
        (table("broadcast").replace("broadcast_perf", "all_reduce_perf"), "all_reduce among 8 ranks"),
        (TABLE.replace("all_reduce_perf", "hypercube_perf"), "'hypercube' is not supported"),
        (TABLE.replace("all_reduce_perf", "my_perf"), "not a supported program of nccl-tests"),
    ],
)
def test_unusable_tables_are_refused(text: str, refusal: str) -> None:
    assert refusal in only(text).refusal
    with pytest.raises(UsageError, match=f"nothing can be imported.*{re.escape(refusal)}"):
        run_of(text)


def test_escapes_carriage_returns_and_encodings_are_cleaned() -> None:
    text = table().replace("#  Rank  0", "\x1b[32m#  Rank  0\x1b[0m").replace("\n", "\r\n")
    assert_as_printed(only("\ufeff" + text))
    assert_as_printed(only("progress 1%\rprogress 99%\r" + text))
    assert parse(b"\xff\xfe\x80" + table().encode("latin-1"), "x.log").rows == len(SIZES)


@pytest.mark.parametrize(
    ("name", "rows", "ranks", "largest_us"),
    [
        ("30-h100-p5-1n8g-allreduce-tagoutput.log", 32, 8, (62239, 62200)),
        ("31-h100-p5-2n16g-allreduce-tagoutput-indented-elided.log", 7, 16, (9197.5, 9195.2)),
        ("32-t4-efa-2n2g-allreduce-tagoutput-ncclinfo.log", 31, 2, (344981, 344454)),
    ],
)
def test_public_logs_are_read(name: str, rows: int, ranks: int, largest_us: tuple[float, float]) -> None:
    log = only((GENUINE / name).read_text(), name, ranks=ranks)
    assert (log.collective, log.ranks, len(log.rows)) == ("all_reduce", ranks, rows)
    assert not any(measurement.fault for row in log.rows for measurement in row.measurements)
    assert tuple(f.time.value * 1e6 for f in log.rows[-1].measurements if f.time) == pytest.approx(
        largest_us, abs=1e-6
    )


# ------------------------------------------------------------------------------- the other formats


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_nccl_json_versions_are_read(version: int) -> None:
    log = read(json_text(version=version, average_bus_bandwidth={}))
    (log_table,) = log.tables
    hosts = len({device.host for device in log_table.devices})
    assert (log_table.collective, log_table.ranks, hosts, log.problems) == ("all_gather", 8, 2, [])
    assert (log_table.versions, log_table.started) == ({"nccl": "2.26.6"}, "2026-01-01 12:00:00")
    assert_as_printed(log_table)
    # The first iteration was to be skipped; the others are there.
    assert len(log_table.rows[0].measurements[0].samples_s) == (3 if version > 1 else 0)
    assert "SECRET" not in repr(log) and "somebody" not in repr(log)


DEEPSPEED_RAW = (
    DEEPSPEED.format(name="allreduce").replace("Duration  ", "Duration (us)").replace("Gbps", "GBps")
    + "x3: 1048576              262144x4     100.000     20.972               18.350\n"
)
DEEPSPEED_GATHER = (
    DEEPSPEED.format(name="all_gather") + "{}              100.000 us           83.886               73.400\n"
)


@pytest.mark.parametrize(
    "text",
    [
        DEEPSPEED.format(name="all_reduce") + DEEPSPEED_ROW,
        DEEPSPEED_RAW,
        # all_gather prints one rank's part, in some versions the whole size: the throughput decides.
        DEEPSPEED_GATHER.format("x3: 128.0 KB             32768x4  "),
        DEEPSPEED_GATHER.format("x3: 1.0 MB               262144x4  "),
    ],
    ids=["all_reduce", "raw", "all_gather of a part", "all_gather of the whole"],
)
def test_deepspeed_tables_are_read(text: str) -> None:
    log = only(text)
    assert (log.ranks, log.rows[0].size_bytes, log.rows[0].dtype) == (8, 2**20, "32-bit")
    assert times_us(log) == [pytest.approx(100)] and not log.rows[0].measurements[0].fault


@pytest.mark.parametrize(
    ("program", "title", "name", "parts"),
    [
        ("allreduce", "Allreduce", "all_reduce", 1),
        ("allgather", "Allgather", "all_gather", 4),
        ("alltoall", "All-to-All Personalized Exchange", "all_to_all", 4),
        ("bcast", "Broadcast", "broadcast", 1),
        ("reduce_scatter", "Reduce_scatter", "reduce_scatter", 1),
    ],
)
def test_osu_tables_are_read(program: str, title: str, name: str, parts: int) -> None:
    log = only(OSU.format(program=program, title=title))
    assert (log.collective, log.ranks, log.mode, log.device_type) == (name, 4, "isolated", "cuda")
    assert [row.size_bytes for row in log.rows] == [4 * parts, parts * 2**20]
    assert times_us(log)[1] == pytest.approx(100) and log.rows[0].dtype == "float32"


def test_ml_engineering_tables_are_read() -> None:
    log = only(ML_ENGINEERING)
    assert (log.collective, log.ranks, log.rows[2].size_bytes) == ("all_reduce", 4, 2**32)
    coarse, fine, large = (row.measurements[0] for row in log.rows)
    assert "too coarse" in coarse.fault and not large.fault
    assert fine.time is not None and fine.time.value == pytest.approx(1e-4, rel=1e-3) and fine.time_is_derived


@pytest.mark.parametrize("text", [ML_ENGINEERING, OSU.format(program="x", title="Allreduce")])
def test_log_without_its_first_line_needs_ranks(text: str) -> None:
    bare = text.partition("\n")[2]
    assert "give --ranks" in only(bare).refusal and only(bare, ranks=4).ranks == 4


def test_ml_engineering_latencies_become_times() -> None:
    text = """The average bandwidth and the per-call latency of all_gather over 8 ranks (5 warmups):

| payload |    busbw   |    algbw   | latency median |    p99    |    mean   | calls |
| ------: | ---------: | ---------: | -------------: | --------: | --------: | ----: |
|     1KiB |            |            |         20.5us |    22.0us |    20.6us |  1000 |
|    1MiB |   9.18GBps |  10.49GBps |        103.0us |   111.0us |   104.0us |   100 |
"""
    log = only(text)
    assert (log.collective, log.ranks) == ("all_gather", 8)
    assert times_us(log) == pytest.approx([20.5, 103]) and not faults(text)


# ------------------------------------------------------------- what is wrong in a log


TAMPERED: dict[str, tuple[Callable[[str], str], str]] = {
    "time": (lambda row: row.replace("61.94", "60.94"), "but the row has"),
    "size": (lambda row: row.replace("4194304 ", "4194305 "), "but the row has 4194305"),
    "count": (lambda row: row.replace("1048576 ", "1048577 "), "1048577 elements of float32"),
    "busbw": (lambda row: re.sub(r"118\.\d+", "119.5", row, count=1), "is not 1.75 x its algbw"),
    "a word for a number": (lambda row: re.sub(r"67\.\d+", "oops", row, count=1), "no number for algbw oops"),
    "a value less": (lambda row: re.sub(r" 0$", "", row), ""),
    "an added value": (lambda row: row + "  5", "1 value(s) more than the header has columns"),
    "root": (lambda row: re.sub(r" -1 ", " 8 ", row, count=1), "its root is rank 8 of 8"),
    "root of letters": (lambda row: re.sub(r" -1 ", " 1e5 ", row, count=1), "its root is '1e5'"),
    "nan": (lambda row: re.sub(r"67\.\d+", "nan", row, count=1), "no number for algbw nan"),
    "wrong": (lambda row: re.sub(r" 0$", " 7", row), "the data were wrong: wrong elements: 7"),
    "wrong is nan": (lambda row: re.sub(r" 0$", " nan", row), "its check of the data gives nan"),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_altered_row_alone_loses_its_numbers(what: str) -> None:
    change, reason = TAMPERED[what]
    line = line_of(TABLE, 4194304)
    row = TABLE.splitlines()[line - 1]
    text = TABLE.replace(row, change(row))
    by_line, log = faults(text), read(text)
    if reason:
        assert list(by_line) == [line] and any(reason in fault for fault in by_line[line])
    else:  # an incomplete row is left out
        assert not by_line and len(log.tables[0].rows) == len(SIZES) - 1
        assert log.problems[0].line == line and "incomplete" in log.problems[0].text
    for result in run_of(text):
        if result.status == "ok":
            expected_s = time_us(result.size_bytes or 0, bool(result.params["in_place"])) * 1e-6
            assert result.time_s is not None and result.time_s.median == pytest.approx(expected_s, rel=6e-3)
        else:
            assert (result.time_s, result.samples_s, result.busbw_Bps) == (None, (), None)
            assert f"line {line}" in result.reason


def test_independent_processes_in_one_log_are_refused() -> None:
    """nccl-tests built without MPI: each process prints a table of its own, all of them at once."""
    tables = (table("all_reduce", 2).replace("Pid 9000", f"Pid {pid}").splitlines() for pid in (1, 2))
    mixed = "\n".join(line for pair in zip(*tables, strict=True) for line in pair)
    assert all("without MPI" in log_table.refusal for log_table in read(mixed).tables if log_table.rows)
    with pytest.raises(UsageError, match="without MPI"):
        run_of(mixed)


def test_killed_run_and_its_repetition_are_two_launches() -> None:
    cut = table(sizes=SIZES[:4], layout=LogLayout(foot=False)).replace("Pid 9000", "Pid 77")
    results = run_of(cut + "Killed\n" + table())
    assert {r.launch for r in results if r.size_bytes == SIZES[0]} == {0, 1}
    assert {r.launch for r in results if r.size_bytes == SIZES[-1]} == {0}
    assert "no end" in read(cut).problems[0].text


def test_cycles_without_a_header_are_launches() -> None:
    lines = table().splitlines(keepends=True)
    log = read("".join(lines + lines[-len(SIZES) - 3 :]))
    assert [len(log_table.rows) for log_table in log.tables] == [len(SIZES)] * 2
    assert {r.launch for r in convert.to_run([log], [])[1]} == {0, 1}


def test_errors_in_the_footer_alone_mark_all_rows_wrong() -> None:
    text = table(layout=LogLayout(checked=False))
    assert not faults(text)
    results = run_of(text.replace("values : 0 OK", "values : 4 FAILED"))
    assert {(r.status, r.time_s) for r in results} == {("wrong", None)} and len(results) == 2 * len(SIZES)
    assert all("4 values out of bounds, but does not mark their rows" in r.reason for r in results)


@pytest.mark.parametrize(("deviation", "bad"), [("2e-07", False), ("1e+00", True), ("nan", True)])
def test_deviations_of_old_logs_are_limited_by_dtype(deviation: str, bad: bool) -> None:
    assert bool(faults(table(layout=LogLayout("error"), wrong=lambda _size, _in_place: deviation))) == bad


def test_failure_of_the_benchmark_is_reported() -> None:
    head = "".join(re.findall(r"^#.*Rank.*\n", table(), flags=re.MULTILINE))
    failure = "node-7: Test CUDA failure common.cu:1304 'CUDA-capable device(s) is/are busy or unavailable'\n"
    with pytest.raises(UsageError, match=r"the benchmark failed, line 9: Test CUDA failure common.cu:1304"):
        run_of(head + failure)
    log = read(table() + " .. node-7 pid 662195: Test failure common.cu:1189\n")
    assert log.failures and any("Test failure" in line for line in report(log))


@pytest.mark.parametrize(
    "text", ["", "\n\n", "hello", "[1, 2]", "\x00" * 100, "{", '{"a": 1}', json_text()[:10]]
)
def test_unsupported_files_are_refused(text: str) -> None:
    message = "not a complete JSON file of nccl-tests" if text.startswith('{"') else re.escape(EXPECTED)
    with pytest.raises(UnreadableRunError, match=message):
        read(text)


def test_json_rows_with_invalid_numbers_are_faulty() -> None:
    content = document()
    time, wrong, busbw, *_ = (row["out_of_place"] for row in content["results"])
    time["time"], wrong["nwrong"], busbw["bus_bw"] = "nan", 4.0, busbw["bus_bw"] * 1.01
    reasons = [row.measurements[0].fault for row in read(json.dumps(content)).tables[0].rows]
    expected = ["no number for time", "wrong elements: 4", "is not 0.875 x its algbw"]
    assert all(part in reason for part, reason in zip(expected, reasons, strict=False)) and reasons[3] == ""


def edited(edits: Sequence[tuple[str, str]], text: str = TABLE) -> str:
    """Returns a log with regular expressions replaced in each line."""
    for pattern, replacement in edits:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


DATE = "2026-01-01 12:00:00"


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(
            edited(
                [
                    ("#wrong", "#wrong #bitdiff i_min i_max i_p99 i_cv%"),
                    ("(algbw.*)$", r"\1  timestamp"),
                    (r"(\(elements\).*)$", r"\1  (us) (us) (us) (%)  %Y-%m-%d %H:%M:%S"),
                    (
                        r"^( +\d.*?) 0( .*?) 0$",
                        rf"\1 0 0 1.00 99.0 98.0 3.50\2 0 0 1.00 99.0 98.0 3.50  {DATE}",
                    ),
                ]
            ),
            id="nccl-tests -I with timestamps",
        ),
        # The header has the columns behind the algorithm, the rows before it.
        pytest.param(
            edited(
                [
                    ("(algbw.*)$", r"\1  algo proto nchannels timestamp"),
                    (r"^( +\d.*)$", rf"\1  {DATE}  RING* LL 2"),
                ]
            ),
            id="rccl-tests -A",
        ),
        pytest.param(
            edited([("#wrong$", "#wrong algo")], table(layout=LogLayout(cut=lambda _: NCCL))),
            id="NCCL's messages inside a row name the algorithm",
        ),
        # The host's time stands beside the time by events, which is missing for some sizes.
        pytest.param(
            functools.reduce(
                lambda text, at: widened(
                    text, at, ["hipevt"], lambda size: ["N/A" if size < 8192 else f"{size / 1e3:.2f}"]
                ),
                (10, 6),
                table(),
            ),
            id="rccl-tests with times by events",
        ),
    ],
)
def test_text_columns_of_newer_versions_are_assigned_by_name(text: str) -> None:
    assert_as_printed(only(text))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("values", [("RING", "LL", "2"), ("N/A", "N/A", "N/A"), ("TREE", "SIMPLE", "16")])
def test_unused_columns_are_recorded_at_any_position(
    place: int, named: bool, values: tuple[str, ...]
) -> None:
    tuning = ("algo", "proto", "nchannels")
    log = read(widened(table(), place, tuning if named else (), lambda _: values))
    (log_table,) = log.tables
    assert_as_printed(log_table)
    assert {(row.redop, row.root) for row in log_table.rows} == {("sum", -1)}
    names = tuning if named else [f"column {place + i}" for i in (1, 2, 3)]
    assert f"columns not used: {names[0]} ({values[0]})" in str(log.problems[0])
    unused = {name: (value,) for name, value in zip(names, values, strict=True)}
    assert convert.to_run([log], [])[0].imported[0].unused_columns == unused


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_unknown_column_never_becomes_a_time(place: int) -> None:
    named, unnamed = (
        widened(table(), place, names, lambda size: [f"{size / 7:.2f}"]) for names in (["speed"], [])
    )
    for text in (named, unnamed):
        assert_as_printed(only(text))
    assert list(only(named).unused_columns) == ["speed"]
    plain, row = table().splitlines(), line_of(table(), SIZES[4])
    # A single row has the unnamed column: only that row is faulty. Or the header names it, and a row lacks it.
    assert list(faults("\n".join([*plain[: row - 1], unnamed.splitlines()[row - 1], *plain[row:]]))) == [row]
    lines = named.splitlines()
    log = only("\n".join([*lines[: row - 1], plain[row - 1], *lines[row:]]))
    times_s = {
        (row.size_bytes, f.in_place): f.time.value for row, f in log.measurements if f.time and not f.fault
    }
    assert times_s == pytest.approx({key: time_us(*key) * 1e-6 for key in times_s}, rel=6e-3)


@pytest.mark.parametrize("at", [6, 7, 8, 10, 11])
@pytest.mark.parametrize("value", ["2", "31.25", "x"])
def test_unnamed_column_inside_a_placement_is_not_inferred(at: int, value: str) -> None:
    assert len(faults(widened(table(), at, [], lambda _: [value]))) == len(SIZES)


def test_rows_with_an_extra_placement_are_refused() -> None:
    text = widened(table(), 13, [], lambda size: table(sizes=[size]).splitlines()[-4].split()[5:9])
    reasons = [reason for faulty in faults(text).values() for reason in faulty]
    assert ["4 value(s) more" in reason for reason in reasons] == [True] * 2 * len(SIZES)


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
    names = ["size", "count", "type", "redop", "root", *["time", "algbw", "busbw", "#wrong"] * 2]
    order = [*range(len(names))]
    for start in (i for i, name in enumerate(names) if name == old[0]):
        order[start : start + len(old)] = [start + old.index(name) for name in new]
    lines = [line.split() for line in table().splitlines()]
    for words in lines:
        first = int("algbw" in words)  # the header begins with "#"
        if first or (words and words[0].isdigit()):
            words[first:] = [words[first + column] for column in order]
    assert_as_printed(only("\n".join(map(" ".join, lines))))


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
    (log_table,) = log.tables
    assert (log.format, log_table.collective, log_table.ranks) == ("rccl-tests CSV", "all_reduce", 8)
    assert {(row.dtype, row.redop, f.wrong) for row, f in log_table.measurements} == {("float32", "sum", 0)}
    assert_as_printed(log_table, rel=1e-6)
    assert len(log_table.unused_columns) == (3 if "in front" in form or "behind" in form else 0)
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
    faulty = [f"line {row.line}: {f.fault}" for row, f in log.tables[0].measurements if f.fault]
    reported = [
        f"line {at + 1}: " in str(fault) and reason in str(fault) for fault in (*log.problems, *faulty)
    ]
    assert reported == [True] * bool(reason)


@pytest.mark.parametrize(
    ("text", "column"),
    [
        *((TABLE, column) for column in ("time", "algbw")),
        *((rccl_csv(MPI_HEAD, MPI_ROW), column) for column in ("time", "algbw", "inplace")),
    ],
)
def test_header_without_a_placement_column_is_refused(text: str, column: str) -> None:
    """Half of the placements would pass for the other half."""
    with pytest.raises((UsageError, UnreadableRunError)):
        run_of(text.replace(column, "x", 1))


@pytest.mark.parametrize(
    "names", ["size count size type", "size " * 999 + "count type", "type " * 1600 + "count"]
)
def test_absurd_headers_do_not_raise(names: str) -> None:
    log = parse((table().replace("size         count      type", names) * 2).encode(), "x.log")
    measurements = [m for log_table in log.tables for _, m in log_table.measurements]
    assert not [m for m in measurements if m.time and m.time.value > 1e-3]
