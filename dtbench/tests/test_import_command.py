"""`dtbench import`, from logs to constants."""

import io
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, EXIT_USAGE
from dtbench.importers import convert
from dtbench.records.run import read_run
from dtbench.records.topology import read_topology
from dtbench.tests.made_up import Cli, ring_us
from dtbench.tests.made_up_logs import (
    DEEPSPEED,
    DEEPSPEED_ROW,
    ML_ENGINEERING,
    OSU,
    SIZES,
    LogLayout,
    document,
    json_text,
    rccl_csv,
    read,
    table,
)

RING = ("all_reduce", "all_gather", "reduce_scatter")


def ring(ranks: int = 8, hosts: int = 1, bandwidth: float = 100e9, latency_us: float = 2.0) -> str:
    """Returns three tables with the times of torch's own formula."""
    sizes = tuple(size // (4 * ranks) * 4 * ranks for size in SIZES[::2])
    return "\n".join(
        table(
            name,
            ranks,
            sizes,
            hosts=hosts,
            time=lambda size, _in_place, name=name: ring_us(name, size, ranks, bandwidth / 2**30, latency_us),  # type: ignore[misc]
        )
        for name in RING
    )


def test_import_reads_standard_input(dtbench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("nccl.log").write_text(ring())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(ring().encode())))
    assert dtbench("import", "nccl.log", "-o", "run.jsonl")[0] == EXIT_OK
    assert dtbench("import", "-", "-o", "piped.jsonl")[0] == EXIT_OK
    results = read_run("run.jsonl").results
    assert results and results == read_run("piped.jsonl").results


def test_import_then_calibrate_gives_constants(dtbench: Cli) -> None:
    Path("nccl.log").write_text(ring(hosts=2))
    code, out, err = dtbench("import", "nccl.log", "-o", "run.jsonl")
    assert (code, err) == (EXIT_OK, "")
    assert "nccl.log: nccl-tests text, 15 rows" in out and "all_gather among 8 ranks on 2 host(s)" in out
    assert "wrote 30 results to run.jsonl, 15 of which `dtbench calibrate` can use" in out
    run = read_run("run.jsonl")
    header = run.header
    assert run.complete and [gpu.name for gpu in header.machine.gpus] == ["NVIDIA H100"] * 4
    assert (header.versions["nccl"], header.versions["backend"]) == ("2.28.7", "nccl")
    assert (header.imported[0].rows, header.mesh.shape) == (15, (8,))
    for command in (
        "calibrate run.jsonl -o t.json",
        "show run.jsonl",
        "report run.jsonl --topology t.json -o page.html",
    ):
        assert dtbench(*command.split())[0] == EXIT_OK
    [dim] = read_topology("t.json").dims
    # 100e9 bytes/s are 93.1 GiB/s: torch's formula divides by GiB.
    assert (dim.bandwidth_GiBps, dim.latency_us_per_hop) == pytest.approx((100e9 / 2**30, 2.0), rel=0.02)
    assert (dim.ranks, dim.layout.hosts_per_group, dim.builtin.layout) == (8, (2, 2), "inter-host")


def test_main_suite_contains_the_placement_that_dtensor_uses() -> None:
    """all_reduce in place, all_gather out of place, sums; other results get another suite."""
    log = read(ring(2) + table("all_reduce", 2, redop="prod") + table("reduce", 2))
    results = convert.to_run([log], [])[1]
    main, other = (
        {
            (r.name, r.params["in_place"], r.params.get("redop"))
            for r in results
            if (r.suite == "collectives") == is_main
        }
        for is_main in (True, False)
    )
    assert main == {
        ("all_reduce", True, None),
        ("all_gather", False, None),
        ("reduce_scatter", False, None),
        ("reduce", False, None),
    }
    assert {("all_reduce", True, "prod"), ("all_gather", True, None)} <= other
    # nccl-tests launches back to back, and does not print the time of each rank.
    kinds = {(r.params["mode"], r.params["groups"], r.impl) for r in results}
    assert kinds == {("back_to_back", "together", "nccl-tests")}
    assert len({r.key for r in results}) == len(results)


def test_distinct_logs_count_as_launches(dtbench: Cli) -> None:
    for i in range(3):
        Path(f"{i}.log").write_text(table() + f"run {i}\n")
    assert dtbench("import", "0.log", "1.log", "2.log", "-o", "run.jsonl")[0] == EXIT_OK
    run = read_run("run.jsonl")
    assert (run.header.launches, {result.launch for result in run.results}) == (3, {0, 1, 2})


