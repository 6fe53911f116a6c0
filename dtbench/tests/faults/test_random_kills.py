"""Runs that are killed at a random moment, launcher and ranks alike, and gone on with: every result is there once."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from dtbench.records.run import read_run
from dtbench.tests.faults.conftest import TABLE
from dtbench.tests.faults.table import SUITE, processes_in, wait_until_none_runs_in
from dtbench.tests.programs import Forked, environment, start


@pytest.mark.slow
def test_runs_that_are_killed_lose_and_repeat_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    count = 100 if TABLE else 10
    record_property(
        "fault", f"SIGKILL at a random moment of {count} runs, each then resumed (seeds 0 to {count - 1})"
    )
    monkeypatch.chdir(tmp_path)
    had: Counter[int] = Counter()
    for seed in range(count):
        words = ["run", str(SUITE), "--quick", "--nproc", "1", "--filter", "good", "-o", f"{seed}.jsonl"]
        process = Forked(["dtbench", *words], environment(), ["stdout", "stderr"], tmp_path)
        time.sleep(random.Random(seed).uniform(0.0, 1.5))
        while left := processes_in(tmp_path):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        process.kill()
        wait_until_none_runs_in(tmp_path)
        file = tmp_path / f"{seed}.jsonl"
        before = read_run(file).results if file.exists() and file.stat().st_size else ()
        had[len(before)] += 1
        if file.exists():
            words.append("--resume")
        done = start(*words)
        assert (done.returncode, done.stderr) == (0, ""), (seed, done.stderr)
        run = read_run(file)
        assert run.complete and run.results[: len(before)] == before, seed
        assert file.read_bytes().count(b'"kind":"result"') == len({r.key for r in run.results}) == 6, seed
    record_property(
        "seen", "nothing lost, nothing twice; results there when killed: " + str(dict(sorted(had.items())))
    )
