"""Plain torch.distributed collectives on LocalTensors, against the maths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.tests.test_local_tensor import RANKS, held
from dtbench_core import torch_compat
from dtbench_core.errors import SimulationError
from dtbench_core.simulate import (
    LocalTensor,
    LocalTensorMode,
    declare_group,
    per_rank,
    tensor_map,
)


@pytest.fixture
def mesh(mode: LocalTensorMode) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def _run_collective(name: str, group: Any, ranks: list[int]) -> list[torch.Tensor]:
    """`name` on this rank, by torch.distributed's functions; `ranks` are the group's."""
    n, me = len(ranks), dist.get_rank()
    mine, wide = torch.zeros(1, 2) + me, torch.arange(n * 2.0).view(n, 2) + 10 * me
    out, whole = torch.zeros(1, 2), torch.zeros(n, 2)
    parts = [torch.zeros(1, 2) for _ in range(n)]
    kind, _, op = name.partition(" ")
    written, given = {
        "all_reduce": ([mine], [mine]),
        "all_gather": (parts, [parts, mine]),
        "all_gather_single": ([whole], [whole, mine]),
        "reduce_scatter": ([out], [out, list(wide.split(1))]),
        "reduce_scatter_single": ([out], [out, wide]),
        "all_to_all": (parts, [parts, list(wide.split(1))]),
        "all_to_all_single": ([whole], [whole, wide]),
        "broadcast": ([mine], [mine]),
        "barrier": ([mine], []),
    }[kind]
    options = {"op": getattr(dist.ReduceOp, op)} if op else {"group_src": 1} if kind == "broadcast" else {}
    call = getattr(torch_compat if kind in ("all_gather_single", "reduce_scatter_single") else dist, kind)
    call(*given, group=group, **options)
    return written


COLLECTIVES = [
    *(f"all_reduce {op}" for op in ("SUM", "PRODUCT", "MAX", "MIN", "AVG")),
    *("all_gather", "all_gather_single", "reduce_scatter", "reduce_scatter_single", "all_to_all"),
    *("all_to_all_single", "broadcast", "barrier"),
]


def _expected(name: str, rank: int, ranks: list[int]) -> list[list[list[float]]]:
    n, me = len(ranks), ranks.index(rank)
    mine = {r: torch.full((1, 2), float(r)) for r in ranks}
    wide = {r: torch.arange(n * 2.0).view(n, 2) + 10 * r for r in ranks}
    stacked = torch.stack([mine[r] for r in ranks])
    if name.startswith("all_reduce"):
        reduced = {
            "SUM": stacked.sum(0),
            "PRODUCT": stacked.prod(0),
            "MAX": stacked.amax(0),
            "MIN": stacked.amin(0),
            "AVG": stacked.mean(0),
        }
        found = [reduced[name.split(" ")[1]]]
    elif name in ("all_gather", "all_gather_single"):
        found = [mine[r] for r in ranks]
    elif name.startswith("reduce_scatter"):
        found = [sum(wide[r][me : me + 1] for r in ranks)]  # type: ignore[list-item]
    elif name.startswith("all_to_all"):
        found = [wide[r][me : me + 1] for r in ranks]
    else:
        found = [mine[ranks[1]] if name == "broadcast" else mine[rank]]
    if name.endswith("_single"):
        found = [torch.cat(found)]
    return [t.tolist() for t in found]


FIBRES = {
    "world": [[0, 1, 2, 3]] * 4,
    "inner": [[0, 1], [0, 1], [2, 3], [2, 3]],
    "outer": [[0, 2], [1, 3], [0, 2], [1, 3]],
}


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("which", FIBRES)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_plain_collectives(mesh: DeviceMesh, name: str, which: str) -> None:
    group = None if which == "world" else mesh.get_group(which)
    got = _run_collective(name, group, FIBRES[which][0])
    for rank, ranks in enumerate(FIBRES[which]):
        assert [t.shard(rank).tolist() for t in got] == _expected(name, rank, ranks), rank  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_functional_collectives(mesh: DeviceMesh) -> None:
    from torch.distributed import _functional_collectives as funcol

    x = torch.ones(2) * dist.get_rank()
    summed, largest = funcol.all_reduce(x, "sum", mesh["inner"]), funcol.all_reduce(x, "max", mesh["outer"])
    assert held(summed + 0) == [[n] * 2 for n in (1.0, 1.0, 5.0, 5.0)]
    assert held(largest + 0) == [[n] * 2 for n in (2.0, 3.0, 2.0, 3.0)]
    gathered = funcol.all_gather_tensor(x[:1], 0, (mesh, 1))
    assert held(gathered + 0) == [[0.0, 1.0], [0.0, 1.0], [2.0, 3.0], [2.0, 3.0]]
    parts = funcol.reduce_scatter_tensor(torch.arange(2.0) + x, "sum", 0, (mesh, 0))
    assert held(parts + 0) == [[2.0], [4.0], [4.0], [6.0]]
    exchanged = funcol.all_to_all_single(torch.arange(2.0) + 10 * x, None, None, (mesh, 1))
    assert held(exchanged + 0) == [[0.0, 10.0], [1.0, 11.0], [20.0, 30.0], [21.0, 31.0]]
    assert held(funcol.broadcast(x, 1, (mesh, 0)) + 0) == [[2.0] * 2, [3.0] * 2, [2.0] * 2, [3.0] * 2]
    assert held(x) == [[float(r)] * 2 for r in RANKS]


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_functional_collectives_have_gradients(mesh: DeviceMesh) -> None:
    from torch.distributed import _functional_collectives as funcol

    x = (torch.ones(2) * dist.get_rank()).requires_grad_()
    (funcol.all_gather_tensor_autograd(x, 0, mesh["inner"]) * torch.arange(4.0)).sum().backward()
    assert x.grad is not None
    assert held(x.grad) == [[0.0, 2.0], [4.0, 6.0]] * 2


def test_object_collectives(mode: LocalTensorMode) -> None:
    found: list[Any] = [None] * 4
    dist.all_gather_object(found, {"a": 1})
    assert found == [{"a": 1}] * 4


def test_an_unknown_group_must_be_declared(mode: LocalTensorMode) -> None:
    group = dist.new_group([0, 1])
    x = torch.ones(1) * dist.get_rank()
    with pytest.raises(SimulationError, match=r"does not say what rank 2 does: .* declare_group"):
        dist.all_reduce(x, group=group)
    with pytest.raises(SimulationError, match="expected the ranks of all groups, this one's among them"):
        declare_group(group, [[2, 3]])
    declare_group(group, [[0, 1], [2, 3]])
    dist.all_reduce(x, group=group)
    assert held(x) == [[1.0], [1.0], [5.0], [5.0]]
    lone = dist.new_group([0, 1])
    some = tensor_map(x, lambda rank, shard: shard if rank < 2 else None)
    dist.all_reduce(some, group=lone)
    assert held(some) == [[2.0], [2.0]]


def test_send_is_not_simulated(mode: LocalTensorMode) -> None:
    with pytest.raises(SimulationError, match=r"c10d\.send\.default is not simulated"):
        dist.send(torch.ones(1), 1)


def test_a_subset_of_ranks(fake_world: Callable[[int], None]) -> None:
    fake_world(4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    with LocalTensorMode({2, 3}):
        x = torch.ones(1) * dist.get_rank()
        assert isinstance(x, LocalTensor) and x.ranks == (2, 3)
        dist.all_reduce(x, group=mesh.get_group("inner"))
        assert held(x) == [[5.0], [5.0]]
        with pytest.raises(
            SimulationError, match="of ranks 0, 2 needs rank 0 too, but only ranks 2, 3 take part"
        ):
            dist.all_reduce(x, group=mesh.get_group("outer"))


def test_a_mesh_over_some_ranks_in_another_order(fake_world: Callable[[int], None]) -> None:
    fake_world(8)
    with LocalTensorMode([0, 3, 5, 6]):
        mesh = DeviceMesh("cpu", [[6, 0], [3, 5]])
        x = torch.ones(1) * dist.get_rank()
        assert per_rank(mesh.get_coordinate(), (6, 0, 3, 5)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        out = torch.zeros(2)
        torch_compat.all_gather_single(out, x, group=mesh.get_group(1))
        assert [out.shard(r).tolist() for r in (0, 3, 5, 6)] == [
            [6.0, 0.0],
            [3.0, 5.0],
            [3.0, 5.0],
            [6.0, 0.0],
        ]  # type: ignore[attr-defined]


def test_64_ranks(fake_world: Callable[[int], None]) -> None:
    fake_world(64)
    with LocalTensorMode(64):
        mesh = init_device_mesh("cpu", (4, 4, 4), mesh_dim_names=("a", "b", "c"))
        flat = mesh["a", "b"]._flatten("ab")
        x = torch.ones(1) * dist.get_rank()
        dist.all_reduce(x, group=mesh.get_group("b"))
        assert held(x) == [[float(sum(r - r // 4 % 4 * 4 + 4 * i for i in range(4)))] for r in range(64)]
        y = torch.ones(1) * dist.get_rank()
        dist.all_reduce(y, group=flat.get_group())
        assert held(y) == [[float(sum(range(r % 4, 64, 4)))] for r in range(64)]
        assert len(repr(torch.ones(1) * dist.get_rank()).splitlines()) == 10  # a head, 8 ranks, "56 more"
