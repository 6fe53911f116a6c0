"""What one call does, counted: Python calls, allocations, collectives and their bytes. Runs in the arm.

Counters come from calls of their own, which nobody times. A counter that differs between the
repeats of one process is no counter and is left out.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dtbench.model import Workload

REPEATS = 3


def count_calls(workload: Workload, warmup_calls: int) -> dict[str, float]:
    """The counters of one warm call, those of the workload itself included."""
    for _ in range(warmup_calls):
        _ready(workload)
        workload.run()
    counted: dict[str, float] = {}
    for count in (_python_calls, _collectives, _allocations):
        counted |= _agreed([count(workload) for _ in range(REPEATS)])
    if workload.counters is not None:
        counted |= _agreed([dict(workload.counters()) for _ in range(2)])
    return counted


def _ready(workload: Workload) -> None:
    if workload.before is not None:
        workload.before()


def _agreed(repeats: list[Mapping[str, float]]) -> dict[str, float]:
    first = repeats[0]
    return {name: float(value) for name, value in first.items() if all(r.get(name) == value for r in repeats)}


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """A collection in the middle would run finalizers of others."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _python_calls(workload: Workload) -> dict[str, float]:
    """Functions of Python entered by this thread, the workload's own included."""
    calls = 0

    def seen(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        if event == "call":
            calls += 1

    _ready(workload)
    with _no_collection():
        before = sys.getprofile()
        sys.setprofile(seen)
        try:
            workload.run()
        finally:
            sys.setprofile(before)
    return {"python_calls": calls}


def _collectives(workload: Workload) -> dict[str, float]:
    """Collectives issued through torch's dispatcher, and the bytes of the larger side of each."""
    _ready(workload)
    with _counting_mode() as counted:
        workload.run()
    return counted


def _counting_mode() -> contextlib.AbstractContextManager[dict[str, float]]:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    counted: dict[str, float] = {"collectives": 0.0, "collective_bytes": 0.0}

    def bytes_of(values: object) -> int:
        leaves = [v for v in tree_leaves(values) if isinstance(v, torch.Tensor)]
        return sum(v.numel() * v.element_size() for v in leaves)

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch leaves it so
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if func.namespace in _NAMESPACES and "wait" not in func.__name__:
                counted["collectives"] += 1
                largest = max((bytes_of(value) for value in (*args, out)), default=0)
                counted["collective_bytes"] += largest
            return out

    @contextlib.contextmanager
    def counting() -> Iterator[dict[str, float]]:
        with Mode():  # type: ignore[no-untyped-call]
            yield counted

    return counting()


# Where torch's collectives live: those of process groups and the functional ones.
_NAMESPACES = frozenset({"c10d", "_c10d_functional", "c10d_functional", "_c10d_functional_autograd"})


def _allocations(workload: Workload) -> dict[str, float]:
    """Blocks and bytes taken from torch's allocator, as its profiler sees them."""
    from torch.autograd.profiler import profile

    _ready(workload)
    with _no_collection(), profile(use_kineto=True, profile_memory=True) as seen:
        kept = workload.run()
    del kept
    events = seen.kineto_results.events()
    taken = [e.nbytes() for e in events if e.name() == "[memory]" and e.nbytes() > 0]
    return {"allocations": float(len(taken)), "allocated_bytes": float(sum(taken))}
