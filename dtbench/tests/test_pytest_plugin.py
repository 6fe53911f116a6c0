"""`pytest FILE`: its suites are tests, with names for -k and files for other tools; a fixture times functions."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

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
    params = {"placements": "P->S(0),R", "mesh_dim": "dp+tp", "note": "a b", "size": 2**20}
    yield Case("add", params, build={"core": lambda world: build(world, 8), "torch": lambda world: build(world, 8)})


def build(world, n):
    a = torch.ones(n, n)
    return Workload(run=lambda: a @ a)
"""
OWN = "\n\ndef test_of_ones_own():\n    assert not torch.distributed.is_initialized()\n"
TESTS = """
import torch
import dtbench


def test_a_step(dtbench_run):
    a = torch.ones(8, 8)
    results = dtbench_run({"mm": lambda: a @ a, "add": lambda: a + a})
    assert set(dtbench.cases_frame(results)["estimate_s"].columns) == {"mm", "add"}


def test_what_raises_fails(dtbench_run):
    dtbench_run(lambda: 1 / 0)
"""
FILES = {"my_suite.py": SUITE, "test_own.py": TESTS, "test_mixed.py": SUITE + OWN, "mixed.py": SUITE + OWN}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("user")
    for name, text in (FILES | {"pytest.ini": "[pytest]\n"}).items():
        (folder / name).write_text(text)
    return folder


def run_pytest(folder: Path, *words: str, stderr: int = subprocess.PIPE) -> str:
    options = ("-p", "dtbench.pytest_plugin", "-p", "no:cacheprovider")
    paths = os.pathsep.join(str(ROOT / name) for name in ("", "core", "suites"))
    # A worker of xdist's would time nothing.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *words],
        cwd=folder,
        env=outer | {"PYTHONPATH": paths, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    ).stdout


def test_plugin_collects_the_cases_of_a_suite_as_tests(folder: Path) -> None:
    out = run_pytest(folder, "my_suite.py", "--dtbench-quick", "--benchmark-json=x.json", "-v")
    # Cases that do not depend on the number of ranks run on one rank; the others report what they need.
    assert "4 passed, 2 skipped" in out, out
    assert "2 skipped: needs several ranks: torchrun --nproc-per-node 4 -m pytest" in out
    ids = re.findall(r"my_suite\.py::(\S+)", out)
    assert len(set(ids)) == 6 and not [name for name in ids if set(name) & set("=(), ")]
    text = (folder / "x.json").read_text()
    assert "UNSERIALIZABLE" not in text
    benchmarks = {b["fullname"]: b for b in json.loads(text)["benchmarks"]}
    assert benchmarks["my_suite.py::matmul[matmul-n:16-plain]"]["extra_info"]["params"] == {"n": 16}
    assert {b["stats"]["rounds"] for b in benchmarks.values()} == {5}


QUICK = ("--dtbench-quick", "--dtbench-rounds", "1", "-k")


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        (
            ("my_suite.py", *QUICK, "P-S0-R-mesh_dim:dp+tp-note:a-b-size:1048576-torch"),
            "1 passed, 5 deselected",
        ),
        # Files of tests keep their suites to themselves, and find no process group of a suite's.
        (("test_mixed.py", *QUICK, "own or add"), "1 passed in"),
        (("mixed.py", *QUICK, "own or add"), "3 passed, 4 deselected"),
        (
            ("test_mixed.py", *QUICK, "own or add", "-o", "dtbench_files=test_mixed.py"),
            "3 passed, 4 deselected",
        ),
        (("my_suite.py", "--dtbench-size", "much"), "expected"),
    ],
)
def test_plugin_measures_only_chosen_files(folder: Path, words: tuple[str, ...], outcome: str) -> None:
    out = run_pytest(folder, *words)
    assert outcome in out, out


@pytest.mark.parametrize("mode", ["prepend", "importlib"])
def test_suite_file_imports_the_module_beside_it(tmp_path: Path, mode: str) -> None:
    package = tmp_path / "bench"
    package.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (package / "__init__.py").touch()  # pytest puts the folder above on sys.path, if any
    (package / "helper.py").write_text("N = 8\n")
    (package / "my_suite.py").write_text(
        SUITE.replace("(8, 16)", "(helper.N,)").replace("import torch", "import helper, torch")
    )
    out = run_pytest(tmp_path, "bench/my_suite.py", *QUICK, "matmul", "--import-mode", mode)
    assert "1 passed" in out, out


def test_fixture_times_functions_of_user_tests(folder: Path) -> None:
    out = run_pytest(folder, "test_own.py")
    assert "1 failed, 1 passed" in out and "failed: ZeroDivisionError: division by zero" in out
    assert re.search(r"^test_own\.py::test_a_step: mm  [\d.]+ (ns|µs|ms)  \+\d+%", out, re.MULTILINE), out


def test_session_without_suites_ignores_partial_launcher_variables(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    (folder / "test_plain.py").write_text("def test_plain(): pass")
    assert "1 passed" in run_pytest(folder, "test_plain.py")
    assert "RANK is set but WORLD_SIZE and" in run_pytest(folder, "my_suite.py", "--dtbench-quick")


def test_session_ends_in_one_line_if_ranks_cannot_join(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("localhost", 0)) as server:
        launcher = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "DTBENCH_JOIN_TIMEOUT": "2"}
        for name, value in (launcher | {"MASTER_PORT": str(server.getsockname()[1])}).items():
            monkeypatch.setenv(name, value)
        out = run_pytest(folder, "my_suite.py", "--dtbench-quick", stderr=subprocess.STDOUT)
    (line,) = [line for line in out.splitlines() if "dtbench: " in line]  # after the dots of tests
    assert "rank 0 cannot serve the TCPStore of rank 0 at localhost:" in line and "Traceback" not in out, out
