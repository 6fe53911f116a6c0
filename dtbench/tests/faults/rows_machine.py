"""Rows of poor machines and shells: closed streams, folders that are gone, limits, files that hide modules."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

from dtbench.records.run import read_run
from dtbench.tests import made_up
from dtbench.tests.faults.table import Done, Fault, Running

DTBENCH = f"{sys.executable} -P -m dtbench"
RUN = "run SUITE --quick --nproc 2 -o x.jsonl --filter 'good n=1'"
ALL_CLOSED = "<&- >&- 2>&-"


def shell(before: str, words: str, after: str = "") -> str:
    """A command line of `program`: the words in a shell in which something was done before."""
    quoted = f"{DTBENCH} {words}".replace('"', '\\"')
    return f'bash -c "{before} {quoted} {after}"'


def a_run() -> None:
    made_up.write(Path("r.jsonl"), made_up.run(list(made_up.collectives(samples=5))))


def nothing_is_left(done: Done) -> None:
    assert done.out == ""


def a_file_can_be_read(_done: Done) -> None:
    if Path("x.jsonl").exists():
        assert read_run("x.jsonl").results


def told_to_end(after_s: float, running: Running) -> None:
    time.sleep(after_s)
    os.kill(running.pid, signal.SIGTERM)


V6_ONLY = "ip link set lo up; ip addr del 127.0.0.1/8 dev lo"

ROWS = [
    *(
        Fault(
            f"a loopback interface that {what}",
            f"unshare -n {shell(f'{before};', RUN)}",
            2,
            r"ranks cannot meet at localhost \(.*\): bring the loopback interface up",
            how="program",
            needs=("root", "unshare", "ip"),
        )
        for what, before in (("is down", "true"), ("has no address of IPv4, where hosts has no ::1", V6_ONLY))
    ),
    *(
        Fault(
            f"`run` with {what} closed",
            shell("", RUN, closed),
            0,
            how="program",
            makes=("x.jsonl",),
            results="2 ok",
            also=nothing_is_left,
            slow=True,
        )
        for what, closed in (("standard output", ">&-"), ("all streams", ALL_CLOSED))
    ),
    Fault(
        "`show` with all streams closed",
        shell("", "show r.jsonl", ALL_CLOSED),
        0,
        how="program",
        given=a_run,
    ),
    Fault(
        "a reader that takes one line",
        shell("set -o pipefail;", "show r.jsonl", "| head -1"),
        0,
        how="program",
        given=a_run,
    ),
    *(
        Fault(
            f"`{words.split()[0]}` in a folder that is gone",
            shell("mkdir gone; cd gone; rmdir ../gone;", words),
            2,
            "the current folder is gone",
            how="program",
        )
        for words in ("doctor", "run dispatch", "list")
    ),
    *(
        Fault(
            f"`ulimit {limit}`: {words.split()[0]}",
            shell(f"ulimit {limit};", words),
            2,
            says,
            how="program",
            given=a_run,
        )
        for limit, words, says in (
            ("-n 12", RUN, "12 open files are allowed"),
            ("-n 24", RUN, "24 open files are allowed"),
        )
    ),
    *(
        Fault(
            f"a report where matplotlib is given {name}={value}",
            "report r.jsonl -o p.html",
            0,
            how="fresh",
            env={name: value},
            given=a_run,
            makes=("p.html",),
        )
        for name, value in (("MPLBACKEND", "nosuch"), ("MPLCONFIGDIR", "/proc/nosuch"))
    ),
    *(
        Fault(
            f"SIGTERM to a launcher after {after_s:g} s",
            RUN.replace("good n=1", "long"),
            130,
            "interrupted",
            how="fresh",
            during=partial(told_to_end, after_s),
            may_make=("x.jsonl",),  # a fast machine has results after some seconds
            also=a_file_can_be_read,
            slow=True,
        )
        for after_s in (0.5, 1.5, 2.0, 2.5, 3.0, 4.0)
    ),
]
