"""`pytest FILE`: its suites are tests, with names for -k, files for other tools and a table that fits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dtbench.pytest_plugin import id_of

ROOT = Path(__file__).parents[2]
SUITE = """
import torch
from dtbench.suite import Case, Workload, suite, sweep


@suite("matmul", world="ranks", help="a matrix product on every rank")
def matmul(plan):
    for n in (8, 16):
        yield Case("matmul", {"n": n}, build={"plain": lambda world, n=n: build(world, n)})


@suite("sums", world="ranks", help="needs ranks")
def sums(plan):
    for at in sweep(plan, sizes=(64,)):
        yield Case("sum", at.params, build={"c10d": lambda world: build(world, 8)})


@suite("sim", world="simulated", help="of one process")
def sim(plan):
    params = {"placements": "S(0),R", "a long name of a parameter": "and as long a value of it", "size": 2**20}
    yield Case("add", params, build={"core": lambda world: build(world, 8), "torch": lambda world: build(world, 8)})


def build(world, n):
    a = torch.ones(n, n)
    return Workload(run=lambda: a @ a)
"""
TESTS = """
import pytest
import torch
import dtbench


def test_a_step(dtbench_run):
    a = torch.ones(8, 8)
    results = dtbench_run({"mm": lambda: a @ a, "add": lambda: a + a})
    assert set(dtbench.cases_frame(results)["estimate_s"].columns) == {"mm", "add"}


def test_what_raises_fails(dtbench_run):
    dtbench_run(lambda: 1 / 0)
"""


def run_pytest(folder: Path, *words: str) -> str:
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "core", "suites"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "dtbench.pytest_plugin",
        "-p",
        "no:cacheprovider",
        *words,
    ]
    # A worker of xdist's would time nothing.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = outer | {"PYTHONPATH": paths, "COLUMNS": "100"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("user")
    (made / "my_suite.py").write_text(SUITE)
    (made / "test_own.py").write_text(TESTS)
    (made / "pytest.ini").write_text("[pytest]\n")
    return made


def test_the_cases_of_a_suite_are_tests(folder: Path) -> None:
    out = run_pytest(folder, "my_suite.py", "--dtbench-quick", "--benchmark-json=x.json", "-v")
    # What does not follow from the number of ranks runs on one; the sums say what they need.
    assert "4 passed, 2 skipped" in out, out
    assert "2 skipped: needs several ranks: torchrun --nproc-per-node 4 -m pytest" in out
    ids = re.findall(r"my_suite\.py::(\S+)", out)
    assert len(set(ids)) == 6 and not [name for name in ids if set(name) & set("=(), ")]
    tables = out[out.index("benchmark '") : out.index("Legend:")].splitlines()
    assert len(tables) > 10 and max(map(len, tables)) <= 120
    text = (folder / "x.json").read_text()
    assert "UNSERIALIZABLE" not in text
    found = {b["fullname"]: b for b in json.loads(text)["benchmarks"]}
    assert found["my_suite.py::matmul[matmul-n:16-plain]"]["extra_info"]["params"] == {"n": 16}
    assert {b["stats"]["rounds"] for b in found.values()} == {5}


def test_tests_of_ones_own_keep_their_suites_and_find_no_process_group(folder: Path) -> None:
    own = "\n\ndef test_of_ones_own():\n    assert not torch.distributed.is_initialized()\n"
    (folder / "test_mixed.py").write_text(SUITE + own)
    (folder / "mixed.py").write_text(SUITE + own)
    few = ("--dtbench-quick", "--dtbench-rounds", "1", "-k", "own or add")
    assert "1 passed in" in run_pytest(folder, "test_mixed.py", *few)
    assert "3 passed, 4 deselected" in run_pytest(folder, "mixed.py", *few)
    listed = ("-o", "dtbench_files=test_mixed.py")
    assert "3 passed, 4 deselected" in run_pytest(folder, "test_mixed.py", *few, *listed)


def test_names_can_be_chosen_by_k(folder: Path) -> None:
    quick = ("my_suite.py", "--dtbench-quick", "--dtbench-rounds", "1", "-k")
    assert "1 passed, 5 deselected" in run_pytest(folder, *quick, "n:16")
    assert "1 passed, 5 deselected" in run_pytest(folder, *quick, "S0-R and torch and size:1048576")


def test_a_fixture_times_functions_of_ones_own_tests(folder: Path) -> None:
    out = run_pytest(folder, "test_own.py")
    assert "1 failed, 1 passed" in out and "failed: ZeroDivisionError: division by zero" in out
    assert re.search(r"^test_own\.py::test_a_step: mm  [\d.]+ (ns|µs|ms)  \+\d+%", out, re.MULTILINE), out


def test_an_id_holds_what_k_can_name() -> None:
    assert id_of("P->S(0)", {"mesh": "2x4", "mesh_dim": "dp+tp", "x": "a b"}, "core") == (
        "P-S0-mesh:2x4-mesh_dim:dp+tp-x:a-b-core"
    )
