"""Cases of the losses: every reduction, weights, ignored classes, shards in which all is ignored."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from core.tests.op_case import UB, B, Op, flat, index_for, values
from dtbench_core import DTensor, Replicate, Shard, distribute_tensor


def beside(like: Any, full: torch.Tensor) -> Any:
    """`full` replicated on the mesh of `like`; as it is where that is plain."""
    if not isinstance(like, DTensor):
        return full
    return distribute_tensor(full, like.device_mesh, src_data_rank=None)


def _weight(like: Any, length: int) -> Any:
    return beside(like, torch.arange(1, length + 1, dtype=torch.float64) / length)


def _classes(like: Any, shard: bool) -> Any:
    """Targets of logits [n, class, ...]: the first half is class 1, to be ignored."""
    n, classes = like.shape[:2]
    shape = (n, *like.shape[2:])
    targets = torch.arange(torch.Size(shape).numel()).view(shape) % classes
    targets[: (n + 1) // 2] = 1
    return index_for(like, targets.tolist(), Shard(0) if shard else Replicate())


def _elementwise(loss: Callable[..., Any]) -> dict[str, Op]:
    name = loss.__name__.strip("_")
    return {
        f"{name}_{how}": Op(lambda a, b, how=how: loss(a, b, reduction=how), B, UB)
        for how in ("none", "mean", "sum")
    }


def _soft_margin(a: Any, b: Any, reduction: str) -> Any:
    return F.soft_margin_loss(a * b, b.detach().sign(), reduction=reduction)


def _bce(a: Any, b: Any, how: str) -> Any:
    weight = _weight(a, a.shape[-1])
    return F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), weight=weight.expand(a.shape), reduction=how)


def _bce_logits(a: Any, b: Any) -> Any:
    return F.binary_cross_entropy_with_logits(a, b.sigmoid(), pos_weight=_weight(a, a.shape[-1]))


def _nll(a: Any, how: str, *, weighted: bool = False, ignore: int = -100, shard: bool = True) -> Any:
    weight = _weight(a, a.shape[1]) if weighted else None
    return F.nll_loss(a, _classes(a, shard), weight, reduction=how, ignore_index=ignore)


def _cross_entropy(a: Any) -> Any:
    return F.cross_entropy(a, _classes(a, True), ignore_index=1, label_smoothing=0.1)


def _cross_entropy_parts(a: Any) -> Any:
    """The ops that F.cross_entropy becomes where classes are sharded, called one by one."""
    ours, classes = torch.ops.dtbench_core, a.shape[1]
    target, weight = _classes(a, True), _weight(a, classes)
    top = ours.class_max(a, 1)
    sums = ours.class_sums(a, top, target, weight, 1, True)
    losses = ours.class_loss(sums, target, weight, classes, 1, 0.1)
    options = (1, classes, 1, 0.1)  # dim, classes, ignore_index, smoothing
    return flat([top, sums, losses, ours.class_gradient(top, a, top, sums, target, weight, *options)])


def _embedding_rows_backward(a: Any) -> Any:
    """The gradient of a table by rows, of whose 7 rows the second is padding."""
    rows = index_for(a, [i % 7 for i in range(a.shape[0])], Shard(0))
    return torch.ops.dtbench_core.embedding_rows_backward(a, rows, 7, 1)


IMAGES, UNEVEN_IMAGES = ((4, 3, 4, 2),), ((3, 4, 2, 5),)

OPS: dict[str, Op] = {
    **_elementwise(F.mse_loss),
    **_elementwise(F.huber_loss),
    **_elementwise(F.smooth_l1_loss),
    **_elementwise(_soft_margin),
    "mse_loss_empty_shards": Op(F.mse_loss, ((2, 3),) * 2, ((1, 2),) * 2),
    "bce": Op(lambda a, b: _bce(a, b, "mean"), B, UB),
    "bce_sum": Op(lambda a, b: _bce(a, b, "sum"), B, UB),
    "bce_none": Op(lambda a, b: _bce(a, b, "none"), B, UB),
    "bce_logits": Op(_bce_logits, B, UB),
    "kl_div": Op(lambda a, b: F.kl_div(a, b.softmax(-1), reduction="batchmean"), B, UB),
    "poisson_nll": Op(lambda a, b: F.poisson_nll_loss(a, b.exp(), full=True), B, UB),
    "hinge": Op(lambda a, b: F.hinge_embedding_loss(a * b, b.detach().sign()), B, UB),
    "nll_whole_target": Op(lambda a: _nll(a, "mean", shard=False)),
    "nll_weighted": Op(lambda a: _nll(a, "mean", weighted=True)),
    "nll_ignoring": Op(lambda a: _nll(a, "mean", weighted=True, ignore=1)),
    "nll_sum": Op(lambda a: _nll(a, "sum", ignore=1)),
    "nll_none": Op(lambda a: _nll(a, "none", weighted=True, ignore=1)),
    "nll_images": Op(lambda a: _nll(a, "mean", weighted=True, ignore=1), IMAGES, UNEVEN_IMAGES),
    "cross_entropy": Op(_cross_entropy),
    "cross_entropy_parts": values(_cross_entropy_parts),
    "embedding_rows_backward": values(_embedding_rows_backward),
}
