"""Persistent worlds of real gloo processes that execute a test's function on every rank.

A world is started once and serves many calls, because starting four processes costs more than most
calls. A call that leaves the ranks in doubt (one hangs, dies, or fails while others do not) throws the
world away; the next call starts a fresh one.

Ranks are forked off multiprocessing's fork server, which has imported torch and the core once for all of them and
done nothing else: an import takes seconds of a core. Functions travel by module name, file and qualified
name; arguments and results by plain pickle. What a rank asserts is explained as pytest does it.
"""

from __future__ import annotations

import ast
import contextlib
import datetime
import faulthandler
import functools
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import ModuleType
from typing import Any

from _pytest.assertion.rewrite import rewrite_asserts

WORLD_SIZE = 4
START = multiprocessing.get_context("forkserver")
START.set_forkserver_preload(["core.tests.preload"])
CALL_TIMEOUT_S = 60.0
# Test files whose ranks are compared by `check_ranks`; others count what is sent, or ask where gradients lie, which is
# not the same under a mode.
PROGRAMS = ("test_parallel", "test_parallel_2d", "test_parallel_styles", "test_optim")
# Below the call's timeout, so that a collective without its peers raises where it stands.
GROUP_TIMEOUT_S = 45.0
# What the other ranks get to finish in once one rank has failed.
GRACE_S = 3.0
STDERR_TAIL = 4000  # characters of a rank's stderr shown with its failure


class RankError(Exception):
    """A rank raised, hung or died. `failures`: rank -> what is known of it."""

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass(frozen=True)
class Call:
    """A function by name, loadable in a process that never saw the test session."""

    module: str
    file: str
    qualname: str
    filters: tuple[tuple[Any, ...], ...]  # warnings.filters of the test in progress

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> Call:
        qualname = getattr(fn, "__qualname__", repr(fn))
        file = inspect.getsourcefile(fn) if inspect.isfunction(fn) else None
        if file is None or "<" in qualname:
            raise TypeError(
                f"got {qualname}, expected a function defined at module level: "
                "the ranks find it by its name, so move it out and pass what it captured as arguments"
            )
        return cls(fn.__module__, str(Path(file).resolve()), qualname, tuple(warnings.filters))

    def load(self) -> Callable[..., Any]:
        found: Any = load_module(self.module, Path(self.file))
        for name in self.qualname.split("."):
            found = getattr(found, name)
        return inspect.unwrap(found)


def load_module(name: str, file: Path) -> ModuleType:
    """The module `name` if it was imported from the file, else the file itself under that name."""
    module = sys.modules.get(name)
    if module is not None and module.__file__ is not None and Path(module.__file__).resolve() == file:
        return module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before execution, and for pickling what the module defines
    source = file.read_bytes()
    tree = ast.parse(source)
    rewrite_asserts(tree, source, str(file))
    exec(compile(tree, str(file), "exec"), vars(module))
    return module


def on_ranks(fn: Callable[..., None] | None = None, *, world_size: int = WORLD_SIZE) -> Any:
    """Decorator: a test that every rank executes, with what pytest parametrizes it with. It asserts there."""
    return _with_fixture(fn, "ranks", world_size)


def on_gloo_ranks(fn: Callable[..., None] | None = None, *, world_size: int = WORLD_SIZE) -> Any:
    """As `on_ranks`, on real gloo processes: for what threads of one process cannot show."""
    return _with_fixture(fn, "gloo_ranks", world_size)


def on_worlds(fn: Callable[..., None] | None = None, *, world_size: int = WORLD_SIZE) -> Any:
    """As `on_ranks`, in both flavours: see the fixture `worlds`."""
    return _with_fixture(fn, "worlds", world_size)


def _with_fixture(fn: Callable[..., None] | None, fixture: str, world_size: int) -> Any:
    if fn is None:  # called with a size
        return functools.partial(_with_fixture, fixture=fixture, world_size=world_size)

    @functools.wraps(fn)
    def test(**given: Any) -> None:
        run = given.pop(fixture)
        run(fn, world_size=world_size, **given)

    signature = inspect.signature(fn)
    world = inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY)
    vars(test)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), world])
    return test


# --- the rank's side -------------------------------------------------------------------------------


