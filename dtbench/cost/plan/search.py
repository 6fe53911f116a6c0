"""All layouts of a job that fit into memory, and the fastest ones."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from dtbench.cost.plan.ground import extrapolation, interval
from dtbench.cost.plan.links import Links
from dtbench.cost.plan.machines import MachineSpec
from dtbench.cost.plan.memory import MemoryUse, memory_of
from dtbench.cost.plan.models import TransformerModel
from dtbench.cost.plan.step import StepTime, predict_step
from dtbench.cost.plan.training import RECOMPUTE, TrainingJob, TrainingLayout
from dtbench.errors import UsageError
from dtbench.text.units import format_bytes

BEST = 10
MAX_MICRO_BATCH = 64
MAX_CHUNKS = 8
# Of a GPU's memory: its context, the collectives' buffers and what the allocator cannot use. An assumption.
RESERVED_BYTES = 4 * 2**30
# Of a step's time, as `StepTime` names them, and in words.
PARTS = {
    "compute": "",
    "tensor": "tensor-parallel collectives",
    "pipeline": "sends between stages",
    "data": "gradients and weights over dp",
    "bubble": "the pipeline's bubble",
    "once": "the optimizer",
}


class LayoutRow(Struct, frozen=True, kw_only=True):
    """A way to shard. Times in seconds, memory in bytes; parts_s and memory_bytes: name -> share."""

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
    """What `dtbench plan --json` prints. best: the fastest first, one per layout of the ranks. considered, fitting:
    how many layouts."""

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
    """The best layouts of `job` over its GPUs.

    limit_bytes: memory of one GPU that the training may use.

    Raises:
        UsageError: no layout uses all GPUs with this batch, or none fits into memory.
    """
    memories = {layout: memory_of(job, layout, machine.fitted) for layout in all_layouts(job, machine)}
    if not memories:
        raise UsageError(
            f"no layout shares a batch of {job.batch} sequences over all {job.gpus} GPUs: give --batch as a multiple "
            "of the GPUs, or of a large part of them"
        )
    fitting = [layout for layout, memory in memories.items() if memory.total <= limit_bytes]
    if not fitting:
        layout, needed = min(memories.items(), key=lambda item: item[1].total)
        raise UsageError(
            f"{job.model.name} does not fit on {job.gpus} GPUs with {format_bytes(limit_bytes)} each: the smallest "
            f"layout ({layout.words()}) needs {format_bytes(needed.total)}; give more GPUs or more memory"
        )
    steps = {layout: predict_step(job, layout, machine, links) for layout in fitting}
    # Of equally fast layouts that which leaves more memory.
    ranked = sorted(fitting, key=lambda layout: (steps[layout].total_s, memories[layout].total))
    # The best of each way to split the ranks: ten micro batches of one split would say little.
    best: dict[tuple[int, int, int, int], TrainingLayout] = {}
    for layout in ranked:
        best.setdefault((layout.tp, layout.pp, layout.dp, layout.fsdp), layout)
    return PlanFile(
        title=f"{job.model.name} on {job.gpus} GPUs of {machine.name}, {job.batch} sequences of {job.sequence} "
        "tokens a step",
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
            for layout in list(best.values())[:BEST]
        ),
        assumptions=tuple(_assumptions(job, machine)),
    )


def _assumptions(job: TrainingJob, machine: MachineSpec) -> Iterator[str]:
    yield f"{machine.name}: {machine.source}; constants fitted on {machine.fitted_on}"
    if beyond := extrapolation(job, machine):
        yield beyond
    if machine.stands_in:
        yield f"its collectives are those of {machine.stands_in}"
    if not machine.error:
        yield f"no step was measured on {machine.name}: how far off this is, is not known"
    yield (
        "bfloat16, flash attention as fast as other matrix products, sequence parallelism with tensor parallelism, an "
        "optimizer sharded over dp, and data-parallel collectives that run behind computation"
    )
    yield f"{RESERVED_BYTES >> 30} GiB of each GPU are left to its context, buffers and fragmentation"
    if job.model.experts > 1:
        yield "experts are cut over tp as a dense MLP is, so no tokens are exchanged"


def all_layouts(job: TrainingJob, machine: MachineSpec) -> Iterator[TrainingLayout]:
    """Every layout over exactly `job.gpus` ranks; tensor parallelism stays within a node."""
    model = job.model
    for tp in _divisors(job.gpus, machine.gpus_per_node):
        if model.heads % tp or model.ffn % tp or max(tp, model.kv_heads) % min(tp, model.kv_heads):
            continue
        for pp in _divisors(job.gpus // tp, model.layers):
            # Even stages, also with embedding and head as a layer each: 126 layers on 16 stages.
            if job.gpus % (tp * pp) or (model.layers % pp and (model.layers + 2) % pp):
                continue
            dp = job.gpus // (tp * pp)
            if job.batch % dp == 0:
                yield from _of_ranks(job, machine, tp, pp, dp)


def _of_ranks(job: TrainingJob, machine: MachineSpec, tp: int, pp: int, dp: int) -> Iterator[TrainingLayout]:
    node = machine.gpus_per_node // tp
    shards = sorted({1, dp, *([node] if 1 < node < dp and dp % node == 0 else [])})
    per_rank = job.batch // dp
    recomputes = [one for one in RECOMPUTE if not (one == "selective" and job.software.flash)]
    for exponent in range(MAX_MICRO_BATCH.bit_length()):
        micro = 2**exponent
        if per_rank % micro:
            return
        all_chunks = _chunks(job.model.layers, pp, per_rank // micro)
        for chunks, fsdp, recompute in itertools.product(all_chunks, shards, recomputes):
            yield TrainingLayout(tp, pp, dp, fsdp, micro, chunks, recompute)


def _chunks(layers: int, pp: int, micro_batches: int) -> list[int]:
    """An interleaved schedule runs its micro batches in groups of pp (arXiv 2104.04473, section 2.2)."""
    if pp == 1 or micro_batches % pp or layers % pp:
        return [1]
    return [one for one in range(1, MAX_CHUNKS + 1) if layers // pp % one == 0]


def _divisors(number: int, largest: int) -> list[int]:
    return [one for one in range(1, min(number, largest) + 1) if number % one == 0]


def _row(
    job: TrainingJob,
    machine: MachineSpec,
    layout: TrainingLayout,
    step: StepTime,
    memory: MemoryUse,
    limit_bytes: float,
) -> LayoutRow:
    ends = interval(job, layout, machine)
    parts = {name: getattr(step, f"{name}_s") for name in PARTS}
    held = dataclasses.asdict(memory)
    lost = [(s / step.total_s, PARTS[name]) for name, s in parts.items() if PARTS[name]]
    waits = [f"{share:.0%} {what}" for share, what in sorted(lost, reverse=True)[:2] if share >= 0.005]
    return LayoutRow(
        words=layout.words(),
        layout=dataclasses.asdict(layout),
        step_s=step.total_s,
        low_s=None if ends is None else step.total_s * ends[0],
        high_s=None if ends is None else step.total_s * ends[1],
        mfu=step.mfu(machine, job.gpus),
        exposed_s=step.exposed_s,
        parts_s=parts,
        memory_bytes=held,
        why=f"{', '.join(waits) or 'nothing waits'}; most memory for {max(held, key=held.__getitem__)}, "
        f"{format_bytes(limit_bytes - memory.total)} spare",
    )
