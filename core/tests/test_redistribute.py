"""Redistribution: planned routes on a fake group, and the moved data on ranks."""

import functools
import itertools
import math
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
import torch.distributed as dist
from hypothesis import example, given, settings
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.tests.gloo_world import REDUCES_PRODUCTS, WORLD_SIZE, mesh_of, on_ranks, on_worlds
from core.tests.local_world import ThreadWorlds
from core.tests.on_device import DEVICE_TYPE, torch
from core.tests.test_ops import place
from dtbench_core import (
    DTensor,
    DTensorSpec,
    Partial,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    count_collectives,
)
from dtbench_core.layout.placement import Placements, describe
from dtbench_core.layout.spec import contiguous_stride
from dtbench_core.redistribute.routes import cheapest_route, plan_of, run_route

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


@pytest.fixture
def mesh(fake_world: Any) -> DeviceMesh:
    fake_world(8)
    return init_device_mesh(DEVICE_TYPE, (2, 4))


@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ((S0, S1), (S0, S1), []),
        ((R, S0), (R, S1), ["1:S(0)>S(1)"]),
        ((P, R), (S0, R), ["0:P>S(0)"]),  # reduce-scatter, not all-reduce and cut
        ((R, S0), (S1, R), ["0:R>S(1)", "1:S(0)>R"]),  # less is gathered after the replicated dim is cut
        ((P, P), (R, S0), ["1:P>S(0)", "0:P>R"]),  # less is reduced after the reduce-scatter
        *(
            ((R, S0), (R, pending), ["1:S(0)>R", f"1:R>{pending}"])
            for pending in (P, Partial("product"), Partial("bxor"))
        ),
    ],
)
def test_plan_takes_the_cheapest_path(
    mesh: DeviceMesh, src: Placements, dst: Placements, steps: list[str]
) -> None:
    spec = DTensorSpec.of(mesh, src, (64, 64), (64, 1), torch.float32)
    assert steps == [
        f"{'+'.join(map(str, step.mesh_dims))}:{describe(step.src)}>{describe(step.dst)}"
        for step in cheapest_route(spec, dst)
    ]


# ---- on ranks ----

