"""Cross entropy of logits whose classes are spread over ranks, without moving the logits.

For every sample the ranks exchange a maximum, and then three sums in one all-reduce; the backward exchanges
nothing, as each rank knows the softmax of the classes it holds:

    loss = (1 - e) w[t] (lse - x[t]) + e/C sum_c w[c] (lse - x[c])          lse = log sum_c exp x[c]

with e the label smoothing, w the class weights, t the target and C the number of classes. The ops are in
rules/cross_entropy.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dtbench_core.layout.placement import Shard
from dtbench_core.layout.wrapper import Wrapper, wrap
from dtbench_core.rules.cross_entropy import class_gradient, class_loss, class_max, class_sums
from dtbench_core.rules.labels import settled, whole

REDUCTIONS = ("none", "mean", "sum")


class Options(NamedTuple):
    """What F.cross_entropy takes besides tensors."""

    ignore_index: int
    reduction: str
    smoothing: float


def cross_entropy(
    input: Any,  # [N, C, ...] or [C]
    target: Any,  # [N, ...] or []
    weight: Any = None,  # [C]
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """F.cross_entropy of a DTensor whose classes are sharded, its target class numbers; NotImplemented for
    anything else."""
    if not isinstance(input, Wrapper) or size_average is not None or reduce is not None:
        return NotImplemented
    if reduction not in REDUCTIONS or not 0.0 <= label_smoothing <= 1.0 or not is_class_sharded(input):
        return NotImplemented
    if not _fits(input, target, weight):
        return NotImplemented
    return CrossEntropy.apply(input, target, weight, Options(ignore_index, reduction, label_smoothing))


def class_dim(logits: Wrapper) -> int:
    return min(logits._spec.ndim - 1, 1)


def is_class_sharded(logits: Wrapper) -> bool:
    """Whether ranks hold different classes, and nothing is pending."""
    spec = logits._spec
    dim = class_dim(logits)
    return not spec.has_partial() and any(isinstance(p, Shard) and p.dim == dim for p in spec.placements)


def _fits(logits: Wrapper, target: Any, weight: Any) -> bool:
    """Whether these are what torch takes for class targets; else it is for torch to say what is wrong."""
    dim, spec = class_dim(logits), logits._spec
    shape = (*spec.shape[:dim], *spec.shape[dim + 1 :])
    if (
        not isinstance(target, Wrapper)
        or target._spec.dtype != torch.int64
        or tuple(target._spec.shape) != shape
    ):
        return False
    if weight is not None and not (isinstance(weight, Wrapper) and weight._spec.dtype == spec.dtype):
        return False
    return (
        spec.dtype.is_floating_point
        and spec.shape[dim] > 0
        and (weight is None or tuple(weight._spec.shape) == (spec.shape[dim],))
    )


class CrossEntropy(torch.autograd.Function):
    """(logits, target, weight?, options) -> loss."""

    @staticmethod
    def forward(ctx: Any, logits: Any, target: Any, weight: Any, options: Options) -> Any:
        dim, classes = class_dim(logits), logits._spec.shape[class_dim(logits)]
        smoothing = options.smoothing
        maximum = settled(class_max(logits, dim))
        sums = settled(class_sums(logits, maximum, target, weight, dim, smoothing > 0))
        made = class_loss(sums, target, weight, classes, options.ignore_index, smoothing)
        ctx.options, ctx.dim, ctx.classes = options, dim, classes
        # The loss, the weight and the targets that are no class, of all samples; replicated.
        totals = whole(made.sum(list(range(1, made.ndim))) if made.ndim > 1 else made)
        held = totals._local_tensor
        _refuse_wrong(held[2], classes)
        ctx.total = held[1]
        ctx.save_for_backward(logits, target, weight, maximum, sums)
        if options.reduction == "none":
            return made[0].to(logits._spec.dtype, copy=True)
        value = (held[0] / held[1] if options.reduction == "mean" else held[0]).to(
            logits._spec.dtype, copy=True
        )
        return wrap(
            type(logits),
            value,
            totals._spec.of(totals._spec.info, totals._spec.placements, (), (), value.dtype),
        )

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        logits, target, weight, maximum, sums = ctx.saved_tensors
        ignore_index, reduction, smoothing = ctx.options
        if torch.is_grad_enabled():  # to be differentiated again
            return _differentiable_gradient(grad, logits, target, weight, ctx.options), None, None, None
        if reduction == "mean":
            grad = grad / ctx.total
        made = class_gradient(
            grad, logits, maximum, sums, target, weight, ctx.dim, ctx.classes, ignore_index, smoothing
        )
        return made, None, None, None


def _differentiable_gradient(grad: Any, logits: Any, target: Any, weight: Any, options: Options) -> Any:
    """The gradient through torch's own ops, which autograd can follow."""
    moved = logits.redistribute()
    loss = F.cross_entropy(
        moved,
        target,
        weight,
        ignore_index=options.ignore_index,
        reduction=options.reduction,
        label_smoothing=options.smoothing,
    )
    return torch.autograd.grad(loss, logits, grad, create_graph=True)[0]


def _refuse_wrong(wrong: torch.Tensor, classes: int) -> None:
    """Raises as torch's kernels do where a target is no class: on a CPU at once, and on every rank."""
    if wrong.device.type != "cpu":
        torch._assert_async(wrong == 0)
    elif count := int(wrong.item()):
        raise IndexError(
            f"cross_entropy got {count} targets that are no class, expected numbers in [0, {classes}) or ignore_index: "
            "correct them, or pass what they are as ignore_index"
        )
