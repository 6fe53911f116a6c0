"""Launches as processes, seen from the gate: they are set up side by side and measure in turn, a sample
at a time.

Those that load the same (one interpreter, the same variables but for those of suites) are forked off one
process, see `loader`; others have one each.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from dtbench.errors import last_line
from dtbench.judge.gate.arms import Arm
from dtbench.judge.gate.benchmark import LOG
from dtbench.judge.gate.loader import ENDED, GO, MESSAGE, PID, READY, ask
from dtbench.world.signals import how_ended

# What belongs to the job that the gate runs in, not to a launch.
_LEFT_OUT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LEFT_OUT_PREFIXES = (
    "TORCHELASTIC_",
    "PYTEST_",
    "DTBENCH_LAUNCH",
    "DTBENCH_OUTPUT",
    "DTBENCH_NOTE",
    "DTBENCH_AGAIN",
)
# Variables that no library reads while it loads: arms that differ in them alone load the same.
_OF_SUITES = "DTBENCH_"


class Round:
    """Launches of these arms next to each other, and the processes they are forked off, until it is closed.

    load: modules of torch that all of them will need. cpu: on which they measure, -1 for any. Of two
    processes each tends to stay on its own, and one may be slower than the other for seconds: where nothing held them,
    ratios of samples taken together scattered twice as much.
    """

    def __init__(
        self, arms: Iterable[Arm], variables: Mapping[str, str], load: Sequence[str], cpu: int = -1
    ) -> None:
        self._arms = list(arms)
        self._cpu = cpu
        self._variables = variables
        self._load = load
        self._loaders: dict[object, _Loader] = {}
        self._started: list[Started] = []

    def prepare(self, arms: Iterable[Arm], log: Path) -> None:
        """Has loaded what launches of these arms need. log: takes what is said meanwhile, with a number."""
        for arm in arms:
            key = _alike(arm)
            if key not in self._loaders:
                alike = [a for a in self._arms if _alike(a) == key]
                own = log.with_name(f"{log.name}.{len(self._loaders)}")
                self._loaders[key] = _Loader(alike, self._variables, self._load, own)

    def await_prepared(self, limit_s: float) -> None:
        """Returns when it is, or that takes too long: nothing is to load beside what is measured."""
        deadline = time.monotonic() + limit_s
        for loader in self._loaders.values():
            loader.await_loaded(deadline)

    def start(self, arm: Arm, stem: Path) -> Started:
        """Starts a launch of the order whose files begin so."""
        self.prepare([arm], stem.with_suffix(".loader"))
        self._started.append(self._loaders[_alike(arm)].fork(arm, stem, self._cpu))
        return self._started[-1]

    def close(self) -> None:
        """Takes down whatever is left of them."""
        while self._started:
            self._started.pop().end()
        while self._loaders:
            self._loaders.popitem()[1].close()


class _Loader:
    """A process that loads and forks, in a session of its own with its launches."""

    def __init__(
        self, arms: Sequence[Arm], variables: Mapping[str, str], load: Sequence[str], log: Path
    ) -> None:
        arm, self._log, self._loaded = arms[0], log, False
        paths = list(dict.fromkeys(arm.path for arm in arms))
        self._control, theirs = socket.socketpair()
        asked = json.dumps({"load": list(load), "paths": paths, "control": theirs.fileno()})
        try:
            with theirs, log.open("wb") as out:
                path = arm.path if len(paths) == 1 else arm.path[:1]
                env = environment_of(variables, _for_loading(arm), path)
                self._process = _start(arm, ["dtbench.judge.gate.loader", asked], env, out, theirs.fileno())
        except BaseException:
            self._control.close()
            raise

    def await_loaded(self, deadline: float) -> None:
        """Returns when it has loaded, when it has ended, or at the deadline."""
        if self._loaded:
            return
        self._control.settimeout(max(deadline - time.monotonic(), 1e-3))
        with contextlib.suppress(OSError):
            self._control.recv(MESSAGE.size)
            self._loaded = True
        self._control.settimeout(None)

    def fork(self, arm: Arm, stem: Path, cpu: int) -> Started:
        """A launch of one of its arms."""
        launch = {"stem": str(stem), "root": str(arm.root), "path": arm.path, "env": dict(arm.env)}
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(ConnectionError):  # it has ended: so has the launch
            ask(self._control, launch, theirs.fileno())
        return Started(self, ours, stem.with_suffix(LOG), cpu)

    def how(self) -> str:
        """How it ended, once it has."""
        return _how(self._process.wait(), self._log)

    def close(self) -> None:
        """Takes it down, and what was forked off it."""
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Started:
    """One launch, from the start of its process to its end."""

    def __init__(self, loader: _Loader, turn: socket.socket, log: Path, cpu: int) -> None:
        self._loader = loader
        self._turn = turn
        self._log = log
        self._cpu = cpu
        self._pid: int | None = None
        self._ended: str | None = None  # how, "" if in order
        self._late = False
        self._used_s = 0.0  # of its turns
        self.number = 0  # of the sample that is next, among those of its benchmark

    def await_ready(self, limit_s: float) -> None:
        """Returns when the launch waits for its turn, when it has ended, or when that takes too long."""
        try:
            self._listen(READY, time.monotonic() + limit_s)
        except TimeoutError:
            self._late = True

    def turn(self, limit_s: float, deadline: float) -> bool:
        """Gives it one turn; whether it wants another. It is taken down at the deadline, and when its turns have taken
        `limit_s` together.
        """
        if self._late or self._ended is not None:
            return False
        began = time.monotonic()
        with contextlib.suppress(OSError):
            self._turn.sendall(MESSAGE.pack(GO, self._cpu))
        try:
            self._listen(READY, min(began + limit_s - self._used_s, deadline))
        except TimeoutError:
            self._late = True
            self.end()
        self._used_s += time.monotonic() - began
        return not self._late and self._ended is None

    def run(self, limit_s: float, deadline: float) -> str | None:
        """Gives it all the turns that it wants: what went wrong, "" if nothing, None if it took too long."""
        while self.turn(limit_s, deadline):
            pass
        return None if self._late else self._ended

    def end(self) -> None:
        """Takes down what is left of it."""
        if self._turn.fileno() < 0:
            return
        with contextlib.suppress(TimeoutError):
            self._listen(ENDED, time.monotonic())  # says its pid, if it has one
        if self._ended is None and self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._turn.close()

    def _listen(self, wanted: bytes, deadline: float) -> None:
        """Takes in what it says until that is `wanted`, or its end."""
        while self._ended is None:
            self._turn.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                said = self._turn.recv(MESSAGE.size, socket.MSG_WAITALL)
            except ConnectionError:
                said = b""
            if len(said) < MESSAGE.size:
                self._ended = self._loader.how()
                return
            what, number = MESSAGE.unpack(said)
            if what == PID:
                self._pid = number
            elif what == READY:
                self.number = number
            elif what == ENDED:
                self._ended = _how(number, self._log) if number else ""
            if what == wanted:
                return


def take_turns(launches: Sequence[Started], limit_s: float, deadline: float) -> None:
    """Has them measure by turns until all have ended, one at a time. limit_s: for the turns of each.

    Each is as often the first as the others: that one is slower, by 1% where calls are warm and by 3 where they are
    not, as those after it find in the caches what they share with it.
    """
    going = list(launches)
    while going:
        rounds, first = divmod(going[0].number, len(going))
        order = going[first:] + going[:first]
        wanting = {launch for launch in order[:: -1 if rounds % 2 else 1] if launch.turn(limit_s, deadline)}
        going = [launch for launch in going if launch in wanting]


def run_alone(
    arm: Arm, module: Sequence[str], log: Path, variables: Mapping[str, str], limit_s: float
) -> str | None:
    """`PYTHON -P -m MODULE...` of an arm, in a session that ends with it: what went wrong, as `Started.run`."""
    with log.open("wb") as out:
        process = _start(arm, module, environment_of(variables, arm.env, arm.path), out)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return "" if code == 0 else _how(code, log)


def _start(
    arm: Arm, module: Sequence[str], env: Mapping[str, str], out: BinaryIO, *fds: int
) -> subprocess.Popen[bytes]:
    """`PYTHON -P -m MODULE...` of an arm, in a session of its own."""
    return subprocess.Popen(
        [arm.python, "-P", "-m", *module],
        cwd=arm.root,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=fds,
    )


def environment_of(
    variables: Mapping[str, str], of_arm: Mapping[str, str], path: Sequence[str]
) -> dict[str, str]:
    """The variables of a launch: those of the gate, without what belongs to its job, and the arm's."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _LEFT_OUT and not name.startswith(_LEFT_OUT_PREFIXES)
    }
    env.setdefault("OMP_NUM_THREADS", "1")
    return env | {"PYTHONPATH": os.pathsep.join(path)} | dict(of_arm) | dict(variables)


def _alike(arm: Arm) -> object:
    """What two arms have in common whose launches may be forked off one process."""
    return arm.python, tuple(sorted(_for_loading(arm).items()))


def _for_loading(arm: Arm) -> dict[str, str]:
    return {name: value for name, value in arm.env.items() if not name.startswith(_OF_SUITES)}


def _how(code: int, log: Path) -> str:
    """How a process ended, and the last line it said."""
    return f"the launch {how_ended(code)}: {last_line(log.read_text(errors='replace'))}"
