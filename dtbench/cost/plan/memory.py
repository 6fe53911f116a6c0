"""Computes the peak memory of a training step on the rank that needs most.

Weights, gradients and optimizer states follow ZeRO (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1:
2 + 2 + 12 bytes per parameter). Activations follow Korthikanti et al. (2022, arXiv 2205.05198, section 4).
"""

from dataclasses import dataclass

from dtbench.cost.plan.machines import FittedConstants
from dtbench.cost.plan.training import TrainingJob, TrainingLayout, stage_elements, stage_layers

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
    optimizer_shards = layout.copies if zero >= 1 else layout.fsdp
    gradient_shards = layout.copies if zero >= 2 else layout.fsdp
    gathered_weights = unsharded_gradients = 0.0
    if layout.fsdp > 1:
        # In a pipeline, weights stay gathered and gradients stay unsharded until the last micro batch.
        layers = elements if layout.pp > 1 else job.model.layer_elements(layout.tp, layout.ep)
        gathered_weights = layers * (1 if layout.pp > 1 else GATHERED_LAYERS)
        unsharded_gradients = layers
    return MemoryUse(
        WEIGHT * (elements / layout.fsdp + gathered_weights),
        gradient * (elements / gradient_shards + unsharded_gradients),
        OPTIMIZER * elements / optimizer_shards,
        (1.0 if fitted is None else fitted.activations) * _activations(job, layout, counts),
    )


def _activations(job: TrainingJob, layout: TrainingLayout, counts: tuple[int, ...]) -> float:
    tokens = layout.micro_batch * job.sequence // layout.cp
    saved, temporary = _layer_bytes(job, layout)
    micro_batches = layout.micro_batches(job.batch)
    logits = LOGIT * tokens * job.model.vocab / layout.tp
    peak = 0.0
    for stage, layers in enumerate(counts):
        in_flight = float(min(layout.pp - stage, micro_batches))
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
