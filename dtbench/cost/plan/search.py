"""Searches for the fastest layouts of a training job that fit into memory."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from dtbench.cost.plan.machines import Links, MachineSpec
from dtbench.cost.plan.prediction_intervals import extrapolation, interval
from dtbench.cost.plan.step import MemoryUse, StepTime, memory_of, predict_step
from dtbench.cost.plan.training import RECOMPUTE, TrainingJob, TrainingLayout, TransformerModel
from dtbench.errors import UsageError
from dtbench.text.units import format_bytes

MAX_SHOWN = 10
MAX_MICRO_BATCH = 64
MAX_CHUNKS = 8
# Assumed memory of a GPU for its context, the collectives' buffers and the allocator's fragmentation.
RESERVED_BYTES = 4 * 2**30
# Components of `StepTime` -> description of the lost time.
COMPONENTS = {
    "compute": "",
    "tensor": "tensor-parallel collectives",
    "pipeline": "sends between stages",
    "data": "gradients and weights over dp",
    "bubble": "the pipeline's bubble",
    "once": "the optimizer",
}


class LayoutRow(Struct, frozen=True, kw_only=True):
    """A layout with its predicted step time.

    Attributes:
        words: description of the layout.
        layout: field of `TrainingLayout` -> value.
        step_s: predicted step time, seconds.
        low_s: lower end of its 90 % interval; None if the accuracy is unknown.
        high_s: upper end of the interval.
        mfu: model FLOPs utilization.
        exposed_s: exposed communication, seconds.
        parts_s: component of the step time -> seconds.
        memory_bytes: purpose -> bytes per GPU.
        why: the largest losses of time, the largest use of memory, and the spare memory.
    """

    words: str
    layout: dict[str, int | str]
    step_s: float
    low_s: float | None
    high_s: float | None
    mfu: float
    exposed_s: float
    parts_s: dict[str, float]
    memory_bytes: dict[str, float]
    why: str


class PlanFile(Struct, frozen=True, kw_only=True):
    """The output of `dtbench plan --json`.

    Attributes:
        parameters: number of the model's parameters.
        global_batch: sequences per step.
        sequence: tokens per sequence.
        limit_bytes: memory per GPU that the training may use.
        considered: number of layouts that were evaluated.
        fitting: number of layouts that fit into memory.
        best: the fastest layout for each split of the ranks, fastest first.
    """

    kind: Literal["plan"] = "plan"
    title: str
    model: TransformerModel
    parameters: int
    machine: str
    gpus: int
    global_batch: int
    sequence: int
    limit_bytes: float
    considered: int
    fitting: int
    best: tuple[LayoutRow, ...]
    assumptions: tuple[str, ...]


def search_layouts(job: TrainingJob, machine: MachineSpec, links: Links, limit_bytes: float) -> PlanFile:
    """Returns the fastest layouts of a job.

    Args:
        limit_bytes: memory per GPU that the training may use.

    Raises:
        UsageError: no layout uses all GPUs with this batch, or none fits into memory.
    """
    memories = {layout: memory_of(job, layout, machine.fitted) for layout in all_layouts(job, machine)}
    if not memories:
        raise UsageError(
            f"no layout divides a batch of {job.batch} sequences over {job.gpus} GPUs: expected --batch to be a "
            "multiple of the number of GPUs, or of a large divisor of it"
        )
    if not (fitting := [layout for layout, memory in memories.items() if memory.total <= limit_bytes]):
        layout, memory = min(memories.items(), key=lambda item: item[1].total)
        raise UsageError(
            f"{job.model.name} does not fit on {job.gpus} GPUs with {format_bytes(limit_bytes)} each: the smallest "
            f"layout ({layout.words()}) needs {format_bytes(memory.total)}; give more GPUs or more memory"
        )
    steps = {layout: predict_step(job, layout, machine, links) for layout in fitting}
    # Only the best layout of each split of the ranks, so that the list does not vary just the micro batch.
    best: dict[tuple[int, int, int, int], TrainingLayout] = {}
    # Equally fast layouts are sorted by memory.
    for layout in sorted(fitting, key=lambda layout: (steps[layout].total_s, memories[layout].total)):
        best.setdefault((layout.tp, layout.pp, layout.dp, layout.fsdp), layout)
    return PlanFile(
        title=f"{job.model.name} on {job.gpus} GPUs of {machine.name}, {job.batch} sequences of {job.sequence} "
        "tokens per step",
        model=job.model,
        parameters=job.model.elements(),
        machine=machine.name,
        gpus=job.gpus,
        global_batch=job.batch,
        sequence=job.sequence,
        limit_bytes=limit_bytes,
        considered=len(memories),
        fitting=len(fitting),
        best=tuple(
            _row(job, machine, layout, steps[layout], memories[layout], limit_bytes)
            for layout in list(best.values())[:MAX_SHOWN]
        ),
        assumptions=tuple(_assumptions(job, machine)),
    )


def _assumptions(job: TrainingJob, machine: MachineSpec) -> Iterator[str]:
    yield f"{machine.name}: {machine.source}; constants fitted to {machine.fitted_on}"
    if note := extrapolation(job, machine):
        yield note
    if machine.stands_in:
        yield f"collectives were measured on {machine.stands_in} instead"
    if not machine.error:
        yield f"no step was measured on {machine.name}, so the accuracy is unknown"
    yield (
        "bfloat16, flash attention as fast as other matrix products, sequence parallelism with tensor parallelism, an "
        "optimizer sharded over dp, and data-parallel collectives that overlap with computation"
    )
    yield f"{RESERVED_BYTES >> 30} GiB per GPU are reserved for its context, buffers and fragmentation"
    if job.model.experts > 1:
        yield "experts are sharded over tp like a dense MLP, without expert parallelism"


def all_layouts(job: TrainingJob, machine: MachineSpec) -> Iterator[TrainingLayout]:
    """Yields every layout with exactly `job.gpus` ranks and tensor parallelism within a node."""
    model = job.model
    for tp in _divisors(job.gpus, machine.gpus_per_node):
        if model.heads % tp or model.ffn % tp or max(tp, model.kv_heads) % min(tp, model.kv_heads):
            continue
        for pp in _divisors(job.gpus // tp, model.layers):
            # Stages must have equal numbers of layers, or do so if embedding and head count as a layer each, such as
            # 126 layers on 16 stages.
            if job.gpus % (tp * pp) or (model.layers % pp and (model.layers + 2) % pp):
                continue
            dp = job.gpus // (tp * pp)
            if job.batch % dp == 0:
                yield from _layouts_of_split(job, machine, tp, pp, dp)


def _layouts_of_split(
    job: TrainingJob, machine: MachineSpec, tp: int, pp: int, dp: int
) -> Iterator[TrainingLayout]:
    node = machine.gpus_per_node // tp
    shards = sorted({1, dp, *([node] if 1 < node < dp and dp % node == 0 else [])})
    per_rank = job.batch // dp
    recomputes = [kind for kind in RECOMPUTE if not (kind == "selective" and job.software.flash)]
    for exponent in range(MAX_MICRO_BATCH.bit_length()):
        micro = 2**exponent
        if per_rank % micro:
            return
        all_chunks = _chunks(job.model.layers, pp, per_rank // micro)
        for chunks, fsdp, recompute in itertools.product(all_chunks, shards, recomputes):
            yield TrainingLayout(tp, pp, dp, fsdp, micro, chunks, recompute)


def _chunks(layers: int, pp: int, micro_batches: int) -> list[int]:
    """Returns the possible numbers of chunks per rank.

    An interleaved schedule needs a multiple of pp micro batches (arXiv 2104.04473, section 2.2).
    """
    if pp == 1 or micro_batches % pp or layers % pp:
        return [1]
    return _divisors(layers // pp, MAX_CHUNKS)


def _divisors(number: int, largest: int) -> list[int]:
    return [divisor for divisor in range(1, min(number, largest) + 1) if number % divisor == 0]


def _row(
    job: TrainingJob,
    machine: MachineSpec,
    layout: TrainingLayout,
    step: StepTime,
    memory: MemoryUse,
    limit_bytes: float,
) -> LayoutRow:
    bounds = interval(job, layout, machine)
    components = {name: getattr(step, f"{name}_s") for name in COMPONENTS}
    memory_bytes = dataclasses.asdict(memory)
    losses = [
        (time_s / step.total_s, label) for name, time_s in components.items() if (label := COMPONENTS[name])
    ]
    largest = [f"{share:.0%} {label}" for share, label in sorted(losses, reverse=True)[:2] if share >= 0.005]
    return LayoutRow(
        words=layout.words(),
        layout=dataclasses.asdict(layout),
        step_s=step.total_s,
        low_s=None if bounds is None else step.total_s * bounds[0],
        high_s=None if bounds is None else step.total_s * bounds[1],
        mfu=step.mfu(machine, job.gpus),
        exposed_s=step.exposed_s,
        parts_s=components,
        memory_bytes=memory_bytes,
        why=f"{', '.join(largest) or 'no waiting'}; most memory for {max(memory_bytes, key=memory_bytes.__getitem__)}, "
        f"{format_bytes(limit_bytes - memory.total)} spare",
    )
