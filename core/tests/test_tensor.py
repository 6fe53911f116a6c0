"""Creation of DTensors, autograd of conversions, mistakes of users, use like plain tensors, factories."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as torch_tensor
from torch import nn
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as torchs_extents
from torch.distributed.tensor.placement_types import _StridedShard

import dtbench_core
from core.tests.gloo_world import mesh_of, on_ranks, on_worlds
from core.tests.local_world import AnyWorlds
from core.tests.placing import place
from dtbench_core import (
    CoreError,
    DTensor,
    FallbackWarning,
    LayoutError,
    Partial,
    Placement,
    PlacementError,
    Replicate,
    Shard,
    StridedShard,
    compute_local_shape_and_global_offset,
    count_collectives,
    distribute_module,
    distribute_tensor,
    local_map,
    zeros,
)
from dtbench_core.errors import ArgumentError
from dtbench_core.layout.placement import BITWISE, REDUCE_OPS

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def _source_rank(src: int | None) -> torch.Tensor:
    return distribute_tensor(
        torch.arange(5.0) + 10 * dist.get_rank(), mesh_of((4,)), [S0], src_data_rank=src
    ).to_local()


def test_distribute_tensor_takes_the_source_ranks_values(worlds: AnyWorlds) -> None:
    assert [[part.tolist() for part in worlds(_source_rank, src)] for src in (0, 2, None)] == [
        [[0.0, 1.0], [2.0, 3.0], [4.0], []],
        [[20.0, 21.0], [22.0, 23.0], [24.0], []],
        [[0.0, 1.0], [12.0, 13.0], [24.0], []],
    ]


@on_worlds
def test_from_local_shares_memory_and_distribute_tensor_does_not() -> None:
    mine = torch.ones(2)
    tensor = DTensor.from_local(mine, mesh_of((4,)), [S0])
    mine += 1  # nothing was copied
    full = torch.ones(4)
    cut = distribute_tensor(full, mesh_of((4,)), [S0], src_data_rank=None)
    full += 1  # this was
    assert (tensor.to_local() == 2).all() and (cut.to_local() == 1).all() and tensor.shape == (8,)


def _borders() -> dict[str, Any]:
    """Returns the gradient of each local tensor of sum(w * full), which is w's shard in plain torch."""
    mesh, out = mesh_of((4,)), {}
    w = torch.arange(8.0)
    for name, placement in {"shard": S0, "replicate": R, "sum": P, "avg": Partial("avg")}.items():
        mine = torch.ones(2 if name == "shard" else 8, requires_grad=True)
        (DTensor.from_local(mine, mesh, [placement]).full_tensor() * w).sum().backward()
        out[name] = mine.grad
    tensor = distribute_tensor(torch.ones(8), mesh, [R]).requires_grad_()
    # every rank computes with another part of the replica, so the gradients of the ranks add up
    local = tensor.to_local(grad_placements=[P])
    (local[2 * dist.get_rank() : 2 * dist.get_rank() + 2] * 3).sum().backward()
    assert tensor.grad.placements == (P,)
    return {**out, "to_local": tensor.grad.full_tensor()}


def test_gradients_at_the_borders(worlds: AnyWorlds) -> None:
    w = [float(i) for i in range(8)]
    for rank, got in enumerate(worlds(_borders)):
        assert {name: gradient.tolist() for name, gradient in got.items()} == {
            "shard": w[2 * rank : 2 * rank + 2],
            "replicate": w,
            "sum": w,  # each term has the whole gradient
            "avg": [x / 4 for x in w],
            "to_local": [3.0] * 8,
        }


@on_worlds
def test_run_check_makes_replicas_equal_and_leaves_the_input() -> None:
    mine = torch.ones(3) * (dist.get_rank() + 1)
    result = DTensor.from_local(mine, mesh_of((2, 2)), [R, R], run_check=True).to_local()
    assert (result == 1).all() and (mine == dist.get_rank() + 1).all()


