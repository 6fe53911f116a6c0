"""The time of one training step: matrix products, memory-bound operations, the host, collectives, the pipeline.

Per layer and micro batch a GPU is busy with matrix products at a fitted share of its peak, with memory-bound
operations whose bytes are counted here at a fitted share of its memory bandwidth, with what does not shrink, and with
the tensor-parallel collectives; a layer takes at least what the host needs to start it. Micro batches then pass
through the pipeline (1F1B, Narayanan et al. 2021, arXiv 2104.04473, section 2.2), and the step ends with what the
reduction of the gradients does not hide, and with the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from dtbench.cost.plan.job import Job, Layout, stage_elements
from dtbench.cost.plan.machines import Links, Machine
from dtbench.cost.plan.models import Model
from dtbench.cost.plan.shardings import BLOCKS, DDP, FSDP, activation_bytes, in_all_reduces

FSDP_COST, DDP_COST = in_all_reduces(FSDP), in_all_reduces(DDP)
ITEM = 2  # bytes of an element in bfloat16 or float16

# Elements that memory-bound operations read and write per token and layer, forward and backward (twice the forward).
# Not cut over tp: two layer norms (2 each forward), two biases with dropout and residual (3.5 each): 11, times 3.
NOT_CUT = 33
# Cut over tp, per element of the attention's width: biases and copies of query, key and value (6) and of the
# context (2); of the MLP's: bias and activation (2), gated also the product with the gate (3). Times 3.
ATTENTION, MLP, GATED_MLP = 24, 6, 9
# Per score of an attention without flash kernels: mask, softmax and dropout, 4.5 forward and 6 backward.
SCORES = 10.5
# Adam: reads weight, both moments (4 bytes each) and gradient (2), writes the three and the weight in 2 bytes.
OPTIMIZER_BYTES = 28


@dataclass(frozen=True)
class Step:
    """Seconds of one step, and where they go; the parts add up to `total_s`.

    compute_s: of all layers and the head on a rank that never waits. tensor_s, pipeline_s, data_s: communication that
    computation does not hide. bubble_s: waiting for the first and last micro batches.
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

    def mfu(self, machine: Machine, gpus: int) -> float:
        """Model FLOPs utilization: without what is computed again (Chowdhery et al. 2022, arXiv 2204.02311)."""
        return self.model_flops / (self.total_s * gpus * machine.peak_tflops * 1e12)


@dataclass(frozen=True)
class _Layer:
    """Seconds of one layer and micro batch, forward and backward."""

    busy: float  # without collectives, at least the host's
    exposed: float  # collectives on top


@lru_cache(maxsize=64)
def _matmul_flops(model: Model, sequence: int) -> tuple[float, float]:
    """Forward, per token and layer: (of the weights, of the attention)."""
    width = model.heads * model.head_dim
    attention = 2 * model.hidden * (2 * width + 2 * model.kv_heads * model.head_dim)
    mlp = 2 * (3 if model.gated else 2) * model.hidden * model.ffn * model.experts_per_token
    return attention + mlp, 4 * sequence * width


def model_flops(job: Job) -> float:
    """Floating point operations of a step, forward and backward, nothing computed twice."""
    weights, attention = _matmul_flops(job.model, job.sequence)
    head = 2 * job.model.hidden * job.model.vocab
    return 3 * job.batch * job.sequence * (job.model.layers * (weights + attention) + head)


def predict_step(job: Job, layout: Layout, machine: Machine, links: Links) -> Step:
    """What a step of `job` takes in this layout."""
    layer = _layer(job, layout, machine, links)
    layers = job.model.layers / layout.pp
    count = layout.micro_batches(job.batch)
    head = _head(job, layout, machine)
    sent = 0.0
    if layout.pp > 1:
        size = activation_bytes(job.model, layout.micro_batch * job.sequence, ITEM)
        sent = 2 * layout.chunks * links.send(size, layout.tp, layout.tp * layout.dp)
    waits = (layout.pp - 1) / layout.chunks
    stage = layers * (layer.busy + layer.exposed)
    return Step(
        compute_s=count * (layers * layer.busy + head),
        tensor_s=count * layers * layer.exposed,
        pipeline_s=(count + layout.pp - 2) * sent,
        data_s=_data_parallel(job, layout, links, layers * layer.busy + head, count),
        bubble_s=waits * stage,
        once_s=machine.fitted.step_us * 1e-6 + _optimizer(job, layout, machine),
        model_flops=model_flops(job),
    )


