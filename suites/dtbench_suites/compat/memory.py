"""Strides, views, and writes: through locals, through views, to parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dtbench_suites.compat.program import Given, program, randn


def _leaf(w: Given, *places: str) -> torch.Tensor:
    return w.place(randn(8, 4), *(places or ("S(0)",)), grad=True)


def _grad(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


def _rows(w: Given, *places: str) -> torch.Tensor:
    return _leaf(w, *places).detach()


@program("writes")
def write_through_a_local(w: Given) -> Any:
    x = _leaf(w)
    y = x * 2
    w.leave()(y).mul_(3)
    y.sum().backward()
    return y, x.grad


@program("writes")
def write_through_a_local_after_it_was_saved(w: Given) -> Any:
    x = _leaf(w)
    y = x * 2
    local = w.leave()(y)
    z = (y * y).sum()
    with torch.no_grad():
        local.add_(1)
    z.backward()
    return x.grad


@program("writes")
def write_to_what_a_local_became(w: Given) -> Any:
    leaf = w.part(randn(8, 4)).requires_grad_()
    h = leaf * 2
    w.enter("S(0)")(h).mul_(3)
    h.sum().backward()
    return w.enter("S(0)")(h.detach()), w.enter("S(0)")(_grad(leaf))


@program("writes")
def write_to_a_leaf_through_from_local(w: Given) -> Any:
    leaf = w.part(randn(8, 4)).requires_grad_()
    w.enter("S(0)")(leaf).mul_(3)
    return leaf


@program("writes")
def write_to_a_leaf(w: Given) -> Any:
    return _leaf(w).add_(1)


@program("writes")
def write_to_a_view_of_a_leaf(w: Given) -> Any:
    _leaf(w)[:, 0].add_(1)


@program("writes")
def write_to_a_saved_tensor(w: Given) -> Any:
    x = _leaf(w)
    y = x.exp()
    y.add_(1)
    y.sum().backward()
    return x.grad


@program("writes")
def item_of_a_sharded_dim_set(w: Given) -> Any:
    x = _rows(w)
    x[0] = 1
    return x


@program("writes")
def slice_of_a_sharded_dim_multiplied(w: Given) -> Any:
    x = _rows(w)
    x[2:5].mul_(2)
    return x


@program("writes")
def strided_slice_of_a_sharded_dim_added_to(w: Given) -> Any:
    x = _rows(w)
    x[1::3].add_(1)
    return x


@program("writes")
def negative_index_set(w: Given) -> Any:
    x = _rows(w)
    x[-1, 1:3] = 7
    return x


@program("writes")
def mask_set(w: Given) -> Any:
    x = _rows(w)
    x[x > 0] = 0
    return x


@program("writes")
def rows_set_by_index(w: Given) -> Any:
    x = _rows(w)
    x[w.place(torch.tensor([1, 6]), "R")] = 5
    return x


@program("writes")
def shifted_add_on_two_mesh_dims(w: Given) -> Any:
    x = w.place(randn(7, 5), "S(0)", "S(0)")
    x[:, :4].add_(x[:, 1:5].clone())
    return x


@program("writes")
def overlapping_views_added(w: Given) -> Any:
    x = w.place(randn(7, 5), "S(0)", "S(0)")
    x[:, :4].add_(x[:, 1:5])
    return x


@program("writes")
def write_with_gradient_to_a_slice(w: Given) -> Any:
    x, v = _leaf(w), w.place(randn(2, 4, seed=2), "R", grad=True)
    y = x * 1
    y[2:4] = v
    y.pow(2).sum().backward()
    return y, x.grad, v.grad


@program("writes")
def copy_from_another_placement(w: Given) -> Any:
    x = _rows(w)
    return x.copy_(w.place(randn(8, 4, seed=3), "S(1)")), x


@program("writes")
def data_set(w: Given) -> Any:
    x = _leaf(w)
    x.data = w.place(randn(8, 4, seed=3), "S(0)")
    x.pow(2).sum().backward()
    return x, x.grad


@program("writes")
def fill_and_zero_of_a_column(w: Given) -> Any:
    x = _rows(w)
    x[:, 1].fill_(3)
    x[:, 2].zero_()
    return x


@program("writes")
def chunk_written(w: Given) -> Any:
    x = _rows(w)
    x.chunk(2, 1)[1].mul_(2)
    return x


@program("writes")
def transposed_view_written(w: Given) -> Any:
    x = _rows(w)
    x.t()[1].add_(1)
    return x


@program("writes")
def index_add_over_the_sharded_dim(w: Given) -> Any:
    x = _rows(w)
    return x.index_add_(0, w.place(torch.tensor([1, 5]), "R"), w.place(torch.ones(2, 4), "R")), x


@program("writes")
def masked_fill_with_gradient(w: Given) -> Any:
    x = _leaf(w)
    y = x * 2
    y.masked_fill_(y > 0, 0.0)
    y.pow(2).sum().backward()
    return y, x.grad


@program("writes")
def out_argument(w: Given) -> Any:
    x, out = _rows(w), w.place(torch.zeros(8, 4), "S(0)")
    torch.add(x, x, out=out)
    return out


@program("writes")
def version_counter(w: Given) -> Any:
    x = _rows(w)
    before = x._version
    x.add_(1)
    x[:, 1].mul_(2)
    return x._version - before


@program("strides")
def sort_of_a_transpose_viewed(w: Given) -> Any:
    return _rows(w).t().sort(1)[0].t().contiguous().view(-1)


@program("strides")
def sort_of_a_transpose_viewed_as_it_lies(w: Given) -> Any:
    return _rows(w).t().sort(1)[0].t().view(-1)


@program("strides")
def stride_of_results(w: Given) -> Any:
    x = _rows(w)
    return [t.stride() for t in (x.t(), x.t() * 2, x.t().contiguous(), x.unsqueeze(1), x.expand(2, 8, 4))]


@program("strides")
def transformer_layer_with_the_sequence_sharded(w: Given) -> Any:
    torch.manual_seed(1)
    net = w.shard(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), "R")
    x = w.place(randn(2, 8, 8), "S(1)", grad=True)
    out = net(x)
    out.pow(2).sum().backward()
    return out, x.grad


@program("strides")
def channels_last(w: Given) -> Any:
    x = w.place(randn(8, 4, 6, 6), "S(0)").contiguous(memory_format=torch.channels_last)
    return F.relu(x), x.is_contiguous(memory_format=torch.channels_last)


@program("strides")
def convolution_of_channels_last(w: Given) -> Any:
    x = w.place(randn(8, 4, 6, 6), "S(0)").contiguous(memory_format=torch.channels_last)
    return F.conv2d(x, w.place(randn(4, 4, 3, 3, seed=1), "R"))


@program("strides")
def view_of_a_sharded_dim_split(w: Given) -> Any:
    return _rows(w).view(4, 2, 4).permute(1, 0, 2).reshape(8, 4)


@program("strides")
def view_that_memory_does_not_allow(w: Given) -> Any:
    return _rows(w, "R").t().view(-1)


@program("strides")
def as_strided(w: Given) -> Any:
    return _rows(w, "R").as_strided((2, 4), (4, 1), 4)


@program("strides")
def view_as_another_dtype(w: Given) -> Any:
    return _rows(w).view(torch.int32)


@program("strides")
def view_shares_memory_with_its_base(w: Given) -> Any:
    x = _rows(w)
    y = x.view(8, 2, 2)
    x.add_(1)
    return y, y._base is not None


@program("strides")
def detach_shares_memory(w: Given) -> Any:
    x = _leaf(w)
    x.detach().mul_(2)
    return x


@program("strides")
def local_of_a_view_shares_memory(w: Given) -> Any:
    x = _rows(w, "S(0)")
    w.leave()(x[:, 1:3]).zero_()
    return x


@program("strides")
def unflatten_and_flatten(w: Given) -> Any:
    return _rows(w).unflatten(1, (2, 2)).flatten(0, 1)
