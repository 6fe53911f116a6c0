"""Strides of DTensors equal those of plain torch; local tensors with strides that differ between ranks."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from core.tests.gloo_world import Worlds, mesh_of, on_gloo_ranks, on_ranks
from core.tests.local_world import ThreadWorlds
from dtbench_core import (
    CommTensor,
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    local_map,
    to_torch,
)
from dtbench_core.bucketer import ReduceScatterBucketer
from dtbench_core.interop import collective_utils
from dtbench_core.interop.torch_dtensor import from_torch
from dtbench_core.torch_compat import all_gather_single

LAST = torch.channels_last
IS_2_14 = torch.__version__.startswith("2.14.")


Shapes = tuple[tuple[int, ...], ...]
MATRIX, CUBE, IMAGE = ((5, 6),), ((4, 6, 5),), ((4, 4, 6, 6),)
PAIR, UNEVEN = ((8, 4), (8, 4)), ((5, 6), (5, 6))


def _encoder(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    return layer(x) if not isinstance(x, DTensor) else distribute_module(layer, x.device_mesh)(x)


def _like(x: Any, tensor: torch.Tensor) -> Any:
    """Returns `tensor` plain or replicated, like `x`."""
    return distribute_tensor(tensor, x.device_mesh, src_data_rank=None) if isinstance(x, DTensor) else tensor


def _weight(x: Any, *shape: int) -> Any:
    return _like(x, torch.linspace(-1, 1, int(torch.Size(shape).numel()), dtype=torch.float64).view(shape))


def _last(x: Any) -> Any:
    return x.to(memory_format=LAST)


def _grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes the gradients of `fn`."""

    def run(*tensors: Any) -> Any:
        leaves = [t.detach().requires_grad_() for t in tensors]
        result = fn(*leaves)
        return torch.autograd.grad((result * result).sum(), leaves)

    return run


