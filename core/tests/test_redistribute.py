"""Moving between placements: the plan (pure, on a fake group) and the data (on real ranks)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.tests.gloo_world import Worlds, mesh_of
from core.tests.test_ops import place
from dtbench_core import DTensorSpec, Partial, Placement, Replicate, Shard, count_collectives
from dtbench_core.placement import Placements, describe
from dtbench_core.redistribute import plan
from dtbench_core.spec import contiguous_stride

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (2, 4))
    dist.destroy_process_group()


def _steps(
    mesh: DeviceMesh, src: Placements, dst: Placements, shape: tuple[int, ...] = (64, 64)
) -> list[str]:
    spec = DTensorSpec.of(mesh, src, shape, contiguous_stride(shape), torch.float32)
    return [
        f"{describe_dims(step.mesh_dims)}:{describe(step.src)}>{describe(step.dst)}"
        for step in plan(spec, dst)
    ]


def describe_dims(mesh_dims: tuple[int, ...]) -> str:
    return "+".join(map(str, mesh_dims))


def test_plan_takes_the_cheapest_path(mesh: DeviceMesh) -> None:
    assert _steps(mesh, (S0, S1), (S0, S1)) == []
    assert _steps(mesh, (R, S0), (R, S1)) == ["1:S(0)>S(1)"]
    assert _steps(mesh, (P, R), (S0, R)) == ["0:P>S(0)"], "reduce-scatter, not all-reduce and cut"
    # the replicated dim is cut first, so that less is gathered on the other
    assert _steps(mesh, (R, S0), (S1, R)) == ["0:R>S(1)", "1:S(0)>R"]
    # reduce-scatter first leaves less to reduce on the other dim
    assert _steps(mesh, (P, P), (R, S0)) == ["1:P>S(0)", "0:P>R"]


def test_plan_respects_nesting(mesh: DeviceMesh) -> None:
    """The outer mesh dim of two that shard one tensor dim moves only while the inner one is whole."""
    assert _steps(mesh, (S0, S0), (R, S0)) == ["1:S(0)>R", "0:S(0)>R", "1:R>S(0)"]
    assert _steps(mesh, (S0, S0), (S0, R)) == ["1:S(0)>R"]
    assert _steps(mesh, (R, S0), (S0, S0)) == ["1:S(0)>R", "0:R>S(0)", "1:R>S(0)"]


def test_every_pair_has_a_plan_that_arrives(mesh: DeviceMesh) -> None:
    for src, dst in itertools.product(itertools.product((R, P, S0, S1), repeat=2), repeat=2):
        if any(d == P and s != P for s, d in zip(src, dst, strict=True)):
            continue
        state = list(src)
        for step in _plan(mesh, src, dst):
            for mesh_dim, was, becomes in zip(step.mesh_dims, step.src, step.dst, strict=True):
                assert state[mesh_dim] == was
                state[mesh_dim] = becomes
        assert tuple(state) == dst


def _plan(mesh: DeviceMesh, src: Placements, dst: Placements) -> Any:
    return plan(DTensorSpec.of(mesh, src, (64, 64), (64, 1), torch.float32), dst)


def test_a_shard_cannot_become_partial(mesh: DeviceMesh) -> None:
    # through Replicate a pending sum can be made up; a product cannot
    with pytest.raises(ValueError, match=r"cannot redistribute .* to R,P\(product\)"):
        _plan(mesh, (R, S0), (R, Partial("product")))


# ---- on ranks ----

SHAPES = [(8, 8), (5, 7), (1, 3), (0, 4)]


def _move_all(mesh_shape: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    device_mesh = mesh_of(mesh_shape)
    full = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 7).to(dtype)
    partial = dtype.is_floating_point
    kinds: list[Placement] = [R, S0, S1, *([P] if partial else [])]
    wrong = []
    for src, dst in itertools.product(itertools.product(kinds, repeat=len(mesh_shape)), repeat=2):
        if any(d == P and s != P for s, d in zip(src, dst, strict=True)):
            continue
        tensor = place(full, device_mesh, src)
        moved = tensor.redistribute(placements=dst)
        want = place(full, device_mesh, dst).to_local()
        if P not in dst and not torch.equal(moved.to_local(), want):
            wrong.append(f"{src} -> {dst}: {moved.to_local()} is not {want}")
        if not torch.equal(moved.full_tensor(), full) or moved.placements != dst:
            wrong.append(f"{src} -> {dst}: the full tensor changed")
    return wrong


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2)], ids=str)
def test_every_transition_moves_the_right_data(ranks: Worlds, mesh_shape: Any, shape: Any) -> None:
    for wrong in ranks(_move_all, mesh_shape, shape, torch.float64):
        assert not wrong, "\n".join(wrong[:5])


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int16, torch.int64, torch.bfloat16, torch.complex64], ids=str
)
def test_every_dtype_moves(ranks: Worlds, dtype: torch.dtype) -> None:
    for wrong in ranks(_move_all, (4,), (5, 7), dtype):
        assert not wrong, "\n".join(wrong[:5])


def _reductions() -> dict[str, list[float]]:
    from dtbench_core import DTensor

    device_mesh = mesh_of((4,))
    term = torch.tensor([1.0, 2.0, 3.0]) + dist.get_rank()
    ops = ("sum", "avg", "max", "min", "product")
    return {op: DTensor.from_local(term, device_mesh, [Partial(op)]).full_tensor().tolist() for op in ops}


def test_pending_reductions(ranks: Worlds) -> None:
    terms = torch.stack([torch.tensor([1.0, 2.0, 3.0]) + r for r in range(4)])
    want = {"sum": terms.sum(0), "avg": terms.mean(0), "max": terms.amax(0), "min": terms.amin(0)}
    want["product"] = terms.prod(0)
    for got in ranks(_reductions):
        assert got == {op: value.tolist() for op, value in want.items()}


def _extrema_with_nan() -> list[str]:
    """Column 0 has a NaN on one rank, column 1 infinities, column 2 plain values."""
    from dtbench_core import DTensor

    mesh, wrong, inf, nan = mesh_of((4,)), [], float("inf"), float("nan")
    full = torch.tensor([[1.0, inf, 4.0], [nan, 2.0, 3.0], [0.0, -inf, 2.0], [5.0, 1.0, 9.0]])
    mine = full[dist.get_rank()]
    for op, want in {"max": full.amax(0), "min": full.amin(0)}.items():
        term = DTensor.from_local(mine, mesh, [Partial(op)])
        rows = place(full, mesh, (S0,))
        reduced = rows.amax(0) if op == "max" else rows.amin(0)
        results = {"P -> R": term, "P -> S": term.redistribute(placements=[S0]), "amax, amin": reduced}
        for what, got in results.items():
            if not torch.allclose(got.full_tensor(), want, rtol=0, atol=0, equal_nan=True):
                wrong.append(f"{what} of {op}: {got.full_tensor()} is not {want}")
    return wrong


def test_extrema_keep_nan(ranks: Worlds) -> None:
    """Transports compare with < and lose a NaN that is not on the first rank."""
    assert ranks(_extrema_with_nan) == [[]] * 4


def _gradient_of_moves() -> list[str]:
    device_mesh, wrong = mesh_of((2, 2)), []
    full = torch.arange(20.0, dtype=torch.float64).reshape(5, 4)
    for src, dst in itertools.product(
        itertools.product((R, P, S0, S1), repeat=2), itertools.product((R, S0), repeat=2)
    ):
        tensor = place(full, device_mesh, src).requires_grad_()
        moved = tensor.redistribute(placements=dst)
        (moved.full_tensor() * full).sum().backward()
        if tensor.grad is None or not torch.equal(tensor.grad.full_tensor(), full):
            wrong.append(f"{src} -> {dst}")
    return wrong


def test_gradients_pass_through(ranks: Worlds) -> None:
    assert ranks(_gradient_of_moves) == [[]] * 4


def _dtypes() -> tuple[torch.dtype, torch.dtype, torch.dtype | None]:
    tensor = place(torch.ones(8, dtype=torch.float32), mesh_of((4,)), (S0,)).requires_grad_()
    moved = tensor.redistribute(placements=[R], forward_dtype=torch.float64, backward_dtype=torch.bfloat16)
    moved.sum().backward()
    with torch.no_grad():
        quiet = tensor.redistribute(placements=[R], forward_dtype=torch.float64)
    return moved.dtype, quiet.to_local().dtype, tensor.grad.dtype if tensor.grad is not None else None


def test_dtypes_of_a_move(ranks: Worlds) -> None:
    assert ranks(_dtypes)[0] == (torch.float64, torch.float64, torch.float32)


def _counted() -> tuple[dict[str, int], dict[str, int]]:
    tensor = place(torch.ones(8, 4), mesh_of((4,)), (S0,))
    with count_collectives() as count:
        tensor.redistribute(placements=[R])
        tensor.redistribute(placements=[S1])
    tensor.full_tensor()  # outside: not counted
    return dict(count.calls), dict(count.bytes)


def test_collectives_are_counted(ranks: Worlds) -> None:
    # 8x4 float32 gathered: 128 bytes; a quarter of it exchanged: 32
    assert ranks(_counted)[0] == ({"all_gather": 1, "all_to_all": 1}, {"all_gather": 128, "all_to_all": 32})
