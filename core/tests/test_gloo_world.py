"""The worlds of tests: what they return, and how they report ranks that raise, die or hang."""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.tests.gloo_world import RankError, Worlds
from core.tests.local_world import ThreadWorlds


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


def _raise_everywhere(_: int) -> None:
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


def test_results_by_rank(gloo_ranks: Worlds) -> None:
    results = gloo_ranks(_sum_of_ranks, 10)
    assert [r for r, _, _ in results] == [0, 1, 2, 3]
    assert all(value.tolist() == [60.0] for _, value, _ in results)
    assert {threads for _, _, threads in results} == {1}


def test_warnings_of_the_test_hold_on_ranks(gloo_ranks: Worlds) -> None:
    with pytest.raises(RankError, match="DeprecationWarning: an old name"):
        gloo_ranks(_warn, world_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gloo_ranks(_warn, world_size=2)


@pytest.mark.parametrize(
    ("fn", "message", "failed"),
    [
        (_raise_everywhere, "(?s)rank 0 in _raise_everywhere: .*CustomError: rank 0", {0, 1}),
        (_raise_on, "(?s)rank 1 in _raise_on: .*CustomError: no luck", {0, 1}),
        (_die_on, r"rank 1 in _die_on: died \(exit 7\)", {0, 1}),
        (_hang_on, "(?s)rank 1 in _hang_on: did not answer.*_hang_on", {1}),
    ],
)
def test_a_broken_world_is_named_and_rebuilt(
    gloo_ranks: Worlds, fn: Any, message: str, failed: set[int]
) -> None:
    with pytest.raises(RankError, match=message) as caught:
        gloo_ranks(fn, 1, world_size=2, timeout_s=5.0 if fn is _hang_on else 60.0)
    assert set(caught.value.failures) == failed
    if fn in (_raise_everywhere, _raise_on):
        assert type(caught.value.__cause__).__name__ == "CustomError"
    assert gloo_ranks(_sum_of_ranks, 1, world_size=2)[0][1].item() == 1.0


def test_threads_tell_who_raised(ranks: ThreadWorlds) -> None:
    with pytest.raises(RankError, match=r"rank 1 in _raise_on: .*CustomError: no luck") as caught:
        ranks(_raise_on, 1)
    assert set(caught.value.failures) == {1} and isinstance(caught.value.__cause__, CustomError)
    assert ranks(_sum_of_ranks, 1)[3][1].item() == 6.0
