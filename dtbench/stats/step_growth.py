"""Decides whether repeated steps leak: keep objects or memory in every step.

The dispatch suite counts after a warm-up and after each of `INTERVALS` intervals of equal length. A leak grows in every
interval. A cache that fills stops growing, and garbage that is collected later shrinks again. The first interval is
ignored, since caches may still fill.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean, median

from dtbench.grouping import group_by
from dtbench.records.host_time import KeptType, StepGrowth
from dtbench.records.result import Result

INTERVALS = 4
# Counters of a result. The number of an interval, from 1, or the name of a type follows the prefixes.
STEPS, LATE_OVER_EARLY = "steps", "late_over_early"
OBJECTS, BYTES, KEPT = "objects_per_step_", "bytes_per_step_", "kept_per_step:"
# Growth per step that is a leak. Flat steps keep 0.1 objects and less per step, and resident memory changes by pages of
# 4 KiB, of which an interval of 50 steps gains or loses up to 20.
LEAST_OBJECTS, LEAST_BYTES = 0.5, 4096.0
MAX_TYPES = 5  # types that are named


def grows(per_step: Sequence[float], least: float = LEAST_OBJECTS) -> bool:
    """Whether each interval but the first keeps at least `least` per step."""
    return min(per_step[1:]) >= least


def step_growths(results: Iterable[Result]) -> list[StepGrowth]:
    """Returns the growth of each implementation whose objects were counted, in the order of the results.

    Launches are merged by the median of each figure.
    """
    counted = [r for r in results if r.status == "ok" and f"{OBJECTS}{INTERVALS}" in r.counters]
    growths = []
    for (_, name, impl, _), launches in group_by(counted, lambda r: r.case_key).items():

        def figure(counter: str, launches: Sequence[Result] = launches) -> float | None:
            values = [float(value) for r in launches if (value := r.counters.get(counter)) is not None]
            return median(values) if values else None

        objects, bytes_kept = (
            [figure(f"{prefix}{number}") for number in range(1, INTERVALS + 1)] for prefix in (OBJECTS, BYTES)
        )
        complete = [value for value in objects if value is not None]
        complete_bytes = [value for value in bytes_kept if value is not None]
        if len(complete) < INTERVALS:
            continue
        has_bytes = len(complete_bytes) == INTERVALS
        types = {counter for r in launches for counter in r.counters if counter.startswith(KEPT)}
        kept = [KeptType(counter.removeprefix(KEPT), figure(counter) or 0.0) for counter in sorted(types)]
        growths.append(
            StepGrowth(
                name,
                impl,
                int(figure(STEPS) or 0),
                fmean(complete[1:]),
                fmean(complete_bytes[1:]) if has_bytes else None,
                figure(LATE_OVER_EARLY),
                keeps_objects=grows(complete),
                keeps_bytes=has_bytes and grows(complete_bytes, LEAST_BYTES),
                types=tuple(sorted(kept, key=lambda kept: -kept.per_step)[:MAX_TYPES]),
            )
        )
    return growths
