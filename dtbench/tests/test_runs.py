"""`dtbench run` through its real entry point, on real gloo ranks, in good days and bad."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtbench.bench.options import RunOptions
from dtbench.bench.run import run as run_here
from dtbench.files.run import read_run
from dtbench.model import Result, Run
from dtbench.tests import made_up
from dtbench.tests.programs import FRESH, LIMIT_S, environment, start, start_fresh
from dtbench.world.launch import Note

SUITE = str(Path(__file__).with_name("faults_suite.py"))
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "--no-python")
UNDER_TORCHRUN = (*TORCHRUN, str(Path(sys.executable).with_name("dtbench")))
WORDS = ("run", SUITE, "--quick", "-o", "x.jsonl")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the command."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def with_own_packages(here: Path) -> None:
    """It is a user's own, with folders named like ours, which a fresh process could take for ours."""
    for name in ("core", "dtbench", "dtbench_core", "suites"):
        (here / name).mkdir()
        (here / name / "__init__.py").write_text("raise ImportError('the user\\'s own package')")


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return start(*WORDS, *args)


def run_under_torchrun(*args: str) -> subprocess.CompletedProcess[str]:
    return start_fresh(*UNDER_TORCHRUN, *WORDS, *args)


def own_lines(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("dtbench:")]


def kinds() -> list[str]:
    return [json.loads(line)["kind"] for line in Path("x.jsonl").read_text().splitlines()]


def by_impl(run: Run) -> dict[str, Result]:
    return {f"{r.params.get('how', r.params.get('n', ''))} {r.impl} {r.launch}": r for r in run.results}


def assert_gone(run: Run) -> None:
    """No rank of the run is left."""
    deadline = time.monotonic() + 20
    pids = [rank.pid for rank in run.header.ranks]
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, f"of {pids} some still run"
        time.sleep(0.1)


def test_faults_that_leave_the_world_standing_end_one_case_each(here: Path) -> None:
    done = run("--nproc", "2", "--timeout", "3", "--filter", "mild")
    assert done.returncode == 5 and done.stderr == ""
    run_file = read_run("x.jsonl")
    assert run_file.complete and kinds()[-1] == "end"
    found = by_impl(run_file)
    said = {key: (r.status, r.reason, r.rank) for key, r in found.items() if r.status != "ok"}
    slow = said.pop("slow core 0")
    assert slow[0] == "failed" and "does not fit into --timeout 3 s" in slow[1]
    assert said == {
        "skips core 0": ("skipped", "not for this world", 0),
        "breaks core 0": ("failed", "ValueError: no such shape (faults_suite.py:42)", 1),
        "raises core 0": ("failed", "RuntimeError: nobody can do this (faults_suite.py:48)", 0),
        "memory core 0": ("failed", "OutOfMemoryError: tried to allocate 1 TiB (faults_suite.py:55)", 0),
        "wrong core 0": ("wrong", "the sum is 3.0 (after the warm-up)", 1),
    }
    assert len(found) == 12
    good = found["none c10d 0"]
    assert good.time_s is not None and good.rank_samples_s.keys() == {"0", "1"}
    assert good.samples_s == tuple(map(max, zip(*good.rank_samples_s.values(), strict=True)))
    assert good.counters["bytes"] == 16 and good.counters["skew_s"] >= 0
    # One plain line per result, and the last says what there is.
    lines = done.stdout.splitlines()
    assert len(lines) == 1 + 12 + 1 and lines[-1] == "x.jsonl: 6 ok, 4 failed, 1 skipped, 1 wrong"
    assert any("mild how=wrong | core  wrong on rank 1" in line for line in lines)


def test_launches_and_resume_after_a_cut(here: Path) -> None:
    args = ("--nproc", "2", "--launches", "2", "--filter", "good")
    done = run(*args)
    assert (done.returncode, done.stderr) == (0, "")
    whole = read_run("x.jsonl")
    assert whole.complete and len(whole.results) == 12 and kinds().count("run") == 1
    assert {r.launch for r in whole.results} == {0, 1}
    assert {r.status for r in whole.results} == {"ok"}
    result = whole.results[0]
    assert result.time_s is not None and result.algbw_Bps == pytest.approx(16 / result.time_s.p25)
    assert result.busbw_Bps == pytest.approx(8 / result.time_s.p25)

    again = run(*args, "--resume")
    assert again.returncode == 0 and "complete already: 12 ok" in again.stdout
    assert read_run("x.jsonl").results == whole.results

    lines = Path("x.jsonl").read_bytes().splitlines(keepends=True)
    Path("x.jsonl").write_bytes(b"".join(lines[:9]) + lines[9][:40])  # 8 results and a cut one
    resumed = run(*args, "--resume")
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert len(resumed.stdout.splitlines()) == 1 + 4 + 1 and kinds().count("result") == 12
    back = read_run("x.jsonl")
    assert back.complete and back.results[:8] == whole.results[:8]
    assert {r.key for r in back.results} == {r.key for r in whole.results}


