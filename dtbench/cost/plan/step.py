"""The time of one training step: matrix products, memory-bound operations, the host, collectives, the pipeline.

Per layer and micro batch a GPU is busy with matrix products at a fitted share of its peak, with memory-bound
operations whose bytes are counted here at a fitted share of its memory bandwidth, with what does not shrink, and with
the collectives of the layer; a layer takes at least what the host needs to start it. Micro batches then pass through
the pipeline (1F1B, Narayanan et al. 2021, arXiv 2104.04473, section 2.2) at the pace of its slowest stage, and the
step ends with what the reduction of the gradients does not hide, and with the optimizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from dtbench.cost.plan.links import Links
from dtbench.cost.plan.machines import MachineSpec
from dtbench.cost.plan.models import TransformerModel
from dtbench.cost.plan.training import TrainingJob, TrainingLayout, stage_elements, stage_layers

ITEM = 2  # bytes of an element in bfloat16 or float16
BLOCKS = 2  # of a layer: attention and MLP

# Elements that memory-bound operations read and write per token and layer, forward and backward (twice the forward).
# Not cut over tp: two layer norms (2 each forward), two biases with dropout and residual (3.5 each): 11, times 3.
NOT_CUT = 33
# Cut over tp, per element of the attention's width: biases and copies of query, key and value (6) and of the
# context (2); of the MLP's: bias and activation (2), gated also the product with the gate (3). Times 3.
ATTENTION, MLP, GATED_MLP = 24, 6, 9
# Per element of the tokens that go to experts: put into their order and back (2 each forward), weighted. Times 3.
PERMUTED = 15
# Per score of an attention without flash kernels: mask, softmax and dropout, 4.5 forward and 6 backward.
SCORES = 10.5
# Adam: reads weight, both moments (4 bytes each) and gradient, writes the three and the weight in 2 bytes.
OPTIMIZER_BYTES = 26


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, and where they go; the parts add up to `total_s`.

    compute_s: of the layers and the head on the slowest stage, on a rank that never waits. tensor_s, pipeline_s,
    data_s: communication that computation does not hide; tensor_s is that within a layer, over tp, cp and ep.
    bubble_s: waiting for the first and last micro batches.
    """

    compute_s: float
    tensor_s: float
    pipeline_s: float
    data_s: float
    bubble_s: float
    once_s: float
    model_flops: float

    @property
    def total_s(self) -> float:
        return self.compute_s + self.tensor_s + self.pipeline_s + self.data_s + self.bubble_s + self.once_s

    @property
    def exposed_s(self) -> float:
        """Communication that is waited for."""
        return self.tensor_s + self.pipeline_s + self.data_s

    def mfu(self, machine: MachineSpec, gpus: int) -> float:
        """Model FLOPs utilization: without what is computed again (Chowdhery et al. 2022, arXiv 2204.02311)."""
        return self.model_flops / (self.total_s * gpus * machine.peak_tflops * 1e12)


@functools.lru_cache(maxsize=64)
def _matmul_flops(model: TransformerModel, sequence: int) -> tuple[float, float]:
    """Forward, per token and layer: (of the weights, of the attention)."""
    width = model.heads * model.head_dim
    attention = 2 * model.hidden * (2 * width + 2 * model.kv_heads * model.head_dim)
    mlp = 2 * (3 if model.gated else 2) * model.hidden * model.ffn * model.experts_per_token
    return attention + mlp, 4 * sequence * width


def model_flops(job: TrainingJob) -> float:
    """Floating point operations of a step, forward and backward, nothing computed twice."""
    weights, attention = _matmul_flops(job.model, job.sequence)
    head = 2 * job.model.hidden * job.model.vocab
    return 3 * job.batch * job.sequence * (job.model.layers * (weights + attention) + head)


def predict_step(job: TrainingJob, layout: TrainingLayout, machine: MachineSpec, links: Links) -> StepTime:
    layer_s, exposed_s = _layer(job, layout, machine, links)
    counts = stage_layers(job.model, layout.pp, machine.fitted.stages_by_cost)
    count = layout.micro_batches(job.batch)
    head = _head(job, layout, machine)
    sent = 0.0
    if layout.pp > 1:
        size = _tokens(job, layout) * job.model.hidden * ITEM
        sent = 2 * layout.chunks * links.send(size, layout.tp, layout.tp * layout.copies)
    one = layer_s + exposed_s
    # Of the stages either one with most layers is the slowest, or the last one, which has the head.
    slowest = max(((max(counts), 0.0), (counts[-1], head)), key=lambda stage: stage[0] * one + stage[1])
    busy = slowest[0] * layer_s + slowest[1]
    others = job.model.layers * one + head - (slowest[0] * one + slowest[1])
    return StepTime(
        compute_s=count * busy,
        tensor_s=count * slowest[0] * exposed_s,
        pipeline_s=(count + layout.pp - 2) * sent,
        data_s=_data_parallel(job, layout, machine, links, busy),
        bubble_s=others / layout.chunks,
        once_s=machine.fitted.step_us * 1e-6 + _optimizer(job, layout, machine),
        model_flops=model_flops(job),
    )


