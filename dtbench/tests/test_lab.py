"""The parts of `dtbench lab` that need no root: names, rates, command lines, refusals, exit codes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtbench.engine.signals import refuse_if_ending, signals_held
from dtbench.engine.workers import StartedProgram
from dtbench.suite.errors import UsageError
from dtbench.tests.lab import network, run
from dtbench.tests.lab.agent import Orders
from dtbench.tests.made_up import Cli

LAB = network.Lab("ab", 3, 400_000_000)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("400mbit", 400e6), ("1.6gbit", 1.6e9), ("1500kbit", 1.5e6), ("10GBIT", 1e10), (" 1mbit ", 1e6)],
)
def test_rates(text: str, rate: float) -> None:
    assert network.parse_rate(text) == rate
    assert network.parse_rate(network.format_rate(int(rate))) == rate


@pytest.mark.parametrize(
    "text",
    [
        "",
        "400",
        "400mb",
        "400mbps",
        "-1mbit",
        "1e3mbit",
        "nanmbit",
        "999kbit",
        "101gbit",
        "1mbit;ls",
        "٤mbit",
    ],
)
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match=r"--rate .*expected"):
        network.parse_rate(text)


@pytest.mark.parametrize("name", ["", "toolonger", "-a", "a-", "A", "a b", "a/b", "..", "ä", "a\n"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        network.Lab(name, 2, 10**8)


@pytest.mark.parametrize("hosts", [-1, 0, 1, 33])
def test_a_lab_has_2_to_32_hosts(hosts: int) -> None:
    with pytest.raises(UsageError, match="expected 2 to 32"):
        network.Lab("ab", hosts, 10**8)


def test_addresses_sort_as_text_as_the_hosts_do() -> None:
    addresses = network.Lab("a", network.MAX_HOSTS, 10**8).addresses
    assert addresses == sorted(addresses) and len(set(addresses)) == 32


def test_the_bucket_holds_2_ms_and_never_less_than_some_frames() -> None:
    assert network.burst_bytes(400_000_000) == 100_000
    assert network.burst_bytes(1_600_000_000) == 400_000
    assert network.burst_bytes(1_000_000) == 16 * 1514


def test_goodput_is_the_rate_less_headers() -> None:
    assert LAB.goodput_bytes_per_s == pytest.approx(50e6 * 1448 / 1514)


def test_every_link_is_made_inside_namespaces_and_shaped_at_both_ends() -> None:
    commands = list(network.commands_of(LAB))
    assert all(command[1] == "-n" and command[2].startswith("dtlab-ab-") for command in commands)
    shapers = [c for c in commands if c[0] == "tc"]
    assert [(c[2], c[6]) for c in shapers] == [
        (place, port)
        for host in range(3)
        for place, port in [(f"dtlab-ab-{host}", "eth0"), ("dtlab-ab-switch", f"port{host}")]
    ]
    assert {tuple(c[7:]) for c in shapers} == {
        ("root", "tbf", "rate", "400000000bit", "burst", "100000", "latency", "50ms")
    }


def test_the_kernels_list_says_which_labs_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["dtlab-a-1-0", "dtlab-a-1-switch", "dtlab-a-0", "dtlab-a-x", "dtlab--0", "other", "dtlab-a-0-"]
    text = "[" + ",".join(f'{{"name": "{name}"}}' for name in listed) + "]"
    monkeypatch.setattr(network, "run_tool", lambda command: text)
    assert network.names() == ["a", "a-1"]
    assert network.namespaces_of("a") == ["dtlab-a-0"]
    assert network.namespaces_of("a-1") == ["dtlab-a-1-0", "dtlab-a-1-switch"]
    with pytest.raises(UsageError, match="the lab a is damaged: take it down"):
        network.find("a")
    with pytest.raises(UsageError, match=r"no lab b; there is a, a-1: make it with"):
        network.find("b")
    monkeypatch.setattr(network, "run_tool", lambda command: "")  # what `ip` prints of none
    assert network.names() == []


def test_without_root(dtbench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for args in [("up", "--rate", "1mbit"), ("run", "true"), ("down",), ("status",)]:
        code, out, err = dtbench("lab", *args)
        assert (code, out) == (2, "") and "needs root: run it with sudo" in err


def test_without_iproute2(dtbench: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool in ("ip", "tc", "unshare") else tool)
    code, _, err = dtbench("lab", "up", "--rate", "1mbit")
    assert code == 2 and "needs ip, tc, unshare, not on the PATH: install iproute2 and util-linux" in err


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("up",), "Missing option '--rate'"),
        (("up", "--rate", "fast"), "expected a number and kbit"),
        (("up", "--rate", "1mbit", "--hosts", "1"), "--hosts 1: expected 2 to 32"),
        (("down", "--name", "../x"), "expected 1 to 8 of a-z"),
        (("run",), "Missing argument"),
        (("run", "--hosts", "2", "true"), "--hosts and --rate go together"),
        (("run", "--ranks-per-host", "0", "true"), "0 is not in the range"),
        (("run", "--", "no-such-program"), "no-such-program is not on the PATH"),
        (("run", "gone.py"), "there is no file gone.py"),
    ],
)
def test_usage(dtbench: Cli, args: tuple[str, ...], says: str) -> None:
    code, out, err = dtbench("lab", *args)
    assert code == 2 and out == "" and says in err and err.count("\n") == 1


def test_a_tool_that_fails_is_named_with_what_it_said() -> None:
    with pytest.raises(UsageError, match=r"`sh -c echo no >&2; exit 3` failed: no"):
        network.run_tool(["sh", "-c", "echo no >&2; exit 3"])
    with pytest.raises(UsageError, match="cannot run no-such-tool: No such file"):
        network.run_tool(["no-such-tool"])


def test_what_a_rank_is_started_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.py").touch()
    python = sys.executable
    assert run.program_of(["dtbench", "run", "-o", "a b"]) == [
        python,
        "-P",
        "-m",
        "dtbench",
        "run",
        "-o",
        "a b",
    ]
    assert run.program_of(["x.py", "--n", "$RANK"]) == [python, "x.py", "--n", "$RANK"]
    assert run.program_of(["sh", "-c", "true"]) == [shutil.which("sh"), "-c", "true"]


def test_what_a_host_knows() -> None:
    orders = Orders(1, LAB.hostnames, LAB.addresses, "eth0", 2, ["true"], "/x")
    assert orders.hosts_file().splitlines()[:4] == [
        "127.0.0.1 localhost",
        "10.210.0.101 ab-0",
        "10.210.0.102 ab-1",
        "10.210.0.103 ab-2",
    ]
    added = orders.environment({})
    assert (added["GLOO_SOCKET_IFNAME"], added["NCCL_SOCKET_IFNAME"]) == ("eth0", "eth0")
    assert added["OMP_NUM_THREADS"] == "1"
    given = orders.environment({"OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "fast0"})
    assert sorted(given) == ["NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """As in a terminal: a shell's background jobs, and what they start, are deaf to SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_held_signals_wait() -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(KeyboardInterrupt), signals_held(signal.SIGCHLD) as held:
        assert held >= {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD}
        refuse_if_ending()
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            refuse_if_ending()
        assert signal.sigwait({signal.SIGINT}) == signal.SIGINT
        refuse_if_ending()  # it was taken
        signal.raise_signal(signal.SIGINT)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask


