"""Cases of reductions, scans, sorts and flips."""

from typing import Any

import torch

from core.tests.op_case import UB, B, Op, flat, values
from core.tests.torch_version import BEFORE_213

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
