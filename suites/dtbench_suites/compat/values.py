"""Values out of tensors, tensors out of values, indexes, what Python's own protocols ask of a tensor."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from dtbench_suites.compat.program import Given, program, randn


def _rows(w: Given, *places: str, grad: bool = False) -> torch.Tensor:
    return w.place(randn(8, 4), *(places or ("S(0)",)), grad=grad)


# ---- numbers ----


@program("values")
def numbers_of_one_element(w: Given) -> Any:
    x = w.place(torch.tensor([[3.75]]), "S(0)")
    n = w.place(torch.tensor(5), "R")
    whole = [math.floor(x), round(float(x), 1), complex(x), operator.index(n), [10, 20, 30, 40, 50, 60][n]]
    return [int(x), float(x), bool(x), *whole, list(range(n))]


@program("values")
def numbers_of_pending_sums(w: Given) -> Any:
    x = w.place(torch.arange(32.0).view(8, 4), "S(0)")
    return x.sum().item(), int(x.argmax()), float(x.mean()), bool(x.sum() > 3), f"{x.sum():.2f}"


@program("values")
def truth_decides(w: Given) -> Any:
    x = _rows(w)
    bounds = (-10.0, 0.0, 10.0)
    found = ["all" if (x > bound).all() else "some" if (x > bound).any() else "none" for bound in bounds]
    return found, bool(torch.allclose(x, x + 0)), torch.equal(x, x * 1), torch.is_nonzero(x[0, 0])


@program("values")
def item_of_many_is_refused(w: Given) -> Any:
    return _rows(w).item()


@program("values")
def truth_of_many_is_refused(w: Given) -> Any:
    return bool(_rows(w))


@program("values")
def index_of_a_float_is_refused(w: Given) -> Any:
    return [1, 2][w.place(torch.tensor(1.0), "R")]


@program("values")
def lists(w: Given) -> Any:
    x = w.place(torch.arange(32).view(8, 4), "S(0)")
    return x.tolist(), [row.sum() for row in x], list(x[0]), len(x), x[:, 1].tolist()


@program("values")
def text(w: Given) -> Any:
    x = _rows(w)
    found = [repr(x), str(x.sum()), f"{x}", f"{x.shape}"]
    return w.known(all(len(one) > 8 for one in found), True)


@program("values")
def numpy_array(w: Given) -> Any:
    return torch.from_numpy(np.asarray(w.gather()(_rows(w)))), w.leave()(_rows(w, "R")).numpy().sum().item()


@program("values")
def numpy_of_a_sharded_tensor(w: Given) -> Any:
    return torch.from_numpy(_rows(w).numpy())


@program("values")
def numpy_functions(w: Given) -> Any:
    x = _rows(w, "R")
    factor: Any = np.float32(2.0)
    return torch.from_numpy(np.asarray(x)), factor * x, x * factor, np.sin(x).sum()


@program("values")
def tensors_of_scalars(w: Given) -> Any:
    x = _rows(w)
    return torch.tensor([x.sum().item(), 1.0]), x.new_tensor([1.0, 2.0]), torch.scalar_tensor(float(x.max()))


@program("values")
def factories_like(w: Given) -> Any:
    x = w.place(randn(7, 4), "S(0)")
    made = [torch.zeros_like(x), torch.ones_like(x, dtype=torch.int64), x.new_full((7, 2), 3.0)]
    return [*made, torch.full_like(x, 2), x.new_zeros(3), torch.empty_like(x).fill_(1), x.new_ones(())]


@program("values")
def conversions(w: Given) -> Any:
    x = _rows(w)
    moved = [x.double(), x.half(), x.to(torch.int32), x.type_as(x.double()), x.to(x.double()), x.cpu()]
    kinds = [x.type(), str(x.dtype), x.is_floating_point(), x.layout is torch.strided, x.device.type]
    return moved, kinds, x.to("cpu", torch.bfloat16, copy=True), x.type(torch.float64), x.bool()


@program("values")
def complex_numbers(w: Given) -> Any:
    x, y = _rows(w, grad=True), _rows(w).detach()
    z = torch.complex(x, y)
    torch.view_as_real(z * z.conj()).pow(2).sum().backward()
    return x.grad, z.real, z.abs(), torch.view_as_complex(torch.stack([y, y], -1)), z.angle()


@program("values")
def sizes(w: Given) -> Any:
    x = w.place(randn(7, 4), "S(0)")
    rows, columns = x.shape
    counts = [x.numel(), x.nelement(), x.dim(), x.element_size(), x.itemsize, x.nbytes, x.size(-1), x.ndim]
    return (
        rows,
        columns,
        counts,
        tuple(x.stride()),
        x.storage_offset(),
        x.is_contiguous(),
        x.T.is_contiguous(),
    )


@program("values")
def memory_format_and_share(w: Given) -> Any:
    x = _rows(w)
    return x.is_shared(), x.is_pinned(), x.is_sparse, x.is_quantized, x.is_meta, x.is_leaf, x.is_cuda


@program("values")
def moved_to_meta(w: Given) -> Any:
    x = _rows(w).to("meta")
    return tuple(x.shape), x.is_meta, (x @ x.t()).is_meta


@program("values")
def keys_and_sets(w: Given) -> Any:
    x, y = _rows(w), _rows(w)
    kept = {x: 1, y: 2}
    return kept[x], len({x, y, x}), x is copy.copy(x), id(x) == hash(x)


@program("values")
def membership(w: Given) -> Any:
    x = w.place(torch.arange(8), "S(0)")
    return 3 in x, 9 in x, torch.isin(x, w.place(torch.tensor([1, 5]), "R"))


@program("values")
def operators_from_the_right(w: Given) -> Any:
    x = w.place(torch.arange(1, 9).view(4, 2), "S(0)")
    made = [2 + x, 2 - x, 2 * x, 2 / x, 20 // x, 20 % x, 2**x, 3 & x, 3 | x, 3 ^ x, 1 << x, 256 >> x]
    return [*made, -x, +x, ~x, abs(x - 4), x == 3]


@program("values")
def operators_in_place(w: Given) -> Any:
    x = _rows(w)
    x += 1
    x *= w.place(randn(4, seed=1), "R")
    x -= w.place(randn(8, 1, seed=2), "S(0)")
    x /= 2
    x **= 2
    x //= 0.5
    return x


# ---- pending sums written to ----


def _pending(w: Given, *, grad: bool = False) -> torch.Tensor:
    """(4,): sums of columns of the rows, of which every rank has its own part."""
    return _rows(w, grad=grad).sum(0)


@program("pending")
def pending_sum_added_to(w: Given) -> Any:
    found = []
    for place in ("R", "S(0)"):
        total = _pending(w)
        total.add_(w.place(randn(4, seed=1), place))
        total += w.place(randn(4, seed=2), place)
        total.sub_(w.place(randn(4, seed=3), place), alpha=2)
        found.append(total)
    return found


@program("pending")
def pending_sum_scaled(w: Given) -> Any:
    total = _pending(w)
    total.mul_(w.place(randn(4, seed=1), "R")).div_(2)
    total.neg_()
    return total


@program("pending")
def pending_sum_bounded(w: Given) -> Any:
    total = _pending(w)
    total.clamp_(min=0.5)
    total.relu_().sqrt_()
    return total


@program("pending")
def pending_sum_with_a_number(w: Given) -> Any:
    total = _pending(w)
    total.add_(3)
    total -= 1
    return total, total + 2, 1 - total, total > 0


@program("pending")
def pending_sums_together(w: Given) -> Any:
    a, b = _pending(w), _rows(w).cos().sum(0)
    return a + b, a * b, torch.maximum(a, b), a @ b, torch.cat([a, b]), torch.where(a > b, a, b)


@program("pending")
def pending_sum_copied_and_filled(w: Given) -> Any:
    a, b, c = _pending(w), _pending(w), _pending(w)
    a.copy_(w.place(randn(4, seed=1), "S(0)"))
    b.fill_(2)
    c.zero_().add_(_pending(w))
    return a, b, c


@program("pending")
def pending_sum_with_gradient(w: Given) -> Any:
    x = _rows(w, grad=True)
    total = x.exp().sum(0)
    total = total + w.place(randn(4, seed=1), "S(0)")
    total.softmax(0).pow(2).sum().backward()
    return x.grad


# ---- indexes ----


@program("indexes")
def plain_index_is_told(w: Given) -> Any:
    x = _rows(w)
    if w.plain:
        raise RuntimeError("got mixed torch.Tensor and DTensor")
    return x[torch.tensor([1, 5])]


@program("indexes")
def plain_index_counts_as_replicated(w: Given) -> Any:
    x = _rows(w)
    if w.plain:
        return x[torch.tensor([1, 5])], F.embedding(torch.tensor([1, 5]), x)
    context = w.api.implicit_replication if w.impl == "core" else _torchs_implicit_replication()
    with context():
        return x[torch.tensor([1, 5])], F.embedding(torch.tensor([1, 5]), x)


def _torchs_implicit_replication() -> Any:
    from torch.distributed.tensor.experimental import implicit_replication

    return implicit_replication


@program("indexes")
def lists_and_slices_as_indexes(w: Given) -> Any:
    x = _rows(w)
    return x[[1, 5]], x[1:6:2], x[..., None, -1], x[[0, 3], [1, 2]], x[2, 1:], x[:, [3, 0]], x[None, 3:3]


@program("indexes")
def masks_as_indexes(w: Given) -> Any:
    x = _rows(w)
    return x[x > 0], x[x.sum(1) > 0], torch.masked_select(x, x < 0), x.nonzero(), torch.where(x > 1)


@program("indexes")
def batches_of_a_sharded_dataset(w: Given) -> Any:
    data = TensorDataset(_rows(w), w.place(torch.arange(8), "S(0)"))
    return list(DataLoader(data, batch_size=3))


@program("indexes")
def batches_put_together(w: Given) -> Any:
    x = _rows(w)
    samples = [{"row": row, "both": (row * 2, number)} for number, row in enumerate(x)]
    return default_collate(samples)


@program("indexes")
def shuffled_by_a_permutation(w: Given) -> Any:
    x = _rows(w, grad=True)
    torch.manual_seed(3)
    order = w.place(torch.randperm(8), "R")
    x[order].cumsum(0).pow(2).sum().backward()
    return x.grad, x.index_select(0, order), x.gather(0, order[:, None].expand(8, 4)), x.take(order)


@program("indexes")
def written_by_indexes(w: Given) -> Any:
    x, at = _rows(w), w.place(torch.tensor([6, 1, 4]), "R")
    given = w.place(randn(3, 4, seed=1), "R")
    x.index_copy_(0, at, given)
    x.scatter_(1, at[:, None] % 4, 9.0)
    x.index_put_((at, at % 4), w.place(torch.ones(3), "R"), accumulate=True)
    x[at, 0] += 1
    return x, x.scatter_reduce(0, at[:, None].expand(3, 4), given, "amax"), x.masked_scatter(x > 1, x * 2)


@program("indexes")
def sorted_and_counted(w: Given) -> Any:
    x = w.place(torch.tensor([3, 1, 3, 0, 1, 1, 7, 2]), "S(0)")
    found = [torch.unique(x), torch.bincount(x), torch.histc(x.float(), 4), x.sort().values, x.topk(3).values]
    return found, torch.unique(x, return_counts=True), torch.searchsorted(x.sort().values, x), x.mode().values


@program("indexes")
def pieces_of_containers(w: Given) -> Any:
    x = _rows(w)
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


# ---- values that the last rank alone holds, or all but the last ----


def _one_refused(name: str, run: Callable[[Given], Any]) -> None:
    run.__name__ = name
    program("values")(run)


def _beyond(w: Given, count: int = 8) -> torch.Tensor:
    """Indices of which the last rank has one that is beyond."""
    return w.place(torch.tensor([*range(count - 1), 99]), "S(0)")


def _each_beyond(w: Given) -> torch.Tensor:
    index = torch.zeros(8, 4, dtype=torch.int64)
    index[7, 1] = 99
    return w.place(index, "S(0)")


def _divisors(w: Given) -> torch.Tensor:
    return w.place(torch.arange(7, -1, -1), "S(0)")


_one_refused("whole_numbers_divided_by_a_zero_of_one_rank", lambda w: 7 // _divisors(w))
_one_refused("remainder_by_a_zero_of_one_rank", lambda w: _divisors(w) % _divisors(w))
_one_refused("index_beyond_on_one_rank", lambda w: _rows(w, "R")[_beyond(w)])
_one_refused("gather_beyond_on_one_rank", lambda w: _rows(w).gather(1, _each_beyond(w)))
_one_refused("scatter_beyond_on_one_rank", lambda w: _rows(w).scatter_(1, _each_beyond(w), 1.0))
_one_refused("index_add_beyond_on_one_rank", lambda w: _rows(w, "R").index_add(0, _beyond(w), _rows(w)))
_one_refused("embedding_beyond_on_one_rank", lambda w: F.embedding(_beyond(w), _rows(w, "R")))
_one_refused("one_hot_beyond_on_one_rank", lambda w: F.one_hot(_beyond(w), 8))
_one_refused("target_beyond_on_one_rank", lambda w: F.cross_entropy(_rows(w), _beyond(w)))
_one_refused("probability_above_1_on_one_rank", lambda w: F.binary_cross_entropy(_rows(w), _rows(w)))


@program("values")
def index_beyond_of_columns_that_some_ranks_hold(w: Given) -> Any:
    return w.place(randn(8, 3), "S(1)")[w.place(torch.tensor([0, 99]), "R")]


@program("values")
def dtypes_refused_by_ranks_that_hold_rows(w: Given) -> Any:
    return w.place(randn(3, 4), "S(0)") @ w.place(randn(4, 4).double(), "R")


@program("values")
def statistics_of_another_dtype_refused_by_ranks_that_hold_rows(w: Given) -> Any:
    statistics = w.place(torch.ones(4).double(), "R")
    return F.batch_norm(w.place(randn(3, 4).half(), "S(0)"), statistics, statistics)
