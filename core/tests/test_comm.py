"""The collectives against plain maths, on real ranks and on simulated ones from one body."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from core.tests.gloo_world import Worlds
from core.tests.on_device import torch
from dtbench_core import ArgumentError, comm, count_collectives
from dtbench_core.simulate import ThreadWorld

N = 4
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


@pytest.fixture(scope="module")
def simulated() -> Iterator[ThreadWorld]:
    with ThreadWorld(N) as world:
        yield world


@pytest.fixture(params=["gloo", "simulated"])
def everywhere(request: pytest.FixtureRequest, ranks: Worlds, simulated: ThreadWorld) -> Callable[..., Any]:
    """Runs a body on four ranks, real ones or simulated ones."""
    return ranks if request.param == "gloo" else simulated.run


def _mine(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return _of(dist.get_rank(), dtype, *shape)


def _of(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = (torch.arange(torch.Size(shape).numel()).reshape(shape) + 7 * rank) % 5
    return values.to(dtype) * (1 + rank * 1j) if dtype.is_complex else values.to(dtype)


def _all(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.stack([_of(r, dtype, *shape) for r in range(N)])


def _moving(async_op: bool) -> list[str]:
    """What differs from plain maths in the collectives that only move."""
    group, rank, wrong = dist.group.WORLD, dist.get_rank(), []
    assert group is not None
    for dtype in DTYPES:
        gathered, exchanged = torch.empty(N * 2, 3, dtype=dtype), torch.empty(N * 2, 3, dtype=dtype)
        sent, received = _mine(dtype, 2, 3), torch.empty(2, 3, dtype=dtype)
        pieces = [_of(r, dtype, 2, 3) for r in range(N)] if rank == 2 else None
        uneven = torch.empty(N * (rank + 1), 2, dtype=dtype)
        some = torch.empty(N * rank, 2, dtype=dtype)  # rank 0 gets nothing
        works = [
            comm.all_gather(gathered, _mine(dtype, 2, 3), group, async_op),
            comm.all_to_all(exchanged, _mine(dtype, N * 2, 3), group, async_op=async_op),
            comm.all_to_all(
                uneven, _mine(dtype, 10, 2), group, [rank + 1] * N, [1, 2, 3, 4], async_op=async_op
            ),
            comm.all_to_all(some, _mine(dtype, 6, 2), group, [rank] * N, [0, 1, 2, 3], async_op=async_op),
            comm.broadcast(sent, group, 1, async_op),
            comm.scatter(received, pieces, group, 2, async_op),
        ]
        for work in works:
            if async_op:
                assert work is not None
                work.wait()
            elif work is not None:
                wrong.append("a call that waits has nothing to wait for")
        whole, cuts = _all(dtype, N * 2, 3), _all(dtype, 10, 2)
        starts, others = [0, 1, 3, 6], [0, 0, 1, 3]
        wanted = {
            "all_gather": (gathered, _all(dtype, 2, 3).flatten(0, 1)),
            "all_to_all": (exchanged, whole[:, 2 * rank : 2 * rank + 2].flatten(0, 1)),
            "uneven all_to_all": (uneven, cuts[:, starts[rank] : starts[rank] + rank + 1].flatten(0, 1)),
            "all_to_all of some": (
                some,
                _all(dtype, 6, 2)[:, others[rank] : others[rank] + rank].flatten(0, 1),
            ),
            "broadcast": (sent, _of(1, dtype, 2, 3)),
            "scatter": (received, _of(rank, dtype, 2, 3)),
        }
        wrong += [
            f"{name} of {dtype}: {got} is not {want}"
            for name, (got, want) in wanted.items()
            if not torch.equal(got, want)
        ]
    return wrong


@pytest.mark.parametrize("async_op", [False, True])
def test_moving(everywhere: Callable[..., Any], async_op: bool) -> None:
    for wrong in everywhere(_moving, async_op):
        assert not wrong, "\n".join(wrong)


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda t: t.sum(0),
    "avg": lambda t: t.mean(0),
    "product": lambda t: t.prod(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
}


def _reducing(async_op: bool) -> list[str]:
    group, rank, wrong = dist.group.WORLD, dist.get_rank(), []
    assert group is not None
    for dtype in (torch.float64, torch.int32, torch.complex64):
        for op, reduce in _REDUCTIONS.items():
            if (op == "avg" and dtype == torch.int32) or (op not in ("sum", "avg") and dtype.is_complex):
                continue
            tensor, part = _mine(dtype, N * 2, 3), torch.empty(2, 3, dtype=dtype)
            terms = tensor.clone()
            for work in (
                comm.all_reduce(tensor, group, op, async_op),
                comm.reduce_scatter(part, terms, group, op, async_op),
            ):
                if work is not None:
                    assert async_op
                    work.wait()
            want = reduce(_all(dtype, N * 2, 3))
            if not torch.allclose(tensor, want.to(dtype)):
                wrong.append(f"all_reduce {op} of {dtype}: {tensor} is not {want}")
            if not torch.allclose(part, want.to(dtype)[2 * rank : 2 * rank + 2]):
                wrong.append(f"reduce_scatter {op} of {dtype}: {part}")
    return wrong


@pytest.mark.parametrize("async_op", [False, True])
def test_reducing(everywhere: Callable[..., Any], async_op: bool) -> None:
    for wrong in everywhere(_reducing, async_op):
        assert not wrong, "\n".join(wrong)


def _complex_products() -> list[str]:
    told = []
    group = dist.group.WORLD
    assert group is not None
    tensor = torch.ones(N, dtype=torch.complex64)
    for call in (
        lambda: comm.all_reduce(tensor, group, "product"),
        lambda: comm.reduce_scatter(tensor[:1], tensor, group, "max"),
    ):
        try:
            call()
        except ArgumentError as error:
            told.append(str(error))
    return told


def test_reductions_that_pairs_do_not_follow_are_refused(everywhere: Callable[..., Any]) -> None:
    for first, second in everywhere(_complex_products):
        assert first.startswith("all_reduce got complex numbers and the reduction 'product', expected")
        assert second.startswith("reduce_scatter got complex numbers and the reduction 'max'")


def _objects() -> list[Any]:
    group = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    mine = {"rank": dist.get_rank()}
    return [comm.all_gather_objects(mine), comm.all_gather_objects(mine, group)]


def test_objects(ranks: Worlds) -> None:
    answers = ranks(_objects)
    assert [world for world, _ in answers] == [[{"rank": r} for r in range(N)]] * N
    assert [group for _, group in answers] == [
        [{"rank": r} for r in pair] for pair in ((0, 1),) * 2 + ((2, 3),) * 2
    ]


def _counted() -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    group = dist.group.WORLD
    assert group is not None
    small, large = torch.ones(2), torch.ones(2 * N)
    with count_collectives() as outer:
        comm.all_gather(large, small, group)
        with count_collectives() as inner:
            comm.reduce_scatter(small, large, group, "avg")
        comm.all_reduce(large, group, "avg")
        comm.all_to_all(torch.empty(2 * N), large, group)
        comm.broadcast(small, group)
        comm.scatter(small, [small.clone() for _ in range(N)] if group.rank() == 0 else None, group)
    comm.broadcast(small, group)
    return dict(outer.calls), dict(outer.bytes), dict(inner.calls)


def test_calls_and_bytes_are_counted(everywhere: Callable[..., Any]) -> None:
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "scatter")
    for calls, sizes, inner in everywhere(_counted):
        assert calls == dict.fromkeys(names, 1)
        assert sizes == {**dict.fromkeys(names[:4], 8 * N), "broadcast": 8, "scatter": 8}
        assert inner == {"reduce_scatter": 1}
