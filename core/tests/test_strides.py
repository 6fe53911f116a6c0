"""Strides: a DTensor says those that plain torch gives, and its local tensor has them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

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


class Program(NamedTuple):
    """fn of tensors of these shapes; plain or distributed, values and strides must be the same."""

    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    values: bool = True


MATRIX, EVEN, CUBE, IMAGE = ((5, 6),), ((8, 4),), ((4, 6, 5),), ((4, 4, 6, 6),)
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


def _grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The gradients of a function of tensors."""

    def run(*tensors: Any) -> Any:
        leaves = [t.detach().requires_grad_() for t in tensors]
        result = fn(*leaves)
        return torch.autograd.grad((result * result).sum(), leaves)

    return run


PROGRAMS: dict[str, Program] = {
    "sort of transposed": Program(lambda x: x.t().sort(1)[0].t(), MATRIX),
    "sort of transposed flat": Program(lambda x: x.t().sort(1)[0].t().reshape(-1), EVEN),
    "sort, indices": Program(lambda x: x.t().sort(0), MATRIX),
    "argsort": Program(lambda x: x.t().argsort(1), MATRIX),
    "topk of transposed": Program(lambda x: x.t().topk(2, 1), MATRIX),
    "topk of the first dim": Program(lambda x: x.t().topk(2, 0), EVEN),
    "kthvalue": Program(lambda x: x.t().kthvalue(2, 1), MATRIX),
    "median": Program(lambda x: x.t().median(1), MATRIX),
    "cumsum of transposed": Program(lambda x: (x.t().cumsum(0), x.t().cumsum(1)), MATRIX),
    "cummax": Program(lambda x: x.t().cummax(1), MATRIX),
    "logcumsumexp": Program(lambda x: x.t().logcumsumexp(0), MATRIX),
    "softmax": Program(lambda x: (x.t().softmax(0), x.t().softmax(1)), MATRIX),
    "log softmax of 3 dims": Program(lambda x: x.permute(2, 0, 1).log_softmax(1), CUBE),
    "reductions": Program(lambda x: (x.t().sum(0), x.t().mean(1, True), x.t().amax(0)), MATRIX),
    "reductions of permuted": Program(
        lambda x: (x.permute(2, 0, 1).sum(1), x.permute(1, 2, 0).mean(2), x.permute(2, 1, 0).var(0)), CUBE
    ),
    "argmax": Program(lambda x: (x.permute(2, 0, 1).argmax(1), x.permute(1, 2, 0).argmin(0)), CUBE),
    "max with indices": Program(lambda x: x.permute(2, 0, 1).max(1), CUBE),
    "logsumexp": Program(lambda x: x.permute(2, 0, 1).logsumexp(1), CUBE),
    "norm of rows": Program(lambda x: torch.linalg.vector_norm(x.permute(2, 0, 1), dim=0), CUBE),
    "any and all": Program(
        lambda x: ((x.permute(2, 0, 1) > 0).any(1), (x.permute(2, 0, 1) > 0).all(0)), CUBE
    ),
    "elementwise of transposed": Program(lambda x: (x.t() + 1, x.t().exp(), -x.t()), MATRIX),
    "transposed and not": Program(
        lambda x, y: (x.t() + y.t().contiguous(), y.t().contiguous() * x.t()), UNEVEN
    ),
    "broadcast": Program(lambda x: (x.t() + x.t()[:, :1], x.t() * x[:, 0]), MATRIX),
    "where": Program(lambda x, y: torch.where(x.t() > 0, x.t(), y.t()), UNEVEN),
    "lerp": Program(lambda x, y: torch.lerp(x.t(), y.t(), 0.5), PAIR),
    "of an expanded": Program(lambda x: x[:, :1].expand(5, 6) + 1, MATRIX),
    "of expanded first": Program(lambda x: x[:1].expand(5, 6).exp(), MATRIX),
    "expanded, cloned": Program(lambda x: x[None].expand(3, 5, 6).clone(), MATRIX),
    "expanded, contiguous": Program(lambda x: x.t()[None].expand(3, 6, 5).contiguous(), MATRIX),
    "of every second": Program(lambda x: (x[:, ::2].clone(), x[::2].t() + 1, x.t()[::2] * 2), MATRIX),
    "gaps, softmax": Program(
        lambda x: (x[:, ::2].softmax(0), x[:, :3].softmax(1), x[1:4].t().sort(0)[0]), MATRIX
    ),
    "gaps, permuted": Program(lambda x: x[:, ::2].permute(2, 0, 1).cumsum(1), CUBE),
    "permute chain": Program(lambda x: x.permute(2, 0, 1).exp().permute(1, 2, 0).reshape(4, 30), CUBE),
    "permute, view": Program(lambda x: x.permute(1, 0, 2).contiguous().view(6, 20).t(), CUBE),
    "permute, flat": Program(lambda x: x.permute(1, 0, 2).reshape(-1), CUBE),
    "permute, merge": Program(lambda x: x.permute(2, 0, 1).flatten(1), CUBE),
    "movedim": Program(lambda x: (x.movedim(0, 2) * 2, x.swapaxes(0, 1).relu()), CUBE),
    "as_strided": Program(lambda x: x.t().contiguous().as_strided((3, 2), (1, 6)) + 1, MATRIX),
    "as_strided of transposed": Program(lambda x: (x * 1).t().as_strided((3, 2), (1, 6)) * 2, MATRIX),
    "unfold": Program(lambda x: (x.unfold(1, 2, 1), x.unfold(1, 3, 2) + 1), MATRIX),
    "diagonal": Program(lambda x: (x.diagonal(), x.permute(1, 0, 2).diagonal(0, 0, 2) * 2), CUBE),
    "einsum": Program(
        lambda x: (
            torch.einsum("abc->cab", x),
            torch.einsum("abc,adc->abd", x, x),
            torch.einsum("abc->cb", x),
        ),
        CUBE,
    ),
    "einsum of two": Program(lambda x, y: torch.einsum("ab,cb->ca", x, y), PAIR),
    "einsum, then view": Program(lambda x: torch.einsum("abc,dbc->adb", x, x).contiguous().view(-1), CUBE),
    "matmul of transposed": Program(lambda x, y: (x.t() @ y, x @ y.t(), (x.t() @ y).t() @ y.t()), PAIR),
    "matmul of transposed, uneven": Program(lambda x, y: (x.t() @ y, x @ y.t()), UNEVEN),
    "bmm": Program(lambda x: (x @ x.mT, x.mT @ x, x.permute(1, 0, 2) @ x.permute(1, 2, 0)), CUBE),
    "matmul of 3 and 2 dims": Program(lambda x: (x @ x[0].t(), x.permute(1, 0, 2) @ x[0].t()), CUBE),
    "matrix and vector": Program(lambda x: (x.t() @ x[:, 0], x @ x[0]), MATRIX),
    "addmm": Program(lambda x, y: torch.addmm(x.t() @ y, x.t(), y), PAIR),
    "linear": Program(lambda x: F.linear(x.permute(1, 0, 2), _weight(x, 3, 5), _weight(x, 3)), CUBE),
    "cat of transposed": Program(
        lambda x, y: (torch.cat([x.t(), y.t()]), torch.cat([x.t(), y.t()], 1)), UNEVEN
    ),
    "cat of mixed": Program(lambda x, y: torch.cat([x.t(), y.t().contiguous()], 1), PAIR),
    "stack of transposed": Program(
        lambda x, y: (torch.stack([x.t(), y.t()]), torch.stack([x.t(), y.t()], 2)), UNEVEN
    ),
    "cat of channels last": Program(lambda x: torch.cat([x.to(memory_format=LAST)] * 2, 1), IMAGE),
    "index": Program(lambda x: (x.t()[[0, 2]], x.t()[:, [1, 0]], x.t()[1]), MATRIX),
    "index of permuted": Program(
        lambda x: (
            x.permute(2, 0, 1)[:, [1, 0]],
            x.permute(2, 0, 1)[[0, 1]],
            x.permute(2, 1, 0)[:, :, [3, 1]],
        ),
        CUBE,
    ),
    "index by a mask": Program(
        lambda x: x.t()[_like(x, torch.tensor([True, False, True, True, False, True]))], MATRIX
    ),
    "gather": Program(lambda x: x.t().gather(0, _like(x, torch.zeros(2, 5, dtype=torch.int64))), MATRIX),
    "index_select": Program(lambda x: x.t().index_select(1, _like(x, torch.tensor([1, 0]))), MATRIX),
    "take_along_dim": Program(lambda x: x.t().take_along_dim(x.t().argsort(0), 0), MATRIX),
    "scatter": Program(
        lambda x: x.t().scatter(0, _like(x, torch.zeros(2, 5, dtype=torch.int64)), 1.0), MATRIX
    ),
    "index_add": Program(lambda x: x.t().index_add(0, _like(x, torch.tensor([1, 0])), x.t()[:2]), MATRIX),
    "masked_fill": Program(lambda x: (x.t().masked_fill(x.t() > 0, 1.0), x.t().tril()), MATRIX),
    "flip and roll": Program(lambda x: (x.t().flip(0), x.t().roll(1, 0), x.t().rot90()), MATRIX),
    "repeat": Program(lambda x: (x.t().repeat(2, 1), x.t().repeat_interleave(2, 0), x.t().tile(2)), MATRIX),
    "pad": Program(lambda x: F.pad(x.t(), (1, 1)), MATRIX),
    "pad of channels last": Program(lambda x: F.pad(x.to(memory_format=LAST), (1, 1)), IMAGE),
    "split": Program(lambda x: (*(p + 1 for p in x.t().split(2)), *x.t().chunk(2, 1)), MATRIX),
    "unbind": Program(lambda x: (*x.permute(2, 0, 1).unbind(1),), CUBE),
    "select": Program(lambda x: (x.permute(2, 0, 1)[:, 1], x.permute(2, 0, 1)[0] + 1), CUBE),
    "squeeze": Program(
        lambda x: (x.t()[:, None].squeeze(1) + 1, x.t().unsqueeze(0), x[:, :1].squeeze(1)), MATRIX
    ),
    "preserved likes": Program(
        lambda x: (
            *(make(x.t()) for make in (torch.zeros_like, torch.ones_like, torch.empty_like)),
            torch.full_like(x.permute(1, 0), 2),
            torch.zeros_like(x[:, ::2]),
            torch.zeros_like(x[:1].expand(3, 6)),
            torch.zeros_like(x.t(), memory_format=torch.contiguous_format),
        ),
        MATRIX,
        values=False,
    ),
    "random likes": Program(
        lambda x: (torch.rand_like(x.t()), torch.bernoulli(x.t().abs() * 0)), MATRIX, values=False
    ),
    "new": Program(lambda x: (x.t().new_zeros(6, 5), x.new_zeros(5, 6).t() + x.t()), MATRIX),
    "clone": Program(lambda x: (x.t().clone(), x.t().clone(memory_format=torch.contiguous_format)), MATRIX),
    "converted": Program(
        lambda x: (x.t().float(), x.t().to(torch.float16), x[:, ::2].to(torch.int64)), MATRIX
    ),
    "in place": Program(lambda x: (x.clone().t().add_(1), x.clone().t().mul_(x.t())), MATRIX),
    "copied": Program(lambda x: torch.empty_like(x.t()).copy_(x.t()) + 1, MATRIX),
    "restated": Program(
        lambda x: (x.clone().t_() + 1, x.clone().transpose_(0, 1), x.clone().unsqueeze_(1)), MATRIX
    ),
    "layer norm": Program(
        lambda x: (F.layer_norm(x.permute(1, 0, 2), (5,)), F.layer_norm(x.permute(2, 0, 1), (6,))), CUBE
    ),
    "rms norm": Program(lambda x: F.rms_norm(x.permute(1, 0, 2), (5,)), CUBE),
    # Of channels_last images torch 2.14's shape function tells another layout than its kernel gives: ours is told.
    "group norm": Program(
        lambda x: [F.group_norm(image, 2) for image in (x, x.to(memory_format=LAST))[: 1 if IS_2_14 else 2]],
        IMAGE,
    ),
    "batch norm": Program(
        lambda x: (
            F.batch_norm(x, None, None, training=True),
            F.batch_norm(x.to(memory_format=LAST), None, None, training=True),
        ),
        IMAGE,
    ),
    "channels last": Program(
        lambda x: (x.to(memory_format=LAST), x.contiguous(memory_format=LAST).relu()), IMAGE
    ),
    "channels last and back": Program(lambda x: x.to(memory_format=LAST).contiguous().view(-1), IMAGE),
    "channels last, few channels": Program(lambda x: x[:, :1].contiguous(memory_format=LAST) * 2, IMAGE),
    "channels last, reduced": Program(
        lambda x: (x.to(memory_format=LAST).mean((2, 3)), x.to(memory_format=LAST).sum(1)), IMAGE
    ),
    "channels last, flattened": Program(
        lambda x: x.to(memory_format=LAST).flatten(2).transpose(1, 2) + 1, IMAGE
    ),
    "channels last, softmax": Program(lambda x: x.to(memory_format=LAST).softmax(1), IMAGE),
    "convolution": Program(lambda x: F.conv2d(x, _weight(x, 2, 4, 3, 3)), IMAGE),
    "convolution of channels last": Program(
        lambda x: F.conv2d(x.to(memory_format=LAST), _weight(x, 2, 4, 3, 3)), IMAGE
    ),
    "channels last weight": Program(
        lambda x: F.conv2d(x, _weight(x, 4, 4, 3, 3).to(memory_format=LAST), padding=1), IMAGE
    ),
    "convolution of a sequence": Program(lambda x: F.conv1d(x.transpose(1, 2), _weight(x, 3, 5, 2)), CUBE),
    "transposed convolution": Program(
        lambda x: F.conv_transpose2d(x.to(memory_format=LAST), _weight(x, 4, 2, 3, 3)), IMAGE
    ),
    "pool": Program(
        lambda x: (F.max_pool2d(x.to(memory_format=LAST), 2), F.avg_pool2d(x.to(memory_format=LAST), 2)),
        IMAGE,
    ),
    "adaptive pool": Program(lambda x: F.adaptive_avg_pool2d(x.to(memory_format=LAST), 2), IMAGE),
    "interpolate": Program(lambda x: F.interpolate(x.to(memory_format=LAST), scale_factor=2), IMAGE),
    "pixel shuffle": Program(lambda x: F.pixel_shuffle(x.to(memory_format=LAST), 2), IMAGE),
    "attention": Program(
        lambda x: F.scaled_dot_product_attention(*(x.view(4, 4, 6, 6).transpose(1, 2),) * 3), IMAGE
    ),
    "attention, then view": Program(
        lambda x: F.scaled_dot_product_attention(*(x.transpose(1, 2),) * 3).transpose(1, 2).reshape(4, 4, 36),
        IMAGE,
    ),
    "encoder layer": Program(_encoder, ((4, 6, 8),)),
    "foreach": Program(
        lambda x, y: (
            *torch._foreach_add([x.t(), y.t()], 1.0),
            *torch._foreach_mul([x.t(), y], [y.t(), x]),
            *torch._foreach_sqrt([x.t().abs(), y.abs()]),
        ),
        UNEVEN,
    ),
    "cdist": Program(lambda x: torch.cdist(x.t().contiguous(), x.t() + 1), MATRIX),
    "outer": Program(lambda x: torch.outer(x[0], x[:, 0]).t() + 1, MATRIX),
    "one_hot": Program(lambda x: F.one_hot((x.t() > 0).long(), 2), MATRIX),
    "embedding": Program(lambda x: F.embedding((x.t() > 0).long(), _weight(x, 2, 3)), MATRIX),
    "complex": Program(lambda x: torch.view_as_complex(x.reshape(5, 3, 2)).t() * 2, MATRIX),
    "fft": Program(lambda x: torch.fft.fft(x.t(), dim=0).abs(), MATRIX),
    "gradient of transposed": Program(_grad(lambda x: x.t().exp().sum(0)), MATRIX),
    "gradient of a sort": Program(_grad(lambda x: x.t().sort(1)[0]), MATRIX),
    "gradient of permuted": Program(_grad(lambda x: x.permute(2, 0, 1).softmax(1)), CUBE),
    "gradient of matmul": Program(_grad(lambda x, y: x.t() @ y), PAIR),
    "gradient of expand": Program(_grad(lambda x: x.t()[None].expand(2, 6, 5) * 2), MATRIX),
    "gradient of channels last": Program(_grad(lambda x: x.to(memory_format=LAST).relu()), IMAGE),
    "gradient of convolution": Program(
        _grad(lambda x, w: F.conv2d(x.to(memory_format=LAST), w)), ((4, 4, 6, 6), (2, 4, 3, 3))
    ),
    "gradient of cat": Program(_grad(lambda x, y: torch.cat([x.t(), y.t()], 1)), UNEVEN),
}


