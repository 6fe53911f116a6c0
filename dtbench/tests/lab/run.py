"""`dtbench lab run`: a command on ranks in every host of a lab.

Each host gets an agent of torch's elastic launcher, as on real machines: in the host's network
namespace, with a host name, a hosts file and a PID namespace of its own. Agents die with this process
and ranks with their agent, both by the kernel's doing.
"""

from __future__ import annotations

import math
import shutil
import signal
import sys
import time
from collections.abc import Sequence, Set
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path

import click

from dtbench.engine.signals import how_ended, signals_held
from dtbench.engine.workers import StartedProgram, scratch
from dtbench.suite.errors import EXIT_CASE_FAILED, EXIT_OK, UsageError
from dtbench.tests.lab import network
from dtbench.tests.lab.agent import Orders

# After the first failure: so long may the other hosts take to notice and say what they know. dtbench's
# own ranks need 5 s for their roll call, more on busy cores.
_GRACE_S = 10.0
# From the signal to the kill: agents give their ranks 10 s.
_SHUTDOWN_S = 15.0
# So often it looks whether a signal waits.
_TICK_S = 0.5
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
    """A started agent. output: what the ranks of a host other than the first print. failures: (rank,
    exit code) of its ranks, once one of them failed and all have ended."""

    hostname: str
    program: StartedProgram
    output: Path | None
    failures: list[tuple[int, int]] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether its ranks have ended."""
        return bool(self.failures) or self.program.wait(0) is not None

    @property
    def failed(self) -> bool:
        return bool(self.failures or self.program.wait(0))

    def hear(self) -> None:
        """What it reports, or that it has ended."""
        try:
            found: list[tuple[int, int]] = self.program.connection.recv()
        except (EOFError, OSError):
            self.program.wait()
            return
        # The launcher ends the others when one has failed.
        self.failures = [f for f in found if f[1] != -signal.SIGTERM] or found

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
        scratch() as folder,
        signals_held() as held,
    ):
        agents: list[_Agent] = []
        try:
            hosts = range(lab.hosts)
            agents.extend(_start(lab, host, ranks_per_host, program, folder) for host in hosts)
            ended_by = _wait(agents, held)
            return 128 + ended_by if ended_by else _conclude(agents)
        finally:
            for agent in agents:
                agent.program.end()
            network.end_processes(lab.namespaces)


def _start(lab: network.Lab, host: int, ranks_per_host: int, program: Sequence[str], folder: Path) -> _Agent:
    own = folder / str(host)
    own.mkdir()
    orders = Orders(
        host=host,
        hostnames=lab.hostnames,
        addresses=lab.addresses,
        interface=network.INTERFACE,
        ranks_per_host=ranks_per_host,
        command=program,
        folder=str(own),
    )
    command = [*entry_of(lab.namespaces[host]), sys.executable, "-P", "-m", "dtbench.tests.lab.agent"]
    output = None if host == 0 else own / "output"
    with output.open("wb") if output else nullcontext() as file:
        started = StartedProgram(command, out=file, connected=True)
    with suppress(BrokenPipeError):  # it ended at once, which `_wait` finds
        started.connection.send(orders)
    return _Agent(lab.hostnames[host], started, output)


def _wait(agents: Sequence[_Agent], held: Set[signal.Signals]) -> int:
    """Until all agents have ended, or were told to and had their time; the signal that ended us, or 0.

    Sleeps until an agent reports or ends, and looks now and then whether a signal has come.
    """
    ended_by, told = 0, False
    deadline: float | None = None
    while not all(agent.over for agent in agents):
        if deadline is None and any(agent.failed for agent in agents):
            deadline = time.monotonic() + _GRACE_S
        left = math.inf if deadline is None else deadline - time.monotonic()
        running = [agent for agent in agents if not agent.over]
        ready = wait([agent.program.connection for agent in running], max(0.0, min(left, _TICK_S)))
        for agent in running:
            if agent.program.connection in ready:
                agent.hear()
        got = signal.sigtimedwait(held, 0)
        number = 0 if got is None else got.si_signo
        if number or left <= 0:
            if told:  # their time is over, or Ctrl-C was pressed twice
                break
            ended_by, told = number, True
            _tell(agents, signal.Signals(number or signal.SIGTERM))
            deadline = time.monotonic() + _SHUTDOWN_S
    return ended_by


def _tell(agents: Sequence[_Agent], number: signal.Signals) -> None:
    """Sends the signal to the agents that run; they pass it on to their ranks."""
    for agent in agents:
        if not agent.over:
            # `unshare` and the agent are this process group; the ranks are in sessions of their own.
            agent.program.tell(number)


def _conclude(agents: Sequence[_Agent]) -> int:
    """The exit code of the command, after saying what the first host has not shown.

    It is the code of a rank that ended by itself, before that of one that a signal ended.
    """
    if not any(agent.failed for agent in agents):
        return EXIT_OK
    for agent in agents:
        for line in agent.last_lines():
            click.echo(f"{agent.hostname}: {line}", err=True)
        for rank, code in agent.failures:
            if code < 0:
                click.echo(f"dtbench: rank {rank} on {agent.hostname} {how_ended(code)}", err=True)
    codes = [code for agent in agents for _, code in agent.failures]
    if not codes:
        lost = ", ".join(agent.hostname for agent in agents if agent.failed)
        click.echo(f"dtbench: the ranks on {lost} could not be started or watched", err=True)
        return EXIT_CASE_FAILED
    return next((code for code in codes if code > 0), 128 - codes[0])
