"""The suites on real ranks: through the command line, and under pytest with torchrun."""

import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from core.tests.torch_version import BEFORE_213
from dtbench.engine.options import RunRequest
from dtbench.engine.tasks import list_tasks
from dtbench.records.result import Result
from dtbench.records.run import read_run
from dtbench.suite.registry import load
from dtbench.tests.programs import start, start_fresh
from dtbench_suites.examples import (
    bucketed_gradients,
    placements,
    sharded_tables,
    tensor_parallel,
    wait_on_use,
)

FAULTY = Path(__file__).parent / "faulty_suite.py"
ROOT = Path(__file__).parents[2]
# Filters for every suite, which halve the time: dispatch on one mesh, most suites on one mesh dim, and only one change
# of placement in all regimes.
CASES = "\n".join(
    [
        *("mesh=8 pass=", "dtensor_dispatch"),
        *("collectives ", "groups=together mode=isolated", "'redistribute S(0)->S(1) '"),
        *(f"tensor_parallel {name} mesh_dim=tp" for name in ("addmm", "mlp", "block", "loss")),
        *(f"embedding {name} mesh_dim=tp" for name in ("row-wise", "column-wise", "table-wise")),
        *("overlap all_reduce mesh_dim=tp", "bucketer reduce_scatter mesh_dim=tp"),
    ]
)


def start_python(*words: str) -> subprocess.CompletedProcess[str]:
    return start_fresh(sys.executable, *words, cwd=ROOT)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A quick run of all suites on 4 ranks: (results file, finished process)."""
    output = tmp_path_factory.mktemp("quick") / "run.jsonl"
    words = f"run --quick --mesh dp=2,tp=2 --size 4KiB --device cpu -o {output} --filter"
    return output, start(*words.split(), CASES)


@pytest.fixture(scope="module")
def results(quick: tuple[Path, subprocess.CompletedProcess[str]]) -> tuple[Result, ...]:
    path, done = quick
    assert path.exists(), done.stderr
    return read_run(path).results


def test_run_measures_every_case_and_impl(results: tuple[Result, ...], quick: Any):
    options = RunRequest(mesh=(("dp", 2), ("tp", 2)), sizes_bytes=(4096,), quick=True).resolve("cpu", 4)
    listed = {task.key(impl, 0) for task in list_tasks(load(), options, CASES) for impl in task.impls}
    assert {suite.name for suite in load()} == {key[0] for key in listed}
    assert {r.key for r in results} == listed
    not_ok = [(r.suite, r.name, r.impl, r.params, r.reason) for r in results if r.status != "ok"]
    assert [r for r in not_ok if not (BEFORE_213 and r[4].endswith("before torch 2.13"))] == []
    assert quick[1].returncode == 0


def test_alone_cases_have_samples_of_the_group_of_rank_0(results: tuple[Result, ...]):
    assert {
        (r.params["groups"], r.params["groups"] == "alone" and r.params["mesh_dim"], *r.rank_samples_s)
        for r in results
        if "groups" in r.params
    } == {("alone", "dp", "0", "2"), ("alone", "tp", "0", "1"), ("together", False, "0", "1", "2", "3")}


def test_bucketer_counters(results: tuple[Result, ...]):
    for r in (result for result in results if result.suite == "bucketer"):
        total, tensor, bucket = (int(r.params[f"{name}_bytes"]) for name in ("total", "tensor", "bucket"))
        expected = {"unbucketed": total // tensor, "limit": 1}
        assert r.counters["collectives"] == expected.get(r.impl, max(-(-total // bucket), 1))
        if r.impl == "core":
            # Each byte is copied once, into the bucket. The results are views of the collective's output.
            assert r.counters["bytes_copied"] == total and r.counters["peak_bytes"] > 0


def test_checks_of_every_suite_detect_a_fault(tmp_path: Path):
    words = "--quick --nproc 2 --size 4KiB --device cpu -o faulty.jsonl"
    done = start("run", str(FAULTY), *words.split(), cwd=tmp_path)
    assert done.returncode == 5, done.stderr
    results = read_run(tmp_path / "faulty.jsonl").results
    assert [(r.name, r.impl, r.params, r.status, r.reason) for r in results if r.status != "wrong"] == []
    assert Counter(r.name.split()[0] for r in results) == {
        "collectives": 6 * 2 + 2,  # isolated and back to back, and two routings
        "redistribute": 9 * 2 * 2,  # core and torch, isolated and back to back
        "bucketer": 2 * 5,
        "tensor_parallel": 5 * 3,
        "embedding": 3 * 2 * 3,
        "expert_parallel": 2 * 2 * 3,
        "overlap": 2 * 4,
        "payload": 3 * 3,
    }


# ----------------------------------------------------------------------------- under pytest

CHOICE = "detach or (redistribute and not dispatch) or (collectives and all_reduce)"


@pytest.fixture(scope="module")
def pytest_form(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Runs some cases under pytest on 2 ranks; saves them as a file and in pytest-benchmark's storage."""
    folder = tmp_path_factory.mktemp("pytest_form")
    words = (
        "-m torch.distributed.run --nproc-per-node 2 -m pytest suites -p no:cacheprovider --dtbench-quick "
        "--dtbench-size 4KiB --dtbench-rounds 7 --benchmark-autosave "
        f"--benchmark-json={folder}/run.json --benchmark-storage=file://{folder}/storage -k"
    )
    return folder, start_python(*words.split(), CHOICE)