def test_same_log_twice_is_refused(dtbench: Cli) -> None:
    for name in ("a", "copy"):
        Path(f"{name}.log").write_text(table())
        assert dtbench("import", f"{name}.log", "-o", f"{name}.jsonl")[0] == EXIT_OK
    for command, message in (
        ("import a.log copy.log -o other.jsonl", "are the same log: give it once"),
        ("calibrate a.jsonl copy.jsonl -o other.jsonl", "are the same run"),
    ):
        code, _, err = dtbench(*command.split())
        assert code == EXIT_USAGE and message in err and not Path("other.jsonl").exists()


@pytest.mark.parametrize(
    ("text", "args", "says"),
    [
        ("nothing\n", "", "contains no table of a supported benchmark"),
        (json_text()[:2000], "", "is not a complete JSON file of nccl-tests (-J): not JSON"),
        (table("all_reduce", 8) + table("all_reduce", 2), "", "have different ranks (8 and 2)"),
        (table() + table(hosts=2), "", "have different hosts (1 host(s), in the order 0, 0"),
        (table() + table().replace("H100", "A100"), "", "different device names (NVIDIA H100 and NVIDIA A100)"),
        (table(), "--ranks 4", "--ranks 4 contradicts the log: the list of ranks gives 8"),
        (table(), "--collective sendrecv", "--collective sendrecv contradicts the log, which names all_reduce"),
        (table(), "--dim tp", "--dim tp requires a mesh"),
        (table(), "--mesh dp=4", "its 8 ranks do not match --mesh dp=4"),
        (table(), "--mesh dp=8,tp=8", "its 8 ranks match dp and tp: choose one with --dim"),
        (table(), "--mesh dp=8 --dim tp", "--dim tp is not a dim of --mesh dp=8"),
    ],
)  # fmt: skip
def test_invalid_input_is_refused_in_one_line(dtbench: Cli, text: str, args: str, says: str) -> None:
    Path("x.log").write_text(text)
    code, out, err = dtbench("import", "x.log", "-o", "run.jsonl", *args.split())
    assert (code, out) == (EXIT_USAGE, "") and err.count("\n") == 1 and says in err
    assert not Path("run.jsonl").exists()


def test_logs_are_assigned_to_mesh_dims(dtbench: Cli) -> None:
    """8 ranks on one host are tp, 4 ranks on 4 hosts are dp: together they determine the hosts of all ranks."""
    Path("tp.log").write_text(ring(8))
    Path("dp.log").write_text(ring(4, hosts=4, bandwidth=10e9, latency_us=9.0))
    for command in (
        "import tp.log dp.log --mesh dp=4,tp=8 -o run.jsonl",
        "calibrate run.jsonl -o t.json",
        "import tp.log --mesh dp=8,tp=8 --dim tp -o one.jsonl",
    ):
        assert dtbench(*command.split())[0] == EXIT_OK
    run = read_run("run.jsonl")
    hosts = [rank.host for rank in run.header.ranks]
    assert len(hosts) == 32 and hosts[:8] == ["host0"] * 8 and len(set(hosts)) == 4
    assert {r.params["groups"] for r in run.results} == {"alone"}
    dims = [
        (dim.name, dim.layout.hosts_per_group, dim.bandwidth_GiBps) for dim in read_topology("t.json").dims
    ]
    dp_GiBps, tp_GiBps = (pytest.approx(rate / 2**30, rel=0.01) for rate in (10e9, 100e9))  # noqa: N806
    assert dims == [("dp", (4, 4), dp_GiBps), ("tp", (1, 1), tp_GiBps)]
    assert read_run("one.jsonl").header.ranks == ()  # the hosts of dp are unknown


_OF_EACH_TOOL = {
    "nccl-tests text": lambda wrong: table(wrong=lambda *_: "5" if wrong else "0"),
    "nccl-tests JSON": lambda wrong: json_text(
        results=[
            entry | {place: entry[place] | {"nwrong": 5.0 * wrong} for place in ("out_of_place", "in_place")}
            for entry in document()["results"]
        ]
    ),
    "rccl-tests CSV": lambda wrong: rccl_csv(
        "collective,ranks,size,type,redop,inplace,time,algbw,busbw,#wrong", "AllReduce,8,{}"
    ).replace('"0"', '"5"' if wrong else '"0"'),
    "DeepSpeed": lambda wrong: (
        DEEPSPEED.format(name="all_reduce")
        + DEEPSPEED_ROW.replace("167.772", "16.7772" if wrong else "167.772")
    ),
    "OSU": lambda wrong: re.sub(
        r"(?m)^(\d+ .*)$",
        rf"\1  {'Fail' if wrong else 'Pass'}",
        OSU.format(program="allreduce", title="Allreduce").replace("Iterations", "Iterations  Validation"),
    ),
    "ml-engineering": lambda wrong: re.sub(r".*32KiB.*\n", "", ML_ENGINEERING).replace(
        "15.73GBps", "nanGBps" if wrong else "15.73GBps"
    ),
}


