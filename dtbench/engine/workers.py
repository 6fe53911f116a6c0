"""Processes: those that we start, talk to and end, each of which is reaped with what it has started; and the signals
and the death of a parent that end this one.

    StartedProgram   another program, in a session of its own: an interrupt of the terminal reaches it through us
    Fork             this process again, which runs a function; in a process of one thread only

A connection is multiprocessing's: one side makes the `Pipe`, `send` and `recv` take any object, and `wait` waits for
several. Its end tells that the other side is gone. Imports the standard library alone, so that a process that is about
to fork, or runs another revision's code, can have it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from multiprocessing import reduction
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import FrameType
from typing import IO

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_Handler = Callable[[int, FrameType | None], object]  # of a signal


class StartedProgram:
    """A started program; `with` ends it.

    command: its argv. out: takes what it and all that it starts print. connected: has a connection, whose other end it
    opens with `connection_at`: the descriptor's number is added to its command line.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        out: IO[bytes] | int | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        connected: bool = False,
    ) -> None:
        ours, theirs = Pipe() if connected else (None, None)
        self._connection = ours
        fds = [] if theirs is None else [theirs.fileno()]
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, fds)],
                cwd=cwd,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out if out is None else subprocess.STDOUT,
                start_new_session=True,
                pass_fds=fds,
            )
        except BaseException:
            if ours is not None:
                ours.close()
            raise
        finally:
            if theirs is not None:
                theirs.close()
        self.pid = self._process.pid

    @property
    def connection(self) -> Connection:
        assert self._connection is not None, "it was started without a connection"
        return self._connection

    def wait(self, limit_s: float | None = None) -> int | None:
        """Its exit code, negative for a signal; None where it goes on after so long."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> int:
        """Kills it with all that is left of what it has started, and gives its exit code."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: all of it has ended
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        if self._connection is not None:
            self._connection.close()
        return code

    def __enter__(self) -> StartedProgram:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Fork:
    """A copy of this process that calls `target` and ends with what it returns, without an orderly end of libraries:
    that of torch takes as long as ten benchmarks.

    ended: a descriptor that is ready, for `wait`, once the process has ended. It may become another program by
    `os.exec*`. Where the system has no descriptors of processes (Linux has), children that outlive it defer that.
    """

    def __init__(self, target: Callable[[], int]) -> None:
        self.ended, held = os.pipe()
        os.set_inheritable(held, True)
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.ended)
            leave_with(target)
        os.close(held)
        with contextlib.suppress(AttributeError, OSError):
            of_process = os.pidfd_open(self.pid)
            os.dup2(of_process, self.ended, inheritable=False)
            os.close(of_process)

    def code(self) -> int:
        """Waits for its end; the exit code, negative for a signal."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.ended)
        return self._code

    def end(self) -> int:
        """Kills it, and gives its exit code."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its
        return self.code()


def leave_with(target: Callable[[], int]) -> None:
    """Calls `target` and ends the process at once with what it returns; an error is printed as Python does."""
    code = 1
    try:
        code = target()
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


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A new temporary folder, removed in the end."""
    with tempfile.TemporaryDirectory(prefix="dtbench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def connection_at(fd: int | str) -> Connection:
    """A connection at a descriptor that this process was given; programs that it starts do not get it."""
    os.set_inheritable(int(fd), False)
    return Connection(int(fd))


def send_connection(through: Connection, handed: Connection) -> None:
    """Sends a connection to the process at the other end of `through`, which calls `receive_connection`."""
    reduction.send_handle(through, handed.fileno(), 0)


def receive_connection(through: Connection) -> Connection:
    """What the other end hands over next."""
    return Connection(reduction.recv_handle(through))


def seconds_until(deadline: float) -> float:
    """Until a moment of the monotonic clock, at least 0: what `Connection.poll` and `wait` take."""
    return max(deadline - time.monotonic(), 0.0)


def end_with_launcher(launcher_pid: int) -> None:
    """Makes the kernel send this process a SIGTERM when its launcher dies; ends it now if that has died already.

    Linux only. Elsewhere the ranks notice that their store is gone.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != launcher_pid:  # it died before its signal was set
        os._exit(1)


def ending_signals() -> frozenset[signal.Signals]:
    """Those that end us: a hang-up too, unless the user had it ignored (nohup)."""
    ending = {signal.SIGINT, signal.SIGTERM}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ending.add(signal.SIGHUP)
    return frozenset(ending)


@contextlib.contextmanager
def handling_signals(numbers: Set[signal.Signals], handler: _Handler) -> Iterator[None]:
    """Within the block `handler` answers these signals."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, other in before.items():
            signal.signal(number, other)


def describe_exit(code: int) -> str:
    """`died of SIGKILL` or `ended with exit code 3`, from a process's return code (negative: a signal's number)."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"died of {signal.Signals(-code).name}"
    return f"died of signal {-code}"
