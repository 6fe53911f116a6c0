"""The bytes that the fullest rank holds in a training step.

Weights, gradients and optimizer as ZeRO counts them (Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1:
2 + 2 + 12 bytes per parameter); activations as Korthikanti et al. do (2022, arXiv 2205.05198, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass

from dtbench.cost.plan.job import Job, Layout, stage_elements

WEIGHT, GRADIENT, OPTIMIZER = 2, 2, 12  # bytes per parameter: bf16, bf16; float32 weight and two moments
LOGIT = 6  # bytes per logit: bf16, and float32 for the loss
# FSDP holds the weights and gradients of the layer at work, and the weights of the next.
GATHERED_LAYERS = 2


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer + self.activations


def memory_of(job: Job, layout: Layout) -> Memory:
    """Of the rank that holds most: of the first pipeline stage, which has most micro batches in flight, or the last,
    which has the logits."""
    elements = stage_elements(job.model, layout)
    gathered = GATHERED_LAYERS * job.model.layer_elements(layout.tp) if layout.fsdp > 1 else 0
    states = layout.dp if job.software.sharded_optimizer else layout.fsdp
    return Memory(
        WEIGHT * (elements / layout.fsdp + gathered),
        GRADIENT * (elements / layout.fsdp + gathered / GATHERED_LAYERS),
        OPTIMIZER * elements / states,
        _activations(job, layout),
    )


def _activations(job: Job, layout: Layout) -> float:
    tokens = layout.micro_batch * job.sequence
    one, working = _layer_bytes(job, layout)
    layers = job.model.layers / layout.pp
    in_flight = float(min(layout.pp, layout.micro_batches(job.batch)))
    if layout.chunks > 1:  # interleaved (arXiv 2205.05198, section 4.2.3)
        in_flight *= 1 + (layout.pp - 1) / (layout.pp * layout.chunks)
    logits = LOGIT * tokens * job.model.vocab / layout.tp
    first = tokens * layers * one * in_flight + (logits if layout.pp == 1 else 0)
    last = tokens * layers * one + logits
    return max(first, last) + tokens * working


def _layer_bytes(job: Job, layout: Layout) -> tuple[float, float]:
    """Bytes per token: kept of a layer for its backward pass, and held only while a layer is computed again."""
    model, software = job.model, job.software
    whole = 10.0 * model.hidden  # inputs of norms and blocks, masks of dropout
    cut = 8.0 * model.heads * model.head_dim + (6 if model.gated else 4) * model.ffn * model.experts_per_token
    scores = 0.0 if software.flash else 5.0 * model.heads * job.sequence
    kept = (
        (whole + cut + scores) / layout.tp
        if software.sequence_parallel
        else whole + (cut + scores) / layout.tp
    )
    if layout.recompute == "full":
        inputs = 2.0 * model.hidden / (layout.tp if software.sequence_parallel else 1)
        return inputs, kept
    if layout.recompute == "selective":
        return kept - scores / layout.tp, scores / layout.tp
    return kept, 0.0
