"""`dtbench lab run`: a command on ranks in every host of a lab.

Each host gets an agent of torch's elastic launcher, as on real machines: in the host's network
namespace, with a host name, a hosts file and a PID namespace of its own. Agents die with this process
and ranks with their agent, both by the kernel's doing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import click

from dtbench.errors import EXIT_CASE_FAILED, EXIT_OK, UsageError
from dtbench.lab import network
from dtbench.lab.agent import Orders
from dtbench.lab.signals import ending_signals, signals_held

# After the first failure: so long may the other hosts take to notice and say what they know. dtbench's
# own ranks need its roll call of 2 s.
_GRACE_S = 6.0
# From the signal to the kill: agents give their ranks 10 s.
_SHUTDOWN_S = 15.0
_SHOWN_LINES = 20
_NAMESPACES = Path("/var/run/netns")  # where iproute2 keeps them


def program_of(command: Sequence[str]) -> list[str]:
    """The command as a rank starts it: `dtbench` and scripts by this Python, else a program of the PATH.

    Raises:
        UsageError: there is no such script or program.
    """
    first, *rest = command
    if first == "dtbench":
        return [sys.executable, "-P", "-m", "dtbench", *rest]
    if first.endswith(".py"):
        if not Path(first).is_file():
            raise UsageError(f"there is no file {first}: expected `dtbench`, a script or a program")
        return [sys.executable, first, *rest]
    program = shutil.which(first)
    if program is None:
        raise UsageError(f"{first} is not on the PATH: expected `dtbench`, a script.py or a program")
    return [program, *rest]


def entry_of(namespace: str) -> list[str]:
    """What starts a program inside a host: in its network, with names and process numbers of its own.
    `setpriv` ends it with us, `--kill-child` all inside with it."""
    return [
        *("setpriv", "--pdeathsig", "KILL"),
        *("nsenter", f"--net={_NAMESPACES / namespace}", "--"),
        *("unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "--"),
    ]


@dataclass
class _Agent:
    """A started agent. output: what the ranks of a host other than the first print."""

    hostname: str
    process: subprocess.Popen[bytes]
    report: Path
    output: Path | None

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def failures(self) -> list[tuple[int, int]]:
        """(rank, exit code) of its ranks that failed by themselves, first to last."""
        with suppress(OSError, ValueError):
            return [(rank, code) for rank, code in json.loads(self.report.read_text())]
        return []

    def last_lines(self) -> list[str]:
        """Of what its ranks printed, if that was not shown."""
        if self.output is None:
            return []
        return self.output.read_text("utf-8", "replace").splitlines()[-_SHOWN_LINES:]


def run(lab: network.Lab, ranks_per_host: int, command: Sequence[str]) -> int:
    """Runs the command on all hosts and waits for it; its exit code. The first host's output is shown.

    Raises:
        UsageError: something runs in the lab already, or the command cannot be started.
    """
    program = program_of(command)
    busy = [pid for namespace in lab.namespaces for pid in network.pids_in(namespace)]
    if busy:
        raise UsageError(
            f"something runs in the lab {lab.name} already (processes {', '.join(map(str, busy))}): "
            f"wait for it, or make another lab with --name"
        )
    with (
        tempfile.TemporaryDirectory(prefix="dtbench-lab-") as folder,
        signals_held(signal.SIGCHLD) as held,
    ):
        agents: list[_Agent] = []
        try:
            hosts = range(lab.hosts)
            agents.extend(_start(lab, host, ranks_per_host, program, Path(folder)) for host in hosts)
            ended_by = _wait(agents, held)
        finally:
            for agent in agents:
                agent.process.kill()
                agent.process.wait()
            network.end_processes(lab.namespaces)
        return 128 + ended_by if ended_by else _conclude(agents)


def _start(lab: network.Lab, host: int, ranks_per_host: int, program: Sequence[str], folder: Path) -> _Agent:
    orders = Orders(
        host=host,
        hostnames=lab.hostnames,
        addresses=lab.addresses,
        interface=network.INTERFACE,
        ranks_per_host=ranks_per_host,
        command=program,
        report=str(folder / f"{host}.json"),
    )
    entry = entry_of(lab.namespaces[host])
    command = [*entry, sys.executable, "-P", "-m", "dtbench.lab.agent", orders.to_json()]
    output = None if host == 0 else folder / f"{host}.txt"
    with output.open("wb") if output else nullcontext() as file:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # Ctrl-C reaches us alone; we pass it on
        )
    return _Agent(lab.hostnames[host], process, Path(orders.report), output)


def _wait(agents: Sequence[_Agent], held: Set[signal.Signals]) -> int:
    """Until all agents have ended, or were told to and had their time; the signal that ended us, or 0.

    Sleeps in the kernel: nothing polls while the ranks measure.
    """
    ended_by, told = 0, False
    deadline: float | None = None
    while any(agent.running for agent in agents):
        got: signal.struct_siginfo | None
        if deadline is None:
            got = signal.sigwaitinfo(held)
        else:
            got = signal.sigtimedwait(held, max(deadline - time.monotonic(), 0.0))
        if got is None or got.si_signo in ending_signals():
            if told:  # their time is over, or Ctrl-C was pressed twice
                break
            ended_by, told = got.si_signo if got else 0, True
            _tell(agents, ended_by or signal.SIGTERM)
            deadline = time.monotonic() + _SHUTDOWN_S
        elif deadline is None and any(agent.process.poll() for agent in agents):
            deadline = time.monotonic() + _GRACE_S
    return ended_by


def _tell(agents: Sequence[_Agent], number: int) -> None:
    """Sends the signal to the agents that run; they pass it on to their ranks."""
    for agent in agents:
        if agent.running:
            # `unshare` and the agent are this process group; the ranks are in sessions of their own.
            os.killpg(agent.process.pid, number)


def _conclude(agents: Sequence[_Agent]) -> int:
    """The exit code of the command, after saying what the first host has not shown.

    It is the code of a rank that ended by itself, before that of one that a signal ended.
    """
    if all(agent.process.returncode == 0 for agent in agents):
        return EXIT_OK
    failures = [(code, rank, agent) for agent in agents for rank, code in agent.failures()]
    for agent in agents:
        for line in agent.last_lines():
            click.echo(f"{agent.hostname}: {line}", err=True)
    for code, rank, agent in failures:
        if code < 0:
            click.echo(f"dtbench: rank {rank} on {agent.hostname} died of {_name(-code)}", err=True)
    if not failures:
        ended = ", ".join(f"{a.hostname} {a.process.returncode}" for a in agents)
        click.echo(
            f"dtbench: the command did not come to its end (exit codes of the agents: {ended})", err=True
        )
        return EXIT_CASE_FAILED
    codes = [code for code, _, _ in failures]
    return next((code for code in codes if code > 0), 128 - codes[0])


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
