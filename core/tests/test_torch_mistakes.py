"""What torch.distributed.tensor 2.13 is known to get silently wrong, each compared with plain tensors here.

The cases are those of its issue tracker and of a survey of its op database that the tables of op_cases/ do not hold in
these placements: gradients scaled by the ranks, means of means, shards labelled whole, pending terms read as numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.placing import assert_like_plain, place
from dtbench_core import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
)

R, P, AVG = Replicate(), Partial(), Partial("avg")
S0, S1, S2, S3 = (Shard(d) for d in range(4))


class Case(NamedTuple):
    """fn(*inputs) on shapes; which of the placements each input takes."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    placements: tuple[tuple[Placement, ...], ...]


EVEN = ((8, 4), (8, 4))
CASES: dict[str, Case] = {
    "conv1d": Case(
        F.conv1d, ((4, 4, 9), (8, 4, 3)), tuple(itertools.product((S0, S1, S2, P), (R, S0, S1, P)))
    ),
    "conv2d with bias": Case(
        F.conv2d,
        ((4, 4, 6, 6), (8, 4, 3, 3), (8,)),
        ((S0, R, R), (S1, S1, R), (R, S0, S0), (P, R, R), (R, R, P), (S2, R, S0), (S3, S0, R)),
    ),
    "conv_transpose2d": Case(
        F.conv_transpose2d,
        ((4, 4, 5, 5), (4, 8, 3, 3)),
        tuple(itertools.product((S0, S1, S3, P), (R, S0, S1))),
    ),
    "scatter_add_": Case(
        lambda x, src: (x * 1).scatter_add_(0, _index(x, [[0, 1, 7, 7], [3, 3, 0, 1]]), src[:2]),
        EVEN,
        ((S0, S0), (S1, S1), (S0, R), (S1, S0)),
    ),
    "linear of a vector, with bias": Case(
        F.linear, ((8,), (4, 8), (4,)), ((R, R, R), (S0, S1, R), (R, S0, S0))
    ),
    "a number added to a pending sum": Case(lambda x: x + 3, ((8, 4),), ((P,), (AVG,), (S0,))),
    "a cached number": Case(lambda x: (x + 1) + (x + 2) + (x * 2) * (x * 3), ((8, 4),), ((P,), (S0,))),
    "a 0-dim tensor added to a pending sum": Case(lambda x: x + torch.tensor(2.0), ((8, 4),), ((P,), (S1,))),
    "mean, uneven": Case(lambda x: x.mean(0) + x.mean(), ((5, 3),), ((S0,), (S1,), (P,))),
    "mean, empty shards": Case(lambda x: x.mean(), ((2, 3),), ((S0,),)),
    "norm of a pending sum": Case(
        lambda x: torch.linalg.vector_norm(x) + x.norm(3) + torch.linalg.norm(x),
        ((8, 4),),
        ((P,), (S0,), (S1,)),
    ),
    "extremum and variance of a pending sum": Case(
        lambda x: x.amax(0) + x.max() + x.var(0) + x.std(), ((8, 4),), ((P,), (S0,))
    ),
    "index_put, accumulated": Case(
        lambda x, v: torch.index_put(x, (_index(x, [1, 1]),), v[:2], accumulate=True),
        EVEN,
        ((S0, S0), (S1, S1), (S0, P)),
    ),
    "indexing by a tensor": Case(lambda x: x[_index(x, [6, 0, 6])], ((8, 4),), ((S0,), (S1,), (P,))),
    "negative dims": Case(
        lambda x: x.sum(-2) + x.cumsum(-2)[-1] + x.softmax(-2)[0] + x.flip(-2)[1] + x.unsqueeze(-3)[0, 0],
        ((8, 4),),
        ((S0,), (S1,), (P,)),
    ),
    "a gather smaller than its source": Case(
        lambda x: x.gather(0, _index(x, [[7, 0], [1, 1]])), ((8, 4),), ((S0,), (S1,), (P,))
    ),
    "matmul, both dims": Case(
        torch.matmul, ((8, 4), (4, 8)), tuple(itertools.product((S0, S1, P, R), repeat=2))
    ),
    "flatten an inner shard and split it again": Case(
        lambda x: x.flatten(0, 1).mul(2).unflatten(0, (4, 8)), ((4, 8, 4),), ((S0,), (S1,), (S2,))
    ),
    "trace and prod": Case(lambda x: x[:4].trace() + x[:2, :2].prod(), ((8, 4),), ((S0,), (S1,), (P,))),
    "batch_norm": Case(lambda x: F.batch_norm(x, None, None, training=True), ((8, 4),), ((S0,), (S1,), (P,))),
}


def _index(like: Any, values: list[Any]) -> Any:
    index = torch.tensor(values)
    return place(index) if isinstance(like, DTensor) else index


def _placed(full: torch.Tensor, placement: Placement) -> DTensor:
    if isinstance(placement, Partial):
        share = 1 + (dist.get_rank() - 1.5) / 2  # 0.25, 0.75, 1.25, 1.75: mean 1, sum 4
        local = full.detach() * (share if placement.reduce_op == "avg" else share / 4)
        return DTensor.from_local(local, mesh_of((4,)), [placement]).requires_grad_()
    return place(full.detach(), placement).requires_grad_()


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@pytest.mark.parametrize("name", CASES)
@on_ranks
def test_right_where_torch_is_known_to_be_wrong(name: str) -> None:
    case = CASES[name]
    for placements in case.placements:
        seed = torch.Generator().manual_seed(0)
        plain = [torch.randn(n, generator=seed, dtype=torch.float64).requires_grad_() for n in case.shapes]
        placed = [_placed(t, p) for t, p in zip(plain, placements, strict=True)]
        assert_like_plain(case.fn, plain, placed, placements)
