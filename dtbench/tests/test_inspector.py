"""`dtbench profile` of logs of NCCL's inspector.

`made_up_inspector` writes them with the keys of NCCL's plugins/profiler/inspector/inspector_json.cc. Sizes and bus
bandwidths follow inspectorComputeOpBw in inspector.cc, and the size of a call inspectorPluginCollInfoInit in
inspector_plugin.cc.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dtbench.errors import DtbenchError
from dtbench.records.job import Collective, Job, JobAnalysis
from dtbench.reporting.html import Sources, render
from dtbench.reporting.job_tables import headline
from dtbench.tests.html_page import HOSTILE, Page, harmless
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_inspector import FACTORS, Line, job, line, text_of, write
from dtbench.traces import inspector
from dtbench.traces.inspector import read_logs
from dtbench.traces.profile_job import job_in

TOPOLOGY = Path(__file__).parents[2] / "results" / "baseline-cpu-gloo-4ranks.topology.json"


def read(tmp_path: Path, *logs: Sequence[Line]) -> Job:
    return read_logs([write(tmp_path, lines) for lines in logs])


def calls_of(job: Job, rank: int = 0) -> dict[tuple[str, int | None], Collective]:
    return {(call.collective, call.bytes): call for call in job.collectives if call.rank == rank}


def note(job: Job, words: str) -> str:
    """Returns the count of the note with these words; "" if there is none."""
    return next((text.rpartition(" ")[2] for text in job.notes if words in text), "")


@pytest.mark.parametrize("function", FACTORS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("us", [11, 977, 61974])
def test_busbw_at_the_logged_time_is_that_of_the_log(
    tmp_path: Path, function: str, ranks: int, us: int
) -> None:
    peer = 1 if function in ("Send", "Recv") else None
    entry = line(function, size=3 * 2**20 + 4, us=us, ranks=ranks, peer=peer)
    (call,) = read(tmp_path, [entry]).collectives
    logged = next(entry[key] for key in ("coll_perf", "p2p_perf") if key in entry)
    assert call.busbw == pytest.approx(1e9 * next(v for k, v in logged.items() if "busbw" in k), abs=1e3)


@pytest.mark.parametrize(
    ("function", "collective", "share"),
    [
        ("AllReduce", "all_reduce", 1),
        ("AllGather", "all_gather", 8),
        ("ReduceScatter", "reduce_scatter", 8),
        ("Broadcast", "broadcast", 1),
        ("Reduce", "reduce", 1),
    ],
)
def test_bytes_are_the_larger_of_input_and_output(
    tmp_path: Path, function: str, collective: str, share: int
) -> None:
    (call,) = read(tmp_path, [line(function, size=2**20, ranks=8)]).collectives
    assert (call.collective, call.bytes, call.group_size) == (collective, share * 2**20, 8)


@pytest.mark.parametrize(("size", "bytes_"), [(1000.5, 1000), (1.5, 1), (0.5, None)])
def test_fractional_sizes_of_a_damaged_log_are_rounded_down(
    tmp_path: Path, size: float, bytes_: int | None
) -> None:
    entry = line(size=2**20)
    entry["coll_perf"] = {key: value for key, value in entry["coll_perf"].items() if "busbw" not in key}
    entry["coll_perf"]["coll_msg_size_bytes"] = size
    (call,) = read(tmp_path, [entry]).collectives
    assert call.bytes == bytes_


def test_times_are_those_of_the_calls(tmp_path: Path) -> None:
    (call,) = read(tmp_path, [line(sn=sn, us=us) for sn, us in enumerate((100, 400, 200, 1000))]).collectives
    assert (call.count, call.timed, call.in_steps, call.dtype) == (4, None, None, None)
    assert (call.time_s, call.median_s, call.best_s) == pytest.approx((1.7e-3, 0.3e-3, 0.1e-3))


@pytest.mark.parametrize(
    "fields",
    [
        {"size": 2**64 - 2**20},  # of NCCL's uint8, whose size the plugin takes as -1
        {"coll": "Invalid"},
        {"coll": "All2All"},
        {"busbw_gbs": 20.0},
    ],
)
def test_untrusted_size_is_unknown_and_noted(tmp_path: Path, fields: dict[str, Any]) -> None:
    found = read(tmp_path, [line(), line(**{"sn": 1} | fields)])
    (call,) = (call for call in found.collectives if call.bytes is None)
    assert (call.count, call.busbw, call.time_s) == (1, None, pytest.approx(1e-4))
    assert note(found, "of unknown size") == "1"


@pytest.mark.parametrize("us", [1, 7, 100])
def test_busbw_of_a_time_before_rounding_is_trusted(tmp_path: Path, us: int) -> None:
    """A version whose bus bandwidth follows from nanoseconds prints at most that of 1 us more."""
    later = line(us=us + 0.999)["coll_perf"]["coll_busbw_gbs"]
    found = read(tmp_path, *([line(us=us, busbw_gbs=later, rank=rank)] for rank in range(2)))
    assert not found.notes and {call.bytes for call in found.collectives} == {2**20}


def test_transfer_is_the_shortest_time_over_all_ranks(tmp_path: Path) -> None:
    job(tmp_path, calls=10, late=2)
    found = job_in([tmp_path])
    by_rank = {
        (c.rank, c.mesh_dim): (c.mean_s, c.transfer_s)
        for c in found.collectives
        if c.mesh_dim != "group of 4"
    }
    waiting = {key for key, (mean_s, transfer_s) in by_rank.items() if mean_s > (transfer_s or 0) + 1e-6}
    assert waiting == {(0, "dp"), (3, "tp")}  # rank 2 shares its group over dp with 0 and over tp with 3
    assert [transfer_s for _, transfer_s in by_rank.values()] == [pytest.approx(200e-6)] * 8
    assert not found.notes


def test_calls_of_each_collective_are_numbered_separately(tmp_path: Path) -> None:
    """NCCL has a counter for each function of a communicator (ncclProfilerStartTaskEvents)."""
    logs = [
        [
            line("AllGather", 0, us=50 + 10 * rank, rank=rank),
            line("AllReduce", 0, us=90 - 10 * rank, rank=rank),
        ]
        for rank in range(2)
    ]
    found = read(tmp_path, *logs)
    assert {c.collective: c.transfer_s for c in found.collectives} == pytest.approx(
        {"all_gather": 50e-6, "all_reduce": 80e-6}
    )
    assert not found.notes


@pytest.mark.parametrize("function", ["Broadcast", "Reduce"])
def test_transfer_is_unknown_where_ranks_may_leave_early(tmp_path: Path, function: str) -> None:
    found = read(tmp_path, *([line(function, rank=rank)] for rank in range(2)))
    assert [call.transfer_s for call in found.collectives] == [None, None] and not found.notes


def test_transfer_needs_all_ranks_of_a_call(tmp_path: Path) -> None:
    logs = [[line(sn=sn, us=100 + rank, rank=rank) for sn in range(5 - rank)] for rank in range(2)]
    found = read(tmp_path, *logs)
    assert [(c.count, c.transfer_s) for c in found.collectives] == [(5, 100e-6), (4, 100e-6)]
    assert note(found, "without a time without waiting") == "1"
    alone = read(tmp_path, logs[0])
    assert [c.transfer_s for c in alone.collectives] == [None]
    assert "have logs of 1 of 2 ranks" in alone.notes and note(alone, "without a time without waiting") == "5"


@pytest.mark.parametrize(
    ("name", "mesh_dim"),
    [
        ("mesh_tp:5", "tp"),
        ("mesh_dp_shard:0a1b", "dp_shard"),
        ("default_pg:0", "group of 2, stride 2"),
        ("undefined:3", "group of 2, stride 2"),
        ("unknown", "group of 2, stride 2"),
        (None, "group of 2, stride 2"),  # before NCCL 2.30
        ("tensor_parallel", "tensor_parallel"),
        ("DP Group 0", "DP Group 0"),
    ],
)
def test_mesh_dim_follows_from_the_name_of_the_communicator(
    tmp_path: Path, name: str | None, mesh_dim: str
) -> None:
    logs = [
        [
            line("AllGather", rank=rank, ranks=4, process=("n", rank)),
            line(
                "AllReduce",
                rank=rank // 2,
                ranks=2,
                comm=f"0xc{rank % 2}",
                name=name,
                process=("n", rank),
            ),
        ]
        for rank in range(4)
    ]
    found = read(tmp_path, *logs)
    assert {c.mesh_dim for c in found.collectives if c.collective == "all_reduce"} == {mesh_dim}


def test_global_rank_is_that_of_the_widest_communicator(tmp_path: Path) -> None:
    paths = job(tmp_path)
    found = read_logs(paths[::-1])
    assert [(r.rank, r.host, r.source) for r in found.ranks] == [
        (rank, f"node{rank // 2}", path.name) for rank, path in enumerate(paths)
    ]
    assert (found.world_size, found.backend, found.label) == (4, "nccl", tmp_path.name)


def test_ranks_are_numbered_if_no_communicator_has_all(tmp_path: Path) -> None:
    logs = [[line(rank=n % 2, comm=f"0x{n // 2}", process=("ba"[n // 2], n))] for n in range(4)]
    found = read(tmp_path, *logs)
    assert [(r.rank, r.host) for r in found.ranks] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert note(found, "numbered by host") == "4" and {c.mesh_dim for c in found.collectives} == {
        "group of 2"
    }


def test_process_with_several_gpus_needs_a_single_communicator(tmp_path: Path) -> None:
    lines = [line(rank=rank, us=100 + rank, process=("n", 1)) for rank in range(2)]
    found = read(tmp_path, lines)
    assert [(c.rank, c.mean_s, c.transfer_s) for c in found.collectives] == [
        (0, 100e-6, 100e-6),
        (1, pytest.approx(101e-6), 100e-6),
    ]
    with pytest.raises(DtbenchError, match="which GPU made a call"):
        read(tmp_path, [*lines, line(comm="0xb", process=("n", 1))])


def test_files_of_one_process_add_up_and_repeated_lines_count_once(tmp_path: Path) -> None:
    lines = [line(sn=sn) for sn in range(6)]
    files = [write(tmp_path, lines[:4], "a.log"), write(tmp_path, lines[2:], "b.jsonl.gz", packed=True)]
    found = read_logs(files)
    assert [call.count for call in found.collectives] == [6] and note(found, "repeat a call") == "2"


def test_verbose_lines_and_lines_of_other_kinds_are_accepted(tmp_path: Path) -> None:
    other = {"header": line()["header"], "metadata": line()["metadata"], "dump_stats": {"dropped": 3}}
    newer = line(sn=2, algo="RING", proto="LL")
    found = read(tmp_path, [line(verbose=True), other, newer, line("Send", peer=1, verbose=True)])
    assert {c.collective: c.count for c in found.collectives} == {"all_reduce": 2, "send": 1}
    assert note(found, "between the first and the last") == "1"  # number 1 is missing


def test_missing_calls_are_counted_by_number(tmp_path: Path) -> None:
    lines = [line(sn=sn) for sn in (3, 4, 9)]
    lines += [line(("Send", "Recv")[sn % 2], sn, peer=1) for sn in range(1, 5)]  # numbered together
    assert note(read(tmp_path, lines), "NCCL_INSPECTOR_DUMP_MIN_SIZE_BYTES") == "4"


def test_sends_to_itself_and_calls_without_time_are_excluded(tmp_path: Path) -> None:
    lines = [line("Send", 1, peer=0), line("Send", 2, peer=1), line(us=0), line(sn=1)]
    found = read(tmp_path, lines)
    assert {c.collective: c.count for c in found.collectives} == {"send": 1, "all_reduce": 1}
    assert (note(found, "to itself"), note(found, "time of 0")) == ("1", "1")


@pytest.mark.parametrize("source", ["kernel_cpu", "collective_cpu", None])
def test_times_of_another_clock_are_noted(tmp_path: Path, source: str | None) -> None:
    entry = line(timing_source=source)
    if source is None:  # as in the example of the plugin's README
        del entry["coll_perf"]["coll_timing_source"]
    assert note(read(tmp_path, [line(sn=1), entry]), "not timed by the GPU") == "1"


TORN = text_of([line(sn=n) for n in range(4)])[:-40]


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (TORN, 3),
        (TORN + b"\n" + text_of([line(sn=9)]), 4),
        (b"\xff\xfe{}\n" + text_of([line()]), 1),
        (b"[" * 10**5 + b"\n" + text_of([line()]), 1),
        (text_of([line(sn=-1), line(us=-1), line(rank=-1), line(ranks=-1), line(), line(sn=2**60)]), 1),
        (text_of([line(), line(sn=1)]).replace(b'"coll_sn":1,', b'"coll_sn":"1",'), 1),
        (text_of([line(), {"header": {"id": "0x1"}}]), 1),
    ],
)
def test_damaged_lines_are_excluded_and_noted(tmp_path: Path, data: bytes, count: int) -> None:
    (tmp_path / "h-pid1.log").write_bytes(data)
    found = read_logs([tmp_path / "h-pid1.log"])
    assert sum(call.count for call in found.collectives) == count and note(found, "damaged or torn")


def test_log_with_a_cut_off_end_of_gzip_is_read(tmp_path: Path) -> None:
    text = text_of([line(sn=sn, us=100 + sn * 7 % 90) for sn in range(3000)])
    (tmp_path / "h.log.gz").write_bytes(gzip.compress(text)[:-2000])
    found = read_logs([tmp_path / "h.log.gz"])
    assert (
        100 < sum(call.count for call in found.collectives) < 3000 and note(found, "compressed logs") == "1"
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.prom", 'nccl_bus_bandwidth_gbs{version="v5.1",collective="AllReduce"} 678.263\n'),
        ("x.log", "step 1 loss 2.3\n"),
        ("x.log", ""),
        ("x.log", '{"header": {}}\n'),
        ("x.log.gz", "no gzip"),
        ("x.log", "{" * 10**5),
        ("missing.log", None),
    ],
)
@pytest.mark.parametrize("with_log", [False, True])
def test_profile_refuses_other_files_in_one_line(
    dtbench: Cli, name: str, text: str | None, with_log: bool
) -> None:
    if text is not None:
        Path(name).write_text(text)
    targets = [name, str(write(Path(), [line()]))] if with_log else [name]
    code, out, err = dtbench("profile", *targets)
    if with_log and text == "":
        assert code == 0 and "1 call in the logs" in out  # a process without calls
        return
    assert code == 2 and err.count("\n") == 1 and name in err and "NCCL's inspector" in err


def test_log_of_newlines_or_a_huge_line_ends_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector, "_MAX_DAMAGED_LINES", 1000)
    for data in (b"\n" * 10**6, text_of([line()]) + b"\n" * 10**6, text_of([line()]) + b"0" * 2**21):
        (tmp_path / "h.log.gz").write_bytes(gzip.compress(data))
        with pytest.raises(DtbenchError, match=r"of 100\d lines are damaged|line 2 is longer"):
            read_logs([tmp_path / "h.log.gz"])


def test_folder_of_logs_skips_other_files_and_prefers_traces(tmp_path: Path) -> None:
    job(tmp_path)
    (tmp_path / "train.log").write_text("step 1\n")
    (tmp_path / "run.jsonl").write_text('{"kind": "run"}\n')
    assert job_in([tmp_path]).lacks_times
    (tmp_path / "rank0.json").write_text("{}")
    with pytest.raises(DtbenchError, match="not a trace"):
        job_in([tmp_path])


def test_unknown_times_are_none_in_json_and_question_marks_in_tables(dtbench: Cli) -> None:
    Path("logs").mkdir()
    job(Path("logs"))
    content = json.loads(dtbench("profile", "logs", "--json")[1])
    unknown = (
        "step_s",
        "span_s",
        "computation_s",
        "communication_s",
        "exposed_s",
        "copy_s",
        "idle_s",
        "host_bound_s",
    )
    assert {rank[name] for rank in content["ranks"] for name in unknown} == {None}
    assert {call["dtype"] for call in content["collectives"]} == {None}
    out = dtbench("profile", "logs")[1]
    assert "tp          2         10  160.0 MiB  ?          ?        ?             ?" in out
    assert "tp          all_reduce      ?      16.00 MiB     10  2.10 ms    210 µs           200 µs" in out
    assert "84 calls in the logs" in out and "5% of the time in collectives is waiting" in " ".join(
        out.split()
    )
    assert "% of it is exposed" not in out and " 0 s" not in out and "0 ns" not in out


def test_profile_of_logs_is_kept_shown_and_reported(dtbench: Cli) -> None:
    Path("logs").mkdir()
    paths = job(Path("logs"))
    code, out, _ = dtbench("profile", *map(str, paths), "-o", "kept")
    assert code == 0 and dtbench("show", "kept")[1] == out == dtbench("profile", "kept")[1]
    kept = msgspec.json.decode(Path("kept/job.json").read_bytes(), type=Job)
    assert kept == job_in(paths) and headline(kept)[0] == "?"
    assert dtbench("report", "kept", "--topology", str(TOPOLOGY), "-o", "page.html")[0] == 0
    page = Page(Path("page.html").read_text())
    assert "84 calls in the logs" in page.text and "node0-pid100.log" in page.text
    assert "Perfetto" not in page.text and "0% of the step" not in page.text


def test_profile_of_logs_compares_bandwidths_and_bases(dtbench: Cli) -> None:
    for folder, calls in (("head", 10), ("base", 12)):
        Path(folder).mkdir()
        job(Path(folder), calls)
    code, out, _ = dtbench("profile", "head", "--base", "head", "--topology", str(TOPOLOGY))
    assert code == 0 and "of calibrated" in out and "Base → head" not in out
    code, out, _ = dtbench("profile", "head", "--base", "base")
    assert code == 1 and "10 calls instead of 12" in out
    code, _, err = dtbench("profile", "head", "--model", "llama-8b", "--layout", "tp=2,fsdp=2")
    assert code == 2 and "no steps" in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["import T -o x", "show T", "report T -o x", "run T", "compare T T"])
@pytest.mark.parametrize("name", ["h-pid1.log", "h-pid1.log.gz"])
def test_other_commands_refuse_a_log_and_name_profile(dtbench: Cli, command: str, name: str) -> None:
    write(Path(), [line()], name, packed=name.endswith("gz"))
    code, _, err = dtbench(*(name if word == "T" else word for word in command.split()))
    assert code == 2 and err.count("\n") == 1
    assert f"{name} is a log of NCCL's inspector, expected" in err and f"`dtbench profile {name}`" in err


def test_hostile_names_are_printed_escaped(dtbench: Cli) -> None:
    write(Path(), [line(name=HOSTILE, process=(HOSTILE, 1), rank=rank) for rank in range(2)], "h.log")
    code, out, _ = dtbench("profile", "h.log")
    assert code == 0 and all(text.isprintable() for text in out.splitlines())
    harmless(render(Sources(job=job_in([Path("h.log")]), analysis=JobAnalysis(0))))
