"""Fixtures of the core's tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from core.tests import two_ranks
from core.tests.gloo_world import BACKEND, Worlds, forget_meshes
from core.tests.local_world import AnyWorlds, LocalWorlds, ThreadWorlds
from core.tests.on_device import DEVICE_TYPE
from dtbench.tests import tiers
from dtbench_core import comm
from dtbench_core.simulate import LocalTensorMode


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    tiers.pytest_collection_modifyitems(items)
    if BACKEND:
        two_ranks.select(config, items)


@pytest.fixture(scope="session")
def ranks() -> Iterator[ThreadWorlds | Worlds]:
    """Runs a function on ranks that are threads of this process: `ranks(fn, *args, world_size=4)`."""
    worlds = Worlds() if BACKEND else ThreadWorlds()
    yield worlds
    worlds.close()


@pytest.fixture(scope="session")
def gloo_ranks() -> Iterator[Worlds]:
    """Runs a function of a module on real gloo processes. Such tests are slow, see tiers.py."""
    worlds = Worlds()
    yield worlds
    worlds.close()


@pytest.fixture(params=[BACKEND] if BACKEND else ["threads", "local"])
def worlds(request: pytest.FixtureRequest) -> AnyWorlds:
    """Runs a function on ranks that are threads and, in a second test, once for all ranks as LocalTensors."""
    if request.param == "local":
        return LocalWorlds()
    threads: ThreadWorlds = request.getfixturevalue("ranks")
    return threads


@pytest.fixture(scope="session", autouse=DEVICE_TYPE == "cuda")
def current_gpu() -> None:
    """Selects a GPU: a DeviceMesh warns of ranks that have not selected one."""
    torch.cuda.set_device(0)


@pytest.fixture
def fake_world() -> Iterator[Callable[..., None]]:
    """Makes this process a rank of a process group without transport: `fake_world(size, rank=0)`."""

    def start(size: int, rank: int = 0) -> None:
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

    yield start
    dist.destroy_process_group()
    forget_meshes()


@pytest.fixture
def group(fake_world: Callable[[int], None]) -> dist.ProcessGroup:
    """A process group of 8 ranks without transport."""
    fake_world(8)
    return dist.group.WORLD


@pytest.fixture
def own_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a reduce-scatter of a fake group return the rank's own input, as torch 2.13 does; 2.11 writes nothing."""
    reduce_scatter = comm.reduce_scatter

    def reduce(output: torch.Tensor, input: torch.Tensor, group: dist.ProcessGroup, **options: Any) -> Any:
        work = reduce_scatter(output, input, group, **options)
        output.copy_(input.chunk(group.size())[group.rank()])
        return work

    monkeypatch.setattr(comm, "reduce_scatter", reduce)


@pytest.fixture
def world_of_4(fake_world: Callable[[int], None]) -> None:
    """Makes this process rank 0 of 4 ranks without transport."""
    fake_world(4)


@pytest.fixture
def mode(world_of_4: None) -> Iterator[LocalTensorMode]:
    """Ranks 0 to 3 as LocalTensors."""
    with LocalTensorMode(4) as active:
        yield active
