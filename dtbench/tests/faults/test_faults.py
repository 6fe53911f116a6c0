"""The table of faults: every row is started, and what must be seen is looked at; and kills at random moments."""

from __future__ import annotations

import datetime
import os
import platform
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtbench.records.run import read_run
from dtbench.suite.errors import UnreadableRunError
from dtbench.tests.faults.rows import ROWS
from dtbench.tests.faults.table import (
    SUITE,
    Fault,
    check,
    contents,
    place,
    processes_in,
    run_shell,
    seen,
    wait_until_none_runs_in,
)
from dtbench.tests.programs import FRESH, environment

TABLE = os.environ.get("DTBENCH_FAULTS_TABLE")
KILLS = 20 if TABLE else 4
HEAD = """# Faults, and what dtbench does

`make faults` wrote this on {date}: Linux {kernel}, Python {python}. Each row starts a fault and looks at the exit code,
the lines on standard error, the run file, and that no process and no other file is left; the rows and the four
sentences of the policy that they hold stand in [dtbench/tests/faults](../dtbench/tests/faults).

| holds | fault | seen | s |
|---:|---|---|---:|
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """The lines of results/faults.md, written where `make faults` asks for it."""
    lines: list[str] = []
    yield lines
    if TABLE:
        date = datetime.datetime.now(datetime.UTC).date()
        head = HEAD.format(
            date=date, kernel=platform.release().split("-")[0], python=platform.python_version()
        )
        Path(TABLE).write_text(head + "".join(lines), encoding="utf-8")


@pytest.mark.parametrize("fault", [pytest.param(row, id=row.name) for row in ROWS])
def test_fault(fault: Fault, tmp_path: Path, table: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with place(tmp_path):
        monkeypatch.setattr(tempfile, "tempdir", None)
        if fault.before is not None:
            fault.before()
        files, began_s = contents(), time.monotonic()
        ended = run_shell(fault.words, tmp_path, fault)
        took_s = time.monotonic() - began_s
        check(fault, ended, files, tmp_path)
        table.append(f"| {fault.holds} | {fault.name} | {seen(ended, tmp_path)} | {took_s:.0f} |\n")


def test_every_row_has_a_name_of_its_own() -> None:
    names = [row.name for row in ROWS]
    assert len(names) == len(set(names)) and {row.holds for row in ROWS} == {1, 2, 3, 4}


@pytest.mark.parametrize("seed", range(KILLS))
def test_a_run_killed_at_a_random_moment_loses_and_repeats_nothing(tmp_path: Path, seed: int) -> None:
    """Killed is the launcher alone, or every process: then the ranks have to end by themselves, and every result is
    there once after `--resume`."""
    rng = random.Random(seed)
    words = ["run", str(SUITE), "--quick", "--nproc", rng.choice("123"), "--filter", "good", "-o", "x.jsonl"]
    with place(tmp_path):
        process = subprocess.Popen(
            [*FRESH, *words], env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(rng.uniform(0.5, 12.0))
        everyone = [*processes_in(tmp_path)] if rng.random() < 0.5 else []
        for pid in (process.pid, *everyone):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        process.wait()
        wait_until_none_runs_in(tmp_path)
        try:
            before = read_run("x.jsonl").results
            words.append("--resume")
        except UnreadableRunError:  # not begun, or without its header
            before = ()
            Path("x.jsonl").unlink(missing_ok=True)
        done = subprocess.run([*FRESH, *words], env=environment(), capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done
        run = read_run("x.jsonl")
        assert run.complete and run.results[: len(before)] == before
        assert Path("x.jsonl").read_bytes().count(b'"kind":"result"') == len(run.results) == 6
