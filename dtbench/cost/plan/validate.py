"""Fits a machine's constants to measured steps, and compares predictions with measured steps or collectives."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import numpy as np
from msgspec import Struct, structs
from scipy.optimize import least_squares

from dtbench.cost.plan.machines import (
    COLLECTIVES,
    FittedConstants,
    Links,
    MachineSpec,
    NodeLinks,
    find_machine,
    machine_called,
)
from dtbench.cost.plan.measured_steps import CsvTable, MeasuredStep, MeasuredSteps, read_steps, read_table
from dtbench.cost.plan.prediction_intervals import error_of, extrapolation, fitted_range_of, interval, kind_of
from dtbench.cost.plan.step import memory_of, predict_step
from dtbench.errors import UsageError
from dtbench.grouping import group_by
from dtbench.text.units import plural

# If a table has fewer distinct splits (tp, pp, dp, cp, ep) than this, `halves` divides it row by row.
MIN_SPLITS = 16
# Messages list at most this many lines.
MAX_LINES_SHOWN = 8
LARGE_BYTES = 2**20


class StepRow(Struct, frozen=True, kw_only=True):
    """A row of the table with its prediction.

    Attributes:
        label: description of the row.
        group: rows of the same group are alternative layouts of the same job.
        low_s: lower end of the 90 % interval, if there is one.
        high_s: upper end of the interval.
        measured_bytes: memory per GPU, if it was measured.
        line: number of the line in the file, or 0.
    """

    label: str
    group: str
    measured_s: float
    predicted_s: float
    low_s: float | None = None
    high_s: float | None = None
    measured_bytes: float | None = None
    predicted_bytes: float | None = None
    line: int = 0

    @property
    def error(self) -> float:
        """Predicted / measured - 1."""
        return self.predicted_s / self.measured_s - 1


class StepsFile(Struct, frozen=True, kw_only=True):
    """The output of `dtbench plan --validate --json`.

    Attributes:
        mean_error: mean of |predicted / measured - 1|.
        verdict: lines that summarize the errors.
    """

    kind: Literal["plan validation"] = "plan validation"
    title: str
    rows: tuple[StepRow, ...]
    mean_error: float
    verdict: tuple[str, ...]


def steps_file(
    title: str, rows: Sequence[StepRow], notes: Iterable[str], left_out: Mapping[str, Sequence[int]]
) -> StepsFile:
    """Summarizes the errors of the predictions, and the time lost by choosing layouts by them.

    Args:
        title: title of the printed table.
        rows: rows in the order of the table.
        left_out: reason -> lines of rows that were not predicted.
    """
    groups = [group for group in group_by(rows, lambda row: row.group).values() if len(group) > 1]
    in_order = [
        (first.predicted_s - second.predicted_s) * (first.measured_s - second.measured_s) > 0
        for group in groups
        for first, second in itertools.combinations(group, 2)
        if first.measured_s != second.measured_s
    ]
    losses = [
        min(group, key=lambda row: row.predicted_s).measured_s / min(row.measured_s for row in group) - 1
        for group in groups
    ]
    verdict = [f"{_error_summary([row.error for row in rows])} over {plural(len(rows), 'row')}"]
    if in_order and any(" on " in row.label for row in rows):
        correct, pairs = sum(in_order), len(in_order)
        verdict += [
            f"{correct} of {pairs} pairs of layouts predicted in the measured order ({correct / pairs:.1%})",
            (
                f"the layout with the fastest prediction is slower than the fastest by {fmean(losses):.1%}, mean over "
                f"{plural(len(losses), 'job')}; median {median(losses):.1%}; at most {max(losses):.1%}"
            ),
        ]
    if is_inside := [row.low_s <= row.measured_s <= row.high_s for row in rows if row.low_s and row.high_s]:
        verdict.append(
            f"{sum(is_inside)} of {len(is_inside)} measured times inside the 90 % interval ({fmean(is_inside):.1%})"
        )
    memory_errors = [
        row.predicted_bytes / row.measured_bytes - 1
        for row in rows
        if row.measured_bytes and row.predicted_bytes
    ]
    if memory_errors:
        verdict.append(
            f"memory: {_error_summary(memory_errors)}, bias {median(memory_errors):+.1%} over "
            f"{plural(len(memory_errors), 'row')}"
        )
    if left_out:
        verdict.append(f"{plural(sum(map(len, left_out.values())), 'row')} left out:")
    return StepsFile(
        title=title,
        rows=tuple(rows),
        mean_error=fmean(abs(row.error) for row in rows),
        verdict=(*verdict, *(_left_out(reason, lines) for reason, lines in left_out.items()), *notes),
    )


def _left_out(reason: str, lines: Sequence[int]) -> str:
    shown = ", ".join(map(str, lines[:MAX_LINES_SHOWN])) + (", ..." if len(lines) > MAX_LINES_SHOWN else "")
    return f"{plural(len(lines), 'row')}: {reason} (line {shown})"


def _error_summary(errors: Sequence[float]) -> str:
    absolute = [abs(error) for error in errors]
    return f"mean error {fmean(absolute):.1%}, median {median(absolute):.1%}"


def validate_table(
    path: Path, machine: MachineSpec, links: Links, sequence: int, gpus: int | None
) -> StepsFile:
    """Predicts every row of a table of measured steps or collectives.

    Args:
        sequence: tokens per sequence, if the table has no column for it.
        gpus: ranks of a collective, if the table has no column for them.

    Raises:
        UsageError: a column is missing, or a value is invalid.
        UnreadableRunError: the file cannot be read.
    """
    table = read_table(path)
    if "bytes" in table.columns:
        return _validate_collectives(table, machine, links, gpus)
    measured = read_steps(table, machine, sequence)
    steps = measured.steps
    notes = list(measured.notes)
    notes += sorted({note for step in steps if (note := extrapolation(step.job, machine))})[:MAX_LINES_SHOWN]
    if machine.fsdp and any(step.layout.fsdp > 1 for step in steps):
        notes.append(f"rows with FSDP are predicted with the constants of {machine.fsdp}")
    if machine.error is None:
        notes.append(f"no step was measured on {machine.name}, so there is no interval")
    return steps_file(
        f"{path.name}: {len(steps)} measured steps on {machine.name}",
        predict_rows(steps, machine, links),
        notes,
        measured.left_out,
    )


def predict_rows(steps: Iterable[MeasuredStep], machine: MachineSpec, links: Links) -> tuple[StepRow, ...]:
    fsdp_machine = find_machine(machine.fsdp) if machine.fsdp else machine
    return tuple(_predicted(step, fsdp_machine if step.layout.fsdp > 1 else machine, links) for step in steps)


def _predicted(step: MeasuredStep, machine: MachineSpec, links: Links) -> StepRow:
    job = step.job
    predicted_s = predict_step(job, step.layout, machine, links).total_s
    low, high = interval(job, step.layout, machine) or (None, None)
    return StepRow(
        label=f"{job.model.name} on {job.gpus}: {step.layout.words()}",
        group=f"{job.model.name} {job.gpus} {job.batch} {job.sequence} {job.software.precision}",
        measured_s=step.time_s,
        predicted_s=predicted_s,
        low_s=None if low is None else low * predicted_s,
        high_s=None if high is None else high * predicted_s,
        measured_bytes=step.memory or None,
        predicted_bytes=memory_of(job, step.layout, machine.fitted).total if step.memory else None,
        line=step.line,
    )


def _validate_collectives(table: CsvTable, machine: MachineSpec, links: Links, gpus: int | None) -> StepsFile:
    """Predicts measured collectives from the links."""
    if gpus is None and "gpus" not in table.columns:
        raise UsageError(
            f"{table.path} has no column gpus: give --gpus, the number of GPUs of the collectives"
        )
    table.require("bytes", "time")
    rows: list[StepRow] = []
    large: list[float] = []
    left_out: defaultdict[str, list[int]] = defaultdict(list)
    for row in table.rows:
        ranks, size = row.count("gpus", gpus), row.count("bytes")
        name = row.text("collective").replace("alltoall", "all_to_all") or "all_reduce"
        system = row.text("system")
        row_machine = machine_called(system) if system else machine.name
        if row_machine is None or not machine.name.startswith(row_machine):
            left_out[f"{system} is not {machine.name}"].append(row.line)
            continue
        if name not in ("all_reduce", *COLLECTIVES) or ranks < 2:
            left_out[f"{name[:20]} of {ranks} GPUs is not supported"].append(row.line)
            continue
        predicted = StepRow(
            label=f"{name} of {ranks} GPUs: {size} B",
            group=f"{name} {ranks}",
            measured_s=row.number("time"),
            predicted_s=links.collective(name, size, ranks, 1),
            line=row.line,
        )
        rows.append(predicted)
        if size >= LARGE_BYTES:
            large.append(predicted.error)
    if not rows:
        raise UsageError(f"{table.path} has no row for {machine.name}: {', '.join(list(left_out)[:3])}")
    notes = [f"from 1 MiB on: {_error_summary(large)}"] if large else []
    if machine.stands_in:
        notes.append(f"predicted from collectives measured on {machine.stands_in}")
    return steps_file(f"{table.path.name}: collectives on {machine.name}", rows, notes, left_out)


def halves(steps: Sequence[MeasuredStep]) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """Divides the steps at random, with a fixed seed, into two halves.

    Steps with the same split of the ranks stay in the same half, so that the halves do not differ just by the micro
    batch. If there are few splits, steps are divided individually.
    """
    splits = [
        (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep) for layout in (step.layout for step in steps)
    ]
    if len({*splits}) < MIN_SPLITS:
        splits = [(index, 0, 0, 0, 0) for index in range(len(steps))]
    distinct = sorted({*splits})
    order = np.random.default_rng(0).permutation(len(distinct))
    chosen = {distinct[index] for index in order[: len(order) // 2]}
    pairs = list(zip(splits, steps, strict=True))
    first = [step for split, step in pairs if split in chosen]
    return first, [step for split, step in pairs if split not in chosen]


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
# Offset added to each constant's log change to get the solver's variable. The solver's step is relative to the
# variable, so the variable must not be near 0.
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
        The machine fitted to all steps, and the predictions of one half by constants fitted to the other half.

    Raises:
        UsageError: there are fewer than `MIN_ROWS` rows.
    """
    steps = measured.steps
    if len(steps) < MIN_ROWS:
        raise UsageError(f"got {len(steps)} measured steps, expected at least {MIN_ROWS} to fit and to check")
    start = _with_stages(steps, _with_memory_constants(steps, structs.replace(start, fsdp="")))
    training_halves = halves(steps)
    fits = [_fitted(half, start)[0] for half in training_halves]
    test_halves = training_halves[::-1]
    kinds = [[kind_of(step.job, step.layout, start) for step in half] for half in test_halves]
    ratios = [
        [row.measured_s / row.predicted_s for row in predict_rows(half, fit, NodeLinks(fit))]
        for fit, half in zip(fits, test_halves, strict=True)
    ]
    fitted_range = fitted_range_of(step.job for step in steps)
    # The intervals of a half must not depend on its own errors. They come from the errors on the other half, predicted
    # by constants fitted to this half.
    first = structs.replace(fits[0], error=error_of(kinds[1], ratios[1]), fitted_range=fitted_range)
    held_out = steps_file(
        f"{len(test_halves[0])} steps predicted by constants fitted to {len(training_halves[0])} others",
        predict_rows(test_halves[0], first, NodeLinks(first)),
        measured.notes,
        measured.left_out,
    )
    return structs.replace(
        _fitted(steps, start)[0],
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
        return np.concatenate(
            [(np.log(predicted) - times) * weights, (variables - _OFFSET) * TYPICAL_ERROR / changes]
        )

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