@on_worlds
def test_distribute_module_with_hooks() -> None:
    def shard_rows(name: str, module: nn.Module, mesh: Any) -> None:
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [S0]))

    torch.manual_seed(0)
    plain = nn.Linear(4, 8)
    module = distribute_module(
        copy.deepcopy(plain),
        mesh_of((4,)),
        shard_rows,
        input_fn=lambda mod, inputs, mesh: (distribute_tensor(inputs[0], mesh, [R]),),
        output_fn=lambda mod, out, mesh: out.full_tensor(),
    )
    x = torch.arange(8.0).reshape(2, 4)
    assert (module(x) - plain(x)).abs().max() < 1e-6
    assert isinstance(module.bias, DTensor)


@on_worlds
def test_distribute_tensor_to_pending_terms() -> None:
    full = torch.tensor([6, 3, 5, 12])
    for op in REDUCE_OPS:
        whole = full.double() if op == "avg" else full
        for src in (0, None):
            tensor = distribute_tensor(whole, mesh_of((4,)), [Partial(op)], src_data_rank=src)
            assert tensor.placements == (Partial(op),) and (tensor.full_tensor() == whole).all(), op
            if op not in BITWISE and op != "product":
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FallbackWarning)
                assert (tensor.square_().full_tensor() == whole.square()).all(), f"written, pending {op}"
    tensor = distribute_tensor(full.view(2, 2), mesh_of((2, 2)), [P, S1])
    assert (tensor.full_tensor() == full.view(2, 2)).all()


@on_worlds
def test_placements_of_torch_are_understood() -> None:
    mesh, full = mesh_of((4,)), torch.arange(8.0)
    tensor = distribute_tensor(full, mesh, [torch_tensor.Shard(0)])
    assert tensor.placements == (S0,)
    assert tensor.redistribute(placements=[torch_tensor.Replicate()]).placements == (R,)
    strided = distribute_tensor(full, mesh, [_StridedShard(0, split_factor=2)])
    assert strided.placements == (StridedShard(0, split_factor=2),)
    assert DTensor.from_local(full, mesh, [torch_tensor.Partial("max")]).placements == (Partial("max"),)
    assert zeros(4, device_mesh=mesh, placements=(torch_tensor.Shard(-1),)).placements == (S0,)
    assert tensor.requires_grad_().to_local(grad_placements=[torch_tensor.Shard(0)]).shape == (2,)
    shard = torch_tensor.Shard(0)
    add = local_map(torch.add, out_placements=[shard], in_placements=([shard], [shard]))
    assert add(tensor, tensor).placements == (S0,)


@pytest.mark.parametrize("placement", (S0, S1, R, P))
@on_ranks
def test_meta_tensors_send_nothing(placement: Any) -> None:
    """Also on a rank whose shard is empty."""
    tensor = distribute_tensor(torch.empty(5, 3, device="meta"), mesh_of((4,)), [placement])
    with count_collectives() as count:
        results = tensor.softmax(0), tensor @ tensor.t(), tensor.sum(), tensor.redistribute(placements=[S1])
        assert all(result.to_local().is_meta for result in results) and tensor.full_tensor().shape == (5, 3)
    assert not count.calls
    filled = torch.empty_like(tensor, device="cpu")
    assert filled.to_local().device.type == "cpu" and filled.to("meta").to_local().is_meta


# ---- mistakes: the same one-line error of our own on every rank, before anything is sent ----


class Mistakes:
    """Makes calls with a tensor of ones, on meshes of 4 and of 2x2 ranks."""

    def __init__(self) -> None:
        self.t, self.m, self.square = torch.ones(2, 2), mesh_of((4,)), mesh_of((2, 2))

    def cut(self, *placements: Any, of: Any = None, mesh: Any = None) -> Any:
        return distribute_tensor(self.t if of is None else of, mesh or self.m, list(placements))

    def wrap(self, *placements: Any, of: Any = None, mesh: Any = None, **how: Any) -> Any:
        return DTensor.from_local(self.t if of is None else of, mesh or self.m, list(placements), **how)

    def mapped(self, fn: Any, out: Any, *inputs: Any) -> Any:
        return local_map(fn, out, inputs, device_mesh=self.m)(self.cut(S0))


