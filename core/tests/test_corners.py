"""Corners of the interface where programs lean on plain tensors' behaviour, and names that torch has."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as torchs_extents

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.placing import place
from dtbench_core import (
    DTensor,
    LayoutError,
    Partial,
    PlacementError,
    Replicate,
    Shard,
    compute_local_shape_and_global_offset,
    distribute_tensor,
)

S, R, P = Shard, Replicate(), Partial()


@on_ranks
def test_checked_replicas_agree_in_everything() -> None:
    mesh, rank = mesh_of((4,)), dist.get_rank()
    different = [
        torch.ones(2, requires_grad=rank == 0),
        torch.ones(2, 3) if rank else torch.ones(3, 2).t(),
        torch.ones(2, dtype=torch.float64 if rank == 1 else torch.float32),
    ]
    for local in different:
        with pytest.raises(LayoutError, match="differ between ranks"):
            DTensor.from_local(local, mesh, [R], run_check=True)
    assert DTensor.from_local(torch.ones(2, requires_grad=True), mesh, [R], run_check=True).requires_grad


class _Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2 + grads[1] * 3


@on_ranks
def test_functions_whose_outputs_are_not_all_used() -> None:
    """Autograd gives plain zeros for the others."""
    mesh, full = mesh_of((4,)), torch.arange(15.0).view(5, 3)
    for placed in (S(0), R, P):
        for used in (0, 1):
            x = distribute_tensor(full, mesh, [placed], src_data_rank=None).requires_grad_()
            _Two.apply(x)[used].sum().backward()
            assert x.grad is not None and torch.equal(x.grad.full_tensor(), torch.full((5, 3), 2.0 + used))
    local = torch.ones(2, requires_grad=True)
    y = DTensor.from_local(local * 1, mesh, [S(0)])
    y.eq_(y).sum().backward()  # zeros of autograd's own
    assert local.grad is not None and not local.grad.any()


def _through_a_file(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(held, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _through_a_file], ids=["copied", "saved"])
@on_ranks
def test_duplicates_share_memory_as_the_originals_do(duplicate: Any) -> None:
    def written(x: torch.Tensor, names: str) -> list[torch.Tensor]:
        held = {"x": x, "v": x[1:4], "t": x.t()[:, 2:], "w": x[1:4][1]}
        held["x"].add_(1)
        duplicates = duplicate({name: held[name] for name in names})
        duplicates["x"][2].zero_()
        duplicates["v"].mul_(2)
        duplicates["t"].add_(1)
        duplicates["w"][0].sub_(5)
        held["v"].fill_(9)  # which none of the duplicates has
        return [duplicates[name] for name in sorted(names)]

    values = torch.arange(20.0).view(10, 2)
    for names in ("xvtw", "vxwt", "twvx"):
        wanted = written(values.clone(), names)
        for placed in (S(0), R, S(1)):
            for full, got in zip(wanted, written(place(values.clone(), placed), names), strict=True):
                assert isinstance(got, DTensor) and got.storage_offset() == full.storage_offset()
                assert torch.equal(got.full_tensor(), full), (placed, names)


@on_ranks
def test_a_copied_view_of_an_expanded_tensor() -> None:
    """It is read as it should be; which of its elements a write would leave in the base is not known."""
    x = place(torch.arange(2.0), S(0))
    seen = x.expand(2, 2).diagonal()
    with pytest.raises(PlacementError, match="the write would be lost"):
        seen.fill_(2)
    x.add_(1)
    assert seen.full_tensor().tolist() == [1.0, 2.0]


@on_ranks
def test_names_of_torch() -> None:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    assert S.local_shard_size_and_offset(10, 4, 3) == (1, 9) and S.local_shard_size_and_offset(5, 4, 3) == (
        0,
        5,
    )
    theirs = torch.distributed.tensor
    for shape in ((5, 3), (8, 4), (1, 1)):
        for dims in ((0, 1), (0, 0), (1, 0)):
            ours = compute_local_shape_and_global_offset(shape, mesh, [S(d) for d in dims])
            assert ours == torchs_extents(shape, mesh, [theirs.Shard(d) for d in dims]), (shape, dims, rank)
