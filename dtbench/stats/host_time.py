"""Computes answers about host time from the results of a run: cache misses, leaks, and the cost of sharded groups.

**Second calls.** Each library counts the sharding decisions that it makes. Times cannot decide whether an op misses the
cache: after a first call of milliseconds the CPU's caches are cold. So the second call of an op that hits the cache
takes 1.2 to 8 times as long as a cached call.

**Repeated steps.** The dispatch suite counts objects and memory after a warm-up, and after each of `INTERVALS`
intervals of equal length. A leak grows in every interval. A cache that fills stops growing, and garbage that is
collected later shrinks again. The first interval is ignored, since caches may still fill.

**Groups of sharded parameters.** The times of the fsdp suite are fitted by least squares on relative errors, since they
span a factor of 100 and their noise is relative. The intervals are those of Student's t with the scatter of the times
around the fit. They include the error of a model that is linear in groups and parameters.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
from msgspec.structs import replace

from dtbench.grouping import group_by
from dtbench.records.result import Result, integer_param
from dtbench.records.suite_answers import GroupCost, SecondCall, StepGrowth

INTERVALS = 4
# Counters of second calls, and of repeated steps.
DECISIONS, STEPS, LATE_OVER_EARLY = "decisions", "steps", "late_over_early"
# Prefixes of counters. The number of an interval, from 1, the name of a type or the stage of a step follows.
OBJECTS, BYTES, KEPT, STAGE = "objects_per_step_", "bytes_per_step_", "kept_per_step:", "stage_s:"
# Growth per step that is a leak. Flat steps keep 0.1 objects and less per step, and resident memory changes by pages of
# 4 KiB, of which an interval of 50 steps gains or loses up to 20.
LEAST_OBJECTS, LEAST_BYTES = 0.5, 4096.0
INTERVAL = 0.95
MAX_TYPES = 5  # types that are named


def second_calls(results: Iterable[Result]) -> list[SecondCall]:
    """Returns the second calls whose decisions were counted, of several launches the one with the most decisions."""
    dispatched = [
        r for r in results if r.suite == "dispatch" and r.status == "ok" and r.estimate_s is not None
    ]
    times_s = {r.key: r.estimate_s or 0.0 for r in dispatched}
    counted = [r for r in dispatched if r.params.get("call") == "second" and DECISIONS in r.counters]
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
        for r in (
            max(of_case, key=lambda r: r.counters[DECISIONS])
            for of_case in group_by(counted, lambda r: r.case_key).values()
        )
    ]


def grows(per_step: Sequence[float], threshold: float = LEAST_OBJECTS) -> bool:
    """Whether each interval but the first keeps at least `threshold` per step."""
    return len(per_step) == INTERVALS and min(per_step[1:]) >= threshold


def step_growths(results: Iterable[Result]) -> list[StepGrowth]:
    """Returns the growth of each implementation whose objects were counted, each launch for itself."""
    return [_growth(r) for r in results if r.status == "ok" and f"{OBJECTS}{INTERVALS}" in r.counters]


def _growth(result: Result) -> StepGrowth:
    counters = result.counters
    objects, bytes_kept = (
        [float(counters.get(f"{prefix}{i + 1}", 0.0)) for i in range(INTERVALS)]
        for prefix in (OBJECTS, BYTES)
    )
    rates = ((-rate, name.removeprefix(KEPT)) for name, rate in counters.items() if name.startswith(KEPT))
    types = {name: -rate for rate, name in sorted(rates)[:MAX_TYPES]}
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


def group_costs(results: Iterable[Result]) -> list[GroupCost]:
    """Returns the costs of a step and of its stages by kind of ranks and implementation, where the times suffice."""
    steps = [r for r in results if r.suite == "fsdp" and r.status == "ok" and r.estimate_s]
    costs = []
    for (group, impl), of_impl in group_by(steps, lambda r: (str(r.params.get("group", "")), r.impl)).items():
        stages = dict.fromkeys(name for r in of_impl for name in r.counters if name.startswith(STAGE))
        for stage in ("step", *stages):
            points = [
                (integer_param(r.params, "groups"), integer_param(r.params, "params"), time_s)
                for r in of_impl
                if (time_s := r.estimate_s if stage == "step" else r.counters.get(stage, 0.0)) and time_s > 0
            ]
            if (fit := fit_group_cost(points)) is not None:
                costs.append(GroupCost(group, impl, stage.removeprefix(STAGE), *fit))
    return costs


def fit_group_cost(points: Sequence[tuple[int, int, float]]) -> list[tuple[float, float, float]] | None:
    """Fits time = fixed + per group * groups + per parameter * groups * parameters.

    Args:
        points: (groups, parameters per group, time).

    Returns:
        Estimate, low and high of the three coefficients; None if there are too few different points for an interval.
    """
    from scipy.special import stdtrit  # importing it takes longer than a short comparison

    rows = np.array(
        [(1 / t, groups / t, groups * parameters / t) for groups, parameters, t in points]
    ).reshape(-1, 3)
    freedom = len(rows) - 3
    if freedom < 1 or np.linalg.matrix_rank(rows) < 3:
        return None
    solution = np.linalg.lstsq(rows, np.ones(len(rows)))[0]
    scatter = np.linalg.norm(rows @ solution - 1) / np.sqrt(freedom)
    half = stdtrit(freedom, (1 + INTERVAL) / 2) * scatter * np.sqrt(np.linalg.inv(rows.T @ rows).diagonal())
    return [(float(x), float(x - d), float(x + d)) for x, d in zip(solution, half, strict=True)]
