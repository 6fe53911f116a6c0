"""`dtbench run` through its real entry point, on real gloo ranks, in good days and bad."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dtbench.engine.failure import ActiveCase, Diagnosis
from dtbench.engine.launch import run as run_here
from dtbench.engine.launch import start_ranks as start_here
from dtbench.engine.launch_files import LaunchSpec, RankReport
from dtbench.engine.options import RunRequest
from dtbench.engine.workers import Fork, StartedProgram, send_connection
from dtbench.errors import WorldBrokenError
from dtbench.records.run import read_run
from dtbench.tests.programs import start, start_fresh, start_ranks

SUITE = str(Path(__file__).with_name("faults_suite.py"))
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "--no-python")
UNDER_TORCHRUN = (*TORCHRUN, str(Path(sys.executable).with_name("dtbench")))
WORDS = ("run", SUITE, "--quick", "-o", "x.jsonl")


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


def kinds() -> list[str]:
    return [json.loads(line)["kind"] for line in Path("x.jsonl").read_text().splitlines()]


def test_faults_that_leave_the_world_standing_end_one_case_each(here: Path) -> None:
    done = run("--nproc", "2", "--timeout", "3", "--filter", "mild")
    assert done.returncode == 5 and done.stderr == ""
    run_file = read_run("x.jsonl")
    assert run_file.complete and kinds()[-1] == "end"
    cases = {(r.params["how"], r.impl): r for r in run_file.results}
    outcomes = {
        how: (r.status, re.sub(r":\d+\)", ")", r.reason), r.rank)
        for (how, _), r in cases.items()
        if r.status != "ok"
    }
    status, reason, _ = outcomes.pop("slow")
    assert status == "failed" and "does not fit into --timeout 3 s" in reason
    memory = "ran out of memory: OutOfMemoryError: tried to allocate 1 TiB"
    assert outcomes == {
        "skips": ("skipped", "not for this world", 0),
        "breaks": ("failed", "ValueError: no such shape (faults_suite.py)", 1),
        "raises": ("failed", "RuntimeError: nobody can do this (faults_suite.py)", 0),
        "memory": ("failed", f"{memory} (faults_suite.py)", 0),
        "wrong": ("wrong", "the sum is 3.0 (after the warm-up)", 1),
    }
    assert len(cases) == 12
    good = cases["none", "c10d"]
    assert good.time_s is not None and good.rank_samples_s.keys() == {"0", "1"}
    assert good.samples_s == tuple(map(max, zip(*good.rank_samples_s.values(), strict=True)))
    assert good.counters["bytes"] == 16 and good.counters["skew_s"] >= 0
    # A plain line per result; the last line counts them.
    lines = done.stdout.splitlines()
    last = lines.index("x.jsonl: 6 ok, 4 failed, 1 skipped, 1 wrong")
    assert "starting 2 processes, loading torch" in lines[:2] and "12 results to measure" in done.stdout
    assert lines[last + 1] == "next: dtbench show x.jsonl  # with the reasons of failures"
    assert any(line.strip().startswith("bad: ") for line in lines[13:last])
    assert any("mild how=wrong | core  wrong on rank 1" in line for line in lines)


def test_launches_and_resume_after_a_cut(here: Path) -> None:
    args = ("--nproc", "2", "--launches", "2", "--filter", "good")
    done = run(*args)
    assert (done.returncode, done.stderr) == (0, "")
    whole = read_run("x.jsonl")
    assert whole.complete and kinds().count("run") == 1
    assert Counter((r.launch, r.status) for r in whole.results) == {(0, "ok"): 6, (1, "ok"): 6}
    result = whole.results[0]
    assert result.time_s is not None
    assert (result.algbw_Bps, result.busbw_Bps) == pytest.approx(
        (16 / result.time_s.p25, 8 / result.time_s.p25)
    )

    again = run(*args, "--resume")
    assert again.returncode == 0 and "complete already: 12 ok" in again.stdout
    assert read_run("x.jsonl").results == whole.results

    lines = Path("x.jsonl").read_bytes().splitlines(keepends=True)
    Path("x.jsonl").write_bytes(b"".join(lines[:9]) + lines[9][:40])  # 8 results and a cut one
    # The command that an interrupted run prints: the file has all other options, except the time limit.
    resumed = start("run", "--resume", "-o", "x.jsonl", "--timeout", "50")
    assert (resumed.returncode, resumed.stderr) == (0, "")
    assert "4 results to measure" in resumed.stdout and kinds().count("result") == 12
    back = read_run("x.jsonl")
    assert back.complete and back.results[:8] == whole.results[:8]
    assert {r.key for r in back.results} == {r.key for r in whole.results}


def test_a_budget_measures_what_says_most_and_names_the_rest(here: Path) -> None:
    done = run("--nproc", "2", "--budget", "1s", "--filter", "wait\nall_reduce\nadd")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert any("1 of 2004 cases, about " in line for line in lines[:3])
    assert "left out for --budget: good 3 of 3 cases, long 2000 of 2000 cases" in lines
    run_file = read_run("x.jsonl")
    assert run_file.complete and [r.suite for r in run_file.results] == ["simulated"] * 2


def test_under_torchrun_each_launch_is_a_fresh_world(with_own_packages: None) -> None:
    done = run_under_torchrun("--launches", "2", "--filter", "all_reduce")
    assert done.returncode == 0, done.stderr
    assert read_run("x.jsonl").complete and "x.jsonl: 12 ok" in done.stdout.splitlines()
    assert done.stdout.count("results to measure") == 2


def test_under_slurm_rank_0_serves_the_store_and_each_launch_is_a_fresh_world(
    with_own_packages: None,
) -> None:
    job = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_JOB_NODELIST": "localhost",
    }
    envs = [job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    (code, out, err), second = start_ranks(envs, *WORDS, "--launches", "2", "--filter", "all_reduce n=1")
    assert (code, second) == (0, (0, "", "")) and "x.jsonl: 4 ok" in out.splitlines(), err
    assert {r.launch for r in read_run("x.jsonl").results} == {0, 1}


def test_under_torchrun_bad_options_are_refused_once(with_own_packages: None) -> None:
    done = run_under_torchrun("--mesh", "tp=3")
    assert done.returncode != 0 and not Path("x.jsonl").exists()
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("dtbench:")]
    assert "has 3 ranks, the world has 2" in line


def test_ranks_that_are_lost_whatever_they_measure_end_the_run(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    starts: list[bool] = []
    report = RankReport(
        ActiveCase("bad", "grave", impls=["core"]), exit_code=5, diagnosis=Diagnosis("rank 0 died", 0)
    )

    def lose(spec: LaunchSpec, _world_size: int) -> RankReport:
        starts.append(spec.is_restart)
        return report

    monkeypatch.setattr("dtbench.engine.launch.start_ranks", lose)
    assert run_here(RunRequest(suites=(SUITE,), device="cpu", output=here / "x.jsonl"), []) == 5
    assert starts == [False] + [True] * 4
    assert "5 starts in a row gave no result" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("is_over", [True, False])
def test_signal_to_a_rank_that_has_just_ended_does_not_fail_a_finished_launch(
    is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elastic_launch(*_: Any) -> Callable[..., None]:
        def launch(*words: str) -> None:
            report = Path(json.loads(Path(words[-1]).read_text())["report_path"])
            if is_over:
                report.write_bytes(msgspec.json.encode(RankReport(exit_code=0, is_complete=True)))
            raise ProcessLookupError(errno.ESRCH, "No such process")

        return launch

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
    if is_over:
        assert start_here(LaunchSpec(command="run"), 2).exit_code == 0
        return
    with pytest.raises(WorldBrokenError, match="cannot start 2 ranks: ProcessLookupError"):
        start_here(LaunchSpec(command="run"), 2)


def test_a_suite_is_checked(with_own_packages: None) -> None:
    assert start("suite", "new", "mine.py").returncode == 0
    right = start("suite", "check", "mine.py")
    assert right.returncode == 0 and right.stdout.splitlines()[-1].endswith("2 ok"), right.stderr
    Path("mine.py").write_text(Path("mine.py").read_text().replace("x @ x", "y @ x"))
    wrong = start("suite", "check", "mine.py")
    assert wrong.returncode == 5 and "name 'y' is not defined (mine.py:15)" in wrong.stdout


ECHO = """
import sys
from dtbench.engine.workers import connection_at, receive_connection
ours = connection_at(sys.argv[1])
ours.send(receive_connection(ours).recv())
"""


def test_a_program_talks_on_its_connection_and_on_one_handed_over(tmp_path: Path):
    from multiprocessing.connection import Pipe

    ours, theirs = Pipe()
    with StartedProgram([sys.executable, "-c", ECHO], connected=True) as program:
        send_connection(program.connection, theirs)
        theirs.close()
        ours.send({"size": 3})
        assert program.connection.recv() == {"size": 3}
        with pytest.raises(EOFError):
            program.connection.recv()
        assert program.wait() == 0


def test_the_end_of_a_program_is_that_of_what_it_started(tmp_path: Path):
    read, written = os.pipe()
    program = StartedProgram(["sh", "-c", "sleep 600 & touch started; wait"], cwd=tmp_path, out=written)
    os.close(written)
    while not (tmp_path / "started").exists():
        assert program.wait(0.01) is None
    assert program.end() == -signal.SIGKILL
    with os.fdopen(read) as lines:
        assert lines.read() == "", "no process has its output open"


def test_a_fork_ends_with_what_its_function_returns():
    fork = Fork(lambda: 7)
    assert wait([fork.ended], 60) == [fork.ended] and fork.code() == fork.end() == 7
    assert Fork(lambda: time.sleep(600) or 0).end() == -signal.SIGKILL


def test_a_fork_that_becomes_another_program_has_not_ended():
    program = [sys.executable, "-c", "import time; time.sleep(0.5); raise SystemExit(5)"]
    fork = Fork(lambda: os.execv(program[0], program))
    assert not wait([fork.ended], 0.2) and wait([fork.ended], 60) and fork.code() == 5


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="this system has no descriptors of processes")
def test_a_fork_has_ended_though_what_it_started_goes_on(tmp_path: Path):
    def starts_another_and_ends() -> int:
        (tmp_path / "pid").write_text(str(subprocess.Popen(["sleep", "600"], close_fds=False).pid))
        return 3

    fork = Fork(starts_another_and_ends)
    assert wait([fork.ended], 60) == [fork.ended] and fork.code() == 3
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
