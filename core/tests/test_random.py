"""Generators that are kept in step, seeds, and generators that the caller brings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.tests.gloo_world import mesh_of, on_ranks
from dtbench_core import ArgumentError, Replicate, Shard, distribute_tensor
from dtbench_core.layout import rng as random

S0, R = Shard(0), Replicate()


@pytest.mark.parametrize("placements", [[R, R], [S0, R], [S0, S0], [Shard(1), S0]], ids=str)
@on_ranks
def test_numbers_of_one_device(placements: list[Any]) -> None:
    """What a program draws after seeding, and what the rank's own generator gives next."""
    mesh = mesh_of((2, 2))
    random.manual_seed(11, mesh)
    x = distribute_tensor(torch.ones(5, 3), mesh, placements, src_data_rank=None)
    got = [torch.nn.functional.dropout(x, 0.5).full_tensor()]
    got += [torch.rand_like(x).full_tensor() for _ in range(4)]  # learnt calls draw anew
    got.append(torch.rand(3))
    torch.manual_seed(11)
    x = torch.ones(5, 3)
    want = [torch.nn.functional.dropout(x, 0.5), *(torch.rand_like(x) for _ in range(4)), torch.rand(3)]
    torch.testing.assert_close(got, want)


@on_ranks
def test_first_rank_is_followed() -> None:
    mesh = mesh_of((2, 2), ("unseeded", "too"))
    torch.manual_seed(dist.get_rank() + 40)  # ranks that were never seeded alike
    got = torch.rand_like(distribute_tensor(torch.ones(6), mesh, [S0, R], src_data_rank=None)).full_tensor()
    torch.manual_seed(40)
    torch.testing.assert_close(got, torch.rand(6))


@pytest.mark.parametrize("placements", [[R], [S0], [Shard(1)]], ids=str)
@on_ranks
def test_generator_of_the_caller(placements: list[Any]) -> None:
    x = distribute_tensor(torch.zeros(5, 3), mesh_of((4,)), placements, src_data_rank=None)
    mine, plain = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)
    before = torch.get_rng_state()
    for _ in range(3):
        want = torch.zeros(5, 3).normal_(generator=plain)
        torch.testing.assert_close(x.normal_(generator=mine).full_tensor(), want)
    assert torch.equal(before, torch.get_rng_state())


@on_ranks
def test_every_seed() -> None:
    for seed in (0, -1, 2**63, 2**64 - 1):
        random.manual_seed(seed, mesh_of((4,)))


@pytest.mark.parametrize("seeds", [[1, 1, 2, 1], [0, 2**32, 0, 0]], ids=str)
@on_ranks
def test_different_seeds(seeds: list[int]) -> None:
    with pytest.raises(ArgumentError, match="pass the same seed on every rank"):
        random.manual_seed(seeds[dist.get_rank()], mesh_of((4,)))


@on_ranks
def test_not_a_seed() -> None:
    with pytest.raises(ArgumentError, match="expected an int"):
        random.manual_seed("1", mesh_of((4,)))  # type: ignore[arg-type]
