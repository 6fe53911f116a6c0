"""Cases of running sums and extrema, sorts and flips."""

from typing import Any

import torch

from core.tests.op_case import Op, flat, values


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
    "scans": values(_indexed),
    "cummax": Op(lambda a: a.cummax(0).values),
    "cummin": Op(lambda a: a.cummin(1).values),
    "cumprod_rows": Op(lambda a: a.cumprod(0)),
    "logcumsumexp": Op(lambda a: a.logcumsumexp(1)),
    "topk_rows": Op(lambda a: a.topk(2, 1).values),
    "diff": Op(lambda a: a.diff(dim=0)),
    "trapezoid": Op(lambda a: torch.trapezoid(a, dim=0)),
}
