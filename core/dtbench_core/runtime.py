"""What the whole core shares: state per rank, caches that are cleared together, and whether ranks are simulated.

Each room keeps its own state. What a rank has for itself is in a `PerRank`: a simulated rank runs inside
`entered(...)`, on its thread, where no other thread sees it. What the process learns once, for all ranks, is in caches
of the rooms: the specs in their keys tell ranks apart. A room says here how to clear its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

# A plan is about 1 KB; the bound keeps a program that never repeats a shape at some megabytes.
MAX_PLANS = 8192


# ---- per rank ----


class PerRank(Generic[T]):
    """A value that every rank has for itself; that of the process, on threads that simulate nothing.

    name: for debuggers. make: a fresh value.
    """

    def __init__(self, name: str, make: Callable[[], T]) -> None:
        self.make = make
        self._variable: ContextVar[T] = ContextVar(f"dtbench_core.{name}", default=make())  # noqa: B039 - the process'
        # Bound to the method: a function around it would cost as much again.
        self.get = self._variable.get
        self.set = self._variable.set
        _all.append(self)


_all: list[PerRank[Any]] = []


@contextmanager
def using_values(*values: tuple[PerRank[Any], Any]) -> Iterator[None]:
    """Inside, these are the running rank's: pairs of a variable and its value."""
    outer = [(variable, variable.get()) for variable, _ in values]
    for variable, value in values:
        variable.set(value)
    try:
        yield
    finally:
        for variable, value in outer:
            variable.set(value)


def initial_values(besides: Iterable[PerRank[Any]] = ()) -> list[tuple[PerRank[Any], Any]]:
    """What a rank starts with: a fresh value of every variable, but the caller's of those `besides`."""
    kept = set(besides)
    return [(one, one.get() if one in kept else one.make()) for one in _all]


# ---- whether ranks are simulated ----


class Simulation:
    """active: whether a LocalTensorMode is on, of which there is one at a time: one program runs for all ranks."""

    active = False


simulation = Simulation()


# ---- caches ----


_clearing: list[tuple[Callable[[], object], bool]] = []  # what clears, and whether only with rules


def cache_put(cache: dict[K, T], key: K, value: T) -> None:
    """Puts it into the cache, which forgets its oldest entries at the bound."""
    while len(cache) >= MAX_PLANS:
        del cache[next(iter(cache))]
    cache[key] = value


def on_clear(clear: Callable[[], object], *, with_rules: bool = False) -> None:
    """Has `clear` called by `clear_caches`. with_rules: only once an op has got another rule."""
    _clearing.append((clear, with_rules))


def clear_caches() -> None:
    """Forgets all plans, of ops and of redistributions."""
    for clear, with_rules in _clearing:
        if not with_rules:
            clear()


def rules_changed() -> None:
    """An op got another rule: what was learnt of ops, and of functions that call them, may be wrong."""
    for clear, _ in _clearing:
        clear()
