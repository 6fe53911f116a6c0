"""Training jobs, the software that runs them, and their layouts over ranks."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dtbench.cost.plan.models import TransformerModel

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
Precision = Literal["bf16", "fp8"]


@dataclass(frozen=True)
class Software:
    """Properties of the training program.

    Attributes:
        flash: attention does not store the matrix of scores.
        sequence_parallel: activations between blocks are sharded over the tensor-parallel ranks.
        overlap: reducing gradients and gathering ZeRO's weights overlap with computation. FSDP always overlaps.
        zero: ZeRO stage (arXiv 1910.02054) over the data-parallel ranks: 1 shards the optimizer's states, 2 also the
            gradients. 3 is FSDP, which is a property of the layout.
        precision: of the matrix products with the layers' weights.
    """

    flash: bool = True
    sequence_parallel: bool = True
    overlap: bool = True
    zero: int = 1
    precision: Precision = "bf16"


# Megatron-DeepSpeed at the time when the tables of measured steps were published.
PLAIN = Software(flash=False, sequence_parallel=False, overlap=False, zero=0)


@dataclass(frozen=True)
class TrainingJob:
    """A training job.

    Attributes:
        batch: sequences per step over all ranks.
        sequence: tokens per sequence.
    """

    model: TransformerModel
    gpus: int
    batch: int
    sequence: int
    software: Software = Software()


@dataclass(frozen=True)
class TrainingLayout:
    """The layout of a job over ranks; tp is the innermost dimension, followed by cp, dp and pp.

    Attributes:
        tp: tensor-parallel ranks.
        pp: pipeline stages.
        dp: ranks that process different sequences.
        fsdp: ranks that share a copy of the weights, a divisor of dp x cp; 1 without FSDP.
        micro_batch: sequences per micro batch.
        chunks: chunks of layers per rank in an interleaved pipeline; 1 for 1F1B.
        recompute: which activations the backward pass computes again.
        cp: ranks that share each sequence.
        ep: ranks of cp x dp x tp that share the experts of a layer.
    """

    tp: int
    pp: int
    dp: int
    fsdp: int
    micro_batch: int
    chunks: int = 1
    recompute: Recompute = "none"
    cp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def copies(self) -> int:
        """Number of ranks that reduce the same gradient."""
        return self.dp * self.cp

    def micro_batches(self, batch: int) -> int:
        """Returns the number of micro batches per pipeline and step."""
        return batch // (self.dp * self.micro_batch)

    def words(self) -> str:
        """Describes the layout, e.g. `tp=8 pp=4 dp=32, micro batch 2, full recomputation`."""
        data = f"dp={self.dp}" if self.fsdp == 1 else f"fsdp={self.fsdp}"
        if 1 < self.fsdp < self.copies:
            data = f"dp={self.copies // self.fsdp} fsdp={self.fsdp}"
        optional = "".join(
            f" {name}={ranks}" for name, ranks in (("cp", self.cp), ("ep", self.ep)) if ranks > 1
        )
        phrases = [f"tp={self.tp} pp={self.pp} {data}{optional}", f"micro batch {self.micro_batch}"]
        if self.chunks > 1:
            phrases.append(f"{self.chunks} chunks")
        return ", ".join([*phrases, *([f"{self.recompute} recomputation"] * (self.recompute != "none"))])


@lru_cache(maxsize=2**12)
def stage_layers(model: TransformerModel, pp: int, by_cost: bool = False) -> tuple[int, ...]:
    """Returns the number of layers of each pipeline stage. The first also has the embedding, the last the head.

    All stages have the same number if possible. Otherwise embedding and head count as a layer each, if that gives equal
    stages (Megatron-LM's --account-for-embedding-in-pipeline-split). Otherwise the first stages have one more layer.

    Args:
        by_cost: balance the cost of the matrix products, including the head, instead of the number of layers
            (nanotron).
    """
    layers = model.layers
    if by_cost and pp > 1:
        layer_cost = model.layer_elements() - 2 * model.hidden  # norms have no matrix product
        costs = [
            *itertools.accumulate([layer_cost] * layers),
            layer_cost * layers + model.vocab * model.hidden,
        ]
        stage, counts = 0, [0] * pp
        for index, cost in enumerate(costs):
            if cost * pp > costs[-1] * (stage + 1):
                stage += 1
            counts[stage] += index < layers
        return tuple(counts)
    if layers % pp and (layers + 2) % pp == 0 and pp > 1:
        per_stage = (layers + 2) // pp
        return (per_stage - 1, *([per_stage] * (pp - 2)), per_stage - 1)
    return tuple(layers // pp + (stage < layers % pp) for stage in range(pp))


def stage_elements(
    model: TransformerModel, layout: TrainingLayout, layers: Sequence[int] | None = None
) -> float:
    """Returns the most parameters of any rank before sharding over dp: its layers, embedding and head."""
    counts = layers or stage_layers(model, layout.pp)
    layer = model.layer_elements(layout.tp, layout.ep)
    vocab: float = model.vocab_elements(layout.tp)
    if layout.pp > 1 and not model.tied:
        vocab = (vocab + model.hidden) / 2
    return max(max(counts) * layer, max(counts[0], counts[-1]) * layer + vocab)
