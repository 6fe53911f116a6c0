"""Reads the CSV tables of `dtbench plan`, and converts measured steps to training jobs and layouts.

A table has commas, UTF-8, a line of titles and a row per measurement. Case, spaces and punctuation of titles are
ignored. A column that is not listed here is an error, so that no information in a table is ignored silently.
"""

import csv
import io
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import structs

from dtbench.cost.plan.machines import MachineSpec, machine_called
from dtbench.cost.plan.search import RESERVED_BYTES
from dtbench.cost.plan.step import memory_of, model_flops
from dtbench.cost.plan.training import (
    MAX_VALUE,
    PLAIN,
    RECOMPUTE,
    Recompute,
    Software,
    TrainingJob,
    TrainingLayout,
    TransformerModel,
    find_model,
    model_called,
)
from dtbench.errors import UnreadableRunError, UsageError
from dtbench.grouping import group_by
from dtbench.records.read import read_bytes
from dtbench.text.units import plural

MAX_FILE_BYTES = 2**24
MIN_VALUE = 1e-9
_FILE_KIND = "a table of measured steps in CSV"
_WITHOUT_ALIASES = (
    *("nodes", "model", "attention heads", "layers", "zero", "precision"),
    *("sequence parallel", "flash attention", "overlap", "training"),
)
# Column -> its other titles in published tables.
TITLES: Mapping[str, Sequence[str]] = {
    "gpus": ("n_gpus",),
    **dict.fromkeys(_WITHOUT_ALIASES, ()),
    "system": ("GPU",),
    "hidden": ("hidden size",),
    "sequence length": ("SeqLen (T)",),
    "global batch": ("gbs", "GlobalBatchSize"),
    "micro batch": ("mbs", "MicroBatchSize"),
    "gradient accumulation": ("GA", "grad_acc", "GradAccum"),
    "tensor parallel": ("tp", "tensor parallelism"),
    "pipeline parallel": ("pp", "pipeline parallelism"),
    "data parallel": ("dp", "data parallelism"),
    "context parallel": ("cp",),
    "expert parallel": ("ep",),
    "fsdp": ("Sharding Strategy",),
    "interleaved chunks": ("VP",),
    "recomputation": ("Activation Checkpointing",),
    "tokens/s": ("tok_per_s", "Throughput (T/s)"),
    "tokens/s/gpu": ("tok_per_s_per_gpu", "Tokens / sec / GPU"),
    "collective": ("op",),
}
# Columns whose titles contain a unit. Each maps a title to its unit, in seconds or bytes.
UNITS: Mapping[str, Mapping[str, float]] = {
    "iteration time": {"iteration time (s)": 1.0, "iteration time (ms)": 1e-3},
    "memory": {"memory (GiB)": 2**30, "memory (GB)": 1e9, "gpu_mem_gb": 1e9},
    "bytes": {"bytes": 1, "size (B)": 1},
    "time": {"time (s)": 1.0, "time (ms)": 1e-3, "time (us)": 1e-6, "time (ns)": 1e-9},
}
# Titles of columns that are accepted, but not used.
UNUSED = (
    "notes",
    "release",
    "techniques",
    "Parameters (billion)",
    "NumParams",
    "mfu_pct",
    "Model TFLOP / sec / GPU",
    *("table", "device", "dtype", "type", "count", "busbw (GB/s)"),  # printed by nccl-tests
)
_EMPTY = {"", "n/a", "na", "-", "none", "null", "nan"}


