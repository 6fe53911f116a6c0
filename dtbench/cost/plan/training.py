"""What is trained, with which software, and one way to lay it out over the ranks."""

from __future__ import annotations

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
    """What the training code does.

    flash: attention without a matrix of scores in memory. sequence_parallel: between the blocks activations are cut
    over the tensor-parallel ranks. overlap: gradients are reduced, and ZeRO's weights gathered, behind computation;
    FSDP always does. zero: what is cut over the data-parallel ranks (arXiv 1910.02054): 1 the optimizer's states,
    2 the gradients, too; 3 is FSDP, which a layout says. precision: of the matrix products of the layers' weights.
    """

    flash: bool = True
    sequence_parallel: bool = True
    overlap: bool = True
    zero: int = 1
    precision: Precision = "bf16"


# Megatron-DeepSpeed as it was when the tables of measured steps were made.
PLAIN = Software(flash=False, sequence_parallel=False, overlap=False, zero=0)


@dataclass(frozen=True)
class TrainingJob:
    """batch: sequences of one step over all ranks. sequence: tokens of one."""

    model: TransformerModel
    gpus: int
    batch: int
    sequence: int
    software: Software = Software()


@dataclass(frozen=True)
class TrainingLayout:
    """Ranks of each parallelism; tp innermost, then cp, dp and pp.

    dp: ranks that see different sequences. fsdp: ranks that share one copy of the weights, 1 for none; a divisor of
    dp x cp. chunks: of layers that a rank holds in an interleaved pipeline, 1 for 1F1B. cp: ranks that share each
    sequence. ep: ranks of cp x dp x tp that share the experts of a layer.
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
        """Ranks that reduce one gradient: those of different sequences, or of parts of one."""
        return self.dp * self.cp

    def micro_batches(self, batch: int) -> int:
        """How often a pipeline is run through in one step."""
        return batch // (self.dp * self.micro_batch)

    def words(self) -> str:
        """Such as `tp=8 pp=4 dp=32, micro batch 2, full recomputation`."""
        data = f"dp={self.dp}" if self.fsdp == 1 else f"fsdp={self.fsdp}"
        if 1 < self.fsdp < self.copies:
            data = f"dp={self.copies // self.fsdp} fsdp={self.fsdp}"
        more = "".join(f" {name}={n}" for name, n in (("cp", self.cp), ("ep", self.ep)) if n > 1)
        parts = [f"tp={self.tp} pp={self.pp} {data}{more}", f"micro batch {self.micro_batch}"]
        if self.chunks > 1:
            parts.append(f"{self.chunks} chunks")
        return ", ".join([*parts, *([f"{self.recompute} recomputation"] * (self.recompute != "none"))])


@lru_cache(maxsize=2**12)
def stage_layers(model: TransformerModel, pp: int, by_cost: bool = False) -> tuple[int, ...]:
    """Layers of each pipeline stage; the first has the embedding and the last the head, too.

    As many each, where pp divides them; else, where that comes out even, with embedding and head counted as a layer
    each (Megatron-LM's --account-for-embedding-in-pipeline-split); else the first stages have one more.
    by_cost: a stage ends where its share of all weights' products, the head's among them, is reached (nanotron).
    """
    layers = model.layers
    if by_cost and pp > 1:
        one = model.layer_elements() - 2 * model.hidden  # norms multiply nothing
        costs = [*itertools.accumulate([one] * layers), one * layers + model.vocab * model.hidden]
        stage, counts = 0, [0] * pp
        for at, cost in enumerate(costs):
            if cost * pp > costs[-1] * (stage + 1):
                stage += 1
            counts[stage] += at < layers
        return tuple(counts)
    if layers % pp and (layers + 2) % pp == 0 and pp > 1:
        each = (layers + 2) // pp
        return (each - 1, *([each] * (pp - 2)), each - 1)
    return tuple(layers // pp + (stage < layers % pp) for stage in range(pp))


def stage_elements(
    model: TransformerModel, layout: TrainingLayout, layers: Sequence[int] | None = None
) -> float:
    """Parameters on the fullest rank before any sharding over dp: its layers, and an embedding or the head."""
    counts = layers or stage_layers(model, layout.pp)
    one = model.layer_elements(layout.tp, layout.ep)
    ends: float = model.end_elements(layout.tp)
    if layout.pp > 1 and not model.tied:
        ends = (ends + model.hidden) / 2
    return max(max(counts) * one, max(counts[0], counts[-1]) * one + ends)
