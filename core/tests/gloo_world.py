"""Persistent worlds of real gloo processes that execute a test's function on every rank, and how tests ask for ranks.

A world is started once and serves many calls, because starting four processes costs more than most calls. A call that
fails throws the world away; the next one starts a fresh one. Ranks are forked off multiprocessing's fork server, which
has imported torch and the core once for all of them: an import takes seconds of a core. Functions travel by name,
arguments and results by plain pickle.
"""

import contextlib
import datetime
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from core.tests.on_device import DEVICE_TYPE

# "nccl" or "gloo": tests take two real ranks of this transport, which may share a GPU, in place of all others.
BACKEND = os.environ.get("DTBENCH_TEST_BACKEND", "")
WORLD_SIZE = 2 if BACKEND else 4
# Builds of NCCL that are small enough to be carried to a machine leave products out.
REDUCES_PRODUCTS = BACKEND != "nccl"
# Without a fork where a rank uses CUDA: what the fork server imports counts GPUs, after which none may.
START = multiprocessing.get_context("forkserver" if DEVICE_TYPE == "cpu" else "spawn")
START.set_forkserver_preload(["core.tests.preload"])
# Two ranks on one GPU may lock up; each lock-up costs the check of a GPU this long.
CALL_TIMEOUT_S = 30.0 if BACKEND else 60.0
# Below the call's timeout, so that a collective without its peers raises where it stands.
GROUP_TIMEOUT_S = 0.75 * CALL_TIMEOUT_S
# Time for the other ranks to finish after one rank has failed.
GRACE_S = 10.0
STDERR_TAIL = 4000  # characters of a rank's stderr shown with its failure


class RankError(Exception):
    """A rank raised, hung or died."""


# --- decorators of tests ---------------------------------------------------------------------------


def on_ranks(fn: Callable[..., None] | None = None, *, world_size: int = WORLD_SIZE) -> Any:
    """Decorator of a test that every rank executes. Ranks are threads; pytest's parameters are passed on."""
    return on_ranks_of(fn, "ranks", world_size)


def on_gloo_ranks(fn: Callable[..., None] | None = None, *, world_size: int = WORLD_SIZE) -> Any:
    """Like `on_ranks`, but ranks are gloo processes, for behaviour that threads do not have."""
    return on_ranks_of(fn, "gloo_ranks", world_size)


def on_worlds(fn: Callable[..., None] | None = None, *, world_size: int = WORLD_SIZE) -> Any:
    """Like `on_ranks`, but with both kinds of simulated ranks: see the fixture `worlds`."""
    return on_ranks_of(fn, "worlds", world_size)


def on_ranks_of(fn: Callable[..., None] | None, fixture: str, world_size: int = WORLD_SIZE) -> Any:
    """Decorator of a test that runs on the ranks of this fixture."""
    if fn is None:  # called with options
        return functools.partial(on_ranks_of, fixture=fixture, world_size=world_size)

    @functools.wraps(fn)
    def test(**parameters: Any) -> None:
        parameters.pop(fixture)(fn, world_size=world_size, **parameters)

    signature = inspect.signature(fn)
    world = inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY)
    vars(test)["__signature__"] = signature.replace(parameters=[*signature.parameters.values(), world])
    return test


# --- meshes of ranks -------------------------------------------------------------------------------

# Thread -> its meshes, kept because process groups are expensive to create.
_meshes: weakref.WeakKeyDictionary[threading.Thread, dict[str, Any]] = weakref.WeakKeyDictionary()


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Any:
    """Returns the mesh of the first ranks in this shape, made once per world.

    Every rank of the world must ask for the same meshes in the same order.
    """
    return mesh_in(torch.arange(int(torch.tensor(shape).prod())).reshape(shape).tolist(), names)


def mesh_in(order: list[Any], names: tuple[str, ...] | None = None) -> Any:
    """Like `mesh_of`, for the given ranks in the given order."""
    mine, key = _meshes.setdefault(threading.current_thread(), {}), f"{order} {names}"
    if key not in mine:
        mine[key] = DeviceMesh(DEVICE_TYPE, order, mesh_dim_names=names)
    return mine[key]


def forget_meshes() -> None:
    """Forgets the meshes of this thread, whose world is destroyed."""
    _meshes.pop(threading.current_thread(), None)


# --- a process of a rank ---------------------------------------------------------------------------