@dataclass(frozen=True)
class CsvRow:
    """A row of a table.

    Attributes:
        line: number of its line in the file.
        cells: column -> text, without empty cells.
        units: column -> its unit in seconds or bytes.
    """

    path: Path
    line: int
    cells: Mapping[str, str]
    units: Mapping[str, float]

    def text(self, column: str) -> str:
        return self.cells.get(column, "")

    def number(self, column: str) -> float:
        """Returns a number above 0, in seconds or bytes if the column has a unit.

        Raises:
            UsageError: the cell has no such number.
        """
        text = self.text(column)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not MIN_VALUE <= value <= MAX_VALUE:
            raise self.wrong(f"{column} is {ascii(text)[:40]}, expected a number from 1e-9 to 2^40")
        return value * self.units.get(column, 1)

    def count(self, column: str, default: int | None = None) -> int:
        """Returns an integer of at least 1, or the default for an empty cell."""
        if default is not None and not self.text(column):
            return default
        value = self.number(column)
        if value != int(value):
            raise self.wrong(f"{column} is {value:g}, expected an integer from 1 to 2^40")
        return int(value)

    def flag(self, column: str) -> bool:
        text = self.text(column).lower()
        if text not in ("yes", "no", "true", "false"):
            raise self.wrong(f"{column} is {ascii(text)[:40]}, expected yes or no")
        return text in ("yes", "true")

    def wrong(self, message: str) -> UsageError:
        return UsageError(f"{self.path}: line {self.line}: {message}")


@dataclass(frozen=True)
class CsvTable:
    """A table with at least one row.

    Attributes:
        columns: names of the columns that are used.
        unused: titles of columns that are not used.
    """

    path: Path
    columns: frozenset[str]
    rows: Sequence[CsvRow]
    unused: Sequence[str]

    def require(self, *columns: str) -> None:
        """Raises UsageError if a column is missing. Alternatives are separated by " or "."""
        for column in columns:
            if not self.columns.intersection(column.split(" or ")):
                raise UsageError(f"{self.path} has no column {column}: expected {', '.join(columns)}")


def _normalized(title: str) -> str:
    """Normalizes a title: `# GPUs` -> `gpus`, `Tokens / sec / GPU` -> `tokens/sec/gpu`."""
    return re.sub(r"[^a-z0-9/]", "", title.lower())


_COLUMNS = {_normalized(title): column for column, aliases in TITLES.items() for title in (column, *aliases)}
_COLUMNS |= {_normalized(title): column for column, titles in UNITS.items() for title in titles}
_SCALES = {_normalized(title): scale for titles in UNITS.values() for title, scale in titles.items()}
_UNUSED = {_normalized(title) for title in UNUSED}


def read_table(path: Path) -> CsvTable:
    """Reads a table of steps or collectives. The first of duplicate columns is used (nccl-tests: out of place).

    Raises:
        UnreadableRunError: the file cannot be read, or is not a table.
        UsageError: a column is unknown.
    """
    try:
        text = read_bytes(path, _FILE_KIND, MAX_FILE_BYTES).decode("utf-8-sig")
        reader = csv.reader(io.StringIO(text, newline=None), strict=True)
        lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader if any(cells)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UnreadableRunError(f"{path} is not {_FILE_KIND}: {str(error)[:120]}") from error
    if len(lines) < 2:
        raise UnreadableRunError(f"{path} has no rows below a line of titles: expected {_FILE_KIND}")
    titles = [_normalized(title) for title in lines[0][1]]
    indices: dict[str, int] = {}
    units: dict[str, float] = {}
    for index, title in enumerate(titles):
        if title in _COLUMNS:
            indices.setdefault(_COLUMNS[title], index)
            units.setdefault(_COLUMNS[title], _SCALES.get(title, 1))
        elif lines[0][1][index] and title not in _UNUSED:
            raise UsageError(
                f"{path}: unknown column {ascii(lines[0][1][index])[:40]}, expected some of "
                f"{', '.join([*TITLES, *(title for titles in UNITS.values() for title in titles)])}"
            )
    rows = [
        CsvRow(
            path,
            line,
            {
                column: values[index]
                for column, index in indices.items()
                if index < len(values) and values[index].lower() not in _EMPTY
            },
            units,
        )
        for line, values in lines[1:]
    ]
    return CsvTable(
        path, frozenset(indices), rows, [title for title in lines[0][1] if _normalized(title) in _UNUSED]
    )


