"""Computes prediction intervals of step times from the errors on held-out steps.

Intervals are wider for jobs outside the range of GPUs, parameters and sequence lengths to which a machine was fitted.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dtbench.cost.plan.machines import ErrorBounds, MachineSpec
from dtbench.cost.plan.training import TrainingJob, TrainingLayout
from dtbench.grouping import group_by
from dtbench.text.units import significant

# Share of the held-out steps below, and above, an interval that should hold 90 % of new steps. It is less than 5 %:
# steps of the same layout are similar, and new layouts have larger errors. nanotron's layouts were halved four times.
# Intervals that hold 95 % of one half's steps hold 89 to 98 % of the other's. With 90 %, it is 81 to 94 %.
TAIL_SHARE = 0.025
# A kind of steps with fewer held-out steps than this shares the interval of all steps.
MIN_STEPS_OF_KIND = 20
# Minimum interval: how far the median steps of identical launches differ. It is the 90 % range over 152 launches of 18
# systems of MLPerf training v5.1 (results/plan/README.md).
LAUNCH_TO_LAUNCH = (0.995, 1.004)
# The logarithm of an interval grows by this share for every doubling outside the fitted range, and by the second share
# for a kind of steps that was not measured. Checked with public H100 steps (nanotron): after fitting to 1, 2, 4 and 8
# nodes, 95, 91, 95 and 97 % of the steps on more nodes, up to 32, lie inside.
GROWTH, GROWTH_NEW_KIND = 0.2, 0.4


def kind_of(job: TrainingJob, layout: TrainingLayout, machine: MachineSpec) -> str:
    """Returns the kind of a step; steps of the same kind have prediction errors of similar size."""
    if job.gpus <= machine.gpus_per_node:
        return "one node"
    return "pipelines over nodes" if layout.pp > 1 else "several nodes"


def _quantities(job: TrainingJob) -> dict[str, float]:
    return {"GPUs": job.gpus, "parameters": job.model.elements(), "tokens a sequence": job.sequence}


def fitted_range_of(jobs: Iterable[TrainingJob]) -> dict[str, tuple[float, float]]:
    """Returns the smallest and the largest value of each quantity over the jobs."""
    quantities = [_quantities(job) for job in jobs]
    return {
        name: (min(values[name] for values in quantities), max(values[name] for values in quantities))
        for name in quantities[0]
    }


def error_of(kinds: Sequence[str], ratios: Sequence[float]) -> ErrorBounds:
    """Computes the bounds that hold 90 % of the steps of new layouts, for all steps and for each kind.

    Args:
        kinds: the kind of each held-out step.
        ratios: measured over predicted time of each.
    """

    def bounds(sample: Sequence[float]) -> tuple[float, float]:
        # Conformal prediction: the (n + 1) x TAIL_SHARE-th smallest and largest of n steps. Few steps give wide bounds.
        ordered = np.sort(sample)
        tail = max(0, int((len(sample) + 1) * TAIL_SHARE) - 1)
        low, high = min(ordered[tail], LAUNCH_TO_LAUNCH[0]), max(ordered[-1 - tail], LAUNCH_TO_LAUNCH[1])
        return round(float(low), 3), round(float(high), 3)

    by_kind = group_by(sorted(zip(kinds, ratios, strict=True)), lambda pair: pair[0])
    low, high = bounds(ratios)
    return ErrorBounds(
        low=low,
        high=high,
        kinds={
            kind: bounds([ratio for _, ratio in pairs])
            for kind, pairs in by_kind.items()
            if len(pairs) >= MIN_STEPS_OF_KIND
        },
    )


def interval(job: TrainingJob, layout: TrainingLayout, machine: MachineSpec) -> tuple[float, float] | None:
    """Returns the 90 % interval of measured over predicted time; None if no step was measured on the machine."""
    if (error := machine.error) is None:
        return None
    kind = kind_of(job, layout, machine)
    low, high = error.kinds.get(kind, (error.low, error.high))
    doublings = sum(math.log2(factor) for _, factor in _outside_range(job, machine))
    exponent = 1 + (GROWTH if kind in error.kinds else GROWTH_NEW_KIND) * doublings
    # An interval on one side of 1 corrects a bias, whose direction outside the fitted range is unknown.
    if exponent > 1 and not low <= 1 <= high:
        low, high = min(low, 1 / high), max(high, 1 / low)
    return low**exponent, high**exponent


def _outside_range(job: TrainingJob, machine: MachineSpec) -> Iterator[tuple[str, float]]:
    """Yields the quantities outside the fitted range, with the factor between the value and the range's end."""
    for name, value in _quantities(job).items():
        low, high = machine.fitted_range.get(name, (value, value))
        if not low <= value <= high:
            yield name, value / high if value > high else low / value


def extrapolation(job: TrainingJob, machine: MachineSpec) -> str | None:
    """Describes how the job lies outside the machine's fitted range; None if it lies inside."""
    quantities = _quantities(job)
    ranges = [
        f"{_short(quantities[name])} {name} (a factor of {significant(factor, 3)} outside the fitted range "
        f"{_short(machine.fitted_range[name][0])} to {_short(machine.fitted_range[name][1])})"
        for name, factor in _outside_range(job, machine)
    ]
    return (
        f"extrapolated beyond the steps that {machine.name} was fitted to: {', '.join(ranges)}"
        if ranges
        else None
    )


def _short(value: float) -> str:
    return f"{value / 1e9:.3g} x 10^9" if value >= 1e9 else f"{value:,.0f}"
