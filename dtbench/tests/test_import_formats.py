"""Logs of every format come out as the rows they hold: whatever is printed around and into them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from dtbench.importers import checks
from dtbench.importers.model import Table
from dtbench.importers.registry import parse
from dtbench.tests.made_up_logs import (
    DEEPSPEED,
    DEEPSPEED_ROW,
    ML_ENGINEERING,
    NCCL,
    OSU,
    SIZES,
    UNRELATED,
    Layout,
    document,
    json_text,
    read,
    side_by_side,
    table,
    time_us,
)

GENUINE = Path(__file__).parent / "data" / "nccl-tests"


def only(text: str, name: str = "some.log", **given: object) -> Table:
    [found] = read(text, name, **given).tables
    return found


def assert_as_printed(found: Table, sizes: tuple[int, ...] = SIZES) -> None:
    """Every figure is there, right to the digits that were printed, and nothing is held against it."""
    assert not found.refusal
    assert [row.size_bytes for row in found.rows] == list(sizes)
    for row in found.rows:
        assert [figure.in_place for figure in row.figures] == [False, True]
        for figure in row.figures:
            assert figure.fault == "" and figure.time is not None
            assert figure.time.value == pytest.approx(
                time_us(row.size_bytes, figure.in_place) * 1e-6, rel=6e-3
            )


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "sendrecv")


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("era", ["modern", "error", "old"])
def test_every_collective_of_every_era(collective: str, era: str) -> None:
    found = only(table(collective, 12, tuple(s // 48 * 48 for s in SIZES), layout=Layout(era)))
    assert (found.collective, found.ranks) == (collective, 12)
    assert_as_printed(found, tuple(s // 48 * 48 for s in SIZES))


TAGS = (
    "",
    "[1,0]<stdout>:",
    "   [1,0]<stdout>: ",
    "(head, rank=0, pid=3808) [1,0]<stdout>:",
    "x3211c0s37b0n0: ",
    "0: ",
    "> ",
)
CUTS = {
    "whole rows": lambda part: "",
    "NCCL glued to every part": lambda part: NCCL,
    "other lines inside a row": lambda part: "\n" + UNRELATED + NCCL if part < 2 else "",
    "many of them": lambda part: NCCL * 50 + UNRELATED,
}


@pytest.mark.parametrize("tag", TAGS)
@pytest.mark.parametrize("cut", CUTS)
def test_tags_and_rows_in_pieces(tag: str, cut: str) -> None:
    found = only(table(hosts=2, layout=Layout(tag=tag, cut=CUTS[cut])))
    assert (found.collective, found.ranks) == ("all_reduce", 8)
    assert {device.host for device in found.devices} == {"node-7", "node-8"}
    assert_as_printed(found)


@pytest.mark.parametrize("host", ["7up", "10.0.0.5", "e5-node"])
def test_hosts_whose_names_could_be_part_of_the_number_before_them(host: str) -> None:
    info = NCCL.replace("node-7", host)
    found = only(info + table(layout=Layout(cut=lambda part: info)).replace("node-7", host))
    assert_as_printed(found)


def test_all_types_in_one_table_and_every_one_known() -> None:
    types = {
        "int8": "int8", "uint8": "uint8", "int32": "int32", "uint32": "uint32", "int64": "int64", "uint64": "uint64",
        "half": "float16", "float": "float32", "double": "float64", "bfloat16": "bfloat16",
        "f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2",
    }  # fmt: skip
    one = table(sizes=(65536,))
    row = next(line for line in one.splitlines() if " 65536 " in line)
    counts = {8: 8192, 4: 16384, 2: 32768, 1: 65536}
    widths = dict(zip(types, (1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1), strict=True))
    rows = [row.replace("   16384 ", f"   {counts[widths[t]]} ").replace(" float ", f" {t} ") for t in types]
    found = only(one.replace(row, "\n".join(rows)))
    assert [r.dtype for r in found.rows] == list(types.values())
    assert not any(figure.fault for r in found.rows for figure in r.figures)


def test_ranks_that_no_list_names_are_asked_for() -> None:
    for collective, ranks in (("all_reduce", 72), ("all_reduce", 96), ("sendrecv", 3)):
        text = table(collective, ranks, tuple(24 * s * ranks for s in SIZES), layout=Layout(head=False))
        assert "give --ranks N" in only(text, f"{collective}.log").refusal
        assert only(text, f"{collective}.log", ranks=ranks).ranks == ranks
        wrong = only(text, collective=collective, ranks=8).refusal
        assert ("would have 1.75" in wrong) == (collective == "all_reduce")
    # What has a part per rank tells them by size over count.
    text = table("all_gather", 10, tuple(240 * s for s in SIZES), layout=Layout(head=False))
    assert only(text, "all_gather.log").ranks == 10


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kept", [1, 4])
def test_a_list_of_ranks_that_was_cut_is_not_believed(named: bool, kept: int) -> None:
    lines = [line for line in table(ranks=16).splitlines() if named or "Collective test" not in line]
    ranks = [line for line in lines if "Rank" in line]
    text = "\n".join(line for line in lines if line not in ranks[kept:])
    assert only(text).refusal
    log = read(text, ranks=16, collective="all_reduce")
    assert log.tables[0].ranks == 16 and "the list is cut" in str(log.problems[0])
    assert_as_printed(log.tables[0])


def test_rows_cut_out_of_their_table_are_refused() -> None:
    rows = [line for line in table(sizes=SIZES[-3:]).splitlines() if re.match(r" +\d", line)]
    refused = only("== 1 node ==\n" + "\n".join(rows))
    assert "without the header above them" in refused.refusal and "--ranks N" in refused.refusal
    assert (refused.line, refused.rows) == (2, [])


def test_several_tables_in_a_file_keep_their_own_names_and_ranks() -> None:
    texts = [
        table(c, n, hosts=h) for c, n, h in (("all_reduce", 8, 2), ("broadcast", 2, 1), ("all_gather", 4, 4))
    ]
    log = read("$ ./run.sh\n" + "\n$ \n".join(texts))
    assert [(t.collective, t.ranks, len(t.rows)) for t in log.tables] == [
        ("all_reduce", 8, 9), ("broadcast", 2, 9), ("all_gather", 4, 9),
    ]  # fmt: skip
    assert not log.problems


def test_a_name_on_the_command_line_or_after_the_table_or_of_the_file() -> None:
    bare = table(ranks=2, layout=Layout(head=False))
    assert only("$ mpirun -np 2 ./build/all_reduce_perf -g 1\n" + bare).collective == "all_reduce"
    assert only(bare + "# Collective test concluded: all_reduce_perf\n").collective == "all_reduce"
    log = read(bare, "mine_allreduce_2n.log")
    assert log.tables[0].collective == "all_reduce" and "by the name of the file" in str(log.problems[0])
    assert "all_reduce or sendrecv fit its rows" in only(bare).refusal
    assert only(bare, collective="sendrecv", ranks=2).collective == "sendrecv"
    assert "contradicts its rows" in only(bare, collective="all_gather").refusal
    # A list of programs names none.
    assert only("$ ls build\nall_reduce_perf sendrecv_perf\n" + bare).refusal


def test_cpu_times_are_not_taken_for_the_collectives() -> None:
    found = only(table(layout=Layout("cputime"), sizes=SIZES[3:]))
    assert_as_printed(found, SIZES[3:])
    assert all(figure.time_is_derived for row in found.rows for figure in row.figures)


def test_columns_of_newer_versions_are_bound_by_their_names() -> None:
    """Per-iteration statistics, bitwise checks and timestamps stand between and behind the usual columns."""
    lines = []
    for line in table(sizes=SIZES[:2]).splitlines():
        if "algbw" in line:
            line = line.replace("#wrong", "#wrong #bitdiff i_min i_max i_p99 i_cv%") + "  timestamp"
        elif re.match(r" +\d", line):
            line = re.sub(r"( 0)(?=  |$)", r"\1 0 1.00 99.0 98.0 3.50", line) + "  2026-01-01 12:00:00"
        lines.append(line)
    assert_as_printed(only("\n".join(lines)), SIZES[:2])
    lines = [line + ("  algo proto nchannels" if "algbw" in line else "") for line in table().splitlines()]
    lines = [line + ("  RING LL 2" if re.match(r" +\d", line) else "") for line in lines]
    assert_as_printed(only("\n".join(lines)))


def test_a_replayed_trace_has_no_first_placement() -> None:
    text = re.sub(r"(-1)  .{7}  .{6}  .{6}  .{6}(?=  )", r"\1" + " " * 32, table(sizes=SIZES[:3]))
    found = only(text)
    assert [[f.in_place for f in row.figures] for row in found.rows] == [[True]] * 3
    assert found.rows[2].figures[0].time.value == pytest.approx(time_us(SIZES[2], True) * 1e-6, rel=1e-3)  # type: ignore[union-attr]


def test_nccl_1_prints_milliseconds() -> None:
    text = """# Using devices