def _layer(job: Job, layout: Layout, machine: Machine, links: Links) -> _Layer:
    model, software, fitted = job.model, job.software, machine.fitted
    tokens = layout.micro_batch * job.sequence
    weights, attention = _matmul_flops(model, job.sequence)
    # Passes: one forward, two backward; a flash kernel computes the scores once more in its backward pass.
    again = 1 if layout.recompute == "full" else 0
    scores_again = again + (0.5 if software.flash else layout.recompute == "selective")
    forward = tokens * weights / layout.tp / machine.flops
    matmul = (3 + again) * forward + (3 + scores_again) * tokens * attention / layout.tp / machine.flops
    more = (3 + again) / 3
    moved = ITEM * tokens * _memory_bound(job, layout)
    device = matmul + more * (moved / machine.bytes_per_s + fitted.layer_us * 1e-6)
    host = more * (fitted.host_us if layout.tp == 1 else fitted.host_tp_us) * 1e-6
    if layout.tp == 1:
        return _Layer(max(device, host), 0.0)
    one = links.all_reduce(activation_bytes(model, tokens, ITEM), layout.tp, 1)
    # In the backward pass a collective runs beside the block's weight gradients.
    behind = BLOCKS * ((1 + again) * one + max(0.0, one - forward / BLOCKS))
    busy = max(device, host)
    return _Layer(busy, max(device + behind, host) - busy)


def _memory_bound(job: Job, layout: Layout) -> float:
    """Elements read and written per token and layer, forward and backward."""
    model, software = job.model, job.software
    cut: float = ATTENTION * model.heads * model.head_dim
    cut += (GATED_MLP if model.gated else MLP) * model.ffn * model.experts_per_token
    if not software.flash:
        cut += SCORES * (1 + (layout.recompute == "selective") / 3) * model.heads * job.sequence
    whole = NOT_CUT * model.hidden
    return (whole + cut) / layout.tp if software.sequence_parallel else whole + cut / layout.tp


def _head(job: Job, layout: Layout, machine: Machine) -> float:
    """Seconds of the head and the loss per micro batch, which the last stage computes and the others wait for."""
    tokens = layout.micro_batch * job.sequence
    logits = tokens * job.model.vocab / layout.tp
    return 6 * logits * job.model.hidden / machine.flops + (
        machine.fitted.logit_bytes * logits / machine.bytes_per_s
    )


def _data_parallel(job: Job, layout: Layout, links: Links, one_micro_batch: float, count: int) -> float:
    """Seconds of reduced gradients, and of gathered weights with FSDP, that are waited for."""
    if layout.dp == 1:
        return 0.0
    elements = stage_elements(job.model, layout)
    layers = job.model.layers / layout.pp
    hidden_by = 2 / 3 * one_micro_batch if job.software.overlap else 0.0  # the last backward pass
    total = 0.0
    if layout.fsdp > 1:
        one = FSDP_COST * links.all_reduce(elements * ITEM, layout.fsdp, layout.tp)
        free = one_micro_batch if job.software.overlap else 0.0
        total += count * max(one - free, one / layers)  # in every micro batch
    replicas = layout.dp // layout.fsdp
    if replicas > 1:
        one = DDP_COST * links.all_reduce(elements * ITEM / layout.fsdp, replicas, layout.tp * layout.fsdp)
        total += max(one - hidden_by, one / layers)
    return total


def _optimizer(job: Job, layout: Layout, machine: Machine) -> float:
    shards = layout.dp if job.software.sharded_optimizer else layout.fsdp
    return OPTIMIZER_BYTES * stage_elements(job.model, layout) / shards / machine.bytes_per_s