def test_pytest_on_several_ranks_writes_one_file(pytest_form: Any):
    folder, done = pytest_form
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((folder / "storage").rglob("*.json"))) == 1
    benchmarks = json.loads((folder / "run.json").read_text())["benchmarks"]
    assert len({benchmark["fullname"] for benchmark in benchmarks}) == len(benchmarks)
    # detach: forward, cached on two meshes (4 impls each), first and second on one (2 impls each);
    # dtensor_dispatch_detach (3 impls)
    suites = Counter(benchmark["extra_info"]["suite"] for benchmark in benchmarks)
    assert suites == {"dispatch": 15, "redistribute": 36, "collectives": 2}
    for info, stats in ((benchmark["extra_info"], benchmark["stats"]) for benchmark in benchmarks):
        assert stats["rounds"] == len(stats["data"]) == 7
        assert min(stats["data"]) == stats["min"] > 0
        if info["suite"] != "dispatch":
            iterations = 10 if info["params"]["mode"] == "back_to_back" else 1
            assert (info["size_bytes"], stats["iterations"]) == (4096, iterations)
            assert info["algbw_Bps"] == pytest.approx(4096 / np.quantile(stats["data"], 0.25))
        if info["suite"] == "collectives":
            assert info["busbw_Bps"] == info["algbw_Bps"]  # an all-reduce of two ranks


def test_pytest_in_one_process_measures_simulated_suites_and_skips_the_others():
    words = "-m pytest suites --dtbench-quick --dtbench-rounds 3 -p no:cacheprovider -k"
    done = start_python(*words.split(), "detach or scatter or (dropout and torch)")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "21 passed" in done.stdout
    assert "needs several ranks: torchrun --nproc-per-node 4 -m pytest" in done.stdout


# ---- compiled calls ----


COMPILED = "\n".join(
    f"compile {name} mesh_dim=tp backend=aot_eager pass=forward call={call}"
    for name in ("add", "redistribute")
    for call in ("cached", "recompiled")
)