@pytest.mark.parametrize("beside_a_good_log", [False, True])
@pytest.mark.parametrize("tool", _OF_EACH_TOOL)
def test_log_of_refused_rows_is_recorded_and_exits_with_5(
    dtbench: Cli, tool: str, beside_a_good_log: bool
) -> None:
    """The same holds for a log beside a good log."""
    good, bad = (_OF_EACH_TOOL[tool](wrong) for wrong in (False, True))
    Path("good.log").write_text(good)
    Path("bad.log").write_text(bad)
    assert dtbench("import", "good.log", "-o", "good.jsonl")[0] == EXIT_OK
    code, out, err = dtbench(
        "import", *(["bad.log", "good.log"] if beside_a_good_log else ["bad.log"]), "-o", "run.jsonl"
    )
    assert (code, err) == (EXIT_CASE_FAILED, "")
    rows = re.search(rf"bad.log: .*{tool}, (\d+) rows, (\d+) of them refused\n", out)
    assert rows and int(rows[1]) == int(rows[2]) > 0
    count = len(read_run("good.jsonl").results)
    are_refused = Counter(r.status != "ok" and bool(r.reason) for r in read_run("run.jsonl").results)
    assert are_refused == {True: count, **({False: count} if beside_a_good_log else {})}


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        pytest.param(
            table(wrong=lambda size, in_place: "1.04858e+06" if size == SIZES[-1] and in_place else "0"),
            ["! line 26: the data were wrong: wrong elements: 1.04858e+06"],
            id="wrong data",
        ),
        pytest.param(
            table() + table().replace("(us)", "(ms)"),
            ["nccl-tests text, 18 rows, 9 of them refused", "9 rows NOT USED: line"],
            id="a refused table beside a good one",
        ),
        pytest.param(
            table(layout=LogLayout(foot=False)).rstrip()[:-30],
            ["9 rows, 1 of them refused", "the log ends inside it"],
            id="a torn last row",
        ),
        pytest.param(
            table().replace("# Avg bus", "node: Test failure \x9b2J\u202eabc\n# Avg bus"),
            ["Test failure"],
            id="a failure with control characters",
        ),
    ],
)
def test_import_of_faulty_rows_exits_with_5(dtbench: Cli, text: str, messages: list[str]) -> None:
    Path("x\x1b[2J.log").write_text(text)
    code, out, _ = dtbench("import", "x\x1b[2J.log", "-o", "run.jsonl")
    assert code == EXIT_CASE_FAILED and all(message in out for message in messages)
    assert all(c.isprintable() or c == "\n" for c in out)
    assert {r.time_s for r in read_run("run.jsonl").results if r.status != "ok"} <= {None}


def docker(line: str, stream: str = "stdout") -> str:
    return json.dumps({"log": line, "stream": stream, "time": "2026-01-01T12:00:00.123456789Z"}) + "\n"


def in_docker(text: str) -> str:
    """Returns the text as Docker's json-file driver writes it: long lines in two entries, and a line of stderr."""
    lines = text.splitlines(keepends=True)
    entries = [docker(part) for line in lines for part in (line[:60], line[60:]) if part]
    return docker("warming up\n", "stderr") * (text[0] != "{") + "".join(entries)


def in_kubernetes(text: str) -> str:
    """Returns the text as a CRI runtime logs it: a long line has two parts."""
    time = "2026-01-01T12:00:00.123456789Z"
    parts = [
        f"{time} stdout {'P' if is_first and line[60:] else 'F'} {part}\n"
        for line in text.splitlines()
        for is_first, part in ((True, line[:60]), (False, line[60:]))
        if is_first or part
    ]
    return f"{time} stderr F warming up\n" * (text[0] != "{") + "".join(parts)


@pytest.mark.parametrize("container", [docker, in_docker, in_kubernetes])
@pytest.mark.parametrize("tool", _OF_EACH_TOOL)
def test_container_logs_are_unwrapped(dtbench: Cli, tool: str, container: Callable[[str], str]) -> None:
    text = _OF_EACH_TOOL[tool](False)
    runs = []
    for name, log in (("plain", text), ("container", container(text))):  # docker: as a whole, in one entry
        Path(f"{name}.log").write_text(log)
        assert dtbench("import", f"{name}.log", "-o", f"{name}.jsonl")[0] == EXIT_OK
        run = read_run(f"{name}.jsonl")
        runs.append((run.results, run.header.mesh, run.header.ranks))
    assert runs[0] == runs[1]


def test_truncated_container_log_keeps_complete_lines(dtbench: Cli) -> None:
    Path("x.log").write_text("Defaulted container to worker\n" + in_docker(table()).rstrip("\n")[:-40])
    assert dtbench("import", "x.log", "-o", "run.jsonl")[0] == EXIT_OK
    assert len(read_run("run.jsonl").results) == 2 * len(SIZES)
