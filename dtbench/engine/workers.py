"""Child processes, connections to them, and the signals that end this process.

    StartedProgram   another program, in its own session: an interrupt of the terminal does not reach it directly
    Fork             a copy of this process that runs a function; only in a process with a single thread

Connections are those of multiprocessing; the end of the stream means that the other process has ended. This module
imports the standard library alone, so that a process may fork or run the code of another revision afterwards.
"""

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
from typing import IO, Self

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_Handler = Callable[[int, FrameType | None], object]  # handles a signal


class StartedProgram:
    """A program in its own session; leaving `with` kills it and its children."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        out: IO[bytes] | int | None = None,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        connected: bool = False,
    ) -> None:
        """Starts the program.

        Args:
            command: its argv.
            out: takes the output of the program and its children.
            connected: whether to open a connection. The program opens its end with `connection_at`; the descriptor's
                number is appended to its command line.
        """
        connection, child_end = Pipe() if connected else (None, None)
        self._connection = connection
        fds = [] if child_end is None else [child_end.fileno()]
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
        finally:
            if child_end is not None:
                child_end.close()
        self.pid = self._process.pid

    @property
    def connection(self) -> Connection:
        assert self._connection is not None, "it was started without a connection"
        return self._connection

    def wait(self, limit_s: float | None = None) -> int | None:
        """Returns its exit code, negative for a signal; None if it still runs after `limit_s`."""
        try:
            return self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> int:
        """Kills it with its remaining children. Returns its exit code."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: all of them have ended
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        if self._connection is not None:
            self._connection.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class Fork:
    """A copy of this process that calls a function and exits with its return value.

    Libraries are not finalized: finalizing torch takes as long as ten benchmarks.

    Attributes:
        pid: its process id.
        ended: a descriptor that is readable once the process has ended, also if it has become another program by
            `os.exec*`. Without pidfds (Linux has them), children that outlive the process delay this.
    """

    def __init__(self, target: Callable[[], int]) -> None:
        self.ended, write_end = os.pipe()
        os.set_inheritable(write_end, True)
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self.ended)
            leave_with(target)
        os.close(write_end)
        with contextlib.suppress(AttributeError, OSError):
            pidfd = os.pidfd_open(self.pid)
            os.dup2(pidfd, self.ended, inheritable=False)
            os.close(pidfd)

    def code(self) -> int:
        """Waits until it ends. Returns the exit code, negative for a signal."""
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self.ended)
        return self._code

    def end(self) -> int:
        """Kills it. Returns its exit code."""
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the pid is not reused
        return self.code()


def leave_with(target: Callable[[], int]) -> None:
    """Calls `target` and exits at once with its return value; prints an error as Python does."""
    code = 1
    try:
        code = target()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)  # noqa: T201 - like the interpreter
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
    """Yields a new temporary folder, and removes it."""
    with tempfile.TemporaryDirectory(prefix="dtbench-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def connection_at(fd: int | str) -> Connection:
    """Opens the connection at a descriptor that this process inherited; its own children do not inherit it."""
    os.set_inheritable(int(fd), False)
    return Connection(int(fd))


def send_connection(through: Connection, connection: Connection) -> None:
    """Sends a connection to the process at the other end of `through`, which calls `receive_connection`."""
    reduction.send_handle(through, connection.fileno(), 0)


def receive_connection(through: Connection) -> Connection:
    """Returns the connection that the other end sends next."""
    return Connection(reduction.recv_handle(through))


def seconds_until(deadline: float) -> float:
    """Returns the seconds until a time of the monotonic clock, at least 0."""
    return max(deadline - time.monotonic(), 0.0)


def end_with_launcher(launcher_pid: int) -> None:
    """Makes Linux send this process SIGTERM when its launcher dies. Exits at once if the launcher has died already.

    Elsewhere the ranks notice that their store is gone.
    """
    import ctypes

    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != launcher_pid:  # it died before its signal was set
        os._exit(1)


def ending_signals() -> frozenset[signal.Signals]:
    """Returns the signals that end this process, including SIGHUP unless it is ignored (nohup)."""
    hangups = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return frozenset({signal.SIGINT, signal.SIGTERM, *hangups})


@contextlib.contextmanager
def handling_signals(numbers: Set[signal.Signals], handler: _Handler) -> Iterator[None]:
    """Handles signals with `handler` within the block."""
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous_handler in previous.items():
            signal.signal(number, previous_handler)


def describe_exit(code: int) -> str:
    """Describes a return code, negative for a signal: `died of SIGKILL` or `ended with exit code 3`."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"died of {signal.Signals(-code).name}"
    return f"died of signal {-code}"
