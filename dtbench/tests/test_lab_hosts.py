"""Real labs: what they leave behind, what passes their links, their ranks' order, and their ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtbench.records.run import read_run
from dtbench.suite.errors import UsageError
from dtbench.tests.lab import network
from dtbench.tests.made_up import Cli
from dtbench.tests.programs import FRESH, LIMIT_S, environment, start_fresh

REQUIRED = bool(os.environ.get("CI") or os.environ.get("DTBENCH_REQUIRE_LAB"))
FAULTS = str(Path(__file__).with_name("faults_suite.py"))
NAME = f"p{os.getpid()}"[-8:]
PROBE = network.Lab(f"q{os.getpid()}"[-8:], 2, 10**9)


def what_is_missing() -> str:
    """Why no lab can be made here, "" if one can."""
    try:
        network.require_abilities()
        with network.temporary(PROBE):
            subprocess.run(["unshare", "--uts", "--pid", "--fork", "--mount-proc", "true"], check=True)
    except (UsageError, subprocess.CalledProcessError) as error:
        return f"no lab here: {error}"
    return ""


@pytest.fixture(autouse=True, scope="module")
def ability() -> None:
    if missing := what_is_missing():
        pytest.fail(missing) if REQUIRED else pytest.skip(missing)


@pytest.fixture(autouse=True)
def nothing_left(ability: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine's interfaces and routes stay as they are, and no namespace of ours is left."""
    monkeypatch.chdir(tmp_path)
    before = own_network()
    yield
    left = network.down(NAME)
    assert not left and own_network() == before


def own_network() -> tuple[str, str]:
    links = [link["ifname"] for link in json.loads(network.run_tool(["ip", "-json", "link"]))]
    return " ".join(links), network.run_tool(["ip", "route"])


def lab_run(*args: str) -> list[str]:
    return [*FRESH, "lab", "run", *args]


def finish(*args: str) -> subprocess.CompletedProcess[str]:
    return start_fresh(*lab_run(*args))


@pytest.fixture
def lab() -> Iterator[network.Lab]:
    made = network.Lab(NAME, 2, 400_000_000)
    with network.temporary(made):
        yield made


def test_up_status_down(dtbench: Cli) -> None:
    up = ("lab", "up", "--hosts", "3", "--rate", "1.5gbit", "--name", NAME)
    line = f"lab {NAME}: 3 hosts ({NAME}-0 to {NAME}-2), 1.5gbit each way, at most 179.3 MB/s of data"
    assert dtbench(*up) == (0, line + "\n", "")
    assert network.find(NAME) == network.Lab(NAME, 3, 1_500_000_000)
    code, _, err = dtbench(*up)
    assert (
        code == 2
        and f"there is a lab {NAME} already: take it down with `dtbench lab down --name {NAME}`" in err
    )
    code, out, _ = dtbench("lab", "status")
    assert code == 0 and f"{line}; 0 processes" in out.splitlines()
    inside = subprocess.Popen(["ip", "netns", "exec", f"dtlab-{NAME}-1", "sleep", "100"])
    while not network.pids_in(f"dtlab-{NAME}-1"):
        time.sleep(0.01)
    assert dtbench("lab", "down", "--name", NAME) == (0, f"the lab {NAME} is gone\n", "")
    assert inside.wait(10) == -signal.SIGKILL
    assert dtbench("lab", "down", "--name", NAME) == (
        0,
        f"there is no lab {NAME}: nothing to take down\n",
        "",
    )
    assert network.namespaces_of(NAME) == []