# By the shapes that their tensors have.
PROGRAMS: dict[Shapes, dict[str, Callable[..., Any]]] = {
    MATRIX: {
        "preserved likes": lambda x: (
            *(make(x.t()) for make in (torch.zeros_like, torch.ones_like, torch.empty_like)),
            torch.full_like(x.permute(1, 0), 2),
            torch.zeros_like(x[:, ::2]),
            torch.zeros_like(x[:1].expand(3, 6)),
            torch.zeros_like(x.t(), memory_format=torch.contiguous_format),
        ),
        "random likes": lambda x: (torch.rand_like(x.t()), torch.bernoulli(x.t().abs() * 0)),
        "sort of transposed": lambda x: x.t().sort(1)[0].t(),
        "sort, indices": lambda x: x.t().sort(0),
        "topk of transposed": lambda x: x.t().topk(2, 1),
        "median": lambda x: x.t().median(1),
        "cumsum of transposed": lambda x: (x.t().cumsum(0), x.t().cumsum(1)),
        "softmax": lambda x: (x.t().softmax(0), x.t().softmax(1)),
        "reductions": lambda x: (x.t().sum(0), x.t().mean(1, True), x.t().amax(0)),
        "elementwise of transposed": lambda x: (x.t() + 1, x.t().exp(), -x.t()),
        "broadcast": lambda x: (x.t() + x.t()[:, :1], x.t() * x[:, 0]),
        "of an expanded": lambda x: x[:, :1].expand(5, 6) + 1,
        "expanded, cloned": lambda x: x[None].expand(3, 5, 6).clone(),
        "of every second": lambda x: (x[:, ::2].clone(), x[::2].t() + 1, x.t()[::2] * 2),
        "gaps, softmax": lambda x: (x[:, ::2].softmax(0), x[:, :3].softmax(1), x[1:4].t().sort(0)[0]),
        "as_strided": lambda x: x.t().contiguous().as_strided((3, 2), (1, 6)) + 1,
        "matrix and vector": lambda x: (x.t() @ x[:, 0], x @ x[0]),
        "index": lambda x: (x.t()[[0, 2]], x.t()[:, [1, 0]], x.t()[1]),
        "index by a mask": lambda x: x.t()[_like(x, torch.tensor([True, False, True, True, False, True]))],
        "scatter": lambda x: x.t().scatter(0, _like(x, torch.zeros(2, 5, dtype=torch.int64)), 1.0),
        "masked_fill": lambda x: (x.t().masked_fill(x.t() > 0, 1.0), x.t().tril()),
        "flip and roll": lambda x: (x.t().flip(0), x.t().roll(1, 0), x.t().rot90()),
        "split": lambda x: (*(p + 1 for p in x.t().split(2)), *x.t().chunk(2, 1)),
        "new": lambda x: (x.t().new_zeros(6, 5), x.new_zeros(5, 6).t() + x.t()),
        "clone": lambda x: (x.t().clone(), x.t().clone(memory_format=torch.contiguous_format)),
        "in place": lambda x: (x.clone().t().add_(1), x.clone().t().mul_(x.t())),
        "copied": lambda x: torch.empty_like(x.t()).copy_(x.t()) + 1,
        "complex": lambda x: torch.view_as_complex(x.reshape(5, 3, 2)).t() * 2,
        "fft": lambda x: torch.fft.fft(x.t(), dim=0).abs(),
        "gradient of transposed": _grad(lambda x: x.t().exp().sum(0)),
    },
    CUBE: {
        "log softmax of 3 dims": lambda x: x.permute(2, 0, 1).log_softmax(1),
        "reductions of permuted": lambda x: (
            x.permute(2, 0, 1).sum(1),
            x.permute(1, 2, 0).mean(2),
            x.permute(2, 1, 0).var(0),
        ),
        "argmax": lambda x: (x.permute(2, 0, 1).argmax(1), x.permute(1, 2, 0).argmin(0)),
        "gaps, permuted": lambda x: x[:, ::2].permute(2, 0, 1).cumsum(1),
        "permute chain": lambda x: x.permute(2, 0, 1).exp().permute(1, 2, 0).reshape(4, 30),
        "permute, view": lambda x: x.permute(1, 0, 2).contiguous().view(6, 20).t(),
        "diagonal": lambda x: (x.diagonal(), x.permute(1, 0, 2).diagonal(0, 0, 2) * 2),
        "convolution of a sequence": lambda x: F.conv1d(x.transpose(1, 2), _weight(x, 3, 5, 2)),
    },
    UNEVEN: {
        "transposed and not": lambda x, y: (x.t() + y.t().contiguous(), y.t().contiguous() * x.t()),
        "matmul of transposed, uneven": lambda x, y: (x.t() @ y, x @ y.t()),
        "cat of transposed": lambda x, y: (torch.cat([x.t(), y.t()]), torch.cat([x.t(), y.t()], 1)),
        "foreach": lambda x, y: (
            *torch._foreach_add([x.t(), y.t()], 1.0),
            *torch._foreach_mul([x.t(), y], [y.t(), x]),
            *torch._foreach_sqrt([x.t().abs(), y.abs()]),
        ),
    },
    PAIR: {
        "matmul of transposed": lambda x, y: (x.t() @ y, x @ y.t(), (x.t() @ y).t() @ y.t()),
        "gradient of matmul": _grad(lambda x, y: x.t() @ y),
    },
    IMAGE: {
        "cat of channels last": lambda x: torch.cat([_last(x)] * 2, 1),
        "pad of channels last": lambda x: F.pad(_last(x), (1, 1)),
        "group norm": lambda x: [F.group_norm(image, 2) for image in (x, _last(x))[: 1 if IS_2_14 else 2]],
        "channels last": lambda x: (_last(x), x.contiguous(memory_format=LAST).relu()),
        "channels last, reduced": lambda x: (_last(x).mean((2, 3)), _last(x).sum(1)),
        "convolution": lambda x: F.conv2d(x, _weight(x, 2, 4, 3, 3)),
        "convolution of channels last": lambda x: F.conv2d(_last(x), _weight(x, 2, 4, 3, 3)),
        "pool": lambda x: (F.max_pool2d(_last(x), 2), F.avg_pool2d(_last(x), 2)),
        "attention": lambda x: F.scaled_dot_product_attention(*(x.view(4, 4, 6, 6).transpose(1, 2),) * 3),
        "gradient of channels last": _grad(lambda x: _last(x).relu()),
    },
    ((4, 6, 8),): {"encoder layer": _encoder},
    ((4, 4, 6, 6), (2, 4, 3, 3)): {"gradient of convolution": _grad(lambda x, w: F.conv2d(_last(x), w))},
}
# Ops whose values are undefined.
STRIDES_ONLY = ("preserved likes", "random likes")