#   Device  0 ->  0 [0x0a] GeForce GTX TITAN X
#   Device  1 ->  1 [0x09] GeForce GTX TITAN X
#   Device  2 ->  2 [0x06] GeForce GTX TITAN X
#   Device  3 ->  3 [0x05] GeForce GTX TITAN X

#                                                 out-of-place                    in-place
#      bytes             N    type      op     time  algbw  busbw      res     time  algbw  busbw      res
    10000000      10000000    char     sum    2.000   5.00   7.50    0e+00    2.500   4.00   6.00    0e+00
    10000000       2500000   float    prod    2.000   5.00   7.50    1e-07    2.500   4.00   6.00    1e-07
"""
    found = only(text)
    assert (found.collective, found.ranks) == ("all_reduce", 4)
    assert [(r.dtype, r.redop, r.figures[0].time.value) for r in found.rows] == [  # type: ignore[union-attr]
        ("int8", "sum", pytest.approx(2e-3)), ("float32", "prod", pytest.approx(2e-3)),
    ]  # fmt: skip


def test_groups_that_ran_side_by_side() -> None:
    found = only(side_by_side())
    assert (found.groups, found.ranks) == (2, 4)
    assert_as_printed(found)


@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_json(version: int) -> None:
    log = read(json_text(version=version, average_bus_bandwidth={}))
    [found] = log.tables
    assert (found.collective, found.ranks, len({d.host for d in found.devices})) == ("all_gather", 8, 2)
    assert found.versions == {"nccl": "2.26.6"} and found.started == "2026-01-01 12:00:00"
    assert_as_printed(found)
    figure = found.rows[0].figures[0]
    # The first iteration was to be skipped; the others are there, and each rank's own beside them.
    assert len(figure.samples_s) == (3 if version > 1 else 0)
    assert len(figure.rank_samples_s) == (8 if version > 1 else 0)
    assert not log.problems


@pytest.mark.parametrize("frame", ["[\n{}\n]\n", "{}\n", "{},\n"])
def test_records_of_rccl_tests(frame: str) -> None:
    records = []
    for size in SIZES:
        for in_place in (0, 1):
            us = time_us(size, bool(in_place))
            records.append(
                '{"numCycle":0, "name":"AllReduce", "nodes":2, "ranks":8, "ranksPerNode":4, "gpusPerRank":1, '
                f'"size":{size}, "type":"float", "redop":"sum", "inPlace":{in_place}, "time":{us:f}, '
                f'"algBw":{size / us / 1e3:f}, "busBw":{size / us / 1e3 * 1.75:f}, "wrong":"0"}}'
            )
    text = frame.replace("{}", (",\n" if "[" in frame else "\n").join(records))
    found = only(text)
    assert (found.tool, found.collective, found.ranks) == ("rccl-tests", "all_reduce", 8)
    assert_as_printed(found)
    wrong = read(text.replace('"0"', '"7"', 1).replace('"time":', '"time":1', 1))
    assert "wrong elements: 7" in wrong.tables[0].rows[0].figures[0].fault
    cut = read(text[: len(text) - 40])
    assert "cut" in str(cut.problems[-1]) and len(cut.tables[0].rows[-1].figures) == 1
    assert not read(text.replace("AllReduce", "Hypercube")).tables[0].rows[0].figures[0].fault
    assert "no collective" in read(text.replace("AllReduce", "Hypercube")).tables[0].refusal


def test_json_takes_nothing_from_the_environment() -> None:
    log = read(json_text())
    assert "SECRET" not in repr(log) and "somebody" not in repr(log)


def test_per_process_times_of_several_gpus_are_no_ranks_times() -> None:
    made = document(version=3)
    made["config"]["ngpus"] = 2
    assert read(json.dumps(made)).tables[0].rows[0].figures[0].rank_samples_s == {}


def test_deepspeed() -> None:
    found = only(DEEPSPEED.format(name="all_reduce") + DEEPSPEED_ROW)
    assert (found.collective, found.ranks) == ("all_reduce", 8)
    assert (found.rows[0].size_bytes, found.rows[0].dtype) == (2**20, "32-bit")
    assert found.rows[0].figures[0].time.value == pytest.approx(1e-4)  # type: ignore[union-attr]
    # all_gather describes one rank's part, in some versions the whole: the throughput tells.
    part = "x3: 128.0 KB             32768x4                   100.000 us           83.886               73.400\n"
    whole = "x3: 1.0 MB               262144x4                  100.000 us           83.886               73.400\n"
    for row in (part, whole):
        found = only(DEEPSPEED.format(name="all_gather") + row)
        assert found.rows[0].size_bytes == 2**20 and not found.rows[0].figures[0].fault
    raw = DEEPSPEED.format(name="allreduce").replace("Duration  ", "Duration (us)").replace("Gbps", "GBps")
    found = only(
        raw
        + "x3: 1048576              262144x4                  100.000              20.972               18.350\n"
    )
    assert found.rows[0].figures[0].fault == "" and found.rows[0].size_bytes == 2**20


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
def test_osu(program: str, title: str, name: str, parts: int) -> None:
    found = only(OSU.format(program=program, title=title))
    assert (found.collective, found.ranks, found.mode, found.device_type) == (name, 4, "isolated", "cuda")
    assert [row.size_bytes for row in found.rows] == [4 * parts, parts * 2**20]
    assert found.rows[1].figures[0].time.value == pytest.approx(1e-4)  # type: ignore[union-attr]
    assert found.rows[0].dtype == "float32"


def test_osu_without_a_command_line_needs_the_ranks() -> None:
    text = OSU.format(program="x", title="Allreduce").split("\n", 1)[1].replace("-CUDA", "")
    assert "give --ranks" in only(text).refusal
    found = only(text, ranks=16)
    assert (found.ranks, found.device_type) == (16, "cpu")


def test_ml_engineering() -> None:
    found = only(ML_ENGINEERING)
    assert (found.collective, found.ranks) == ("all_reduce", 4)
    coarse, fine, large = (row.figures[0] for row in found.rows)
    assert "too coarse" in coarse.fault
    assert fine.time is not None and fine.time.value == pytest.approx(1e-4, rel=1e-3) and fine.time_is_derived
    assert found.rows[2].size_bytes == 2**32 and not large.fault
    bare = ML_ENGINEERING.split("\n", 1)[1]
    assert "give --ranks" in only(bare).refusal and only(bare, ranks=4).ranks == 4


def test_ml_engineering_with_latencies_and_several_collectives() -> None:
    text = """The average bandwidth and the per-call latency of 2 collectives over 8 ranks (5 warmups / 20 trials):

