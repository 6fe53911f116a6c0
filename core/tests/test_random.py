"""Generators that are kept in step, seeds, and generators that the caller brings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.tests.gloo_world import Worlds, mesh_of
from dtbench_core import ArgumentError, Replicate, Shard, distribute_tensor
from dtbench_core.layout import rng as random

S0, R = Shard(0), Replicate()


def _drawn(seed: int, placements: list[Any]) -> list[torch.Tensor]:
    """What a program draws after seeding, and what the rank's own generator gives next."""
    mesh = mesh_of((2, 2))
    random.manual_seed(seed, mesh)
    x = distribute_tensor(torch.ones(5, 3), mesh, placements, src_data_rank=None)
    first = torch.nn.functional.dropout(x, 0.5).full_tensor()
    again = [torch.rand_like(x).full_tensor() for _ in range(4)]  # learnt calls draw anew
    return [first, *again, torch.rand(3)]


@pytest.mark.parametrize("placements", [[R, R], [S0, R], [S0, S0], [Shard(1), S0]], ids=str)
def test_numbers_of_one_device(ranks: Worlds, placements: list[Any]) -> None:
    torch.manual_seed(11)
    x = torch.ones(5, 3)
    expected = [torch.nn.functional.dropout(x, 0.5), *(torch.rand_like(x) for _ in range(4)), torch.rand(3)]
    for got in ranks(_drawn, 11, placements):
        torch.testing.assert_close(got, expected)


def _unseeded() -> torch.Tensor:
    mesh = mesh_of((2, 2), ("unseeded", "too"))
    torch.manual_seed(dist.get_rank() + 40)  # ranks that were never seeded alike
    return torch.rand_like(distribute_tensor(torch.ones(6), mesh, [S0, R], src_data_rank=None)).full_tensor()


def test_first_rank_is_followed(ranks: Worlds) -> None:
    torch.manual_seed(40)
    expected = torch.rand(6)
    for got in ranks(_unseeded):
        torch.testing.assert_close(got, expected)


def _own_generator(placements: list[Any]) -> list[torch.Tensor]:
    mesh = mesh_of((4,))
    generator = torch.Generator().manual_seed(5)
    x = distribute_tensor(torch.zeros(5, 3), mesh, placements, src_data_rank=None)
    before = torch.get_rng_state()
    drawn = [x.normal_(generator=generator).full_tensor().clone() for _ in range(3)]
    assert torch.equal(before, torch.get_rng_state())
    return drawn


@pytest.mark.parametrize("placements", [[R], [S0], [Shard(1)]], ids=str)
def test_generator_of_the_caller(ranks: Worlds, placements: list[Any]) -> None:
    generator = torch.Generator().manual_seed(5)
    expected = [torch.zeros(5, 3).normal_(generator=generator) for _ in range(3)]
    for got in ranks(_own_generator, placements):
        torch.testing.assert_close(got, expected)


def _seeds(mine: list[int]) -> str:
    try:
        random.manual_seed(mine[dist.get_rank()], mesh_of((4,)))
    except ArgumentError as error:
        return str(error)
    return "seeded"


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**64 - 1])
def test_every_seed(ranks: Worlds, seed: int) -> None:
    assert ranks(_seeds, [seed] * 4) == ["seeded"] * 4


@pytest.mark.parametrize("seeds", [[1, 1, 2, 1], [0, 2**32, 0, 0]], ids=str)
def test_different_seeds(ranks: Worlds, seeds: list[int]) -> None:
    for answer in ranks(_seeds, seeds):
        assert "pass the same seed on every rank" in answer


def test_not_a_seed(ranks: Worlds) -> None:
    for answer in ranks(_seeds, ["1"] * 4):
        assert "expected an int" in answer
