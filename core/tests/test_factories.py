"""ones, zeros, empty, full, rand, randn, linspace, logspace: the values of one device on any mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtbench_core
from core.tests.gloo_world import mesh_of, on_ranks
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


@pytest.mark.parametrize("name", ["ones", "zeros", "full", "rand", "randn"])
@pytest.mark.parametrize(("shape", "dtype"), [((8, 4), None), ((5, 3), torch.float64), ((0, 3), None)])
@on_ranks
def test_factories_give_the_values_of_one_device(
    name: str, shape: tuple[int, ...], dtype: torch.dtype | None
) -> None:
    size = (shape, 2.5) if name == "full" else shape
    torch.manual_seed(7)
    expected = getattr(torch, name)(*size, dtype=dtype)
    for mesh, placements in LAYOUTS:
        torch.manual_seed(7)
        dtensor: DTensor = getattr(dtbench_core, name)(
            *size, dtype=dtype, requires_grad=True, device_mesh=mesh_of(mesh), placements=placements
        )
        assert dtensor.is_leaf and dtensor.requires_grad
        assert dtensor.to_local().shape == dtensor._spec.local_shape, placements
        assert dtensor.dtype == expected.dtype and torch.equal(dtensor.full_tensor(), expected), placements


@pytest.mark.parametrize("name", ["linspace", "logspace"])
@pytest.mark.parametrize(
    ("ends", "options"),
    [
        ((0.1, 3.7, 7), {}),
        ((-2.0, 5.0, 13), {"dtype": torch.float64}),
        ((3, 0, 5), {"dtype": torch.int64}),
        ((0.0, 1.0, 0), {}),
        ((0.0, 1.0 + 2.0j, 6), {}),
        ((torch.tensor(0.5), torch.tensor(2.0), 6), {}),
    ],
)
@on_ranks
def test_spaced_values_are_those_of_one_device(name: str, ends: Any, options: dict[str, Any]) -> None:
    want = getattr(torch, name)(*ends, **options)
    for mesh, placements in LAYOUTS:
        if S1 in placements:
            continue
        dtensor: DTensor = getattr(dtbench_core, name)(
            *ends, **options, device_mesh=mesh_of(mesh), placements=placements
        )
        assert dtensor.dtype == want.dtype and torch.equal(dtensor.full_tensor(), want), placements
    with pytest.raises(CoreError, match=rf"{name} got an end of shape \(2,\), expected a number"):
        getattr(dtbench_core, name)(torch.ones(2), 1.0, 3, device_mesh=mesh_of((4,)))


@on_ranks
def test_empty() -> None:
    dtensor = dtbench_core.empty((5, 3), dtype=torch.int64, device_mesh=mesh_of((4,)), placements=[S0])
    assert (dtensor.shape, dtensor.dtype, dtensor.stride()) == ((5, 3), torch.int64, (3, 1))
    assert dtensor.to_local().shape == ((2, 2, 1, 0)[dist.get_rank()], 3)


@on_ranks
def test_sizes_are_given_as_in_torch() -> None:
    with mesh_of((4,)):
        for size in ((2, 3), ((2, 3),), ([2, 3],), (torch.Size((2, 3)),), ((),)):
            dtensor, want = dtbench_core.ones(*size), torch.ones(*size)
            assert (dtensor.shape, dtensor.dtype, dtensor.placements) == (want.shape, want.dtype, (R,)), size
        assert dtbench_core.ones().shape == ()
        for size, value, dtype in ((4, True, torch.bool), ((4,), 1 + 2j, torch.complex64)):
            dtensor = dtbench_core.full(size, value)
            assert (dtensor.shape, dtensor.dtype, dtensor.placements) == ((4,), dtype, (R,)), value


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"size": (2, -1)}, r"got the size \(2, -1\), expected ints >= 0"),
    "layout": ({"layout": torch.sparse_coo}, "expected torch.strided"),
    "partial": ({"placements": [Partial()]}, "expected Shard or Replicate"),
    "too many": ({"placements": [S0, S0]}, "got 2 placements"),
    "dim": ({"placements": [Shard(2)]}, r"got Shard\(2\) for a tensor of 2 dims"),
    "no mesh": ({"device_mesh": None}, "no mesh is current"),
}


@pytest.mark.parametrize("name", MISTAKES)
@on_ranks
def test_mistakes(name: str) -> None:
    wrong, message = MISTAKES[name]
    options = {"size": (2, 3), "device_mesh": mesh_of((4,)), **wrong}
    with pytest.raises(CoreError, match=message):
        dtbench_core.zeros(options.pop("size"), **options)
