"""A launcher that is killed at many moments while its ranks start: they end, too, and by themselves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path

import pytest

from dtbench.tests.faults.conftest import TABLE
from dtbench.tests.faults.table import GONE_S, SUITE, described, wait_until_none_runs_in
from dtbench.tests.programs import FRESH, LIMIT_S, Forked, environment

MOMENTS = 40 if TABLE else 8
FORKS = 20 if TABLE else 4


@pytest.mark.slow
@pytest.mark.parametrize(("how", "longest_s"), [("forked", 1.2), ("fresh", 8.0)])
def test_ranks_end_with_a_launcher_that_is_killed_while_they_start(
    tmp_path: Path, how: str, longest_s: float, record_property: Callable[[str, object], None]
) -> None:
    """Of the forked ones some are forked only when the launcher is dead: their parent is the fork server."""
    count = MOMENTS if how == "forked" else MOMENTS // 4
    record_property(
        "fault", f"SIGKILL of the launcher of four {how} ranks at {count} moments while they start"
    )
    env = environment() | {"TMPDIR": str(tmp_path)}
    files = [str(tmp_path / name) for name in ("stdout", "stderr")]
    for number in range(count):
        command = ["run", str(SUITE), "--quick", "--nproc", "4", "--filter", "long", "-o", f"{number}.jsonl"]
        process: Forked | subprocess.Popen[bytes]
        if how == "forked":
            process = Forked(["dtbench", *command], env, files, tmp_path)
        else:
            process = subprocess.Popen(
                [*FRESH, *command], env=env, cwd=tmp_path, stderr=subprocess.DEVNULL, start_new_session=True
            )
        time.sleep((number + 0.5) / count * longest_s)
        with contextlib.suppress(ProcessLookupError):
            if number % 2:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until_none_runs_in(tmp_path)
    record_property("seen", "no rank is left")


@pytest.mark.slow
def test_a_rank_that_is_forked_for_a_killed_launcher_ends(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Killed as soon as the fork server has a child for it, which has not come to its folder: nothing else sees it."""
    record_property("fault", f"SIGKILL of the launcher as its rank is forked, {FORKS} times")
    server = vars(forkserver._forkserver)["_forkserver_pid"]
    files = [str(tmp_path / name) for name in ("stdout", "stderr")]
    others = children_of(server)
    for number in range(FORKS):
        command = ["dtbench", "run", str(SUITE), "--quick", "--nproc", "1", "--filter", "good"]
        process = Forked([*command, "-o", f"{number}.jsonl"], environment(), files, tmp_path)
        deadline = time.monotonic() + LIMIT_S
        while not (ranks := children_of(server) - others - {process.pid}):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()
        deadline = time.monotonic() + GONE_S
        while ranks & children_of(server):
            assert time.monotonic() < deadline, [described(pid) for pid in ranks]
            time.sleep(0.01)
    record_property("seen", "no rank is left")


def children_of(parent: int) -> set[int]:
    """The processes that it has forked and that have not ended."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, of = stat.read_text().rpartition(")")[2].split()[:2]
            if int(of) == parent and state != "Z":
                found.add(int(stat.parent.name))
    return found
