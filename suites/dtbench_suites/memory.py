"""Counts the memory and the Python objects that calls keep."""

import ctypes
import gc
import itertools
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

from dtbench.stats.step_growth import BYTES, INTERVALS, KEPT, LATE_OVER_EARLY, OBJECTS, STEPS, grows

# Steps before the first count, in which caches and optimizer states are created.
WARMUP_STEPS = 20
# Steps at the beginning and at the end whose times are compared.
TIMED_STEPS = 20


def memory_per_call(make: Callable[[], object], count: int, name: str) -> dict[str, float]:
    """Returns the growth of resident memory per call of `make` as {name: bytes}, while all results are kept alive.

    Free memory within the process would hide the growth. So `count` calls first use up that of Python's allocator, and
    malloc_trim(3) returns that of glibc to the system. Returns nothing on systems other than Linux with glibc.
    """
    if not can_trim():
        return {}
    results = [make() for _ in range(count)]
    bytes_before = resident_bytes()
    results += [make() for _ in range(count)]
    return {name: (resident_bytes(trims=False) - bytes_before) / count}


def can_trim() -> bool:
    """Whether the process can return free memory to the system: on Linux with glibc."""
    return sys.platform == "linux" and hasattr(ctypes.CDLL(None), "malloc_trim")


def resident_bytes(trims: bool = True) -> int:
    """Returns the resident memory of the process, after garbage collection.

    Args:
        trims: whether to return free memory of glibc to the system first.
    """
    gc.collect()
    if trims:
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()  # proc_pid_statm(5)


def growth_per_step(step: Callable[[], object], steps: int) -> dict[str, float]:
    """Returns counters of what `steps` calls of `step` keep, for `dtbench.stats.step_growth`.

    Objects are those that Python's garbage collector tracks, counted after a collection. The collector runs during the
    steps, as in a training job.

    Args:
        steps: a multiple of `INTERVALS`, at least `TIMED_STEPS`.
    """
    per_interval = steps // INTERVALS
    # Created before the first count, so that counting adds no objects.
    censuses: list[Counter[str]] = [Counter() for _ in range(INTERVALS + 1)]
    resident: list[int] = []
    times_ns: list[int] = []
    collects = gc.isenabled()
    gc.enable()
    try:
        for _ in range(WARMUP_STEPS):
            step()
        for number, census in enumerate(censuses):
            for _ in range(per_interval if number else 0):
                started_ns = time.perf_counter_ns()
                step()
                times_ns.append(time.perf_counter_ns() - started_ns)
            resident.append(resident_bytes() if can_trim() else 0)
            gc.collect()
            census.update(map(_type_name, gc.get_objects()))
    finally:
        if not collects:
            gc.disable()
    pairs = list(itertools.pairwise(censuses))
    kept = {
        name: [(late[name] - early[name]) / per_interval for early, late in pairs] for name in censuses[-1]
    }
    objects = [(late.total() - early.total()) / per_interval for early, late in pairs]
    bytes_kept = [(late - early) / per_interval for early, late in itertools.pairwise(resident)]
    return {
        STEPS: per_interval * INTERVALS,
        LATE_OVER_EARLY: median(times_ns[-TIMED_STEPS:]) / median(times_ns[:TIMED_STEPS]),
        **{f"{OBJECTS}{number}": growth for number, growth in enumerate(objects, 1)},
        **({f"{BYTES}{number}": growth for number, growth in enumerate(bytes_kept, 1)} if can_trim() else {}),
        **{f"{KEPT}{name}": fmean(rates[1:]) for name, rates in kept.items() if grows(rates)},
    }


def _type_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
