"""ones, zeros, empty, full, rand, randn: the values of one device on any mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dtbench_core
from core.tests.gloo_world import Worlds, mesh_of
from dtbench_core import CoreError, DTensor, Partial, Placement, Replicate, Shard

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((4,), [R]),
    ((4,), [S0]),
    ((4,), [Shard(-1)]),
    ((2, 2), [S0, S1]),
    ((2, 2), [S0, S0]),
    ((2, 2), [R, S1]),
]


def _made(name: str, shape: tuple[int, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, bool, bool]]:
    """Per layout: the whole tensor, whether it is a leaf, and whether the local part has its shape."""
    out = []
    for sizes, placements in LAYOUTS:
        torch.manual_seed(7)
        size = (shape, 2.5) if name == "full" else shape
        made: DTensor = getattr(dtbench_core, name)(
            *size, device_mesh=mesh_of(sizes), placements=placements, **kwargs
        )
        fits = tuple(made.to_local().shape) == made._spec.local_shape
        out.append((made.full_tensor().detach(), made.is_leaf and made.requires_grad, fits))
    return out


@pytest.mark.parametrize("name", ["ones", "zeros", "full", "rand", "randn"])
@pytest.mark.parametrize(("shape", "dtype"), [((8, 4), None), ((5, 3), torch.float64), ((0, 3), None)])
def test_factories_give_the_values_of_one_device(
    ranks: Worlds, name: str, shape: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    torch.manual_seed(7)
    size = (shape, 2.5) if name == "full" else shape
    expected = getattr(torch, name)(*size, dtype=dtype)
    for by_rank in ranks(_made, name, shape, {"dtype": dtype, "requires_grad": True}):
        for whole, leaf, fits in by_rank:
            assert leaf and fits
            assert whole.dtype == expected.dtype
            assert torch.equal(whole, expected)


def _empty() -> tuple[Any, ...]:
    made = dtbench_core.empty((5, 3), dtype=torch.int64, device_mesh=mesh_of((4,)), placements=[S0])
    return tuple(made.shape), made.dtype, made.stride(), tuple(made.to_local().shape)


def test_empty(ranks: Worlds) -> None:
    got = ranks(_empty)
    assert [g[:3] for g in got] == [((5, 3), torch.int64, (3, 1))] * 4
    assert [g[3] for g in got] == [(2, 3), (2, 3), (1, 3), (0, 3)]


def _sequence_of_draws() -> list[float]:
    torch.manual_seed(1)
    a = dtbench_core.randn(6, device_mesh=mesh_of((4,)), placements=[S0])
    b = dtbench_core.rand(3, 2, device_mesh=mesh_of((2, 2)))
    return [*a.full_tensor().tolist(), *b.full_tensor().flatten().tolist(), float(torch.rand(1))]


def test_draws_follow_one_another_as_on_one_device(ranks: Worlds) -> None:
    torch.manual_seed(1)
    expected = [*torch.randn(6).tolist(), *torch.rand(3, 2).flatten().tolist(), float(torch.rand(1))]
    assert ranks(_sequence_of_draws) == [expected] * 4


def _forms() -> list[tuple[int, ...]]:
    with mesh_of((4,)):
        forms = [
            dtbench_core.ones(2, 3),
            dtbench_core.ones((2, 3)),
            dtbench_core.ones([2, 3]),
            dtbench_core.ones(torch.Size((2, 3))),
            dtbench_core.ones(()),
            dtbench_core.ones(),
            dtbench_core.full(4, True),
            dtbench_core.full((4,), 1 + 2j),
        ]
    return [(*t.shape, *t.placements, t.dtype) for t in forms]


def test_sizes_are_given_as_in_torch(ranks: Worlds) -> None:
    f = torch.float32
    expected: list[Any] = [(2, 3, R, f)] * 4 + [(R, f)] * 2 + [(4, R, torch.bool), (4, R, torch.complex64)]
    assert ranks(_forms) == [expected] * 4


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"size": (2, -1)}, r"got the size \(2, -1\), expected ints >= 0"),
    "size type": ({"size": (2, 1.5)}, r"got the size \(2, 1.5\), expected ints >= 0"),
    "layout": ({"layout": torch.sparse_coo}, "expected torch.strided"),
    "partial": ({"placements": [Partial()]}, "expected Shard or Replicate"),
    "too many": ({"placements": [S0, S0]}, "got 2 placements"),
    "dim": ({"placements": [Shard(2)]}, r"got Shard\(2\) for a tensor of 2 dims"),
    "no mesh": ({"device_mesh": None}, "no mesh is current"),
}


def _mistake(name: str) -> tuple[bool, str]:
    given = {"size": (2, 3), "device_mesh": mesh_of((4,)), **MISTAKES[name][0]}
    try:
        dtbench_core.zeros(given.pop("size"), **given)
    except Exception as error:
        return isinstance(error, CoreError), str(error)
    return False, "nothing was raised"


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(ranks: Worlds, name: str) -> None:
    import re

    for ours, message in ranks(_mistake, name):
        assert ours and re.search(MISTAKES[name][1], message), message
