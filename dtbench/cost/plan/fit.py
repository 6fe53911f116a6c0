"""Fits a machine's constants to measured steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from msgspec import structs
from scipy.optimize import least_squares

from dtbench.cost.plan.links import NodeLinks
from dtbench.cost.plan.machines import FittedConstants, MachineSpec
from dtbench.cost.plan.measured_steps import MeasuredStep, MeasuredSteps
from dtbench.cost.plan.memory import memory_of
from dtbench.cost.plan.prediction_intervals import error_of, fitted_range_of, kind_of
from dtbench.cost.plan.step import predict_step
from dtbench.cost.plan.validate import StepsFile, halves, predict_rows, steps_file
from dtbench.errors import UsageError

# Scale of the robust loss: steps with larger errors have less weight, since tables contain runs that went wrong.
TYPICAL_ERROR = 0.05
# Typical difference of a constant between machines, on a log scale (a factor of 1.6). A change by this much costs as
# much as a step with `TYPICAL_ERROR`, so that rows move only the constants on which their times depend.
TYPICAL_CHANGE = 0.5
# Typical differences of constants that vary more between programs and networks.
TYPICAL_CHANGES = {"wait_us": 4.0, "latency_us": 1.5, "step_us": 1.5, "layer_us": 1.5, "host_us": 1.0}
# Constants start at least this far below their upper bound, on a log scale: the solver does not leave a bound.
BOUND_MARGIN = 0.2
# Minimum start of constants that may be close to 0, so that they affect the predicted times.
MIN_START = {"wait_us": 500.0}
# Maximum change of a constant, on a log scale (a factor of 400).
MAX_CHANGE = 6.0
# The solver's variables are the logarithms' changes plus this, since its step is relative to the variable.
_OFFSET = 10.0
MIN_ROWS = 8
# Factors on the scale of the loss in successive fits. In the first, all rows have a similar weight, so that the start
# does not determine which rows count as outliers.
LOSS_SCALES = (20.0, 6.0, 2.0, 1.0)
MEMORY_FACTORS = tuple(np.linspace(0.8, 2.6, 10).round(1).tolist())
# Number of rows on which discrete properties of the program are tried.
TRIAL_ROWS = 200
_DISCRETE = ("gradient_bytes", "activations", "stages_by_cost", "overlaps")
_CONTINUOUS = tuple(name for name in FittedConstants.__struct_fields__ if name not in _DISCRETE)
_NETWORK = ("GBps", "latency_us", "shared")
# Upper bounds. FP8 has twice the peak of bfloat16 and may reach a larger share of it.
_UPPER_BOUNDS = {"matmul": 1.0, "memory": 1.0, "shared": 1.0, "grouped": 1.0, "fp8": 2.5}


def fit_machine(measured: MeasuredSteps, start: MachineSpec, source: str) -> tuple[MachineSpec, StepsFile]:
    """Fits a machine's constants to the logarithms of the measured times by robust least squares.

    Each half of the layouts is predicted by constants that were fitted to the other half. The errors of these
    predictions give the machine's intervals.

    Args:
        start: machine with the initial constants. Constants that the rows do not determine stay close to them. The
            network's constants are fitted only if a row has several nodes.
        source: description of the measured steps.

    Returns:
        The machine fitted to all steps, and the predictions of the half of the steps that is listed first.

    Raises:
        UsageError: there are fewer than `MIN_ROWS` rows.
    """
    steps = measured.steps
    if len(steps) < MIN_ROWS:
        raise UsageError(f"got {len(steps)} measured steps, expected at least {MIN_ROWS} to fit and to check")
    start = structs.replace(start, fsdp="")
    start = _with_stages(steps, _with_memory_constants(steps, start))
    training_halves = halves(steps)
    fits = [_fitted(half, start)[0] for half in training_halves]
    test_halves = training_halves[::-1]
    kinds = [[kind_of(step.job, step.layout, start) for step in half] for half in test_halves]
    ratios = [
        [row.measured_s / row.predicted_s for row in predict_rows(half, fit, NodeLinks(fit))]
        for fit, half in zip(fits, test_halves, strict=True)
    ]
    fitted_range = fitted_range_of(step.job for step in steps)
    # The intervals of a half come from predictions of the half to which its constants were fitted.
    first = structs.replace(fits[0], error=error_of(kinds[1], ratios[1]), fitted_range=fitted_range)
    held_out = steps_file(
        f"{len(test_halves[0])} steps predicted by constants fitted to {len(training_halves[0])} others",
        predict_rows(test_halves[0], first, NodeLinks(first)),
        measured.notes,
        measured.left_out,
    )
    machine, _ = _fitted(steps, start)
    return structs.replace(
        machine,
        fitted_on=source,
        error=error_of([*kinds[0], *kinds[1]], [*ratios[0], *ratios[1]]),
        fitted_range=fitted_range,
    ), held_out


def _with_stages(steps: Sequence[MeasuredStep], start: MachineSpec) -> MachineSpec:
    """Selects how the program balances its pipeline stages, which tables do not contain, by the quality of the fit."""
    pipelines = [step for step in steps if step.layout.pp > 1]
    if len(pipelines) < TRIAL_ROWS // 4:
        return start
    sample = [pipelines[index] for index in np.random.default_rng(0).permutation(len(pipelines))[:TRIAL_ROWS]]
    candidates = [
        structs.replace(start, fitted=structs.replace(start.fitted, stages_by_cost=by_cost))
        for by_cost in (False, True)
    ]
    return min(candidates, key=lambda machine: _fitted(sample, machine)[1])


def _with_memory_constants(steps: Sequence[MeasuredStep], start: MachineSpec) -> MachineSpec:
    """Selects the constants of memory by the measured memory, if there are enough rows with it."""
    with_memory = [step for step in steps if step.memory]
    if len(with_memory) < MIN_ROWS:
        return start

    def error(fitted: FittedConstants) -> float:
        ratios = [memory_of(step.job, step.layout, fitted).total / step.memory for step in with_memory]
        return float(np.mean(np.abs(np.log(ratios))))

    candidates = [
        structs.replace(start.fitted, gradient_bytes=gradient_bytes, activations=factor)
        for gradient_bytes in (2, 4)
        for factor in MEMORY_FACTORS
    ]
    return structs.replace(start, fitted=min(candidates, key=error))


def _fitted(steps: Sequence[MeasuredStep], start: MachineSpec) -> tuple[MachineSpec, float]:
    """Returns the machine with fitted constants, and the remaining loss."""
    network_names = _NETWORK if any(step.job.gpus > start.gpus_per_node for step in steps) else ()
    names = (*_CONTINUOUS, *network_names)
    times = np.log([step.time_s for step in steps])
    weights = _weights(steps)

    def machine_of(variables: np.ndarray) -> MachineSpec:
        rounded = (float(f"{value:.6g}") for value in np.exp(variables - _OFFSET + initial))
        values = dict(zip(names, rounded, strict=True))
        network = {name: values.pop(name) for name in network_names}
        return structs.replace(
            start,
            fitted=structs.replace(start.fitted, **values),
            network=structs.replace(start.network, **network),
        )

    def residuals(variables: np.ndarray) -> np.ndarray:
        machine = machine_of(variables)
        links = NodeLinks(machine)
        predicted = [predict_step(step.job, step.layout, machine, links).total_s for step in steps]
        errors = np.log(predicted) - times
        return np.concatenate([errors * weights, (variables - _OFFSET) * TYPICAL_ERROR / changes])

    values = {**structs.asdict(start.fitted), **structs.asdict(start.network)}
    initial = np.log([max(values[name], MIN_START.get(name, 0.0)) for name in names])
    changes = np.array([TYPICAL_CHANGES.get(name, TYPICAL_CHANGE) for name in names])
    upper = _OFFSET - initial + np.log([_UPPER_BOUNDS.get(name, np.inf) for name in names])
    lowest, highest = _OFFSET - MAX_CHANGE, np.minimum(upper, _OFFSET + MAX_CHANGE)
    variables = np.minimum(_OFFSET, upper - BOUND_MARGIN)
    for scale in LOSS_SCALES:
        tolerance = 1e-6 if scale == LOSS_SCALES[-1] else 1e-3
        result = least_squares(
            residuals,
            np.clip(variables, lowest + 1e-6, highest - 1e-6),
            bounds=(lowest, highest),
            loss="cauchy",
            f_scale=scale * TYPICAL_ERROR,
            diff_step=[1e-4] * len(upper),
            ftol=tolerance,
            xtol=tolerance,
        )
        variables = result.x
    return machine_of(variables), float(result.cost)


def _weights(steps: Sequence[MeasuredStep]) -> np.ndarray:
    """Returns a weight for each step. n rows with the same number of GPUs together weigh sqrt(n).

    Tables contain hundreds of small runs and few large ones.
    """
    rows = Counter(step.job.gpus for step in steps)
    weights = np.array([rows[step.job.gpus] ** -0.25 for step in steps])
    return np.asarray(weights / np.sqrt(np.mean(weights**2)))
