"""Cases of the norms: statistics over what all ranks hold, running statistics, sharded channels and groups."""

from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import UB, B, Op, values
from core.tests.op_cases.loss import beside

PLANES, UNEVEN_PLANES = ((4, 8, 3),), ((3, 5, 2),)


def _batch_norm(x: Any, w: Any, b: Any) -> Any:
    """In training, with running statistics, which become part of the result."""
    channels = x.shape[1]
    mean, var = beside(x, torch.zeros(channels).double()), beside(x, torch.ones(channels).double())
    return F.batch_norm(x, mean, var, w, b, training=True) + (mean + var).view(-1, *[1] * (x.ndim - 2))


def _batch_norm_given(x: Any, w: Any) -> Any:
    steps = torch.arange(1, x.shape[1] + 1).double()
    return F.batch_norm(x, beside(x, steps), beside(x, steps), w, None, training=False)


def _with_update(x: Any) -> Any:
    one = beside(x, torch.ones(x.shape[1]).double())
    mean, var = one - 1, one * 2
    updated = torch.ops.aten._batch_norm_with_update(x, one, one, mean, var, 0.2, 1e-5)
    same = torch.ops.aten._native_batch_norm_legit(x, one, one, mean, var, True, 0.1, 1e-5)
    alone = torch.ops.aten._native_batch_norm_legit(x, one, None, True, 0.1, 1e-5)
    return updated[0] + updated[1].view(-1, 1) + same[0] + alone[2].view(-1, 1) + (mean + var).view(-1, 1)


def _without_update(x: Any) -> Any:
    one = beside(x, torch.ones(x.shape[1]).double())
    updated = torch.ops.aten._batch_norm_no_update(x, one, one, one, one, 0.2, 1e-5)
    same = torch.ops.aten._native_batch_norm_legit_no_training(x, one, None, one, one, 0.1, 1e-5)
    return updated[0] + same[0]


CHANNELS = ((4, 8, 3), (8,), (8,)), ((3, 5, 2), (5,), (5,))

OPS: dict[str, Op] = {
    "safe_softmax": Op(lambda a: torch.ops.aten._safe_softmax(a, 1)),
    "renorm": Op(lambda a: torch.renorm(a, 2, 0, 0.5)),
    "renorm_in_place": values(lambda a: (a * 1).renorm_(2, 0, 0.5)),
    "numbers_added_in_place": Op(lambda a: a.sum(0).sub_(2).add_(3, alpha=2) + a.mean(0).add_(1)),
    "cross": Op(torch.linalg.cross, ((8, 3), (8, 3)), ((5, 3), (1, 3))),
    "rms_norm": Op(lambda a, w: F.rms_norm(a, w.shape, w), ((8, 4), (4,)), ((5, 3), (3,))),
    "normalize": Op(F.normalize),
    "group_norm": Op(lambda x, w, b: F.group_norm(x, 4, w, b), CHANNELS[0], ((3, 4, 2), (4,), (4,))),
    "group_norm_one": Op(lambda x: F.group_norm(x, 1), PLANES, UNEVEN_PLANES),
    "weight_norm": Op(lambda v: torch._weight_norm(v, v[:, :1] * 2, 0)),
    "cdist": Op(torch.cdist, ((4, 8, 2), (4, 4, 2)), ((2, 5, 3), (2, 3, 3))),
    "cdist_city": Op(lambda a, b: torch.cdist(a, b, p=1.0), B, UB),
    "cosine_similarity": Op(F.cosine_similarity, B, UB),
    "batch_norm": Op(_batch_norm, *CHANNELS),
    "batch_norm_given": Op(_batch_norm_given, ((4, 8, 3), (8,)), ((3, 5, 2), (5,))),
    "batch_norm_forms": values(_with_update, PLANES, UNEVEN_PLANES),
    "batch_norm_reserve": Op(
        lambda x: torch.ops.aten._batch_norm_with_update(
            x, *(beside(x, torch.ones(x.shape[1]).double()) for _ in range(4)), 0.2, 1e-5
        )[0],
        PLANES,
        UNEVEN_PLANES,
    ),
    "batch_norm_no_update": values(_without_update, PLANES, UNEVEN_PLANES),
    "instance_norm": Op(F.instance_norm, PLANES, UNEVEN_PLANES),
}
