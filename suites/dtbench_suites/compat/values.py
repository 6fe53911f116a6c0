"""Values out of tensors, tensors out of values, indexes, what Python's own protocols ask of a tensor."""

from __future__ import annotations

import copy
import math
import operator
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from dtbench_suites.compat.program import AnyTensor, Cases, Given, Programs, randn


def _pending(w: Given, *, grad: bool = False) -> torch.Tensor:
    """(4,): sums of columns of the rows, of which every rank has its own part."""
    return w.rows(grad=grad).sum(0)


def _torchs_implicit_replication() -> AnyTensor:
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication


def _beyond(w: Given, count: int = 8) -> torch.Tensor:
    """Indices of which the last rank has one that is beyond."""
    return w.place(torch.tensor([*range(count - 1), 99]), "S(0)")


def _each_beyond(w: Given) -> torch.Tensor:
    index = torch.zeros(8, 4, dtype=torch.int64)
    index[7, 1] = 99
    return w.place(index, "S(0)")


def _divisors(w: Given) -> torch.Tensor:
    return w.place(torch.arange(7, -1, -1), "S(0)")


class Values(Programs):
    topic = "values"
    cases: ClassVar[Cases] = {
        # Values that the last rank alone holds, or all but the last.
        "whole numbers divided by a zero of one rank": lambda w: 7 // _divisors(w),
        "remainder by a zero of one rank": lambda w: _divisors(w) % _divisors(w),
        "index beyond on one rank": lambda w: w.rows("R")[_beyond(w)],
        "gather beyond on one rank": lambda w: w.rows().gather(1, _each_beyond(w)),
        "scatter beyond on one rank": lambda w: w.rows().scatter_(1, _each_beyond(w), 1.0),
        "index add beyond on one rank": lambda w: w.rows("R").index_add(0, _beyond(w), w.rows()),
        "embedding beyond on one rank": lambda w: F.embedding(_beyond(w), w.rows("R")),
        "one hot beyond on one rank": lambda w: F.one_hot(_beyond(w), 8),
        "target beyond on one rank": lambda w: F.cross_entropy(w.rows(), _beyond(w)),
        "probability above 1 on one rank": lambda w: F.binary_cross_entropy(w.rows(), w.rows()),
        "item of many is refused": lambda w: w.rows().item(),
        "truth of many is refused": lambda w: bool(w.rows()),
        "index of a float is refused": lambda w: [1, 2][w.place(torch.tensor(1.0), "R")],
        "numpy of a sharded tensor": lambda w: torch.from_numpy(w.rows().numpy()),
    }

    def numbers_of_one_element(self) -> object:
        x = self.place(torch.tensor([[3.75]]), "S(0)")
        n = self.place(torch.tensor(5), "R")
        whole = [
            math.floor(x),
            round(float(x), 1),
            complex(x),
            operator.index(n),
            [10, 20, 30, 40, 50, 60][n],
        ]
        return [int(x), float(x), bool(x), *whole, list(range(n))]

    def numbers_of_pending_sums(self) -> object:
        x = self.place(torch.arange(32.0).view(8, 4), "S(0)")
        return x.sum().item(), int(x.argmax()), float(x.mean()), bool(x.sum() > 3), f"{x.sum():.2f}"

    def truth_decides(self) -> object:
        x = self.rows()
        bounds = (-10.0, 0.0, 10.0)
        found = ["all" if (x > bound).all() else "some" if (x > bound).any() else "none" for bound in bounds]
        return found, bool(torch.allclose(x, x + 0)), torch.equal(x, x * 1), torch.is_nonzero(x[0, 0])

    def lists(self) -> object:
        x = self.place(torch.arange(32).view(8, 4), "S(0)")
        return x.tolist(), [row.sum() for row in x], list(x[0]), len(x), x[:, 1].tolist()

    def text(self) -> object:
        x = self.rows()
        found = [repr(x), str(x.sum()), f"{x}", f"{x.shape}"]
        return self.expected(all(len(one) > 8 for one in found), True)

    def numpy_array(self) -> object:
        return torch.from_numpy(np.asarray(self.gather()(self.rows()))), self.to_local()(
            self.rows("R")
        ).numpy().sum().item()

    def numpy_functions(self) -> object:
        x = self.rows("R")
        factor: Any = np.float32(2.0)
        return torch.from_numpy(np.asarray(x)), factor * x, x * factor, np.sin(x).sum()

    def tensors_of_scalars(self) -> object:
        x = self.rows()
        return (
            torch.tensor([x.sum().item(), 1.0]),
            x.new_tensor([1.0, 2.0]),
            torch.scalar_tensor(float(x.max())),
        )

    def factories_like(self) -> object:
        x = self.place(randn(7, 4), "S(0)")
        made = [torch.zeros_like(x), torch.ones_like(x, dtype=torch.int64), x.new_full((7, 2), 3.0)]
        return [*made, torch.full_like(x, 2), x.new_zeros(3), torch.empty_like(x).fill_(1), x.new_ones(())]

    def conversions(self) -> object:
        x = self.rows()
        moved = [x.double(), x.half(), x.to(torch.int32), x.type_as(x.double()), x.to(x.double()), x.cpu()]
        kinds = [x.type(), str(x.dtype), x.is_floating_point(), x.layout is torch.strided, x.device.type]
        return moved, kinds, x.to("cpu", torch.bfloat16, copy=True), x.type(torch.float64), x.bool()

    def complex_numbers(self) -> object:
        x, y = self.rows(grad=True), self.rows().detach()
        z = torch.complex(x, y)
        return (
            self.backward(torch.view_as_real(z * z.conj()), x),
            z.real,
            z.abs(),
            torch.view_as_complex(torch.stack([y, y], -1)),
            z.angle(),
        )

    def sizes(self) -> object:
        x = self.place(randn(7, 4), "S(0)")
        rows, columns = x.shape
        counts = [
            x.numel(),
            x.nelement(),
            x.dim(),
            x.element_size(),
            x.itemsize,
            x.nbytes,
            x.size(-1),
            x.ndim,
        ]
        return (
            rows,
            columns,
            counts,
            tuple(x.stride()),
            x.storage_offset(),
            x.is_contiguous(),
            x.T.is_contiguous(),
        )

    def memory_format_and_share(self) -> object:
        x = self.rows()
        return x.is_shared(), x.is_pinned(), x.is_sparse, x.is_quantized, x.is_meta, x.is_leaf, x.is_cuda

    def moved_to_meta(self) -> object:
        x = self.rows().to("meta")
        return tuple(x.shape), x.is_meta, (x @ x.t()).is_meta

    def keys_and_sets(self) -> object:
        x, y = self.rows(), self.rows()
        kept = {x: 1, y: 2}
        return kept[x], len({x, y, x}), x is copy.copy(x), id(x) == hash(x)

    def membership(self) -> object:
        x = self.place(torch.arange(8), "S(0)")
        return 3 in x, 9 in x, torch.isin(x, self.place(torch.tensor([1, 5]), "R"))

    def operators_from_the_right(self) -> object:
        x = self.place(torch.arange(1, 9).view(4, 2), "S(0)")
        made = [2 + x, 2 - x, 2 * x, 2 / x, 20 // x, 20 % x, 2**x, 3 & x, 3 | x, 3 ^ x, 1 << x, 256 >> x]
        return [*made, -x, +x, ~x, abs(x - 4), x == 3]

    def operators_in_place(self) -> object:
        x = self.rows()
        x += 1
        x *= self.place(randn(4, seed=1), "R")
        x -= self.place(randn(8, 1, seed=2), "S(0)")
        x /= 2
        x **= 2
        x //= 0.5
        return x

    def index_beyond_of_columns_that_some_ranks_hold(self) -> object:
        return self.place(randn(8, 3), "S(1)")[self.place(torch.tensor([0, 99]), "R")]

    def dtypes_refused_by_ranks_that_hold_rows(self) -> object:
        return self.place(randn(3, 4), "S(0)") @ self.place(randn(4, 4).double(), "R")

    def statistics_of_another_dtype_refused_by_ranks_that_hold_rows(self) -> object:
        statistics = self.place(torch.ones(4).double(), "R")
        return F.batch_norm(self.place(randn(3, 4).half(), "S(0)"), statistics, statistics)


class Pending(Programs):
    topic = "pending"

    def pending_sum_added_to(self) -> object:
        found = []
        for place in ("R", "S(0)"):
            total = _pending(self)
            total.add_(self.place(randn(4, seed=1), place))
            total += self.place(randn(4, seed=2), place)
            total.sub_(self.place(randn(4, seed=3), place), alpha=2)
            found.append(total)
        return found

    def pending_sum_scaled(self) -> object:
        total = _pending(self)
        total.mul_(self.place(randn(4, seed=1), "R")).div_(2)
        total.neg_()
        return total

    def pending_sum_bounded(self) -> object:
        total = _pending(self)
        total.clamp_(min=0.5)
        total.relu_().sqrt_()
        return total

    def pending_sum_with_a_number(self) -> object:
        total = _pending(self)
        total.add_(3)
        total -= 1
        return total, total + 2, 1 - total, total > 0

    def pending_sums_together(self) -> object:
        a, b = _pending(self), self.rows().cos().sum(0)
        return a + b, a * b, torch.maximum(a, b), a @ b, torch.cat([a, b]), torch.where(a > b, a, b)

    def pending_sum_copied_and_filled(self) -> object:
        a, b, c = _pending(self), _pending(self), _pending(self)
        a.copy_(self.place(randn(4, seed=1), "S(0)"))
        b.fill_(2)
        c.zero_().add_(_pending(self))
        return a, b, c

    def pending_sum_with_gradient(self) -> object:
        x = self.rows(grad=True)
        total = x.exp().sum(0)
        total = total + self.place(randn(4, seed=1), "S(0)")
        return self.backward(total.softmax(0), x)


class Indexes(Programs):
    topic = "indexes"

    def plain_index_is_told(self) -> object:
        x = self.rows()
        if self.plain:
            raise RuntimeError("got mixed torch.Tensor and DTensor")
        return x[torch.tensor([1, 5])]

    def plain_index_counts_as_replicated(self) -> object:
        x = self.rows()
        if self.plain:
            return x[torch.tensor([1, 5])], F.embedding(torch.tensor([1, 5]), x)
        context = self.api.implicit_replication if self.impl == "core" else _torchs_implicit_replication()
        with context():
            return x[torch.tensor([1, 5])], F.embedding(torch.tensor([1, 5]), x)

    def lists_and_slices_as_indexes(self) -> object:
        x = self.rows()
        return x[[1, 5]], x[1:6:2], x[..., None, -1], x[[0, 3], [1, 2]], x[2, 1:], x[:, [3, 0]], x[None, 3:3]

    def masks_as_indexes(self) -> object:
        x = self.rows()
        return x[x > 0], x[x.sum(1) > 0], torch.masked_select(x, x < 0), x.nonzero(), torch.where(x > 1)

    def batches_of_a_sharded_dataset(self) -> object:
        data = TensorDataset(self.rows(), self.place(torch.arange(8), "S(0)"))
        return list(DataLoader(data, batch_size=3))

    def batches_put_together(self) -> object:
        x = self.rows()
        samples = [{"row": row, "both": (row * 2, number)} for number, row in enumerate(x)]
        return default_collate(samples)

    def shuffled_by_a_permutation(self) -> object:
        x = self.rows(grad=True)
        torch.manual_seed(3)
        order = self.place(torch.randperm(8), "R")
        return (
            self.backward(x[order].cumsum(0), x),
            x.index_select(0, order),
            x.gather(0, order[:, None].expand(8, 4)),
            x.take(order),
        )

    def written_by_indexes(self) -> object:
        x, at = self.rows(), self.place(torch.tensor([6, 1, 4]), "R")
        given = self.place(randn(3, 4, seed=1), "R")
        x.index_copy_(0, at, given)
        x.scatter_(1, at[:, None] % 4, 9.0)
        x.index_put_((at, at % 4), self.place(torch.ones(3), "R"), accumulate=True)
        x[at, 0] += 1
        return x, x.scatter_reduce(0, at[:, None].expand(3, 4), given, "amax"), x.masked_scatter(x > 1, x * 2)

    def sorted_and_counted(self) -> object:
        x = self.place(torch.tensor([3, 1, 3, 0, 1, 1, 7, 2]), "S(0)")
        found = [
            torch.unique(x),
            torch.bincount(x),
            torch.histc(x.float(), 4),
            x.sort().values,
            x.topk(3).values,
        ]
        return (
            found,
            torch.unique(x, return_counts=True),
            torch.searchsorted(x.sort().values, x),
            x.mode().values,
        )

    def pieces_of_containers(self) -> object:
        x = self.rows()
        a, b = x.split([3, 5])
        head, *rest = x.unbind(1)
        return (
            a,
            b,
            head,
            torch.stack(rest),
            torch.block_diag(a, b),
            x.chunk(3),
            torch.hsplit(x, 2),
            x.unfold(0, 3, 2),
        )
