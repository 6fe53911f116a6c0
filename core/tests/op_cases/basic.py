"""Cases of reductions and scans, and of the pointwise, matmul, view, norm and lookup rules."""

from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import UB, A, B, Op, flat, index_for, values
from core.tests.torch_version import BEFORE_213
from dtbench_core import Replicate, Shard

inf = float("inf")
C, UC = ((4, 2, 8),), ((3, 5, 2),)


def _both(results: Any) -> Any:
    first, second = results
    return first + 2 * second


def _orders(a: Any) -> Any:
    norm = torch.linalg.vector_norm
    return norm(a, 1, 0) + norm(a, 3, 0) + norm(a, inf, 0) + norm(a, -inf, 0) + norm(a, 0, 0) + norm(a, -1, 0)


def _old_norms(a: Any) -> Any:
    aten, wide = torch.ops.aten, torch.float64
    norms = aten.norm.ScalarOpt_dim(a, 2, [0], True) + aten.norm.Scalar(a, 3)
    norms = norms + aten.norm.ScalarOpt_dtype(a, None, dtype=wide)
    return norms + aten.norm.ScalarOpt_dim_dtype(a, 1, [0], True, dtype=wide)


OPS: dict[str, Op] = {
    "mean_uneven_dims": Op(lambda a: a.mean((0, 2)), C, UC),
    "mean_of_mean": Op(lambda a: a.mean(0).mean()),
    "sum_of_ints": values(lambda a: a.sum(0, dtype=torch.int64)),
    "nansum": Op(lambda a: torch.where(a > 1, float("nan"), a).nansum(0)),
    "count_nonzero": values(lambda a: torch.count_nonzero(a > 0, 0)),
    "count_nonzero_all": values(lambda a: torch.count_nonzero(a > 0) + (a > 0).count_nonzero((0, 1))),
    "prod": Op(torch.prod),
    "prod_dim_first": Op(lambda a: a.prod(0, keepdim=True)),
    "all_dims": values(lambda a: (a > -2).all((0, 1))),
    "any_no_dims": values(lambda a: torch.any(a > 0, ()).all(dim=())),
    # Before torch 2.13 it has no derivative.
    "aminmax": Op(lambda a: _both(a.aminmax(dim=0)), differentiable=not BEFORE_213),
    "aminmax_all": values(lambda a: _both(a.aminmax())),
    "median": Op(lambda a: a.median(0).values),
    "nanmedian": Op(lambda a: a.nanmedian(1).values),
    "mode": values(lambda a: a.round().mode(0).values),
    "kthvalue": Op(lambda a: a.kthvalue(2, 0).values),
    "trace": Op(torch.trace),
    "var_dims": Op(lambda a: a.var((0, -1), correction=0, keepdim=True), C, UC),
    "var_mean": Op(lambda a: _both(torch.var_mean(a, 0))),
    "std_mean": Op(lambda a: _both(torch.std_mean(a, (0, 1), correction=2)), C, UC),
    "vector_norm_orders": Op(_orders),
    "vector_norm_dims": Op(lambda a: torch.linalg.vector_norm(a, 2, (0, 2), keepdim=True), C, UC),
    "norms_of_old": values(_old_norms),
    "matrix_norm": Op(torch.linalg.matrix_norm, C, UC),
    "dist": Op(torch.dist, B, UB),
    "logsumexp_infinite": values(lambda a: torch.where(a > 9, a, -inf).logsumexp((0, 1)).exp()),
}
if hasattr(torch, "hash_tensor"):
    OPS["hash_tensor"] = values(lambda a: torch.hash_tensor(a.round(), dim=1).to(torch.int64))


# ---- scans and sorts ----


def _indexed(a: Any) -> Any:
    """Ops that give values and indices."""
    parts: list[Any] = []
    for dim in (0, -1):
        for pair in (a.cummax(dim), a.cummin(dim), a.sort(dim), torch.sort(a, stable=True, dim=dim)):
            parts += pair
        parts += a.topk(2, dim, largest=False)
        parts += [a.argsort(dim, descending=True), torch.ops.aten._logcumsumexp(a, dim)]
    parts += [torch.msort(a), a.exp().cumsum_(0), a.exp().cumprod_(1), a.cumsum(0, dtype=torch.int64)]
    return flat(parts)


