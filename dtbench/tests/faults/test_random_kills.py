"""Runs that are killed at a random moment, while ranks start too, and gone on with: every result is there once.

Killed is every process, or the launcher alone or its group, as a shell or a scheduler does it: then the ranks have to
end by themselves. Cases leave children behind, which the next start of dtbench ends.
"""

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
from dtbench.tests.faults.table import GONE_S, SUITE, described, processes_in, wait_until_none_runs_in
from dtbench.tests.programs import Forked, environment, start

COUNT = 200 if TABLE else 10
CASES = {"good": 6, "good\ngone children": 7}  # and how many results they have


@pytest.mark.slow
def test_runs_that_are_killed_lose_and_repeat_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    record_property(
        "fault",
        f"SIGKILL of {COUNT} runs at a random moment: of every process, of the launcher, of its group; on one to three "
        f"ranks, some with children; each then resumed (seeds 0 to {COUNT - 1})",
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv(
        "TMPDIR", str(tmp_path / "tmp")
    )  # ranks of another server are not known by their environment
    had: Counter[int] = Counter()
    for seed in range(COUNT):
        rng = random.Random(seed)
        cases, results = rng.choice(list(CASES.items()))
        words = [
            "run",
            str(SUITE),
            "--quick",
            "--nproc",
            rng.choice("123"),
            "--filter",
            cases,
            "-o",
            f"{seed}.jsonl",
        ]
        process = Forked(["dtbench", *words], environment(), ["stdout", "stderr"], tmp_path)
        time.sleep(rng.uniform(0.0, 3.0))
        kill(rng.choice(["all", "launcher", "group"]), process, tmp_path)
        wait_until_no_rank_runs(tmp_path)
        file = tmp_path / f"{seed}.jsonl"
        before = read_run(file).results if file.exists() and file.stat().st_size else ()
        had[len(before)] += 1
        if file.exists():
            words.append("--resume")
        done = start(*words)
        assert (done.returncode, done.stderr) == (0, ""), (seed, words, before, done.stdout, done.stderr)
        run = read_run(file)
        assert run.complete and run.results[: len(before)] == before, seed
        assert file.read_bytes().count(b'"kind":"result"') == len({r.key for r in run.results}) == results, (
            seed
        )
        wait_until_none_runs_in(tmp_path)
    record_property(
        "seen",
        "nothing lost, nothing twice, nothing left; results there when killed: "
        + str(dict(sorted(had.items()))),
    )


def kill(whom: str, process: Forked, folder: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        if whom == "launcher":
            os.kill(process.pid, signal.SIGKILL)
        elif whom == "group":
            os.killpg(process.pid, signal.SIGKILL)
    while whom == "all" and (left := processes_in(folder)):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    process.kill()


def wait_until_no_rank_runs(folder: Path) -> None:
    """Children of cases, which know nothing of their launcher, may."""
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid in processes_in(folder) if not is_child_of_a_case(pid)]:
        assert time.monotonic() < deadline, f"still run: {[described(pid) for pid in left]}"
        time.sleep(0.05)


def is_child_of_a_case(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"sleep\0")
    return True  # it has ended
