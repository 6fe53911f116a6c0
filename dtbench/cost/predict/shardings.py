"""The collectives of a training step, for each way to cut a transformer over a mesh.

    tensor parallel    heads, MLP and vocabulary are cut; every rank of tp holds all activations
    sequence parallel  the same, and between the blocks the activations are cut along the sequence
    DDP                every rank of dp holds all weights: gradients are all-reduced
    ZeRO-2             weights are gathered once a step, gradients reduce-scattered
    FSDP (ZeRO-3)      weights are gathered for the forward pass and again for the backward pass
    HSDP               FSDP within the dim `dp`; the ranks of `replicate` all-reduce their shards of the gradients

What torch's DTensor and FSDP2 do is counted: gathered activations are kept for the backward pass, and
FSDP's root (embedding, head, last norm) is not gathered again for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dtbench.cost.predict.models import Model

Phase = Literal["forward", "backward"]
Where = Literal["layer", "ends"]

TENSOR, SEQUENCE = "tensor parallel", "sequence parallel"
DDP, ZERO2, FSDP, HSDP = "DDP", "ZeRO-2", "FSDP", "HSDP"
# Loss over a cut vocabulary: the largest logit, the sum of exponentials and the target's logit of each token,
# in float32 (`loss_parallel` of torch.distributed.tensor.parallel).
LOSS_REDUCTIONS, LOSS_ITEMSIZE = 3, 4


@dataclass(frozen=True)
class Call:
    """`count` collectives in one layer (where: layer) or one step (where: ends).

    size_bytes: S of the collective, as nccl-tests counts it: the gathered, or the not yet scattered, buffer.
    """

    scheme: str
    where: Where
    phase: Phase
    what: str
    collective: str
    mesh_dim: str
    size_bytes: int
    count: int = 1


@dataclass(frozen=True)
class Training:
    """One step. tokens: of one data-parallel rank; itemsize, reduce_itemsize: bytes of an element of
    activations and weights, and of a gradient that is reduced. tp, dp: ranks of these dims, 1 for none."""

    model: Model
    tokens: int
    itemsize: int
    reduce_itemsize: int
    tp: int = 1
    dp: int = 1


def tensor_calls(scheme: str, t: Training, mesh_dim: str) -> Iterator[Call]:
    """Over the ranks that share one copy of the model: activations, twice per layer and pass."""
    activations = t.tokens * t.model.hidden * t.itemsize

    def call(where: Where, phase: Phase, what: str, collective: str, size: int, count: int) -> Call:
        return Call(scheme, where, phase, what, collective, mesh_dim, size, count)

    def both(where: Where, count: int) -> Iterator[Call]:
        for phase in ("forward", "backward"):
            if scheme == SEQUENCE:
                yield call(where, phase, "activations", "all_gather", activations, count)
                yield call(where, phase, "activations", "reduce_scatter", activations, count)
            else:
                yield call(where, phase, "activations", "all_reduce", activations, count)

    yield from both("layer", 2)  # attention and MLP
    if scheme == SEQUENCE:
        norm = t.model.hidden * t.itemsize
        yield call("layer", "backward", "norms' gradients", "all_reduce", norm, 2)
        yield call("ends", "backward", "norm's gradient", "all_reduce", norm, 1)
    yield from both(
        "ends", 1
    )  # forward the embedding, and the head's input; backward the head, and the embedding's
    loss = t.tokens * LOSS_ITEMSIZE
    yield call("ends", "forward", "loss", "all_reduce", loss, LOSS_REDUCTIONS)


def data_calls(scheme: str, t: Training, mesh_dim: str, replicate_dim: str | None) -> Iterator[Call]:
    """Over the ranks that see different tokens: weights and their gradients."""
    yield from _unit_calls(scheme, t, mesh_dim, replicate_dim, "layer", t.model.layer_elements(t.tp))
    yield from _unit_calls(scheme, t, mesh_dim, replicate_dim, "ends", t.model.end_elements(t.tp))


def _unit_calls(
    scheme: str, t: Training, mesh_dim: str, replicate_dim: str | None, where: Where, elements: int
) -> Iterator[Call]:
    weights, gradients = elements * t.itemsize, elements * t.reduce_itemsize

    def call(phase: Phase, what: str, collective: str, size: int, over: str = mesh_dim) -> Call:
        return Call(scheme, where, phase, what, collective, over, size)

    if scheme == DDP:
        yield call("backward", "gradients", "all_reduce", gradients)
        return
    yield call("forward", "weights", "all_gather", weights)
    if scheme != ZERO2 and where == "layer":
        yield call("backward", "weights", "all_gather", weights)
    yield call("backward", "gradients", "reduce_scatter", gradients)
    if replicate_dim is not None:
        shard = -(-gradients // t.dp)
        yield call("backward", "gradients", "all_reduce", shard, replicate_dim)
