"""Strides, views, and writes: through locals, through views, to parts."""

from __future__ import annotations

from operator import setitem
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from dtbench_suites.compat.program import Cases, Programs, randn


def _grad(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad


class Writes(Programs):
    topic = "writes"
    cases: ClassVar[Cases] = {
        "write to a leaf": lambda w: w.leaf().add_(1),
        "write to a view of a leaf": lambda w: w.leaf()[:, 0].add_(1),
        "item of a sharded dim set": lambda w: w.written(lambda x: setitem(x, 0, 1)),
        "slice of a sharded dim multiplied": lambda w: w.written(lambda x: x[2:5].mul_(2)),
        "strided slice of a sharded dim added to": lambda w: w.written(lambda x: x[1::3].add_(1)),
        "mask set": lambda w: w.written(lambda x: setitem(x, x > 0, 0)),
        "rows set by index": lambda w: w.written(lambda x: setitem(x, w.place(torch.tensor([1, 6]), "R"), 5)),
        "chunk written": lambda w: w.written(lambda x: x.chunk(2, 1)[1].mul_(2)),
        "transposed view written": lambda w: w.written(lambda x: x.t()[1].add_(1)),
    }

    def write_through_a_local(self) -> object:
        x = self.leaf()
        y = x * 2
        self.to_local()(y).mul_(3)
        return self.backward(y, x, power=1)

    def write_through_a_local_after_it_was_saved(self) -> object:
        x = self.leaf()
        y = x * 2
        local = self.to_local()(y)
        z = (y * y).sum()
        with torch.no_grad():
            local.add_(1)
        z.backward()
        return x.grad

    def write_to_what_a_local_became(self) -> object:
        leaf = self.part(randn(8, 4)).requires_grad_()
        h = leaf * 2
        self.from_local("S(0)")(h).mul_(3)
        h.sum().backward()
        return self.from_local("S(0)")(h.detach()), self.from_local("S(0)")(_grad(leaf))

    def write_to_a_leaf_through_from_local(self) -> object:
        leaf = self.part(randn(8, 4)).requires_grad_()
        self.from_local("S(0)")(leaf).mul_(3)
        return leaf

    def write_to_a_saved_tensor(self) -> object:
        x = self.leaf()
        y = x.exp()
        y.add_(1)
        return self.backward(y, x, power=1)

    def negative_index_set(self) -> object:
        x = self.rows()
        x[-1, 1:3] = 7
        return x

    def shifted_add_on_two_mesh_dims(self) -> object:
        x = self.place(randn(7, 5), "S(0)", "S(0)")
        x[:, :4].add_(x[:, 1:5].clone())
        return x

    def overlapping_views_added(self) -> object:
        x = self.place(randn(7, 5), "S(0)", "S(0)")
        x[:, :4].add_(x[:, 1:5])
        return x

    def write_with_gradient_to_a_slice(self) -> object:
        x, v = self.leaf(), self.place(randn(2, 4, seed=2), "R", grad=True)
        y = x * 1
        y[2:4] = v
        return self.backward(y, x, v)

    def copy_from_another_placement(self) -> object:
        x = self.rows()
        return x.copy_(self.place(randn(8, 4, seed=3), "S(1)")), x

    def data_set(self) -> object:
        x = self.leaf()
        x.data = self.place(randn(8, 4, seed=3), "S(0)")
        return self.backward(x, x)

    def fill_and_zero_of_a_column(self) -> object:
        x = self.rows()
        x[:, 1].fill_(3)
        x[:, 2].zero_()
        return x

    def index_add_over_the_sharded_dim(self) -> object:
        x = self.rows()
        return x.index_add_(0, self.place(torch.tensor([1, 5]), "R"), self.place(torch.ones(2, 4), "R")), x

    def masked_fill_with_gradient(self) -> object:
        x = self.leaf()
        y = x * 2
        y.masked_fill_(y > 0, 0.0)
        return self.backward(y, x)

    def out_argument(self) -> object:
        x, out = self.rows(), self.place(torch.zeros(8, 4), "S(0)")
        torch.add(x, x, out=out)
        return out

    def version_counter(self) -> object:
        x = self.rows()
        before = x._version
        x.add_(1)
        x[:, 1].mul_(2)
        return x._version - before


class Strides(Programs):
    topic = "strides"
    cases: ClassVar[Cases] = {
        "sort of a transpose viewed": lambda w: w.rows().t().sort(1)[0].t().contiguous().view(-1),
        "sort of a transpose viewed as it lies": lambda w: w.rows().t().sort(1)[0].t().view(-1),
        "view of a sharded dim split": lambda w: w.rows().view(4, 2, 4).permute(1, 0, 2).reshape(8, 4),
        "view that memory does not allow": lambda w: w.rows("R").t().view(-1),
        "as strided": lambda w: w.rows("R").as_strided((2, 4), (4, 1), 4),
        "view as another dtype": lambda w: w.rows().view(torch.int32),
        "unflatten and flatten": lambda w: w.rows().unflatten(1, (2, 2)).flatten(0, 1),
        "local of a view shares memory": lambda w: w.written(
            lambda x: w.to_local()(x[:, 1:3]).zero_(), "S(0)"
        ),
    }

    def stride_of_results(self) -> object:
        x = self.rows()
        return [t.stride() for t in (x.t(), x.t() * 2, x.t().contiguous(), x.unsqueeze(1), x.expand(2, 8, 4))]

    def transformer_layer_with_the_sequence_sharded(self) -> object:
        net = self.seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), "R")
        x = self.place(randn(2, 8, 8), "S(1)", grad=True)
        return self.backward(net(x), x)

    def channels_last(self) -> object:
        x = self.place(randn(8, 4, 6, 6), "S(0)").contiguous(memory_format=torch.channels_last)
        return F.relu(x), x.is_contiguous(memory_format=torch.channels_last)

    def convolution_of_channels_last(self) -> object:
        x = self.place(randn(8, 4, 6, 6), "S(0)").contiguous(memory_format=torch.channels_last)
        return F.conv2d(x, self.place(randn(4, 4, 3, 3, seed=1), "R"))

    def view_shares_memory_with_its_base(self) -> object:
        x = self.rows()
        y = x.view(8, 2, 2)
        x.add_(1)
        return y, y._base is not None

    def detach_shares_memory(self) -> object:
        x = self.leaf()
        x.detach().mul_(2)
        return x
