"""Conversions from and to torch's own DTensor, and the collective utilities."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import _collective_utils as torch_utils
from torch.distributed.tensor import placement_types

from core.tests.gloo_world import mesh_of, on_ranks, on_worlds
from dtbench_core import (
    ArgumentError,
    DTensor,
    Partial,
    Placement,
    RaggedShard,
    Replicate,
    Shard,
    StridedShard,
    count_collectives,
    distribute_tensor,
    from_torch,
    implicit_replication,
    to_torch,
)
from dtbench_core.cost.redistribution import redistribute_cost
from dtbench_core.interop import collective_utils

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYOUTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    *(((4,), [placement]) for placement in (S0, S1, R, Partial(), Partial("max"))),
    ((3,), [S0]),  # rank 3 is outside
    ((2, 2), [S0, S1]),
    ((2, 2), [S0, S0]),
    ((2, 2), [S1, Partial("avg")]),
    ((2, 2), [StridedShard(0, split_factor=2), S0]),
]


def _values(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1


def _spread(shape: tuple[int, ...], mesh: Any, placements: list[Placement]) -> DTensor:
    return distribute_tensor(_values(shape), mesh, placements)


@on_ranks
def test_conversion_round_trip() -> None:
    """Checks values, placements and memory; every rank holds the shard that torch would give it."""
    for mesh_shape, placements in LAYOUTS:
        for shape in ((4, 6), (8, 2), (5, 3), (2, 3)):
            if shape[0] % 4 and type(placements[0]) is StridedShard:
                continue
            mesh = mesh_of(mesh_shape)
            ours = _spread(shape, mesh, placements)
            torchs = to_torch(ours)
            message = f"{mesh_shape} {placements} {shape}"
            kind = type(torchs), torchs.shape, torchs.stride(), torchs.device_mesh
            assert kind == (theirs.DTensor, shape, ours.stride(), mesh), message
            assert torchs.to_local().data_ptr() == ours.to_local().data_ptr(), message
            if mesh.get_coordinate() is not None:
                assert torch.equal(torchs.full_tensor(), _values(shape)), message
            if not any(p.is_partial() for p in placements):
                distributed = theirs.distribute_tensor(_values(shape), mesh, torchs.placements)
                assert torch.equal(distributed.to_local(), ours.to_local()), message
            back = from_torch(torchs)
            assert back._spec is ours._spec and type(back) is DTensor, message
            assert back.to_local().data_ptr() == ours.to_local().data_ptr(), message


@on_ranks
def test_writes_are_visible_and_counted_on_both_sides() -> None:
    ours = _spread((4, 6), mesh_of((4,)), [S0])
    torchs = to_torch(ours)
    back = from_torch(torchs)
    for count, written in enumerate((ours, torchs, back), 1):
        before = [t._version for t in (ours, torchs, back)]
        written.add_(1)
        assert all(t._version > v for t, v in zip((ours, torchs, back), before, strict=True))
        assert all(torch.equal(t.full_tensor(), _values((4, 6)) + count) for t in (ours, torchs, back))


@pytest.mark.parametrize("toward_torch", (True, False))
@on_ranks
def test_autograd_notices_a_write_on_the_other_side(toward_torch: Any) -> None:
    leaf = _spread((4, 6), mesh_of((4,)), [S0])
    source: Any = (leaf if toward_torch else to_torch(leaf)).requires_grad_()
    result = (source * 2).sin()
    saved = source * 2
    squared = saved * saved
    with torch.no_grad():
        (to_torch(saved) if toward_torch else from_torch(saved)).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.sum().backward()
    result.sum().backward()
    converted: Any = to_torch(source) if toward_torch else from_torch(source)
    with pytest.raises(RuntimeError, match="a view"):
        converted.mul_(2)


@on_worlds
def test_gradients_pass_through_conversions() -> None:
    for mesh_shape, placements in (layout for layout in LAYOUTS if layout[0] != (3,)):
        x = _spread((8, 4), mesh_of(mesh_shape), placements)
        plain = _values((8, 4)).requires_grad_()
        (plain.square().sin() * plain).sum().backward()
        x.requires_grad_()
        through: Any = from_torch(to_torch(from_torch(to_torch(x))).square().sin())
        assert through.requires_grad and isinstance(through, DTensor)
        (through * x).sum().backward()
        torchs: Any = to_torch(x.detach()).requires_grad_()
        (from_torch(torchs).square().sin() * from_torch(torchs)).sum().backward()
        assert (type(x.grad), type(torchs.grad)) == (DTensor, theirs.DTensor), placements
        torch.testing.assert_close([t.grad.full_tensor() for t in (x, torchs)], [plain.grad] * 2)


def _rows() -> DTensor:
    return _spread((4, 2), mesh_of((4,)), [S0])


def _theirs() -> Any:
    return to_torch(_rows())


def _masked() -> None:
    partial = theirs.DTensor.from_local(torch.ones(2), mesh_of((4,)), [theirs.Partial()])
    partial._spec.placements = (placement_types._MaskPartial(offset_shape=torch.Size([8]), offset_dim=0),)
    from_torch(partial)


def _other_order() -> None:
    sharded = theirs.distribute_tensor(_values((8, 2)), mesh_of((2, 2)), [theirs.Shard(0), theirs.Shard(0)])
    entry = type(sharded._spec.shard_order[0])
    sharded._spec.shard_order = (entry(tensor_dim=0, mesh_dims=(1, 0)),)
    from_torch(sharded)


def _dual() -> None:
    x = _spread((4, 6), mesh_of((4,)), [S0])
    with forward_ad.dual_level():
        assert isinstance(to_torch(x), theirs.DTensor)
        to_torch(forward_ad.make_dual(x, x))


def _implicit() -> None:
    with implicit_replication():
        _theirs() + _rows()


def _loaded() -> None:
    module = nn.Linear(2, 4, bias=False)
    module.weight = nn.Parameter(_rows())
    module.load_state_dict({"weight": _theirs()})


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "wrapped": (
        lambda: DTensor.from_local(_theirs(), mesh_of((4,)), [S0]),
        "from_local got a DTensor of torch.distributed.tensor, .* use from_torch",
    ),
    "distributed": (
        lambda: distribute_tensor(_theirs(), mesh_of((4,)), [S0]),
        "distribute_tensor got a DTensor of torch.distributed.tensor, .* use from_torch",
    ),
    "mixed": (
        lambda: _theirs() + _rows(),
        r"add got a DTensor of torch.distributed.tensor of shape \[4, 2\] together",
    ),
    "transformed": (
        lambda: torch.func.grad(lambda x: to_torch(x).sum())(_rows()),
        "inside a transform of torch.func, .* convert before a transform",
    ),
    "dual": (_dual, "with a tangent of forward-mode"),
    "implicit": (_implicit, "expected one class: convert it with from_torch"),
    "loaded": (_loaded, "convert it with from_torch"),
    "ragged": (
        lambda: to_torch(_spread((4, 2), mesh_of((4,)), [RaggedShard(0, (0, 1, 2, 1))])),
        "expected placements that torch has: .* it has no RaggedShard",
    ),
    "copied": (
        lambda: to_torch(_spread((8, 2), mesh_of((4,)), [S0])[:2]),
        "expected a tensor with memory of its own",
    ),
    "plain": (lambda: to_torch(torch.ones(2)), "to_torch got torch.Tensor, expected a dtbench_core.DTensor"),
    "ours": (
        lambda: from_torch(_rows()),
        "from_torch got .*dtensor.DTensor, expected a torch.distributed.tensor.DTensor",
    ),
    "masked": (_masked, "_MaskPartial.* as a placement, expected"),
    "other order": (_other_order, "expected the outer mesh dim first"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@on_ranks
def test_conversions_without_a_counterpart_are_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(Exception, match=message):
        call()


# ---- compiled ----


@pytest.mark.parametrize(
    ("convert", "program"),
    [
        (lambda x: x, lambda x: to_torch(x * x).to_local() * 2),
        (
            lambda x: x,
            lambda x: (from_torch(to_torch(x * x) + 1) * 3).redistribute(placements=[R]).to_local(),
        ),
        (to_torch, lambda x: (from_torch(x * x) + 1).to_local()),
    ],
    ids=["leaves", "goes through", "comes"],
)
@on_ranks
def test_conversions_in_a_graph(convert: Callable[[Any], Any], program: Callable[[Any], Any]) -> None:
    torch._dynamo.reset()
    results = []
    for run in (torch.compile(program, backend="aot_eager", fullgraph=True), program):
        x = convert(_spread((8, 2), mesh_of((4,)), [S0])).requires_grad_()
        result = run(x)
        result.square().sum().backward()
        results.append((result, type(x.grad), x.grad.to_local()))
    (one, kind, gradient), (two, other_kind, other_gradient) = results
    assert torch.equal(one, two) and torch.equal(gradient, other_gradient) and kind is other_kind


# ---- collective utilities ----


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
    assert collective_utils.fill_empty_tensor_to_shards(shards, 0, 2) is shards
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
    """Every pair of dims, on every mesh dim."""
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


def test_all_to_all_op_has_a_meta_kernel(fake_world: Callable[..., None]) -> None:
    fake_world(4, rank=2)
    name = init_device_mesh("cpu", (4,)).get_group(0).group_name
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
    """On the mesh [[0, 1], [2, 3]]: along dim 0 from the first row, then along dim 1 from the second column."""
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


def _check_meta(which: str) -> None:
    rank = dist.get_rank()
    different = {
        ("dtype", 2): torch.ones(2, 3).double(),
        ("grad", 1): torch.ones(2, 3).requires_grad_(),
        ("shape", 3): torch.ones(3, 2),
        ("stride", 0): torch.ones(3, 2).t(),
    }
    tensor = different.get((which, rank), torch.ones(2, 3))
    if which in ("shape", "stride"):
        assert collective_utils.check_tensor_meta(tensor) is None
    collective_utils.check_tensor_meta(tensor, check_shape_stride=True)


@pytest.mark.parametrize("which", ["dtype", "grad", "shape", "stride"])
@on_ranks
def test_different_metadata_raise_on_every_rank(which: str) -> None:
    _check_meta("")
    text = r"Inconsistent tensor metadata \(including shape and stride\) across ranks\."
    with pytest.raises(ValueError, match=text) as raised:
        _check_meta(which)
    assert any("rank 2: dtype" in note for note in raised.value.__notes__)
