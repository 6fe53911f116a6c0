"""The process that launches are forked off: it loads what all of them need, and each then loads its arm's code.

    gate ---> python -P -m dtbench.judge.gate.loader ...       a fresh process for every round of launches
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
import select
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

# What a launch and the gate say to each other on the launch's socket: what, and a number.
MESSAGE = struct.Struct("<ci")
PID, READY, GO, ENDED = b"p", b"r", b"g", b"e"
LENGTH = struct.Struct("<I")  # of a launch's description, which follows
HARNESS = "dtbench"  # the same for all arms


def main(argv: Sequence[str]) -> int:
    """argv: `{"load": modules, "paths": those of all arms, "control": fd}`, or with `"launch"`, one that
    shares nothing, in place of the last two.
    """
    asked = json.loads(argv[0])
    from dtbench.judge.gate import worker

    worker.load(asked["load"])
    if "launch" in asked:
        _carry_out(asked["launch"])
    # A fork has none of the other threads, whose locks stay as they were.
    shared = threading.active_count() == 1 and (len(asked["paths"]) == 1 or not _shadowed(asked["paths"]))
    gc.collect()
    gc.freeze()  # what is collected later writes to no page of these
    fds: dict[int, int] = {}
    # A handler of a signal that comes just before a call that waits runs only after it: the end is read off a socket.
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with socket.socket(fileno=asked["control"]) as control, woken, wake:
        _send(control.fileno(), READY, 0)
        while True:
            said, _, _ = select.select([control, woken], [], [])
            if woken in said:
                woken.recv(select.PIPE_BUF)
                _reap(fds)
            if control not in said:
                continue
            if (launch := _next(control)) is None:
                break
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for inherited in (control, woken, wake):
                    inherited.close()
                _become(launch, list(fds.values()), asked, shared=shared)
            fds[pid] = launch["fd"]
    return 0


def ask(control: socket.socket, launch: Mapping[str, Any], fd: int) -> None:
    """The gate's side: asks for a launch that talks on fd."""
    text = json.dumps(launch).encode()
    socket.send_fds(control, [LENGTH.pack(len(text)) + text], [fd])


def _reap(fds: dict[int, int]) -> None:
    """Tells the gate of each launch that has ended. fds: by pid."""
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            fd = fds.pop(ended[0])
            _send(fd, ENDED, os.waitstatus_to_exitcode(ended[1]))
            os.close(fd)


def _next(control: socket.socket) -> dict[str, Any] | None:
    """The next launch with its `fd`; None when the gate wants no more, or is gone."""
    head, fds, *_ = socket.recv_fds(control, LENGTH.size, 1)
    if len(head) < LENGTH.size:
        return None
    text = control.recv(LENGTH.unpack(head)[0], socket.MSG_WAITALL)
    launch: dict[str, Any] = json.loads(text)
    return launch | {"fd": fds[0]}


def _shadowed(paths: Sequence[Sequence[str]]) -> bool:
    """Whether an arm would have found something else of what is loaded: its revision may be that of a library."""
    loaded = {name.partition(".")[0] for name in sys.modules} - {HARNESS}
    folders = {Path(folder) for path in paths for folder in path}
    return any(entry.name.partition(".")[0] in loaded for f in folders if f.is_dir() for entry in f.iterdir())


def _become(
    launch: dict[str, Any], others: Sequence[int], asked: Mapping[str, Any], *, shared: bool
) -> NoReturn:
    """In the fork: takes on the arm and carries out the order; in a program of its own where nothing is shared."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        log = os.open(f"{launch['stem']}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for fd in others:
            os.close(fd)
        os.chdir(launch["root"])
        os.environ.update(launch["env"], PYTHONPATH=os.pathsep.join(launch["path"]))
        if not shared:
            os.set_inheritable(launch["fd"], True)
            own = {
                name: launch[name] for name in ("fd", "stem")
            }  # others can read a command line: no variables
            alone = json.dumps({"load": asked["load"], "launch": own})
            os.execv(sys.executable, [sys.executable, "-P", "-m", "dtbench.judge.gate.loader", alone])
        if len(asked["paths"]) > 1:
            sys.path[:1] = launch["path"]  # it was started with the folder of the harness alone
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    _carry_out(launch)


def _carry_out(launch: Mapping[str, Any]) -> NoReturn:
    """Carries out the order, and ends the process: an orderly end of torch takes as long as ten benchmarks."""
    from dtbench.judge.gate import worker

    code = 1
    try:
        _send(launch["fd"], PID, os.getpid())
        code = worker.main(Path(launch["stem"]), lambda number: _await_turn(launch["fd"], number))
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        else:
            code = end.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _await_turn(fd: int, number: int) -> None:
    """Says that it can go on with a sample of this number, and returns when it is this launch's turn, on the CPU that
    the gate names; ends it where the gate is gone.
    """
    _send(fd, READY, number)
    said = os.read(fd, MESSAGE.size)
    if said[:1] != GO:
        raise SystemExit("the gate is gone")
    _, cpu = MESSAGE.unpack(said)
    if cpu >= 0 and os.sched_getaffinity(0) != {cpu}:
        with contextlib.suppress(OSError):  # then it is only noisier
            os.sched_setaffinity(0, {cpu})


def _send(fd: int, what: bytes, number: int) -> None:
    with contextlib.suppress(OSError):  # the gate may be gone
        os.write(fd, MESSAGE.pack(what, number))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
