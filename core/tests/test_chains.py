"""Random chains of ops on random meshes, shapes and placements, against the same chain on plain tensors.

The ranks are simulated (threads that take turns), so that hundreds of worlds cost seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core.tests.gloo_world import mesh_of
from core.tests.local_world import ThreadWorlds
from core.tests.test_ops import place
from dtbench_core import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

MESHES = ((2,), (3,), (4,), (2, 2), (3, 2), (2, 2, 2))
MAX_SIZE = 6


class Link(NamedTuple):
    """One op of a chain: `pick` chooses its numbers for a shape, `run` applies it to (x, numbers)."""

    pick: Callable[[Any, tuple[int, ...]], Any]
    run: Callable[[Any, Any], Any]


def _dim(draw: Any, shape: tuple[int, ...]) -> int:
    return int(draw(st.integers(-len(shape), len(shape) - 1)))


def _cut(draw: Any, shape: tuple[int, ...]) -> tuple[int, int, int]:
    dim = _dim(draw, shape)
    start = draw(st.integers(0, shape[dim] - 1))
    return dim, start, draw(st.integers(1, shape[dim] - start))


def _split(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many elements."""
    left, sizes = math.prod(shape), []
    while left > 1 and len(sizes) < 2:
        divisors = [d for d in range(1, left + 1) if left % d == 0]
        sizes.append(draw(st.sampled_from(divisors)))
        left //= sizes[-1]
    return (*sizes, left)


def _nothing(draw: Any, shape: tuple[int, ...]) -> None:
    return None


LINKS: dict[str, Link] = {
    "relu": Link(_nothing, lambda x, _: torch.relu(x)),
    "times": Link(lambda draw, _: draw(st.sampled_from([2, 0.5, -1.5])), lambda x, n: x * n),
    "plus": Link(lambda draw, _: draw(st.sampled_from([1, 0.25])), lambda x, n: x + n),
    "square": Link(_nothing, lambda x, _: x * x),
    "twice": Link(_nothing, lambda x, _: x + x.sin()),
    "mean": Link(_dim, lambda x, d: x - x.mean(d, keepdim=True)),
    "sum": Link(_dim, lambda x, d: x.sum(d)),
    "sum_all": Link(_nothing, lambda x, _: x * x.sum()),
    "amax": Link(_dim, lambda x, d: x - x.amax(d, keepdim=True)),
    "softmax": Link(_dim, torch.softmax),
    "cumsum": Link(_dim, torch.cumsum),
    "sort": Link(_dim, lambda x, d: x.sort(d).values),
    "transpose": Link(lambda draw, s: (_dim(draw, s), _dim(draw, s)), lambda x, d: x.transpose(*d)),
    "flip": Link(_dim, lambda x, d: x.flip(d)),
    "narrow": Link(_cut, lambda x, cut: x.narrow(*cut)),
    "select": Link(_cut, lambda x, cut: x.select(*cut[:2])),
    "unsqueeze": Link(_dim, lambda x, d: x.unsqueeze(d)),
    "reshape": Link(_split, lambda x, shape: x.reshape(shape)),
    "expand": Link(lambda draw, _: draw(st.integers(1, 3)), lambda x, n: x.expand(n, *x.shape)),
    "cat": Link(_dim, lambda x, d: torch.cat([x, x * 2], d)),
    "split": Link(_cut, lambda x, cut: torch.cat(x.split(cut[2], cut[0])[::-1], cut[0])),
    "outer": Link(_nothing, lambda x, _: x.flatten()[:4].unsqueeze(1) @ x.flatten()[:4].unsqueeze(0)),
    "square_matrix": Link(_nothing, lambda x, _: x.flatten(1) @ x.flatten(1).t() if x.ndim > 1 else x),
    "pick": Link(_cut, lambda x, cut: x.index_select(cut[0], _like(x, [cut[1], 0, cut[1]]))),
    "mask": Link(_nothing, lambda x, _: x.masked_fill(x > 0.5, 0.0)),
    "write": Link(_nothing, lambda x, _: (x * 1).add_(x).mul_(0.5)),
    "write_part": Link(_nothing, lambda x, _: (x + 1).clamp_(max=1)),
    "norm": Link(_dim, lambda x, d: x / (1 + torch.linalg.vector_norm(x, dim=d, keepdim=True))),
    "var": Link(_dim, lambda x, d: x * x.var(d, correction=0, keepdim=True)),
}


def _like(x: Any, values: list[int]) -> Any:
    index = torch.tensor(values)
    return distribute_tensor(index, x.device_mesh, src_data_rank=None) if isinstance(x, DTensor) else index


class Chain(NamedTuple):
    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    links: tuple[tuple[str, Any], ...]


@st.composite
def chains(draw: Any) -> Chain:
    mesh = draw(st.sampled_from(MESHES))
    shape = tuple(draw(st.lists(st.integers(1, MAX_SIZE), min_size=1, max_size=3)))
    options = [Replicate(), Partial(), *(Shard(d) for d in range(len(shape)))]
    placements = tuple(draw(st.sampled_from(options)) for _ in mesh)
    links, x = [], torch.zeros(shape, dtype=torch.float64)
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(LINKS)))
        if x.ndim == 0 or x.numel() > 400:
            break
        numbers = LINKS[name].pick(draw, tuple(x.shape))
        x = LINKS[name].run(x, numbers)
        links.append((name, numbers))
    return Chain(mesh, shape, placements, tuple(links))


def _run(x: Any, chain: Chain) -> Any:
    for name, numbers in chain.links:
        x = LINKS[name].run(x, numbers)
    return x


def _as_plain(chain: Chain) -> None:
    """On a rank: what plain torch gives, with autograd and without."""
    mesh = mesh_of(chain.mesh)
    plain = torch.randn(chain.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain.requires_grad_()
    expected = _run(plain, chain)
    (wanted,) = torch.autograd.grad(expected.sin().sum(), plain)
    x = place(plain.detach(), mesh, chain.placements).requires_grad_()
    result = _run(x, chain)
    (gradient,) = torch.autograd.grad(result.sin().sum(), x)
    with torch.no_grad():
        fast = [_run(x, chain) for _ in range(3)][-1]
    got = [one.full_tensor() for one in (result, gradient, fast)]
    torch.testing.assert_close(got, [expected, wanted, expected], rtol=1e-7, atol=1e-9)


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_a_chain_equals_the_plain_one(ranks: ThreadWorlds, count: int) -> None:
    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(chain=chains())
    def every(chain: Chain) -> None:
        ranks(_as_plain, chain, world_size=math.prod(chain.mesh))

    every()
