"""`dtbench import` from logs to constants, and `dtbench compare --reference`."""

from __future__ import annotations

import errno
import gzip
import io
import itertools
import json
import os
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from dtbench.comparison import references as reference
from dtbench.importers import convert
from dtbench.records.run import read_run
from dtbench.records.topology import read_topology
from dtbench.suite import MeshShape, Run
from dtbench.suite.errors import EXIT_CASE_FAILED, EXIT_NOTHING, EXIT_OK, EXIT_USAGE, UnreadableRunError
from dtbench.tests import made_up
from dtbench.tests.made_up import Cli
from dtbench.tests.made_up_logs import SIZES, json_text, read, side_by_side, table, time_us

RING = ("all_reduce", "all_gather", "reduce_scatter")


def ring(ranks: int = 8, hosts: int = 1, bandwidth: float = 100e9, latency_us: float = 2.0) -> str:
    """Three tables with the times of torch's own formula: S hops / n / bandwidth, and latency per hop."""

    def time(collective: str) -> Callable[[int, bool], float]:
        hops = (2 if collective == "all_reduce" else 1) * (ranks - 1)
        return lambda size, _in_place: 6.6 + hops * latency_us + size * hops / ranks / bandwidth * 1e6

    sizes = tuple(s // (4 * ranks) * 4 * ranks for s in SIZES[::2])
    return "\n".join(table(c, ranks, sizes, hosts=hosts, time=time(c)) for c in RING)


def test_logs_from_standard_input_and_packed_ones(dtbench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(ring().encode())
    Path("nccl.log.gz").write_bytes(packed)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(ring().encode())))
    assert dtbench("import", "nccl.log.gz", "-o", "packed.jsonl")[0] == EXIT_OK
    assert dtbench("import", "-", "-o", "piped.jsonl")[0] == EXIT_OK
    results = read_run("packed.jsonl").results
    assert results and results == read_run("piped.jsonl").results
    Path("nccl.log.gz").write_bytes(packed[:-20])
    code, _, err = dtbench("import", "nccl.log.gz", "-o", "cut.jsonl")
    assert code == EXIT_USAGE and "nccl.log.gz is damaged" in err and err.count("\n") == 1


def test_from_logs_to_constants_in_two_commands(dtbench: Cli) -> None:
    Path("nccl.log").write_text(ring(hosts=2))
    code, out, err = dtbench("import", "nccl.log", "-o", "run.jsonl")
    assert (code, err) == (EXIT_OK, "")
    assert "nccl.log: nccl-tests text, 15 rows" in out and "all_gather among 8 ranks on 2 host(s)" in out
    assert "30 figures are in run.jsonl, 15 of them for dtbench calibrate" in out
    run = read_run("run.jsonl")
    assert run.complete and [gpu.name for gpu in run.header.machine.gpus] == ["NVIDIA H100"] * 4
    assert run.header.versions["nccl"] == "2.28.7" and run.header.versions["backend"] == "nccl"
    assert run.header.imported[0].rows == 15 and run.header.mesh.shape == (8,)
    assert dtbench("calibrate", "run.jsonl", "-o", "t.json")[0] == EXIT_OK
    [dim] = read_topology("t.json").dims
    # 100e9 bytes/s are 93.1 GiB/s: torch's formula divides by GiB.
    assert dim.bandwidth_GiBps == pytest.approx(100e9 / 2**30, rel=0.01)
    assert dim.latency_us_per_hop == pytest.approx(2.0, rel=0.02)
    assert (dim.ranks, dim.layout.hosts_per_group, dim.builtin.layout) == (
        8,
        (2, 2),
        "inter-host",
    )
    assert dtbench("show", "run.jsonl")[0] == EXIT_OK
    assert dtbench("report", "run.jsonl", "--topology", "t.json", "-o", "page.html")[0] == EXIT_OK


def test_what_calibrate_gets_is_what_dtensor_does() -> None:
    """all_reduce in place, all_gather out of place, sums; the rest stands beside it."""
    log = read(ring(2) + table("all_reduce", 2, redop="prod") + table("reduce", 2))
    results = convert.to_run([log], [])[1]
    main = {
        (r.name, r.params["in_place"], r.params.get("redop")) for r in results if r.suite == "collectives"
    }
    out_of_place = ("all_gather", "reduce_scatter", "reduce")
    assert main == {("all_reduce", True, None), *((name, False, None) for name in out_of_place)}
    other = {
        (r.name, r.params["in_place"], r.params.get("redop")) for r in results if r.suite != "collectives"
    }
    assert ("all_reduce", True, "prod") in other and ("all_gather", True, None) in other
    assert len({r.key for r in results}) == len(results)
    # Back to back is how nccl-tests launches, and no rank's own time is known.
    assert {(r.params["mode"], r.params["groups"], r.impl) for r in results} == {
        ("back_to_back", "together", "nccl-tests")
    }


