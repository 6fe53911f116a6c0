"""Cross entropy with class labels: entry, autograd, the four ops that it consists of, and their rules.

The classes of the logits may be sharded, and the logits are not moved. In the forward, the ranks exchange one maximum
per sample, and then three sums in one all-reduce. The backward needs no communication, because each rank knows the
softmax of its own classes:

    loss = (1 - e) w[t] (lse - x[t]) + e/C sum_c w[c] (lse - x[c])          lse = log sum_c exp x[c]

where e is the label smoothing, w the class weights, t the target and C the number of classes. The ops:

    class_max       logits -> maximum m per sample                                              [N, ...]
    class_sums      logits -> sum_c exp(x[c] - m), x[t] - m, and smoothed sum_c w[c] (x[c] - m) [2 or 3, N, ...]
    class_loss      sums -> per sample: loss, weight, and whether its target is invalid         [3, N, ...]
    class_gradient  gradient of the losses -> gradient of the logits                            [N, C, ...]

With sharded classes, class_max leaves a pending maximum and class_sums a pending sum; class_gradient is local. `dim` is
the dim of the classes: 1, or 0 for logits without samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dtbench_core.layout.placement import Partial
from dtbench_core.layout.wrapper import Wrapper, wrap
from dtbench_core.op_types import Ctx, Value
from dtbench_core.rules.base import OpCall, PlacedSpecs, Strategy, rule
from dtbench_core.rules.labels import SUM, free_labels, is_split, label_rows, reduce_partials, replicate
from dtbench_core.torch_compat import AutogradFunction, is_fake_mode_active, new_op

# ---- entry and autograd ----

REDUCTIONS = ("none", "mean", "sum")


class Options(NamedTuple):
    """The arguments of F.cross_entropy that are not tensors, under the same names."""

    ignore_index: int
    reduction: str
    label_smoothing: float


def cross_entropy(
    input: Value,  # [N, C, ...] or [C]
    target: Any,  # [N, ...] or []
    weight: Value = None,  # [C]
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Value:
    """F.cross_entropy of a DTensor with sharded classes and class labels as target; otherwise NotImplemented."""
    if not isinstance(input, Wrapper) or size_average is not None or reduce is not None:
        return NotImplemented
    if reduction not in REDUCTIONS or not 0.0 <= label_smoothing <= 1.0:
        return NotImplemented
    if (
        input._spec.has_partial()
        or not is_split(input, [class_dim(input)])
        or not _are_class_targets(input, target, weight)
    ):
        return NotImplemented
    return CrossEntropy.apply(input, target, weight, Options(ignore_index, reduction, label_smoothing))


def linear_cross_entropy(*args: Value, options: Any = None, **kwargs: Any) -> Value:
    """Calls F.linear_cross_entropy without its options; NotImplemented if there are none.

    The options define how one device splits the batch into chunks. torch's op for them creates plain buffers in its
    backward.
    """
    return NotImplemented if options is None else F.linear_cross_entropy(*args, **kwargs)


def class_dim(logits: Wrapper) -> int:
    return min(logits._spec.ndim - 1, 1)


def _are_class_targets(logits: Wrapper, target: Any, weight: Value) -> bool:
    """Whether torch accepts these tensors as logits and class labels; if not, torch raises the error."""
    dim, spec = class_dim(logits), logits._spec
    shape = (*spec.shape[:dim], *spec.shape[dim + 1 :])
    if not spec.dtype.is_floating_point or spec.shape[dim] == 0 or not _has(target, torch.int64, shape):
        return False
    return weight is None or _has(weight, spec.dtype, (spec.shape[dim],))


def _has(tensor: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    return isinstance(tensor, Wrapper) and (tensor._spec.dtype, tuple(tensor._spec.shape)) == (dtype, shape)


class CrossEntropy(AutogradFunction):
    """(logits, target, weight?, options) -> loss."""

    @staticmethod
    def forward(ctx: Ctx, logits: Any, target: Any, weight: Value, options: Options) -> Value:
        dim, classes = class_dim(logits), logits._spec.shape[class_dim(logits)]
        smoothing = options.label_smoothing
        maximum = reduce_partials(class_max(logits, dim))
        sums = reduce_partials(class_sums(logits, maximum, target, weight, dim, smoothing > 0))
        result = class_loss(sums, target, weight, classes, options.ignore_index, smoothing)
        ctx.options, ctx.dim, ctx.classes = options, dim, classes
        # Over all samples, replicated: total loss, total weight, and number of invalid targets.
        totals = replicate(result.sum(list(range(1, result.ndim))) if result.ndim > 1 else result)
        local_totals = totals._local_tensor
        _raise_for_invalid_targets(local_totals[2], classes)
        ctx.total = local_totals[1]
        ctx.save_for_backward(logits, target, weight, maximum, sums)
        if options.reduction == "none":
            return result[0].to(logits._spec.dtype, copy=True)
        loss = local_totals[0] / local_totals[1] if options.reduction == "mean" else local_totals[0]
        spec = totals._spec.of(totals._spec.info, totals._spec.placements, (), (), logits._spec.dtype)
        return wrap(logits.viewed, loss.to(spec.dtype, copy=True), spec)

    @staticmethod
    def backward(ctx: Ctx, grad: Value) -> Value:
        logits, target, weight, maximum, sums = ctx.saved_tensors
        ignore_index, reduction, smoothing = ctx.options
        # A double backward needs ops that autograd records.
        if torch.is_grad_enabled():
            loss = F.cross_entropy(logits.redistribute(), target, weight, **ctx.options._asdict())
            return torch.autograd.grad(loss, logits, grad, create_graph=True)[0], None, None, None
        if reduction == "mean":
            grad = grad / ctx.total
        gradient = class_gradient(
            grad, logits, maximum, sums, target, weight, ctx.dim, ctx.classes, ignore_index, smoothing
        )
        return gradient, None, None, None


def _raise_for_invalid_targets(invalid: torch.Tensor, classes: int) -> None:
    """Raises if targets are invalid, as torch's kernels do: on CPU immediately, and on every rank."""
    if invalid.device.type != "cpu" or is_fake_mode_active():
        torch._assert_async(invalid == 0)
    elif count := int(invalid.item()):
        raise IndexError(
            f"cross_entropy got {count} invalid targets, expected numbers in [0, {classes}) or ignore_index: "
            "correct them, or pass their value as ignore_index"
        )


