"""A machine's constants fitted to measured steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import structs
from scipy.optimize import least_squares

from dtbench.cost.plan.ground import error_of, ground_of, kind_of
from dtbench.cost.plan.links import NodeLinks
from dtbench.cost.plan.machines import FittedConstants, MachineSpec
from dtbench.cost.plan.measured_steps import MeasuredStep, MeasuredSteps
from dtbench.cost.plan.memory import memory_of
from dtbench.cost.plan.step import predict_step
from dtbench.cost.plan.validate import StepsFile, halves, predict_rows, steps_file
from dtbench.errors import UsageError

# Steps off by more than this count less and less: a measured table holds runs that went wrong.
USUAL_ERROR = 0.05
# By how much, as a logarithm, a constant may differ between machines (a factor of 1.6) before it counts like a step
# that is off by `USUAL_ERROR`: few rows move those constants only that they say something about.
USUAL_CHANGE = 0.5
# What differs between programs and fabrics by orders of magnitude.
CHANGES = {"wait_us": 4.0, "latency_us": 1.5, "step_us": 1.5, "layer_us": 1.5, "host_us": 1.0}
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
_TRIED = ("gradient_bytes", "activations", "stages_by_cost", "overlaps")
_NUMBERS = tuple(name for name in FittedConstants.__struct_fields__ if name not in _TRIED)
_NETWORK = ("GBps", "latency_us", "shared")
# At most: shares are, and FP8 has twice the peak of bfloat16, of which it may reach a larger share.
_AT_MOST = {"matmul": 1.0, "memory": 1.0, "shared": 1.0, "grouped": 1.0, "fp8": 2.5}


def fit_machine(measured: MeasuredSteps, start: MachineSpec, source: str) -> tuple[MachineSpec, StepsFile]:
    """Fits the constants of `FittedConstants`, and the network's where a row has several nodes, by least squares of
    the times' logarithms; `start` says where they lie that the rows say nothing about. Each half of the layouts is
    predicted by constants fitted to the other; what these are off by is the machine's interval, and the first half's
    predictions are returned, too.

    Raises:
        UsageError: fewer than `MIN_ROWS` rows.
    """
    steps = measured.steps
    if len(steps) < MIN_ROWS:
        raise UsageError(f"{len(steps)} measured steps are too few to fit and to check: give {MIN_ROWS}")
    start = structs.replace(start, fsdp="")
    start = _with_stages(steps, _with_memory_constants(steps, start))
    parts = halves(steps)
    fits = [_fitted(half, start)[0] for half in parts]
    others = parts[::-1]  # of each half the one that is predicted by its constants
    kinds = [[kind_of(step.job, step.layout, start) for step in other] for other in others]
    ratios = [
        [row.measured_s / row.predicted_s for row in predict_rows(other, fit, NodeLinks(fit))]
        for fit, other in zip(fits, others, strict=True)
    ]
    ground = ground_of(step.job for step in steps)
    # Their interval is that of the half which they were fitted to.
    first = structs.replace(fits[0], error=error_of(kinds[1], ratios[1]), ground=ground)
    held_out = steps_file(
        f"{len(others[0])} steps predicted by constants fitted to {len(parts[0])} others",
        predict_rows(others[0], first, NodeLinks(first)),
        measured.notes,
        measured.left_out,
    )
    whole, _ = _fitted(steps, start)
    return structs.replace(
        whole,
        fitted_on=source,
        error=error_of([*kinds[0], *kinds[1]], [*ratios[0], *ratios[1]]),
        ground=ground,
    ), held_out


def _with_stages(steps: Sequence[MeasuredStep], start: MachineSpec) -> MachineSpec:
    """How the program cuts its stages, for which a table has no column: the way whose constants fit best."""
    pipelines = [step for step in steps if step.layout.pp > 1]
    if len(pipelines) < TRIED_ON // 4:
        return start
    sample = [pipelines[at] for at in np.random.default_rng(0).permutation(len(pipelines))[:TRIED_ON]]
    ways = [
        structs.replace(start, fitted=structs.replace(start.fitted, stages_by_cost=by_cost))
        for by_cost in (False, True)
    ]
    return min(ways, key=lambda way: _fitted(sample, way)[1])


def _with_memory_constants(steps: Sequence[MeasuredStep], start: MachineSpec) -> MachineSpec:
    """The constants of memory, where rows say how much they took."""
    with_memory = [step for step in steps if step.memory]
    if len(with_memory) < MIN_ROWS:
        return start

    def off(fitted: FittedConstants) -> float:
        ratios = [memory_of(step.job, step.layout, fitted).total / step.memory for step in with_memory]
        return float(np.mean(np.abs(np.log(ratios))))

    ways = [
        structs.replace(start.fitted, gradient_bytes=bytes_, activations=factor)
        for bytes_ in (2, 4)
        for factor in MEMORY_FACTORS
    ]
    return structs.replace(start, fitted=min(ways, key=off))


def _fitted(steps: Sequence[MeasuredStep], start: MachineSpec) -> tuple[MachineSpec, float]:
    """The machine with fitted constants, and what is left of the errors."""
    of_network = _NETWORK if any(step.job.gpus > start.gpus_per_node for step in steps) else ()
    names = (*_NUMBERS, *of_network)
    times = np.log([step.time_s for step in steps])
    weights = _weights(steps)

    def machine_of(moved: np.ndarray) -> MachineSpec:
        rounded = (float(f"{value:.6g}") for value in np.exp(moved - _OFFSET + begin))
        values = dict(zip(names, rounded, strict=True))
        network = {name: values.pop(name) for name in of_network}
        return structs.replace(
            start,
            fitted=structs.replace(start.fitted, **values),
            network=structs.replace(start.network, **network),
        )

    def off(moved: np.ndarray) -> np.ndarray:
        machine = machine_of(moved)
        links = NodeLinks(machine)
        predicted = [predict_step(step.job, step.layout, machine, links).total_s for step in steps]
        errors = np.log(predicted) - times
        return np.concatenate([errors * weights, (moved - _OFFSET) * USUAL_ERROR / changes])

    values = {**structs.asdict(start.fitted), **structs.asdict(start.network)}
    begin = np.log([max(values[name], AT_LEAST.get(name, 0.0)) for name in names])
    changes = np.array([CHANGES.get(name, USUAL_CHANGE) for name in names])
    upper = _OFFSET - begin + np.log([_AT_MOST.get(name, np.inf) for name in names])
    lowest, highest = _OFFSET - FAR, np.minimum(upper, _OFFSET + FAR)
    at = np.minimum(_OFFSET, upper - OFF_THE_BOUND)
    for coarse in COARSE:
        tolerance = 1e-6 if coarse == COARSE[-1] else 1e-3
        result = least_squares(
            off,
            np.clip(at, lowest + 1e-6, highest - 1e-6),
            bounds=(lowest, highest),
            loss="cauchy",
            f_scale=coarse * USUAL_ERROR,
            diff_step=[1e-4] * len(upper),
            ftol=tolerance,
            xtol=tolerance,
        )
        at = result.x
    return machine_of(at), float(result.cost)


def _weights(steps: Sequence[MeasuredStep]) -> np.ndarray:
    """Rows of a number of GPUs together count as the root of how many they are: a table holds hundreds of small runs
    for a few large ones."""
    rows = Counter(step.job.gpus for step in steps)
    weights = np.array([rows[step.job.gpus] ** -0.25 for step in steps])
    return np.asarray(weights / np.sqrt(np.mean(weights**2)))
