"""The collectives of one mesh dim, padding, and metadata checks, against plain torch on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import _collective_utils as torch_utils

from core.tests.gloo_world import mesh_of, on_ranks
from core.tests.local_world import ThreadWorlds
from dtbench_core import ArgumentError, count_collectives
from dtbench_core.cost.redistribution import redistribute_cost
from dtbench_core.interop import collective_utils


def test_all_names_of_torch_are_here() -> None:
    public = {
        name
        for name, value in vars(torch_utils).items()
        if getattr(value, "__module__", "") == torch_utils.__name__ and not name.startswith("_")
    }
    ours = set(collective_utils.__all__)
    assert public <= ours, "what a user of torch's module finds there"
    assert all(hasattr(collective_utils, name) for name in ours)
    assert collective_utils.redistribute_cost is redistribute_cost


# ---- padding ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.complex64])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_padding_equals_torch(dim: int, dtype: torch.dtype) -> None:
    tensor = (torch.arange(24).reshape(2, 3, 4) % 3).to(dtype)
    padded = collective_utils.pad_tensor(tensor, dim, 2)
    filler = tensor.new_zeros(*(2 if d == dim % 3 else n for d, n in enumerate(tensor.shape)))
    assert torch.equal(padded, torch.cat([tensor, filler], dim))
    if dim >= 0:
        assert torch.equal(padded, torch_utils.pad_tensor(tensor, dim, 2))
    back = collective_utils.unpad_tensor(padded, dim, 2)
    assert torch.equal(back, tensor)
    assert back.untyped_storage().data_ptr() == padded.untyped_storage().data_ptr()


def test_empty_shards_are_appended_in_place() -> None:
    shards = list(torch.ones(3, 5, dtype=torch.float64).split([2, 1]))
    filled = collective_utils.fill_empty_tensor_to_shards(shards, 0, 2)
    assert filled is shards
    assert [tuple(s.shape) for s in shards] == [(2, 5), (1, 5), (0, 5), (0, 5)]
    assert {s.dtype for s in shards} == {torch.float64}
    assert collective_utils.fill_empty_tensor_to_shards(shards, 0, 0) is shards
    assert len(shards) == 4


# ---- shard_dim_alltoall ----


@pytest.mark.parametrize("direct", [False, True], ids=["fallback", "op"])
@pytest.mark.parametrize("shape", [(4, 8, 4), (5, 3, 2)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
@on_ranks
def test_exchange_of_dims(mesh_shape: tuple[int, ...], shape: tuple[int, ...], direct: bool) -> None:
    """Every pair of dims, on every mesh dim, against cutting the full tensor."""
    mesh = mesh_of(mesh_shape)
    for mesh_dim, (src, dst) in ((m, p) for m in range(mesh.ndim) for p in ((0, 1), (1, 0), (1, 2), (-1, 0))):
        ranks, me, group = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim), mesh.get_group(mesh_dim)
        full = torch.arange(torch.Size(shape).numel()).reshape(shape).repeat_interleave(ranks, src)
        full += 1000 * sum(r for d, r in enumerate(mesh.get_coordinate()) if d != mesh_dim)
        mine = full.chunk(ranks, src)[me]
        if direct:
            got = torch.ops.dtbench_core.shard_dim_alltoall(mine, src, dst, group.group_name)
        else:
            got = collective_utils.shard_dim_alltoall(mine, src, dst, mesh, mesh_dim)
        pieces = list(full.chunk(ranks, dst))
        want = collective_utils.fill_empty_tensor_to_shards(pieces, dst, ranks - len(pieces))[me]
        assert torch.equal(got, want) and got.is_contiguous(), (mesh_dim, src, dst)


def test_the_op_has_a_meta_kernel(fake_world: Callable[..., None]) -> None:
    fake_world(4, rank=2)
    mesh = init_device_mesh("cpu", (4,))
    name = mesh.get_group(0).group_name
    shard = torch.empty(2, 8, 3, device="meta", dtype=torch.bfloat16).transpose(0, 2)
    moved = torch.ops.dtbench_core.shard_dim_alltoall(shard, 2, 1, name)
    assert (moved.shape, moved.dtype, moved.device.type) == ((3, 2, 8), torch.bfloat16, "meta")
    assert moved.is_contiguous()
    uneven = torch.ops.dtbench_core.shard_dim_alltoall(shard, 2, 0, name)
    assert uneven.shape == (1, 8, 8), "rank 2 of 4 has the last of 3 rows"


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((0, 2), r"shard_dim=2 .* shape \[2, 4\], expected a dim in \[-2, 2\)"),
        ((1, -1), "expected two different dims"),
    ],
)
def test_dims_are_checked(fake_world: Callable[..., None], dims: tuple[int, int], message: str) -> None:
    fake_world(4)
    with pytest.raises(ArgumentError, match=message):
        collective_utils.shard_dim_alltoall(torch.ones(2, 4), *dims, init_device_mesh("cpu", (4,)), 0)


# ---- scatter and broadcast ----


@on_ranks
def test_scatter_and_broadcast_along_a_mesh_dim() -> None:
    """Ranks 0 1 / 2 3: down the columns from the first row, then along the rows from the second column."""
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    for mesh_dim, src, source in ((0, 0, rank % 2), (1, 1, rank // 2 * 2 + 1)):
        me = mesh.get_local_rank(mesh_dim)
        pieces = [torch.full((2,), 10.0 * rank + i) for i in range(2)]
        tensors: Any = pieces if me == src else "never looked at"
        output, later, sent = torch.empty(2), torch.empty(2), torch.full((2,), float(rank))
        assert collective_utils.mesh_scatter(output, tensors, mesh, mesh_dim, group_src=src) is None
        collective_utils.mesh_broadcast(sent, mesh, mesh_dim, async_op=True, group_src=src).wait()
        collective_utils.mesh_scatter(later, tensors, mesh, mesh_dim, True, group_src=src).wait()
        assert output.tolist() == later.tolist() == [10.0 * source + me] * 2
        assert sent.tolist() == [source] * 2


@on_ranks
def test_no_source_and_meta_tensors_send_nothing() -> None:
    mesh, rank = mesh_of((4,)), dist.get_rank()
    with count_collectives() as count:
        output, kept = torch.zeros(1), torch.full((1,), float(rank))
        pieces = [torch.full((1,), float(i)) for i in range(4)]
        assert collective_utils.mesh_scatter(output, pieces, mesh, group_src=None) is None
        assert collective_utils.mesh_broadcast(kept, mesh, group_src=None) is None
        meta = torch.empty(1, device="meta")
        assert collective_utils.mesh_scatter(meta, [meta] * 4, mesh, async_op=True) is None
        assert collective_utils.mesh_broadcast(meta, mesh, async_op=True) is None
    assert output.item() == kept.item() == rank and not count.calls


# ---- metadata ----


def _checked(which: str) -> None:
    rank = dist.get_rank()
    tensor = torch.ones(2, 3)
    if which == "dtype" and rank == 2:
        tensor = tensor.double()
    elif which == "grad" and rank == 1:
        tensor.requires_grad_()
    elif which == "shape" and rank == 3:
        tensor = torch.ones(3, 2)
    elif which == "stride" and rank == 0:
        tensor = torch.ones(3, 2).t()
    if which in ("shape", "stride"):
        assert collective_utils.check_tensor_meta(tensor) is None
    collective_utils.check_tensor_meta(tensor, check_shape_stride=True)


@pytest.mark.parametrize("which", ["dtype", "grad", "shape", "stride"])
def test_metadata_that_differ_raise_on_every_rank(ranks: ThreadWorlds, which: str) -> None:
    assert ranks(_checked, "") == [None] * 4
    text = r"Inconsistent tensor metadata \(including shape and stride\) across ranks\."
    # The notes: who has what.
    ranks.refuse(_checked, which, message=text + r"(?s:.*)rank 2: dtype", error=ValueError)