# GPT-2's 50,257 tokens, padded like in Megatron-LM for 8 tensor-parallel ranks: to a multiple of 128 x 8.
GPT_VOCAB = 51200
SEQUENCE = 4096
FP8_PEAK = 2  # relative to bfloat16
# A step whose predicted memory exceeds this times the available memory must have used recomputation.
MEMORY_TOLERANCE = 1.3
# Columns that determine the time, the most precise first.
TIME_COLUMNS = ("iteration time", "tokens/s", "tokens/s/gpu")
_FLAGS = {"sequence parallel": "sequence_parallel", "flash attention": "flash", "overlap": "overlap"}
_MODEL_SIZES = ("hidden", "attention heads", "layers")


@dataclass(frozen=True)
class MeasuredStep:
    """A row of a table of measured steps.

    Attributes:
        time_s: seconds per step.
        memory: bytes per GPU, 0 if not measured.
        line: number of the line in the file.
    """

    job: TrainingJob
    layout: TrainingLayout
    time_s: float
    memory: float = 0.0
    line: int = 0


@dataclass(frozen=True)
class MeasuredSteps:
    """The steps of a table.

    Attributes:
        left_out: reason -> lines of rows that cannot be predicted.
        notes: assumptions about properties that are missing in the table.
    """

    steps: list[MeasuredStep]
    left_out: Mapping[str, Sequence[int]]
    notes: tuple[str, ...]


class InexpressibleError(Exception):
    """A row is not supported by the model, or inconsistent."""


def read_steps(table: CsvTable, machine: MachineSpec, sequence: int = SEQUENCE) -> MeasuredSteps:
    """Converts the rows to jobs and layouts.

    If the table has no column for recomputation, `_with_assumed_recomputation` decides about it.

    Args:
        sequence: tokens per sequence, if the table has no column for it.

    Raises:
        UsageError: a column is missing, a value is invalid, or no row can be predicted.
    """
    size_columns = () if "model" in table.columns else _MODEL_SIZES
    table.require(
        "gpus or nodes",
        "global batch",
        "micro batch or gradient accumulation",
        " or ".join(TIME_COLUMNS),
        *size_columns,
    )
    # Tables without a column for the model are those of Megatron-DeepSpeed: GPTs without flash attention and overlap.
    software = PLAIN if size_columns else Software(overlap="fsdp" in table.columns or machine.fitted.overlaps)
    steps: list[MeasuredStep] = []
    left_out: defaultdict[str, list[int]] = defaultdict(list)
    for row in table.rows:
        try:
            steps.append(_measured(row, machine, software, sequence))
        except InexpressibleError as error:
            left_out[str(error)].append(row.line)
    if not steps:
        reason, lines = max(left_out.items(), key=lambda item: len(item[1]))
        raise UsageError(
            f"{table.path}: no row can be predicted; most frequent reason ({plural(len(lines), 'row')}, first in line "
            f"{lines[0]}): {reason}"
        )
    if "recomputation" not in table.columns:
        steps = _with_assumed_recomputation(steps, machine)
    return MeasuredSteps(steps, dict(left_out), tuple(_notes(table, steps, machine, software, sequence)))


def _with_assumed_recomputation(steps: Sequence[MeasuredStep], machine: MachineSpec) -> list[MeasuredStep]:
    """Assumes full recomputation for all steps of a model and number of GPUs, or for none of them.

    It is assumed if it agrees better with measured memory. Without measured memory, it is assumed if some step would
    not fit into memory otherwise, since usually the same script trained all of them.
    """
    limit = MEMORY_TOLERANCE * (machine.memory_GiB * 2**30 - RESERVED_BYTES)

    def predicted_bytes(step: MeasuredStep) -> float:
        return memory_of(step.job, step.layout, machine.fitted).total

    def error(group: Sequence[MeasuredStep]) -> float:
        return median(abs(predicted_bytes(step) / step.memory - 1) for step in group if step.memory)

    assumed = dict(enumerate(steps))
    groups = group_by(range(len(steps)), lambda index: (steps[index].job.model.name, steps[index].job.gpus))
    for indices in groups.values():
        group = [steps[index] for index in indices]
        recomputing = [replace(step, layout=replace(step.layout, recompute="full")) for step in group]
        is_assumed = (
            error(recomputing) < error(group)
            if any(step.memory for step in group)
            else any(predicted_bytes(step) > limit for step in group)
        )
        if is_assumed:
            assumed |= zip(indices, recomputing, strict=True)
    return list(assumed.values())