def test_repeated_logs_are_launches_and_the_same_log_is_none(dtbench: Cli) -> None:
    for i in range(3):
        Path(f"{i}.log").write_text(table() + f"run {i}\n")
    assert dtbench("import", "0.log", "1.log", "2.log", "-o", "run.jsonl")[0] == EXIT_OK
    run = read_run("run.jsonl")
    assert run.header.launches == 3 and {r.launch for r in run.results} == {0, 1, 2}
    Path("copy.log").write_bytes(Path("0.log").read_bytes())
    code, _, err = dtbench("import", "0.log", "copy.log", "-o", "other.jsonl")
    assert code == EXIT_USAGE and "are the same log: give it once" in err and not Path("other.jsonl").exists()
    # Nor is one log in two runs two launches.
    assert dtbench("import", "2.log", "1.log", "0.log", "-o", "again.jsonl")[0] == EXIT_OK
    code, _, err = dtbench("calibrate", "run.jsonl", "again.jsonl", "-o", "t.json")
    assert code == EXIT_USAGE and "are the same run" in err


def test_bad_rows_are_recorded_and_the_exit_code_says_so(dtbench: Cli) -> None:
    Path("x.log").write_text(
        table(wrong=lambda size, in_place: "1.04858e+06" if size == SIZES[-1] and in_place else "0")
    )
    code, out, _ = dtbench("import", "x.log", "-o", "run.jsonl")
    assert code == EXIT_CASE_FAILED and "! line 26: the data were wrong: wrong elements: 1.04858e+06" in out
    bad = [r for r in read_run("run.jsonl").results if r.status != "ok"]
    assert [(r.status, r.size_bytes, r.time_s) for r in bad] == [("wrong", SIZES[-1], None)]


def test_too_few_sizes_are_refused_by_calibrate(dtbench: Cli) -> None:
    Path("x.log").write_text(table(sizes=(2**20,)))
    assert dtbench("import", "x.log", "-o", "run.jsonl")[0] == EXIT_OK
    code, _, err = dtbench("calibrate", "run.jsonl", "-o", "t.json")
    assert code == EXIT_USAGE and "one size only: latency and bandwidth cannot be told apart" in err
    assert not Path("t.json").exists()


