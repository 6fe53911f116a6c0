"""Measured steps and all-reduces: what is predicted for each row of a table, and how far off it is."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
from msgspec import structs
from scipy.optimize import isotonic_regression

from dtbench.cost.plan.csv_table import Table, all_reduces, read_table
from dtbench.cost.plan.ground import extrapolation, interval
from dtbench.cost.plan.machines import Links, Machine, NodeLinks, find_machine, machine_called
from dtbench.cost.plan.memory import memory_of
from dtbench.cost.plan.step import model_flops, predict_step
from dtbench.cost.plan.tables import SEQUENCE, Measured, read_steps
from dtbench.records.plan import StepRow, StepsFile
from dtbench.suite.errors import UsageError
from dtbench.suite.grouping import group_by
from dtbench.text.units import plural
from dtbench_core.cost.curve import Curve

# The rest of a table's sizes is predicted: an eighth of the public ones is fitted.
ALL_REDUCE_FITTED = 128
# Fewer ways to split ranks over layouts cannot be halved.
FEW_SPLITS = 16
# What is slower than this waits for something that a model of layouts may not know.
LEAST_MFU = 0.1
# Of many lines so many are named.
NAMED = 8


def steps_file(
    title: str,
    rows: Sequence[StepRow],
    notes: Iterable[str] = (),
    left_out: Mapping[str, Sequence[int]] | None = None,
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
    errors = [abs(row.error) for row in rows]
    mean_error = fmean(errors)
    verdict = [f"mean error {mean_error:.1%}, median {median(errors):.1%} over {plural(len(rows), 'row')}"]
    if in_order and any(" on " in row.label for row in rows):
        right, pairs = sum(in_order), len(in_order)
        verdict.append(f"{right} of {pairs} pairs of layouts in the order measured ({right / pairs:.1%})")
        verdict.append(
            f"the layout predicted fastest took {fmean(costs):.1%} more than the fastest, mean of "
            f"{plural(len(costs), 'choice')}; median {median(costs):.1%}; at most {max(costs):.1%}"
        )
    large = [abs(row.error) for row in rows if row.mfu is not None and row.mfu >= LEAST_MFU]
    if 0 < len(large) < len(rows):
        what = f"of the {plural(len(large), 'row')} of {LEAST_MFU:.0%} MFU and more"
        verdict.append(f"{what}: mean error {fmean(large):.1%}, median {median(large):.1%}")
    verdict += _intervals(rows)
    verdict += _memory(rows)
    return with_left_out(
        StepsFile(
            title=title,
            rows=tuple(rows),
            mean_error=mean_error,
            pairs=len(in_order),
            pairs_in_order=sum(in_order),
            cost_of_choice=tuple(costs),
            verdict=tuple(verdict),
        ),
        left_out or {},
        notes,
    )


def with_left_out(
    made: StepsFile, left_out: Mapping[str, Sequence[int]], notes: Iterable[str] = ()
) -> StepsFile:
    """The same, with rows that were not predicted and what was assumed."""
    named = [_left_out(reason, lines) for reason, lines in left_out.items()]
    head = [f"{plural(sum(map(len, left_out.values())), 'row')} left out:"] if named else []
    return structs.replace(made, verdict=(*made.verdict, *head, *named, *notes), left_out=tuple(named))


def _left_out(reason: str, lines: Sequence[int]) -> str:
    named = ", ".join(map(str, lines[:NAMED])) + (", ..." if len(lines) > NAMED else "")
    return f"{len(lines)} {'row' if len(lines) == 1 else 'rows'}: {reason} (line {named})"


def _intervals(rows: Sequence[StepRow]) -> Iterator[str]:
    inside = [
        row.low_s <= row.measured_s <= row.high_s for row in rows if row.low_s is not None and row.high_s
    ]
    if inside:
        yield f"{sum(inside)} of {len(inside)} measured times inside the 90 % interval ({fmean(inside):.1%})"


def _memory(rows: Sequence[StepRow]) -> Iterator[str]:
    off = [
        row.predicted_bytes / row.measured_bytes - 1
        for row in rows
        if row.measured_bytes and row.predicted_bytes
    ]
    if off:
        yield (
            f"memory: mean error {fmean(map(abs, off)):.1%}, median {median(map(abs, off)):.1%}, bias "
            f"{median(off):+.1%} over {plural(len(off), 'row')}"
        )


def _row(label: str, group: str, measured_s: float, predicted_s: float) -> StepRow:
    return StepRow(
        label=label,
        group=group,
        measured_s=measured_s,
        predicted_s=predicted_s,
        error=predicted_s / measured_s - 1,
    )


def validate_table(
    path: Path, machine: Machine, links: Links, ignore: Collection[str] = (), sequence: int = SEQUENCE
) -> StepsFile:
    """Predicts every row of a table of measured steps, or, of a table of all-reduces, those sizes that its curve is
    not fitted to.

    ignore: titles of columns that are left out. sequence: tokens of one, where the table does not say.

    Raises:
        UsageError: a table without the columns or with a value that cannot be; the line is named.
        UnreadableRunError: a file that cannot be read.
    """
    table = read_table(path, ignore)
    if "gpus" in table.at and table.is_all_reduce:
        return _validate_collectives(table, machine)
    if table.is_all_reduce:
        return _validate_all_reduce(table)
    steps = read_steps(table, machine, sequence)
    beyond = sorted({line for one in steps.measured if (line := extrapolation(one.job, machine))})
    notes = [*steps.notes, *beyond[:NAMED]]
    if machine.fsdp and any(one.layout.fsdp > 1 for one in steps.measured):
        notes.append(f"rows that shard by FSDP are predicted by {machine.fsdp}")
    if machine.error is None:
        notes.append(f"no step was measured on {machine.name}: no interval")
    return steps_file(
        f"{path.name}: {len(steps.measured)} measured steps on {machine.name}",
        predict_rows(steps.measured, machine, links, steps.lines),
        notes,
        steps.left_out,
    )


def predict_rows(
    measured: Iterable[Measured], machine: Machine, links: Links, lines: Iterable[int] = ()
) -> tuple[StepRow, ...]:
    """The rows with their predictions. lines: of the table."""
    sharded = find_machine(machine.fsdp) if machine.fsdp else machine
    return tuple(
        _predicted(one, sharded if one.layout.fsdp > 1 else machine, links, line)
        for one, line in zip(measured, itertools.chain(lines, itertools.repeat(0)), strict=False)
    )


def _predicted(one: Measured, machine: Machine, links: Links, line: int) -> StepRow:
    job = one.job
    row = _row(
        f"{job.model.name} on {job.gpus}: {one.layout.words()}",
        f"{job.model.name} {job.gpus} {job.batch} {job.sequence} {job.software.precision}",
        one.time_s,
        predict_step(job, one.layout, machine, links).total_s,
    )
    low, high = interval(job, one.layout, machine) or (None, None)
    return structs.replace(
        row,
        low_s=None if low is None else low * row.predicted_s,
        high_s=None if high is None else high * row.predicted_s,
        measured_bytes=one.memory or None,
        predicted_bytes=memory_of(job, one.layout, machine.fitted).total if one.memory else None,
        line=line,
        mfu=model_flops(job) / (one.time_s * job.gpus * machine.peak_tflops * 1e12),
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


def _validate_collectives(table: Table, machine: Machine) -> StepsFile:
    """Rows priced by the machine's tables of a node, and by its network beyond."""
    links = NodeLinks(machine)
    price = {"all_reduce": links.all_reduce, "all_to_all": links.all_to_all}
    price |= {"all_gather": links.gather, "reduce_scatter": links.gather}
    rows: list[StepRow] = []
    left_out: defaultdict[str, list[int]] = defaultdict(list)
    for line, cells in table.lines:
        ranks, size = int(table.number(line, cells, "gpus")), int(table.number(line, cells, "bytes"))
        name = table.text(cells, "collective").replace("alltoall", "all_to_all") or "all_reduce"
        system = table.text(cells, "system")
        known = machine_called(system) if system else machine.name
        if known is None or not machine.name.startswith(known):
            left_out[f"{system} is not {machine.name}"].append(line)
        elif name not in price or ranks < 2:
            left_out[f"{name[:20]} of {ranks} GPUs"].append(line)
        else:
            in_node = ranks <= machine.gpus_per_node
            predicted = links.in_node(name, size, ranks) if in_node else price[name](size, ranks, 1)
            label = f"{name} of {ranks}: {size} B"
            rows.append(_row(label, f"{name} {ranks}", table.seconds(line, cells, "time"), predicted))
    if not rows:
        raise UsageError(f"{table.path}: no row is of {machine.name}: {', '.join(list(left_out)[:3])}")
    large = [abs(row.error) for row in rows if int(row.label.split()[-2]) >= 2**20]
    notes = [f"from 1 MiB on: mean error {fmean(large):.1%}, median {median(large):.1%}"] if large else []
    if machine.stands_in:
        notes.append(f"collectives of {machine.stands_in}")
    return steps_file(f"{table.path.name}: collectives on {machine.name}", rows, notes, left_out)


