"""Whether the ranks of a group are about to reduce the same inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from dtbench_core import comm
from dtbench_core.bucketer.packing import BucketError

# When ranks compare notes before a collective: in the first round, from the start to the first flush;
# always; never.
CheckRanks = Literal["first", "always", "never"]
CHECK_RANKS: tuple[CheckRanks, ...] = ("first", "always", "never")
SHOWN = 6  # inputs named in an error


def can_check(group: ProcessGroup) -> bool:
    """torch's fake group answers with nothing, and has only one rank that could disagree."""
    return group.size() > 1 and "fake" not in str(dist.get_backend(group))


def check_ranks_agree(
    group: ProcessGroup, device: torch.device, why: str, shapes: Sequence[Sequence[int]], how: str
) -> None:
    """One small collective, on which it waits, so that a disagreement is an error on every rank and not a
    hang or a wrong sum.

    Args:
        why: what brings the collective about, such as a full bucket.
        shapes: of what each input leaves with a rank, in order.
        how: dtype and reduction.
    """
    described = (why, how, [list(shape) for shape in shapes])
    digest = hashlib.blake2b(repr(described).encode(), digest_size=7).digest()
    mine = torch.tensor([int.from_bytes(digest, "little")], device=device)
    all_of_them = torch.empty(group.size(), dtype=mine.dtype, device=device)
    comm.all_gather(all_of_them, mine, group)
    if len(set(all_of_them.tolist())) == 1:
        return
    theirs = comm.all_gather_objects(described, group)
    lines = "; ".join(f"rank {r}: {_summary(d, theirs)}" for r, d in enumerate(theirs))
    raise BucketError(
        f"got a bucket on which the {group.size()} ranks of the group disagree ({lines}), expected the same inputs "
        "in the same order on all: hand over what every rank has, zeros where it has no gradient"
    )


def _summary(mine: tuple[str, str, list[list[int]]], theirs: list[tuple[str, str, list[list[int]]]]) -> str:
    """The inputs from the first on in which any two ranks differ."""
    why, how, shapes = mine
    common = min(len(d[2]) for d in theirs)
    start = next((i for i in range(common) if any(d[2][i] != shapes[i] for d in theirs)), common)
    shown = shapes[start : start + SHOWN]
    return f"{why}, {len(shapes)} inputs, {how}, from input {start} on {shown}"
