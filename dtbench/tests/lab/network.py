"""The network of a lab: a namespace per host and one with a bridge, joined by shaped veth pairs.

    host 0 [eth0] ---- [port0]        [port1] ---- [eth0] host 1
                             [bridge]
                                 |
                              [port2] ---- [eth0] host 2

Each end of a link sends through a token bucket (`tc tbf`), so a host sends and receives at the rate.
All interfaces are made inside the namespaces: those of the machine, its routes and its firewall are
never touched. The kernel's list of namespaces is the only record of which labs there are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from dtbench.engine.signals import refuse_if_ending, signals_held
from dtbench.suite.errors import UsageError

DEFAULT_NAME = "lab"
INTERFACE = "eth0"  # of every host, in its own namespace
_PREFIX = "dtlab"
_SWITCH = "switch"
_BRIDGE = "bridge"
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,6}[a-z0-9])?")
_NAMESPACE = re.compile(rf"{_PREFIX}-({_NAME.pattern})-([0-9]+|{_SWITCH})")
# The hosts are on a network of their own, so every lab can have the same addresses. Three digits each:
# torch's rendezvous numbers hosts by their addresses as text, where "10.210.0.9" comes after "10.210.0.10".
_NETWORK = "10.210.0.0/24"
_FIRST_ADDRESS = 101
MAX_HOSTS = 32
_RATE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)(kbit|mbit|gbit)", re.IGNORECASE)
_BITS = {"kbit": 10**3, "mbit": 10**6, "gbit": 10**9}
_MIN_RATE, _MAX_RATE = 10**6, 10**11
MTU = 1500
FRAME_BYTES = MTU + 14  # with its Ethernet header: what the shaper counts
# TCP's data in a frame: less 20 bytes of IP, 20 of TCP and 12 of its timestamps.
PAYLOAD_BYTES = MTU - 52
# The depth of the token bucket, in seconds at the rate. Tokens that come while it is full are lost, so it
# must outlast the shaper's late wake-ups (64 KiB, 0.3 ms, at 1.6 Gbit/s gave half the rate); a transfer
# after a pause is faster by at most this. Measured on 2 cores, all-reduce of 8 MiB between 2 ranks, alone:
# 1, 2, 4 ms gave 98, 98, 98 % of the goodput at 100 Mbit/s and 80, 100, 100 % at 400, where other programs
# kept the cores busy. Messages of less than some 50 times this depth (100 ms) beat the rate by over 2 %.
BURST_S = 0.002
MIN_BURST_BYTES = 16 * FRAME_BYTES
# How long a frame may wait in a full shaper.
QUEUE_S = 0.05
# How long the kernel gets to end the killed processes of a lab.
_KILL_S = 5.0
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux", "unshare": "util-linux"}
_TOOLS |= {"setpriv": "util-linux", "mount": "util-linux"}


@dataclass(frozen=True)
class Lab:
    """A lab: `hosts` namespaces, each with a link of so many bits per second each way."""

    name: str
    hosts: int
    rate_bit_per_s: int

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 2 <= self.hosts <= MAX_HOSTS:
            raise UsageError(f"--hosts {self.hosts}: expected 2 to {MAX_HOSTS}")

    @property
    def namespaces(self) -> list[str]:
        """Of the hosts, in their order."""
        return [f"{_PREFIX}-{self.name}-{host}" for host in range(self.hosts)]

    @property
    def switch(self) -> str:
        """The namespace of the bridge."""
        return f"{_PREFIX}-{self.name}-{_SWITCH}"

    @property
    def hostnames(self) -> list[str]:
        """What the hosts call themselves."""
        return [f"{self.name}-{host}" for host in range(self.hosts)]

    @property
    def addresses(self) -> list[str]:
        """Of the hosts' interfaces."""
        return [f"10.210.0.{_FIRST_ADDRESS + host}" for host in range(self.hosts)]

    @property
    def goodput_bytes_per_s(self) -> float:
        """What TCP can carry of it, each way: the rate without the headers of full frames."""
        return self.rate_bit_per_s / 8 * PAYLOAD_BYTES / FRAME_BYTES


def parse_rate(text: str) -> int:
    """`400mbit` -> 400,000,000 bit/s. Units as tc's: powers of 1000.

    Raises:
        UsageError: anything else, or out of range.
    """
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--rate {text!r}: expected a number and kbit, mbit or gbit, such as 400mbit")
    rate = round(float(found[1]) * _BITS[found[2].lower()])
    if not _MIN_RATE <= rate <= _MAX_RATE:
        raise UsageError(f"--rate {text}: expected 1mbit to 100gbit")
    return rate