def _notes(
    table: CsvTable, steps: Sequence[MeasuredStep], machine: MachineSpec, software: Software, sequence: int
) -> Iterator[str]:
    """Describes assumptions and unused columns."""
    yield from sorted({f"recomputation: {step.layout.recompute}" for step in steps})
    yes = {True: "yes", False: "no"}
    assumed = {
        "sequence length": f"{sequence}",
        "tensor parallel": "1",
        "pipeline parallel": "1",
        "flash attention": yes[software.flash],
        "sequence parallel": yes[software.sequence_parallel],
        "zero": f"{software.zero}",
        "overlap": yes[software.overlap],
    }
    if missing := [f"{column} {value}" for column, value in assumed.items() if column not in table.columns]:
        yield f"not in the table, assumed: {', '.join(missing)}"
    too_fast = sum(
        model_flops(step.job) / step.job.gpus / step.time_s
        > (FP8_PEAK if step.job.software.precision == "fp8" else 1) * machine.peak_tflops * 1e12
        for step in steps
    )
    if too_fast:
        yield f"{too_fast} of {len(steps)} rows exceed the peak FLOP/s of {machine.name}: check --machine"
    sources = {step.job.model.name: step.job.model.source for step in steps}
    yield from (f"{name}: {source}" for name, source in sorted(sources.items()) if source)
    used, *unused = (column for column in TIME_COLUMNS if column in table.columns)
    if unused or table.unused:
        yield f"the time comes from the column {used}; not used: {', '.join([*unused, *table.unused])}"


