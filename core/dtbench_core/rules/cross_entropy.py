"""Cross entropy of class numbers: entry, autograd, the four ops it is made of, and their rules.

The classes of the logits may be spread over ranks, and the logits do not move. For every sample the ranks
exchange a maximum, and then three sums in one all-reduce; the backward exchanges nothing, as each rank
knows the softmax of the classes it holds:

    loss = (1 - e) w[t] (lse - x[t]) + e/C sum_c w[c] (lse - x[c])          lse = log sum_c exp x[c]

with e the label smoothing, w the class weights, t the target and C the number of classes. The ops:

    class_max       logits -> the largest of every sample                                       [N, ...]
    class_sums      logits -> sum_c exp(x[c] - m), x[t] - m, and smoothed sum_c w[c] (x[c] - m) [2 or 3, N, ...]
    class_loss      those sums -> every sample's loss, weight, and whether its target is wrong  [3, N, ...]
    class_gradient  gradient of the losses -> of the logits                                     [N, C, ...]

With classes sharded the first leaves a pending maximum, the second a pending sum, and the last needs
nothing of other ranks. `dim` is where the classes lie: 1, or 0 of logits without samples.
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
    """What F.cross_entropy takes besides tensors, by its names."""

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
    """F.cross_entropy of a DTensor whose classes are sharded, its target class numbers; NotImplemented for
    anything else."""
    if not isinstance(input, Wrapper) or size_average is not None or reduce is not None:
        return NotImplemented
    if reduction not in REDUCTIONS or not 0.0 <= label_smoothing <= 1.0:
        return NotImplemented
    if input._spec.has_partial() or not is_split(input, [class_dim(input)]):
        return NotImplemented
    if not _fits(input, target, weight):
        return NotImplemented
    return CrossEntropy.apply(input, target, weight, Options(ignore_index, reduction, label_smoothing))


def linear_cross_entropy(*args: Value, options: Any = None, **others: Any) -> Value:
    """F.linear_cross_entropy without its options, which say how one device goes through the batch in chunks: that op
    of torch's makes plain buffers in its backward. NotImplemented where none are given."""
    return NotImplemented if options is None else F.linear_cross_entropy(*args, **others)


def class_dim(logits: Wrapper) -> int:
    return min(logits._spec.ndim - 1, 1)


def _fits(logits: Wrapper, target: Any, weight: Value) -> bool:
    """Whether these are what torch takes for class targets; else it is for torch to say what is wrong."""
    dim, spec = class_dim(logits), logits._spec
    shape = (*spec.shape[:dim], *spec.shape[dim + 1 :])
    if not spec.dtype.is_floating_point or spec.shape[dim] == 0 or not _is(target, torch.int64, shape):
        return False
    return weight is None or _is(weight, spec.dtype, (spec.shape[dim],))