def format_rate(rate_bit_per_s: int) -> str:
    """400,000,000 -> `400mbit`."""
    unit = "gbit" if rate_bit_per_s >= 10**9 else "mbit"
    return f"{rate_bit_per_s / _BITS[unit]:g}{unit}"


def check_name(name: str) -> str:
    """The name of a lab; it becomes part of host names.

    Raises:
        UsageError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"--name {name!r}: expected 1 to 8 of a-z, 0-9 and -, with a letter or digit first and last"
        )
    return name


def burst_bytes(rate_bit_per_s: int) -> int:
    """The depth of the token bucket."""
    return max(MIN_BURST_BYTES, round(rate_bit_per_s / 8 * BURST_S))


def require_abilities() -> None:
    """Checks that this machine lets us make namespaces.

    Raises:
        UsageError: no Linux, no root, or a program is missing.
    """
    if not hasattr(os, "geteuid") or not os.path.exists("/proc/self/ns/net"):  # noqa: PTH110 - a link
        raise UsageError("`dtbench lab` needs Linux with network namespaces, which this kernel does not have")
    if os.geteuid() != 0:
        raise UsageError("`dtbench lab` makes network namespaces, which needs root: run it with sudo")
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        packages = " and ".join(dict.fromkeys(_TOOLS[tool] for tool in missing))
        raise UsageError(f"`dtbench lab` needs {', '.join(missing)}, not on the PATH: install {packages}")


# --------------------------------------------------------------------------------- up and down


def up(lab: Lab) -> None:
    """Makes the lab, or nothing: what a failure or a signal leaves half made is removed.

    Raises:
        UsageError: there is one of this name, or the kernel refuses a step.
        KeyboardInterrupt: a signal told us to end.
    """
    if namespaces_of(lab.name):
        raise UsageError(
            f"there is a lab {lab.name} already: take it down with `dtbench lab down --name {lab.name}`, "
            f"or give another --name"
        )
    made: list[str] = []
    with signals_held():
        try:
            for namespace in (lab.switch, *lab.namespaces):
                run_tool(["ip", "netns", "add", namespace])
                made.append(namespace)
            for command in commands_of(lab):
                refuse_if_ending()
                run_tool(command)
        except BaseException:
            remove(made)
            raise


def commands_of(lab: Lab) -> Iterator[list[str]]:
    """What makes the links between the namespaces, once these are there."""
    yield ["ip", "-n", lab.switch, "link", "add", _BRIDGE, "type", "bridge"]
    # No IPv6 addresses: gloo takes the first address of an interface.
    yield ["ip", "-n", lab.switch, "link", "set", _BRIDGE, "addrgenmode", "none", "up"]
    for host, (namespace, address) in enumerate(zip(lab.namespaces, lab.addresses, strict=True)):
        port = f"port{host}"
        peer = ["peer", "name", port, "netns", lab.switch]
        yield ["ip", "-n", namespace, "link", "set", "lo", "up"]
        yield ["ip", "-n", namespace, "link", "add", INTERFACE, "type", "veth", *peer]
        yield ["ip", "-n", namespace, "link", "set", INTERFACE, "addrgenmode", "none", "up"]
        yield ["ip", "-n", namespace, "address", "add", f"{address}/24", "dev", INTERFACE, "noprefixroute"]
        # The same everywhere, whatever the machine's default is; /proc/sys may be read-only.
        yield ["ip", "-n", namespace, "route", "add", _NETWORK, "dev", INTERFACE, "congctl", "cubic"]
        yield ["ip", "-n", lab.switch, "link", "set", port, "addrgenmode", "none", "master", _BRIDGE, "up"]
        yield _shaper(namespace, INTERFACE, lab.rate_bit_per_s)
        yield _shaper(lab.switch, port, lab.rate_bit_per_s)


def _shaper(namespace: str, interface: str, rate: int) -> list[str]:
    bucket = ["rate", f"{rate}bit", "burst", str(burst_bytes(rate)), "latency", f"{QUEUE_S * 1e3:g}ms"]
    return ["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *bucket]


def reshape(lab: Lab, host: int, rate_bit_per_s: int) -> None:
    """Gives the link of one host another rate, each way.

    Raises:
        UsageError: the kernel refuses it.
    """
    for namespace, interface in ((lab.namespaces[host], INTERFACE), (lab.switch, f"port{host}")):
        command = _shaper(namespace, interface, rate_bit_per_s)
        run_tool(["change" if word == "add" else word for word in command])


def drop(lab: Lab, host: int, share: float) -> None:
    """Loses this share of the packets that reach one host, drawn by chance.

    Raises:
        UsageError: the kernel or this machine lacks nftables' random numbers.
    """
    if shutil.which("nft") is None:
        raise UsageError("losing packets needs nft, not on the PATH: install nftables")
    inside = ["ip", "netns", "exec", lab.namespaces[host], "nft"]
    run_tool([*inside, "add", "table", "ip", "dtlab"])
    run_tool([*inside, "add", "chain", "ip", "dtlab", "input", "{ type filter hook input priority 0 ; }"])
    rule = ["numgen", "random", "mod", "1000", "<", str(round(1000 * share)), "drop"]
    run_tool([*inside, "add", "rule", "ip", "dtlab", "input", *rule])


@contextmanager
def temporary(lab: Lab) -> Iterator[None]:
    """Within the block there is this lab; signals that would end us first wait for its end. Those that killed
    programs left are removed.

    Raises:
        UsageError: as `up`.
    """
    with signals_held():
        for name in names():
            if not _is_used(name):
                remove(namespaces_of(name))
        up(lab)
        try:
            yield
        finally:
            remove([lab.switch, *lab.namespaces])


def temporary_name() -> str:
    """Of a lab that is this program's own and ends with it."""
    return f"t{os.getpid()}"


