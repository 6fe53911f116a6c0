"""The one object of what the core keeps: who sees which."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtbench_core import comm
from dtbench_core.runtime import Runtime, current, entered

R = TypeVar("R")


def elsewhere(fn: Callable[[], R]) -> R:
    """`fn` on a thread of its own."""
    results: list[R] = []
    thread = threading.Thread(target=lambda: results.append(fn()))
    thread.start()
    thread.join()
    return results[0]


def test_a_runtime_is_its_threads() -> None:
    process, mine = current(), Runtime()
    with entered(mine):
        assert current() is mine
        assert elsewhere(current) is process
        with pytest.raises(ZeroDivisionError), entered(replace(mine, counters=[])):
            assert current().counters is not mine.counters and current().meshes is mine.meshes
            _ = 1 / 0
        assert current() is mine
    assert current() is process


def test_threads_that_simulate_nothing_share_the_process() -> None:
    """As autograd's threads do, on which a backward pass sends its gradients."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        with comm.count_collectives() as count:
            elsewhere(lambda: comm.all_reduce(torch.ones(3), group))
        assert count.calls == {"all_reduce": 1} and count.bytes == {"all_reduce": 12}
        with entered(Runtime()), comm.count_collectives() as apart:
            elsewhere(lambda: comm.all_reduce(torch.ones(3), group))
        assert not apart.calls and count.calls == {"all_reduce": 1}
    finally:
        dist.destroy_process_group()
