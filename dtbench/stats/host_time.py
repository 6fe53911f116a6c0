"""Computes answers about host time from the results of a run: misses of the sharding cache, and leaks.

**Second calls.** Each library counts the sharding decisions that it makes. Times cannot decide whether an op misses the
cache: after a first call of milliseconds the CPU's caches are cold. So the second call of an op that hits the cache
takes 1.2 to 8 times as long as a cached call.

**Repeated steps.** The dispatch suite counts objects and memory after a warm-up, and after each of `INTERVALS`
intervals of equal length. A leak grows in every interval. A cache that fills stops growing, and garbage that is
collected later shrinks again. The first interval is ignored, since caches may still fill.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean

from msgspec.structs import replace

from dtbench.grouping import group_by
from dtbench.records.host_time import SecondCall, StepGrowth
from dtbench.records.result import Result

DECISIONS = "decisions"  # counter of second calls
INTERVALS = 4
# Counters of repeated steps. The number of an interval, from 1, or the name of a type follows the prefixes.
STEPS, LATE_OVER_EARLY = "steps", "late_over_early"
OBJECTS, BYTES, KEPT = "objects_per_step_", "bytes_per_step_", "kept_per_step:"
# Growth per step that is a leak. Flat steps keep 0.1 objects and less per step, and resident memory changes by pages of
# 4 KiB, of which an interval of 50 steps gains or loses up to 20.
LEAST_OBJECTS, LEAST_BYTES = 0.5, 4096.0
MAX_TYPES = 5  # types that are named


def second_calls(results: Iterable[Result]) -> list[SecondCall]:
    """Returns the second calls whose decisions were counted, of several launches the one with the most decisions."""
    dispatched = [
        r for r in results if r.suite == "dispatch" and r.status == "ok" and r.estimate_s is not None
    ]
    times_s = {r.key: r.estimate_s or 0.0 for r in dispatched}
    counted = [r for r in dispatched if r.params.get("call") == "second" and DECISIONS in r.counters]
    launches = group_by(counted, lambda r: r.case_key).values()
    return [
        SecondCall(
            r.name,
            r.impl,
            str(r.params.get("placements", "")),
            str(r.params.get("pass", "")),
            r.counters[DECISIONS],
            times_s[r.key],
            *(times_s.get(replace(r, params={**r.params, "call": call}).key) for call in ("first", "cached")),
        )
        for r in (max(of_case, key=lambda r: r.counters[DECISIONS]) for of_case in launches)
    ]


def grows(per_step: Sequence[float], least: float = LEAST_OBJECTS) -> bool:
    """Whether each interval but the first keeps at least `least` per step."""
    return len(per_step) == INTERVALS and min(per_step[1:]) >= least


def step_growths(results: Iterable[Result]) -> list[StepGrowth]:
    """Returns the growth of each implementation whose objects were counted, each launch for itself."""
    return [_growth(r) for r in results if r.status == "ok" and f"{OBJECTS}{INTERVALS}" in r.counters]


def _growth(result: Result) -> StepGrowth:
    counters = result.counters
    objects, bytes_kept = (
        [float(counters.get(f"{prefix}{i + 1}", 0.0)) for i in range(INTERVALS)]
        for prefix in (OBJECTS, BYTES)
    )
    kept = sorted(((-rate, name) for name, rate in counters.items() if name.startswith(KEPT)))[:MAX_TYPES]
    types = {name.removeprefix(KEPT): -rate for rate, name in kept}
    verdict = "leak of memory outside Python's objects" if grows(bytes_kept, LEAST_BYTES) else "flat"
    if grows(objects):
        names = ", ".join(f"{rate:.3g} {name}" for name, rate in types.items())
        verdict = f"leak of {names or 'objects of several types'} per step"
    return StepGrowth(
        result.name,
        result.impl,
        int(counters.get(STEPS, 0)),
        fmean(objects[1:]),
        fmean(bytes_kept[1:]) if f"{BYTES}{INTERVALS}" in counters else None,
        counters.get(LATE_OVER_EARLY),
        types,
        verdict,
    )
