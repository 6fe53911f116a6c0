"""Random numbers that differ by shard: off until switched on, one stream per part of a tensor."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from core.tests.gloo_world import mesh_of, on_worlds
from dtbench_core import DTensor, Replicate, Shard, distribute_tensor, rand
from dtbench_core.layout import random
from dtbench_core.parallel import ColwiseParallel, RowwiseParallel, parallelize_module, tensor_parallel_rng

R, S0, S1 = Replicate(), Shard(0), Shard(1)


def _drawn_by(seed: int, *shape: int) -> Any:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def _everybodys(local: torch.Tensor, mesh: Any) -> list[torch.Tensor]:
    """What each rank of a 1-D mesh holds."""
    gathered = DTensor.from_local(local.contiguous(), mesh, [S0]).full_tensor()
    return list(gathered.chunk(mesh.size()))


@on_worlds
def test_off_and_on() -> None:
    mesh = mesh_of((4,), ("tp",))
    module = parallelize_module(nn.Linear(8, 8), mesh, ColwiseParallel())
    rng = tensor_parallel_rng(mesh)
    assert rng is tensor_parallel_rng(mesh) and (rng.enabled, rng.base_seed) == (False, 1234)
    # Off: what one device draws, DTensor or plain.
    random.manual_seed(5, mesh)
    whole = rand(8, 3, device_mesh=mesh, placements=[S0]).full_tensor()
    with rng.region():
        plain = torch.rand(2)
    one = torch.Generator().manual_seed(5)
    torch.testing.assert_close(whole, torch.rand(8, 3, generator=one))
    torch.testing.assert_close(plain, torch.rand(2, generator=one))

    rng.enabled = True
    try:
        before = torch.get_rng_state()
        sharded = rand(8, 3, device_mesh=mesh, placements=[S0])
        replicated = rand(5, device_mesh=mesh, placements=[R])
        again = torch.empty_like(sharded).uniform_()
        for rank, (first, second) in enumerate(
            zip(*(t.full_tensor().chunk(4) for t in (sharded, again)), strict=True)
        ):
            drawn = torch.Generator().manual_seed(1234 + 2718 + rank)
            torch.testing.assert_close(first, torch.rand(2, 3, generator=drawn))
            torch.testing.assert_close(second, torch.rand(2, 3, generator=drawn))
        torch.testing.assert_close(replicated.full_tensor(), _drawn_by(1234, 5))
        rng.manual_seed(77)
        torch.testing.assert_close(rand(5, device_mesh=mesh).full_tensor(), _drawn_by(77, 5))
        # The caller's generator goes first, and the default one is left alone.
        own = sharded.normal_(generator=torch.Generator().manual_seed(9))
        torch.testing.assert_close(
            own.full_tensor(), torch.zeros(8, 3).normal_(generator=torch.Generator().manual_seed(9))
        )
        assert torch.equal(before, torch.get_rng_state())
        # A module's weights: another part on every rank, replicas alike.
        nn.init.uniform_(module.weight)
        parts = module.weight.full_tensor().chunk(4)
        assert all(not torch.equal(parts[0], part) for part in parts[1:])
        bias = parallelize_module(nn.Linear(8, 8), mesh, RowwiseParallel()).bias
        nn.init.uniform_(bias)
        assert all(torch.equal(bias.to_local(), one) for one in _everybodys(bias.to_local(), mesh))
    finally:
        rng.enabled = False
    assert not random.regions.get()


@on_worlds
def test_plain_tensors() -> None:
    """Dropout between two layers: another mask on every rank inside a region, and the same after."""
    mesh = mesh_of((4,), ("tp",))
    rng = tensor_parallel_rng(mesh)
    rng.manual_seed(1234)
    rng.enabled = True
    try:
        torch.manual_seed(3)
        with rng.region():
            first = F.dropout(torch.ones(1, 64))
            with rng.region([R]):
                same_on_all = F.dropout(torch.ones(1, 64))
        outside = F.dropout(torch.ones(1, 64))
        with rng.region():
            second = F.dropout(torch.ones(1, 64))
        masks = [*_everybodys(first, mesh), *_everybodys(second, mesh)]
        assert len({tuple(mask.flatten().tolist()) for mask in masks}) == 8
        for same in (same_on_all, outside):
            assert len({tuple(mask.flatten().tolist()) for mask in _everybodys(same, mesh)}) == 1
        torch.manual_seed(3)
        torch.testing.assert_close(outside, F.dropout(torch.ones(1, 64)))
        # DTensors have streams of their own: the plain tensors' draws are not drawn again.
        sharded = F.dropout(distribute_tensor(torch.ones(4, 64), mesh, [S0], src_data_rank=None))
        assert not any(torch.equal(one, other) for one in sharded.full_tensor().split(1) for other in masks)
    finally:
        rng.enabled = False


@on_worlds
def test_two_dims() -> None:
    """Every part of a tensor on a 2x2 mesh is drawn once, whatever the sharding, uneven and empty parts too."""
    mesh = mesh_of((2, 2), ("dp", "tp"))
    rng = tensor_parallel_rng(mesh)
    rng.manual_seed(1234)
    rng.enabled = True
    try:
        drawn = []
        for placements in ([R, R], [S0, R], [R, S0], [S0, S0], [S0, S1], [S1, S0]):
            whole = rand(4, 4, device_mesh=mesh, placements=placements).full_tensor()
            assert len(set(whole.flatten().tolist())) == 16
            drawn += whole.flatten().tolist()
        # [S0, S0], [S0, S1] and [S1, S0] go on with the streams of the four parts; nothing repeats.
        assert len(set(drawn)) == len(drawn)
        uneven = rand(3, 5, device_mesh=mesh, placements=[S0, S0])  # the last rank has no row
        assert len(set(uneven.full_tensor().flatten().tolist())) == 15
    finally:
        rng.enabled = False
