"""A machine's constants fitted to measured steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs
from scipy.optimize import OptimizeResult, least_squares

from dtbench.cost.plan.ground import error_of, ground_of, kind_of
from dtbench.cost.plan.machines import Fitted, Machine, NodeLinks
from dtbench.cost.plan.memory import memory_of
from dtbench.cost.plan.step import predict_step
from dtbench.cost.plan.tables import Measured
from dtbench.cost.plan.validate import halves, predict_rows, residuals, steps_file
from dtbench.records.plan import StepsFile
from dtbench.suite.errors import UsageError

# Steps off by more than this count less and less: a measured table holds runs that went wrong.
USUAL_ERROR = 0.05
# By how much, as a logarithm, a constant may differ between machines (a factor of 1.6) before it counts like a step
# that is off by `USUAL_ERROR`: few rows move those constants only that they say something about.
USUAL_CHANGE = 0.5
# What differs between programs and fabrics by orders of magnitude.
CHANGES = {
    "wait_us": 4.0,
    "latency_us": 1.5,
    "step_us": 1.5,
    "layer_us": 1.5,
    "host_us": 1.0,
}
# A share starts so far below 1, as a logarithm: at its bound a constant does not move.
OFF_THE_BOUND = 0.2
# Constants that may be next to nothing start where they are felt.
AT_LEAST = {"wait_us": 500.0}
# No constant moves further, as a logarithm (a factor of 400).
FAR = 6.0
# Differences are relative to the variable: it is the logarithm's change and this.
_OFFSET = 10.0
MIN_ROWS = 8
# Every row counts at first, so that where the search starts does not say which rows went wrong.
COARSE = (20.0, 6.0, 2.0, 1.0)
MEMORY_FACTORS = tuple(np.linspace(0.8, 2.6, 10).round(1).tolist())
# What a program does, yes or no, is tried on at most so many rows.
TRIED_ON = 200
_OF_MEMORY = ("gradient_bytes", "activations")
_NUMBERS = tuple(
    name for name in Fitted.__struct_fields__ if name not in (*_OF_MEMORY, "stages_by_cost", "overlaps")
)
_NETWORK = ("GBps", "latency_us", "shared")
# At most: shares are, and FP8 has twice the peak of bfloat16, of which it may reach a larger share.
_AT_MOST = {"matmul": 1.0, "memory": 1.0, "shared": 1.0, "grouped": 1.0, "fp8": 2.5}


@dataclass(frozen=True)
class Fit:
    """machine: with constants from all rows. held_out: one half predicted by constants from the other."""

    machine: Machine
    held_out: StepsFile


def fit_machine(measured: Sequence[Measured], start: Machine, source: str) -> Fit:
    """Fits the constants of `Fitted`, and the network's where a row has several nodes, by least squares of the times'
    logarithms; `start` says where they lie that the rows say nothing about. Each half of the layouts is predicted by
    constants fitted to the other; what these are off by is the machine's interval.

    Raises:
        UsageError: fewer than `MIN_ROWS` rows.
    """
    if len(measured) < MIN_ROWS:
        raise UsageError(f"{len(measured)} measured steps are too few to fit and to check: give {MIN_ROWS}")
    start = structs.replace(start, fsdp="")
    start = _habits(measured, _remembered(measured, start))
    parts = halves(measured)
    fits = [_fitted(half, start) for half in parts]
    others = parts[::-1]  # of each half the one that is predicted by its constants
    kinds = [[kind_of(one.job, one.layout, start) for one in other] for other in others]
    ratios = [
        list(residuals(predict_rows(other, half, NodeLinks(half))))
        for half, other in zip(fits, others, strict=True)
    ]
    ground = ground_of(one.job for one in measured)
    # Their interval is that of the half which they were fitted to.
    first = structs.replace(fits[0], error=error_of(kinds[1], ratios[1]), ground=ground)
    held_out = steps_file(
        f"{len(others[0])} steps predicted by constants fitted to {len(parts[0])} others",
        predict_rows(others[0], first, NodeLinks(first)),
    )
    whole = _fitted(measured, start)
    error = error_of([*kinds[0], *kinds[1]], [*ratios[0], *ratios[1]])
    return Fit(structs.replace(whole, fitted_on=source, error=error, ground=ground), held_out)


def _habits(measured: Sequence[Measured], start: Machine) -> Machine:
    """What the program does that a table has no column for: of each way the one whose constants fit best."""
    pipelines = [one for one in measured if one.layout.pp > 1]
    if len(pipelines) < TRIED_ON // 4:
        return start
    order = np.random.default_rng(0).permutation(len(pipelines))[:TRIED_ON]
    few = [pipelines[at] for at in order]
    ways = [
        structs.replace(start, fitted=structs.replace(start.fitted, stages_by_cost=by_cost))
        for by_cost in (False, True)
    ]
    return min(ways, key=lambda way: _found(few, way)[1].cost)


def _remembered(measured: Sequence[Measured], start: Machine) -> Machine:
    """The constants of memory, where rows say how much they took."""
    known = [one for one in measured if one.memory]
    if len(known) < MIN_ROWS:
        return start

    def off(fitted: Fitted) -> float:
        return float(
            np.mean([abs(np.log(memory_of(one.job, one.layout, fitted).total / one.memory)) for one in known])
        )

    ways = [
        structs.replace(start.fitted, gradient_bytes=bytes_, activations=factor)
        for bytes_ in (2, 4)
        for factor in MEMORY_FACTORS
    ]
    return structs.replace(start, fitted=min(ways, key=off))


def _fitted(measured: Sequence[Measured], start: Machine) -> Machine:
    return _found(measured, start)[0]


def _found(measured: Sequence[Measured], start: Machine) -> tuple[Machine, OptimizeResult]:
    several_nodes = any(one.job.gpus > start.gpus_per_node for one in measured)
    of_network = _NETWORK if several_nodes else ()
    names = (*_NUMBERS, *of_network)
    times = np.log([one.time_s for one in measured])
    weights = _weights(measured)

    def machine_of(moved: np.ndarray) -> Machine:
        values = dict(zip(names, map(_round, np.exp(moved - _OFFSET + known)), strict=True))
        network = {name: values.pop(name) for name in of_network}
        return structs.replace(
            start,
            fitted=structs.replace(start.fitted, **values),
            network=structs.replace(start.network, **network),
        )

    def off(moved: np.ndarray) -> np.ndarray:
        machine = machine_of(moved)
        links = NodeLinks(machine)
        errors = (
            np.log([predict_step(one.job, one.layout, machine, links).total_s for one in measured]) - times
        )
        return np.concatenate([errors * weights, (moved - _OFFSET) * USUAL_ERROR / changes])

    values = {**structs.asdict(start.fitted), **structs.asdict(start.network)}
    known = np.log([max(values[name], AT_LEAST.get(name, 0.0)) for name in names])
    changes = np.array([CHANGES.get(name, USUAL_CHANGE) for name in names])
    upper = _OFFSET - known + np.log([_AT_MOST.get(name, np.inf) for name in names])
    at = np.minimum(_OFFSET, upper - OFF_THE_BOUND)
    for coarse in COARSE:
        found = least_squares(
            off,
            np.clip(at, _OFFSET - FAR + 1e-6, np.minimum(upper, _OFFSET + FAR) - 1e-6),
            bounds=(_OFFSET - FAR, np.minimum(upper, _OFFSET + FAR)),
            loss="cauchy",
            f_scale=coarse * USUAL_ERROR,
            diff_step=[1e-4] * len(upper),
            ftol=1e-6 if coarse == COARSE[-1] else 1e-3,
            xtol=1e-6 if coarse == COARSE[-1] else 1e-3,
        )
        at = found.x
    return machine_of(at), found


def _weights(measured: Sequence[Measured]) -> np.ndarray:
    """Rows of a number of GPUs together count as the root of how many they are: a table holds hundreds of small runs
    for a few large ones."""
    rows = Counter(one.job.gpus for one in measured)
    weights = np.array([rows[one.job.gpus] ** -0.25 for one in measured])
    return np.asarray(weights / np.sqrt(np.mean(weights**2)))


def _round(value: float) -> float:
    return float(f"{value:.6g}")