SHAPES = [(5, 7), (1, 3), (0, 4)]


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "dtype"),
    [
        *(((2, WORLD_SIZE // 2), shape, torch.float64) for shape in SHAPES),
        *(
            ((WORLD_SIZE,), (5, 7), getattr(torch, name))
            for name in ("bool", "int64", "bfloat16", "complex64")
        ),
    ],
    ids=str,
)
@on_worlds
def test_every_transition(mesh_shape: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> None:
    device_mesh = mesh_of(mesh_shape)
    full = (torch.arange(torch.Size(shape).numel()).reshape(shape) % 7).to(dtype)
    kinds: list[Placement] = [R, S0, S1, *([P] if dtype.is_floating_point else [])]
    for src, dst in itertools.product(itertools.product(kinds, repeat=len(mesh_shape)), repeat=2):
        if any(d == P and s != P for s, d in zip(src, dst, strict=True)):
            continue
        moved = place(full, device_mesh, src).redistribute(placements=dst)
        assert P in dst or torch.equal(moved.to_local(), place(full, device_mesh, dst).to_local()), (src, dst)
        assert torch.equal(moved.full_tensor(), full) and moved.placements == dst, (src, dst)


@on_worlds
def test_bitwise_partials_are_reduced() -> None:
    terms = torch.stack([torch.tensor([1.0, 2.0, 3.0]) + r for r in range(WORLD_SIZE)])
    bits = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
    for (op, combine), dtype in itertools.product(bits.items(), (torch.int64, torch.uint8, torch.bool)):
        whole = (terms.long() * 3 % 7).to(dtype)
        mine = DTensor.from_local(whole[dist.get_rank()], mesh_of((WORLD_SIZE,)), [Partial(op)])
        value = functools.reduce(combine, whole)
        assert (mine.full_tensor() == value).all(), (op, dtype)
        assert (mine.redistribute(placements=[S0]).full_tensor() == value).all(), (op, dtype)
        assert (mine.view(1, 3).expand(2, 3)[:, 1:].full_tensor() == value[1:]).all(), (op, dtype)


@on_worlds
def test_extrema_keep_nan() -> None:
    """Transports lose a NaN unless it is on the first rank. The columns have a NaN, infinities, plain values."""
    mesh, inf, nan = mesh_of((WORLD_SIZE,)), float("inf"), float("nan")
    full = torch.tensor([[1.0, inf, 4.0], [nan, 2.0, 3.0], [0.0, -inf, 2.0], [5.0, 1.0, 9.0]])[:WORLD_SIZE]
    for op, want in {"max": full.amax(0), "min": full.amin(0)}.items():
        term = DTensor.from_local(full[dist.get_rank()], mesh, [Partial(op)])
        reduced = getattr(place(full, mesh, (S0,)), f"a{op}")(0)
        results = [
            term.full_tensor(),
            term.redistribute(placements=[S0]).full_tensor(),
            reduced.full_tensor(),
        ]
        torch.testing.assert_close(results, [want] * 3, rtol=0, atol=0, equal_nan=True)


@on_worlds
def test_dtypes_of_a_move() -> None:
    tensor = place(torch.ones(8, dtype=torch.float32), mesh_of((WORLD_SIZE,)), (S0,)).requires_grad_()
    moved = tensor.redistribute(placements=[R], forward_dtype=torch.float64, backward_dtype=torch.bfloat16)
    moved.sum().backward()
    with torch.no_grad():
        quiet = tensor.redistribute(placements=[R], forward_dtype=torch.float64)
    assert moved.dtype == quiet.to_local().dtype == torch.float64
    assert tensor.grad is not None and tensor.grad.dtype == torch.float32


# ---- on simulated ranks: any shape, mesh and placements ----

MESHES = [(4,), (8,), (2, 2), (2, 4), (4, 2), (1, 4), (2, 1, 2), (2, 2, 2), (3, 2)]


def _terms(full: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> torch.Tensor:
    """Returns this rank's term of `full`. Terms differ by mesh coordinate, and their reduction is `full`."""
    term, summed = full.clone(), 1
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Partial):
            ranks, rank = mesh.size(mesh_dim), mesh.get_coordinate()[mesh_dim]
            away = (rank + 1) * 8.0 if rank else 0.0
            op = placement.reduce_op
            if op in ("max", "min"):
                term = term - away if op == "max" else term + away
            elif op == "product":  # -1 and -1 on two ranks, or the tensor itself on the only one
                factor = -1.0 if rank < 2 and ranks > 1 else 1.0
                term = term * factor if rank == 0 else torch.full_like(term, factor)
            else:
                mean = term if op == "avg" else term / ranks
                term = mean + (rank - (ranks - 1) / 2) * 4.0 / summed
                summed *= 1 if op == "avg" else ranks
    return term


def _held(full: torch.Tensor, mesh: DeviceMesh, placements: Placements) -> torch.Tensor:
    """Returns this rank's local tensor of `full` under these placements, outermost mesh dim first."""
    part = _terms(full, mesh, placements)
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            part = placement.part(part, mesh.size(mesh_dim), mesh.get_coordinate()[mesh_dim])
    return part.clone(memory_format=torch.contiguous_format)


def _moved(ranks: Any, full: torch.Tensor, src: Placements, dst: Placements) -> None:
    mesh = DeviceMesh(DEVICE_TYPE, ranks)
    spec = DTensorSpec.of(mesh, src, full.shape, contiguous_stride(full.shape), full.dtype)
    local = _held(full, mesh, src)
    kept = local.clone()
    moved = run_route(local, cheapest_route(spec, dst))
    torch.testing.assert_close(moved, _held(full, mesh, dst), rtol=1e-7, atol=1e-9)
    shared = moved.numel() > 0 and moved.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    assert src == dst or (moved.is_contiguous() and not shared), "the result owns its memory"
    assert torch.equal(local, kept), "the input was written to"


@st.composite
def moves(draw: st.DrawFn) -> tuple[Any, ...]:
    """Draws the shapes of a mesh and a tensor, and its placements before and after; the first may be Partial."""
    mesh_shape = draw(st.sampled_from(MESHES))
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 12]), max_size=3))
    plain = [R, *(Shard(d) for d in range(len(shape)))]
    pending = draw(st.sampled_from([P, Partial("avg"), Partial("max"), Partial("min"), Partial("product")]))
    src = draw(st.tuples(*[st.sampled_from([*plain, *plain, pending])] * len(mesh_shape)))
    dst = list(draw(st.tuples(*[st.sampled_from(plain)] * len(mesh_shape))))
    for mesh_dim, placement in enumerate(src):
        several = pending.is_partial("product") and src.count(pending) > 1
        if placement.is_partial() and not several and draw(st.integers(0, 3)) == 0:
            dst[mesh_dim] = placement
    return mesh_shape, tuple(shape), src, tuple(dst)


