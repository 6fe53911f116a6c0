"""Cross entropy of class targets in four ops, none of which needs the classes whole (see cross_entropy.py).

    class_max       logits -> the largest of every sample                                       [N, ...]
    class_sums      logits -> sum_c exp(x[c] - m), x[t] - m, and smoothed sum_c w[c] (x[c] - m) [2 or 3, N, ...]
    class_loss      those sums -> every sample's loss, weight, and whether its target is wrong  [3, N, ...]
    class_gradient  gradient of the losses -> of the logits                                     [N, C, ...]

With classes sharded the first leaves a pending maximum, the second a pending sum, and the last needs
nothing of other ranks. `dim` is where the classes lie: 1, or 0 of logits without samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dtbench_core.layout.placement import REPLICATE, Partial, Placement, Shard
from dtbench_core.rules.base import OpCall, Placed, Row, Strategy, rule

_library = torch.library.Library("dtbench_core", "FRAGMENT")
_library.define("class_max(Tensor logits, int dim) -> Tensor")
_library.define(
    "class_sums(Tensor logits, Tensor maximum, Tensor target, Tensor? weight, int dim, bool smoothed) -> Tensor"
)
_library.define(
    "class_loss(Tensor sums, Tensor target, Tensor? weight, int classes, int ignore_index, float smoothing) -> Tensor"
)
_library.define(
    "class_gradient(Tensor grad, Tensor logits, Tensor maximum, Tensor sums, Tensor target, Tensor? weight, int dim,"
    " int classes, int ignore_index, float smoothing) -> Tensor"
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
        found = above.gather(dim, own.clamp(0, count - 1).unsqueeze(dim)).squeeze(dim)
        sums[1] = torch.where(held, found, 0.0)
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
    grad: Tensor,  # [N, ...], or [] for all alike
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
    made = (logits.to(dtype) - maximum.to(dtype).unsqueeze(dim)).exp_()
    made *= (mass / sums[0]).unsqueeze(dim)
    if smoothing:
        made -= smoothing / classes * (1.0 if weight is None else _along(weight, first, logits, dim))
    if count:
        own = target - first
        held = (own >= 0) & (own < count)
        at = own.clamp(0, count - 1).unsqueeze(dim)
        made.scatter_add_(dim, at, torch.where(held, -hit, 0.0).unsqueeze(dim))
    # A product would make NaN of an infinite gradient where nothing counts.
    scale, counts = grad.to(dtype).expand(target.shape).unsqueeze(dim), valid.unsqueeze(dim)
    return torch.where(counts, made * scale, 0.0).to(logits.dtype)


def _weights(
    target: Tensor, weight: Tensor | None, classes: int, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(whether a sample counts, its weight: 0 where it does not)."""
    valid = target != ignore_index
    if weight is None:
        return valid, valid.to(dtype)
    return valid, torch.where(valid, weight.to(dtype).take(target.clamp(0, classes - 1)), 0.0)


def _total(weight: Tensor | None, classes: int) -> Any:
    return classes if weight is None else weight.sum()


def _along(weight: Tensor, first: int, logits: Tensor, dim: int) -> Tensor:
    """The weights of the classes held, ready to be multiplied with the logits."""
    own = weight.narrow(0, first, logits.shape[dim])
    return own.view(-1, *(1,) * (logits.ndim - dim - 1))


for _name, _function in (
    ("class_max", _max),
    ("class_sums", _sums),
    ("class_loss", _loss),
    ("class_gradient", _gradient),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
class_max = torch.ops.dtbench_core.class_max.default
class_sums = torch.ops.dtbench_core.class_sums.default
class_loss = torch.ops.dtbench_core.class_loss.default
class_gradient = torch.ops.dtbench_core.class_gradient.default


# ---- their rules ----


def _samples(call: OpCall, dim: int, logits: int) -> list[tuple[int, int]]:
    """(dim of the logits, dim of the target) of what may be sharded besides the classes."""
    return [(d, d if d < dim else d - 1) for d in range(call.inputs[logits].ndim) if d != dim]


@rule(class_max)
def _(call: OpCall) -> Strategy:
    dim = call["dim"]
    rows = [Row((Shard(d),), (Shard(own),)) for d, own in _samples(call, dim, 0)]
    return Strategy([*rows, Row((Shard(dim),), (Partial("max"),))])


@rule(class_sums)
def _(call: OpCall) -> Strategy:
    dim = call["dim"]
    weight = (REPLICATE,) * (len(call.inputs) - 3)
    rows = [
        Row((Shard(d), Shard(own), Shard(own), *weight), (Shard(own + 1),))
        for d, own in _samples(call, dim, 0)
    ]
    rows.append(Row((Shard(dim), REPLICATE, REPLICATE, *weight), (Partial("sum"),)))
    return Strategy(rows, localize=_from_first(_sums, 0, dim), any_lengths=True)


@rule(class_loss)
def _(call: OpCall) -> Strategy:
    weight = (REPLICATE,) * (len(call.inputs) - 2)
    rows = [
        Row((Shard(own + 1), Shard(own), *weight), (Shard(own + 1),)) for own in range(call.inputs[1].ndim)
    ]
    return Strategy(rows)


@rule(class_gradient)
def _(call: OpCall) -> Strategy:
    dim, grad = call["dim"], call.inputs[0]
    weight = (REPLICATE,) * (len(call.inputs) - 5)
    rows = []
    for d, own in _samples(call, dim, 1):
        of_grad: Placement = Shard(own) if grad.ndim else REPLICATE
        rows.append(Row((of_grad, Shard(d), Shard(own), Shard(own + 1), Shard(own), *weight), (Shard(d),)))
    rows.append(Row((REPLICATE, Shard(dim), *(REPLICATE,) * 3, *weight), (Shard(dim),)))
    return Strategy(rows, localize=_from_first(_gradient, 1, dim), any_lengths=True)


def _from_first(
    op: Callable[..., Tensor], logits: int, dim: int
) -> Callable[[Placed], Callable[..., Tensor]]:
    """`op` told which class the rank's first is."""

    def localize(placed: Placed) -> Callable[..., Tensor]:
        first = placed.inputs[logits].local_offset[dim]
        return lambda *args: op(*args, first)

    return localize
