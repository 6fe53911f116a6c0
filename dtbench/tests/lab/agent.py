"""Inside a host of a lab: its name and hosts file, then an agent of torch's elastic launcher.

Started by `run`, which sends it its `Orders` and hears which of its ranks failed. It is process 1 of a PID namespace,
so the kernel ends all that it started when it ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from dtbench.engine.launch import run_elastic
from dtbench.engine.workers import connection_at

_RENDEZVOUS_PORT = 29400  # torchrun's own; nothing else listens in a lab
# Agents start together, but many of them on few cores need a while to import torch.
_JOIN_S = 300
# What ranks get to end by themselves before the agent kills them; less than `run` gives the agent.
_SHUTDOWN_S = 10
_HOSTS = Path("/etc/hosts")


@dataclass(frozen=True)
class Orders:
    """What an agent is to do. host: its number; hostnames and addresses: of all hosts, in order;
    folder: for its files."""

    host: int
    hostnames: Sequence[str]
    addresses: Sequence[str]
    interface: str
    ranks_per_host: int
    command: Sequence[str]
    folder: str

    def hosts_file(self) -> str:
        """Names of the hosts: what /etc/hosts says inside the lab. The mapped addresses are those by
        which torch's store, which listens on IPv6, asks for the names of its clients."""
        named = [("127.0.0.1", "localhost"), *zip(self.addresses, self.hostnames, strict=True)]
        lines = [f"{prefix}{address} {name}" for prefix in ("", "::ffff:") for address, name in named]
        return "\n".join(lines) + "\n"

    def environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """What the ranks' environment gets where the user's has nothing: an interface, which then is not looked up by
        name, and one thread each."""
        added = {f"{library}_SOCKET_IFNAME": self.interface for library in ("GLOO", "NCCL", "TP")}
        added["OMP_NUM_THREADS"] = "1"
        return {name: value for name, value in added.items() if name not in environ}


def main() -> NoReturn:
    # Process 1 gets only the signals it has a handler for. `run` holds them back until here, and the
    # elastic launcher has handlers of its own once there are ranks. Until then it might swallow an
    # exception of ours while it imports.
    _leave_on_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    connection = connection_at(sys.argv[1])
    orders: Orders = connection.recv()
    _become(orders)
    _launch(orders, connection)
    sys.exit()


def _leave_on_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda got, _frame: os._exit(128 + got))


def _become(orders: Orders) -> None:
    """This process becomes the host. All of it is seen from inside the namespaces only."""
    socket.sethostname(orders.hostnames[orders.host])
    if _HOSTS.exists():
        own = Path(orders.folder) / "hosts"
        own.write_text(orders.hosts_file())
        subprocess.run(["mount", "--bind", own, _HOSTS], check=True)
    os.environ.update(orders.environment(os.environ))


def _launch(orders: Orders, connection: Connection) -> None:
    """Runs the ranks of this host to their end. Does not return where one fails.

    The rendezvous numbers hosts by their addresses as text (`local_addr`), whichever comes first.
    """
    ended_by = run_elastic(
        orders.command,
        orders.folder,
        # Until it returns the first host serves the store: the ranks elsewhere need it to tell who broke
        # their world.
        lambda failures: _report(connection, failures),
        shutdown_s=_SHUTDOWN_S,
        min_nodes=len(orders.addresses),
        max_nodes=len(orders.addresses),
        nproc_per_node=orders.ranks_per_host,
        run_id="dtbench-lab",
        rdzv_endpoint=f"{orders.addresses[0]}:{_RENDEZVOUS_PORT}",
        rdzv_configs={"is_host": orders.host == 0, "read_timeout": _JOIN_S},
        local_addr=orders.addresses[orders.host],
    )
    if ended_by:
        sys.exit(128 + ended_by)


def _report(connection: Connection, failures: list[tuple[int, int]]) -> NoReturn:
    """Says which ranks failed, first to last, and waits for `run` to end us."""
    _leave_on_signals()
    connection.send(failures)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
