"""The differentiable all-to-all against indexing of the full tensors of all ranks."""

import functools
from typing import Any

import pytest
import torch.distributed as dist

from core.tests.gloo_world import BACKEND, WORLD_SIZE, mesh_in, on_ranks, on_ranks_of, on_worlds
from core.tests.local_world import AnyWorlds
from core.tests.on_device import torch
from dtbench_core import ArgumentError, all_to_all_single_autograd, count_collectives
from dtbench_core.comm import OrderedGroup

N = WORLD_SIZE
# Rows by source and destination. Ranks that send or receive nothing, and ranks that keep everything.
COUNTS = {
    "equal": [[2] * N] * N,
    "unequal": [[(3 * i + j) % 4 for j in range(N)] for i in range(N)],
    "all to the last": [[0] * (N - 1) + [i] for i in range(N)],
    "nothing": [[0] * N] * N,
    "kept": [[3 * (i == j) for j in range(N)] for i in range(N)],
}


@pytest.fixture(params=[BACKEND] if BACKEND else ["gloo", "threads"])
def everywhere(request: pytest.FixtureRequest) -> AnyWorlds:
    worlds: AnyWorlds = request.getfixturevalue("ranks" if request.param == "threads" else "gloo_ranks")
    return worlds


on_everywhere = functools.partial(on_ranks_of, fixture="everywhere")


def rows_of(counts: list[list[int]], rank: int, start: float = 0.0) -> Any:
    """Returns the (rows, 3) values that a rank sends."""
    rows = sum(counts[rank])
    return torch.arange(rows * 3, dtype=torch.float64).view(rows, 3) + 1000 * rank + start


def exchanged(counts: list[list[int]], parts: list[Any], rank: int) -> Any:
    """Returns what `rank` receives if rank i sends `parts[i]`."""
    return torch.cat([part.split(row)[rank] for part, row in zip(parts, counts, strict=True)])


def transposed(counts: list[list[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*counts, strict=True)]


def check(counts: list[list[int]], group: Any, rank: int) -> None:
    received = transposed(counts)
    x = rows_of(counts, rank).requires_grad_()
    with count_collectives() as count:
        y = all_to_all_single_autograd(x, received[rank], counts[rank], group)
        assert torch.equal(y, exchanged(counts, [rows_of(counts, r) for r in range(N)], rank))
        # The gradient is a transposed view, so it is not contiguous.
        cotangents = [rows_of(received, r, 0.5) for r in range(N)]
        y.backward(cotangents[rank].t().contiguous().t())
    assert count.calls == {"all_to_all": 2}
    assert x.grad is not None and torch.equal(x.grad, exchanged(received, cotangents, rank))


@pytest.mark.parametrize("name", COUNTS)
@on_everywhere
def test_values_and_gradients_equal_indexing_of_full_tensors(name: str) -> None:
    check(COUNTS[name], dist.group.WORLD, dist.get_rank())


@on_everywhere
def test_dispatch_and_combine_with_a_tensor_used_twice() -> None:
    """Rows are scaled by the rank of their expert, so result and gradient are known per row."""
    counts, rank = COUNTS["unequal"], dist.get_rank()
    received, group = transposed(counts)[rank], dist.group.WORLD
    x = rows_of(counts, rank).requires_grad_()
    scale = torch.arange(1.0, N + 1, dtype=torch.float64).repeat_interleave(torch.tensor(counts[rank]))[
        :, None
    ]

    def through_experts(rows: Any) -> Any:
        dispatched = all_to_all_single_autograd(rows, received, counts[rank], group)
        return all_to_all_single_autograd(dispatched * (rank + 1), counts[rank], received, group)

    y = through_experts(x) + through_experts(x) * x
    assert torch.equal(y, x * scale + x * x * scale)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    torch.testing.assert_close(grad, scale + 2 * x * scale)
    (second,) = torch.autograd.grad(grad.sum(), x)  # the backward pass can be differentiated
    torch.testing.assert_close(second, (2 * scale).expand_as(x))


@on_everywhere
def test_groups_may_be_meshes_and_ordered_groups() -> None:
    """An ordered group counts its ranks in the caller's order; a mesh in that of its process group, as in torch."""
    rank, order = dist.get_rank(), [*range(1, N), 0]
    mesh = mesh_in(order)
    for group in (mesh, (mesh, 0), mesh.get_group()):
        check(COUNTS["unequal"], group, rank)
    check(COUNTS["unequal"], OrderedGroup(dist.group.WORLD, order), order.index(rank))


@on_worlds
def test_equal_parts_need_no_splits() -> None:
    rank = dist.get_rank()
    x = (torch.arange(2.0 * N) + 100 * rank).requires_grad_()
    y = all_to_all_single_autograd(x, None, None, dist.group.WORLD)
    want = torch.arange(N).repeat_interleave(2) * 100 + torch.arange(2).repeat(N) + 2 * rank
    assert torch.equal(y.detach(), want.to(y.dtype))
    (y * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.arange(1.0, N + 1).repeat_interleave(2))


@on_ranks
def test_splits_that_would_hang_are_refused() -> None:
    x, n, group = torch.ones(N, 2), N, dist.group.WORLD
    rank = dist.get_rank()
    shifted = [1] * n
    shifted[rank] = 2
    for outputs, inputs, rows in (
        ([1] * n, None, x),
        (None, None, torch.ones(N + 1)),
        ([1] * n, [2] * n, x),
        ([1] * (n + 1), [1] * n, x),
        (shifted, [1] * n, x),
    ):
        with pytest.raises(
            ArgumentError, match=f"got output_split_sizes=.*on rank {rank} of {n}: expected two lists"
        ):
            all_to_all_single_autograd(rows, outputs, inputs, group)