MIXED = "plain torch.Tensor of shape .* together with a DTensor"
NO_TERMS = "the terms of another Partial are not defined"
# name -> (call, what the core says)
MISTAKES: dict[str, tuple[Callable[[Mistakes], Any], str]] = {
    "shard dim": (lambda c: c.cut(Shard(2)), r"got Shard\(2\) for a tensor of 2 dims"),
    "dim of no int": (lambda c: c.cut(Shard("a")), r"got Shard\(dim='a'\), expected an int"),
    "too few": (lambda c: c.cut(), "got 0 .* expected one for each of its 1 dims"),
    "not a list": (
        lambda c: distribute_tensor(c.t, c.m, S0),
        r"expected a sequence of placements: write \[Shard",
    ),
    "no placement": (lambda c: c.cut("S(0)"), r"got 'S\(0\)' .* expected Shard, Replicate or Partial"),
    "input_fn of four": (
        lambda c: distribute_module(nn.Linear(2, 2), c.m, None, lambda a, b, c, d: b),
        r"got input_fn\(a, b, c, d\), expected a function of \(module, inputs, mesh\) or \(inputs, mesh\)",
    ),
    "non-leaf": (lambda c: c.cut(S0, of=c.t.requires_grad_() * 2), "expected a leaf tensor"),
    "twice": (lambda c: c.cut(R, of=c.cut(S0)), r"use tensor\.redistribute"),
    "no tensor": (lambda c: c.cut(S0, of=3), "got int, expected a torch.Tensor"),
    "no mesh": (lambda c: distribute_tensor(c.t, "cpu", [S0]), "expected a torch DeviceMesh"),
    "only shape": (lambda c: c.wrap(S0, shape=(8, 2)), "expected both or neither"),
    "wrong shape": (
        lambda c: c.wrap(S0, shape=(9, 2), stride=(2, 1)),
        r"local tensors of the shapes \[2, 2\] at \(0,\); .* for a tensor of shape \[9, 2\]",
    ),
    "ranks differ": (
        lambda c: c.wrap(S0, of=c.t[: 1 + dist.get_rank() % 2], run_check=True),
        "differ between ranks .*mesh rank 1",
    ),
    "distributed local": (
        lambda c: c.wrap(S0, of=c.cut(S0)),
        "from_local got a DTensor, .*: use redistribute",
    ),
    "mixed": (lambda c: c.cut(S0) + c.t, MIXED),
    "mixed partials": (
        lambda c: c.wrap(P, Partial("max"), mesh=c.square),
        "reductions .* cannot be pending together",
    ),
    "meshes": (lambda c: c.cut(S0) + c.cut(R, R, mesh=c.square), "on different meshes"),
    "to partial": (lambda c: c.cut(S0).redistribute(placements=[P]), NO_TERMS),
    "moved too few": (
        lambda c: c.cut(S0, R, mesh=c.square).redistribute(placements=[R]),
        "got 1 placements .* expected one for each of its 2 dims",
    ),
    "out= of another kind": (
        lambda c: torch.add(*[c.cut(S0)] * 2, out=c.cut(S0, of=c.t.long())),
        "got out= of torch.int64",
    ),
    "out= partial": (lambda c: torch.add(*[c.cut(S0)] * 2, out=c.wrap(P)), "expected Shard or Replicate"),
    "size": (lambda c: zeros("a", device_mesh=c.m), "zeros got the size"),
    "arguments of local_map": (
        lambda c: c.mapped(lambda a: a, [S0], [S0], [S0]),
        "got 2 in_placements for 1 arguments",
    ),
    "results of local_map": (
        lambda c: c.mapped(lambda a: (a, a), ([S0],), [S0]),
        "got 1 out_placements for 2 results",
    ),
    "no constructor": (lambda c: DTensor(c.t), "got a call of its constructor"),
    "unknown reduction": (lambda c: Partial("median"), "expected one of sum, avg"),
}
# These ask the other ranks what they hold, which is how all of them come to the same error.
SENDING = {"ranks differ", "wrong shape"}


