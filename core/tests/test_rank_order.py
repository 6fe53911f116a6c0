"""Meshes whose ranks do not ascend: torch sorts the ranks of a group, so that a rank's place in it is not its
coordinate. Compared with plain tensors."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from core.tests.gloo_world import mesh_in, on_ranks
from core.tests.op_cases import OPS
from core.tests.placing import assert_like_plain
from dtbench_core import (
    DTensor,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    distribute_tensor,
)
from dtbench_core.interop.collective_utils import mesh_broadcast, mesh_scatter, shard_dim_alltoall
from dtbench_core.layout.random import manual_seed

R, P = Replicate(), Partial()
MESHES = ([3, 2, 1, 0], [3, 1, 2, 0], [[3, 1], [2, 0]], [[0, 3], [2, 1]])


def _placements(mesh: DeviceMesh, dims: int) -> list[tuple[Placement, ...]]:
    kinds = (R, *(Shard(d) for d in range(dims)))
    return list(itertools.product(kinds, repeat=mesh.ndim))


def _full(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("order", MESHES, ids=str)
@pytest.mark.parametrize("shape", [(8, 4), (5, 3), (2, 1)], ids=str)
@on_ranks
def test_every_way_between_placements(order: Any, shape: tuple[int, ...]) -> None:
    """From every placement to every other: by gather, exchange, cut, scatter and reduction."""
    mesh, full = mesh_in(order), _full(*shape)
    for source, placed in itertools.product((None, 0), _placements(mesh, 2)):
        x = distribute_tensor(full, mesh, placed, src_data_rank=source)
        assert torch.equal(x.full_tensor(), full), (source, placed)
        for wanted in _placements(mesh, 2):
            assert torch.equal(x.redistribute(placements=wanted).full_tensor(), full), (placed, wanted)
    at = mesh.get_coordinate()
    place = at[0] if mesh.ndim == 1 else at[0] * 2 + at[1]
    for op, reduce in (("sum", torch.sum), ("max", torch.amax), ("product", torch.prod), ("avg", torch.mean)):
        terms = torch.stack([full + i for i in range(4)])
        x = DTensor.from_local(terms[place], mesh, [Partial(op)] * mesh.ndim)
        for wanted in _placements(mesh, 2):
            torch.testing.assert_close(x.redistribute(placements=wanted).full_tensor(), reduce(terms, 0))


@pytest.mark.parametrize("order", MESHES, ids=str)
@on_ranks
def test_other_cuts_and_what_ranks_tell_each_other(order: Any) -> None:
    mesh, full = mesh_in(order), _full(8, 6)
    more = [R] * (mesh.ndim - 1)
    size = mesh.size(0)
    counts = (1, 4, 0, 3)[:size] if size == 4 else (1, 7)
    for cut in (RaggedShard(0, counts), StridedShard(0, 2), StridedShard(1, 3)):
        x = distribute_tensor(full, mesh, [cut, *more], src_data_rank=None)
        for wanted in (R, Shard(0), Shard(1)):
            assert torch.equal(x.redistribute(placements=[wanted, *more]).full_tensor(), full), (cut, wanted)
    at = mesh.get_coordinate()
    start = sum(counts[: at[0]])
    local = full[start : start + counts[at[0]]]
    x = DTensor.from_local(local, mesh, [Shard(0), *more], shape=full.shape, stride=full.stride())
    assert x.placements[0] == RaggedShard(0, counts) and torch.equal(x.full_tensor(), full)
    checked = DTensor.from_local(full + sum(at), mesh, [R] * mesh.ndim, run_check=True)
    assert torch.equal(checked.to_local(), full)  # of the first rank by coordinate


OF_THE_TABLES = (
    *(
        "softmax",
        "cross_entropy",
        "layer_norm_plain",
        "sort",
        "cumsum",
        "view_join",
        "mean_dim",
        "std",
        "slice_other",
    ),
    *("embedding", "index_select_sharded", "gather_parts", "roll", "cat"),
)
PROGRAMS = {"matmul": lambda x, y: x @ y.t(), **{name: OPS[name].fn for name in OF_THE_TABLES}}


@pytest.mark.parametrize("order", MESHES[1:], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@on_ranks
def test_ops_and_gradients(order: Any, name: str) -> None:
    mesh, count = mesh_in(order), len(OPS[name].shapes) if name in OPS else 2
    for placed in (*_placements(mesh, 2), (P,) * mesh.ndim):
        plain = [t.clone().requires_grad_() for t in (_full(8, 4), _full(8, 4).flip(0))[:count]]
        spread = [_placed(t.detach(), mesh, placed).requires_grad_() for t in plain]
        assert_like_plain(PROGRAMS[name], plain, spread, placed)


def _placed(full: torch.Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    values = [R if p.is_partial() else p for p in placements]
    x = distribute_tensor(full, mesh, values, src_data_rank=None)
    return DTensor.from_local(x.to_local() / 4, mesh, placements) if P in placements else x


@pytest.mark.parametrize("order", [MESHES[1], MESHES[3]], ids=str)
@on_ranks
def test_random_numbers_are_those_of_one_device(order: Any) -> None:
    mesh = mesh_in(order)
    full = _full(8, 4)
    for placed in _placements(mesh, 2):
        x = distribute_tensor(full, mesh, placed, src_data_rank=None)
        manual_seed(7, mesh)
        got = [F.dropout(x), torch.rand_like(x), x.clone().normal_()]
        torch.manual_seed(7)
        wanted = [F.dropout(full), torch.rand_like(full), full.clone().normal_()]
        torch.testing.assert_close([one.full_tensor() for one in got], wanted)
    torch.manual_seed(mesh.get_rank())  # replicas agree even so
    drawn = torch.rand_like(distribute_tensor(full, mesh, src_data_rank=None)).to_local()
    seen = [torch.empty_like(drawn) for _ in range(4)]
    torch.distributed.all_gather(seen, drawn)
    assert all(torch.equal(one, drawn) for one in seen)


@pytest.mark.parametrize("order", MESHES, ids=str)
@on_ranks
def test_collectives_by_mesh_dim(order: Any) -> None:
    """Lists and sources go by the coordinate."""
    mesh = mesh_in(order)
    at = mesh.get_coordinate()
    for dim in range(mesh.ndim):
        size, here = mesh.size(dim), at[dim]
        others = 10 * sum(at[:dim] + at[dim + 1 :])
        for source in range(size):
            sent = [torch.tensor([others + 100 * here + i]) for i in range(size)]
            output = torch.zeros(1, dtype=torch.int64)
            mesh_scatter(output, sent, mesh, dim, group_src=source)
            assert output.item() == others + 100 * source + here
            message = torch.tensor([others + here])
            mesh_broadcast(message, mesh, dim, group_src=source)
            assert message.item() == others + source
        full = torch.arange(32.0).view(8, 4) + others
        part = Shard(0).part(full, size, here)
        assert torch.equal(shard_dim_alltoall(part, 0, 1, mesh, dim), Shard(1).part(full, size, here))
