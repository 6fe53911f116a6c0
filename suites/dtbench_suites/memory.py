"""Counts the memory and the Python objects that calls keep."""

import ctypes
import gc
import itertools
import resource
import sys
import timeit
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

from dtbench.stats.host_time import BYTES, INTERVALS, KEPT, LATE_OVER_EARLY, OBJECTS, STEPS, grows

# Steps before the first count, in which caches and optimizer states are created, and steps at the beginning and at the
# end whose times are compared.
WARMUP_STEPS, TIMED_STEPS = 20, 20


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
    """Returns counters of what `steps` calls of `step` keep, for `dtbench.stats.host_time`.

    Objects are those that Python's garbage collector tracks, counted after a collection. The collector runs during the
    steps, as in a training job.

    Args:
        steps: a multiple of `INTERVALS`, at least `TIMED_STEPS`.
    """
    per_interval, collects = steps // INTERVALS, gc.isenabled()
    # Created before the first count, so that counting adds no objects.
    censuses: list[Counter[str]] = [Counter() for _ in range(INTERVALS + 1)]
    resident: list[int] = []
    # timeit disables the collector; its setup enables it again.
    times_s = timeit.repeat(step, gc.enable, repeat=WARMUP_STEPS, number=1)
    times_s.clear()
    gc.collect()
    gc.freeze()  # counting the objects so far would take longer than the steps
    for number, census in enumerate(censuses):
        times_s += timeit.repeat(step, gc.enable, repeat=per_interval if number else 0, number=1)
        resident.append(resident_bytes() if can_trim() else 0)
        gc.collect()
        census.update(map(_type_name, gc.get_objects()))
    (gc.enable if collects else gc.disable)()
    objects, bytes_kept = (
        [(late - early) / per_interval for early, late in itertools.pairwise(counts)]
        for counts in ([census.total() for census in censuses], resident)
    )
    kept_by_type = {
        name: [(late[name] - early[name]) / per_interval for early, late in itertools.pairwise(censuses)]
        for name in censuses[-1]
    }
    return {
        STEPS: per_interval * INTERVALS,
        LATE_OVER_EARLY: median(times_s[-TIMED_STEPS:]) / median(times_s[:TIMED_STEPS]),
        **{f"{OBJECTS}{number}": growth for number, growth in enumerate(objects, 1)},
        **({f"{BYTES}{number}": growth for number, growth in enumerate(bytes_kept, 1)} if can_trim() else {}),
        **{f"{KEPT}{name}": fmean(rates[1:]) for name, rates in kept_by_type.items() if grows(rates)},
    }


def _type_name(value: object) -> str:
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")
