"""Predicts the time and the peak memory of a training step.

The time of a layer and micro batch on a GPU is the sum of:

- matrix products at a fitted share of the peak FLOP/s,
- memory-bound operations at a fitted share of the memory bandwidth, whose bytes are counted here,
- a fixed time,
- the layer's collectives.

It is at least the time that the host needs to launch the layer. Micro batches pass through the pipeline (1F1B,
Narayanan et al. 2021, arXiv 2104.04473, section 2.2) at the pace of the slowest stage. The step ends with the exposed
part of the gradient reduction and with the optimizer.

The peak memory is that of the rank that needs most. Weights, gradients and optimizer states follow ZeRO (Rajbhandari et
al. 2020, arXiv 1910.02054, section 3.1: 2 + 2 + 12 bytes per parameter). Activations follow Korthikanti et al. (2022,
arXiv 2205.05198, section 4).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from dtbench.cost.plan.machines import FittedConstants, Links, MachineSpec
from dtbench.cost.plan.training import (
    TrainingJob,
    TrainingLayout,
    TransformerModel,
    stage_elements,
    stage_layers,
)

ITEM = 2  # bytes of an element in bfloat16 or float16
BLOCKS = 2  # blocks of a layer: attention and MLP

# Elements that memory-bound operations read and write per token and layer. Backward is twice forward, hence the
# factors of 3.
# Not sharded over tp: two layer norms (2 each forward), two biases with dropout and residual (3.5 each): 11, times 3.
UNSHARDED = 33
# Sharded over tp, per feature of the attention: biases and copies of query, key and value (6) and of the context (2).
# Per feature of the MLP: bias and activation (2), and the product with the gate (3 in total). All times 3.
ATTENTION, MLP, GATED_MLP = 24, 6, 9
# Per element of a token that is routed to experts: permutation and its inverse (2 each forward), weighting. Times 3.
PERMUTED = 15
# Per score of an attention without flash kernels: mask, softmax and dropout, 4.5 forward and 6 backward.
SCORES = 10.5
# Adam reads the weight, both moments (4 bytes each) and the gradient. It writes all but the gradient, and the weight
# in 2 bytes.
OPTIMIZER_BYTES = 26

# Collective, bytes, ranks, distance between neighbouring ranks -> seconds; see `NodeLinks.collective`.
Collective = Callable[[str, float, int, int], float]


@dataclass(frozen=True)
class StepTime:
    """The time of a step and its components, seconds, which add up to `total_s`.

    Attributes:
        compute_s: layers and head of the slowest stage, on a rank that never waits.
        tensor_s: exposed communication within layers, over tp, cp and ep.
        pipeline_s: exposed communication between stages.
        data_s: exposed reduction of gradients and gathering of weights.
        bubble_s: the pipeline's bubble.
        once_s: optimizer and fixed time per step.
        model_flops: FLOP of the step without recomputation.
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
        """Exposed communication."""
        return self.tensor_s + self.pipeline_s + self.data_s

    def mfu(self, machine: MachineSpec, gpus: int) -> float:
        """Returns the model FLOPs utilization, without recomputation (Chowdhery et al. 2022, arXiv 2204.02311)."""
        return self.model_flops / (self.total_s * gpus * machine.peak_tflops * 1e12)


@functools.lru_cache(maxsize=64)
def _matmul_flops(model: TransformerModel, sequence: int) -> tuple[float, float]:
    """Returns the forward FLOP per token and layer of the weights' products and of the attention scores."""
    width = model.heads * model.head_dim
    attention = 2 * model.hidden * (2 * width + 2 * model.kv_heads * model.head_dim)
    mlp = 2 * (3 if model.gated else 2) * model.hidden * model.ffn * model.experts_per_token
    return attention + mlp, 4 * sequence * width


def model_flops(job: TrainingJob) -> float:
    """Returns the FLOP of a step, forward and backward, without recomputation."""
    weights, attention = _matmul_flops(job.model, job.sequence)
    head = 2 * job.model.hidden * job.model.vocab
    return 3 * job.batch * job.sequence * (job.model.layers * (weights + attention) + head)


