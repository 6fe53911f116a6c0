"""Measured steps and all-reduces: what is predicted for each row of a table, and how far off it is."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.optimize import isotonic_regression

from dtbench.cost.plan.machines import Links, Machine
from dtbench.cost.plan.step import predict_step
from dtbench.cost.plan.tables import Measured, Table, all_reduces, measured_steps, read_table
from dtbench.grouping import group_by
from dtbench_core.cost.curve import Curve

# The rest of a table's sizes is predicted: an eighth of the public ones is fitted.
ALL_REDUCE_FITTED = 128


@dataclass(frozen=True)
class Row:
    """label: the layout, or the size of an all-reduce."""

    label: str
    group: str
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """Predicted against measured; 0.1 is 10 % too much."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class PlanValidation:
    """title: of what, by what. rows in the order of the table."""

    title: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()

    @property
    def mean_error(self) -> float:
        return fmean(abs(row.error) for row in self.rows)

    def groups(self) -> list[list[Row]]:
        """Rows that are choices of one another: one model, batch and number of GPUs."""
        by_group = group_by(self.rows, lambda row: row.group)
        return [rows for rows in by_group.values() if len(rows) > 1]

    def pairs_in_order(self) -> tuple[int, int]:
        """(pairs of choices that are predicted in the order measured, pairs of different times)."""
        orders = [
            (a.predicted_s - b.predicted_s) * (a.measured_s - b.measured_s) > 0
            for rows in self.groups()
            for a, b in itertools.combinations(rows, 2)
            if a.measured_s != b.measured_s
        ]
        return sum(orders), len(orders)

    def cost_of_choice(self) -> list[float]:
        """Per group: measured time of what is predicted fastest, against the fastest measured; 0.02 is 2 % more."""
        return [
            min(rows, key=lambda row: row.predicted_s).measured_s / min(row.measured_s for row in rows) - 1
            for rows in self.groups()
        ]


def validate_table(path: Path, machine: Machine, links: Links) -> PlanValidation:
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
    return PlanValidation(
        f"{path.name}: {len(measured)} measured steps on {machine.name}",
        predict_rows(measured, machine, links),
        tuple(notes),
    )


def predict_rows(measured: Iterable[Measured], machine: Machine, links: Links) -> tuple[Row, ...]:
    """The rows with their predictions."""
    return tuple(
        Row(
            f"{one.job.model.name} on {one.job.gpus}: {one.layout.words()}",
            f"{one.job.model.name} {one.job.gpus} {one.job.batch} {one.job.sequence}",
            one.time_s,
            predict_step(one.job, one.layout, machine, links).total_s,
        )
        for one in measured
    )


# -------------------------------------------------------------------------------------- all-reduce


def _validate_all_reduce(table: Table) -> PlanValidation:
    """Every so many sizes fit a curve, the others are predicted from it."""
    points = all_reduces(table)
    name = table.path.name
    chosen = _chosen(len(points), min(ALL_REDUCE_FITTED, len(points) // 2 + 1))
    curve = fit_curve([points[at] for at in chosen])
    held = sorted(set(range(len(points))) - set(chosen))
    found = [Row(f"{points[at][0]} B", name, points[at][1], curve.us(points[at][0]) * 1e-6) for at in held]
    title = f"{name}: an all-reduce fitted at {len(chosen)} sizes, the other {len(held)} predicted"
    return PlanValidation(title, tuple(found))


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


def residuals(rows: Iterable[Row]) -> Iterator[float]:
    """Measured time against predicted."""
    return (row.measured_s / row.predicted_s for row in rows)
