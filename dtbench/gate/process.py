"""Launches as processes, seen from the gate: they are set up side by side and measure in turn, a sample at a time."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

import msgspec

from dtbench.engine.workers import StartedProgram, describe_exit, seconds_until, send_connection
from dtbench.errors import last_line, plain
from dtbench.gate.arms import Arm
from dtbench.gate.benchmark import Key, Listing, Order
from dtbench.gate.messages import ENDED, GO, LISTING, NOW, READY, RESULT, LaunchRequest
from dtbench.records.result import Result

# What belongs to the job that the gate runs in, not to a launch.
_OF_THE_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_THE_JOB_PREFIXES = (
    "TORCHELASTIC_",
    "PYTEST_",
    *(f"DTBENCH_{name}" for name in ("LAUNCH", "OUTPUT")),
)

LATE = "it took too long"
Variables = Mapping[str, str]  # of the environment, by name


class Round:
    """The processes that launches next to each other are forked off, until it is closed.

    log: how the files begin that take what these print. cpu: on which launches measure, -1 for any. Of two processes
    each tends to stay on its own, and one may be slower than the other for seconds: where nothing held them, ratios of
    samples taken together scattered twice as much.
    """

    def __init__(self, arms: Iterable[Arm], variables: Variables, log: Path, cpu: int) -> None:
        self._cpu = cpu
        self._loaders: dict[object, Loader] = {}
        with contextlib.ExitStack() as started:
            for arm in arms:
                if arm.loads_as not in self._loaders:
                    file = log.with_name(f"{log.name}-loader{len(self._loaders)}.log")
                    loader = self._loaders[arm.loads_as] = Loader(arm, variables, file)
                    started.callback(loader.close)
            self._started = started.pop_all()

    def await_loaded(self, limit_s: float) -> None:
        """Returns when all is loaded, or that takes too long: nothing is to load beside what is measured."""
        deadline = time.monotonic() + limit_s
        for loader in self._loaders.values():
            loader.await_loaded(deadline)

    def start(self, arm: Arm, order: Order, log: Path) -> LaunchProcess:
        return self._loaders[arm.loads_as].fork(arm, order, log, self._cpu)

    def close(self) -> None:
        """Ends them and what was forked off them."""
        self._started.close()


class Loader:
    """A process that loads and forks, in a session of its own with its launches."""

    def __init__(self, arm: Arm, variables: Variables, log: Path) -> None:
        self._log, self._loaded = log, False
        path = arm.path if arm.alone else arm.path[:1]  # the harness alone where others share it
        env = environment_of(variables, arm.env_for_loading, path)
        with log.open("wb") as out:
            command = [arm.python, "-P", "-m", "dtbench.gate.loader"]
            self._program = StartedProgram(command, out=out, cwd=arm.root, env=env, connected=True)

    def await_loaded(self, deadline: float) -> None:
        """Returns when it has loaded, when it has ended, or at the deadline."""
        with contextlib.suppress(OSError, EOFError):
            if not self._loaded and self._program.connection.poll(seconds_until(deadline)):
                self._loaded = self._program.connection.recv() == (READY, 0)

    def fork(self, arm: Arm, order: Order, log: Path, cpu: int) -> LaunchProcess:
        encoded = msgspec.msgpack.encode(order)
        request = LaunchRequest(encoded, str(log), str(arm.root), arm.path, dict(arm.env))
        ours, theirs = Pipe()
        with theirs, contextlib.suppress(OSError):  # it has ended: so has the launch
            self._program.connection.send(tuple(request))
            send_connection(self._program.connection, theirs)
        return LaunchProcess(ours, cpu, log, lambda: _end_of(self._program.wait() or 0, self._log))

    def close(self) -> None:
        """Ends it, with what was forked off it."""
        self._program.end()
        _remove_if_empty(self._log)


class LaunchProcess:
    """One launch, from the start of its process to its end.

    label: of the benchmark it is at. results: by key, as they come. number: of the sample that is next, among those of
    its benchmark. died: how it ended, "" if in order, None while it runs.
    """

    def __init__(self, connection: Connection, cpu: int, log: Path, of_loader: Callable[[], str]) -> None:
        self.connection, self._cpu, self._log, self._of_loader = connection, cpu, log, of_loader
        self.label = ""
        self.listing: Listing | None = None
        self.results: dict[Key, Result] = {}
        self.number = 0
        self.ready = False
        self.died: str | None = None
        self.used_s = 0.0  # by its turns

    def close(self) -> None:
        self.connection.close()
        _remove_if_empty(self._log)

    def receive(self) -> None:
        try:
            what, value = self.connection.recv()
            if what == LISTING:
                self.listing = msgspec.msgpack.decode(value, type=Listing)
            elif what == RESULT:
                result = msgspec.msgpack.decode(value, type=Result)
                self.results[result.case_key] = result
            elif what == NOW:
                self.label = value
            elif what == READY:
                self.ready, self.number = True, value
            elif what == ENDED:
                self.died = _end_of(value, self._log) if value else ""
        except msgspec.MsgspecError as error:
            self.died = f"the launch gave no {what} of this harness: {error}"
        except (EOFError, OSError):
            self.died = self._of_loader()

    def go(self) -> None:
        self.ready = False
        with contextlib.suppress(OSError):  # its end is met by `receive`
            self.connection.send((GO, self._cpu))


def await_ready(launches: Sequence[LaunchProcess], limit_s: float, deadline: float) -> None:
    """Returns when each waits for its turn or has ended; one that takes longer has ended so."""
    limit = min(time.monotonic() + limit_s, deadline)
    while running := {one.connection: one for one in launches if one.died is None and not one.ready}:
        arrived = wait(list(running), seconds_until(limit))
        for connection in arrived:
            running[connection].receive()  # type: ignore[index] # of other kinds there are none
        if not arrived:
            for launch in running.values():
                launch.died = LATE
            return


def take_turns(launches: Sequence[LaunchProcess], limit_s: float, deadline: float) -> None:
    """Has them measure by turns until all have ended in order, or one has not. limit_s: for the turns of each.

    Each is as often the first as the others: that one is slower, by 1% where calls are warm and by 3 where they are
    not, as those after it find in the caches what they share with it.
    """
    while going := [launch for launch in launches if launch.died is None]:
        rounds, first = divmod(going[0].number, len(going))
        order = going[first:] + going[:first]
        for launch in order[:: -1 if rounds % 2 else 1]:
            began = time.monotonic()
            launch.go()
            await_ready([launch], limit_s - launch.used_s, deadline)
            launch.used_s += time.monotonic() - began
            if launch.died:
                return


def environment_of(variables: Variables, of_arm: Variables, path: Sequence[str]) -> dict[str, str]:
    """The variables of a launch: those of the gate, without what belongs to its job, and the arm's."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THE_JOB and not name.startswith(_OF_THE_JOB_PREFIXES)
    }
    env.setdefault("OMP_NUM_THREADS", "1")
    return env | {"PYTHONPATH": os.pathsep.join(path)} | dict(of_arm) | dict(variables)


def run_ranks(
    arm: Arm, arguments: Sequence[str], variables: Variables, log: Path, limit_s: float
) -> str | None:
    """`dtbench ARGUMENTS` of an arm, which starts ranks: how it ended, "" if in order, None if it took too long."""
    command = [arm.python, "-P", "-m", "dtbench", *arguments]
    env = environment_of(variables, arm.env, arm.path)
    with log.open("wb") as out, StartedProgram(command, out=out, cwd=arm.root, env=env) as program:
        code = program.wait(max(limit_s, 0.0))
    return None if code is None else _end_of(code, log) if code else ""


def _end_of(code: int, log: Path) -> str:
    """How a process ended, and the last line it printed."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - 2**16, 0))
        return f"the launch {describe_exit(code)}: {plain(last_line(file.read().decode(errors='replace')))}"
    return f"the launch {describe_exit(code)}"


def _remove_if_empty(log: Path) -> None:
    with contextlib.suppress(OSError):
        if not log.stat().st_size:
            log.unlink()
