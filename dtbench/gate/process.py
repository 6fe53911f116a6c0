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
import time
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from dtbench.engine.signals import how_ended
from dtbench.engine.workers import StartedProgram, hand_over, left_s
from dtbench.gate.arms import Arm
from dtbench.gate.benchmark import LOG
from dtbench.gate.loader import ENDED, GO, PID, READY, Launch
from dtbench.gate.logs import LOOK_S, CappedLog
from dtbench.suite.errors import last_line, plain

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

    def close(self) -> int:
        """Takes down whatever is left of them; how many bytes their logs leave out."""
        left_out = 0
        while self._started:
            started = self._started.pop()
            started.end()
            left_out += started.log.left_out
        while self._loaders:
            loader = self._loaders.popitem()[1]
            loader.close()
            left_out += loader.log.left_out
        return left_out


class _Loader:
    """A process that loads and forks, in a session of its own with its launches."""

    def __init__(
        self, arms: Sequence[Arm], variables: Mapping[str, str], load: Sequence[str], log: Path
    ) -> None:
        arm, self.log, self._loaded = arms[0], CappedLog(log), False
        paths = list(dict.fromkeys(arm.path for arm in arms))
        path = arm.path if len(paths) == 1 else arm.path[:1]
        asked = json.dumps({"load": list(load), "paths": paths})
        env = environment_of(variables, _for_loading(arm), path)
        with self.log.open() as out:
            command = _module(arm, ["dtbench.gate.loader", asked])
            self._program = StartedProgram(command, out=out, cwd=arm.root, env=env, connected=True)

    def await_loaded(self, deadline: float) -> None:
        """Returns when it has loaded, when it has ended, or at the deadline."""
        if self._loaded:
            return
        with contextlib.suppress(OSError, EOFError):
            self._loaded = _poll(self._program.connection, deadline, self.log)
            if self._loaded:
                self._program.connection.recv()

    def fork(self, arm: Arm, stem: Path, cpu: int) -> Started:
        """A launch of one of its arms."""
        ours, theirs = Pipe()
        with theirs, contextlib.suppress(OSError):  # it has ended: so has the launch
            self._program.connection.send(tuple(Launch(str(stem), str(arm.root), arm.path, dict(arm.env))))
            hand_over(self._program.connection, theirs)
        return Started(self, ours, CappedLog(stem.with_suffix(LOG)), cpu)

    def how(self) -> str:
        """How it ended, once it has."""
        return _how(self._program.wait() or 0, self.log)

    def close(self) -> None:
        """Takes it down, and what was forked off it."""
        self._program.end()
        self.log.cut(final=True)


class Started:
    """One launch, from the start of its process to its end."""

    def __init__(self, loader: _Loader, connection: Connection, log: CappedLog, cpu: int) -> None:
        self._loader = loader
        self._connection = connection
        self.log = log
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
            self._connection.send((GO, self._cpu))
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
        if self._connection.closed:
            return
        with contextlib.suppress(TimeoutError):
            self._listen(ENDED, time.monotonic())  # says its pid, if it has one
        if self._ended is None and self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        self._connection.close()
        self.log.cut(final=True)

    def _listen(self, wanted: str, deadline: float) -> None:
        """Takes in what it says until that is `wanted`, or its end."""
        while self._ended is None:
            try:
                if not _poll(self._connection, deadline, self.log):
                    raise TimeoutError
                what, number = self._connection.recv()
            except (EOFError, ConnectionError):
                self._ended = self._loader.how()
                return
            if what == PID:
                self._pid = number
            elif what == READY:
                self.number = number
            elif what == ENDED:
                self._ended = _how(number, self.log) if number else ""
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
    arm: Arm, module: Sequence[str], log: CappedLog, variables: Mapping[str, str], limit_s: float
) -> str | None:
    """`PYTHON -P -m MODULE...` of an arm, in a session that ends with it: what went wrong, as `Started.run`."""
    env = environment_of(variables, arm.env, arm.path)
    deadline = time.monotonic() + limit_s
    with log.open() as out, StartedProgram(_module(arm, module), out=out, cwd=arm.root, env=env) as program:
        while (code := program.wait(min(left_s(deadline), LOOK_S))) is None and left_s(deadline):
            log.cut()
    log.cut(final=True)
    return None if code is None else _how(code, log) if code else ""


def _module(arm: Arm, module: Sequence[str]) -> list[str]:
    """`PYTHON -P -m MODULE...` of an arm."""
    return [arm.python, "-P", "-m", *module]


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


def _how(code: int, log: CappedLog) -> str:
    """How a process ended, and the last line it said."""
    return f"the launch {how_ended(code)}: {plain(last_line(log.tail()))}"


def _poll(connection: Connection, deadline: float, log: CappedLog) -> bool:
    """Whether the other end has said something until then; its log is cut meanwhile."""
    while not connection.poll(min(left_s(deadline), LOOK_S)):
        log.cut()
        if not left_s(deadline):
            return False
    return True