def serve(connection: Connection, rank: int, world_size: int, store: str, stderr_path: str) -> None:
    """Joins the world and executes calls until the pipe closes."""
    with Path(stderr_path).open("wb") as stderr:
        os.dup2(stderr.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
    faulthandler.enable()
    # The name of the machine need not resolve to an address that reaches it.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if DEVICE_TYPE == "cuda":
        torch.cuda.set_device(0)  # a mesh warns of ranks that select none
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    files = dist.FileStore(store, world_size)
    dist.init_process_group(BACKEND or "gloo", store=files, rank=rank, world_size=world_size, timeout=timeout)
    while True:
        try:
            call = pickle.loads(connection.recv_bytes())
        except EOFError:  # the session is over
            break
        faulthandler.dump_traceback_later(call[-1])  # tells where it hangs
        connection.send_bytes(_answer(*call[:-1]))
        faulthandler.cancel_dump_traceback_later()
    os._exit(0)  # peers may be gone already: no orderly farewell to wait for


def _answer(name: tuple[str, str], filters: Sequence[tuple[Any, ...]], payload: bytes) -> bytes:
    """Returns a pickled (True, result, None) or (False, text of the error, the error if it can be pickled)."""
    try:
        with warnings.catch_warnings():
            warnings.filters[:] = filters
            args, kwargs = pickle.loads(payload)
            fn = functools.reduce(getattr, name[1].split("."), importlib.import_module(name[0]))
            return pickle.dumps((True, inspect.unwrap(fn)(*args, **kwargs), None))
    except BaseException as error:
        text, carried = "".join(traceback.format_exception(error)), None
        with contextlib.suppress(Exception):
            carried = pickle.loads(pickle.dumps(error))  # some exceptions pickle and cannot be read back
        return pickle.dumps((False, text, carried))


# --- the worlds of a session -----------------------------------------------------------------------


class World:
    """`size` gloo ranks on this machine, executing one call at a time."""

    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gloo_world_")
        self._pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            mine, theirs = Pipe()
            args = (theirs, rank, size, f"{self._folder.name}/store", str(self._stderr(rank)))
            process = START.Process(target=serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def _stderr(self, rank: int) -> Path:
        return Path(self._folder.name) / f"stderr{rank}"

    def call(self, fn: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float) -> list[Any]:
        name, payload = (fn.__module__, fn.__qualname__), pickle.dumps((args, kwargs))
        message = pickle.dumps((name, list(warnings.filters), payload, timeout_s))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # dead already: reported below
                pipe.send_bytes(message)
        answers = self._collect(time.monotonic() + timeout_s)
        if len(answers) == len(self._pipes) and all(ok for ok, *_ in answers.values()):
            return [answers[rank][1] for rank in range(len(self._pipes))]
        time.sleep(0.5)  # for the stacks that ranks that hang write
        errors = {rank: error for rank, (ok, _, error) in answers.items() if not ok}
        silent = [rank for rank in range(len(self._pipes)) if rank not in answers]
        dead = [rank for rank in silent if not self.processes[rank].is_alive()]
        # A death explains its peers' errors, an error explains its peers' hanging: in this order.
        failures = {r: f"died (exit {self.processes[r].exitcode}):\n{self._tail(r)}" for r in dead}
        failures |= {r: answers[r][1] for r in errors}
        failures |= {r: f"did not answer in time:\n{self._tail(r)}" for r in silent if r not in dead}
        texts = "\n".join(f"rank {r} in {fn.__qualname__}: {text}" for r, text in failures.items())
        raise RankError(texts) from errors.get(next(iter(failures)))

    def _tail(self, rank: int) -> str:
        return self._stderr(rank).read_text(errors="replace")[-STDERR_TAIL:].rstrip()

    def _collect(self, deadline: float) -> dict[int, tuple[bool, Any, BaseException | None]]:
        """Returns the answers by rank that arrive before the deadline, which the first failure brings forward."""
        answers: dict[int, tuple[bool, Any, BaseException | None]] = {}
        waiting = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), timeout=left):
                rank = waiting.pop(ready)
                try:
                    answers[rank] = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(1)
                if rank not in answers or not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()
        self._folder.cleanup()


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
        if world_size not in self._worlds:
            self._worlds[world_size] = World(world_size)
        try:
            return self._worlds[world_size].call(fn, args, kwargs, timeout_s)
        except RankError:
            self._worlds.pop(world_size).close()
            raise

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
