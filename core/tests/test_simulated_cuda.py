"""Simulated ranks on a CUDA device that is not there: each has a generator of it, and its collectives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from core.tests.test_local_tensor import RANKS, held
from dtbench_core.simulate import LocalTensorMode, ThreadWorld, rank_map

N = 4


@pytest.fixture(scope="module")
def world() -> Iterator[ThreadWorld]:
    with ThreadWorld(N) as world:
        yield world


@pytest.fixture
def cuda_generator(monkeypatch: pytest.MonkeyPatch) -> torch.Generator:
    """The default generator of a CUDA device that is not there."""
    generator = torch.Generator()
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    return generator


def test_ranks_have_a_cuda_generator_each(world: ThreadWorld, cuda_generator: torch.Generator) -> None:
    def body() -> list[float]:
        cuda_generator.manual_seed(dist.get_rank())
        drawn = []
        for _ in range(3):
            drawn.append(float(torch.rand((), generator=cuda_generator)))
            dist.barrier()  # others draw here
        return drawn

    before = cuda_generator.get_state()
    got = world.run(body)
    assert torch.equal(cuda_generator.get_state(), before)
    for rank in range(N):
        alone = torch.Generator().manual_seed(rank)
        assert got[rank] == [float(torch.rand((), generator=alone)) for _ in range(3)]


def test_simulated_ranks_name_their_backend_for_a_gpu(world: ThreadWorld) -> None:
    def devices() -> set[str]:
        return set(dist.distributed_c10d.BackendConfig(dist.Backend(dist.get_backend())).device_backend_map)

    assert all({"cpu", "cuda"} <= named for named in world.run(devices))


def test_cuda_states_by_rank(mode: LocalTensorMode, cuda_generator: torch.Generator) -> None:
    """Seeding each rank seeds its CUDA generator, whose state it can ask and set."""

    def states() -> list[list[int]]:
        return held(rank_map(lambda rank: cuda_generator.get_state()))

    with mode.disable():
        want = [torch.Generator().manual_seed(rank).get_state().tolist() for rank in RANKS]
    torch.manual_seed(dist.get_rank())
    kept = torch.cuda.get_rng_state()
    assert states() == held(kept) == want
    rank_map(lambda rank: cuda_generator.manual_seed(5).initial_seed())
    assert states() == [states()[0]] * len(RANKS) != want
    torch.cuda.set_rng_state(kept)
    assert states() == want


def test_backward_stays_on_a_rank_s_thread(world: ThreadWorld) -> None:
    """For a GPU autograd has a thread of its own, which is no rank's, unless it is told to use the caller's."""

    def body() -> bool:
        return torch._C._is_multithreading_enabled()

    assert world.run(body) == [False] * N and body()


def test_backward_of_local_tensors_stays_on_the_caller_s_thread(mode: LocalTensorMode) -> None:
    assert not torch._C._is_multithreading_enabled()
    with mode.disable():
        assert not torch._C._is_multithreading_enabled()
