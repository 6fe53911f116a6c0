"""Strides: a DTensor says those that plain torch gives, and its local tensor has them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from core.tests.gloo_world import Worlds
from core.tests.local_world import ThreadWorlds
from dtbench_core import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor

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
    """`tensor` as `x` is: plain, or replicated on its mesh."""
    return distribute_tensor(tensor, x.device_mesh, src_data_rank=None) if isinstance(x, DTensor) else tensor


def _weight(x: Any, *shape: int) -> Any:
    return _like(x, torch.linspace(-1, 1, int(torch.Size(shape).numel()), dtype=torch.float64).view(shape))


def _last(x: Any) -> Any:
    return x.to(memory_format=LAST)


def _grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of a function of tensors."""

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
# Those whose values are not defined.
STRIDES_ONLY = ("preserved likes", "random likes")


def _layout(tensor: torch.Tensor) -> dict[str, Any]:
    """What a program can see of the strides: those of dims with more than one element, and what depends on them."""
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
    """On a rank: how the results of the programs differ from those of plain torch."""
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
    for differences in ranks(_sweep, (2, 2), [[Shard(0), Shard(1)]]):
        assert not differences, "\n".join(differences)


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_strides_of_all_placements_on_gloo(gloo_ranks: Worlds, shape: tuple[int, ...]) -> None:
    for differences in gloo_ranks(_sweep, shape):
        assert not differences, "\n".join(differences)


def _gradients_of_a_transposed_convolution() -> None:
    """The batch is smaller than the world: the CPU refuses what the rank that holds it would give the kernel."""
    plain = [torch.linspace(-1, 2, n * m).view(n, m, 1).permute(2, 1, 0) for n, m in ((4, 1), (3, 2))]
    mesh = init_device_mesh("cpu", (4,))
    placed = [distribute_tensor(t, mesh, [Shard(2)], src_data_rank=None) for t in plain]
    expected, got = (
        torch.autograd.grad(
            F.conv_transpose1d(*leaves, stride=2, padding=1, output_padding=1).square().sum(), leaves
        )
        for leaves in ([t.requires_grad_() for t in tensors] for tensors in (plain, placed))
    )
    for one, plainly in zip(got, expected, strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), plainly)


def test_a_transposed_convolution_of_strided_tensors_has_gradients(ranks: ThreadWorlds) -> None:
    ranks(_gradients_of_a_transposed_convolution)
