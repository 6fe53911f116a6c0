"""The packing suite: its check detects wrong buffers; the reference bucketer reduces correctly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtbench_suites import bucketer_reference
from dtbench_suites.bucketer_reference import ReferenceBucketer
from dtbench_suites.packing import IMPLS, build

MIB = 2**20


@pytest.fixture
def world() -> Iterator[SimpleNamespace]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield SimpleNamespace(mesh=init_device_mesh("cpu", (8,)), device=torch.device("cpu"))
    dist.destroy_process_group()


@pytest.mark.parametrize("impl", IMPLS)
def test_check_accepts_every_impl_and_detects_a_wrong_element(impl: str, world: SimpleNamespace):
    workload = build(impl, 5, 8 * 300, torch.float32, world)
    for _ in range(2):  # the second time with reused buffers
        assert workload.check() is None
    # Changes one element while it is copied.
    owner, name = {"core_held": (torch, "cat"), "reference": (torch, "stack")}.get(
        impl, (torch.Tensor, "copy_")
    )
    right = getattr(owner, name)

    def spoiled(*args: Any, **kwargs: Any) -> torch.Tensor:
        result: torch.Tensor = right(*args, **kwargs)
        result[(-1,) * result.ndim] += 1
        return result

    with mock.patch.object(owner, name, spoiled):
        message = workload.check()
    assert message is not None and "wrong" in message
    if workload.close is not None:
        workload.close()


@pytest.mark.parametrize("impl", IMPLS)
def test_check_detects_a_recording_that_replays_nothing(impl: str, world: SimpleNamespace):
    def recorded(run: Callable[[], object]) -> Callable[[], object]:
        run()
        return lambda: None

    right = build(impl, 5, 8 * 300, torch.float32, world, lambda run: run).check
    wrong = build(impl, 5, 8 * 300, torch.float32, world, recorded).check
    assert right is not None and right() is None
    assert wrong is not None and "wrong" in str(wrong())


def test_reference_bucketer_reduces_in_order(world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    sizes: list[int] = []

    def add_up(output: torch.Tensor, packed: torch.Tensor, group: object) -> None:
        sizes.append(packed.numel())
        output.copy_(packed.view(8, -1).sum(0))  # as if each row came from another rank

    monkeypatch.setattr(bucketer_reference, "reduce_scatter_single", add_up)
    bucketer = ReferenceBucketer(8 * 10 * 4 / MIB)  # 10 elements per shard
    got: list[torch.Tensor] = []
    group = world.mesh.get_group(0)
    for numel in (4, 11, 7):
        shards = [torch.full((numel,), float(r)) for r in range(8)]
        bucketer.reduce_scatter_async(shards, group, got.append)
    bucketer.flush()
    assert [len(g) for g in got] == [11, 4, 7]
    assert all(torch.equal(g, torch.full_like(g, 28.0)) for g in got)
    assert sizes == [88, 32, 56]
    assert bucketer.collectives == 3
    with pytest.raises(ValueError, match="got 7 tensors"):
        bucketer.reduce_scatter_async([torch.ones(1)] * 7, group)