def test_a_step_that_fails_leaves_nothing(dtbench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    made = network.commands_of

    def cut(lab: network.Lab) -> Iterator[list[str]]:
        yield from list(made(lab))[:9]
        yield ["ip", "-n", lab.switch, "link", "add", "x", "type", "nonsense"]

    monkeypatch.setattr(network, "commands_of", cut)
    code, _, err = dtbench("lab", "up", "--rate", "1gbit", "--name", NAME)
    assert code == 2 and "link add x type nonsense` failed: " in err and err.count("\n") == 1
    assert network.namespaces_of(NAME) == []


def test_a_signal_while_it_is_made_leaves_nothing(dtbench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    made = network.commands_of

    def interrupted(lab: network.Lab) -> Iterator[list[str]]:
        for number, command in enumerate(made(lab)):
            if number == 5:
                signal.raise_signal(signal.SIGINT)
            yield command

    monkeypatch.setattr(network, "commands_of", interrupted)
    assert dtbench("lab", "up", "--rate", "1gbit", "--name", NAME)[0] == 130
    assert network.namespaces_of(NAME) == []


RATE = """
import json, socket, subprocess, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
data = torch.ones(2 * 2**20)  # 8 MiB
times = []
for _ in range(4):
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(data)
    took = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    times.append(took.item())
if dist.get_rank() == 0:
    shown = subprocess.check_output(["tc", "-s", "-json", "qdisc", "show", "dev", sys.argv[1]])
    print(json.dumps([min(times), socket.gethostname(), sys.argv[2:], json.loads(shown)]))
dist.barrier()
# Else a thread of gloo's that still holds a tensor may end the process as the interpreter goes away.
dist.destroy_process_group()
"""


def test_all_data_passes_the_links_and_none_faster_than_they_allow(tmp_path: Path) -> None:
    """Not that it comes near the rate: how near depends on what else keeps the cores busy."""
    Path("rate.py").write_text(RATE)
    done = finish("--hosts", "2", "--rate", "100mbit", "--", "rate.py", network.INTERFACE, "a $$ b")
    assert done.returncode == 0, done.stderr
    time_s, host, args, [shaper] = json.loads(done.stdout)
    assert host.startswith("t") and host.endswith("-0") and args == ["a $$ b"]
    assert (shaper["kind"], shaper["options"]["rate"] * 8) == ("tbf", 100_000_000)
    # Between 2 ranks each sends as many bytes as the tensor has, once as parts of sums and once as sums.
    assert shaper["bytes"] > 4 * 8 * 2**20
    limit = network.Lab("x", 2, 100_000_000).goodput_bytes_per_s
    assert 8 * 2**20 / time_s < 1.05 * limit


def test_ranks_are_numbered_host_by_host_and_each_launch_is_a_fresh_world(lab: network.Lab) -> None:
    run = ("dtbench", "run", "collectives", "--mesh", "dp=2,tp=2", "--launches", "2")
    only = (
        "--quick",
        "--size",
        "1MiB",
        "--filter",
        "all_reduce mesh_dim=dp ranks=2 groups=together mode=isolated",
        "-o",
        "x.jsonl",
    )
    done = finish("--name", NAME, "--ranks-per-host", "2", "--", *run, *only)
    assert done.returncode == 0, done.stderr
    run_file = read_run("x.jsonl")
    assert [rank.host for rank in run_file.header.ranks] == [f"{NAME}-0"] * 2 + [f"{NAME}-1"] * 2
    assert run_file.complete and {r.launch for r in run_file.results} == {0, 1}
    assert {r.status for r in run_file.results} == {"ok"}
    # The two groups of dp share the link.
    whole = [r.busbw_Bps for r in run_file.results if r.size_bytes == 2**20]
    assert len(whole) == 2 and all(b is not None and b < 0.6 * lab.goodput_bytes_per_s for b in whole)
    assert [pid for namespace in lab.namespaces for pid in network.pids_in(namespace)] == []


def test_a_killed_rank_ends_the_run_and_is_named(lab: network.Lab) -> None:
    done = finish("--name", NAME, "--", "dtbench", "run", FAULTS, "--filter", "how=dies", "-o", "x.jsonl")
    assert done.returncode != 0
    assert f"dtbench: rank 1 on {NAME}-1 died or did not answer during bad grave how=dies" in done.stderr
    assert f"dtbench: rank 1 on {NAME}-1 died of SIGKILL" in done.stderr
    assert [pid for namespace in lab.namespaces for pid in network.pids_in(namespace)] == []


def test_sigterm_ends_all_and_removes_what_was_made_for_it() -> None:
    Path("wait.py").write_text("import time; print('here', flush=True); time.sleep(600)")
    process = subprocess.Popen(
        lab_run("--hosts", "3", "--rate", "100mbit", "--", "wait.py"),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    name = f"t{process.pid}"
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    pids = [pid for namespace in network.namespaces_of(name) for pid in network.pids_in(namespace)]
    assert len(pids) >= 3 * 3  # unshare, the agent and the rank
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    process.stdout.close()
    assert network.namespaces_of(name) == [] and not [p for p in pids if Path(f"/proc/{p}").exists()]