OPS |= {
    "scans": values(_indexed),
    "cummax": Op(lambda a: a.cummax(0).values),
    "cummin": Op(lambda a: a.cummin(1).values),
    "cumprod_rows": Op(lambda a: a.cumprod(0)),
    "logcumsumexp": Op(lambda a: a.logcumsumexp(1)),
    "topk_rows": Op(lambda a: a.topk(2, 1).values),
    "diff": Op(lambda a: a.diff(dim=0)),
    "trapezoid": Op(lambda a: torch.trapezoid(a, dim=0)),
}


# ---- elementwise ops, products, views, norms and lookups ----


_tangent_like = torch.ops.aten._new_zeros_with_same_feature_meta


def _mlp(x: Any, w1: Any, w2: Any) -> Any:
    return F.linear(torch.relu(F.linear(x, w1)), w2)


def _attention(q: Any, k: Any, v: Any) -> Any:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v


OPS |= {
    "add": Op(torch.add, B, UB),
    "add_alpha": Op(lambda a, b: torch.add(a, b, alpha=3), B, UB),
    "add_broadcast": Op(lambda a, b: a + b, ((8, 4), (4,)), ((5, 3), (1, 3))),
    "add_number": Op(lambda a: a + 2),
    "rsub": Op(lambda a: 1 - a),
    "mul": Op(torch.mul, B, UB),
    "mul_number": Op(lambda a: a * 2.5),
    "div": Op(lambda a, b: a / (b * b + 1), B, UB),
    "neg": Op(torch.neg),
    "pow": Op(lambda a: a**2),
    "exp": Op(torch.exp),
    "relu": Op(torch.relu),
    "gelu": Op(F.gelu),
    "where": Op(lambda a, b: torch.where(a > 0, a, b), B, UB),
    "clamp": Op(lambda a: a.clamp(-0.5, 0.5)),
    "to_float": Op(lambda a: a.to(torch.float32).double()),
    "to_int": values(lambda a: (a * 3).to(torch.int64)),
    "zeros_like": values(torch.zeros_like),
    "memory for tangents": values(
        lambda a: _tangent_like(a, a) + _tangent_like(a, a[0], self_num_batch_dims=1)
    ),
    "new_ones": values(lambda a: a.new_ones(3, 2) + a.new_zeros(a.shape).sum()),
    "mm": Op(torch.mm, ((8, 4), (4, 8)), ((5, 3), (3, 7))),
    "matmul_3d": Op(torch.matmul, ((4, 8, 4), (4, 4)), ((3, 5, 2), (2, 3))),
    "bmm": Op(torch.bmm, ((4, 8, 4), (4, 4, 8)), ((5, 2, 3), (5, 3, 2))),
    "mv": Op(torch.mv, ((8, 4), (4,)), ((5, 3), (3,))),
    "addmm": Op(torch.addmm, ((8,), (4, 4), (4, 8)), ((1, 3), (5, 3), (3, 3))),
    "addmm_scaled": Op(
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2),
        ((4, 8), (4, 4), (4, 8)),
        ((5, 3), (5, 2), (2, 3)),
    ),
    "linear_3d": Op(F.linear, ((4, 8, 4), (8, 4), (8,)), ((3, 5, 2), (3, 2), (3,))),
    "sum": Op(torch.sum),
    "sum_dim": Op(lambda a: a.sum(0)),
    "mean": Op(torch.mean),
    "mean_dim": Op(lambda a: a.mean(0)),
    "amax": Op(lambda a: a.amax(0)),
    "amin_all": Op(lambda a: a.amin((0, 1))),
    "max_all": values(torch.max),
    "max_dim": values(lambda a: a.max(1).values),
    "argmax": values(lambda a: a.argmax(0)),
    "var": Op(lambda a: a.var(0)),
    "norm": Op(lambda a: torch.linalg.vector_norm(a)),
    "logsumexp": Op(lambda a: a.logsumexp(1)),
    "any": values(lambda a: (a > 1).any()),
    "softmax": Op(lambda a: F.softmax(a, 1)),
    "log_softmax": Op(lambda a: F.log_softmax(a, 0)),
    "cumsum": Op(lambda a: a.cumsum(1)),
    "sort": values(lambda a: a.sort(0).values),
    "flip": Op(lambda a: a.flip(0)),
    "layer_norm": Op(
        lambda a, w, b: F.layer_norm(a, (4,), w, b), ((4, 8, 4), (4,), (4,)), ((5, 4), (4,), (4,))
    ),
    "layer_norm_plain": Op(lambda a: F.layer_norm(a, a.shape[-1:])),
    "view_split": Op(lambda a: a.view(2, -1, a.shape[1]), A, ((6, 3),)),
    "view_join": Op(lambda a: a.view(-1)),
    "view_mix": Op(lambda a: a.view(4, -1), A, ((6, 4),)),
    "reshape_t": Op(lambda a: a.t().reshape(-1)),
    "transpose": Op(lambda a: a.transpose(0, 1)),
    "unsqueeze": Op(lambda a: a.unsqueeze(-1)),
    "permute": Op(lambda a: a.permute(2, 0, -2), ((4, 8, 4),), ((3, 5, 2),)),
    "squeeze_dim": Op(lambda a: a.squeeze(1), ((8, 1, 4),), ((5, 1, 3),)),
    "squeeze_all": Op(lambda a: a.squeeze(), ((1, 8, 4),), ((1, 5, 1),)),
    "expand": Op(lambda a: a.expand(2, -1, 4), ((8, 1),), ((5, 1),)),
    "slice": Op(lambda a: a[1:6:2]),
    "slice_other": Op(lambda a: a[:, 1:3]),
    "select": Op(lambda a: a[2]),
    "split": Op(lambda a: torch.split(a, 3)[1]),
    "split_other": Op(lambda a: a.split(1, dim=1)[2]),
    "unbind": Op(lambda a: a.unbind(1)[0]),
    "cat": Op(lambda a, b: torch.cat([a, b]), B, UB),
    "stack": Op(lambda a, b: torch.stack([a, b], 1), B, UB),
    "tril": Op(torch.tril),
    "index_select_sharded": Op(lambda a: a.index_select(0, index_for(a, [3, 0, 3, 1], Shard(0)))),
    "gather": values(lambda a: a.gather(0, index_for(a, [[2, 1, 0]] * 5, Replicate()))),
    "embedding": Op(lambda a: F.embedding(index_for(a, [[3, 0], [3, 1]], Replicate()), a)),
    "embedding_sharded": Op(lambda a: F.embedding(index_for(a, [[3, 0], [3, 1]], Shard(0)), a)),
    "addmv": Op(torch.addmv, ((8,), (8, 4), (4,)), ((5,), (5, 3), (3,))),
    "dot": Op(torch.dot, ((8,), (8,)), ((5,), (5,))),
    "baddbmm": Op(torch.baddbmm, ((1, 8), (4, 8, 4), (4, 4, 8)), ((5, 2, 2), (5, 2, 3), (5, 3, 2))),
    "all": values(lambda a: (a > 0).all()),
    "all_dim": values(lambda a: (a > -1).all(0)),
    "any_dim": values(lambda a: (a > 1).any(1)),
    "argmin": values(lambda a: a.argmin()),
    "min_all": values(torch.min),
    "min_dim": values(lambda a: a.min(0).indices),
    "std": Op(lambda a: a.std(1)),
    "squeeze_dims": Op(lambda a: a.squeeze((0, 2)), ((1, 8, 1),), ((1, 5, 4),)),
    "split_with_sizes": Op(lambda a: a.split([1, a.shape[0] - 1])[1]),
    "unsafe_split": values(lambda a: torch.unsafe_split(a, 2)[1]),
    "narrow_copy": values(lambda a: torch.narrow_copy(a, 0, 1, 3)),
    "alias": Op(torch.ops.aten.alias),
    "full_like": values(lambda a: torch.full_like(a, 2) + torch.empty_like(a).zero_()),
    "new_full": values(lambda a: a.new_full((2, 3), 4) + a.new_empty(2, 3).zero_()),
    "fill": values(lambda a: (a * 1).relu().fill_(3) + a.exp().fill_(torch.tensor(2.0))),
    "item": values(lambda a: a.new_full((1,), a.sum().item())),
    "equal": values(lambda a: a.new_full((1,), torch.equal(a, a * 1))),
    "equal_op": values(lambda a: a.new_full((1,), torch.ops.aten.equal(a, a * 1))),
    "same_size": values(lambda a: a.new_full((1,), torch.ops.aten.is_same_size(a, a.t()))),
    "same_size_op": values(lambda a: a.new_full((1,), torch.ops.aten.is_same_size.default(a, a.t()))),
    "clone": Op(torch.clone),
    "mlp": Op(_mlp, ((4, 8, 4), (8, 4), (4, 8)), ((3, 5, 2), (3, 2), (2, 3))),
    "sdpa": Op(F.scaled_dot_product_attention, ((4, 4, 2, 2),) * 3, ((3, 5, 2, 2),) * 3),
}