def _measured(row: CsvRow, machine: MachineSpec, software: Software, sequence: int) -> MeasuredStep:
    time = _time_column(row)
    _refuse(row, machine)
    model = _model(row)
    tp, pp, cp = (row.count(f"{kind} parallel", 1) for kind in ("tensor", "pipeline", "context"))
    gpus = row.count("gpus", 0) or row.count("nodes") * machine.gpus_per_node
    dp = row.count("data parallel", max(1, gpus // (tp * pp * cp)))
    batch = row.count("global batch")
    software = _software(row, software)
    layout = TrainingLayout(
        tp,
        pp,
        dp,
        dp * cp if software.zero == 3 else _fsdp(row, dp * cp, cp),
        _micro_batch(row, batch, dp),
        row.count("interleaved chunks", 1),
        _recompute(row),
        cp,
        row.count("expert parallel", 1),
    )
    job = TrainingJob(model, gpus, batch, row.count("sequence length", sequence), software)
    _check(job, layout)
    time_s = row.number(time)
    if time != "iteration time":
        time_s = job.batch * job.sequence / time_s / (1 if time == "tokens/s" else gpus)
    return MeasuredStep(job, layout, time_s, row.number("memory") if row.text("memory") else 0.0, row.line)


def _time_column(row: CsvRow) -> str:
    if (time := next((column for column in TIME_COLUMNS if row.text(column)), None)) is None:
        raise InexpressibleError("the time is missing")
    if not row.text(time).strip("0."):
        raise InexpressibleError(f"{time} is rounded to 0")
    return time


def _refuse(row: CsvRow, machine: MachineSpec) -> None:
    """Raises InexpressibleError for unsupported kinds of training and for other machines."""
    if "lora" in row.text("training").lower():
        raise InexpressibleError("training of low-rank adapters is not supported")
    system = row.text("system")
    name = machine_called(system) if system else None
    if name is not None and not machine.name.startswith(name):
        raise InexpressibleError(f"{system} is not {machine.name}")


def _model(row: CsvRow) -> TransformerModel:
    if not (name := row.text("model")):
        return gpt(*(row.count(column) for column in _MODEL_SIZES))
    if (model := find_model(name) if name.endswith(".json") else model_called(name)) is None:
        raise InexpressibleError(
            f"unknown model {name[:40]}: replace it by the path of a model file, in the format of --model"
        )
    return model


def gpt(hidden: int, heads: int, layers: int) -> TransformerModel:
    """Returns a model like GPT, with an MLP of 4 x hidden features and a tied embedding."""
    if hidden % heads:
        raise InexpressibleError(f"the hidden size {hidden} is not a multiple of the {heads} attention heads")
    model = TransformerModel("", hidden, layers, heads, 4 * hidden, GPT_VOCAB, gated=False, tied=True)
    return structs.replace(model, name=f"GPT {model.elements() / 1e9:.3g} B ({layers} x {hidden})")


def _micro_batch(row: CsvRow, batch: int, dp: int) -> int:
    accumulation = row.count("gradient accumulation", 0)
    if not row.text("micro batch"):
        if not accumulation or batch % (dp * accumulation):
            raise InexpressibleError(
                f"no micro batch divides {batch} sequences over {dp} ranks and {accumulation} accumulation steps"
            )
        return batch // (dp * accumulation)
    micro = row.count("micro batch")
    if accumulation and micro * accumulation * dp != batch:
        raise InexpressibleError(
            "micro batch x gradient accumulation x data parallel is not the global batch"
        )
    return micro


def _software(row: CsvRow, software: Software) -> Software:
    changes: dict[str, Any] = {
        field: row.flag(column) for column, field in _FLAGS.items() if row.text(column)
    }
    if zero := row.text("zero"):
        if zero not in ("0", "1", "2", "3"):
            raise row.wrong(f"zero is {ascii(zero)[:20]}, expected 0 to 3")
        changes["zero"] = int(zero)
    if text := row.text("precision").lower():
        words = {*re.split(r"[^a-z0-9]+", text)}
        if words & {"fp8", "mxfp8", "float8"}:
            changes["precision"] = "fp8"
        elif not words & {"bf16", "fp16", "bfloat16", "float16"}:
            raise InexpressibleError(f"precision is {text[:20]}, expected bf16, fp16 or fp8")
    return replace(software, **changes)


def _fsdp(row: CsvRow, copies: int, cp: int) -> int:
    """Returns the number of ranks that share a copy of the weights."""
    text = row.text("fsdp")
    if text == "FULL_SHARD":
        return copies
    if text in ("", "0"):
        return 1
    shards = row.count("fsdp")
    return min(copies, shards * cp if shards < copies else shards)


def _recompute(row: CsvRow) -> Recompute:
    text = row.text("recomputation").lower()
    value = {"": "none", "true": "full", "false": "none"}.get(text, text)
    if kind := next((kind for kind in RECOMPUTE if kind == value), None):
        return kind
    raise row.wrong(f"recomputation is {ascii(text)[:40]}, expected one of none, selective, full")


def _check(job: TrainingJob, layout: TrainingLayout) -> None:
    """Raises InexpressibleError if the job and the layout are inconsistent."""
    model, stages, samples = job.model, layout.pp * layout.chunks, layout.dp * layout.micro_batch
    faults = (
        (
            job.batch % samples,
            f"the global batch {job.batch} is not a multiple of data parallelism x micro batch = {samples}",
        ),
        (
            layout.ranks != job.gpus,
            f"tensor x context x data x pipeline parallelism is {layout.ranks}, expected the {job.gpus} GPUs",
        ),
        (
            layout.tp > model.heads,
            f"tensor parallelism is {layout.tp}, expected at most the {model.heads} attention heads",
        ),
        (
            stages > model.layers + 2,
            f"pipeline parallelism x chunks is {stages}, expected at most the {model.layers} layers",
        ),
        (
            layout.ep > model.experts,
            f"expert parallelism is {layout.ep}, expected at most the {model.experts} experts",
        ),
        (
            job.sequence % layout.cp,
            f"the sequence of {job.sequence} tokens is not a multiple of context parallelism {layout.cp}",
        ),
    )
    for is_faulty, reason in faults:
        if is_faulty:
            raise InexpressibleError(reason)
