"""Cases of indexing and of views, with indices that are negative, broadcast or masks."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import UB, B, Op, flat, index_for, values
from dtbench_core import Replicate, Shard

aten = torch.ops.aten
R, S0, S1 = Replicate(), Shard(0), Shard(1)
A3, U3 = ((4, 8, 4),), ((3, 5, 2),)


def _quietly(fn: Callable[..., Any]) -> Callable[..., Any]:
    """For cases that also take placements for which an op has no rule, and for ops that torch calls beta."""

    def run(*inputs: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return fn(*inputs)

    return run


def _index(a: Any) -> Any:
    """x[...] with one and several index tensors, adjacent and not."""
    few, rows = index_for(a, [2, -1, 0, 1], R), index_for(a, [[0], [-2]], R)
    spread = index_for(a, [1, 0, -1, 1], S0)
    outs = [a[few], a[:, few], a[:, rows, 1], a[rows, :, few], a[spread], a[:, spread, few]]
    return flat([*outs, a[..., [0, 1]], aten._unsafe_index(a, [None, few])])


def _index_put(a: Any, b: Any) -> Any:
    """x[...] = y and x[...] += y; b has the shape of a[[..4..]]."""
    few = index_for(a, [2, -1, 0, 1], R)
    spread = index_for(a, [1, 0, 2, 1], S0)
    outs = [
        a.index_put((few,), b),
        a.index_put((few,), b, accumulate=True),
        a.index_put((spread,), b, accumulate=True),
        aten._unsafe_index_put(a, [few], b, True),
    ]
    put = (a * 1).relu()
    outs += [put.clone().index_put_((few,), b), aten._index_put_impl_(put.clone(), [spread], b, True)]
    return flat(outs)


def _masks(a: Any) -> Any:
    whole, rows = a.exp(), a.exp()
    whole[a > 0.5] = 2.0
    rows[a[:, 0] > 0] = 0.0
    return whole + rows


def _listed(a: Any, b: Any) -> Any:
    """index_add and its kin: rows [2, -1, 0] written from b's first three."""
    rows = index_for(a, [2, 1, 0], R)
    source = b[:3]
    return flat([a.index_add(0, rows, source, alpha=2), a.index_copy(0, rows, source)])


def _listed_in_place(a: Any, b: Any) -> Any:
    rows, source, u = index_for(a, [2, 1, 0], S0), b[:3].exp(), a.exp()
    kinds = ("prod", "mean", "amax", "amin")
    outs = [
        u.clone().index_add_(0, rows, source),
        u.clone().index_copy_(0, rows, source),
        a.index_fill(-2, rows, 0),
        a.index_fill(0, rows, 3),
        a.index_fill(0, rows, b.sum()),
        u.clone().index_fill_(0, rows, 2),
        u.clone().index_fill_(0, rows, b.sum()),
        *(u.index_reduce(0, rows, source, kind) for kind in kinds),
        *(u.clone().index_reduce_(0, rows, source, kind, include_self=False) for kind in kinds),
    ]
    return flat(outs)


def _gather(a: Any) -> Any:
    """Indices of fewer rows, of fewer columns, and of more along the gathered dim."""
    long = [[0, 1, 2]] * 3 + [[2, 2, 1]] * 5
    outs = []
    for placement in (R, S0, S1):
        rows = [index_for(a, values, placement) for values in ([[2, 1], [0, 1]], [[0, 2, 1]], long)]
        outs += [a[:, :3].gather(0, index) for index in rows]
        outs.append(a.gather(1, index_for(a, [[1, 0, 2, 2, 1]] * 2, placement)))
    return flat([*outs, torch.take_along_dim(a[:, :3], index_for(a, [[1, 0, 1]], R), 0)])


def _scatter(a: Any, b: Any) -> Any:
    """Indices that cover the batch dim in full, and that do not."""
    full = index_for(a, [[2, 1, 0, 1][: b.shape[1]]] * 8, R)[: a.shape[0]]
    part = index_for(a, [[0, 1], [2, 1]], R)
    outs = []
    for index in (full, part):
        outs += [
            a.scatter(1, index, b[: index.shape[0], : index.shape[1]]),
            a.scatter(1, index, 2.0),
            a.scatter_add(1, index, b[: index.shape[0], : index.shape[1]]),
            a.scatter_add(0, index, b[: index.shape[0], : index.shape[1]]),
        ]
    outs += [a.scatter_reduce(0, full, b, "sum"), a.scatter_reduce(1, full, b, "sum", include_self=False)]
    return flat(outs)


def _scatter_in_place(a: Any, b: Any) -> Any:
    length, u = b.shape[1], a.exp()
    index = index_for(a, [[2, 1, 0, 1][:length]] * 8, R)[: a.shape[0]]
    outs = [
        u.clone().scatter_(1, index, b),
        u.clone().scatter_(1, index, 3.0),
        u.clone().scatter_(1, index, b, reduce="add"),
        u.clone().scatter_(1, index, 2.0, reduce="multiply"),
        aten.scatter.reduce(u, 1, index, b, reduce="multiply"),
        aten.scatter.value_reduce(u, 1, index, 2.0, reduce="add"),
        u.clone().scatter_add_(1, index, b),
        *(u.scatter_reduce(1, index, b, kind) for kind in ("prod", "mean", "amax", "amin")),
        u.clone().scatter_reduce_(1, index, b, "sum"),
    ]
    return flat(outs)


def _take(a: Any, b: Any) -> Any:
    """Indices into the flattened tensor."""
    index = index_for(a, [[3, -1, 0], [1, 2, 4]], S0)
    return flat([a.take(index), a.put(index, b[:2, :3], accumulate=True)])


