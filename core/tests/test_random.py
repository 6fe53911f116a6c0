"""Generators that are kept in step, seeds, and generators that the caller brings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode

from core.tests.gloo_world import Worlds, mesh_of, on_ranks
from dtbench_core import ArgumentError, DTensor, Partial, Replicate, Shard, distribute_tensor
from dtbench_core.layout import rng as random

S0, R = Shard(0), Replicate()


@pytest.mark.parametrize("placements", [[R, R], [S0, R], [S0, S0], [Shard(1), S0]], ids=str)
@on_ranks
def test_numbers_of_one_device(placements: list[Any]) -> None:
    """What a program draws after seeding, and what the rank's own generator gives next."""
    mesh = mesh_of((2, 2))
    random.manual_seed(11, mesh)
    x = distribute_tensor(torch.ones(5, 3), mesh, placements, src_data_rank=None)
    got = [F.dropout(x, 0.5).full_tensor()]
    got += [torch.rand_like(x).full_tensor() for _ in range(4)]  # learnt calls draw anew
    got.append(torch.rand(3))
    torch.manual_seed(11)
    x = torch.ones(5, 3)
    want = [F.dropout(x, 0.5), *(torch.rand_like(x) for _ in range(4)), torch.rand(3)]
    torch.testing.assert_close(got, want)


@on_ranks
def test_first_rank_is_followed() -> None:
    mesh = mesh_of((2, 2), ("unseeded", "too"))
    torch.manual_seed(dist.get_rank() + 40)  # ranks that were never seeded alike
    got = torch.rand_like(distribute_tensor(torch.ones(6), mesh, [S0, R], src_data_rank=None)).full_tensor()
    torch.manual_seed(40)
    torch.testing.assert_close(got, torch.rand(6))


def _drawn_in_a_graph() -> list[torch.Tensor]:
    """Each rank's shards of what graphs draw, on ranks that seeded differently."""
    torch._dynamo.reset()
    torch.manual_seed(dist.get_rank())
    x = distribute_tensor(torch.ones(64), mesh_of((2, 2)), [S0, R], src_data_rank=None)
    draws: list[Callable[[DTensor], DTensor]] = [
        torch.rand_like,
        F.dropout,
        lambda t: torch.empty_like(t).normal_(),
    ]
    compiled = [torch.compile(draw, backend="aot_eager", fullgraph=True) for draw in draws]
    return [draw(x).to_local() for draw in compiled for _ in range(2)]


def test_replicas_draw_alike_in_graphs(ranks: Worlds) -> None:
    drawn = ranks(_drawn_in_a_graph)
    torch.testing.assert_close(drawn[:2], [drawn[0], drawn[0]], rtol=0, atol=0)
    torch.testing.assert_close(drawn[2:], [drawn[2], drawn[2]], rtol=0, atol=0)
    for each in drawn[::2]:
        assert all(len(one.unique()) > 1 for one in each)
        assert not any(torch.equal(one, again) for one, again in zip(each[::2], each[1::2], strict=True))


@on_ranks
def test_watched_replicas_draw_alike() -> None:
    x = distribute_tensor(torch.ones(64), mesh_of((4,)), [R], src_data_rank=None)
    torch.rand_like(x)  # the first op on a mesh brings the generators into step
    torch.manual_seed(dist.get_rank())
    with CommDebugMode():
        drawn = torch.rand_like(x).to_local()
    first = drawn.clone()
    dist.broadcast(first, 0)
    torch.testing.assert_close(drawn, first, rtol=0, atol=0)


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
    mesh = mesh_of((4,))
    x = distribute_tensor(torch.ones(5), mesh, [S0], src_data_rank=None)
    for seed in (0, -1, 2**63, 2**64 - 1):
        random.manual_seed(seed, mesh)
        got = torch.rand_like(x).full_tensor()
        want = torch.rand(5, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("seeds", [[1, 1, 2, 1], [0, 2**32, 0, 0]], ids=str)
@on_ranks
def test_different_seeds(seeds: list[int]) -> None:
    with pytest.raises(ArgumentError, match="pass the same seed on every rank"):
        random.manual_seed(seeds[dist.get_rank()], mesh_of((4,)))


@on_ranks
def test_not_a_seed() -> None:
    with pytest.raises(ArgumentError, match="expected an int"):
        random.manual_seed("1", mesh_of((4,)))  # type: ignore[arg-type]


STRIDED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": F.dropout,
    "dropout in place": lambda x: F.dropout(x.clone(), inplace=True),
    "dropout of a view": lambda x: F.dropout(x[:, 1:]),
    "dropout of every other column": lambda x: F.dropout(x[:, ::2]),
    "alpha_dropout": lambda x: F.alpha_dropout(x, training=True),
    "rand_like": torch.rand_like,
    "bernoulli": lambda x: x.bernoulli(0.3),
    "normal_": lambda x: x.clone().normal_(),
    "random_": lambda x: x.clone().random_(100),
}


@on_ranks
def test_strided_tensors_draw_as_on_one_device() -> None:
    mesh = mesh_of((4,))
    full = torch.arange(48.0).view(6, 8).t() - 20
    for name, draw in STRIDED.items():
        torch.manual_seed(5)
        wanted, after = draw(full), torch.rand(1)
        for placed in (Replicate(), Shard(0), Shard(1), Partial()):
            x = distribute_tensor(full, mesh, [placed], src_data_rank=None)
            random.manual_seed(5, mesh)
            assert torch.equal(draw(x).full_tensor(), wanted), f"{name} {placed}"
            assert torch.equal(torch.rand(1), after), f"{name} {placed}"