@pytest.mark.parametrize(
    ("text", "args", "says"),
    [
        ("nothing\n", "", "holds no table of a benchmark that is known"),
        (json_text()[:2000], "", "is not a whole JSON file of nccl-tests (-J): not JSON"),
        (table(ranks=1), "", "one rank: nothing is sent"),
        (table("all_reduce", 8) + table("all_reduce", 2), "", "different sizes (8 in x.log, 2 in x.log ranks)"),
        (table() + table(hosts=2), "", "x.log has 8 ranks on 1 host(s), x.log has them on 2"),
        (table() + table().replace("H100", "A100"), "", "different device names (NVIDIA H100 and NVIDIA A100)"),
        (table(), "--ranks 4", "--ranks 4 contradicts it: the list of ranks gives 8"),
        (table(), "--ranks 0", "Invalid value for '--ranks'"),
        (table(), "--collective sendrecv", "--collective sendrecv contradicts it: the log says all_reduce"),
        (table(), "--collective allreduce", "expected one of all_reduce"),
        (table(), "--dim tp", "--dim tp needs the mesh"),
        (table(), "--mesh dp=4", "its 8 ranks are no dim of --mesh dp=4"),
        (table(), "--mesh dp=8,tp=8", "its 8 ranks are those of dp and of tp: say which with --dim"),
        (table(), "--mesh dp=8 --dim tp", "--dim tp is no dim of --mesh dp=8"),
        (table(), "--mesh dp", "'dp' in --mesh dp is not a mesh dim"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(dtbench: Cli, text: str, args: str, says: str) -> None:
    Path("x.log").write_text(text)
    code, out, err = dtbench("import", "x.log", "-o", "run.jsonl", *args.split())
    assert (code, out) == (EXIT_USAGE, "") and err.count("\n") == 1 and says in err
    assert not Path("run.jsonl").exists()


@pytest.mark.parametrize("after", [0, 1, 2], ids=["header", "results", "end"])
def test_a_full_disk(dtbench: Cli, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    writes = itertools.count()

    def write(fd: int, data: bytes) -> int:
        if next(writes) >= after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, data)

    Path("x.log").write_text(table())
    monkeypatch.setattr("dtbench.records.run.os", types.SimpleNamespace(**vars(os) | {"write": write}))
    code, _, err = dtbench("import", "x.log", "-o", "run.jsonl")
    assert code == EXIT_USAGE and err.count("\n") == 1
    assert "no space left on device; nothing was written: make space, or give another -o" in err
    assert not Path("run.jsonl").exists()


def test_files_that_are_none_and_places_that_are_taken(dtbench: Cli) -> None:
    Path("x.log").write_text(table())
    Path("taken").write_text("something else\n")
    for args, says in (
        ("nosuch -o run.jsonl", "cannot read nosuch"),
        (". -o run.jsonl", ". is not a regular file"),
        ("x.log -o taken", "taken exists already: give another -o\n"),
        ("x.log -o nosuch/run.jsonl", "there is no folder nosuch"),
    ):
        code, _, err = dtbench("import", *args.split())
        assert code == EXIT_USAGE and says in err and err.count("\n") == 1
    assert Path("taken").read_text() == "something else\n"


def test_a_log_cannot_move_the_cursor(dtbench: Cli) -> None:
    text = table().replace("# Avg bus", "node: Test failure \x9b2J\u202eabc\n# Avg bus")
    Path("x\x1b[2J.log").write_text(text)
    code, out, _ = dtbench("import", "x\x1b[2J.log", "-o", "run.jsonl")
    assert code == EXIT_CASE_FAILED and "Test failure" in out
    assert all(c.isprintable() or c == "\n" for c in out)


def test_nothing_of_the_environment_is_in_the_run(dtbench: Cli) -> None:
    Path("x.json").write_text(json_text(version=3, average_bus_bandwidth={}))
    assert dtbench("import", "x.json", "-o", "run.jsonl")[0] == EXIT_OK
    text = Path("run.jsonl").read_text()
    assert "SECRET" not in text and "wJalr" not in text and "somebody" not in text
    run = read_run("run.jsonl")
    result = next(r for r in run.ok("collectives") if r.size_bytes == SIZES[0])
    assert result.time_s is not None and result.time_s.n == 3 and len(result.rank_samples_s) == 8
    assert set(result.rank_samples_s) == {str(rank) for rank in range(8)}


def test_dims_of_a_mesh_from_a_log_each(dtbench: Cli) -> None:
    """8 ranks of one host are tp, 4 ranks on 4 hosts are dp: hosts follow from both, and only from both."""
    Path("tp.log").write_text(ring(8))
    Path("dp.log").write_text(ring(4, hosts=4, bandwidth=10e9, latency_us=9.0))
    assert dtbench("import", "tp.log", "dp.log", "--mesh", "dp=4,tp=8", "-o", "run.jsonl")[0] == EXIT_OK
    run = read_run("run.jsonl")
    hosts = [rank.host for rank in run.header.ranks]
    assert len(hosts) == 32 and hosts[:8] == ["host0"] * 8 and len(set(hosts)) == 4
    assert {r.params["groups"] for r in run.results} == {"alone"}
    assert dtbench("calibrate", "run.jsonl", "-o", "t.json")[0] == EXIT_OK
    dp, tp = read_topology("t.json").dims
    spans = [(dim.name, dim.layout.hosts_per_group) for dim in (dp, tp)]
    assert spans == [("dp", (4, 4)), ("tp", (1, 1))]
    assert dp.bandwidth_GiBps == pytest.approx(10e9 / 2**30, rel=0.01)
    assert tp.bandwidth_GiBps == pytest.approx(100e9 / 2**30, rel=0.01)
    assert dtbench("import", "tp.log", "--mesh", "dp=8,tp=8", "--dim", "tp", "-o", "one.jsonl")[0] == EXIT_OK
    assert read_run("one.jsonl").header.ranks == ()  # dp's hosts are not known


def test_groups_side_by_side_make_a_mesh_of_two_dims() -> None:
    log = read(side_by_side())
    header, results = convert.to_run([log], [])
    assert header.mesh == MeshShape(dim_names=("group", "world"), shape=(2, 4))
    # The ranks stand in the order of the mesh: those of group 0, then those of group 1.
    assert [rank.host for rank in header.ranks] == ["node-0", "node-0", "node-1", "node-1"] * 2
    assert {r.params["groups"] for r in results} == {"together"}


# ----------------------------------------------------------------------------------- the reference table


def test_the_table_of_public_systems_is_sound() -> None:
    systems = reference.read_systems()
    assert len({s.name for s in systems}) == len(systems) >= 30
    for gpu, ranks in (
        ("A100", 8),
        ("H100", 8),
        ("H200", 8),
        ("B200", 8),
        ("GB200", 72),
        ("MI300X", 8),
        ("V100", 2),
    ):
        assert any(s.gpu == gpu and s.ranks == ranks for s in systems), gpu
    for system in systems:
        for name, known in system.collectives.items():
            assert known.source and len(known.points) >= 2, (system.name, name)
            for size, _ in known.points:
                busbw = system.busbw(name, size)
                assert busbw is not None and 1e5 < busbw < 1e12, (system.name, name, size)
    # A figure of a source, by hand: 8 GiB in 31294 us, seven quarters of it on the bus.
    p5 = next(s for s in systems if s.name == "8xH100-AWS-p5")
    assert p5.busbw("all_reduce", 2**33) == pytest.approx(2**33 / 31294e-6 * 1.75)
    between = p5.busbw("all_reduce", 3 * 2**31)
    assert between is not None and 4.7e11 < between < 4.85e11
    assert p5.busbw("all_reduce", 512) is None and p5.busbw("all_gather", 2**30) is None
    b200 = next(s for s in systems if s.name == "8xB200")  # two sizes, far apart: nothing between them
    assert b200.busbw("all_reduce", 1024) and b200.busbw("all_reduce", 2**20) is None


def test_a_run_beside_its_kind(dtbench: Cli) -> None:
    Path("x.log").write_text(table(sizes=(*SIZES, 2**30)))
    dtbench("import", "x.log", "-o", "run.jsonl")
    code, out, _ = dtbench("compare", "--reference", "run.jsonl")
    assert code == EXIT_OK and "8xH100-AWS-p5 (NVLink)" in out and "A100" not in out
    code, out, _ = dtbench("compare", "--reference", "run.jsonl", "--system", "8xA100-SXM4-40GB", "--json")
    made = json.loads(out)
    row = next(r for r in made["rows"] if r["size_bytes"] == 2**30)
    mine = 2**30 / (time_us(2**30, True) * 1e-6) * 1.75
    assert row["run_Bps"] == pytest.approx(mine, rel=1e-3)
    assert row["reference_Bps"] == pytest.approx(2**30 / 8176.5e-6 * 1.75, rel=1e-3)
    assert row["ratio"] == pytest.approx(mine / row["reference_Bps"])
    assert {s["name"] for s in made["systems"]} == {"8xA100-SXM4-40GB"}
    code, _, err = dtbench("compare", "--reference", "run.jsonl", "--system", "nosuch")
    assert code == EXIT_USAGE and "no public system is called 'nosuch'" in err
    Path("y.log").write_text(table(ranks=5))
    dtbench("import", "y.log", "-o", "five.jsonl")
    code, out, _ = dtbench("compare", "--reference", "five.jsonl")
    assert code == EXIT_NOTHING and "no public figures of 5 ranks on 1 host(s) of NVIDIA H100" in out


def test_kinds_are_told_by_gpu_ranks_and_hosts() -> None:
    def names(**changes: object) -> set[str]:
        text = table(**changes).replace("NVIDIA H100", str(changes.pop("gpu", "NVIDIA H100")))  # type: ignore[arg-type]
        header, results = convert.to_run([read(text)], [])
        run = Run(Path("x"), header, tuple(results), True)
        found = reference.compare_with_reference(run, reference.read_systems())
        return {system.name for system in found.systems}

    assert names() == {"8xH100-AWS-p5", "8xH100-HBM3"}
    assert names(ranks=16, hosts=2) == {"2x8-H100-AWS-p5", "2x8-H100-GCP-A3-Mega"}
    assert names(ranks=16) == set()


def test_a_run_on_cpus_has_no_kind() -> None:
    params = {"mesh_dim": "tp", "ranks": 2, "groups": "alone", "mode": "isolated", "dtype": "float32"}
    result = made_up.result("collectives", "all_reduce", "c10d", params, [1e-3], size_bytes=2**20, factor=1.0)
    run = made_up.run([result])
    found = reference.compare_with_reference(run, reference.read_systems())
    assert found.exit_code == EXIT_NOTHING and "of cpu (dim tp)" in found.notes[0]


@pytest.mark.parametrize("args", ["run.jsonl", "--reference run.jsonl other.jsonl", "a b --system x"])
def test_compare_takes_two_runs_or_one_and_the_reference(dtbench: Cli, args: str) -> None:
    code, _, err = dtbench("compare", *args.split())
    assert code == EXIT_USAGE and ("give BASE and NEW" in err or "--system goes with --reference" in err)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a reference table .* not JSON"),
        ("[]", "is not a reference table .* expected a JSON object"),
        ('{"kind": "reference", "schema": 2}', "is damaged: schema is 2, expected 1"),
        ('{"kind": "reference", "schema": 1, "systems": [{}]}', r"is damaged: systems\[0\].name is missing"),
    ],
)
def test_a_damaged_table_is_refused(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "systems.json"
    path.write_text(text)
    with pytest.raises(UnreadableRunError, match=says):
        reference.read_systems(path)
    with pytest.raises(UnreadableRunError, match="cannot read"):
        reference.read_systems(tmp_path / "nosuch")