# ---- the ops, on shards whose first class has the index `first` ----


def _max(logits: Tensor, dim: int) -> Tensor:
    if logits.shape[dim] == 0:  # a rank without classes
        return logits.sum(dim).fill_(-torch.inf)
    return logits.amax(dim)


def _sums(
    logits: Tensor,  # [N, C, ...]
    maximum: Tensor,  # [N, ...]
    target: Tensor,  # [N, ...]
    weight: Tensor | None,  # [all classes]
    dim: int,
    smoothed: bool,
    first: int = 0,
) -> Tensor:
    # Half precision is accumulated in float32, as in torch's kernels.
    dtype = torch.float32 if logits.dtype in (torch.float16, torch.bfloat16) else logits.dtype
    shifted = logits.to(dtype) - maximum.to(dtype).unsqueeze(dim)
    sums = shifted.new_zeros((3 if smoothed else 2, *target.shape))
    count = logits.shape[dim]
    if count:
        local_target = target - first
        is_local = (local_target >= 0) & (local_target < count)
        picked = shifted.gather(dim, local_target.clamp(0, count - 1).unsqueeze(dim)).squeeze(dim)
        sums[1] = torch.where(is_local, picked, 0.0)
    if smoothed:
        sums[2] = (
            shifted if weight is None else shifted * _local_class_weights(weight, first, logits, dim)
        ).sum(dim)
    sums[0] = shifted.exp_().sum(dim)
    return sums


def _loss(
    sums: Tensor,  # [2 or 3, N, ...]
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    ignore_index: int,
    smoothing: float,
) -> Tensor:
    valid, weights = _weights(target, weight, classes, ignore_index, sums.dtype)
    normalizer = sums[0].log()
    loss = weights * (normalizer - sums[1])
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing / classes * (
            _total_weight(weight, classes) * normalizer - sums[2]
        )
    return torch.stack(
        [
            torch.where(valid, loss, 0.0),
            weights,
            (valid & ((target < 0) | (target >= classes))).to(sums.dtype),
        ]
    )