def _put(a: Any, b: Any) -> Any:
    index = index_for(a, [[3, -1, 0], [1, 2, 4]], R)
    return flat([a.put(index, b[:2, :3]), a.exp().put_(index, b[:2, :3], accumulate=True)])


OPS: dict[str, Op] = {
    "index": Op(_index, A3, ((3, 5, 3),)),
    "index_put": Op(_quietly(_index_put), ((4, 8, 4), (4, 8, 4)), ((3, 5, 3), (4, 5, 3))),
    "index_masks": values(_quietly(_masks)),
    "listed": Op(_quietly(_listed), B, UB),
    "listed_in_place": values(_quietly(_listed_in_place), B, UB),
    "gather_parts": Op(_gather),
    "scatter_parts": Op(_scatter, B, UB),
    "scatter_in_place": values(_quietly(_scatter_in_place), B, UB),
    "take": Op(_take, B, UB),
    "put": values(_quietly(_put), B, UB),
    "embedding_rows": Op(
        lambda w: F.embedding(index_for(w, [[4, 0, 2], [1, 1, 3]], S0), w, padding_idx=1),
        ((8, 4),),
        ((5, 3),),
    ),
    "embedding_scaled": Op(
        lambda w: F.embedding(index_for(w, [4, 0, 1, 1], R), w, scale_grad_by_freq=True), ((8, 4),), ((5, 3),)
    ),
    "histc": values(lambda a: torch.histc(a, 5, -1, 1)),
}


# ---- views ----


def _copies(a: Any) -> Any:
    """The copying form of each view."""
    ones, bits, sizes = a.unsqueeze(0), (a * 4).round(), [1, a.shape[0] - 1]
    outs = [aten.view_copy(a, [-1]), aten.view_copy.dtype(bits, torch.int64) % 7, aten.t_copy(a)]
    outs += [aten.transpose_copy.int(a, 0, -1), aten.permute_copy(a, [1, 0]), aten.unsqueeze_copy(a, -1)]
    outs += [aten.squeeze_copy(ones), aten.squeeze_copy.dim(ones, 0), aten.squeeze_copy.dims(ones, [0, 1])]
    outs += [aten.expand_copy(ones, [2, -1, -1]), aten.slice_copy.Tensor(a, 0, 1, 4)]
    outs += [aten.select_copy.int(a, 0, 1), aten.diagonal_copy(a), aten.unfold_copy(a, 0, 2, 1)]
    outs += [aten.narrow_copy(a, 0, 1, 2), *aten.split_copy.Tensor(a, 2), *aten.unbind_copy.int(a, 1)]
    outs += [*aten.split_with_sizes_copy(a, sizes), *aten.unsafe_split_with_sizes(a, sizes)]
    return flat([*outs, bits.view(torch.int64) % 5, bits.view(torch.int32) % 5])


def _triangles(a: Any) -> Any:
    """Every diagonal, also in place, of matrices whose dims are sharded."""
    parts = [f(a, k) for k in range(-3, 4) for f in (torch.tril, torch.triu)]
    parts += [(a * 1).tril_(-1), (a * 1).triu_(1)]
    return flat(parts)


OPS |= {
    "copies": values(_copies),
    "triangles": Op(_triangles),
    "triangles_batch": Op(_triangles, A3, U3),
    "diagonal": Op(lambda a: a.diagonal(1, -1, 0), A3, U3),
    "diag_embed": Op(lambda a: torch.diag_embed(a, -1, 0, -1)),
    "diagonal_scatter": Op(
        lambda a, b: a.diagonal_scatter(b, 0, 1, 2), ((4, 8, 4), (4, 4)), ((3, 5, 2), (3, 2))
    ),
    "select_scatter": Op(lambda a, b: a.select_scatter(b, 1, -1), ((4, 8, 4), (4, 4)), ((3, 5, 2), (3, 2))),
    "slice_scatter": Op(
        lambda a, b: a.slice_scatter(b, 1, 0, 4, 2), ((4, 8, 4), (4, 2, 4)), ((3, 5, 2), (3, 2, 2))
    ),
    "slice_scatter_all": Op(lambda a, b: a.slice_scatter(b, 1), A3 * 2, U3 * 2),
    "unfold": Op(lambda a: a.unfold(-1, 2, 1)),
    "roll": Op(lambda a: a.roll((1, -3), (0, -1))),
    "roll_flat": Op(lambda a: a.roll(2)),
    "rot90": Op(lambda a: a.rot90(1, (0, 1)), A3, U3),
    "repeat": Op(lambda a: a.repeat(2, 1, 3)),
    "tile": Op(lambda a: a.tile((2, 1))),
    "pixel_shuffle": Op(lambda a: F.pixel_shuffle(a, 2), ((4, 4, 2, 3),), ((3, 4, 2, 1),)),
    "pixel_unshuffle": Op(lambda a: F.pixel_unshuffle(a, 2), ((4, 1, 2, 4),), ((3, 2, 2, 4),)),
    "channel_shuffle": Op(lambda a: F.channel_shuffle(a, 2), ((4, 4, 2),), ((3, 4, 2),)),
    "squeeze_none": Op(lambda a: a.squeeze(()), ((1, 8, 1),), ((1, 5, 1),)),
    "tensor_split": Op(lambda a: a.tensor_split(torch.tensor([1, 3]))[1]),
    "movedim": Op(lambda a: a.movedim(0, -1).swapaxes(0, 1), A3, U3),
    "meshgrid": Op(lambda a, b: torch.stack(torch.meshgrid(a, b, indexing="ij")), ((8,), (4,)), ((5,), (3,))),
}
