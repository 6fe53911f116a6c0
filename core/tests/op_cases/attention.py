"""Cases of attention on CPU: masks that broadcast, causal, scaled, grouped heads."""

from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import Op
from core.tests.op_cases.loss import beside

SDPA = F.scaled_dot_product_attention
Q, UQ = (4, 4, 3, 2), (3, 5, 3, 2)  # [batch, head, length, width]


def _mask(q: Any, shape: tuple[int, ...]) -> Any:
    return beside(q, torch.arange(torch.Size(shape).numel()).view(shape).double().sin())


def _masked(*dims: int | None) -> Op:
    """With a mask of the query's lengths of `dims`; None: one that broadcasts."""

    def run(q: Any, k: Any, v: Any) -> Any:
        shape = tuple(1 if d is None else q.shape[d] for d in dims)
        return SDPA(q, k, v, attn_mask=_mask(q, (*shape, k.shape[2])), scale=0.3)

    return Op(run, (Q,) * 3, (UQ,) * 3)


OPS: dict[str, Op] = {
    "sdpa_mask": _masked(0, 1, 2),
    "sdpa_mask_of_batch": _masked(0, None, 2),
    "sdpa_mask_of_length": _masked(2),
    "sdpa_causal": Op(lambda q, k, v: SDPA(q, k, v, is_causal=True), (Q,) * 3, (UQ,) * 3),
    "sdpa_grouped": Op(
        lambda q, k, v: SDPA(q, k, v, enable_gqa=True),
        ((4, 8, 2, 2), (4, 2, 3, 2), (4, 2, 3, 2)),
        ((3, 6, 2, 2), (3, 3, 3, 2), (3, 3, 3, 2)),
    ),
    "sdpa_3d": Op(SDPA, ((4, 3, 2),) * 3, ((5, 3, 2),) * 3),
}
