"""Views of sharded tensors: where the shards lie afterwards, and that nothing moves or gets lost."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from core.tests.gloo_world import on_ranks
from core.tests.placing import place
from dtbench_core import (
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    count_collectives,
)
from dtbench_core.layout.placement import Placements
from dtbench_core.rules.regroup import regrouped_placements
from dtbench_core.rules.view import _factor_groups

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)


def _part(whole: torch.Tensor, placements: Placements, sizes: tuple[int, ...], at: tuple[int, ...]) -> Any:
    for placement, parts, index in zip(placements, sizes, at, strict=True):
        if isinstance(placement, Shard):
            whole = placement.part(whole, parts, index)
    return whole


CASES: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], Any, Any]] = [
    # before, after, mesh, placements, those of the view
    ((8, 4), (32,), (4,), (S1,), (StridedShard(0, 8),)),
    ((32,), (8, 4), (4,), (StridedShard(0, 8),), (S1,)),
    ((8, 4), (32,), (4,), (S0,), (S0,)),
    ((5, 3), (15,), (4,), (S0,), (RaggedShard(0, (6, 6, 3, 0)),)),
    ((15,), (5, 3), (4,), (RaggedShard(0, (6, 6, 3, 0)),), (S0,)),
    ((8, 4), (4, 2, 4), (4,), (RaggedShard(0, (2, 4, 2, 0)),), (RaggedShard(0, (1, 2, 1, 0)),)),
    ((8, 4), (4, 2, 4), (4,), (RaggedShard(0, (1, 5, 2, 0)),), None),
    ((2, 8, 3), (16, 3), (4,), (S1,), (StridedShard(0, 2),)),
    ((4, 8, 3), (32, 3), (2, 2), (S0, S1), (S0, StridedShard(0, 2))),
    ((4, 8, 3), (32, 3), (2, 2), (S1, S2), (StridedShard(0, 4), S1)),
    ((4, 8, 6), (192,), (2, 2), (S1, S2), (StridedShard(0, 4), StridedShard(0, 16))),
    ((5, 8), (40,), (2, 2), (S0, S1), None),
    ((4, 6), (24,), (4,), (S1,), None),
    ((4, 6), (8, 3), (2,), (S1,), (StridedShard(0, 4),)),
]


@pytest.mark.parametrize(("before", "after", "mesh", "placements", "expected"), CASES)
def test_where_shards_lie(before: Any, after: Any, mesh: Any, placements: Any, expected: Any) -> None:
    assert regrouped_placements(placements, mesh, before, after, _factor_groups(before, after)) == expected


@st.composite
def _views(draw: Any) -> Any:
    """Two shapes of the same elements, a mesh, and placements that the first can have."""
    factors = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4, 5]), min_size=1, max_size=5))
    shapes = []
    for _ in range(2):
        cuts = sorted(draw(st.sets(st.integers(1, len(factors)), max_size=3)) | {len(factors)})
        shapes.append(tuple(math.prod(factors[a:b]) for a, b in itertools.pairwise([0, *cuts])))
    mesh = tuple(draw(st.lists(st.sampled_from([2, 3, 4]), min_size=1, max_size=3)))
    left = [{n} for n in shapes[0]]
    placements: list[Placement] = []
    for parts in mesh:
        dim = draw(st.integers(0, len(shapes[0]) - 1))
        kinds: list[Placement] = [R, Shard(dim)]
        if len(left[dim]) == 1:
            (n,) = left[dim]
            at = sorted(draw(st.lists(st.integers(0, n), min_size=parts - 1, max_size=parts - 1)))
            kinds.append(RaggedShard(dim, tuple(b - a for a, b in itertools.pairwise([0, *at, n]))))
            kinds += [StridedShard(dim, f) for f in (2, 3, 4) if n % f == 0]
        placement = draw(st.sampled_from(kinds))
        placements.append(placement)
        if isinstance(placement, Shard):
            left[dim] = {k for n in left[dim] for k in placement.lengths(n, parts)}
    return shapes[0], shapes[1], mesh, tuple(placements)


@settings(max_examples=300, deadline=None)
@given(_views())
def test_every_part_of_the_view_is_the_view_of_the_part(case: Any) -> None:
    before, after, mesh, placements = case
    view_placements = regrouped_placements(placements, mesh, before, after, _factor_groups(before, after))
    if view_placements is None:
        return
    whole = torch.arange(math.prod(before))
    for at in itertools.product(*map(range, mesh)):
        part = _part(whole.view(before), placements, mesh, at)
        mine = _part(whole.view(after), view_placements, mesh, at)
        assert torch.equal(part.reshape(-1), mine.reshape(-1)), (view_placements, at)


@pytest.mark.parametrize(
    ("mesh", "placements", "shape"),
    [
        ((4,), [S1], (2, 8, 4)),
        ((4,), [S0], (5, 3, 4)),
        ((2, 2), [S0, S1], (4, 6, 4)),
        ((2, 2), [S1, S0], (4, 6, 4)),
        ((4,), [RaggedShard(0, (1, 0, 2, 1))], (4, 3, 4)),
    ],
)
@on_ranks
def test_products_over_joined_dims_stay_local(
    mesh: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]
) -> None:
    """A matrix product over a joined dim, forward and backward, as a linear layer does it by views."""
    full = (torch.arange(float(math.prod(shape))).reshape(shape) / 10).requires_grad_()
    weight = (torch.arange(12.0).reshape(3, 4) / 10).requires_grad_()
    x = place(full.detach(), *placements, mesh=mesh).requires_grad_()
    w = place(weight.detach(), mesh=mesh).requires_grad_()
    out = F.gelu((full.view(-1, shape[-1]) @ weight.t()).view(*shape[:-1], 3))
    with count_collectives() as count:
        got = F.gelu((x.view(-1, shape[-1]) @ w.t()).view(*shape[:-1], 3))
    assert not count.calls, "nothing moves on the way"
    whole = got.full_tensor()
    for result in (out, whole):
        result.pow(2).sum().backward()
    assert got.placements == x.grad.placements == tuple(placements)
    torch.testing.assert_close(
        [whole, x.grad.full_tensor(), w.grad.full_tensor()], [out, full.grad, weight.grad]
    )