def _layout(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns the visible effects of strides: those of dims with several elements, contiguity, and view()."""
    formats = {2: (), 4: (LAST,), 5: (torch.channels_last_3d,)}.get(tensor.ndim, ())
    layout: dict[str, Any] = {
        "shape": tuple(tensor.shape),
        "stride": tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1),
        "contiguous": (tensor.is_contiguous(), *(tensor.is_contiguous(memory_format=f) for f in formats)),
    }
    try:
        layout["view"] = tuple(tensor.view(-1).shape)
    except RuntimeError:
        layout["view"] = "refused"
    return layout


def _differences(got: DTensor, expected: torch.Tensor, values: bool) -> list[str]:
    ours, plain = _layout(got), _layout(expected)
    differences = [f"{k} {ours[k]}, plain {plain[k]}" for k in plain if ours[k] != plain[k]]
    local = got.to_local()
    dense = expected.numel() and expected.clone().stride() == expected.stride()
    if dense and local.numel():
        as_spec = torch.empty_strided(got._spec.local_shape, got._spec.local_stride)
        if _layout(as_spec) != _layout(local):
            differences.append(f"local {_layout(local)}, by its spec {_layout(as_spec)}")
    if values and not torch.allclose(got.full_tensor(), expected, equal_nan=True):
        differences.append("values")
    return differences


def _placements(shapes: Shapes, mesh_ndim: int) -> list[list[Placement]]:
    each: list[Placement] = [Replicate(), *(Shard(d) for d in range(min(*map(len, shapes), 3)))]
    if mesh_ndim == 1:
        return [[p] for p in each]
    return [list(p) for p in itertools.product(each[:3], repeat=2) if p[0] != p[1] or p[0].is_shard()]


def _sweep(mesh_shape: tuple[int, ...], placements: list[list[Placement]] | None = None) -> list[str]:
    """Returns how the results of the programs differ from plain torch on this rank."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("a", "b")[: len(mesh_shape)])
    differences: list[str] = []
    for shapes, name in [(shapes, name) for shapes, programs in PROGRAMS.items() for name in programs]:
        torch.manual_seed(0)
        plain, fn = [torch.randn(shape, dtype=torch.float64) for shape in shapes], PROGRAMS[shapes][name]
        expected = tree_leaves(fn(*copy.deepcopy(plain)))
        for placed in placements or _placements(shapes, mesh.ndim):
            try:
                got = tree_leaves(
                    fn(*(distribute_tensor(t, mesh, placed, src_data_rank=None) for t in plain))
                )
                lines = [
                    line
                    for one, other in zip(got, expected, strict=True)
                    if isinstance(one, DTensor)
                    for line in _differences(one, other, name not in STRIDES_ONLY)
                ]
            except Exception as error:
                lines = [f"{type(error).__name__} {error}"[:300]]
            differences += [f"{name} {','.join(map(str, placed))}: {line}" for line in lines]
    return differences


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
def test_strides_are_those_of_plain_torch(ranks: ThreadWorlds) -> None:
    assert ranks(_sweep, (2, 2), [[Shard(0), Shard(1)]]) == [[]] * 4


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_strides_of_all_placements_on_gloo(gloo_ranks: Worlds, shape: tuple[int, ...]) -> None:
    assert gloo_ranks(_sweep, shape) == [[]] * 4


@on_ranks
def test_gradients_of_a_transposed_convolution() -> None:
    """The batch is smaller than the world, so some ranks have no input for the CPU kernel."""
    plain = [torch.linspace(-1, 2, n * m).view(n, m, 1).permute(2, 1, 0) for n, m in ((4, 1), (3, 2))]
    mesh = init_device_mesh("cpu", (4,))
    placed = [distribute_tensor(t, mesh, [Shard(2)], src_data_rank=None) for t in plain]
    expected, got = (
        torch.autograd.grad(
            F.conv_transpose1d(*leaves, stride=2, padding=1, output_padding=1).square().sum(), leaves
        )
        for leaves in ([t.requires_grad_() for t in tensors] for tensors in (plain, placed))
    )
    torch.testing.assert_close([gradient.full_tensor() for gradient in got], [*expected])


# ---- local tensors whose strides differ between ranks ----


R, P = Replicate(), Partial()


def _dense(values: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Returns `values` with their dims in this order in memory, outermost first."""
    return values.permute(order).contiguous().permute([order.index(d) for d in range(len(order))])


def _gapped(values: torch.Tensor) -> torch.Tensor:
    """Returns `values` with other elements between them in memory."""
    wide = torch.full((*values.shape[:-1], 2 * values.shape[-1] + 1), 99, dtype=values.dtype)
    wide[..., 1::2] = values
    return wide[..., 1::2]


def _layouts(values: torch.Tensor) -> list[torch.Tensor]:
    """Returns `values` in four memory layouts."""
    orders = list(itertools.permutations(range(values.ndim)))
    first, second, last = (
        _dense(values, order) for order in (orders[-1], orders[0], orders[len(orders) // 2])
    )
    return [first, second, _gapped(values), last]


def _values(shape: tuple[int, ...], start: float = 0.0) -> torch.Tensor:
    return start + torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def _mine(values: torch.Tensor) -> torch.Tensor:
    """Returns `values` in the memory layout of this rank."""
    return _layouts(values)[dist.get_rank() % 4]


SHAPES = (3, 2), (4, 6), (5, 3), (2, 3, 4), (4, 3, 2, 2)


@on_ranks
def test_distribute_tensor() -> None:
    for shape, sizes in itertools.product(SHAPES, ((2,), (4,), (2, 2))):
        mesh = mesh_of(sizes)
        for placed in itertools.product((R, P, Shard(0), Shard(1)), repeat=len(sizes)):
            is_source = dist.get_rank() == 0  # whose values alone count
            tensor = distribute_tensor(_mine(_values(shape) * is_source), mesh, placed)
            if mesh.get_coordinate() is None:
                continue
            expected = distribute_tensor(_values(shape), mesh, placed, src_data_rank=None).to_local()
            assert torch.equal(tensor.to_local(), expected), (shape, sizes, placed)
            assert torch.equal(tensor.full_tensor(), _values(shape)), (shape, sizes, placed)


def _moves(shape: tuple[int, ...], sizes: tuple[int, ...]) -> Iterator[tuple[Any, DTensor, torch.Tensor]]:
    """Yields (placements, a tensor whose local layouts differ between ranks, its values)."""
    mesh = mesh_of(sizes)
    if mesh.get_coordinate() is None:
        return
    for placed in itertools.product((R, P, Partial("max"), Shard(0), Shard(1)), repeat=len(sizes)):
        if {"max", "sum"} <= {p.reduce_op for p in placed if isinstance(p, Partial)}:
            continue
        pending = tuple(R if p.is_partial() else p for p in placed)
        whole = distribute_tensor(_values(shape), mesh, pending, src_data_rank=None)
        factor = math.prod(n for p, n in zip(placed, sizes, strict=True) if p == P)
        strides = {} if whole._spec.is_even() else {"shape": shape, "stride": whole.stride()}
        yield (
            placed,
            DTensor.from_local(_mine(whole.to_local()), mesh, placed, **strides),
            factor * _values(shape),
        )


STRIDED_PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "elementwise": lambda x: x * 2 + x,
    "transposed": lambda x: x.transpose(0, 1),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "contiguous itself": lambda x: x.contiguous() - 1,
    "flat view": lambda x: x.reshape(-1),
    "transposed, flat view": lambda x: x.transpose(0, 1).reshape(-1),
    "transposed, split view": lambda x: x.transpose(-1, -2).reshape(
        *x.shape[:-2], x.shape[-1], 1, x.shape[-2]
    ),
    "contiguous view": lambda x: x.transpose(-1, -2).contiguous().view(-1, x.shape[-2]).t(),
    "sliced": lambda x: x.transpose(0, 1)[1:].clone(),
    "reduced": lambda x: x.transpose(0, 1).sum(-1),
    "expanded": lambda x: x.unsqueeze(-1).expand(*x.shape, 3) + 1,
    "likes": lambda x: torch.ones_like(x.transpose(0, 1)) + x.transpose(0, 1),
    "cat": lambda x: torch.cat([x, x + 1], 1),
    "two": lambda x: x.t() @ x if x.ndim == 2 else x + x.clone(memory_format=torch.contiguous_format),
    "by dims": lambda x: torch.stack(x.unbind(1)),
    "cumsum": lambda x: x.transpose(0, 1).cumsum(0),
    "softmax": lambda x: (x / 100).transpose(0, 1).softmax(0),
}


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=str)
@on_ranks
def test_from_local(sizes: tuple[int, ...]) -> None:
    targets = itertools.cycle((R, Shard(0), Shard(1)))
    for shape in SHAPES if len(sizes) == 1 else ((4, 6), (4, 3, 2, 2)):
        for placed, tensor, values in _moves(shape, sizes):
            for name, program in STRIDED_PROGRAMS.items():
                if "view" in name and not tensor._spec.is_even():
                    continue
                result, expected = program(tensor), program(values)
                to = [next(targets) if result.ndim > 1 else Shard(0)] * len(sizes)
                moved = result.redistribute(placements=to).to_local()
                part = distribute_tensor(expected, tensor.device_mesh, to, src_data_rank=None).to_local()
                is_same = torch.allclose(moved, part) and torch.allclose(result.full_tensor(), expected)
                assert is_same, (shape, name, placed, to)


@on_ranks
def test_expanded_and_lazily_negated_local_tensors() -> None:
    """Memory that holds fewer values than the tensor, or negated ones."""
    mesh, first = mesh_of((4,)), dist.get_rank() == 0
    row = torch.tensor([[1.0, 2.0]])
    for placed, whole in ((R, row.expand(3, 2)), (Shard(0), row.expand(12, 2)), (P, 4 * row.expand(3, 2))):
        local = row.expand(3, 2) if first else row.repeat(3, 1)
        tensor = DTensor.from_local(local, mesh, [placed])
        assert torch.equal(tensor.full_tensor(), whole), placed
        assert torch.equal((tensor.t() + 1).full_tensor(), whole.t() + 1), placed
    number = torch.complex(_values((3, 2)), _values((3, 2)) + 1)
    for lazy in (number.conj(), number.conj().imag, number.conj().imag[:1, :1]):
        local = lazy if first else lazy.resolve_conj().resolve_neg()
        for placed, whole in ((R, lazy), (Shard(1), torch.cat([lazy] * 4, 1)), (P, 4 * lazy)):
            assert torch.equal(DTensor.from_local(local, mesh, [placed]).full_tensor(), whole), (lazy, placed)
            spread = distribute_tensor(local, mesh, [placed] if placed != P else [Shard(0)])
            assert torch.equal(spread.full_tensor(), lazy), (lazy, placed)


# ---- where ranks agree, what is seen stays ----


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@on_ranks
def test_strides_are_kept(shape: tuple[int, ...]) -> None:
    """Strides are those that torch gives a dense tensor of the layout that all ranks have."""
    mesh = mesh_of((2,))
    if mesh.get_coordinate() is None:
        return
    for order in itertools.permutations(range(len(shape))):
        whole = _dense(_values(shape), order)
        for placed in (R, Shard(0), Shard(1)):
            for source in (0, None):
                tensor = distribute_tensor(whole, mesh, [placed], src_data_rank=source)
                assert tensor.stride() == tensor.full_tensor().stride() == whole.stride(), (order, placed)
                moved = tensor.redistribute(placements=[Shard(1 if placed == Shard(0) else 0)])
                assert moved.stride() == whole.stride(), (order, placed)
                for local in (tensor.to_local(), moved.to_local()):
                    assert local.numel() == 0 or local.stride() == _dense(local, order).stride(), (
                        order,
                        placed,
                    )


# ---- local_map, gradients ----


@on_ranks
def test_local_map_and_gradients() -> None:
    mesh = mesh_of((4,))
    weight = _values((8, 4)) / 10
    for placed, to in itertools.product((R, Shard(0), Shard(1)), repeat=2):
        tensor = distribute_tensor(weight, mesh, [placed], src_data_rank=None).requires_grad_()
        result = local_map(lambda x: _mine(x * 2), [placed], ([placed],))(tensor)
        assert torch.equal(result.full_tensor(), weight * 2), (placed, to)
        local = result.redistribute(placements=[to]).to_local()
        local.backward(_mine(local.detach() + 1))
        assert torch.allclose(tensor.grad.full_tensor(), 2 * (weight * 2 + 1)), (placed, to)
        part = tensor.detach().to_local()
        local = part.clone().requires_grad_()
        DTensor.from_local(local, mesh, [placed]).full_tensor().backward(_mine(weight))
        assert torch.equal(local.grad, part)


@on_ranks
def test_torchs_dtensors() -> None:
    mesh, values = mesh_of((4,)), _values((8, 4))
    for placed in (theirs.Replicate(), theirs.Shard(0), theirs.Shard(1)):
        local = distribute_tensor(values, mesh, [placed], src_data_rank=None).to_local()
        ours = from_torch(theirs.DTensor.from_local(_mine(local), mesh, [placed]))
        assert torch.equal(ours.full_tensor(), values), placed
        assert torch.equal(to_torch(ours).full_tensor(), values), placed


# ---- what a transport reads by itself: on gloo, which takes memory as it lies ----


@on_gloo_ranks(world_size=2)
def test_buckets_and_collective_utils() -> None:
    mesh, rank = mesh_of((2,)), dist.get_rank()
    values, total = _values((4, 6)), 2 * _values((4, 6)) + 1
    for layout in range(4):  # another one on each rank
        mine = _layouts(values + rank)[(layout + rank) % 4]
        for cap, hold in itertools.product((0, 1), (False, True)):
            results: list[torch.Tensor] = []
            bucketer = ReduceScatterBucketer(cap, hold_inputs=hold)
            for given in (mine, [mine, mine + 1], mine.reshape(-1)):
                bucketer.reduce_scatter_async(given, mesh.get_group(), results.append)
            bucketer.flush()
            expected = [total.chunk(2)[rank], total + 2 * rank, total.reshape(-1).chunk(2)[rank]]
            assert all(map(torch.equal, results, expected))
        for async_op in (False, True):
            output = mine.clone() if layout % 2 else _gapped(values * 0)
            work = collective_utils.mesh_broadcast(mine, mesh, async_op=async_op)
            if work is not None:
                work.wait()
            assert torch.equal(mine, values)
            parts = [_layouts(values + i)[(layout + i) % 4] for i in range(2)]
            work = collective_utils.mesh_scatter(output, parts, mesh, async_op=async_op, group_src=1)
            if work is not None:
                work.wait()
            assert torch.equal(output, values + rank)
        part = _layouts(values + 10 * rank)[(layout + rank) % 4]
        whole = torch.cat([values, values + 10])
        assert torch.equal(collective_utils.shard_dim_alltoall(part, 0, 1, mesh, 0), whole.chunk(2, 1)[rank])


@on_gloo_ranks(world_size=2)
def test_comm_tensors() -> None:
    rank, values = dist.get_rank(), _values((4, 6))
    for layout, async_op in itertools.product(range(4), (False, True)):
        mine, each = _layouts(values + rank)[(layout + rank) % 4], [values, values + 1]

        def wrap(tensor: torch.Tensor) -> torch.Tensor:
            return CommTensor(tensor.clone() if tensor.is_contiguous() else tensor)

        reduced = wrap(_layouts(values + rank)[(layout + rank) % 4])
        dist.all_reduce(reduced, async_op=async_op)
        assert torch.equal(reduced + 0, 2 * values + 1)
        sent = wrap(_layouts(values + rank)[(layout + rank) % 4])
        dist.broadcast(sent, 1, async_op=async_op)
        assert torch.equal(sent + 0, values + 1)
        gathered = [wrap(_layouts(values * 0)[(layout + i) % 4]) for i in range(2)]
        dist.all_gather(gathered, wrap(mine), async_op=async_op)
        assert all(torch.equal(one + 0, e) for one, e in zip(gathered, each, strict=True))
        output = wrap(_layouts(values * 0)[(layout + rank) % 4])
        dist.reduce_scatter(output, [wrap(_layouts(e + rank)[layout]) for e in each], async_op=async_op)
        assert torch.equal(output + 0, 2 * values + 2 * rank + 1)
        dist.scatter(
            output, [wrap(one) for one in _layouts(values + 5)[:2]] if rank == 0 else None, async_op=async_op
        )
        assert torch.equal(output + 0, values + 5)
        whole = wrap(_layouts(torch.zeros(8, 6))[(layout + rank) % 4])
        all_gather_single(whole, wrap(mine), async_op=async_op)
        assert torch.equal(whole + 0, torch.cat(each))
        columns = torch.zeros(4, 12)
        dist.all_gather([wrap(part) for part in columns.chunk(2, 1)], CommTensor(mine), async_op=False)
        assert torch.equal(columns, torch.cat(each, 1)), "a sync collective is over when it returns"
        received = wrap(_layouts(values * 0)[(layout + rank) % 4])
        dist.irecv(received, 1 - rank)
        dist.send(wrap(mine), 1 - rank)
        assert torch.equal(received + 0, each[1 - rank])

        def summed(tensor: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
            result = CommTensor(tensor * 2)
            dist.all_reduce(result, async_op=True)
            gathered = CommTensor(output)
            dist.all_gather([gathered, CommTensor(torch.empty_like(output))], CommTensor(result + 1))
            return gathered + 0

        traced = make_fx(summed)(mine, output := _layouts(values * 0)[(layout + rank) % 4])
        assert torch.equal(traced(mine, output), 4 * values + 3)