def _tokens(job: TrainingJob, layout: TrainingLayout) -> int:
    """Of one micro batch on one rank."""
    return layout.micro_batch * job.sequence // layout.cp


def _layer(
    job: TrainingJob, layout: TrainingLayout, machine: MachineSpec, links: Links
) -> tuple[float, float]:
    """Seconds of one layer and micro batch, forward and backward: busy without collectives, at least the host's; and
    exposed collectives on top."""
    model, software, fitted = job.model, job.software, machine.fitted
    tokens = _tokens(job, layout)
    weights, attention = _matmul_flops(model, job.sequence)
    if model.experts > 1:
        experts = 2 * (3 if model.gated else 2) * model.hidden * model.ffn * model.experts_per_token
        weights += experts * (1 / fitted.grouped - 1)
    # Passes: one forward, two backward; a flash kernel computes the scores once more in its backward pass.
    again = 1 if layout.recompute == "full" else 0
    scores_again = again + (0.5 if software.flash else layout.recompute == "selective")
    forward = (
        tokens * weights / layout.tp / machine.flops / (fitted.fp8 if software.precision == "fp8" else 1)
    )
    scores = tokens * attention / layout.tp / machine.flops / (fitted.attention if software.flash else 1)
    matmul = (3 + again) * forward + (3 + scores_again) * scores
    more = (3 + again) / 3
    moved = ITEM * tokens * _memory_bound(job, layout)
    device = matmul + more * (moved / machine.bytes_per_s + fitted.layer_us * 1e-6)
    host = more * (fitted.host_us if layout.tp == 1 else fitted.host_tp_us) * 1e-6
    exposed, waits = _in_layer(job, layout, links, forward, scores)
    if layout.tp > 1 and layout.pp > 1 and job.gpus > machine.gpus_per_node:
        host += more * fitted.wait_us * 1e-6 * layout.tp + waits
    busy = max(device, host)
    return busy, max(device + exposed, host) - busy


def _in_layer(
    job: TrainingJob, layout: TrainingLayout, links: Links, forward: float, scores: float
) -> tuple[float, float]:
    """Seconds of a layer's collectives, forward and backward, that its computation does not hide; and of these what
    an empty message takes. forward, scores: seconds of its matrix products and of its attention, forward."""
    model, tp, tokens = job.model, layout.tp, _tokens(job, layout)
    again = 1 if layout.recompute == "full" else 0
    exposed = waits = 0.0
    if tp > 1:
        size = tokens * model.hidden * ITEM
        # Backward the collectives run beside the block's weight gradients.
        name = "all_gather" if job.software.sequence_parallel else "all_reduce"
        one, empty = (links.collective(name, size_bytes, tp, 1) for size_bytes in (size, 1))
        # With sequence parallelism a gather and a scatter per block; the backward pass gathers once more.
        ahead, back = (2 * (1 + again), 3) if job.software.sequence_parallel else (1 + again, 1)
        exposed += BLOCKS * (ahead * one + max(0.0, back * one - forward / BLOCKS))
        waits += BLOCKS * (ahead + back) * empty
    if layout.cp > 1:
        # Keys and values of the whole sequence pass each rank, and their gradients back, beside the attention.
        kv_bytes = 2 * model.kv_heads * model.head_dim * ITEM * tokens * layout.cp / tp
        one = links.collective("all_gather", kv_bytes, layout.cp, tp)
        exposed += (1 + again) * max(0.0, one - scores) + max(0.0, 2 * one - 2.5 * scores)
    if layout.ep > 1:
        # To the experts and back, in both passes; every expert is chosen as often as any other.
        routed_bytes = tokens * model.experts_per_token * model.hidden * ITEM / tp
        exposed += (4 + 2 * again) * links.collective("all_to_all", routed_bytes, layout.ep, 1)
    return exposed, waits


def _memory_bound(job: TrainingJob, layout: TrainingLayout) -> float:
    """Elements read and written per token and layer, forward and backward."""
    model, software = job.model, job.software
    cut: float = ATTENTION * model.heads * model.head_dim
    cut += (GATED_MLP if model.gated else MLP) * model.ffn * model.experts_per_token
    if model.experts > 1:
        cut += PERMUTED * model.hidden * model.experts_per_token
    if not software.flash:
        cut += SCORES * (1 + (layout.recompute == "selective") / 3) * model.heads * job.sequence
    whole = NOT_CUT * model.hidden
    return (whole + cut) / layout.tp if software.sequence_parallel else whole + cut / layout.tp


