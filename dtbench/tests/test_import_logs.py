"""Logs of every format are read completely, and faulty rows never become times."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

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
    SIZES,
    UNRELATED,
    LogLayout,
    document,
    json_text,
    read,
    table,
    time_us,
)

GENUINE = Path(__file__).parent / "data" / "nccl-tests"


def only(text: str, name: str = "some.log", **options: object) -> LogTable:
    (one,) = read(text, name, **options).tables
    return one


def assert_as_printed(log: LogTable, sizes: tuple[int, ...] = SIZES) -> None:
    """Every figure is there, right to the digits that were printed, and nothing is held against it."""
    assert not log.refusal
    assert [row.size_bytes for row in log.rows] == list(sizes)
    for row in log.rows:
        assert [figure.in_place for figure in row.figures] == [False, True]
        for figure in row.figures:
            assert figure.fault == "" and figure.time is not None
            expected = time_us(row.size_bytes, figure.in_place) * 1e-6
            assert figure.time.value == pytest.approx(expected, rel=6e-3)


def assert_as_printed_or_left_out(log: LogTable) -> None:
    for row, figure in log.figures:
        if not figure.fault:
            assert figure.time is not None
            assert figure.time.value == pytest.approx(
                time_us(row.size_bytes, figure.in_place) * 1e-6, rel=6e-3
            )


def times_us(log: LogTable) -> list[float]:
    """Of the first placement."""
    return [row.figures[0].time.value * 1e6 for row in log.rows if row.figures[0].time]


def faults(text: str) -> dict[int, list[str]]:
    """Line -> what is wrong with its figures."""
    reasons = {
        row.line: [figure.fault for figure in row.figures if figure.fault]
        for one in read(text).tables
        for row in one.rows
    }
    return {line: several for line, several in reasons.items() if several}


def run_of(text: str) -> list[Result]:
    return convert.to_run([read(text)], [])[1]


def line_of(text: str, size: int) -> int:
    return next(i for i, line in enumerate(text.splitlines(), 1) if re.match(rf" +{size} ", line))


# --------------------------------------------------------------------------------- nccl-tests' text


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv")


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("era", ["modern", "error"])
def test_every_collective_is_read_from_every_layout(collective: str, era: str) -> None:
    log = only(table(collective, 12, tuple(s // 48 * 48 for s in SIZES), layout=LogLayout(era)))
    assert (log.collective, log.ranks) == (collective, 12)
    assert_as_printed(log, tuple(s // 48 * 48 for s in SIZES))


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


def test_missing_ranks_are_requested_from_the_user() -> None:
    text = table("all_reduce", 72, tuple(1728 * s for s in SIZES), layout=LogLayout(head=False))
    assert "give --ranks N" in only(text, "all_reduce.log").refusal
    assert only(text, "all_reduce.log", ranks=72).ranks == 72
    assert "expected 1.75 x" in only(text, collective="all_reduce", ranks=8).refusal
    # What has a part per rank tells them by size over count.
    text = table("all_gather", 10, tuple(240 * s for s in SIZES), layout=LogLayout(head=False))
    assert only(text, "all_gather.log").ranks == 10


def test_truncated_list_of_ranks_is_overridden() -> None:
    lines = table(ranks=16).splitlines()
    ranks = [line for line in lines if "Rank" in line]
    text = "\n".join(line for line in lines if line not in ranks[4:])
    assert only(text).refusal
    log = read(text, ranks=16)
    assert log.tables[0].ranks == 16 and "the list is assumed to be cut short" in str(log.problems[0])
    assert_as_printed(log.tables[0])


def test_collective_comes_from_log_user_or_file_name() -> None:
    bare = table(ranks=2, layout=LogLayout(head=False))
    assert only("$ mpirun -np 2 ./build/all_reduce_perf -g 1\n" + bare, ranks=2).collective == "all_reduce"
    after = bare + "# Collective test concluded: all_reduce_perf\n"
    assert only(after, ranks=2).collective == "all_reduce"
    log = read(bare, "mine_allreduce_2n.log", ranks=2)
    assert log.tables[0].collective == "all_reduce" and "from the file name" in str(log.problems[0])
    assert only(bare, collective="all_reduce", ranks=2).collective == "all_reduce"
    assert "give --collective" in only(bare, ranks=2).refusal
    assert "contradicts its rows" in only(bare, "all_gather.log", ranks=2).refusal


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "broadcast"])
def test_conflicting_ranks_are_reported_first(collective: str) -> None:
    text = table(collective, 4)
    broken = text.replace("61.94 ", "60.94 ")
    log = read(broken, ranks=8)
    first = log.tables[0].refusal or str(log.problems[0])
    assert "4 ranks are listed, --ranks gives 8" in first
    assert bool(log.tables[0].refusal) == (
        collective != "broadcast"
    )  # whose bandwidths say nothing of the ranks
    for other in (text.replace("(us)", "(ms)"), text.replace(f"{collective}_perf", "x")):
        assert only(other, ranks=8).refusal.startswith("4 ranks are listed, --ranks gives 8: ")


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
    latin = parse(b"\xff\xfe\x80" + table().encode("latin-1"), "x.log")
    assert latin.rows == len(SIZES)


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
    assert not any(figure.fault for row in log.rows for figure in row.figures)
    times = [figure.time.value * 1e6 for figure in log.rows[-1].figures if figure.time]
    assert times == [pytest.approx(us, abs=1e-6) for us in largest_us]


# ------------------------------------------------------------------------------- the other formats


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_nccl_json_versions_are_read(version: int) -> None:
    log = read(json_text(version=version, average_bus_bandwidth={}))
    (one,) = log.tables
    assert (one.collective, one.ranks, len({d.host for d in one.devices})) == ("all_gather", 8, 2)
    assert one.versions == {"nccl": "2.26.6"} and one.started == "2026-01-01 12:00:00"
    assert_as_printed(one)
    # The first iteration was to be skipped; the others are there.
    assert len(one.rows[0].figures[0].samples_s) == (3 if version > 1 else 0)
    assert not log.problems
    assert "SECRET" not in repr(log) and "somebody" not in repr(log)


def test_deepspeed_tables_are_read() -> None:
    log = only(DEEPSPEED.format(name="all_reduce") + DEEPSPEED_ROW)
    assert (log.collective, log.ranks) == ("all_reduce", 8)
    assert (log.rows[0].size_bytes, log.rows[0].dtype) == (2**20, "32-bit")
    assert times_us(log) == [pytest.approx(100)]
    # all_gather describes one rank's part, in some versions the whole: the throughput tells.
    for head in ("x3: 128.0 KB             32768x4  ", "x3: 1.0 MB               262144x4  "):
        row = f"{head}              100.000 us           83.886               73.400\n"
        log = only(DEEPSPEED.format(name="all_gather") + row)
        assert log.rows[0].size_bytes == 2**20 and not log.rows[0].figures[0].fault
    raw = DEEPSPEED.format(name="allreduce").replace("Duration  ", "Duration (us)").replace("Gbps", "GBps")
    log = only(f"{raw}x3: 1048576              262144x4     100.000     20.972               18.350\n")
    assert log.rows[0].figures[0].fault == "" and log.rows[0].size_bytes == 2**20


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
    assert times_us(log)[1] == pytest.approx(100)
    assert log.rows[0].dtype == "float32"


def test_ml_engineering_tables_are_read() -> None:
    log = only(ML_ENGINEERING)
    assert (log.collective, log.ranks) == ("all_reduce", 4)
    coarse, fine, large = (row.figures[0] for row in log.rows)
    assert "too coarse" in coarse.fault
    assert fine.time is not None and fine.time.value == pytest.approx(1e-4, rel=1e-3) and fine.time_is_derived
    assert log.rows[2].size_bytes == 2**32 and not large.fault
    for bare in (ML_ENGINEERING, OSU.format(program="x", title="Allreduce")):
        bare = bare.split("\n", 1)[1]
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
    assert times_us(log) == [pytest.approx(20.5), pytest.approx(103)]
    assert not any(row.figures[0].fault for row in log.rows)


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
    assert text != TABLE
    by_line = faults(text)
    if reason:
        assert list(by_line) == [line] and any(reason in fault for fault in by_line[line])
    else:  # it is not even whole: left out, and said so
        log = read(text)
        assert not by_line and len(log.tables[0].rows) == len(SIZES) - 1
        assert log.problems[0].line == line and "incomplete" in log.problems[0].text
    for result in run_of(text):
        if result.status == "ok":
            expected = time_us(result.size_bytes or 0, bool(result.params["in_place"])) * 1e-6
            assert result.time_s is not None and result.time_s.median == pytest.approx(expected, rel=6e-3)
        else:
            assert result.time_s is None and result.samples_s == () and result.busbw_Bps is None
            assert f"line {line}" in result.reason


def test_independent_processes_in_one_log_are_refused() -> None:
    """nccl-tests built without MPI: each process prints a table of its own, all of them at once."""
    one, two = (table("all_reduce", 2).replace("Pid 9000", f"Pid {pid}").splitlines() for pid in (1, 2))
    mixed = "\n".join(line for pair in zip(one, two, strict=True) for line in pair)
    tables = read(mixed).tables
    assert tables and all("without MPI" in each.refusal for each in tables if each.rows)
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
    cycle = lines[-len(SIZES) - 3 :]
    log = read("".join(lines + cycle))
    assert [len(one.rows) for one in log.tables] == [len(SIZES)] * 2
    assert {r.launch for r in convert.to_run([log], [])[1]} == {0, 1}


def test_errors_in_the_footer_alone_mark_all_rows_wrong() -> None:
    text = table(layout=LogLayout(checked=False))
    assert not faults(text)
    results = run_of(text.replace("values : 0 OK", "values : 4 FAILED"))
    assert {(r.status, r.time_s) for r in results} == {("wrong", None)} and len(results) == 2 * len(SIZES)
    assert all("4 values out of bounds, but does not mark their rows" in r.reason for r in results)


@pytest.mark.parametrize(("deviation", "bad"), [("2e-07", False), ("1e+00", True), ("nan", True)])
def test_deviations_of_old_logs_are_limited_by_dtype(deviation: str, bad: bool) -> None:
    text = table(layout=LogLayout("error"), wrong=lambda _size, _in_place: deviation)
    assert bool(faults(text)) == bad


def test_failure_of_the_benchmark_is_reported() -> None:
    head = "\n".join(line for line in table().splitlines() if line.startswith("#") and "Rank" in line)
    failed = (
        head
        + "\nnode-7: Test CUDA failure common.cu:1304 'CUDA-capable device(s) is/are busy or unavailable'\n"
    )
    with pytest.raises(UsageError, match=r"the benchmark failed, line 9: Test CUDA failure common.cu:1304"):
        run_of(failed)
    log = read(table() + " .. node-7 pid 662195: Test failure common.cu:1189\n")
    assert log.failures and any("Test failure" in line for line in report(log))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n",
        "hello",
        "[1, 2]",
        "\x00" * 100,
        "{",
        '{"a": 1}',
        json_text()[:10],
    ],
)
def test_unsupported_files_are_refused(text: str) -> None:
    with pytest.raises(UnreadableRunError) as refused:
        read(text)
    is_object = text.startswith('{"')
    assert ("not a complete JSON file of nccl-tests" if is_object else EXPECTED) in str(refused.value)


def test_json_rows_with_invalid_numbers_are_faulty() -> None:
    content = document()
    content["results"][0]["out_of_place"]["time"] = "nan"
    content["results"][1]["out_of_place"]["nwrong"] = 4.0
    content["results"][2]["out_of_place"]["bus_bw"] *= 1.01
    log = read(json.dumps(content))
    reasons = [row.figures[0].fault for row in log.tables[0].rows[:4]]
    assert reasons[3] == "" and "no number for time" in reasons[0] and "wrong elements: 4" in reasons[1]
    assert "is not 0.875 x its algbw" in reasons[2]
