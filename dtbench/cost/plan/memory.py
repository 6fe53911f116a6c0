"""The bytes that the fullest rank holds in a training step.

Weights, gradients and optimizer as ZeRO counts them (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1:
2 + 2 + 12 bytes per parameter); activations as Korthikanti et al. do (2022, arXiv 2205.05198, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

from dtbench.cost.plan.machines import FittedConstants
from dtbench.cost.plan.training import TrainingJob, TrainingLayout, stage_elements, stage_layers

WEIGHT, GRADIENT, OPTIMIZER = 2, 2, 12  # bytes per parameter: bf16, bf16; float32 weight and two moments
LOGIT = 6  # bytes per logit: bf16, and float32 for the loss
# FSDP holds the weights and gradients of the layer at work, and the weights of the next.
GATHERED_LAYERS = 2


@dataclass(frozen=True)
class MemoryUse:
    """Bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_of(job: TrainingJob, layout: TrainingLayout, fitted: FittedConstants | None = None) -> MemoryUse:
    """Of the rank that holds most: of the first pipeline stage, which has most micro batches in flight, or the last,
    which has the logits. fitted: says in how many bytes gradients are summed, what else
    activations need, and where stages are cut."""
    gradient = GRADIENT if fitted is None else fitted.gradient_bytes
    counts = stage_layers(job.model, layout.pp, fitted is not None and fitted.stages_by_cost)
    elements = stage_elements(job.model, layout, counts)
    zero = job.software.zero
    states = layout.copies if zero >= 1 else layout.fsdp
    cut = layout.copies if zero >= 2 else layout.fsdp
    whole = gradients = 0.0
    if layout.fsdp > 1:
        # In a pipeline the weights stay gathered, and gradients are summed whole until the last micro batch.
        layers = elements if layout.pp > 1 else job.model.layer_elements(layout.tp, layout.ep)
        whole, gradients = layers * (1 if layout.pp > 1 else GATHERED_LAYERS), layers
    return MemoryUse(
        WEIGHT * (elements / layout.fsdp + whole),
        gradient * (elements / cut + gradients),
        OPTIMIZER * elements / states,
        (1.0 if fitted is None else fitted.activations) * _activations(job, layout, counts),
    )


def _activations(job: TrainingJob, layout: TrainingLayout, counts: tuple[int, ...]) -> float:
    tokens = layout.micro_batch * job.sequence // layout.cp
    one, working = _layer_bytes(job, layout)
    micro_batches = layout.micro_batches(job.batch)
    logits = LOGIT * tokens * job.model.vocab / layout.tp
    most = 0.0
    for stage, layers in enumerate(counts):
        in_flight = float(min(layout.pp - stage, micro_batches))
        if layout.chunks > 1:  # interleaved (arXiv 2205.05198, section 4.2.3)
            in_flight *= 1 + (layout.pp - 1) / (layout.pp * layout.chunks)
        ends = logits if stage == layout.pp - 1 else 0.0
        most = max(most, tokens * layers * one * in_flight + ends)
    return most + tokens * working


def _layer_bytes(job: TrainingJob, layout: TrainingLayout) -> tuple[float, float]:
    """Bytes per token: kept of a layer for its backward pass, and held only while a layer is computed again."""
    model, software = job.model, job.software
    # Inputs of norms and of blocks; masks of dropout, which models with gated MLPs do without.
    whole = (8.0 if model.gated else 10.0) * model.hidden
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    cut = 4.0 * (width + kv_width) + (6 if model.gated else 4) * model.ffn * model.experts_per_token
    scores = 0.0 if software.flash else 5.0 * model.heads * job.sequence
    sharing = layout.tp if software.sequence_parallel else 1
    kept = whole / sharing + (cut + scores) / layout.tp
    if layout.recompute == "full":
        return 2.0 * model.hidden / sharing, kept
    if layout.recompute == "selective" and software.flash:
        # torchtitan keeps attention and every second matrix product (its option "op").
        products = 2 * width + 2 * kv_width + model.hidden + (3 if model.gated else 2) * model.ffn / 2
        return (4.0 * model.hidden + 2.0 * width + products) / layout.tp, kept
    if layout.recompute == "selective":
        return kept - scores / layout.tp, scores / layout.tp
    return kept, 0.0