def _tensors(program: Program) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=torch.float64) for shape in program.shapes]


def _told(tensor: torch.Tensor) -> dict[str, Any]:
    """What a program can see of the strides: those of dims with more than one element, and what depends on them."""
    formats = {2: (), 4: (LAST,), 5: (torch.channels_last_3d,)}.get(tensor.ndim, ())
    told: dict[str, Any] = {
        "shape": tuple(tensor.shape),
        "stride": tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1),
        "contiguous": (tensor.is_contiguous(), *(tensor.is_contiguous(memory_format=f) for f in formats)),
    }
    try:
        told["view"] = tuple(tensor.view(-1).shape)
    except RuntimeError:
        told["view"] = "refused"
    return told


def _wrong(name: str, where: str, got: Any, expected: torch.Tensor, values: bool) -> list[str]:
    if not isinstance(got, DTensor):
        return []
    here, plain = _told(got), _told(expected)
    found = [f"{name} {where}: {k} {here[k]}, plain {plain[k]}" for k in plain if here[k] != plain[k]]
    local = got.to_local()
    order = [
        s for n, s in sorted(zip(local.shape, local.stride(), strict=True), key=lambda p: -p[1]) if n > 1
    ]
    dense = expected.numel() and expected.clone().stride() == expected.stride()
    if dense and local.numel():
        as_spec = torch.empty_strided(got._spec.local_shape, got._spec.local_stride)
        if _told(as_spec) != _told(local):
            found.append(f"{name} {where}: local {_told(local)}, by its spec {_told(as_spec)} {order}")
    whole = got.full_tensor()
    if values and not torch.allclose(whole, expected, equal_nan=True):
        found.append(f"{name} {where}: values")
    return found