# ------------------------------------------------------------------- waiting, with plain processes as agents


def agents_of(*scripts: str) -> list[run._Agent]:
    return [
        run._Agent(f"ab-{i}", StartedProgram(["sh", "-c", script, "sh"], connected=True), None)
        for i, script in enumerate(scripts)
    ]


def waited(agents: list[run._Agent], *, kill: signal.Signals | None = None) -> int:
    with signals_held() as held:
        if kill is not None:
            signal.raise_signal(kill)
        try:
            return run._wait(agents, held)
        finally:
            for agent in agents:
                agent.program.end()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are started while signals are held, as `run` does, and limits are short."""
    monkeypatch.setattr(run, "_GRACE_S", 0.3)
    monkeypatch.setattr(run, "_SHUTDOWN_S", 0.3)


@pytest.mark.usefixtures("held")
def test_all_end_well(capsys: pytest.CaptureFixture[str]) -> None:
    agents = agents_of("exit 0", "sleep 0.1")
    assert waited(agents) == 0 and run._conclude(agents) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("held")
def test_one_that_fails_ends_the_others_after_a_grace() -> None:
    agents = agents_of("exit 1", "sleep 100")
    start = time.monotonic()
    assert waited(agents) == 0
    assert 0.3 <= time.monotonic() - start < 50
    assert agents[1].program.wait() == -signal.SIGTERM


@pytest.mark.usefixtures("held")
def test_one_that_does_not_end_is_killed() -> None:
    agents = agents_of("exit 1", "trap '' TERM; while :; do sleep 1; done")
    assert waited(agents) == 0
    assert agents[1].program.wait() == -signal.SIGKILL


@pytest.mark.usefixtures("held")
def test_our_signal_is_passed_on() -> None:
    agents = agents_of("trap 'exit 9' TERM; sleep 100 & wait", "sleep 100")
    time.sleep(0.2)  # the trap is set
    assert waited(agents, kill=signal.SIGTERM) == signal.SIGTERM
    assert agents[0].program.wait() in (9, -signal.SIGTERM)


@pytest.mark.parametrize(
    ("reports", "code", "says"),
    [
        ([[], [(3, 7)]], 7, ""),
        ([[(1, -9)], [(2, 5), (3, 5)]], 5, "dtbench: rank 1 on ab-0 died of SIGKILL\n"),
        ([[(0, -11)], []], 139, "dtbench: rank 0 on ab-0 died of SIGSEGV\n"),
        ([[], []], 5, "dtbench: the ranks on ab-1 could not be started or watched\n"),
    ],
)
def test_the_exit_code_is_the_commands(
    reports: list[list[tuple[int, int]]], code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    agents = agents_of("exit 0", "exit 1")
    for agent, report in zip(agents, reports, strict=True):
        agent.program.wait()
        agent.failures = report
    assert run._conclude(agents) == code
    assert capsys.readouterr().err == says


def test_a_report_is_heard_and_leaves_out_those_that_the_launcher_ended() -> None:
    code = "import sys; from dtbench.engine.workers import connection_at; c = connection_at(sys.argv[1]); "
    code += "c.send([(2, -15), (3, 7)]); c.recv()"
    agent = run._Agent("ab-0", StartedProgram([sys.executable, "-c", code], connected=True), None)
    assert waited([agent]) == 0
    assert agent.failed and agent.failures == [(3, 7)]


def test_what_other_hosts_printed_is_shown_when_it_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agents = agents_of("exit 0", "exit 0")
    agents[1].output = tmp_path / "output"
    agents[1].output.write_bytes(b"".join(b"line %d\n" % i for i in range(30)) + b"\xff\n")
    for agent in agents:
        agent.program.wait()
    agents[1].failures = [(1, 3)]
    assert run._conclude(agents) == 3
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 20 and lines[0] == "ab-1: line 11" and lines[-1] == "ab-1: \ufffd"
