"""Rows of several hosts: links that are cut or lose packets, clocks that differ, launchers that are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from dtbench.tests import lab
from dtbench.tests.faults.table import Done, Fault, Running

LAB = f"{sys.executable} -P -m dtbench.tests.lab --hosts 2 --mbit 400 --"
RUN = "dtbench run SUITE --quick --timeout 10 -o x.jsonl --filter"
PYTHON = f"{sys.executable} -P -m dtbench"
CLOCKS = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
CHAIN = "add table inet t; add chain inet t c { type filter hook output priority 0; }"


def inside(running: Running, host: int, *command: str) -> None:
    """Runs a command in the network of a host, once it is there."""
    namespace = f"dtlab-t{running.pid}-{host}"
    running.wait_for(lambda: Path("/run/netns", namespace).exists())
    subprocess.run(["ip", "netns", "exec", namespace, *command], check=True)


def cut(running: Running) -> None:
    running.wait_for_results(2)
    inside(running, 1, "ip", "link", "set", "eth0", "down")


def cut_and_restore(running: Running) -> None:
    """As beyond the host's own interface: of one that is down the kernel tells at once, and gloo gives up."""
    running.wait_for_results(1)
    inside(running, 1, "sh", "-c", f"nft '{CHAIN}; add rule inet t c drop'; sleep 1; nft delete table inet t")
    running.wait_for_results(6)


def lose_packets(running: Running) -> None:
    inside(running, 1, "nft", f"{CHAIN}; add rule inet t c numgen random mod 10 < 1 drop")


def at_two_results(number: int) -> Callable[[Running], None]:
    def during(running: Running) -> None:
        running.wait_for_results(2)
        os.kill(running.pid, number)

    return during


def a_later_lab_removes_what_is_left(_done: Done) -> None:
    hosts = lab.Lab(f"p{os.getpid()}", 2, 400_000_000)
    with lab.temporary(hosts):
        assert lab.leftovers() == [] and lab.run(hosts, 1, ["true"]) == 0


def with_another_clock() -> None:
    Path("rank.sh").write_text(
        f"case $(hostname) in *-1) export LD_PRELOAD={CLOCKS} FAKETIME=+60s FAKETIME_DONT_FAKE_MONOTONIC=1;; esac\n"
        f'exec {PYTHON} "$@"\n'
    )


ROWS = [
    Fault(
        "lab: the link of a host is cut",
        f"{LAB} {RUN} long",
        5,
        (
            r"rank 1 on t\d+-1 died or did not answer during long wait",
            r"rank 1 on t\d+-1 no longer reaches the store of the ranks \(.*\): the network between them is cut",
        ),
        how="program",
        during=cut,
        makes=("x.jsonl",),
        needs=("lab",),
        slow=True,
    ),
    Fault(
        "lab: the link of a host is cut for a second",
        f"{LAB} {RUN} good",
        0,
        how="program",
        during=cut_and_restore,
        makes=("x.jsonl",),
        results="6 ok",
        needs=("lab", "nft"),
        slow=True,
    ),
    Fault(
        "lab: a host loses 10 % of its packets",
        f"{LAB} {RUN} 'good n=1'",
        0,
        how="program",
        during=lose_packets,
        makes=("x.jsonl",),
        results="2 ok",
        needs=("lab", "nft"),
        slow=True,
    ),
    Fault(
        "lab: a host's clock is a minute ahead",
        f"{LAB} sh rank.sh {RUN.removeprefix('dtbench ')} good",
        0,
        given=with_another_clock,
        how="program",
        makes=("x.jsonl",),
        results="6 ok",
        needs=("lab", "faketime"),
        slow=True,
    ),
    Fault(
        "lab: Ctrl-C",
        f"{LAB} {RUN} long",
        130,
        "interrupted: .* go on with --resume",
        how="program",
        during=at_two_results(signal.SIGINT),
        makes=("x.jsonl",),
        needs=("lab",),
        slow=True,
    ),
    Fault(
        "lab: what started the ranks is killed",
        f"{LAB} {RUN} long",
        -signal.SIGKILL,
        may_say="the process that started the ranks died: ",
        how="program",
        during=at_two_results(signal.SIGKILL),
        makes=("x.jsonl",),
        also=a_later_lab_removes_what_is_left,
        needs=("lab",),
        slow=True,
    ),
]