| payload | all_reduce busbw | all_reduce median | all_gather busbw | all_gather median |
| ------: | ---------------: | ----------------: | ---------------: | ----------------: |
|      4B |                  |              12.3 |                  |                   |
|  32KiB |             1.44 |              39.9 |             1.40 |              20.2 |
"""
    reduce, gather = read(text).tables
    assert [row.figures[0].time.value for row in reduce.rows] == [
        pytest.approx(12.3e-6),
        pytest.approx(39.9e-6),
    ]  # type: ignore[union-attr]
    assert [row.size_bytes for row in gather.rows] == [32768]
    text = """The average bandwidth and the per-call latency of all_gather over 8 ranks (5 warmups):

| payload |    busbw   |    algbw   | latency median |    p99    |    mean   | calls |
| ------: | ---------: | ---------: | -------------: | --------: | --------: | ----: |
|     1KiB |            |            |         20.5us |    22.0us |    20.6us |  1000 |
|    1MiB |   9.18GBps |  10.49GBps |        103.0us |   111.0us |   104.0us |   100 |
"""
    found = only(text)
    assert (found.collective, found.ranks) == ("all_gather", 8)
    assert [row.figures[0].time.value for row in found.rows] == [
        pytest.approx(20.5e-6),
        pytest.approx(103e-6),
    ]  # type: ignore[union-attr]
    assert not any(row.figures[0].fault for row in found.rows)


def test_escapes_carriage_returns_and_other_encodings() -> None:
    text = table().replace("#  Rank  0", "\x1b[32m#  Rank  0\x1b[0m").replace("\n", "\r\n")
    assert_as_printed(only("\ufeff" + text))
    assert_as_printed(only("progress 1%\rprogress 99%\r" + text))
    log = parse(b"\xff\xfe\x80" + table().encode("latin-1"), "x.log")
    assert log.rows == len(SIZES)


# ------------------------------------------------------------------------------------ genuine outputs


@pytest.mark.parametrize(
    ("name", "rows", "ranks", "largest_us"),
    [
        ("30-h100-p5-1n8g-allreduce-tagoutput.log", 32, 8, (62239, 62200)),
        ("31-h100-p5-2n16g-allreduce-tagoutput-indented-elided.log", 7, 16, (9197.5, 9195.2)),
        ("32-t4-efa-2n2g-allreduce-tagoutput-ncclinfo.log", 31, 2, (344981, 344454)),
    ],
)
def test_genuine_logs(name: str, rows: int, ranks: int, largest_us: tuple[float, float]) -> None:
    found = only((GENUINE / name).read_text(), name, ranks=ranks)
    assert (found.collective, found.ranks, len(found.rows)) == ("all_reduce", ranks, rows)
    assert not any(figure.fault for row in found.rows for figure in row.figures)
    times = [figure.time.value * 1e6 for figure in found.rows[-1].figures if figure.time]
    assert times == [pytest.approx(us, abs=1e-6) for us in largest_us]


FOLDER = os.environ.get("DTBENCH_LOGS", "")


@pytest.mark.skipif(not FOLDER, reason="DTBENCH_LOGS names no folder of genuine logs with an INDEX.md")
def test_every_row_of_a_folder_of_genuine_logs() -> None:
    """INDEX.md is a table: | file | rows | ...; rows is - where a file is of another kind."""
    wanted = {}
    for line in (Path(FOLDER) / "INDEX.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 2 and cells[1].isdigit() and (Path(FOLDER) / cells[0]).is_file():
            wanted[cells[0]] = int(cells[1])
    assert wanted
    for name, rows in wanted.items():
        log = parse((Path(FOLDER) / name).read_bytes(), name)
        checks.check(log)
        found = sum(len(t.rows) for t in log.tables if t.tool in ("nccl-tests", "rccl-tests"))
        assert found == rows or all("without the header" in t.refusal for t in log.tables), name
        faults = {f.fault.split(":")[0] for t in log.tables for row in t.rows for f in row.figures if f.fault}
        assert faults <= {"the data were wrong"}, name  # what the benchmark itself found
        reasons = ("one rank", "give --ranks N", "without the header")
        assert all(not t.refusal or any(why in t.refusal for why in reasons) for t in log.tables), name