def _is(tensor: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
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
        # The loss, the weight and the targets that are no class, of all samples; replicated.
        totals = replicate(result.sum(list(range(1, result.ndim))) if result.ndim > 1 else result)
        held = totals._local_tensor
        _refuse_wrong(held[2], classes)
        ctx.total = held[1]
        ctx.save_for_backward(logits, target, weight, maximum, sums)
        if options.reduction == "none":
            return result[0].to(logits._spec.dtype, copy=True)
        loss = held[0] / held[1] if options.reduction == "mean" else held[0]
        spec = totals._spec.of(totals._spec.info, totals._spec.placements, (), (), logits._spec.dtype)
        return wrap(logits.viewed, loss.to(spec.dtype, copy=True), spec)

    @staticmethod
    def backward(ctx: Ctx, grad: Value) -> Value:
        logits, target, weight, maximum, sums = ctx.saved_tensors
        ignore_index, reduction, smoothing = ctx.options
        # To be differentiated again: through torch's own ops, which autograd can follow.
        if torch.is_grad_enabled():
            loss = F.cross_entropy(logits.redistribute(), target, weight, **ctx.options._asdict())
            return torch.autograd.grad(loss, logits, grad, create_graph=True)[0], None, None, None
        if reduction == "mean":
            grad = grad / ctx.total
        gradient = class_gradient(
            grad, logits, maximum, sums, target, weight, ctx.dim, ctx.classes, ignore_index, smoothing
        )
        return gradient, None, None, None


def _refuse_wrong(wrong: torch.Tensor, classes: int) -> None:
    """Raises as torch's kernels do where a target is no class: on a CPU at once, and on every rank."""
    if wrong.device.type != "cpu" or is_fake_mode_active():
        torch._assert_async(wrong == 0)
    elif count := int(wrong.item()):
        raise IndexError(
            f"cross_entropy got {count} targets that are no class, expected numbers in [0, {classes}) or ignore_index: "
            "correct them, or pass what they are as ignore_index"
        )


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: half precision adds up in float32, as torch's kernels do."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


# ---- the ops, on shards whose first class is `first` ----


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
    dtype = accumulated(logits.dtype)
    above = logits.to(dtype) - maximum.to(dtype).unsqueeze(dim)
    sums = above.new_zeros((3 if smoothed else 2, *target.shape))
    count = logits.shape[dim]
    if count:
        own = target - first
        held = (own >= 0) & (own < count)
        picked = above.gather(dim, own.clamp(0, count - 1).unsqueeze(dim)).squeeze(dim)
        sums[1] = torch.where(held, picked, 0.0)
    if smoothed:
        sums[2] = (above if weight is None else above * _along(weight, first, logits, dim)).sum(dim)
    sums[0] = above.exp_().sum(dim)
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
        total = _total(weight, classes)
        loss = (1 - smoothing) * loss + smoothing / classes * (total * normalizer - sums[2])
    wrong = valid & ((target < 0) | (target >= classes))
    return torch.stack([torch.where(valid, loss, 0.0), weights, wrong.to(sums.dtype)])


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
    hit = (1 - smoothing) * weights
    mass = hit + smoothing / classes * _total(weight, classes) if smoothing else hit
    result = (logits.to(dtype) - maximum.to(dtype).unsqueeze(dim)).exp_()
    result *= (mass / sums[0]).unsqueeze(dim)
    if smoothing:
        result -= smoothing / classes * (1.0 if weight is None else _along(weight, first, logits, dim))
    if count:
        own = target - first
        held = (own >= 0) & (own < count)
        at = own.clamp(0, count - 1).unsqueeze(dim)
        result.scatter_add_(dim, at, torch.where(held, -hit, 0.0).unsqueeze(dim))
    # A product would make NaN of an infinite gradient where nothing counts.
    scale, counts = grad.to(dtype).expand(target.shape).unsqueeze(dim), valid.unsqueeze(dim)
    return torch.where(counts, result * scale, 0.0).to(logits.dtype)


def _weights(
    target: Tensor, weight: Tensor | None, classes: int, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(whether a sample counts, its weight: 0 where it does not)."""
    valid = target != ignore_index
    if weight is None:
        return valid, valid.to(dtype)
    return valid, torch.where(valid, weight.to(dtype).take(target.clamp(0, classes - 1)), 0.0)


def _total(weight: Tensor | None, classes: int) -> Value:
    return classes if weight is None else weight.sum()


def _along(weight: Tensor, first: int, logits: Tensor, dim: int) -> Tensor:
    """The weights of the classes held, ready to be multiplied with the logits."""
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


# ---- their rules ----


def _dims(call: OpCall, logits: int) -> tuple[str, str]:
    """Labels of the logits' dims, of which `C` are the classes, and of the samples'."""
    samples = free_labels(call.inputs[logits].ndim - 1, skip="C")
    dim = call["dim"]
    return f"{samples[:dim]}C{samples[dim:]}", samples


@rule(class_max)
def _(call: OpCall) -> Strategy:
    logits, samples = _dims(call, 0)
    return Strategy(label_rows(samples + "C", [logits], [samples], Partial("max")))


@rule(class_sums)
def _(call: OpCall) -> Strategy:
    logits, samples = _dims(call, 0)
    weight = ["."] * (len(call.inputs) - 3)
    rows = label_rows(samples + "C", [logits, samples, samples, *weight], ["." + samples], SUM)
    return Strategy(rows, localize=_from_first(_sums, 0, call["dim"]), any_lengths=True)


@rule(class_loss)
def _(call: OpCall) -> Strategy:
    samples = free_labels(call.inputs[1].ndim)
    weight = ["."] * (len(call.inputs) - 2)
    return Strategy(label_rows(samples, ["." + samples, samples, *weight], ["." + samples]))


@rule(class_gradient)
def _(call: OpCall) -> Strategy:
    logits, samples = _dims(call, 1)
    grad = samples if call.inputs[0].ndim else ""
    weight = ["."] * (len(call.inputs) - 5)
    rows = label_rows(samples + "C", [grad, logits, samples, "." + samples, samples, *weight], [logits])
    return Strategy(rows, localize=_from_first(_gradient, 1, call["dim"]), any_lengths=True)


def _from_first(
    op: Callable[..., Tensor], logits: int, dim: int
) -> Callable[[PlacedSpecs], Callable[..., Tensor]]:
    """`op`, given which class the rank's first is."""

    def localize(placed: PlacedSpecs) -> Callable[..., Tensor]:
        first = placed.inputs[logits].local_offset[dim]
        return lambda *args: op(*args, first)

    return localize