def _head(job: TrainingJob, layout: TrainingLayout, machine: MachineSpec) -> float:
    """Seconds of the head and the loss per micro batch, which the last stage computes."""
    logits = _tokens(job, layout) * job.model.vocab / layout.tp
    return 6 * logits * job.model.hidden / machine.flops + (
        machine.fitted.logit_bytes * logits / machine.bytes_per_s
    )


def _data_parallel(
    job: TrainingJob, layout: TrainingLayout, machine: MachineSpec, links: Links, busy_s: float
) -> float:
    """Seconds of reduced gradients, and of gathered weights, that are waited for. busy_s: of one micro batch."""
    if layout.copies == 1:
        return 0.0
    counts = stage_layers(job.model, layout.pp, machine.fitted.stages_by_cost)
    layers = max(counts)
    elements = stage_elements(job.model, layout, counts)
    experts = layers * job.model.mlp_elements(layout.tp, layout.ep) if layout.ep > 1 else 0
    # Elements, ranks that hold them, and ranks between neighbours of these. Experts have fewer copies.
    parts = [(elements - experts, layout.copies, layout.tp)]
    if experts:
        parts.append((experts, layout.copies * layout.tp // layout.ep, layout.ep))
    gather = functools.partial(links.collective, "all_gather")
    hidden_by = busy_s if job.software.overlap else 0.0
    total = 0.0
    for held, copies, inner in parts:
        # A collective per layer: FSDP has one, DDP's buckets and ZeRO's tensors are of that order.
        gradients, weights = (held * item / layers for item in (machine.fitted.gradient_bytes, ITEM))
        shards = min(layout.fsdp, copies)
        if shards > 1:
            once, scattered = gather(weights, shards, inner), gather(gradients, shards, inner)
            if layout.pp > 1:  # gathered for all micro batches, and summed before they are scattered
                total += once + scattered
            else:  # both passes of every micro batch gather, beside the computation
                one = 2 * once + scattered
                total += layout.micro_batches(job.batch) * max(layers * one - hidden_by, one)
        replicas = copies // shards
        if replicas > 1:
            across = inner * shards
            if job.software.zero and shards == 1:
                one = gather(gradients, replicas, across) + gather(weights, replicas, across)
            else:
                one = links.collective("all_reduce", gradients / shards, replicas, across)
            # Two thirds of a micro batch are the last backward pass.
            total += max(layers * one - 2 / 3 * hidden_by, one)
    return total


def _optimizer(job: TrainingJob, layout: TrainingLayout, machine: MachineSpec) -> float:
    shards = layout.copies if job.software.zero else layout.fsdp
    moved = (OPTIMIZER_BYTES + machine.fitted.gradient_bytes) * stage_elements(job.model, layout)
    return moved / shards / machine.bytes_per_s


class _Sizes:
    """In place of links: a collective's price is its size, of those over one dim; nothing of others."""

    def __init__(self, over: Callable[[str, int], bool]) -> None:
        self._over = over

    def collective(self, name: str, size_bytes: float, ranks: int, inner: int) -> float:
        return size_bytes if self._over(name, inner) else 0.0

    def send(self, size_bytes: float, tp: int, inner: int) -> float:
        return 0.0


def bytes_per_step(job: TrainingJob, layout: TrainingLayout, machine: MachineSpec) -> dict[str, float]:
    """What a rank's collectives carry in a step over tp, cp, ep, fsdp and dp (copies of what fsdp shards), where the
    layout has them: sizes as nccl-tests counts them. Where nothing is hidden, what a step waits for is all there is.

    Raises:
        ValueError: of a pipeline, whose stages differ.
    """
    if layout.pp > 1:
        raise ValueError(f"pp={layout.pp}: what stages need differs, expected pp=1")
    layers = job.model.layers * layout.micro_batches(job.batch)

    def in_layers(dim: str) -> float:
        def over(name: str, inner: int) -> bool:
            return dim == ("ep" if name == "all_to_all" else "tp" if layout.tp > 1 and inner == 1 else "cp")

        return layers * _in_layer(job, layout, _Sizes(over), 0.0, 0.0)[0]

    def of_data(dim: str) -> float:
        def over(_name: str, inner: int) -> bool:
            return dim == ("fsdp" if layout.fsdp > 1 and inner in (layout.tp, layout.ep) else "dp")

        return _data_parallel(job, layout, machine, _Sizes(over), 0.0)

    needed = {dim: in_layers(dim) for dim in ("tp", "cp", "ep")} | {
        dim: of_data(dim) for dim in ("fsdp", "dp")
    }
    return {dim: size for dim, size in needed.items() if size}
