"""Starts every row of the table of faults and checks its outcome; and kills runs at random moments."""

import contextlib
import datetime
import os
import platform
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtbench.errors import UnreadableRunError
from dtbench.records.run import read_run
from dtbench.tests.faults import rows
from dtbench.tests.programs import FRESH, environment

FILE = os.environ.get("DTBENCH_FAULTS_TABLE")
HEAD = """# Faults, and what dtbench does

`make faults` wrote this on {date}: Linux {kernel}, Python {python}. Each row starts a fault and looks at the exit code,
our lines on standard error, the run file, and that no process and no other file is left. The numbers are those of the
crash policy in [CONTRIBUTING.md](../CONTRIBUTING.md); the rows stand in `dtbench/tests/faults/rows.py`.

| holds | fault | seen | s |
|---:|---|---|---:|
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lines() -> Iterator[list[str]]:
    """Rows of results/faults.md, which is written if `make faults` runs the tests."""
    lines: list[str] = []
    yield lines
    if FILE:
        head = HEAD.format(
            date=datetime.datetime.now(datetime.UTC).date(),
            kernel=platform.release().split("-")[0],
            python=platform.python_version(),
        )
        Path(FILE).write_text(head + "".join(lines), "utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The row's folder, with its current folder `at` and its folder for temporary files `tmp`."""
    for name in ("at", "tmp"):
        (tmp_path / name).mkdir()
    with contextlib.chdir(tmp_path / "at"):
        yield tmp_path


@pytest.mark.parametrize("fault", [pytest.param(row, id=row.name) for row in rows.ROWS])
def test_fault(fault: rows.Fault, folder: Path, lines: list[str]) -> None:
    if fault.before is not None:
        fault.before()
    files, began_s = rows.contents(), time.monotonic()
    ended = rows.run_shell(fault, folder)
    took_s = time.monotonic() - began_s
    rows.check(fault, ended, files, folder)
    lines.append(f"| {fault.holds} | {fault.name} | {rows.seen(ended, folder)} | {took_s:.0f} |\n")


@pytest.mark.parametrize("seed", range(20 if FILE else 4))
def test_a_run_killed_at_a_random_moment_loses_and_repeats_nothing(folder: Path, seed: int) -> None:
    """Kills either the launcher alone, so that its ranks have to end by themselves, or every process."""
    rng = random.Random(seed)
    options = ("--quick", "--nproc", rng.choice("123"), "--filter", "good", "-o", "x.jsonl")
    words = [*FRESH, "run", rows.SUITE, *options]
    process = subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(rng.uniform(0.5, 12.0))
    for pid in (process.pid, *(rows.processes_in(folder) if rng.random() < 0.5 else ())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
    rows.wait_until_none_runs_in(folder)
    before = ()
    try:
        before = read_run("x.jsonl").results
        words.append("--resume")
    except UnreadableRunError:  # not begun, or without its header
        Path("x.jsonl").unlink(missing_ok=True)
    done = subprocess.run(words, env=environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, ""), done
    run = read_run("x.jsonl")
    assert run.complete and run.results[: len(before)] == before
    assert Path("x.jsonl").read_bytes().count(b'"kind":"result"') == len(run.results) == 6
