"""The gate's handles of loader and launch processes. Launches are set up in parallel and take samples in turns."""

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

# Variables of the job that the gate runs in, which launches must not inherit.
_JOB_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_JOB_PREFIXES = (
    "TORCHELASTIC_",
    "PYTEST_",
    *(f"DTBENCH_{name}" for name in ("LAUNCH", "OUTPUT")),
)

LATE = "timeout"  # `LaunchProcess.died` of a launch that exceeded its time limit
Variables = Mapping[str, str]  # environment variable -> value


class Round:
    """The loaders of one group of launches; must be closed.

    All launches of a round measure on one CPU. Without pinning, they usually run on different CPUs, one of which may be
    slower for seconds. The ratios of samples taken in turns then scattered twice as much.

    Args:
        arms: the arms whose loaders are started.
        variables: environment variables that are set in every loader.
        log: common prefix of the loaders' log files.
        cpu: the CPU on which launches measure, -1 for any.
    """

    def __init__(self, arms: Iterable[Arm], variables: Variables, log: Path, cpu: int) -> None:
        self._cpu = cpu
        self._loaders: dict[object, Loader] = {}
        with contextlib.ExitStack() as started:
            for arm in arms:
                if arm.loader_key not in self._loaders:
                    loader = self._loaders[arm.loader_key] = Loader(
                        arm, variables, log.with_name(f"{log.name}-loader{len(self._loaders)}.log")
                    )
                    started.callback(loader.close)
            self._started = started.pop_all()

    def await_loaded(self, limit_s: float) -> None:
        """Waits at most `limit_s` until all loaders have imported torch, since imports disturb measurements."""
        deadline = time.monotonic() + limit_s
        for loader in self._loaders.values():
            loader.await_loaded(deadline)

    def start(self, arm: Arm, order: Order, log: Path) -> "LaunchProcess":
        return self._loaders[arm.loader_key].fork(arm, order, log, self._cpu)

    def close(self) -> None:
        """Ends the loaders and their launches."""
        self._started.close()


class Loader:
    """A loader process. It and its launches have an operating system session of their own."""

    def __init__(self, arm: Arm, variables: Variables, log: Path) -> None:
        self._log, self._loaded = log, False
        path = arm.path if arm.loads_own_modules else arm.path[:1]  # a shared loader imports only the harness
        env = environment_of(variables, arm.env_for_loading, path)
        with log.open("wb") as out:
            command = [arm.python, "-P", "-m", "dtbench.gate.loader"]
            self._program = StartedProgram(command, out=out, cwd=arm.root, env=env, connected=True)

    def await_loaded(self, deadline: float) -> None:
        """Waits until the loader has imported torch, has ended, or the deadline has passed."""
        with contextlib.suppress(OSError, EOFError):
            if not self._loaded and self._program.connection.poll(seconds_until(deadline)):
                self._loaded = self._program.connection.recv() == (READY, 0)

    def fork(self, arm: Arm, order: Order, log: Path, cpu: int) -> "LaunchProcess":
        request = LaunchRequest(
            msgspec.msgpack.encode(order), str(log), str(arm.root), arm.path, dict(arm.env)
        )
        gate_end, launch_end = Pipe()
        with launch_end, contextlib.suppress(OSError):  # the loader has ended, which `receive` reports
            self._program.connection.send(tuple(request))
            send_connection(self._program.connection, launch_end)
        return LaunchProcess(gate_end, cpu, log, lambda: _end_of(self._program.wait() or 0, self._log))

    def close(self) -> None:
        """Ends the loader and its launches."""
        self._program.end()
        _remove_if_empty(self._log)