def placements_of(shapes: tuple[tuple[int, ...], ...], mesh_ndim: int) -> list[list[Placement]]:
    ndim = min(map(len, shapes))
    each: list[Placement] = [Replicate(), *(Shard(d) for d in range(min(ndim, 3)))]
    if mesh_ndim == 1:
        return [[p] for p in each]
    return [list(p) for p in itertools.product(each[:3], repeat=2) if p[0] != p[1] or p[0].is_shard()]


def sweep(shape: tuple[int, ...], placements: list[list[Placement]] | None = None) -> list[str]:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
    found: list[str] = []
    for name, program in PROGRAMS.items():
        plain = _tensors(program)
        expected = tree_leaves(program.fn(*copy.deepcopy(plain)))
        for placed in placements or placements_of(program.shapes, mesh.ndim):
            placed_tensors = [distribute_tensor(t, mesh, placed, src_data_rank=None) for t in plain]
            where = ",".join(map(str, placed))
            try:
                got = tree_leaves(program.fn(*placed_tensors))
            except Exception as error:
                found.append(f"{name} {where}: {type(error).__name__} {error}"[:300])
                continue
            for one, plainly in zip(got, expected, strict=True):
                found += _wrong(name, where, one, plainly, program.values)
    return found


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
def test_strides_are_those_of_plain_torch(ranks: ThreadWorlds) -> None:
    for found in ranks(sweep, (2, 2), [[Shard(0), Shard(1)]]):
        assert not found, "\n".join(found)


