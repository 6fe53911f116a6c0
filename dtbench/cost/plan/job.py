"""What is trained, with which software, and one way to lay it out over the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dtbench.cost.plan.models import Model

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")


@dataclass(frozen=True)
class Software:
    """What the training code does.

    flash: attention without a matrix of scores in memory. sequence_parallel: between the blocks activations are cut
    over the tensor-parallel ranks. overlap: gradients are reduced, and FSDP's weights gathered, behind computation.
    sharded_optimizer: its states are cut over the data-parallel ranks (ZeRO-1).
    """

    flash: bool = True
    sequence_parallel: bool = True
    overlap: bool = True
    sharded_optimizer: bool = True


# Megatron-DeepSpeed as it was when the tables of measured steps were made.
PLAIN = Software(flash=False, sequence_parallel=False, overlap=False, sharded_optimizer=False)


@dataclass(frozen=True)
class Job:
    """batch: sequences of one step over all ranks. sequence: tokens of one."""

    model: Model
    gpus: int
    batch: int
    sequence: int
    software: Software = Software()


@dataclass(frozen=True)
class Layout:
    """Ranks of each parallelism; tp innermost, then dp, then pp.

    dp: ranks that see different sequences. fsdp: ranks of these that share one copy of the weights, 1 for none; a
    divisor of dp. chunks: of layers that a rank holds in an interleaved pipeline, 1 for 1F1B.
    """

    tp: int
    pp: int
    dp: int
    fsdp: int
    micro_batch: int
    chunks: int = 1
    recompute: Recompute = "none"

    def micro_batches(self, batch: int) -> int:
        """How often a pipeline is run through in one step."""
        return batch // (self.dp * self.micro_batch)

    def words(self) -> str:
        """Such as `tp=8 pp=4 dp=32, micro batch 2, full recomputation`."""
        data = f"dp={self.dp}" if self.fsdp == 1 else f"fsdp={self.fsdp}"
        if 1 < self.fsdp < self.dp:
            data = f"dp={self.dp // self.fsdp} fsdp={self.fsdp}"
        parts = [f"tp={self.tp} pp={self.pp} {data}", f"micro batch {self.micro_batch}"]
        if self.chunks > 1:
            parts.append(f"{self.chunks} chunks")
        return ", ".join([*parts, *([f"{self.recompute} recomputation"] * (self.recompute != "none"))])


def stage_elements(model: Model, layout: Layout) -> float:
    """Parameters on the fullest rank before any sharding over dp: its layers, and an embedding or the head."""
    ends: float = model.end_elements(layout.tp)
    if layout.pp > 1 and not model.tied:
        ends = (ends + model.hidden) / 2
    return model.layers / layout.pp * model.layer_elements(layout.tp) + ends