def test_compiled_calls_of_every_implementation(tmp_path: Path) -> None:
    words = "run compile --quick --nproc 2 --device cpu -o x.jsonl --filter"
    done = start(*words.split(), COMPILED, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = read_run(tmp_path / "x.jsonl").results
    assert [(r.name, r.impl, r.reason) for r in results if r.status != "ok"] == []
    assert {(r.name, r.params["call"], r.impl) for r in results} == set(
        itertools.product(("add", "redistribute"), ("cached", "recompiled"), ("core", "torch", "local"))
    )
    for result in results:
        moves = result.name == "redistribute" and result.impl != "local"
        counts = [result.counters[name] for name in ("graph_breaks", "graphs", "collectives")]
        assert counts == [0, 1, moves], result


def test_routed_exchanges_are_right_with_counts_of_zero(tmp_path: Path) -> None:
    """A recorded routing on which the checks of all cases run: ranks that send, keep or receive nothing."""
    (tmp_path / "some.csv").write_text("source,destination,count\n0,2,5\n0,3,1\n2,2,4\n3,0,7\n")
    words = "run collectives/all_to_all_v expert_parallel --quick --mesh ep=4 --size 64KiB --device cpu -o x.jsonl"
    dtypes = "--dtype float32,bfloat16 --routing some.csv"
    done = start(*words.split(), *dtypes.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = read_run(tmp_path / "x.jsonl").results
    assert [(r.name, r.impl, r.params, r.reason) for r in results if r.status != "ok"] == []
    assert Counter((r.name, r.params["routing"]) for r in results) == {
        (name, routing): count
        for name, count in (("all_to_all_v", 2), ("dispatch_combine", 2 * 2 * 3))
        for routing in ("uniform", "lognormal(1)", "some.csv")
    }
    skews = {r.params["routing"]: r.counters["max_over_mean_received"] for r in results}
    assert skews["uniform"] == 1 and skews["some.csv"] == pytest.approx(9 / 17 * 4, rel=0.02)
    # 13 of 17 rows move.
    (recorded,) = [
        r
        for r in results
        if (r.name, r.params["routing"], r.params["dtype"]) == ("all_to_all_v", "some.csv", "float32")
    ]
    assert recorded.busbw_Bps and recorded.algbw_Bps
    assert recorded.busbw_Bps / recorded.algbw_Bps == pytest.approx(13 / 17, abs=0.01)


def test_every_payload_and_part_is_right_on_four_ranks(tmp_path: Path) -> None:
    words = "run payload --mesh dp=4 --size 2KiB,64KiB --device cpu -o x.jsonl"
    done = start(*words.split(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    results = read_run(tmp_path / "x.jsonl").results
    assert [(r.name, r.params, r.reason) for r in results if r.status != "ok"] == []
    assert len(results) == 2 * 3 * 7 and {r.size_bytes for r in results} == {2048, 65536}
    sent = {(r.name, r.impl): r.counters["sent_bytes"] for r in results if r.size_bytes == 65536}
    for name, whole in (("all_gather", 65536 / 4), ("reduce_scatter", 65536), ("all_to_all", 65536)):
        assert sent[name, "float32"] == whole and sent[name, "bfloat16"] == whole / 2
        assert sent[name, "float8_e4m3fn"] == whole / 4 + whole / 128  # with a scale per 128 elements
    (shown,) = json.loads(start("show", "x.jsonl", "--json", cwd=tmp_path).stdout)
    assert len(shown["payload_choices"]) == 3 * 2


# ---- example programs ----


LAUNCHED = {
    m.__name__.rpartition(".")[2]: m
    for m in (sharded_tables, tensor_parallel, bucketed_gradients, wait_on_use)
}
# All programs share a launch, because starting four ranks takes longer than any of them.
TOGETHER = f"""
import importlib
from dtbench_suites.examples.launched import launched

with launched("together", 4):
    for name in {list(LAUNCHED)}:
        importlib.import_module("dtbench_suites.examples." + name).main()
"""


def test_launched_examples_on_four_ranks(tmp_path: Path) -> None:
    driver = tmp_path / "together.py"
    driver.write_text(TOGETHER)
    done = start_fresh(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", str(driver))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.endswith(": right")] == [
        *(f"{name}: right" for name in (*sharded_tables.SHARDINGS, sharded_tables.TABLE_WISE)),
        *(f"{name}: right" for name in list(LAUNCHED)[1:]),
    ]
    drawn = lines[lines.index("row-wise-uneven") : lines.index("row-wise-uneven: right")]
    assert [line.split()[0] for line in drawn[4:8]] == ["0:1", "1:4", "4:5", "5:8"]
    assert {f"table-wise: table {number}" for number in range(4)} <= set(lines)


def test_placements_example_in_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    placements.main()
    assert capsys.readouterr().out.endswith("placements: right\n")