def _chosen(points: int, count: int) -> list[int]:
    """Positions to fit at: as dense as there are sizes at the small end, where a curve bends, then by equal factors."""
    spaced = dict.fromkeys(round(at) - 1 for at in np.geomspace(1, points, count))
    return sorted(list(dict.fromkeys([*spaced, *range(points)]))[:count])


def fit_curve(points: Sequence[tuple[int, float]]) -> Curve:
    """A curve through (bytes, seconds), never falling."""
    times = isotonic_regression(np.log([seconds for _, seconds in points])).x
    return Curve(tuple(size for size, _ in points), tuple(float(us) for us in np.exp(times) * 1e6))


def halves(measured: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Two halves, drawn by chance with a fixed seed: of the ways to split ranks, so that no half holds a layout of the
    other with another micro batch; of the rows, where there are few ways."""
    splits = [(one.layout.tp, one.layout.pp, one.layout.dp, one.layout.cp, one.layout.ep) for one in measured]
    ways = sorted(set(splits))
    of = [ways.index(split) for split in splits] if len(ways) >= FEW_SPLITS else list(range(len(measured)))
    order = np.random.default_rng(0).permutation(max(of) + 1)
    place = {int(way): at for at, way in enumerate(order)}
    first: list[Measured] = []
    second: list[Measured] = []
    for way, one in zip(of, measured, strict=True):
        (first if place[way] < len(order) // 2 else second).append(one)
    return first, second


def residuals(rows: Iterable[StepRow]) -> Iterator[float]:
    """Measured time against predicted."""
    return (row.measured_s / row.predicted_s for row in rows)
