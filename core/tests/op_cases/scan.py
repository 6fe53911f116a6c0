"""Cases of running sums and extrema, sorts and flips."""

from __future__ import annotations

from typing import Any

import torch

from core.tests.op_case import UA, A, Op, flat


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


OPS: dict[str, Op] = {
    "scans": Op(_indexed, A, UA, differentiable=False),
    "cummax": Op(lambda a: a.cummax(0).values, A, UA),
    "cummin": Op(lambda a: a.cummin(1).values, A, UA),
    "cumprod_rows": Op(lambda a: a.cumprod(0), A, UA),
    "logcumsumexp": Op(lambda a: a.logcumsumexp(1), A, UA),
    "sort_rows": Op(lambda a: a.sort(1).values, A, UA),
    "topk_rows": Op(lambda a: a.topk(2, 1).values, A, UA),
    "flip_both": Op(lambda a: a.flip((0, -1)), A, UA),
    "diff": Op(lambda a: a.diff(dim=0), A, UA),
    "trapezoid": Op(lambda a: torch.trapezoid(a, dim=0), A, UA),
}
