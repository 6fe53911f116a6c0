"""What a rank has for itself: who sees which."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtbench_core import comm
from dtbench_core.dispatch import fallback
from dtbench_core.layout.mesh import mesh_tables
from dtbench_core.runtime import initial_values, using_values

R = TypeVar("R")


def elsewhere(fn: Callable[[], R]) -> R:
    """`fn` on a thread of its own."""
    results: list[R] = []
    thread = threading.Thread(target=lambda: results.append(fn()))
    thread.start()
    thread.join()
    return results[0]


def test_what_is_entered_is_its_threads() -> None:
    process, mine = mesh_tables.get(), dict(initial_values(inherited=[fallback.logs]))
    assert mine[fallback.logs] is fallback.logs.get()
    with using_values(*mine.items()):
        assert all(variable.get() is value for variable, value in mine.items())
        assert mesh_tables.get() is not process and elsewhere(mesh_tables.get) is process
        with pytest.raises(ZeroDivisionError), using_values((comm.counters, [])):
            assert comm.counters.get() is not mine[comm.counters] and mesh_tables.get() is mine[mesh_tables]
            _ = 1 / 0
        assert comm.counters.get() is mine[comm.counters]
    assert mesh_tables.get() is process


def test_threads_that_simulate_nothing_share_the_process() -> None:
    """As autograd's threads do, on which a backward pass sends its gradients."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        group = dist.group.WORLD
        assert group is not None
        with comm.count_collectives() as count:
            elsewhere(lambda: comm.all_reduce(torch.ones(3), group))
        assert count.calls == {"all_reduce": 1} and count.bytes == {"all_reduce": 12}
        with using_values(*initial_values()), comm.count_collectives() as apart:
            elsewhere(lambda: comm.all_reduce(torch.ones(3), group))
        assert not apart.calls and count.calls == {"all_reduce": 1}
    finally:
        dist.destroy_process_group()
