"""Tables of measured steps, and of measured all-reduces: what is predicted for each row, and how far off it is."""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
from scipy.optimize import isotonic_regression

from dtbench.cost.plan.job import PLAIN, RECOMPUTE, Job, Layout, Recompute
from dtbench.cost.plan.machines import Links, Machine
from dtbench.cost.plan.memory import memory_of
from dtbench.cost.plan.search import RESERVED_BYTES
from dtbench.cost.plan.step import predict_step
from dtbench.cost.predict.models import MAX_VALUE, Model
from dtbench.errors import UnreadableRunError, UsageError
from dtbench.files.read import read_bytes
from dtbench.grouping import group_by
from dtbench_core.cost.curve import Curve

MAX_FILE_BYTES = 2**24
_WHAT = "a table of measured steps in CSV"
# Column -> the field of a row. Case, spaces and "#" of a title do not matter.
_COLUMNS = {
    "gpus": "gpus",
    "global batch": "batch",
    "micro batch": "micro_batch",
    "hidden size": "hidden",
    "attention heads": "heads",
    "layers": "layers",
    "sequence length": "sequence",
    "tensor parallelism": "tp",
    "data parallelism": "dp",
    "pipeline parallelism": "pp",
}
_TIMES = {"iteration time (ms)": 1e-3, "iteration time (s)": 1.0}
_OPTIONAL = {"vocabulary": "vocab", "interleaved chunks": "chunks"}
_FLAGS = {
    "sequence parallel": "sequence_parallel",
    "flash attention": "flash",
    "sharded optimizer": "sharded_optimizer",
}
# GPT-2's 50,257 tokens, padded as Megatron-LM pads them for 8 tensor-parallel ranks: a multiple of 128 x 8.
GPT_VOCAB = 51200
ALL_REDUCE_FITTED = 128


@dataclass(frozen=True)
class Measured:
    """A row of a table."""

    job: Job
    layout: Layout
    time_s: float


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
    rows = read_csv(path)
    if any(title.startswith("size") for title in rows[0]):
        return _validate_all_reduce(path, rows)
    measured = measured_steps(path, rows, machine)
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


