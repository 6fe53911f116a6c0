"""Measured steps and collectives: what is predicted for each row of a table, and how far off it is."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import numpy as np
from msgspec import Struct

from dtbench.cost.plan.csv_table import CsvTable, read_table
from dtbench.cost.plan.ground import extrapolation, interval
from dtbench.cost.plan.links import Links
from dtbench.cost.plan.machines import COLLECTIVES, MachineSpec, find_machine, machine_called
from dtbench.cost.plan.measured_steps import MeasuredStep, read_steps
from dtbench.cost.plan.memory import memory_of
from dtbench.cost.plan.step import predict_step
from dtbench.errors import UsageError
from dtbench.grouping import group_by
from dtbench.text.units import plural

# Fewer ways to split ranks over layouts cannot be halved.
FEW_SPLITS = 16
# Of many lines so many are named.
NAMED = 8
LARGE_BYTES = 2**20


class StepRow(Struct, frozen=True, kw_only=True):
    """group: rows of which each is a choice beside the others. low_s, high_s: the 90 % interval, where there is one.
    Bytes of one GPU, where they were measured. line: of the table, 0 where it has none."""

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
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1


class StepsFile(Struct, frozen=True, kw_only=True):
    """What `dtbench plan --validate --json` prints."""

    kind: Literal["plan validation"] = "plan validation"
    title: str
    rows: tuple[StepRow, ...]
    mean_error: float
    verdict: tuple[str, ...]


def steps_file(
    title: str, rows: Sequence[StepRow], notes: Iterable[str], left_out: Mapping[str, Sequence[int]]
) -> StepsFile:
    """What the rows amount to: how far off they are, and what choosing by the predictions would cost.

    title: of what, by what. rows: in the order of the table; those of one group are choices of one another. left_out:
    reason -> lines of rows that were not predicted.
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
    verdict = [f"{_spread([row.error for row in rows])} over {plural(len(rows), 'row')}"]
    if in_order and any(" on " in row.label for row in rows):
        right, pairs = sum(in_order), len(in_order)
        verdict.append(f"{right} of {pairs} pairs of layouts in the order measured ({right / pairs:.1%})")
        verdict.append(
            f"the layout predicted fastest took {fmean(costs):.1%} more than the fastest, mean of "
            f"{plural(len(costs), 'choice')}; median {median(costs):.1%}; at most {max(costs):.1%}"
        )
    inside = [row.low_s <= row.measured_s <= row.high_s for row in rows if row.low_s and row.high_s]
    if inside:
        verdict.append(
            f"{sum(inside)} of {len(inside)} measured times inside the 90 % interval ({fmean(inside):.1%})"
        )
    off = [r.predicted_bytes / r.measured_bytes - 1 for r in rows if r.measured_bytes and r.predicted_bytes]
    if off:
        verdict.append(f"memory: {_spread(off)}, bias {median(off):+.1%} over {plural(len(off), 'row')}")
    named = [_left_out(reason, lines) for reason, lines in left_out.items()]
    if left_out:
        verdict.append(f"{plural(sum(map(len, left_out.values())), 'row')} left out:")
    return StepsFile(
        title=title,
        rows=tuple(rows),
        mean_error=fmean(abs(row.error) for row in rows),
        verdict=(*verdict, *named, *notes),
    )


def _left_out(reason: str, lines: Sequence[int]) -> str:
    named = ", ".join(map(str, lines[:NAMED])) + (", ..." if len(lines) > NAMED else "")
    return f"{plural(len(lines), 'row')}: {reason} (line {named})"


def _spread(errors: Sequence[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"mean error {fmean(sizes):.1%}, median {median(sizes):.1%}"


def validate_table(
    path: Path, machine: MachineSpec, links: Links, sequence: int, gpus: int | None
) -> StepsFile:
    """Predicts every row of a table of measured steps, or of measured collectives.

    sequence: tokens of one, and gpus: of a collective, where the table does not say.

    Raises:
        UsageError: a table without the columns or with a value that cannot be; the line is named.
        UnreadableRunError: a file that cannot be read.
    """
    table = read_table(path)
    if "bytes" in table.columns:
        return _validate_collectives(table, machine, links, gpus)
    measured = read_steps(table, machine, sequence)
    steps = measured.steps
    beyond = sorted({line for step in steps if (line := extrapolation(step.job, machine))})
    notes = [*measured.notes, *beyond[:NAMED]]
    if machine.fsdp and any(step.layout.fsdp > 1 for step in steps):
        notes.append(f"rows that shard by FSDP are predicted by {machine.fsdp}")
    if machine.error is None:
        notes.append(f"no step was measured on {machine.name}: no interval")
    return steps_file(
        f"{path.name}: {len(steps)} measured steps on {machine.name}",
        predict_rows(steps, machine, links),
        notes,
        measured.left_out,
    )


def predict_rows(steps: Iterable[MeasuredStep], machine: MachineSpec, links: Links) -> tuple[StepRow, ...]:
    sharded = find_machine(machine.fsdp) if machine.fsdp else machine
    return tuple(_predicted(step, sharded if step.layout.fsdp > 1 else machine, links) for step in steps)


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
    """Rows priced by the links: of a machine its tables of a node, and its network beyond."""
    if gpus is None and "gpus" not in table.columns:
        raise UsageError(f"{table.path} has no column gpus: give --gpus, of how many the collectives were")
    table.require("bytes", "time")
    rows: list[StepRow] = []
    large: list[float] = []
    left_out: defaultdict[str, list[int]] = defaultdict(list)
    for row in table.rows:
        ranks, size = row.count("gpus", gpus), row.count("bytes")
        name = row.text("collective").replace("alltoall", "all_to_all") or "all_reduce"
        system = row.text("system")
        of_machine = machine_called(system) if system else machine.name
        if of_machine is None or not machine.name.startswith(of_machine):
            left_out[f"{system} is not {machine.name}"].append(row.line)
            continue
        if name not in ("all_reduce", *COLLECTIVES) or ranks < 2:
            left_out[f"{name[:20]} of {ranks} GPUs"].append(row.line)
            continue
        predicted = StepRow(
            label=f"{name} of {ranks}: {size} B",
            group=f"{name} {ranks}",
            measured_s=row.number("time"),
            predicted_s=links.collective(name, size, ranks, 1),
            line=row.line,
        )
        rows.append(predicted)
        if size >= LARGE_BYTES:
            large.append(predicted.error)
    if not rows:
        raise UsageError(f"{table.path}: no row is of {machine.name}: {', '.join(list(left_out)[:3])}")
    notes = [f"from 1 MiB on: {_spread(large)}"] if large else []
    if machine.stands_in:
        notes.append(f"collectives of {machine.stands_in}")
    return steps_file(f"{table.path.name}: collectives on {machine.name}", rows, notes, left_out)


def halves(steps: Sequence[MeasuredStep]) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
    """Two halves, drawn by chance with a fixed seed: of the ways to split ranks, so that no half holds a layout of the
    other with another micro batch; of the rows, where there are few ways."""
    layouts = [step.layout for step in steps]
    ways = [(one.tp, one.pp, one.dp, one.cp, one.ep) for one in layouts]
    if len({*ways}) < FEW_SPLITS:
        ways = [(at, 0, 0, 0, 0) for at in range(len(steps))]
    different = sorted({*ways})
    order = np.random.default_rng(0).permutation(len(different))
    chosen = {different[at] for at in order[: len(order) // 2]}
    pairs = list(zip(ways, steps, strict=True))
    return [one for way, one in pairs if way in chosen], [one for way, one in pairs if way not in chosen]