def predict_step(job: TrainingJob, layout: TrainingLayout, machine: MachineSpec, links: Links) -> StepTime:
    layer_s, exposed_s = _layer(job, layout, machine, links)
    counts = stage_layers(job.model, layout.pp, machine.fitted.stages_by_cost)
    count = layout.micro_batches(job.batch)
    head = _head(job, layout, machine)
    send_s = 0.0
    if layout.pp > 1:
        size_bytes = _tokens(job, layout) * job.model.hidden * ITEM
        send_s = 2 * layout.chunks * links.send(size_bytes, layout.tp, layout.tp * layout.copies)
    layer_total_s = layer_s + exposed_s
    # The slowest stage is one with most layers, or the last one, which has the head.
    layers, extra_s = max(
        ((max(counts), 0.0), (counts[-1], head)), key=lambda stage: stage[0] * layer_total_s + stage[1]
    )
    busy_s = layers * layer_s + extra_s
    other_stages_s = job.model.layers * layer_total_s + head - (layers * layer_total_s + extra_s)
    return StepTime(
        compute_s=count * busy_s,
        tensor_s=count * layers * exposed_s,
        pipeline_s=(count + layout.pp - 2) * send_s,
        data_s=_data_parallel(job, layout, machine, links.collective, busy_s),
        bubble_s=other_stages_s / layout.chunks,
        once_s=machine.fitted.step_us * 1e-6 + _optimizer(job, layout, machine),
        model_flops=model_flops(job),
    )


def _tokens(job: TrainingJob, layout: TrainingLayout) -> int:
    """Returns the tokens per micro batch and rank."""
    return layout.micro_batch * job.sequence // layout.cp


def _layer(
    job: TrainingJob, layout: TrainingLayout, machine: MachineSpec, links: Links
) -> tuple[float, float]:
    """Returns two times of a layer and micro batch, forward plus backward, in seconds.

    The first excludes collectives and is at least the host's time. The second is exposed communication.
    """
    model, software, fitted = job.model, job.software, machine.fitted
    tokens = _tokens(job, layout)
    weights, attention = _matmul_flops(model, job.sequence)
    if model.experts > 1:
        experts = 2 * (3 if model.gated else 2) * model.hidden * model.ffn * model.experts_per_token
        weights += experts * (1 / fitted.grouped - 1)
    # The backward pass costs two forward passes. A flash kernel recomputes the scores in its backward pass.
    recomputed = 1 if layout.recompute == "full" else 0
    recomputed_scores = recomputed + (0.5 if software.flash else layout.recompute == "selective")
    forward = (
        tokens * weights / layout.tp / machine.flops / (fitted.fp8 if software.precision == "fp8" else 1)
    )
    scores = tokens * attention / layout.tp / machine.flops / (fitted.attention if software.flash else 1)
    matmul = (3 + recomputed) * forward + (3 + recomputed_scores) * scores
    pass_factor = (3 + recomputed) / 3
    moved_bytes = ITEM * tokens * _memory_bound(job, layout)
    device = matmul + pass_factor * (moved_bytes / machine.bytes_per_s + fitted.layer_us * 1e-6)
    host = pass_factor * (fitted.host_us if layout.tp == 1 else fitted.host_tp_us) * 1e-6
    exposed, latency = _in_layer(job, layout, links.collective, forward, scores)
    if layout.tp > 1 and layout.pp > 1 and job.gpus > machine.gpus_per_node:
        host += pass_factor * fitted.wait_us * 1e-6 * layout.tp + latency
    busy = max(device, host)
    return busy, max(device + exposed, host) - busy


def _in_layer(
    job: TrainingJob, layout: TrainingLayout, collective: Collective, forward: float, scores: float
) -> tuple[float, float]:
    """Returns two times of a layer, forward plus backward, in seconds.

    The first is that of its exposed collectives, the second the latency of its tensor-parallel collectives.

    Args:
        collective: predicts a collective, see `NodeLinks`.
        forward: seconds of the forward matrix products, which overlap with collectives.
        scores: seconds of the forward attention.
    """
    model, tp, tokens = job.model, layout.tp, _tokens(job, layout)
    recomputed = 1 if layout.recompute == "full" else 0
    exposed = latency = 0.0
    if tp > 1:
        size = tokens * model.hidden * ITEM
        # In the backward pass, collectives overlap with the computation of the block's weight gradients.
        name = "all_gather" if job.software.sequence_parallel else "all_reduce"
        call_s, empty_s = (collective(name, size_bytes, tp, 1) for size_bytes in (size, 1))
        # Sequence parallelism has an all-gather and a reduce-scatter per block; backward gathers once more.
        in_forward, in_backward = (
            (2 * (1 + recomputed), 3) if job.software.sequence_parallel else (1 + recomputed, 1)
        )
        exposed += BLOCKS * (in_forward * call_s + max(0.0, in_backward * call_s - forward / BLOCKS))
        latency += BLOCKS * (in_forward + in_backward) * empty_s
    if layout.cp > 1:
        # Keys and values of the full sequence, and backward their gradients, are sent to every rank during attention.
        kv_bytes = 2 * model.kv_heads * model.head_dim * ITEM * tokens * layout.cp / tp
        call_s = collective("all_gather", kv_bytes, layout.cp, tp)
        exposed += (1 + recomputed) * max(0.0, call_s - scores) + max(0.0, 2 * call_s - 2.5 * scores)
    if layout.ep > 1:
        # Tokens are sent to the experts and back in both passes. All experts are assumed to get the same number.
        routed_bytes = tokens * model.experts_per_token * model.hidden * ITEM / tp
        exposed += (4 + 2 * recomputed) * collective("all_to_all", routed_bytes, layout.ep, 1)
    return exposed, latency