# --------------------------------------------------------------------------------------- reading


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file by their titles in lower case, without "#"; at least one."""
    try:
        text = read_bytes(path, _WHAT, MAX_FILE_BYTES).decode("utf-8-sig")
        lines = list(csv.reader(io.StringIO(text), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableRunError(f"{path} is not {_WHAT}: {str(error)[:120]}") from error
    if len(lines) < 2 or len(lines[0]) < 2:
        raise UnreadableRunError(f"{path} has no rows below a line of titles: expected {_WHAT}")
    titles = [" ".join(title.lower().replace("#", " ").split()) for title in lines[0]]
    first = {title: titles.index(title) for title in titles}  # of equal titles the first: out of place
    return [
        {title: line[at].strip() for title, at in first.items() if at < len(line)}
        for line in lines[1:]
        if line
    ]


def measured_steps(path: Path, rows: Sequence[Mapping[str, str]], machine: Machine) -> list[Measured]:
    """Rows as jobs and layouts. Where the table does not say what is computed again: nothing if every layout of a
    model on as many GPUs fits into memory so, else everything, as one script trained them all."""
    read = [_measured(path, number, row) for number, row in enumerate(rows, 2)]
    limit = machine.memory_GiB * 2**30 - RESERVED_BYTES
    alike = group_by(enumerate(read), lambda found: (found[1].job.model.name, found[1].job.gpus))
    if "recomputation" in rows[0]:
        return read
    for group in alike.values():
        if any(memory_of(one.job, one.layout).total > limit for _, one in group):
            for at, one in group:
                read[at] = replace(one, layout=replace(one.layout, recompute="full"))
    return read


def _measured(path: Path, line: int, row: Mapping[str, str]) -> Measured:
    def number(title: str, least: float = 1, whole: bool = True) -> float:
        if title not in row:
            known = ", ".join([*_COLUMNS, next(iter(_TIMES))])
            raise UsageError(f"{path}: line {line} has no value for {title!r}: expected the columns {known}")
        try:
            value = float(row[title])
        except ValueError:
            value = math.nan
        if not least <= value <= MAX_VALUE or (whole and value != int(value)):
            wanted = "a whole number from 1 to 2^40" if whole else "a time above 0"
            raise UsageError(f"{path}: line {line}: {title} is {ascii(row[title])[:40]}, expected {wanted}")
        return value

    n = {name: int(number(title)) for title, name in _COLUMNS.items()}
    n |= {name: int(number(title)) for title, name in _OPTIONAL.items() if row.get(title)}
    if n["tp"] * n["dp"] * n["pp"] != n["gpus"]:
        raise UsageError(
            f"{path}: line {line}: tensor x data x pipeline parallelism is {n['tp'] * n['dp'] * n['pp']}, expected the "
            f"{n['gpus']} GPUs"
        )
    if n["batch"] % (n["dp"] * n["micro_batch"]):
        raise UsageError(
            f"{path}: line {line}: the global batch {n['batch']} is no multiple of data parallelism x micro batch = "
            f"{n['dp'] * n['micro_batch']}"
        )
    if n["hidden"] % n["heads"]:
        raise UsageError(
            f"{path}: line {line}: the hidden size {n['hidden']} is no multiple of the attention heads {n['heads']}"
        )
    unit = next((title for title in _TIMES if title in row), next(iter(_TIMES)))
    time_s = number(unit, least=1e-9, whole=False) * _TIMES[unit]
    layout = Layout(
        n["tp"], n["pp"], n["dp"], 1, n["micro_batch"], n.get("chunks", 1), _recompute(path, line, row)
    )
    model = gpt(n["hidden"], n["layers"], n["heads"], n.get("vocab", GPT_VOCAB))
    flags = {
        name: row[title].lower() in ("1", "true", "yes") for title, name in _FLAGS.items() if row.get(title)
    }
    return Measured(Job(model, n["gpus"], n["batch"], n["sequence"], replace(PLAIN, **flags)), layout, time_s)


def _recompute(path: Path, line: int, row: Mapping[str, str]) -> Recompute:
    given = row.get("recomputation", "none").lower() or "none"
    found = next((one for one in RECOMPUTE if one == given), None)
    if found is None:
        raise UsageError(
            f"{path}: line {line}: recomputation is {ascii(given)[:40]}, expected one of {', '.join(RECOMPUTE)}"
        )
    return found


def gpt(hidden: int, layers: int, heads: int, vocab: int) -> Model:
    """A model of GPT's kind: an MLP of four times the width, embedding and head one matrix."""
    model = Model(
        "", hidden, layers, heads, heads, hidden // heads, 4 * hidden, vocab, gated=False, tied=True
    )
    return replace(model, name=f"GPT {model.elements() / 1e9:.3g} B ({layers} x {hidden})")


# -------------------------------------------------------------------------------------- all-reduce


def _validate_all_reduce(path: Path, rows: Sequence[Mapping[str, str]]) -> PlanValidation:
    """Every so many sizes fit a curve, the others are predicted from it."""
    size = next(title for title in rows[0] if title.startswith("size"))
    time = next((title for title in rows[0] if title.startswith("time")), "")
    scale = {"time(ns)": 1e-9, "time(us)": 1e-6}.get(time)
    if scale is None:
        raise UsageError(
            f"{path} has no column time(ns) or time(us): expected a table of all-reduces, or {_WHAT}"
        )
    try:
        points = sorted({int(row[size]): float(row[time]) * scale for row in rows}.items())
    except (KeyError, ValueError) as error:
        raise UsageError(f"{path}: a size or time is missing or no number ({str(error)[:60]})") from error
    if len(points) < 3 or any(not s > 0 or not 0 < t < math.inf for s, t in points):
        raise UsageError(f"{path}: expected at least 3 sizes and times above 0")
    chosen = _chosen(len(points), min(ALL_REDUCE_FITTED, len(points) // 2 + 1))
    curve = fit_curve([points[at] for at in chosen])
    held = sorted(set(range(len(points))) - set(chosen))
    found = [
        Row(f"{points[at][0]} B", path.name, points[at][1], curve.us(points[at][0]) * 1e-6) for at in held
    ]
    title = f"{path.name}: an all-reduce fitted at {len(chosen)} sizes, the other {len(held)} predicted"
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