class LaunchProcess:
    """A launch, from the start of its process to its end.

    Attributes:
        label: label of the benchmark that is running.
        listing: the arm's benchmarks, in a counting launch.
        results: key -> result, as received so far.
        number: index of the next sample of that benchmark.
        ready: whether the launch waits for its turn.
        died: why the launch failed, "" after a normal end, None while it runs.
        used_s: seconds spent in its turns.
    """

    def __init__(self, connection: Connection, cpu: int, log: Path, loader_end: Callable[[], str]) -> None:
        self.connection, self._cpu, self._log, self._loader_end = connection, cpu, log, loader_end
        self.label, self.number, self.ready, self.used_s = "", 0, False, 0.0
        self.listing: Listing | None = None
        self.results: dict[Key, Result] = {}
        self.died: str | None = None

    def close(self) -> None:
        self.connection.close()
        _remove_if_empty(self._log)

    def receive(self) -> None:
        try:
            kind, value = self.connection.recv()
            if kind == LISTING:
                self.listing = msgspec.msgpack.decode(value, type=Listing)
            elif kind == RESULT:
                result = msgspec.msgpack.decode(value, type=Result)
                self.results[result.case_key] = result
            elif kind == NOW:
                self.label = value
            elif kind == READY:
                self.ready, self.number = True, value
            elif kind == ENDED:
                self.died = _end_of(value, self._log) if value else ""
        except msgspec.MsgspecError as error:
            self.died = f"the launch sent a malformed {kind}: {error}"
        except (EOFError, OSError):
            self.died = self._loader_end()

    def go(self) -> None:
        self.ready = False
        with contextlib.suppress(OSError):  # `receive` reports the end of the launch
            self.connection.send((GO, self._cpu))


def await_ready(launches: Sequence[LaunchProcess], limit_s: float, deadline: float) -> None:
    """Waits until each launch is ready for its turn or has ended. Launches that exceed the limit are marked as died."""
    limit = min(time.monotonic() + limit_s, deadline)
    while running := {
        launch.connection: launch for launch in launches if launch.died is None and not launch.ready
    }:
        arrived = wait(list(running), seconds_until(limit))
        for connection in arrived:
            running[connection].receive()  # type: ignore[index] # wait returns the given connections
        if not arrived:
            for launch in running.values():
                launch.died = LATE
            return


def take_turns(launches: Sequence[LaunchProcess], limit_s: float, deadline: float) -> None:
    """Lets the launches measure in turns until all have ended, or one has died.

    Each launch goes first equally often. The first is 1% slower with warm calls and 3% slower with cold ones, since the
    others find shared data in the caches.

    Args:
        launches: the launches, ready for their first turns.
        limit_s: limit for all turns of one launch together, seconds.
        deadline: end of the budget on the monotonic clock, seconds.
    """
    while going := [launch for launch in launches if launch.died is None]:
        rounds, first = divmod(going[0].number, len(going))
        for launch in (going[first:] + going[:first])[:: -1 if rounds % 2 else 1]:
            began = time.monotonic()
            launch.go()
            await_ready([launch], limit_s - launch.used_s, deadline)
            launch.used_s += time.monotonic() - began
            if launch.died:
                return


def environment_of(variables: Variables, arm_variables: Variables, path: Sequence[str]) -> dict[str, str]:
    """Returns the environment of a launch: the gate's without variables of its job, then the arm's."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in _JOB_VARIABLES and not name.startswith(_JOB_PREFIXES)
    }
    return {"OMP_NUM_THREADS": "1", **env, "PYTHONPATH": os.pathsep.join(path), **arm_variables, **variables}


def run_ranks(
    arm: Arm, arguments: Sequence[str], variables: Variables, log: Path, limit_s: float
) -> str | None:
    """Runs `dtbench ARGUMENTS` in an arm. Returns "" after a normal end, why it failed, or None after a timeout."""
    command = [arm.python, "-P", "-m", "dtbench", *arguments]
    env = environment_of(variables, arm.env, arm.path)
    with log.open("wb") as out, StartedProgram(command, out=out, cwd=arm.root, env=env) as program:
        code = program.wait(max(limit_s, 0.0))
    return None if code is None else _end_of(code, log) if code else ""


def _end_of(code: int, log: Path) -> str:
    """Describes how a process ended, with the last line that it printed."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - 2**16, 0))
        return f"the launch {describe_exit(code)}: {plain(last_line(file.read().decode(errors='replace')))}"
    return f"the launch {describe_exit(code)}"


def _remove_if_empty(log: Path) -> None:
    with contextlib.suppress(OSError):
        if not log.stat().st_size:
            log.unlink()