@pytest.mark.filterwarnings("ignore::dtbench_core.FallbackWarning")
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_strides_of_all_placements_on_gloo(gloo_ranks: Worlds, shape: tuple[int, ...]) -> None:
    for found in gloo_ranks(sweep, shape):
        assert not found, "\n".join(found)


def _gradients_of_a_transposed_convolution() -> None:
    """The batch is smaller than the world: the CPU refuses what the rank that holds it would give the kernel."""
    plain = [torch.linspace(-1, 2, n * m).view(n, m, 1).permute(2, 1, 0) for n, m in ((4, 1), (3, 2))]
    mesh = init_device_mesh("cpu", (4,))
    placed = [distribute_tensor(t, mesh, [Shard(2)], src_data_rank=None) for t in plain]
    expected, got = (
        torch.autograd.grad(
            F.conv_transpose1d(*given, stride=2, padding=1, output_padding=1).square().sum(), given
        )
        for given in ([t.requires_grad_() for t in tensors] for tensors in (plain, placed))
    )
    for one, plainly in zip(got, expected, strict=True):
        assert isinstance(one, DTensor)
        torch.testing.assert_close(one.full_tensor(), plainly)


def test_a_transposed_convolution_of_strided_tensors_has_gradients(ranks: ThreadWorlds) -> None:
    ranks(_gradients_of_a_transposed_convolution)