def serve(connection: Connection, rank: int, world_size: int, store: str, stderr_path: str) -> None:
    """Joins the world and executes calls until the pipe closes."""
    with Path(stderr_path).open("wb") as stderr:
        os.dup2(stderr.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # The name of the machine need not resolve to an address that reaches it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from core.tests.on_device import DEVICE_TYPE

    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(0)  # a mesh warns of ranks that select none
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world_size),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    while True:
        try:
            call, payload = pickle.loads(connection.recv_bytes())
        except EOFError:  # the session is over
            break
        connection.send_bytes(_answer(call, payload))
    os._exit(0)  # peers may be gone already: no orderly farewell to wait for


def _answer(call: Call, payload: bytes) -> bytes:
    try:
        with warnings.catch_warnings():
            _apply_filters(call.filters)
            fn = call.load()
            args, kwargs = pickle.loads(payload)
            return pickle.dumps((True, checked(fn)(*args, **kwargs)))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        summary = "".join(traceback.format_exception_only(error)).strip()
        try:
            carried = pickle.dumps(error)
            pickle.loads(carried)  # some exceptions pickle and cannot be read back
        except Exception:
            carried = None
        return pickle.dumps((False, (summary, text, carried)))


def checked(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Has the ranks compared at every op in tests of whole programs. Those of single ops look at what an op sends."""
    if not fn.__module__.endswith(PROGRAMS):
        return fn
    from dtbench_core import check_ranks

    def run(*args: Any, **kwargs: Any) -> Any:
        with check_ranks():
            return fn(*args, **kwargs)

    return run


def _apply_filters(filters: Sequence[tuple[Any, ...]]) -> None:
    warnings.resetwarnings()
    for action, message, category, module, lineno in reversed(filters):
        pattern = message.pattern if isinstance(message, re.Pattern) else message or ""
        where = module.pattern if isinstance(module, re.Pattern) else module or ""
        warnings.filterwarnings(action, pattern, category, where, lineno)


# Groups are costly, so a rank's meshes are kept: a rank may be a thread.
_meshes: weakref.WeakKeyDictionary[threading.Thread, dict[str, Any]] = weakref.WeakKeyDictionary()


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Any:
    """On a rank: the mesh of the first ranks in this shape, made once per world.

    Every rank of the world must ask for the same meshes in the same order.
    """
    import torch

    return mesh_in(torch.arange(int(torch.tensor(shape).prod())).reshape(shape).tolist(), names)


def mesh_in(order: list[Any], names: tuple[str, ...] | None = None) -> Any:
    """As `mesh_of`, of these ranks in this order."""
    from torch.distributed.device_mesh import DeviceMesh

    from core.tests.on_device import DEVICE_TYPE

    mine, key = _meshes.setdefault(threading.current_thread(), {}), f"{order} {names}"
    if key not in mine:
        mine[key] = DeviceMesh(DEVICE_TYPE, order, mesh_dim_names=names)
    return mine[key]


def forget_meshes() -> None:
    """For worlds of this thread, whose meshes end with them."""
    _meshes.pop(threading.current_thread(), None)


# --- the test's side -------------------------------------------------------------------------------


class _Rank:
    """One process: its pipe, and a file for its stderr."""

    def __init__(self, rank: int, world_size: int, folder: Path) -> None:
        self.rank = rank
        self.stderr_path = folder / f"stderr{rank}"
        self.connection, theirs = Pipe()
        self.process = START.Process(
            target=serve,
            args=(theirs, rank, world_size, str(folder / "store"), str(self.stderr_path)),
            daemon=True,
        )
        self.process.start()
        theirs.close()

    def stderr_tail(self) -> str:
        return self.stderr_path.read_text(errors="replace")[-STDERR_TAIL:]

    def describe_hang(self) -> str:
        """Where the rank stands, by asking it for its stacks."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGUSR1)
        time.sleep(0.5)
        return f"did not answer in time; its stacks and stderr:\n{self.stderr_tail()}"


class World:
    """`size` gloo ranks on this machine, executing one call at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._folder = tempfile.TemporaryDirectory(prefix="gloo_world_")
        self._ranks = [_Rank(r, size, Path(self._folder.name)) for r in range(size)]
        self.healthy = True

    @property
    def pids(self) -> list[int | None]:
        return [r.process.pid for r in self._ranks]

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float) -> list[Any]:
        message = pickle.dumps((Call.of(fn), pickle.dumps((args, kwargs))))
        failures: dict[int, str] = {}
        self.healthy = False  # until every rank has answered
        for rank in self._ranks:
            with contextlib.suppress(BrokenPipeError):  # dead already: told below
                rank.connection.send_bytes(message)
        answers = self._collect(time.monotonic() + timeout_s, failures)
        for rank in self._ranks:
            if rank.rank not in answers and rank.rank not in failures and rank.process.is_alive():
                failures[rank.rank] = rank.describe_hang()
        errors = {r: value for r, (ok, value) in answers.items() if not ok}
        # All failing alike is a verdict on the code; anything else may have left collectives half done.
        same = len({summary.split(":")[0] for summary, _, _ in errors.values()}) == 1
        self.healthy = not failures and (not errors or (len(errors) == self.size and same))
        if failures or errors:
            raise _error(fn, errors, failures)
        return [answers[r][1] for r in range(self.size)]

    def _collect(self, deadline: float, failures: dict[int, str]) -> dict[int, tuple[bool, Any]]:
        """Answers by rank, until all are in, or the time (shortened by the first failure) is over."""
        answers: dict[int, tuple[bool, Any]] = {}
        waiting = {r.connection: r for r in self._ranks}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                rank = waiting.pop(ready)  # type: ignore[index, arg-type]
                try:
                    answers[rank.rank] = pickle.loads(rank.connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    rank.process.join(1)
                    failures[rank.rank] = f"died (exit {rank.process.exitcode}):\n{rank.stderr_tail()}"
                if rank.rank in failures or not answers[rank.rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def close(self) -> None:
        for rank in self._ranks:
            rank.connection.close()
        for rank in self._ranks:
            if self.healthy:
                rank.process.join(5)
            rank.process.kill()
            rank.process.join()
        self._folder.cleanup()


def _error(
    fn: Callable[..., Any], errors: dict[int, tuple[str, str, bytes | None]], failures: dict[int, str]
) -> RankError:
    known = {**failures, **{r: text for r, (_, text, _) in errors.items()}}
    # A death explains its peers' errors, an error explains its peers' hanging: told in this order.
    order = sorted(known, key=lambda r: (0 if known[r].startswith("died") else 1 if r in errors else 2, r))
    first = errors.get(order[0])
    headline = first[0] if first else known[order[0]].splitlines()[0]
    parts = [f"rank {order[0]} in {fn.__qualname__}: {headline}"]
    parts += [f"--- rank {r}: {known[r].rstrip()}" for r in order]
    error = RankError("\n".join(parts), known)
    if first and first[2]:
        error.__cause__ = pickle.loads(first[2])
    return error


def refuse(
    run: Callable[..., Any], fn: Callable[..., Any], *args: Any, told: str, error: type = object
) -> None:
    """Asserts that `fn(*args)` raises on every rank, this error with a message that matches `told`."""
    try:
        run(fn, *args)
    except RankError as caught:
        assert re.search(told, str(caught)), caught
        assert isinstance(caught.__cause__, error) and len(caught.failures) == WORLD_SIZE, caught
    else:
        raise AssertionError(f"{fn.__qualname__} raised nothing, expected {told!r}")


class Worlds:
    """The worlds of a test session, one per size, started when first asked for."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def __call__(
        self,
        fn: Callable[..., Any],
        *args: Any,
        world_size: int = WORLD_SIZE,
        timeout_s: float = CALL_TIMEOUT_S,
        **kwargs: Any,
    ) -> list[Any]:
        """Executes `fn(*args, **kwargs)` on every rank and returns the results by rank.

        Raises:
            RankError: a rank raised (its exception is the cause), died, or took longer than `timeout_s`.
        """
        world = self._worlds.get(world_size)
        if world is None:
            world = self._worlds[world_size] = World(world_size)
        try:
            return world.call(fn, args, kwargs, timeout_s)
        finally:
            if not world.healthy:
                del self._worlds[world_size]
                world.close()

    refuse = refuse

    def pids(self, world_size: int = WORLD_SIZE) -> list[int | None]:
        return self._worlds[world_size].pids if world_size in self._worlds else []

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
