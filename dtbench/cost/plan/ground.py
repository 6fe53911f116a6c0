"""What ground a machine's constants stand on, and how far a job lies beyond it: intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dtbench.cost.plan.machines import ErrorBounds, MachineSpec
from dtbench.cost.plan.training import TrainingJob, TrainingLayout
from dtbench.grouping import group_by
from dtbench.text.units import format_ratio

# Share of the steps on each side of an interval. Steps of one layout are alike, so new layouts lie further off: in four
# halvings of nanotron's layouts 95 % of one half's steps give intervals that hold 89 to 98 % of the other's; 90 % of
# them hold 81 to 94 %.
OUTSIDE = 0.025
# Of steps of one kind so many give an interval of their own; fewer share that of all steps.
ENOUGH = 20
# Median steps of identical launches: 90 % of 152 launches of 18 systems of MLPerf training v5.1
# (results/plan/README.md). Nothing is known better than that.
LAUNCHES = (0.995, 1.004)
# An interval's logarithm grows by this share with every doubling beyond the ground, and by more where steps of such a
# kind were not measured. Of public H100 steps (nanotron), fitted to those on 1, 2, 4 and 8 nodes, 95, 91, 95 and 97 %
# of those on more, up to 32, then lie inside.
WIDER, WIDER_NEW_KIND = 0.2, 0.4


def kind_of(job: TrainingJob, layout: TrainingLayout, machine: MachineSpec) -> str:
    """Steps whose predictions are about as far off."""
    if job.gpus <= machine.gpus_per_node:
        return "one node"
    return "pipelines over nodes" if layout.pp > 1 else "several nodes"


def _measures(job: TrainingJob) -> dict[str, float]:
    return {"GPUs": job.gpus, "parameters": job.model.elements(), "tokens a sequence": job.sequence}


def ground_of(jobs: Iterable[TrainingJob]) -> dict[str, tuple[float, float]]:
    """From the least to the most of what was measured."""
    measures = [_measures(job) for job in jobs]
    return {name: (min(m[name] for m in measures), max(m[name] for m in measures)) for name in measures[0]}


def error_of(kinds: Sequence[str], ratios: Sequence[float]) -> ErrorBounds:
    """Measured over predicted of steps that were not fitted: the ends of intervals for 90 % of
    steps of other layouts, of all and of each kind."""

    def ends(of: Sequence[float]) -> tuple[float, float]:
        # Conformal: the (n + 1) x OUTSIDE-th smallest and largest of n steps, so that few give a wide interval.
        ordered = np.sort(of)
        outside = max(0, int((len(of) + 1) * OUTSIDE) - 1)
        low, high = min(ordered[outside], LAUNCHES[0]), max(ordered[-1 - outside], LAUNCHES[1])
        return round(float(low), 3), round(float(high), 3)

    by_kind = group_by(sorted(zip(kinds, ratios, strict=True)), lambda pair: pair[0])
    low, high = ends(ratios)
    return ErrorBounds(
        low=low,
        high=high,
        kinds={kind: ends([r for _, r in of]) for kind, of in by_kind.items() if len(of) >= ENOUGH},
    )


def interval(job: TrainingJob, layout: TrainingLayout, machine: MachineSpec) -> tuple[float, float] | None:
    """What 90 % of such steps take, over the predicted time; wider beyond the ground. None where nothing is known."""
    error = machine.error
    if error is None:
        return None
    kind = kind_of(job, layout, machine)
    low, high = error.kinds.get(kind, (error.low, error.high))
    doublings = sum(math.log2(factor) for _, factor in _beyond(job, machine))
    wider = 1 + (WIDER if kind in error.kinds else WIDER_NEW_KIND) * doublings
    # A kind whose ends lie to one side of 1 is off; beyond its ground nobody knows to which.
    if wider > 1 and not low <= 1 <= high:
        low, high = min(low, 1 / high), max(high, 1 / low)
    return low**wider, high**wider


def _beyond(job: TrainingJob, machine: MachineSpec) -> Iterator[tuple[str, float]]:
    """(what, by what factor it lies outside of what was measured)."""
    for name, value in _measures(job).items():
        least, most = machine.ground.get(name, (value, value))
        if not least <= value <= most:
            yield name, value / most if value > most else least / value


def extrapolation(job: TrainingJob, machine: MachineSpec) -> str | None:
    """A line that says what was measured and what is asked, where these differ."""
    measures = _measures(job)
    words = [
        f"{_short(machine.ground[name][0])} to {_short(machine.ground[name][1])} {name}, asked for "
        f"{_short(measures[name])} ({format_ratio(factor)} beyond)"
        for name, factor in _beyond(job, machine)
    ]
    return f"extrapolated: {machine.name} was fitted on {'; on '.join(words)}" if words else None


def _short(value: float) -> str:
    return f"{value / 1e9:.3g} x 10^9" if value >= 1e9 else f"{value:,.0f}"
