"""The variants in which every program runs beside how it is written, and the programs that a variant leaves out.

written     four ranks in order, inputs contiguous
order       meshes whose ranks do not ascend
uneven      three ranks: 8 rows are 3, 3 and 2, of 4 the last rank holds none
strided     inputs whose dims lie in memory in the opposite order
from_local  inputs that every rank makes by `from_local`, of a local tensor with gaps
inductor    the whole program under torch.compile

What a program is given differs, on plain tensors as on DTensors; the programs do not.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence

import torch

from dtbench.comparison.op_verdicts import WRITTEN
from dtbench_suites.coverage.samples import stepped, transposed
from dtbench_suites.coverage.verdicts import RANKS

# In a variant runs one program in so many, which doubles the time of the programs as they are written. Inductor builds
# code of a whole program on every rank, some 10 s. Under --quick, one in QUICK_SHARE of these.
SHARES: Mapping[str, int] = {"order": 4, "uneven": 4, "strided": 4, "from_local": 4, "inductor": 16}
QUICK_SHARE = 8

_GRIDS: Mapping[str, tuple[list[int], list[list[int]]]] = {
    "order": ([3, 1, 0, 2], [[3, 1], [0, 2]]),
    "uneven": ([0, 1, 2], [[0], [1], [2]]),
}
_LAID_OUT = {"strided": transposed, "from_local": stepped}


def ranks_of(variant: str) -> int:
    return len(_GRIDS[variant][0]) if variant in _GRIDS else RANKS


def grid(variant: str, ndim: int) -> torch.Tensor:
    """The ranks of a mesh of one or two dims."""
    if variant in _GRIDS:
        return torch.tensor(_GRIDS[variant][ndim - 1])
    return torch.arange(RANKS).view([RANKS] if ndim == 1 else [2, 2])


def laid_out(full: torch.Tensor, variant: str) -> torch.Tensor:
    """A copy as it lies in memory in the variant."""
    full = full.detach()
    return _LAID_OUT[variant](full) if variant in _LAID_OUT else full.clone()


def shard_of(full: torch.Tensor, dim: int, count: int, index: int) -> torch.Tensor:
    """The part that one of `count` ranks holds, as `Shard` cuts it: the last ones may be empty."""
    parts = full.chunk(count, dim)
    return parts[index] if index < len(parts) else full.narrow(dim, 0, 0)


# ---- what is left out ----

# Per variant: a pattern that a whole "topic: name" matches, and why.
_NO_INPUT = "none of its inputs is placed from a whole tensor"
_EVEN = "from_local without a shape takes all shards to be of one size"
_HEADS = "it gives each rank its attention heads by hand, which three ranks cannot share"
_GAPS = "torch's kernel reads past the gaps of plain tensors, too"
_TWIN = "the same program runs with aot_eager"
_NOT_PLACED = (
    r"compile: (from local to local|tensor parallel (mlp|mlp trained|attention)|llama layer|block with the sequence "
    r"sharded|checkpointed block|dynamic block|training and evaluation)( \[.*)?|trace: .*|checkpoint: checkpoint of "
    r"(a parallel block|blocks trained)|writes: write to (what a local became|a leaf through from local)|modules: "
    r"(data parallel of torch|fully sharded by flat parameters|fully shard of torch)|state: module built on meta and "
    r"filled|modes: (comm debug mode of a parallel block|fake tensor mode)|random: random factories agree|placements: "
    r"(partial .*|mesh whose .*|distribute tensor to partial|placements of torch( in styles)?|negative dim "
    r"of a shard|input and output functions of two arguments|local map)|training: parallel block trained"
)
_COMPILED_TWICE = (r".*: .*\[inductor\]", _TWIN)
LEFT_OUT: Mapping[str, Sequence[tuple[str, str]]] = {
    "order": (_COMPILED_TWICE,),
    "uneven": (
        _COMPILED_TWICE,
        (r"compile: (from local to local|local map in a graph).*", _EVEN),
        (r"trace: make fx|writes: write to (what a local became|a leaf through from local)", _EVEN),
        (r"state: module built on meta and filled|modes: fake tensor mode", _EVEN),
        (r"placements: (local map|placements of torch in styles)", _EVEN),
        (r"compile: (tensor parallel attention|llama layer).*", _HEADS),
    ),
    "strided": (_COMPILED_TWICE, (_NOT_PLACED, _NO_INPUT)),
    "from_local": (
        _COMPILED_TWICE,
        (_NOT_PLACED, _NO_INPUT),
        (r"optimizers: .*\bfused\b.*|modules: nn.CTCLoss", _GAPS),
    ),
    "inductor": ((r"(compile|trace): .*", "it compiles or traces a function of its own, with inductor too"),),
}


def why_left_out(variant: str, topic: str, name: str) -> str:
    """Why a program does not run in the variant, or ""."""
    title = f"{topic}: {name}"
    return next((why for pattern, why in LEFT_OUT.get(variant, ()) if re.fullmatch(pattern, title)), "")


def is_chosen(variant: str, name: str, share: int) -> bool:
    """Whether a program is of the one in `share` that runs in the variant; the same ones every time."""
    return variant == WRITTEN or zlib.crc32(name.encode()) % share == 0