@settings(max_examples=120, deadline=None)
@given(case=moves(), shuffled=st.booleans())
@example(case=((2, 2), (), (P, P), (R, P)), shuffled=False)
@example(case=((2, 3), (4,), (P, P), (P, R)), shuffled=False)
@example(case=((2, 2), (4, 6), (Partial("avg"), Partial("avg")), (Partial("avg"), Shard(1))), shuffled=True)
def test_any_move(ranks: ThreadWorlds, case: Any, shuffled: bool) -> None:
    """Also on meshes whose ranks do not ascend: there, a rank's place in its group is not its coordinate."""
    mesh_shape, shape, src, dst = case
    full = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))
    size = math.prod(mesh_shape)
    order = (
        torch.randperm(size, generator=torch.Generator().manual_seed(size))
        if shuffled
        else torch.arange(size)
    )
    ranks(_moved, order.view(mesh_shape).tolist(), full, src, dst, world_size=size)


def _in_gradient(mesh_shape: tuple[int, ...], full: torch.Tensor, src: Placements, dst: Placements) -> None:
    """Compares the first and second gradient of sum(move(x)^3 * full) with those without the move."""
    mesh = init_device_mesh(DEVICE_TYPE, mesh_shape)
    tensor = DTensor.from_local(
        _held(full, mesh, src), mesh, src, shape=full.shape, stride=contiguous_stride(full.shape)
    ).requires_grad_()
    whole = tensor.redistribute(placements=dst).full_tensor()
    (first,) = torch.autograd.grad((whole**3 * full).sum(), tensor, create_graph=True)
    (second,) = torch.autograd.grad(first.full_tensor().sum(), tensor)
    got = [first.full_tensor().detach(), second.full_tensor().detach()]
    torch.testing.assert_close(got, [3 * full**3, 6 * full**2], rtol=1e-7, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(case=moves())
def test_any_gradient(ranks: ThreadWorlds, case: Any) -> None:
    mesh_shape, shape, src, dst = case
    # Which term of an extremum decided, and what the other factors were, a gradient would have to know.
    src = tuple(R if p.is_partial() and p not in (P, Partial("avg")) else p for p in src)
    dst = tuple(R if p.is_partial() else p for p in dst)
    full = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ranks(_in_gradient, mesh_shape, full, src, dst, world_size=math.prod(mesh_shape))


@pytest.mark.parametrize("shape", [(4, 8), (5, 3)], ids=str)
@on_ranks
def test_pending_conjugations_are_moved(shape: tuple[int, ...]) -> None:
    """Memory does not show a pending conjugation."""
    mesh = init_device_mesh(DEVICE_TYPE, (4,))
    full = torch.randn(shape, dtype=torch.complex128, generator=torch.Generator().manual_seed(2))
    for src, dst in itertools.product((R, S0, S1, P, Partial("product")), (R, S0, S1)):
        spec = DTensorSpec.of(mesh, (src,), shape, contiguous_stride(shape), full.dtype)
        moved = run_route(_held(full, mesh, (src,)).conj(), cheapest_route(spec, (dst,)))
        assert torch.allclose(moved, _held(full.conj().resolve_conj(), mesh, (dst,))), (src, dst)


# ---- dtypes that transports cannot reduce ----

_REDUCED = [
    *(torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn),
    *(torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.complex64),
]


@pytest.mark.parametrize("dst", [R, S0], ids=str)
@on_ranks
def test_every_dtype_is_reduced(dst: Placement) -> None:
    mesh, rank = mesh_of((WORLD_SIZE,)), dist.get_rank()
    for dtype, op in itertools.product(_REDUCED, ("sum", "avg", "product", "max", "min")):
        undefined = {
            "avg": not (dtype.is_floating_point or dtype.is_complex),
            "max": dtype.is_complex,
            "min": dtype.is_complex,
            "product": not (REDUCES_PRODUCTS or dtype.is_complex),  # of complex terms, it is gathered
        }
        if undefined.get(op):
            continue
        halves = [[1, 0, 2, 1, 0, 1, 2, 1], [2, 1, 2, 0, 0, 1, 1, 1]]
        terms = torch.tensor(halves * (WORLD_SIZE // 2)).to(dtype)
        wide = terms.to(torch.float64) if dtype.itemsize == 1 and dtype.is_floating_point else terms
        got = run_route(
            terms[rank], cheapest_route(DTensorSpec.of(mesh, (Partial(op),), (8,), (1,), dtype), (dst,))
        )
        want = {
            "sum": lambda w: w.sum(0),
            "avg": lambda w: w.sum(0) / WORLD_SIZE,
            "product": lambda w: w.prod(0),
            "max": lambda w: w.amax(0),
            "min": lambda w: w.amin(0),
        }[op](wide).to(dtype)
        want = want.chunk(WORLD_SIZE)[rank] if dst.is_shard() else want
        assert got.dtype == dtype and got.tolist() == want.tolist(), (op, dtype)


@pytest.mark.parametrize(
    ("op", "dtype", "message"),
    [
        ("avg", torch.int64, r"Partial\('avg'\) is not defined for integers: use floating point"),
        ("bor", torch.float32, "only defined for integers and booleans"),
    ],
)
def test_undefined_reductions_are_refused(
    mesh: DeviceMesh, op: str, dtype: torch.dtype, message: str
) -> None:
    spec = DTensorSpec.of(mesh, (R, Partial(op)), (4,), (1,), dtype)
    with pytest.raises(PlacementError, match=message):
        cheapest_route(spec, (R, R))


# ---- plans as values ----


@on_ranks(world_size=8)
def test_plan_predicts_bytes_and_collectives() -> None:
    mesh, full = init_device_mesh(DEVICE_TYPE, (2, 4)), torch.ones(16, 8)
    for src, dst in itertools.product(
        itertools.product((R, P, S0, S1), repeat=2), itertools.product((R, S0, S1), repeat=2)
    ):
        tensor = place(full, mesh, src)
        route = plan_of(tensor, dst)
        with count_collectives() as count:
            tensor.redistribute(placements=dst)
        calls = Counter(step.collective for step in route if step.collective)
        assert count.calls == calls and sum(count.bytes.values()) == route.nbytes, route


def test_mesh_may_first_be_used_under_a_fake_tensor_mode(mesh: DeviceMesh) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    fresh = init_device_mesh(DEVICE_TYPE, (4, 2), mesh_dim_names=("first", "seen"))
    with FakeTensorMode():
        tensor = DTensor.from_local(torch.ones(2, 3), fresh, [S0, S0])
        assert tensor.full_tensor().shape == (16, 3)
        assert tensor.redistribute(placements=[S1, S0]).to_local().shape == (8, 1)
    real = DTensor.from_local(torch.ones(2, 3), fresh, [S0, S0]).full_tensor()
    assert type(real) is torch.Tensor and real.shape == (16, 3), "plans made for fake tensors serve real ones"
