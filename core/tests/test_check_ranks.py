"""The checking mode: ranks whose shapes, placements or ops differ raise alike, with the op, the specs and the ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from core.tests.gloo_world import mesh_of
from core.tests.local_world import ThreadWorlds
from dtbench_core import DTensor, RanksDifferError, Replicate, Shard, check_ranks

CASES = ("rows", "placements", "part", "op", "redistribute", "full_tensor", "dtype")


def differ(how: str) -> None:
    """Two ranks; rank 1 is another in one way."""
    mesh = mesh_of((2,))
    other = dist.get_rank() == 1
    dtype = torch.float64 if how == "dtype" and other else torch.float32
    part = torch.ones(2 if how in ("rows", "full_tensor") and other else 4, 8, dtype=dtype)
    placed = [Shard(1 if how == "placements" and other else 0)]
    if how == "part" and other:
        x = DTensor.from_local(part, mesh, placed)
        x._local_tensor = torch.ones(3, 8)
    else:
        x = DTensor.from_local(part, mesh, placed)
    with check_ranks():
        if how == "redistribute":
            x.redistribute(mesh, [Replicate() if other else Shard(1)])
        elif how == "full_tensor":
            x.full_tensor()
        else:
            _ = x * 2 if how == "op" and other else x + x


@pytest.mark.parametrize("how", CASES)
def test_ranks_that_differ_raise_alike(ranks: ThreadWorlds, how: str) -> None:
    message, other = ranks(caught, how, world_size=2)
    assert message == other
    op = {"redistribute": "redistribute to", "full_tensor": "full_tensor", "op": "aten.mul"}.get(
        how, "aten.add"
    )
    for part in ("rank 0 has", "rank 1 has", "float32", op):
        assert part in message


def caught(how: str) -> str:
    with pytest.raises(RanksDifferError) as error:
        differ(how)
    return str(error.value)