def is_temporary(name: str) -> bool:
    return re.fullmatch(r"t[0-9]+", name) is not None


def _is_used(name: str) -> bool:
    return not is_temporary(name) or os.path.exists(f"/proc/{name[1:]}")  # noqa: PTH110


def down(name: str) -> bool:
    """Ends what runs in the lab and removes it; whether there was anything.

    Raises:
        UsageError: something in it cannot be ended.
    """
    with signals_held():
        namespaces = namespaces_of(name)
        remove(namespaces)
    return bool(namespaces)


def remove(namespaces: Sequence[str]) -> None:
    """Ends the processes of the namespaces, then the namespaces. Their interfaces go with them.

    Raises:
        UsageError: some process does not end, or a namespace cannot be removed.
    """
    end_processes(namespaces)
    for namespace in namespaces:
        run_tool(["ip", "netns", "delete", namespace])


def end_processes(namespaces: Sequence[str]) -> None:
    """Kills what runs in the namespaces and waits until it is gone.

    Raises:
        UsageError: some process does not end.
    """
    deadline = time.monotonic() + _KILL_S
    while pids := [pid for namespace in namespaces for pid in pids_in(namespace)]:
        if time.monotonic() > deadline:
            raise UsageError(f"the processes {pids} in the lab do not end; wait and try again")
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


# --------------------------------------------------------------------------------- what there is


def namespaces_of(name: str) -> list[str]:
    """The namespaces of a lab, whole or not."""
    return [namespace for found, namespace in _all_namespaces() if found == name]


def names() -> list[str]:
    """Of all labs on this machine."""
    return sorted({name for name, _ in _all_namespaces()})


def _all_namespaces() -> list[tuple[str, str]]:
    listed = json.loads(run_tool(["ip", "-json", "netns", "list"]) or "[]")
    matches = [_NAMESPACE.fullmatch(entry["name"]) for entry in listed]
    return sorted((match[1], match[0]) for match in matches if match)


def find(name: str) -> Lab:
    """The lab of this name, as the kernel has it.

    Raises:
        UsageError: there is none, or only parts of one.
    """
    namespaces = namespaces_of(name)
    if not namespaces:
        others = f"; there is {', '.join(names())}" if names() else ""
        raise UsageError(
            f"there is no lab {name}{others}: make it with `dtbench lab up --hosts 2 --rate 400mbit --name {name}`"
        )
    rate = None
    with_switch = f"{_PREFIX}-{name}-{_SWITCH}" in namespaces
    hosts = len(namespaces) - with_switch
    if with_switch and hosts >= 2:
        rate = _rate_of(f"{_PREFIX}-{name}-{_SWITCH}", f"port{hosts - 1}")
    if rate is None:
        raise UsageError(
            f"the lab {name} is damaged: take it down with `dtbench lab down --name {name}` and make it again"
        )
    return Lab(name, hosts, rate)


def _rate_of(namespace: str, interface: str) -> int | None:
    listed = json.loads(run_tool(["tc", "-json", "-n", namespace, "qdisc", "show"]) or "[]")
    for qdisc in listed:
        if qdisc["kind"] == "tbf" and qdisc["dev"] == interface:
            return int(qdisc["options"]["rate"]) * 8
    return None


def pids_in(namespace: str) -> list[int]:
    """The processes that run in a namespace."""
    return [int(pid) for pid in run_tool(["ip", "netns", "pids", namespace]).split()]


# --------------------------------------------------------------------------------- helpers


def run_tool(command: Sequence[str]) -> str:
    """What the command prints.

    Raises:
        UsageError: it fails; the message says how.
    """
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    except OSError as error:
        raise UsageError(f"cannot run {command[0]}: {error.strerror}") from error
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UsageError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout
