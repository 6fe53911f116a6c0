"""Measured steps and all-reduces: what is predicted for each row of a table, and how far off it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.optimize import isotonic_regression

from dtbench.cost.plan.machines import Links, Machine
from dtbench.cost.plan.step import predict_step
from dtbench.cost.plan.tables import Measured, Table, all_reduces, measured_steps, read_table
from dtbench.model.grouping import group_by
from dtbench.records.plan import StepRow, StepsFile
from dtbench.text.units import plural
from dtbench_core.cost.curve import Curve

# The rest of a table's sizes is predicted: an eighth of the public ones is fitted.
ALL_REDUCE_FITTED = 128


def steps_file(title: str, rows: Sequence[StepRow], notes: Iterable[str] = ()) -> StepsFile:
    """What the rows amount to: how far off they are, and what choosing by the predictions would cost.

    title: of what, by what. rows: in the order of the table; those of one group are choices of one another.
    """
    choices = [of for of in group_by(rows, lambda row: row.group).values() if len(of) > 1]
    in_order = [
        (a.predicted_s - b.predicted_s) * (a.measured_s - b.measured_s) > 0
        for of in choices
        for a, b in itertools.combinations(of, 2)
        if a.measured_s != b.measured_s
    ]
    costs = [
        min(of, key=lambda row: row.predicted_s).measured_s / min(row.measured_s for row in of) - 1
        for of in choices
    ]
    mean_error = fmean(abs(row.error) for row in rows)
    verdict = [f"mean error {mean_error:.1%} over {plural(len(rows), 'row')}"]
    if in_order and any(" on " in row.label for row in rows):
        right, pairs = sum(in_order), len(in_order)
        verdict.append(f"{right} of {pairs} pairs of layouts in the order measured ({right / pairs:.1%})")
        verdict.append(
            f"the layout predicted fastest took {fmean(costs):.1%} more than the fastest, mean of "
            f"{plural(len(costs), 'choice')}; at most {max(costs):.1%}"
        )
    return StepsFile(
        title=title,
        rows=tuple(rows),
        mean_error=mean_error,
        pairs=len(in_order),
        pairs_in_order=sum(in_order),
        cost_of_choice=tuple(costs),
        verdict=(*verdict, *notes),
    )


def _row(label: str, group: str, measured_s: float, predicted_s: float) -> StepRow:
    return StepRow(
        label=label,
        group=group,
        measured_s=measured_s,
        predicted_s=predicted_s,
        error=predicted_s / measured_s - 1,
    )


def validate_table(path: Path, machine: Machine, links: Links) -> StepsFile:
    """Predicts every row of a table of measured steps, or, of a table of all-reduces, those sizes that its curve is
    not fitted to.

    Raises:
        UsageError: a table without the columns or with a value that cannot be; the line is named.
        UnreadableRunError: a file that cannot be read.
    """
    table = read_table(path)
    if table.is_all_reduce:
        return _validate_all_reduce(table)
    measured = measured_steps(table, machine)
    notes = sorted({f"recomputation: {one.layout.recompute}" for one in measured})
    return steps_file(
        f"{path.name}: {len(measured)} measured steps on {machine.name}",
        predict_rows(measured, machine, links),
        notes,
    )


def predict_rows(measured: Iterable[Measured], machine: Machine, links: Links) -> tuple[StepRow, ...]:
    """The rows with their predictions."""
    return tuple(
        _row(
            f"{one.job.model.name} on {one.job.gpus}: {one.layout.words()}",
            f"{one.job.model.name} {one.job.gpus} {one.job.batch} {one.job.sequence}",
            one.time_s,
            predict_step(one.job, one.layout, machine, links).total_s,
        )
        for one in measured
    )


# -------------------------------------------------------------------------------------- all-reduce


def _validate_all_reduce(table: Table) -> StepsFile:
    """Every so many sizes fit a curve, the others are predicted from it."""
    points = all_reduces(table)
    name = table.path.name
    chosen = _chosen(len(points), min(ALL_REDUCE_FITTED, len(points) // 2 + 1))
    curve = fit_curve([points[at] for at in chosen])
    held = sorted(set(range(len(points))) - set(chosen))
    found = [_row(f"{points[at][0]} B", name, points[at][1], curve.us(points[at][0]) * 1e-6) for at in held]
    title = f"{name}: an all-reduce fitted at {len(chosen)} sizes, the other {len(held)} predicted"
    return steps_file(title, found)


def _chosen(points: int, count: int) -> list[int]:
    """Positions to fit at: as dense as there are sizes at the small end, where a curve bends, then by equal factors."""
    spaced = dict.fromkeys(round(at) - 1 for at in np.geomspace(1, points, count))
    return sorted(list(dict.fromkeys([*spaced, *range(points)]))[:count])


def fit_curve(points: Sequence[tuple[int, float]]) -> Curve:
    """A curve through (bytes, seconds), never falling."""
    times = isotonic_regression(np.log([seconds for _, seconds in points])).x
    return Curve(tuple(size for size, _ in points), tuple(float(us) for us in np.exp(times) * 1e6))


def halves(measured: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Two halves of the rows, drawn by chance with a fixed seed."""
    order = np.random.default_rng(0).permutation(len(measured))
    cut = len(measured) // 2
    return [measured[i] for i in order[:cut]], [measured[i] for i in order[cut:]]


def residuals(rows: Iterable[StepRow]) -> Iterator[float]:
    """Measured time against predicted."""
    return (row.measured_s / row.predicted_s for row in rows)
