"""All layouts of a job that fit into memory, the fastest ones, and what would change the answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import structs

from dtbench.cost.plan.job import RECOMPUTE, Job, Layout
from dtbench.cost.plan.machines import FasterNetwork, Links, Machine
from dtbench.cost.plan.memory import Memory, memory_of
from dtbench.cost.plan.step import Step, predict_step
from dtbench.suite.errors import UsageError
from dtbench.text.units import format_bytes, format_ratio, format_seconds

BEST = 10
MAX_MICRO_BATCH = 64
MAX_CHUNKS = 8
# Of a GPU's memory: its context, the collectives' buffers and what the allocator cannot use. An assumption.
RESERVED_BYTES = 4 * 2**30
# A layout that wins by less than this in another setting is no other answer.
SAME_WITHIN = 1.01


@dataclass(frozen=True)
class Candidate:
    """A layout that fits."""

    layout: Layout
    step: Step
    memory: Memory


@dataclass(frozen=True)
class Plan:
    """best: the fastest first, one per layout of the ranks. considered, fitting: how many were priced."""

    job: Job
    machine: Machine
    limit_bytes: float
    best: tuple[Candidate, ...]
    considered: int
    fitting: int
    changes: tuple[str, ...]


def plan(job: Job, machine: Machine, links: Links, limit_bytes: float) -> Plan:
    """The best layouts of `job` over its GPUs.

    limit_bytes: memory of one GPU that the training may use.

    Raises:
        UsageError: no layout uses all GPUs with this batch, or none fits into memory.
    """
    layouts = [(layout, memory_of(job, layout, machine.fitted)) for layout in all_layouts(job, machine)]
    if not layouts:
        raise UsageError(
            f"no layout shares a batch of {job.batch} sequences over all {job.gpus} GPUs: give --batch as a multiple "
            "of the GPUs, or of a large part of them"
        )
    fitting = [found for found in layouts if found[1].total <= limit_bytes]
    if not fitting:
        layout, needed = min(layouts, key=lambda found: found[1].total)
        raise UsageError(
            f"{job.model.name} does not fit on {job.gpus} GPUs with {format_bytes(limit_bytes)} each: the smallest "
            f"layout ({layout.words()}) needs {format_bytes(needed.total)}; give more GPUs or more memory"
        )
    ranked = _ranked(job, fitting, machine, links)
    return Plan(
        job,
        machine,
        limit_bytes,
        tuple(_distinct(ranked)),
        len(layouts),
        len(fitting),
        tuple(_changes(job, layouts, ranked, machine, links, limit_bytes)),
    )


def all_layouts(job: Job, machine: Machine) -> Iterator[Layout]:
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


def _of_ranks(job: Job, machine: Machine, tp: int, pp: int, dp: int) -> Iterator[Layout]:
    node = machine.gpus_per_node // tp
    shards = sorted({1, dp, *([node] if 1 < node < dp and dp % node == 0 else [])})
    per_rank = job.batch // dp
    recomputes = [one for one in RECOMPUTE if not (one == "selective" and job.software.flash)]
    for exponent in range(MAX_MICRO_BATCH.bit_length()):
        micro = 2**exponent
        if per_rank % micro:
            return
        for chunks in _chunks(job.model.layers, pp, per_rank // micro):
            for fsdp in shards:
                for recompute in recomputes:
                    yield Layout(tp, pp, dp, fsdp, micro, chunks, recompute)


def _chunks(layers: int, pp: int, micro_batches: int) -> list[int]:
    """An interleaved schedule runs its micro batches in groups of pp (arXiv 2104.04473, section 2.2)."""
    if pp == 1 or micro_batches % pp or layers % pp:
        return [1]
    return [one for one in range(1, MAX_CHUNKS + 1) if layers // pp % one == 0]


def _divisors(number: int, largest: int) -> list[int]:
    return [one for one in range(1, min(number, largest) + 1) if number % one == 0]


def _ranked(
    job: Job, layouts: Sequence[tuple[Layout, Memory]], machine: Machine, links: Links
) -> list[Candidate]:
    found = [Candidate(layout, predict_step(job, layout, machine, links), held) for layout, held in layouts]
    # Of equally fast ones that which leaves more memory.
    return sorted(found, key=lambda one: (one.step.total_s, one.memory.total))


def _distinct(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The best of each way to split the ranks: ten micro batches of one split would say little."""
    best: dict[tuple[int, int, int, int], Candidate] = {}
    for one in ranked:
        best.setdefault((one.layout.tp, one.layout.pp, one.layout.dp, one.layout.fsdp), one)
    return list(best.values())[:BEST]


def _changes(
    job: Job,
    layouts: Sequence[tuple[Layout, Memory]],
    ranked: Sequence[Candidate],
    machine: Machine,
    links: Links,
    limit_bytes: float,
) -> Iterator[str]:
    """What the best layout would be on another machine, a line each."""
    now = ranked[0].layout
    fitting = [(one.layout, one.memory) for one in ranked]
    less, more = ([one for one in layouts if one[1].total <= part * limit_bytes] for part in (0.75, 1.25))
    others = [
        ("half the network", fitting, machine, FasterNetwork(links, 0.5, machine.gpus_per_node)),
        ("twice the network", fitting, machine, FasterNetwork(links, 2.0, machine.gpus_per_node)),
        ("matrix products 20 % slower", fitting, _slower(machine, 0.8), links),
        ("a quarter less memory", less, machine, links),
        ("a quarter more memory", more, machine, links),
    ]
    for what, among, on, over in others:
        if not among:
            yield f"{what}: nothing fits"
            continue
        same = predict_step(job, now, on, over).total_s
        layout, step = min(
            ((layout, predict_step(job, layout, on, over)) for layout, _ in among),
            key=lambda found: found[1].total_s,
        )
        kept = any(layout == now for layout, _ in among)
        if over is not links and same == ranked[0].step.total_s:
            yield f"{what}: the same, as no time of the step is priced between nodes of {machine.gpus_per_node} GPUs"
        elif layout == now or (kept and same < step.total_s * SAME_WITHIN):
            yield f"{what}: the same layout, {format_seconds(same)}"
        else:
            against = f", {format_ratio(same / step.total_s)} faster than the layout above" if kept else ""
            yield f"{what}: {layout.words()}, {format_seconds(step.total_s)}{against}"


def _slower(machine: Machine, factor: float) -> Machine:
    fitted = machine.fitted
    return structs.replace(machine, fitted=structs.replace(fitted, matmul=fitted.matmul * factor))


def explain(one: Candidate, limit_bytes: float) -> str:
    """What the step's time and the memory go to, in a line."""
    step, memory = one.step, one.memory
    parts = {
        "the pipeline's bubble": step.bubble_s,
        "tensor-parallel collectives": step.tensor_s,
        "sends between stages": step.pipeline_s,
        "gradients and weights over dp": step.data_s,
        "the optimizer": step.once_s,
    }
    lost = [(share, what) for what, s in parts.items() if (share := s / step.total_s) >= 0.005]
    waits = ", ".join(f"{share:.0%} {what}" for share, what in sorted(lost, reverse=True)[:2])
    largest = max(
        ("weights", "gradients", "optimizer", "activations"), key=lambda name: getattr(memory, name)
    )
    spare = format_bytes(limit_bytes - memory.total)
    return f"{waits or 'nothing waits'}; most memory for {largest}, {spare} spare"
