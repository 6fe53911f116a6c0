"""Several hosts on one machine: network namespaces joined by links of a set rate. Needs root and Linux.

    host 0 [eth0] ---- [port0]        [port1] ---- [eth0] host 1
                             [bridge]
                                 |
                              [port2] ---- [eth0] host 2

Each end of a link sends through a token bucket (`tc tbf`), so a host sends and receives at the rate; there is no added
delay. All interfaces are made inside the namespaces: those of the machine are never touched.

    python -m dtbench.tests.lab --hosts 2 --mbit 400 --ranks-per-host 2 -- dtbench run collectives --mesh dp=2,tp=2
"""

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from dtbench.engine.workers import scratch
from dtbench.errors import UsageError

INTERFACE = "eth0"  # of every host, in its own namespace
_NETWORK = "10.210.0.0/24"  # of its own in every lab
_PORT = 29400
_FRAME_BYTES = 1500 + 14  # with its Ethernet header: what the shaper counts
# The depth of the token bucket, in seconds at the rate. Tokens that come while it is full are lost, so it must outlast
# the shaper's late wake-ups; messages of less than some 50 times this depth beat the rate by over 2 %.
_BURST_S = 0.002
_QUEUE_S = 0.05  # how long a frame may wait in a full shaper
_GRACE_S = 10.0  # after the first failure the other ranks get this to notice and say what they know
_TICK_S = 0.05
_TOOLS = ("ip", "tc", "nsenter", "unshare", "setpriv", "mount", "hostname")


@dataclass(frozen=True)
class Lab:
    """`hosts` namespaces; each has a link of `rate_bit_per_s` in each direction."""

    name: str
    hosts: int
    rate_bit_per_s: int

    @property
    def namespaces(self) -> list[str]:
        """Names of the hosts' namespaces, in host order."""
        return [f"dtlab-{self.name}-{host}" for host in range(self.hosts)]

    @property
    def addresses(self) -> dict[str, str]:
        """Host name -> IP address, in host order."""
        return {f"{self.name}-{host}": f"10.210.0.{101 + host}" for host in range(self.hosts)}


