"""The process of a launch: it loads what it needs, says that it is ready, and measures when it is told to.

Loading torch takes longer than measuring thirty benchmarks. Processes that are compared are started together, so
that they load side by side, and measure one after another, while the others sleep.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from dtbench.gate.arms import Arm

# What belongs to the job that the gate runs in, not to a launch.
_LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LEFT_OUT_PREFIXES = ("TORCHELASTIC_", "PYTEST_", "DTBENCH_LAUNCH", "DTBENCH_OUTPUT", "DTBENCH_NOTE")


class Started:
    """`PYTHON -P -m MODULE...` of an arm, in a session of its own, which `end` takes down whole.

    waits: the module takes a socket's number as its last argument, writes a byte to it once it is
    ready, and measures when it reads the end of it (see `wait_for_turn`).
    """

    def __init__(
        self, arm: Arm, module: Sequence[str], log: Path, variables: Mapping[str, str], *, waits: bool
    ) -> None:
        self._log = log
        self._turn, theirs = socket.socketpair()
        with theirs, log.open("wb") as out:
            self._process = subprocess.Popen(
                [arm.python, "-P", "-m", *module, *([str(theirs.fileno())] if waits else [])],
                cwd=arm.root,
                env=environment_of(arm, variables),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(theirs.fileno(),) if waits else (),
            )

    def await_ready(self, deadline: float) -> None:
        """Returns when the process waits for its turn, when it has ended, or at the deadline."""
        self._turn.settimeout(max(deadline - time.monotonic(), 1e-3))
        with contextlib.suppress(OSError):
            self._turn.recv(1)

    def run(self, limit_s: float) -> str | None:
        """Gives it its turn and waits for its end: what went wrong, "" if nothing, None if it took too long."""
        self._turn.close()
        try:
            code = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        return "" if code == 0 else _how(code, self._log)

    def end(self) -> None:
        """Takes down whatever is left of it."""
        self._turn.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def wait_for_turn(fd: int) -> None:
    """In the process itself: says on the socket that all is loaded, and returns when it is its turn."""
    with socket.socket(fileno=fd) as turn, contextlib.suppress(OSError):
        turn.send(b"r")
        turn.recv(1)


def environment_of(arm: Arm, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a launch: those of the gate, without what belongs to its job, and the arm's."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _LEFT_OUT and not name.startswith(_LEFT_OUT_PREFIXES)
    }
    env.setdefault("OMP_NUM_THREADS", "1")
    return env | {"PYTHONPATH": os.pathsep.join(arm.path)} | dict(arm.env) | dict(variables)


def _how(code: int, log: Path) -> str:
    """How a process ended, and the last line it said."""
    how = f"the launch ended with exit code {code}"
    if code < 0:
        how = f"the launch died of signal {-code}"
        with contextlib.suppress(ValueError):
            how = f"the launch died of {signal.Signals(-code).name}"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{how}: {lines[-1][:300]}" if lines else how