@pytest.mark.parametrize("name", MISTAKES)
@on_worlds
def test_mistakes_raise_the_same_error_on_every_rank(name: str) -> None:
    call, message = MISTAKES[name]
    case = Mistakes()
    with count_collectives() as count, pytest.raises((CoreError, ValueError), match=message) as caught:
        call(case)
    assert "\n" not in str(caught.value)
    sent = count.calls.keys() - {"scatter", "broadcast"}  # which spread the inputs
    assert not sent or name in SENDING, "raised before anything is sent"


@on_worlds
def test_conversion_to_python_and_numpy() -> None:
    full = torch.arange(12.0).view(4, 3)
    x = distribute_tensor(full, mesh_of((4,)), [Shard(0)], src_data_rank=None)
    assert x.tolist() == full.tolist() and f"{x.sum():.1f}" == "66.0"
    with pytest.raises(ArgumentError, match=r"numpy got .*expected a replicated tensor"):
        x.numpy()
    assert x.redistribute(placements=[Replicate()]).numpy().tolist() == full.tolist()
    assert torch.equal(x.to(torch.float8_e4m3fn).to(torch.float32).full_tensor(), full)


# ---- use like that of plain tensors ----


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
def test_unused_outputs_of_autograd_functions() -> None:
    """Autograd passes plain zeros for their gradients."""
    mesh, full = mesh_of((4,)), torch.arange(15.0).view(5, 3)
    for placed in (S0, R, P):
        for used in (0, 1):
            x = distribute_tensor(full, mesh, [placed], src_data_rank=None).requires_grad_()
            _Two.apply(x)[used].sum().backward()
            assert x.grad is not None and torch.equal(x.grad.full_tensor(), torch.full((5, 3), 2.0 + used))
    local = torch.ones(2, requires_grad=True)
    y = DTensor.from_local(local * 1, mesh, [S0])
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
        for placed in (S0, R, S1):
            for full, got in zip(wanted, written(place(values.clone(), placed), names), strict=True):
                assert isinstance(got, DTensor) and got.storage_offset() == full.storage_offset()
                assert torch.equal(got.full_tensor(), full), (placed, names)


@on_ranks
def test_copied_view_of_an_expanded_tensor_is_read_only() -> None:
    """It is unknown which elements of the base a write should change."""
    x = place(torch.arange(2.0), S0)
    seen = x.expand(2, 2).diagonal()
    with pytest.raises(PlacementError, match="the write would be lost"):
        seen.fill_(2)
    x.add_(1)
    assert seen.full_tensor().tolist() == [1.0, 2.0]


@pytest.mark.parametrize("shape", ((5, 3), (8, 4), (1, 1)))
@on_ranks
def test_local_shapes_and_offsets_equal_torch(shape: Any) -> None:
    mesh, rank = mesh_of((2, 2)), dist.get_rank()
    assert [Shard.local_shard_size_and_offset(size, 4, 3) for size in (10, 5)] == [(1, 9), (0, 5)]
    theirs = torch.distributed.tensor
    for dims in ((0, 1), (0, 0), (1, 0)):
        ours = compute_local_shape_and_global_offset(shape, mesh, [Shard(d) for d in dims])
        assert ours == torchs_extents(shape, mesh, [theirs.Shard(d) for d in dims]), (shape, dims, rank)


# ---- factories ----


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


FACTORY_MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"size": (2, -1)}, r"got the size \(2, -1\), expected ints >= 0"),
    "layout": ({"layout": torch.sparse_coo}, "expected torch.strided"),
    "partial": ({"placements": [Partial()]}, "expected Shard or Replicate"),
    "too many": ({"placements": [S0, S0]}, "got 2 placements"),
    "dim": ({"placements": [Shard(2)]}, r"got Shard\(2\) for a tensor of 2 dims"),
    "no mesh": ({"device_mesh": None}, "there is no current mesh"),
}


@pytest.mark.parametrize("name", FACTORY_MISTAKES)
@on_ranks
def test_mistakes_in_factories(name: str) -> None:
    wrong, message = FACTORY_MISTAKES[name]
    options = {"size": (2, 3), "device_mesh": mesh_of((4,)), **wrong}
    with pytest.raises(CoreError, match=message):
        dtbench_core.zeros(options.pop("size"), **options)