def require_abilities() -> None:
    """Raises UsageError where this machine cannot make namespaces."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        raise UsageError(
            "hosts on one machine need Linux, root, iproute2 and util-linux; this one lacks "
            + (f"{', '.join(missing)} on the PATH" if missing else "root")
        )


# ------------------------------------------------------------------------------------- the network


@contextmanager
def temporary(lab: Lab) -> Iterator[None]:
    """Within the block there is this lab."""
    added: list[str] = []
    switch = f"dtlab-{lab.name}-switch"
    try:
        for namespace in (switch, *lab.namespaces):
            run_tool("ip", "netns", "add", namespace)
            added.append(namespace)
        _join(lab, switch)
        yield
    finally:
        _remove(added)


def _join(lab: Lab, switch: str) -> None:
    """Makes the links between the namespaces. switch: that of the bridge."""
    run_tool("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    # No IPv6 addresses: gloo takes the first address of an interface.
    run_tool("ip", "-n", switch, "link", "set", "bridge", "addrgenmode", "none", "up")
    for host, (namespace, address) in enumerate(zip(lab.namespaces, lab.addresses.values(), strict=True)):
        inside, port = ("ip", "-n", namespace), f"port{host}"
        run_tool(*inside, "link", "set", "lo", "up")
        run_tool(*inside, "link", "add", INTERFACE, "type", "veth", "peer", "name", port, "netns", switch)
        run_tool(*inside, "link", "set", INTERFACE, "addrgenmode", "none", "up")
        run_tool(*inside, "address", "add", f"{address}/24", "dev", INTERFACE, "noprefixroute")
        # The same congestion control everywhere, whatever the machine's default is.
        run_tool(*inside, "route", "add", _NETWORK, "dev", INTERFACE, "congctl", "cubic")
        run_tool("ip", "-n", switch, "link", "set", port, "addrgenmode", "none", "master", "bridge", "up")
        shape(lab, host, lab.rate_bit_per_s)


def shape(lab: Lab, host: int, rate_bit_per_s: int) -> None:
    """Gives the link of one host a rate, each way."""
    burst = max(16 * _FRAME_BYTES, round(rate_bit_per_s / 8 * _BURST_S))
    bucket = ("rate", f"{rate_bit_per_s}bit", "burst", str(burst), "latency", f"{_QUEUE_S * 1e3:g}ms")
    for namespace, interface in (
        (lab.namespaces[host], INTERFACE),
        (f"dtlab-{lab.name}-switch", f"port{host}"),
    ):
        run_tool("tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf", *bucket)


def _remove(namespaces: Sequence[str]) -> None:
    """Ends the processes of a lab, then its namespaces, and with them their interfaces."""
    while pids := [pid for namespace in namespaces for pid in pids_in(namespace)]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_TICK_S)
    for namespace in namespaces:
        run_tool("ip", "netns", "delete", namespace)


def pids_in(namespace: str) -> list[int]:
    """The processes that run in a namespace."""
    return [int(pid) for pid in run_tool("ip", "netns", "pids", namespace).split()]


def run_tool(*command: str) -> str:
    """Runs a command and returns its stdout.

    Raises:
        UsageError: it fails; the message says how.
    """
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UsageError(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")
    return done.stdout


# ------------------------------------------------------------------------------------- ranks in it


def run(lab: Lab, ranks_per_host: int, command: Sequence[str]) -> int:
    """Runs the command on so many ranks of each host; the largest exit code. Ranks that have not ended some time after
    the first failure are killed with the lab.

    command: `dtbench ...`, a script.py or a program. Only the first host's output goes to stdout.
    """
    first, *rest = command
    programs = {"dtbench": [sys.executable, "-P", "-m", "dtbench"], ".py": [sys.executable, first]}
    program = [*programs.get(Path(first).suffix or first, [first]), *rest]
    with scratch() as folder:
        addresses = {"localhost": "127.0.0.1"} | lab.addresses
        # The mapped addresses are those by which torch's store, on IPv6, asks for the names of its clients.
        hosts = [f"{prefix}{ip} {name}\n" for prefix in ("", "::ffff:") for name, ip in addresses.items()]
        (folder / "hosts").write_text("".join(hosts))
        ranks = [
            subprocess.Popen(
                [*_entry(lab, rank // ranks_per_host, folder / "hosts"), *program],
                env=_environment(lab, rank, ranks_per_host),
                stdin=subprocess.DEVNULL,
                stdout=None if rank < ranks_per_host else sys.stderr,
            )
            for rank in range(lab.hosts * ranks_per_host)
        ]
        deadline = None
        while any(rank.poll() is None for rank in ranks) and (deadline or math.inf) > time.monotonic():
            if deadline is None and any(rank.returncode for rank in ranks):
                deadline = time.monotonic() + _GRACE_S
            time.sleep(_TICK_S)
        codes = [rank.returncode or 0 for rank in ranks]
        return max(codes) or int(any(codes))


def _entry(lab: Lab, host: int, hosts_file: Path) -> list[str]:
    """Returns the command prefix that runs a program inside a host, under its host name.

    The kernel ends the program together with this process.
    """
    setup = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
    return [
        *("setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/var/run/netns/{lab.namespaces[host]}", "--"),
        *("unshare", "--uts", "--mount", "--", "sh", "-c", setup, "sh"),
        *(list(lab.addresses)[host], str(hosts_file)),
    ]


def _environment(lab: Lab, rank: int, ranks_per_host: int) -> dict[str, str]:
    defaults = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE, "TP_SOCKET_IFNAME": INTERFACE}
    launcher = {
        "RANK": rank,
        "WORLD_SIZE": lab.hosts * ranks_per_host,
        "MASTER_ADDR": next(iter(lab.addresses.values())),
        "MASTER_PORT": _PORT,
        "LOCAL_RANK": rank % ranks_per_host,
        "LOCAL_WORLD_SIZE": ranks_per_host,
    }
    return defaults | dict(os.environ) | {name: str(value) for name, value in launcher.items()}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m dtbench.tests.lab")
    parser.add_argument("--hosts", type=int, required=True)
    parser.add_argument("--mbit", type=int, required=True, help="of each link each way, per second")
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    require_abilities()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    lab = Lab(f"t{os.getpid()}", arguments.hosts, arguments.mbit * 10**6)
    with temporary(lab):
        return run(lab, arguments.ranks_per_host, arguments.command)


if __name__ == "__main__":
    sys.exit(main())
