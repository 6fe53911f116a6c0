"""State shared by the whole core: values per rank, caches that are cleared together, and whether ranks are simulated.

Each subpackage stores its own state. State of one rank is in a `PerRank`. A simulated rank runs inside
`using_values(...)` on its own thread, so other threads have other values. Caches are shared by all ranks of the
process. Their keys contain specs, which differ between ranks. Subpackages register here how to clear their caches.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

# Maximum number of entries of a cache. A plan takes about 1 KB, so a program that never repeats a shape needs at most
# some megabytes.
MAX_PLANS = 8192


# ---- per rank ----


class PerRank(Generic[T]):
    """A value that each rank has separately. Threads without a simulated rank share the value of the process.

    Args:
        name: name for debuggers.
        make: returns a new initial value.
    """

    def __init__(self, name: str, make: Callable[[], T]) -> None:
        self.make = make
        self._variable: ContextVar[T] = ContextVar(f"dtbench_core.{name}", default=make())  # noqa: B039 - the process'
        # Bound methods, because a wrapper function would double the cost.
        self.get = self._variable.get
        self.set = self._variable.set
        _all.append(self)


_all: list[PerRank[Any]] = []


@contextmanager
def using_values(*values: tuple[PerRank[Any], Any]) -> Iterator[None]:
    """Sets the values of the running rank inside the block, given as pairs (variable, value)."""
    outer = [(variable, variable.get()) for variable, _ in values]
    for variable, value in values:
        variable.set(value)
    try:
        yield
    finally:
        for variable, value in outer:
            variable.set(value)


def initial_values(inherited: Iterable[PerRank[Any]] = ()) -> list[tuple[PerRank[Any], Any]]:
    """Returns pairs (variable, value) for a new rank: initial values, or the caller's for `inherited` variables."""
    inherited = set(inherited)
    return [(variable, variable.get() if variable in inherited else variable.make()) for variable in _all]


# ---- whether ranks are simulated ----


class Simulation:
    """Whether ranks are simulated.

    Attributes:
        active: whether a LocalTensorMode is on. Only one can be on, because one program runs for all ranks.
    """

    active = False


simulation = Simulation()


# ---- caches ----


_clearing: list[tuple[Callable[[], object], bool]] = []  # (function that clears a cache, with_rules)


def cache_put(cache: dict[K, T], key: K, value: T) -> None:
    """Inserts an entry; a full cache drops its oldest entries first."""
    while len(cache) >= MAX_PLANS:
        del cache[next(iter(cache))]
    cache[key] = value


def on_clear(clear: Callable[[], object], *, with_rules: bool = False) -> None:
    """Registers a function that clears a cache.

    Args:
        with_rules: whether only a change of rules calls it, and `clear_caches` does not.
    """
    _clearing.append((clear, with_rules))


def clear_caches() -> None:
    """Clears all plans of ops and all routes of redistributions."""
    for clear, with_rules in _clearing:
        if not with_rules:
            clear()


def rules_changed() -> None:
    """Clears all caches after an op got another rule, including those of properties of ops and of their callers."""
    for clear, _ in _clearing:
        clear()
