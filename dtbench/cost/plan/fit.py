"""A machine's constants fitted to measured steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs
from scipy.optimize import least_squares

from dtbench.cost.plan.machines import Error, Fitted, Machine, NodeLinks
from dtbench.cost.plan.step import predict_step
from dtbench.cost.plan.tables import Measured
from dtbench.cost.plan.validate import halves, predict_rows, residuals, steps_file
from dtbench.model.errors import UsageError
from dtbench.records.plan import StepsFile

# Steps off by more than this count less and less: a measured table holds runs that went wrong.
USUAL_ERROR = 0.05
# By how much, as a logarithm, a constant may differ between machines (a factor of 1.6) before it counts like a step
# that is off by `USUAL_ERROR`: few rows move those constants only that they say something about.
USUAL_CHANGE = 0.5
# A share starts so far below 1, as a logarithm: at its bound a constant does not move.
OFF_THE_BOUND = 0.2
MIN_ROWS = 8
_FIELDS = Fitted.__struct_fields__
_NETWORK = ("GBps", "shared")
_SHARES = ("matmul", "memory", "shared")  # at most 1


@dataclass(frozen=True)
class Fit:
    """machine: with constants from all rows. held_out: one half predicted by constants from the other."""

    machine: Machine
    held_out: StepsFile


def fit_machine(measured: Sequence[Measured], start: Machine, source: str) -> Fit:
    """Fits the constants of `Fitted`, and the network's where a row has several nodes, by least squares of the times'
    logarithms; `start` says where they lie that the rows say nothing about.

    Raises:
        UsageError: fewer than `MIN_ROWS` rows.
    """
    if len(measured) < MIN_ROWS:
        raise UsageError(f"{len(measured)} measured steps are too few to fit and to check: give {MIN_ROWS}")
    first, second = halves(measured)
    half = _fitted(first, start)
    held_out = steps_file(
        f"{len(second)} steps predicted by constants fitted to {len(first)} others",
        predict_rows(second, half, NodeLinks(half)),
    )
    low, high = np.quantile(list(residuals(held_out.rows)), [0.05, 0.95])
    whole = _fitted(measured, start)
    return Fit(
        structs.replace(
            whole, fitted_on=source, error=Error(low=round(float(low), 3), high=round(float(high), 3))
        ),
        held_out,
    )


def _fitted(measured: Sequence[Measured], start: Machine) -> Machine:
    several_nodes = any(one.job.gpus > start.gpus_per_node for one in measured)
    of_network = _NETWORK if several_nodes else ()
    times = np.log([one.time_s for one in measured])

    def machine_of(logarithms: np.ndarray) -> Machine:
        values = [_round(value) for value in np.exp(logarithms)]
        fitted = Fitted(**dict(zip(_FIELDS, values, strict=False)))
        network = dict(zip(of_network, values[len(_FIELDS) :], strict=True))
        return structs.replace(start, fitted=fitted, network=structs.replace(start.network, **network))

    def off(logarithms: np.ndarray) -> np.ndarray:
        machine = machine_of(logarithms)
        links = NodeLinks(machine)
        errors = (
            np.log([predict_step(one.job, one.layout, machine, links).total_s for one in measured]) - times
        )
        return np.concatenate([errors, (logarithms - known) * USUAL_ERROR / USUAL_CHANGE])

    known = np.log(
        [*(getattr(start.fitted, name) for name in _FIELDS), *(getattr(start.network, n) for n in of_network)]
    )
    upper = np.array([0.0 if name in _SHARES else np.inf for name in (*_FIELDS, *of_network)])
    found = least_squares(
        off,
        np.minimum(known, upper - OFF_THE_BOUND),
        bounds=(-np.inf, upper),
        loss="soft_l1",
        f_scale=USUAL_ERROR,
        diff_step=[1e-4] * len(upper),
    )
    return machine_of(found.x)


def _round(value: float) -> float:
    return float(f"{value:.6g}")