def _memory_bound(job: TrainingJob, layout: TrainingLayout) -> float:
    """Returns the elements read and written by memory-bound operations per token and layer, forward and backward."""
    model, software = job.model, job.software
    sharded: float = ATTENTION * model.heads * model.head_dim
    sharded += (GATED_MLP if model.gated else MLP) * model.ffn * model.experts_per_token
    if model.experts > 1:
        sharded += PERMUTED * model.hidden * model.experts_per_token
    if not software.flash:
        sharded += SCORES * (1 + (layout.recompute == "selective") / 3) * model.heads * job.sequence
    unsharded = UNSHARDED * model.hidden
    if software.sequence_parallel:
        return (unsharded + sharded) / layout.tp
    return unsharded + sharded / layout.tp


def _head(job: TrainingJob, layout: TrainingLayout, machine: MachineSpec) -> float:
    """Returns the seconds of the head and the loss per micro batch, on the last stage."""
    logits = _tokens(job, layout) * job.model.vocab / layout.tp
    return 6 * logits * job.model.hidden / machine.flops + (
        machine.fitted.logit_bytes * logits / machine.bytes_per_s
    )


def _data_parallel(
    job: TrainingJob, layout: TrainingLayout, machine: MachineSpec, collective: Collective, busy_s: float
) -> float:
    """Returns the exposed seconds of reducing gradients and gathering weights.

    Args:
        collective: predicts a collective, see `NodeLinks`.
        busy_s: computation of a micro batch, with which they overlap.
    """
    if layout.copies == 1:
        return 0.0
    counts = stage_layers(job.model, layout.pp, machine.fitted.stages_by_cost)
    layers = max(counts)
    elements = stage_elements(job.model, layout, counts)
    experts = layers * job.model.mlp_elements(layout.tp, layout.ep) if layout.ep > 1 else 0
    # (elements, ranks with copies of them, distance between neighbours of these ranks). Experts have fewer copies.
    replicated = [(elements - experts, layout.copies, layout.tp)]
    if experts:
        replicated.append((experts, layout.copies * layout.tp // layout.ep, layout.ep))
    gather = functools.partial(collective, "all_gather")
    overlap_s = busy_s if job.software.overlap else 0.0
    total = 0.0
    for count, copies, inner in replicated:
        # Assumes a collective per layer, as FSDP has; DDP's buckets and ZeRO's tensors have a similar size.
        gradients, weights = (count * item / layers for item in (machine.fitted.gradient_bytes, ITEM))
        shards = min(layout.fsdp, copies)
        if shards > 1:
            gather_s, scatter_s = gather(weights, shards, inner), gather(gradients, shards, inner)
            if layout.pp > 1:  # gathers and scatters once for all micro batches
                total += gather_s + scatter_s
            else:  # gathers in both passes of every micro batch, overlapping with computation
                layer_s = 2 * gather_s + scatter_s
                total += layout.micro_batches(job.batch) * max(layers * layer_s - overlap_s, layer_s)
        replicas = copies // shards
        if replicas > 1:
            distance = inner * shards
            if job.software.zero and shards == 1:
                layer_s = gather(gradients, replicas, distance) + gather(weights, replicas, distance)
            else:
                layer_s = collective("all_reduce", gradients / shards, replicas, distance)
            # Overlaps with the last backward pass, two thirds of a micro batch.
            total += max(layers * layer_s - 2 / 3 * overlap_s, layer_s)
    return total


def _optimizer(job: TrainingJob, layout: TrainingLayout, machine: MachineSpec) -> float:
    moved_bytes = (OPTIMIZER_BYTES + machine.fitted.gradient_bytes) * stage_elements(job.model, layout)
    return moved_bytes / (layout.copies if job.software.zero else layout.fsdp) / machine.bytes_per_s


def bytes_per_step(job: TrainingJob, layout: TrainingLayout, machine: MachineSpec) -> dict[str, float]:
    """Returns the bytes that a rank's collectives transfer in a step, by dim: tp, cp, ep, fsdp and dp.

    Sizes are those of nccl-tests. "dp" counts communication between replicas of the weights that fsdp shards. The
    functions for exposed time are reused with bytes and without overlap, so they count all communication.

    Raises:
        ValueError: the layout has a pipeline, whose stages transfer different amounts.
    """
    if layout.pp > 1:
        raise ValueError(f"pp={layout.pp}: stages transfer different amounts, expected pp=1")
    layers = job.model.layers * layout.micro_batches(job.batch)

    # In place of predicting a collective, `size_over_dim` returns its bytes, or 0 if it is over another dim.
    def layer_bytes(dim: str) -> float:
        def size_over_dim(name: str, size_bytes: float, _ranks: int, inner: int) -> float:
            used_dim = "ep" if name == "all_to_all" else "tp" if layout.tp > 1 and inner == 1 else "cp"
            return size_bytes if dim == used_dim else 0.0

        return layers * _in_layer(job, layout, size_over_dim, 0.0, 0.0)[0]

    def data_bytes(dim: str) -> float:
        def size_over_dim(_name: str, size_bytes: float, _ranks: int, inner: int) -> float:
            is_sharding = layout.fsdp > 1 and inner in (layout.tp, layout.ep)
            return size_bytes if dim == ("fsdp" if is_sharding else "dp") else 0.0

        return _data_parallel(job, layout, machine, size_over_dim, 0.0)

    sizes = {dim: layer_bytes(dim) for dim in ("tp", "cp", "ep")} | {
        dim: data_bytes(dim) for dim in ("fsdp", "dp")
    }
    return {dim: size for dim, size in sizes.items() if size}


WEIGHT, GRADIENT, OPTIMIZER = 2, 2, 12  # bytes per parameter: bf16, bf16; float32 weight and two moments
LOGIT = 6  # bytes per logit: bf16, and float32 for the loss
# FSDP keeps the gathered weights of the current and of the next layer.
GATHERED_LAYERS = 2


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a rank by purpose, bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_of(job: TrainingJob, layout: TrainingLayout, fitted: FittedConstants | None = None) -> MemoryUse:
    """Returns the memory of the rank that needs most.

    It belongs to the first pipeline stage, which has most micro batches in flight, or to the last, which has the
    logits.

    Args:
        fitted: constants for the bytes per gradient, the factor on activations, and the balance of stages.
    """
    gradient = GRADIENT if fitted is None else fitted.gradient_bytes
    counts = stage_layers(job.model, layout.pp, fitted is not None and fitted.stages_by_cost)
    elements = stage_elements(job.model, layout, counts)
    zero = job.software.zero
    gathered_weights = unsharded_gradients = 0.0
    if layout.fsdp > 1:
        # In a pipeline, weights stay gathered and gradients stay unsharded until the last micro batch.
        layers = elements if layout.pp > 1 else job.model.layer_elements(layout.tp, layout.ep)
        gathered_weights = layers * (1 if layout.pp > 1 else GATHERED_LAYERS)
        unsharded_gradients = layers
    return MemoryUse(
        WEIGHT * (elements / layout.fsdp + gathered_weights),
        gradient * (elements / (layout.copies if zero >= 2 else layout.fsdp) + unsharded_gradients),
        OPTIMIZER * elements / (layout.copies if zero >= 1 else layout.fsdp),
        (1.0 if fitted is None else fitted.activations) * _activations(job, layout, counts),
    )


def _activations(job: TrainingJob, layout: TrainingLayout, counts: tuple[int, ...]) -> float:
    tokens = _tokens(job, layout)
    saved, temporary = _layer_bytes(job, layout)
    logits = LOGIT * tokens * job.model.vocab / layout.tp
    peak = 0.0
    for stage, layers in enumerate(counts):
        in_flight = float(min(layout.pp - stage, layout.micro_batches(job.batch)))
        if layout.chunks > 1:  # interleaved (arXiv 2205.05198, section 4.2.3)
            in_flight *= 1 + (layout.pp - 1) / (layout.pp * layout.chunks)
        peak = max(peak, tokens * layers * saved * in_flight + logits * (stage == layout.pp - 1))
    return peak + tokens * temporary


def _layer_bytes(job: TrainingJob, layout: TrainingLayout) -> tuple[float, float]:
    """Returns the bytes per token that a layer keeps for its backward pass, and those needed while recomputing it."""
    model, software = job.model, job.software
    # Inputs of norms and blocks, and masks of dropout, which models with gated MLPs do not use.
    block_inputs = (8.0 if model.gated else 10.0) * model.hidden
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    sharded = 4.0 * (width + kv_width) + (6 if model.gated else 4) * model.ffn * model.experts_per_token
    scores = 0.0 if software.flash else 5.0 * model.heads * job.sequence
    input_shards = layout.tp if software.sequence_parallel else 1
    saved = block_inputs / input_shards + (sharded + scores) / layout.tp
    if layout.recompute == "full":
        return 2.0 * model.hidden / input_shards, saved
    if layout.recompute == "selective" and software.flash:
        # torchtitan's option "op" keeps attention and every second matrix product.
        products = 2 * width + 2 * kv_width + model.hidden + (3 if model.gated else 2) * model.ffn / 2
        return (4.0 * model.hidden + 2.0 * width + products) / layout.tp, saved
    if layout.recompute == "selective":
        return saved - scores / layout.tp, scores / layout.tp
    return saved, 0.0