def _gradient(
    grad: Tensor,  # [N, ...], or [] when the same for all
    logits: Tensor,  # [N, C, ...]
    maximum: Tensor,
    sums: Tensor,
    target: Tensor,
    weight: Tensor | None,
    dim: int,
    classes: int,
    ignore_index: int,
    smoothing: float,
    first: int = 0,
) -> Tensor:
    dtype, count = sums.dtype, logits.shape[dim]
    valid, weights = _weights(target, weight, classes, ignore_index, dtype)
    target_weight = (1 - smoothing) * weights
    softmax_weight = (
        target_weight + smoothing / classes * _total_weight(weight, classes) if smoothing else target_weight
    )
    result = (logits.to(dtype) - maximum.to(dtype).unsqueeze(dim)).exp_()
    result *= (softmax_weight / sums[0]).unsqueeze(dim)
    if smoothing:
        result -= (
            smoothing
            / classes
            * (1.0 if weight is None else _local_class_weights(weight, first, logits, dim))
        )
    if count:
        local_target = target - first
        is_local = (local_target >= 0) & (local_target < count)
        result.scatter_add_(
            dim,
            local_target.clamp(0, count - 1).unsqueeze(dim),
            torch.where(is_local, -target_weight, 0.0).unsqueeze(dim),
        )
    # Multiplying with 0 instead would give NaN for an infinite gradient.
    scale, counts = grad.to(dtype).expand(target.shape).unsqueeze(dim), valid.unsqueeze(dim)
    return torch.where(counts, result * scale, 0.0).to(logits.dtype)


def _weights(
    target: Tensor, weight: Tensor | None, classes: int, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns (whether each sample counts, its weight, which is 0 if it does not)."""
    valid = target != ignore_index
    if weight is None:
        return valid, valid.to(dtype)
    return valid, torch.where(valid, weight.to(dtype).take(target.clamp(0, classes - 1)), 0.0)


def _total_weight(weight: Tensor | None, classes: int) -> Value:
    return classes if weight is None else weight.sum()


def _local_class_weights(weight: Tensor, first: int, logits: Tensor, dim: int) -> Tensor:
    """Returns the weights of the local classes, in a shape that broadcasts with the logits."""
    return weight.narrow(0, first, logits.shape[dim]).view(-1, *(1,) * (logits.ndim - dim - 1))


class_max = new_op("class_max(Tensor logits, int dim) -> Tensor", _max)
class_sums = new_op(
    "class_sums(Tensor logits, Tensor maximum, Tensor target, Tensor? weight, int dim, bool smoothed) -> Tensor",
    _sums,
)
class_loss = new_op(
    "class_loss(Tensor sums, Tensor target, Tensor? weight, int classes, int ignore_index, float smoothing) -> Tensor",
    _loss,
)
class_gradient = new_op(
    "class_gradient(Tensor grad, Tensor logits, Tensor maximum, Tensor sums, Tensor target, Tensor? weight, int dim,"
    " int classes, int ignore_index, float smoothing) -> Tensor",
    _gradient,
)


# ---- rules of these ops ----


def _dim_labels(call: OpCall, logits: int) -> tuple[str, str]:
    """Returns the labels of the logits' dims, where `C` is the classes, and the labels of the samples."""
    samples = free_labels(call.inputs[logits].ndim - 1, skip="C")
    dim = call["dim"]
    return f"{samples[:dim]}C{samples[dim:]}", samples


@rule(class_max)
def _(call: OpCall) -> Strategy:
    logits, samples = _dim_labels(call, 0)
    return Strategy(label_rows(samples + "C", [logits], [samples], Partial("max")))


@rule(class_sums)
def _(call: OpCall) -> Strategy:
    logits, samples = _dim_labels(call, 0)
    weight = ["."] * (len(call.inputs) - 3)
    return Strategy(
        label_rows(samples + "C", [logits, samples, samples, *weight], ["." + samples], SUM),
        localize=_localize_first_class(_sums, 0, call["dim"]),
        any_lengths=True,
    )


@rule(class_loss)
def _(call: OpCall) -> Strategy:
    samples = free_labels(call.inputs[1].ndim)
    return Strategy(
        label_rows(samples, ["." + samples, samples, *(["."] * (len(call.inputs) - 2))], ["." + samples])
    )


@rule(class_gradient)
def _(call: OpCall) -> Strategy:
    logits, samples = _dim_labels(call, 1)
    grad = samples if call.inputs[0].ndim else ""
    weight = ["."] * (len(call.inputs) - 5)
    return Strategy(
        label_rows(samples + "C", [grad, logits, samples, "." + samples, samples, *weight], [logits]),
        localize=_localize_first_class(_gradient, 1, call["dim"]),
        any_lengths=True,
    )


def _localize_first_class(
    op: Callable[..., Tensor], logits: int, dim: int
) -> Callable[[PlacedSpecs], Callable[..., Tensor]]:
    """Returns `Strategy.localize` for an op that needs the index of the rank's first class."""

    def localize(placed: PlacedSpecs) -> Callable[..., Tensor]:
        first = placed.inputs[logits].local_offset[dim]
        return lambda *args: op(*args, first)

    return localize
