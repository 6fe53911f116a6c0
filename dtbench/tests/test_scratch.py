"""Temporary folders: removed by their program, or by the next one where it was killed; never another's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from dtbench.engine.scratch import scratch
from dtbench.tests.faults.table import SUITE
from dtbench.tests.programs import start

# Prints its folder with a file in it and a child that knows the folder, and waits to be told to end.
_HOLDS = """
import subprocess
from dtbench.engine.scratch import scratch
with scratch() as folder:
    (folder / "x").touch()
    env = {"PATH": "/bin:/usr/bin", "PLACE": f"{folder}/x"}
    child = subprocess.Popen(["sleep", "600"], env=env, stdout=subprocess.DEVNULL)
    print(folder, child.pid, flush=True)
    input()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made, here and in programs started from here."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def has_ended(pid: str) -> bool:
    try:
        return " Z " in Path("/proc", pid, "stat").read_text()
    except OSError:
        return True


def ends(pid: str) -> bool:
    """Whether a killed process is gone, as soon as the kernel has come to it."""
    deadline = time.monotonic() + 20
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return has_ended(pid)


def test_what_a_killed_program_left_is_removed_by_the_next(temporary: Path) -> None:
    command = [sys.executable, "-c", _HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        name, child = other.stdout.readline().split()
        left = Path(name)
        assert left.parent == temporary
        with scratch() as own:
            assert (left / "x").exists() and not has_ended(child), "it is in use"
            assert own.stat().st_mode & 0o777 == 0o700
        assert not own.exists()
        other.kill()
        other.wait()
        assert (left / "x").exists()
        with scratch() as own:
            assert list(temporary.iterdir()) == [own]
            assert ends(child)


def test_a_run_that_is_complete_is_swept_for_too(temporary: Path) -> None:
    words = [
        "run",
        str(SUITE),
        "--quick",
        "--nproc",
        "1",
        "--filter",
        "good",
        "-o",
        str(temporary / "x.jsonl"),
    ]
    assert start(*words).returncode == 0
    command = [sys.executable, "-c", _HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        name, child = other.stdout.readline().split()
        other.kill()
    done = start(*words, "--resume")
    assert done.returncode == 0 and "is complete already" in done.stdout
    assert not Path(name).exists() and ends(child)


def test_a_process_that_is_started_while_others_are_ended_ends_too(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill = os.kill
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.append(
            subprocess.Popen(["sleep", "600"], env={"PATH": "/bin:/usr/bin", "PLACE": str(folder)})
        )

    def kill_a_parent(pid: int, number: signal.Signals) -> None:
        if len(started) < 3:
            start()
        kill(pid, number)

    monkeypatch.setattr(os, "kill", kill_a_parent)
    with scratch() as folder:
        start()
    assert len(started) == 3
    assert [process.wait(5) for process in started] == [-signal.SIGKILL] * 3


def test_what_is_not_a_folder_of_ours_is_left(temporary: Path) -> None:
    names = ("elsewhere", "dtbench-scratch-link", "dtbench-scratch-file")
    folder, link, file = others = [temporary / name for name in names]
    folder.mkdir()
    link.symlink_to(folder)
    file.touch()
    with scratch() as own:
        assert set(temporary.iterdir()) == {own, *others}
