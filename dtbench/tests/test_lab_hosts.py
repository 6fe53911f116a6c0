"""Hosts made on one machine: what passes their links, their ranks' order, their ends, and what they leave behind."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtbench.errors import UsageError
from dtbench.records.run import read_run
from dtbench.tests import lab
from dtbench.tests.programs import LIMIT_S, environment, start_fresh

REQUIRED = bool(os.environ.get("CI") or os.environ.get("DTBENCH_REQUIRE_LAB"))
FAULTS = str(Path(__file__).with_name("faults_suite.py"))
LAB = (sys.executable, "-P", "-m", "dtbench.tests.lab")


@pytest.fixture(autouse=True, scope="module")
def ability() -> None:
    """Skips the tests, or fails them where they are required, if no hosts can be made here."""
    try:
        lab.require_abilities()
        with lab.temporary(lab.Lab(f"q{os.getpid()}", 2, 10**9)):
            subprocess.run(["unshare", "--uts", "--mount", "true"], check=True)
    except (UsageError, subprocess.CalledProcessError) as error:
        (pytest.fail if REQUIRED else pytest.skip)(f"no hosts can be made here: {error}")


@pytest.fixture(autouse=True)
def nothing_left(ability: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine's interfaces and routes stay as they are."""
    monkeypatch.chdir(tmp_path)
    before = [lab.run_tool("ip", "-o", what) for what in ("link", "route")]
    yield
    assert [lab.run_tool("ip", "-o", what) for what in ("link", "route")] == before


def namespaces(name: str) -> list[str]:
    return [word for word in lab.run_tool("ip", "netns", "list").split() if word.startswith(f"dtlab-{name}-")]


def test_an_error_leaves_nothing() -> None:
    hosts = lab.Lab(f"p{os.getpid()}", 3, 10**9)
    with pytest.raises(UsageError, match="nonsense"), lab.temporary(hosts):
        lab.run_tool("ip", "-n", hosts.namespaces[0], "link", "add", "x", "type", "nonsense")
    assert namespaces(hosts.name) == []


def test_ranks_are_numbered_host_by_host_and_each_launch_is_a_fresh_world() -> None:
    hosts = "--hosts 2 --mbit 400 --ranks-per-host 2 --"
    run = "dtbench run collectives --mesh dp=2,tp=2 --launches 2 --quick --size 1MiB -o x.jsonl --filter"
    case = "all_reduce mesh_dim=dp ranks=2 groups=together mode=isolated"
    done = start_fresh(*LAB, *hosts.split(), *run.split(), case)
    assert done.returncode == 0, done.stderr
    run_file = read_run("x.jsonl")
    assert [str(rank.host)[-2:] for rank in run_file.header.ranks] == ["-0", "-0", "-1", "-1"]
    assert run_file.complete
    assert [(r.launch, r.status, r.size_bytes) for r in run_file.results] == [
        (0, "ok", 2**20),
        (1, "ok", 2**20),
    ]
    # No faster than the links allow, which the two groups of dp share.
    assert max(r.busbw_Bps or math.inf for r in run_file.results) < 0.6 * 400e6 / 8 * 1448 / 1514


def test_a_killed_rank_ends_the_run_and_is_named() -> None:
    run = ("dtbench", "run", FAULTS, "--filter", "how=dies rank=1", "-o", "x.jsonl")
    done = start_fresh(*LAB, "--hosts", "2", "--mbit", "400", "--", *run)
    assert (
        done.returncode == 5 and "-1 died or did not answer during bad grave how=dies rank=1" in done.stderr
    )


def test_sigterm_ends_all_and_removes_what_was_made_for_it() -> None:
    Path("wait.py").write_text("import time; print('here', flush=True); time.sleep(600)")
    command = (*LAB, "--hosts", "3", "--mbit", "100", "--", "wait.py")
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        name = f"t{process.pid}"
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        pids = [pid for namespace in namespaces(name) for pid in lab.pids_in(namespace)]
        assert len(pids) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert namespaces(name) == [] and not [p for p in pids if Path(f"/proc/{p}").exists()]
