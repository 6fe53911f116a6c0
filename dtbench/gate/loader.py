"""The process that launches are forked off: it loads what all of them need, and each then loads its arm's code.

    gate ---> python -P -m dtbench.gate.loader ...       a fresh process for every round of launches
                load torch and the harness
                READY
       ---> launch: fork, path and variables of one arm, set up; READY, wait for GO, a sample, READY, ...; ENDED
       ---> launch: the same of another arm

Loading torch takes longer than measuring thirty benchmarks. Launches of one round share its luck, such as where its
libraries lie in memory, so that it does not tell them apart; the next round draws anew. Of an arm nothing is
loaded before the fork. Needs no torch itself.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import threading
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from dtbench.engine.workers import Fork, connection_at, leave_with, take_over

# What a launch and the gate say to each other: what, and a number (pid, sample, CPU or exit code).
PID, READY, GO, ENDED = "pid", "ready", "go", "ended"
HARNESS = "dtbench"  # the same for all arms


class Launch(NamedTuple):
    """What the gate asks for. stem: how its files begin; root, path, env: of its arm."""

    stem: str
    root: str
    path: tuple[str, ...]
    env: dict[str, str]


class Running(NamedTuple):
    """A launch that was forked off, and the connection on which it talks to the gate."""

    process: Fork
    connection: Connection


def main(argv: Sequence[str]) -> int:
    """argv: the modules to load and the paths of all arms, as JSON, and the connection to the gate; or the modules, the
    stem of a launch that shares nothing, and its connection.
    """
    from dtbench.gate import worker

    asked = json.loads(argv[0])
    worker.load(asked["load"])
    connection = connection_at(argv[1])
    if "stem" in asked:
        leave_with(partial(_carry_out, asked["stem"], connection))
    paths = asked["paths"]
    # A fork has none of the other threads, whose locks stay as they were.
    shared = threading.active_count() == 1 and (len(paths) == 1 or not _shadowed(paths))
    gc.collect()
    gc.freeze()  # what is collected later writes to no page of these
    _send(connection, READY, 0)
    running: list[Running] = []
    while True:
        ready = wait([connection, *(launch.process.ended for launch in running)])
        for one in [one for one in running if one.process.ended in ready]:
            running.remove(one)
            with one.connection:
                _send(one.connection, ENDED, one.process.code())
        if connection in ready:
            try:
                launch = Launch(*connection.recv())
                own = take_over(connection)
            except (EOFError, OSError):  # the gate wants no more, or is gone
                return 0
            others = [connection, *(one.connection for one in running)]
            if shared:
                target = partial(_share, launch, own, others, len(paths) > 1)
            else:
                target = partial(_load_anew, launch, own, others, asked["load"])
            running.append(Running(Fork(target), own))


def _shadowed(paths: Sequence[Sequence[str]]) -> bool:
    """Whether an arm would have found something else of what is loaded: its revision may be that of a library."""
    loaded = {name.partition(".")[0] for name in sys.modules} - {HARNESS}
    folders = {Path(folder) for path in paths for folder in path}
    return any(entry.name.partition(".")[0] in loaded for f in folders if f.is_dir() for entry in f.iterdir())


def _share(launch: Launch, connection: Connection, others: Sequence[Connection], several: bool) -> int:
    """In the fork: the launch, with what is loaded."""
    _become(launch, others)
    if several:
        sys.path[:1] = launch.path  # it was started with the folder of the harness alone
    return _carry_out(launch.stem, connection)


def _load_anew(
    launch: Launch, connection: Connection, others: Sequence[Connection], load: Sequence[str]
) -> int:
    """In the fork: the launch in a program of its own."""
    _become(launch, others)
    os.set_inheritable(connection.fileno(), True)
    alone = json.dumps({"load": load, "stem": launch.stem})  # others can read a command line: no variables
    command = [sys.executable, "-P", "-m", "dtbench.gate.loader", alone, str(connection.fileno())]
    os.execv(command[0], command)


def _become(launch: Launch, others: Sequence[Connection]) -> None:
    """Takes on the arm."""
    log = os.open(f"{launch.stem}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for other in others:
        other.close()
    os.chdir(launch.root)
    os.environ.update(launch.env, PYTHONPATH=os.pathsep.join(launch.path))


def _carry_out(stem: str, connection: Connection) -> int:
    from dtbench.gate import worker

    _send(connection, PID, os.getpid())
    return worker.main(Path(stem), partial(_await_turn, connection))


def _await_turn(connection: Connection, number: int) -> None:
    """Says that it can go on with a sample of this number, and returns when it is this launch's turn, on the CPU that
    the gate names; ends it where the gate is gone.
    """
    _send(connection, READY, number)
    try:
        _, cpu = connection.recv()
    except (EOFError, OSError):
        raise SystemExit("the gate is gone") from None
    if cpu >= 0 and os.sched_getaffinity(0) != {cpu}:
        with contextlib.suppress(OSError):  # then it is only noisier
            os.sched_setaffinity(0, {cpu})


def _send(connection: Connection, what: str, number: int) -> None:
    with contextlib.suppress(OSError):  # the gate may be gone
        connection.send((what, number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