def test_a_budget_measures_what_says_most_and_names_the_rest(here: Path) -> None:
    done = run("--nproc", "2", "--budget", "1s", "--filter", "wait\nall_reduce\nadd")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "3 of 2004 cases, about 16 s by estimate" in lines[0]
    assert lines[-2] == "left out for --budget: good 2 of 3 cases, long 1999 of 2000 cases"
    run_file = read_run("x.jsonl")
    assert run_file.complete and [r.suite for r in run_file.results] == ["simulated"] * 2 + ["good"] * 2 + [
        "long"
    ]


def test_under_torchrun_each_launch_is_a_fresh_world(with_own_packages: None) -> None:
    done = run_under_torchrun("--launches", "2", "--filter", "all_reduce")
    assert done.returncode == 0, done.stderr
    run_file = read_run("x.jsonl")
    assert (
        run_file.complete and len(run_file.results) == 12 and {r.status for r in run_file.results} == {"ok"}
    )
    assert done.stdout.count("results to measure") == 2
    assert done.stdout.splitlines()[-1] == "x.jsonl: 12 ok"


def test_under_slurm_rank_0_serves_the_store_and_each_launch_is_a_fresh_world(
    with_own_packages: None,
) -> None:
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    job |= {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_JOB_NODELIST": "localhost"}
    started = [
        subprocess.Popen(
            [*FRESH, *WORDS, "--launches", "2", "--filter", "all_reduce n=1"],
            env=environment() | job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=LIMIT_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert said[1] == ("", "") and said[0][0].splitlines()[-1] == "x.jsonl: 4 ok"
    assert {r.launch for r in read_run("x.jsonl").results} == {0, 1}


def test_under_torchrun_bad_options_are_refused_once(with_own_packages: None) -> None:
    done = run_under_torchrun("--mesh", "tp=3")
    assert done.returncode != 0 and not Path("x.jsonl").exists()
    (line,) = own_lines(done.stderr)
    assert "has 3 ranks, the world has 2" in line


def test_under_torchrun_a_killed_rank_is_named(with_own_packages: None) -> None:
    done = run_under_torchrun("--filter", "how=dies")
    assert done.returncode != 0
    (line,) = own_lines(done.stderr)
    assert "rank 1 on " in line and "died or did not answer during bad grave how=dies (core)" in line
    assert by_impl(read_run("x.jsonl"))["dies core 0"].rank == 1


def test_a_killed_rank_ends_the_run_where_that_is_wished_and_resume_goes_on(here: Path) -> None:
    args = ("--nproc", "2", "--filter", "dies", "--on-failure", "stop")
    done = run(*args)
    assert done.returncode == 5
    host = read_run("x.jsonl").header.ranks[1].host
    assert done.stderr == (
        f"dtbench: rank 1 on {host} died or did not answer during bad grave how=dies (core): "
        f"1 result is in x.jsonl; go on with --resume -o x.jsonl\n"
    )
    broken = read_run("x.jsonl")
    assert not broken.complete
    assert_gone(broken)
    resumed = run(*args, "--resume")  # what killed it is not tried again
    assert resumed.returncode == 5 and resumed.stderr == ""
    after = read_run("x.jsonl")
    assert after.complete and [r.status for r in after.results] == ["failed", "ok"]


def test_rank_0_killed_in_the_simulated_world_is_named_by_a_survivor(here: Path) -> None:
    done = run("--nproc", "2", "--filter", "simulated")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 5 and "rank 0 on " in line and "during simulated die (core)" in line
    run_file = read_run("x.jsonl")
    assert [(r.name, r.impl, r.status) for r in run_file.results] == [
        ("add", "core", "ok"),
        ("add", "local", "ok"),
        ("die", "core", "failed"),
    ]
    assert run_file.results[0].time_s is not None and run_file.results[0].time_s.n >= 20


def test_a_killed_rank_without_survivors_is_named_by_the_launcher(here: Path) -> None:
    done = run("--nproc", "1", "--filter", "rank0")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 5 and "rank 0 died of SIGKILL during bad grave how=rank0 (core)" in line
    assert [(r.status, r.reason) for r in read_run("x.jsonl").results] == [
        ("failed", "rank 0 died of SIGKILL")
    ]


def test_cases_that_cost_ranks_are_recorded_and_new_ranks_go_on(here: Path) -> None:
    done = run("--nproc", "2", "--timeout", "3", "--filter", "grave\nhow=none")
    run_file = read_run("x.jsonl")
    assert done.returncode == 5 and run_file.complete and kinds().count("run") == 1, done.stderr
    assert {key: (r.status, r.rank) for key, r in by_impl(run_file).items()} == {
        "none c10d 0": ("ok", None),
        "dies core 0": ("failed", 1),
        "dies c10d 0": ("ok", None),
        "rank0 core 0": ("failed", 0),
        "alone core 0": ("failed", 1),
        "hangs core 0": ("failed", 1),
    }
    said = done.stderr.splitlines()
    reasons = ("died or did not", "died or did not", "only I (faults_suite.py:81)", "(at faults_suite.py:")
    assert len(said) == len(reasons) and all(why in line for line, why in zip(said, reasons, strict=True))
    assert all(line.endswith(": recorded as failed; going on with new ranks") for line in said)
    assert_gone(run_file)


def test_ranks_that_are_lost_whatever_they_measure_end_the_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts: list[float | None] = []

    def lose(*_args: object, began_s: float | None) -> Note:
        starts.append(began_s)
        return Note(code=5, reported=True, lost="rank 0 died")

    monkeypatch.setattr("dtbench.bench.run.start_ranks", lose)
    monkeypatch.setattr("dtbench.bench.run.read_run", lambda _path: made_up.run([]))
    assert run_here(RunOptions(suites=(SUITE,), device="cpu", output=here / "x.jsonl"), []) == 5
    assert len(starts) == 5 and starts[0] is None and starts[1] is not None
    assert "like 5 starts in a row that measured nothing" in capsys.readouterr().err.splitlines()[-1]


@pytest.fixture
def long_run(with_own_packages: None) -> Iterator[subprocess.Popen[str]]:
    """A run in the middle of many cases."""
    args = [*FRESH, *WORDS, "--nproc", "2", "--filter", "long"]
    process = subprocess.Popen(
        args, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not Path("x.jsonl").exists() or Path("x.jsonl").read_bytes().count(b"\n") < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_ctrl_c_leaves_a_readable_file_and_no_ranks(long_run: subprocess.Popen[str]) -> None:
    long_run.send_signal(signal.SIGINT)
    _, stderr = long_run.communicate(timeout=LIMIT_S)
    assert long_run.returncode == 130
    (line,) = stderr.splitlines()
    run_file = read_run("x.jsonl")
    count = len(run_file.results)
    assert line == f"dtbench: interrupted: {count} results are in x.jsonl; go on with --resume -o x.jsonl"
    assert count >= 2 and not run_file.complete and {r.status for r in run_file.results} == {"ok"}
    assert_gone(run_file)


def test_ranks_end_when_their_launcher_is_killed(long_run: subprocess.Popen[str]) -> None:
    long_run.kill()
    _, stderr = long_run.communicate(timeout=LIMIT_S)
    assert_gone(read_run("x.jsonl"))
    lines = stderr.splitlines()
    assert len(lines) == 1 and "the process that started the ranks died" in lines[0], stderr
    assert {r.status for r in read_run("x.jsonl").results} == {"ok"}


def test_a_full_disk_ends_the_run_with_whole_lines(with_own_packages: None) -> None:
    limited = ("bash", "-c", 'ulimit -f 8; exec "$@"', "bash", *FRESH, *WORDS)
    done = start_fresh(*limited, "--nproc", "2", "--filter", "long")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("dtbench: cannot write to x.jsonl: file too large")
    run_file = read_run("x.jsonl")
    assert run_file.results and not run_file.complete and Path("x.jsonl").read_bytes().endswith(b"\n")
    assert_gone(run_file)


def test_a_suite_is_checked(with_own_packages: None) -> None:
    assert start("new-suite", "mine.py").returncode == 0
    done = start("check-suite", "mine.py")
    assert done.returncode == 0 and done.stdout.splitlines()[-1].endswith("2 ok"), done.stderr
    Path("mine.py").write_text(Path("mine.py").read_text().replace("x @ x", "y @ x"))
    done = start("check-suite", "mine.py")
    assert done.returncode == 5 and "name 'y' is not defined (mine.py:16)" in done.stdout
