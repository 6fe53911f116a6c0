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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from dtbench.cost.plan.models import Model

Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")
Where = Literal["layer", "ends"]

TENSOR, SEQUENCE = "tensor parallel", "sequence parallel"
DDP, ZERO2, FSDP, HSDP = "DDP", "ZeRO-2", "FSDP", "HSDP"
# Collectives of the activations before and after one block, in one pass.
_AROUND_A_BLOCK = {TENSOR: ("all_reduce",), SEQUENCE: ("all_gather", "reduce_scatter")}
BLOCKS = 2  # of a layer: attention and MLP
# Collectives of the weights and gradients of one layer in a step; none gathers embedding and head a second time.
_Kind = tuple[Phase, Literal["weights", "gradients"], str]
_FORWARD: _Kind = ("forward", "weights", "all_gather")
_AGAIN: _Kind = ("backward", "weights", "all_gather")
_SCATTER: _Kind = ("backward", "gradients", "reduce_scatter")
_OF_A_LAYER: Mapping[str, tuple[_Kind, ...]] = {
    DDP: (("backward", "gradients", "all_reduce"),),
    ZERO2: (_FORWARD, _SCATTER),
    FSDP: (_FORWARD, _AGAIN, _SCATTER),
    HSDP: (_FORWARD, _AGAIN, _SCATTER),
}
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


def activation_bytes(model: Model, tokens: int, itemsize: int) -> int:
    """What the collectives around a block carry: the whole activations of so many tokens."""
    return tokens * model.hidden * itemsize


def tensor_calls(scheme: str, t: Training, mesh_dim: str) -> Iterator[Call]:
    """Over the ranks that share one copy of the model: activations, around each block of a layer in each pass."""
    activations = activation_bytes(t.model, t.tokens, t.itemsize)

    def call(where: Where, phase: Phase, what: str, collective: str, size: int, count: int) -> Call:
        return Call(scheme, where, phase, what, collective, mesh_dim, size, count)

    def both(where: Where, count: int) -> Iterator[Call]:
        for phase in PHASES:
            for collective in _AROUND_A_BLOCK[scheme]:
                yield call(where, phase, "activations", collective, activations, count)

    yield from both("layer", BLOCKS)
    if scheme == SEQUENCE:
        norm = t.model.hidden * t.itemsize
        yield call("layer", "backward", "norms' gradients", "all_reduce", norm, BLOCKS)
        yield call("ends", "backward", "norm's gradient", "all_reduce", norm, 1)
    # Forward the embedding, and the head's input; backward the head, and the embedding's.
    yield from both("ends", 1)
    yield call("ends", "forward", "loss", "all_reduce", t.tokens * LOSS_ITEMSIZE, LOSS_REDUCTIONS)


def data_calls(scheme: str, t: Training, mesh_dim: str, replicate_dim: str | None) -> Iterator[Call]:
    """Over the ranks that see different tokens: weights and their gradients."""
    units: tuple[tuple[Where, int], ...] = (
        ("layer", t.model.layer_elements(t.tp)),
        ("ends", t.model.end_elements(t.tp)),
    )
    for where, elements in units:
        sizes = {"weights": elements * t.itemsize, "gradients": elements * t.reduce_itemsize}
        for kind in _OF_A_LAYER[scheme]:
            if where == "layer" or kind != _AGAIN:
                phase, what, collective = kind
                yield Call(scheme, where, phase, what, collective, mesh_dim, sizes[what])
        if replicate_dim is not None:
            shard = -(-sizes["gradients"] // t.dp)
            yield Call(scheme, where, "backward", "gradients", "all_reduce", replicate_dim, shard)
