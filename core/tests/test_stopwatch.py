"""The stopwatches around a dispatch: they see its stages, change nothing it gives, and leave nothing behind."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import dtbench_core as dt
from dtbench_core.dispatch.op_plan import DIRECT_KINDS, Moving
from dtbench_core.interop import stopwatch


@pytest.fixture
def mesh(fake_world: Any) -> DeviceMesh:
    fake_world(8)
    return init_device_mesh("cpu", (8,))


def opened(log: stopwatch.Log) -> list[str]:
    """The names of the stages in the order in which they began."""
    pairs = list(zip(log[::2], log[1::2], strict=True))
    assert len(pairs) % 2 == 0
    return [stopwatch.NAMES[first] for first, second in pairs if second != stopwatch.END]


def everything() -> dict[Any, Any]:
    """What every module and class of the core holds."""
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] == "dtbench_core"]
    held = {(m.__name__, name): value for m in modules for name, value in vars(m).items()}
    for cls in (dt.DTensor, Moving, *DIRECT_KINDS):
        held |= {(cls.__name__, name): value for name, value in vars(cls).items()}
    return held


def test_a_cached_call_passes_each_stage_once(mesh: DeviceMesh) -> None:
    x = dt.DTensor.from_local(torch.ones(2, 4), mesh, [dt.Shard(0)])
    for _ in range(3):
        torch.add(x, x)
    with stopwatch.StageTimer() as log:
        result = torch.add(x, x)
    seen = [name for name in opened(log) if name != stopwatch.BOOKKEEPING]
    assert seen == ["glue", "checks", "checks", "key", "cache", "local op", "wrap"]
    assert torch.equal(result.to_local(), torch.full((2, 4), 2.0))


def test_moves_communication_plans_and_backward_are_seen(mesh: DeviceMesh) -> None:
    x = dt.DTensor.from_local(torch.ones(2, 24), mesh, [dt.Shard(0)])
    y = dt.DTensor.from_local(torch.ones(16, 3), mesh, [dt.Shard(1)]).requires_grad_()
    with stopwatch.StageTimer() as log:
        torch.autograd.grad(torch.mul(x, y).sum(), y)
    assert set(stopwatch.NAMES) <= {*opened(log), "entry"}


def test_it_leaves_nothing_behind_even_after_an_error(mesh: DeviceMesh) -> None:
    x = dt.DTensor.from_local(torch.ones(2, 4), mesh, [dt.Shard(0)])
    torch.add(x, x)
    watch, before = stopwatch.StageTimer(), everything()
    for _ in range(2):
        with pytest.raises(dt.errors.MixedTensorError), watch as log:
            torch.add(x, torch.ones(16, 4))
        opened(log)  # every bracket is closed
        assert len(log) > 0
        after = everything()
        assert after.keys() == before.keys()
        assert [key for key, value in before.items() if after[key] is not value] == []
