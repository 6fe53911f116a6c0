"""Joining a world: after a few seconds it is said who is waited for, and at the limit the wait ends with one line."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from dtbench.engine.place import Place
from dtbench.suite.errors import UsageError, complain

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

JOIN_TIMEOUT = "DTBENCH_JOIN_TIMEOUT"  # seconds
# Thousands of ranks that load torch from one file system need minutes.
_JOIN_TIMEOUT_S = 300.0
_SAYS_AFTER_S = 5.0
# Our own launcher ends a start of which a rank has ended: nobody is missing, they are slow.
_SAYS_AFTER_S_HERE = 60.0
_TRIES_EVERY_S = 0.2
_MOST_NAMED = 8


def join_timeout_s() -> float:
    """How long a rank waits for its world.

    Raises:
        UsageError: the environment has no number of seconds.
    """
    text = os.environ.get(JOIN_TIMEOUT, "")
    with suppress(ValueError):
        if 0 < (seconds := float(text or _JOIN_TIMEOUT_S)) < 1e6:
            return seconds
    raise UsageError(f"the environment has {JOIN_TIMEOUT}={text[:40]!r}: expected seconds above 0")


class Joining:
    """Entered while a rank waits for the others; see the module.

    connect: see `store_of`. ours: whether our own launcher started the ranks. give_up: ends this process, with a
    sentence and whether it is this rank that says it.
    """

    def __init__(
        self,
        place: Place,
        connect: Callable[[bool], Store],
        ours: bool,
        give_up: Callable[[str, bool], NoReturn],
    ) -> None:
        self._place = place
        self._connect = connect
        self._give_up = give_up
        self._patience_s = _SAYS_AFTER_S_HERE if ours else _SAYS_AFTER_S
        self._limit_s = join_timeout_s()
        self._has_store = False
        self._mark = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._is_first = False
        self._done = threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="joining", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._mark.close()

    def store(self, until_s: float = math.inf) -> Store:
        """The ranks' store, once it is there. until_s: on the monotonic clock.

        Raises:
            RuntimeError: it cannot be served here, what answers is another program, or nobody does until then.
        """
        while why := self._unreachable():
            if time.monotonic() > until_s:
                raise RuntimeError(why)
            time.sleep(_TRIES_EVERY_S)
        store = self._connect(True)
        store.set(f"hello/{self._place.rank}", "")
        self._has_store = True
        return store

    def _unreachable(self) -> str:
        """Why nobody is there to connect to; "" where somebody is."""
        place = self._place
        try:
            if place.serves:
                socket.getaddrinfo(place.address, place.port)
            else:
                socket.create_connection((place.address, place.port), timeout=5.0).close()
        except OSError as error:
            return (error.strerror or str(error)).lower()
        except UnicodeError:
            return "no name of a host"
        return ""

    def _watch(self) -> None:
        if self._done.wait(self._patience_s):
            return
        whom, speaks = self._waits_for()
        left_s = max(self._limit_s - self._patience_s, 0.0)
        if whom and speaks:
            complain(f"rank {self._place.rank} waits for {whom}; up to {left_s:.0f} s more ({JOIN_TIMEOUT})")
        if not self._done.wait(left_s):
            whom, speaks = self._waits_for()
            self._give_up(
                f"rank {self._place.rank} waited {self._limit_s:g} s for {whom or 'answers of ranks that had come'}",
                speaks,
            )

    def _waits_for(self) -> tuple[str, bool]:
        """Whom, "" where nobody is missing; and whether this is the rank that says so."""
        place = self._place
        if not self._has_store:
            why = self._unreachable() or "nothing answers as a store"
            return f"the store of the ranks at {place.address}:{place.port} ({why})", self._is_first_here()
        with suppress(RuntimeError):
            store = self._connect(False)  # the main thread's is busy
            missing = [rank for rank in range(place.world_size) if not store.check([f"hello/{rank}"])]
            named = ", ".join(f"rank {rank}" for rank in missing[:_MOST_NAMED])
            more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
            lowest = next(rank for rank in range(place.world_size) if rank not in missing)
            return (f"{named}{more} of {place.world_size}" if missing else ""), place.rank == lowest
        return "the store of the ranks, which has gone", self._is_first_here()

    def _is_first_here(self) -> bool:
        """Whether no other rank of this host has asked, which all may where none can reach the others."""
        with suppress(OSError):
            self._mark.bind(
                f"\0dtbench-joins-{self._place.address}:{self._place.port}"
            )  # Linux's abstract names
            self._is_first = True
        return self._is_first
