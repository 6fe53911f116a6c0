"""The test world itself: what it returns, and how it reports ranks that raise, die or hang."""

from __future__ import annotations

import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist

from core.tests.gloo_world import RankError, Worlds


class CustomError(Exception):
    """Defined here, so that carrying it back needs this module on both sides."""


def _sum_of_ranks(scale: int) -> tuple[int, torch.Tensor, int]:
    value = torch.tensor([float(dist.get_rank() * scale)])
    dist.all_reduce(value)
    return dist.get_rank(), value, torch.get_num_threads()


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise CustomError("no luck")
    dist.barrier()


def _raise_everywhere() -> None:
    raise CustomError(f"rank {dist.get_rank()}")


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def _hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def _warn() -> None:
    warnings.warn("an old name", DeprecationWarning, stacklevel=1)


def _nothing() -> None:
    pass


@pytest.mark.parametrize("world_size", [2, 4])
def test_results_by_rank(gloo_ranks: Worlds, world_size: int) -> None:
    results = gloo_ranks(_sum_of_ranks, 10, world_size=world_size)
    total = 10.0 * sum(range(world_size))
    assert [r for r, _, _ in results] == list(range(world_size))
    assert all(torch.equal(value, torch.tensor([total])) for _, value, _ in results)
    assert {threads for _, _, threads in results} == {1}


def test_world_outlives_calls(gloo_ranks: Worlds) -> None:
    gloo_ranks(_nothing)
    before = gloo_ranks.pids()
    gloo_ranks(_nothing)
    assert gloo_ranks.pids() == before


def test_warnings_of_the_test_hold_on_ranks(gloo_ranks: Worlds) -> None:
    with pytest.raises(RankError, match="DeprecationWarning: an old name"):
        gloo_ranks(_warn, world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gloo_ranks(_warn, world_size=2)


def test_exception_on_every_rank_keeps_the_world(gloo_ranks: Worlds) -> None:
    gloo_ranks(_nothing, world_size=2)
    before = gloo_ranks.pids(2)
    with pytest.raises(RankError, match=r"rank 0 in _raise_everywhere.*CustomError: rank 0") as caught:
        gloo_ranks(_raise_everywhere, world_size=2)
    assert type(caught.value.__cause__).__name__ == "CustomError"
    assert set(caught.value.failures) == {0, 1}
    assert "test_gloo_world.py" in caught.value.failures[1]
    assert gloo_ranks.pids(2) == before


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        (_raise_on, "rank 1 in _raise_on: .*CustomError: no luck"),
        (_die_on, r"rank 1 in _die_on: died \(exit 7\)"),
        (_hang_on, "(?s)rank 1 in _hang_on: did not answer.*_hang_on"),
    ],
)
def test_broken_world_is_named_and_rebuilt(gloo_ranks: Worlds, fn: object, told: str) -> None:
    gloo_ranks(_nothing, world_size=2)
    before = gloo_ranks.pids(2)
    with pytest.raises(RankError, match=told):
        gloo_ranks(fn, 1, world_size=2, timeout_s=5.0)  # type: ignore[arg-type]
    assert gloo_ranks(_sum_of_ranks, 1, world_size=2)[0][1].item() == 1.0
    assert not set(gloo_ranks.pids(2)) & set(before)


def test_function_must_be_findable(gloo_ranks: Worlds) -> None:
    with pytest.raises(TypeError, match=r"got .*<lambda>, expected a function defined at module level"):
        gloo_ranks(lambda: None, world_size=2)
