"""Collectives of the core against plain arithmetic, on gloo processes and on threads."""

import functools
from collections.abc import Callable

import pytest
import torch.distributed as dist

from core.tests.gloo_world import BACKEND, REDUCES_PRODUCTS, WORLD_SIZE, on_ranks, on_ranks_of
from core.tests.local_world import AnyWorlds
from core.tests.on_device import torch
from dtbench_core import ArgumentError, comm, count_collectives

N = WORLD_SIZE
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.complex64]


@pytest.fixture(params=[BACKEND] if BACKEND else ["gloo", "threads"])
def everywhere(request: pytest.FixtureRequest) -> AnyWorlds:
    """Runs a function on four gloo processes or on four simulated ranks."""
    worlds: AnyWorlds = request.getfixturevalue("ranks" if request.param == "threads" else "gloo_ranks")
    return worlds


on_everywhere = functools.partial(on_ranks_of, fixture="everywhere")


def _mine(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return _of(dist.get_rank(), dtype, *shape)


def _of(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    values = (torch.arange(torch.Size(shape).numel()).reshape(shape) + 7 * rank) % 5
    return values.to(dtype) * (1 + rank * 1j) if dtype.is_complex else values.to(dtype)


def _all(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.stack([_of(r, dtype, *shape) for r in range(N)])


@pytest.mark.parametrize("async_op", [False, True])
@on_everywhere
def test_moving(async_op: bool) -> None:
    """Checks the collectives without arithmetic."""
    group, rank = dist.group.WORLD, dist.get_rank()
    cut, fewer = list(range(1, N + 1)), list(range(N))  # rows that each rank gets from every rank
    for dtype in DTYPES:
        gathered, exchanged = torch.empty(N * 2, 3, dtype=dtype), torch.empty(N * 2, 3, dtype=dtype)
        sent, received = _mine(dtype, 2, 3), torch.empty(2, 3, dtype=dtype)
        pieces = [_of(r, dtype, 2, 3) for r in range(N)] if rank == N - 1 else None
        uneven = torch.empty(N * (rank + 1), 2, dtype=dtype)
        some = torch.empty(N * rank, 2, dtype=dtype)  # rank 0 gets nothing
        works = [
            comm.all_gather(gathered, _mine(dtype, 2, 3), group, async_op),
            comm.all_to_all(exchanged, _mine(dtype, N * 2, 3), group, async_op=async_op),
            comm.all_to_all(uneven, _mine(dtype, sum(cut), 2), group, [rank + 1] * N, cut, async_op=async_op),
            comm.all_to_all(some, _mine(dtype, sum(fewer), 2), group, [rank] * N, fewer, async_op=async_op),
            comm.broadcast(sent, group, 1, async_op),
            comm.scatter(received, pieces, group, N - 1, async_op),
        ]
        for work in works:
            assert (work is not None) is async_op
            if work is not None:
                work.wait()
        whole, cuts = _all(dtype, N * 2, 3), _all(dtype, sum(cut), 2)
        start, other = sum(cut[:rank]), sum(fewer[:rank])
        wanted = {
            "all_gather": (gathered, _all(dtype, 2, 3).flatten(0, 1)),
            "all_to_all": (exchanged, whole[:, 2 * rank : 2 * rank + 2].flatten(0, 1)),
            "uneven all_to_all": (uneven, cuts[:, start : start + rank + 1].flatten(0, 1)),
            "of some": (some, _all(dtype, sum(fewer), 2)[:, other : other + rank].flatten(0, 1)),
            "broadcast": (sent, _of(1, dtype, 2, 3)),
            "scatter": (received, _of(rank, dtype, 2, 3)),
        }
        assert [name for name, (got, want) in wanted.items() if not torch.equal(got, want)] == [], dtype


_REDUCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda t: t.sum(0),
    "avg": lambda t: t.mean(0),
    "product": lambda t: t.prod(0),
    "max": lambda t: t.amax(0),
    "min": lambda t: t.amin(0),
}


@pytest.mark.parametrize("async_op", [False, True])
@on_everywhere
def test_reducing(async_op: bool) -> None:
    group, rank = dist.group.WORLD, dist.get_rank()
    for dtype in (torch.float64, torch.int32, torch.complex64):
        for op, reduce in _REDUCTIONS.items():
            is_undefined = (op == "avg" and dtype == torch.int32) or (
                op not in ("sum", "avg") and dtype.is_complex
            )
            if is_undefined or (op == "product" and not REDUCES_PRODUCTS):
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
            want = reduce(_all(dtype, N * 2, 3)).to(dtype)
            torch.testing.assert_close(
                [tensor, part], [want, want[2 * rank : 2 * rank + 2]], rtol=1e-5, atol=1e-8
            )
    # Reductions that pairs of real numbers do not follow.
    tensor, refused = torch.ones(N, dtype=torch.complex64), "got complex numbers and the reduction"
    with pytest.raises(ArgumentError, match=f"all_reduce {refused} 'product', exp"):
        comm.all_reduce(tensor, group, "product")
    with pytest.raises(ArgumentError, match=f"reduce_scatter {refused} 'max'"):
        comm.reduce_scatter(tensor[:1], tensor, group, "max")


@on_ranks
def test_objects() -> None:
    group = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    mine = {"rank": dist.get_rank()}
    assert comm.all_gather_objects(mine) == [{"rank": r} for r in range(N)]
    first = dist.get_rank() // 2 * 2
    assert comm.all_gather_objects(mine, group) == [{"rank": first}, {"rank": first + 1}]


@on_everywhere
def test_calls_and_bytes_are_counted() -> None:
    group, small, large = dist.group.WORLD, torch.ones(2), torch.ones(2 * N)
    with count_collectives() as outer:
        comm.all_gather(large, small, group)
        with count_collectives() as inner:
            comm.reduce_scatter(small, large, group, "avg")
        comm.all_reduce(large, group, "avg")
        comm.all_to_all(torch.empty(2 * N), large, group)
        comm.broadcast(small, group)
        comm.scatter(small, [small.clone() for _ in range(N)] if group.rank() == 0 else None, group)
    comm.broadcast(small, group)
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "scatter")
    assert outer.calls == dict.fromkeys(names, 1) and inner.calls == {"reduce_scatter": 1}
    assert outer.bytes == {**dict.fromkeys(names[:4], 8 * N), "broadcast": 8, "scatter": 8}
