"""Losses: sharded like the elements that they compare. Means are over the elements, or weights, of all ranks.

multi_margin_loss, multilabel_margin_loss and ctc_loss stay replicated, because they reject values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._ops import OpOverload

from dtbench_core.errors import ArgumentError
from dtbench_core.layout.placement import REPLICATE, Placement, Shard
from dtbench_core.layout.wrapper import Wrapper, stored_local
from dtbench_core.op_types import Call, Value
from dtbench_core.rules.base import OpCall, PlacementRow, Strategy, aten, decomposition, pending_rows, rule
from dtbench_core.rules.labels import SUM, broadcast_placements, replicate
from dtbench_core.torch_compat import DisableTorchFunction, is_fake_mode_active

NONE, MEAN, SUM_ALL = 0, 1, 2  # torch's enum Reduction


# ---- elementwise losses ----


@rule(aten.mse_loss.default, aten.huber_loss.default, aten.smooth_l1_loss.default)
@rule(aten.soft_margin_loss.default, aten.binary_cross_entropy.default)
@rule(aten.binary_cross_entropy_with_logits.default)
def elementwise_loss(call: OpCall) -> Strategy:
    """(input, target, weights...), which broadcast -> the elementwise loss, or one number if it is reduced."""
    shape = torch.broadcast_shapes(*(spec.shape for spec in call.inputs))
    unreduced = call["reduction"] == NONE
    return Strategy(
        [
            PlacementRow(broadcast_placements(call.inputs, dim, shape), (Shard(dim) if unreduced else SUM,))
            for dim in range(len(shape))
        ],
        local_op=_scaled_mean(call, shape) if call["reduction"] == MEAN else None,
        any_lengths=True,
    )


def _scaled_mean(call: OpCall, shape: torch.Size) -> Call:
    """Returns the op whose local mean is scaled by the rank's share of all elements, so that the results add up."""
    op, count = call.op, shape.numel()
    dtype = call.outputs[0].dtype if call.outputs[0] is not None else None

    def local_op(*args: object, **kwargs: object) -> Value:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.Tensor)]
        local_count = torch.broadcast_shapes(*(t.shape for t in tensors)).numel()
        if local_count == count:
            return op(*args, **kwargs)
        if local_count == 0:
            return tensors[0].new_zeros((), dtype=dtype)
        return op(*args, **kwargs) * (local_count / count)

    return local_op


@rule(aten.mse_loss_backward.default, aten.huber_loss_backward.default, aten.smooth_l1_loss_backward.default)
@rule(aten.soft_margin_loss_backward.default, aten.binary_cross_entropy_backward.default)
def elementwise_loss_backward(call: OpCall) -> Strategy:
    """(grad, input, target, weight?) -> gradient of the input. `grad` is one number if the loss is reduced.

    Linear in `grad`.
    """
    grad, data, target = call.inputs[:3]
    shape = data.shape
    fits = target.shape == shape and torch.broadcast_shapes(*(s.shape for s in call.inputs[1:])) == shape
    reduced = call["reduction"] != NONE
    if not fits or grad.shape != (torch.Size() if reduced else shape):
        return Strategy([])
    rows = [
        PlacementRow(
            (REPLICATE if reduced else Shard(dim), *broadcast_placements(call.inputs[1:], dim, shape)),
            (Shard(dim),),
        )
        for dim in range(len(shape))
    ]
    return Strategy(
        [*rows, *pending_rows(call, (0,))],
        local_op=_scaled_mean_backward(call) if call["reduction"] == MEAN else None,
        any_lengths=True,
    )


def _scaled_mean_backward(call: OpCall) -> Call:
    """Returns the op with a scaled `grad`, because the op divides by the number of local elements instead of all."""
    op, count = call.op, math.prod(call.inputs[1].shape)

    def local_op(grad: torch.Tensor, data: torch.Tensor, *args: object, **kwargs: object) -> Value:
        local_count = data.numel()
        return op(grad if local_count == count else grad * (local_count / count), data, *args, **kwargs)

    return local_op


# ---- losses of class labels ----


def _batch_dims(ndim: int) -> list[tuple[int, int]]:
    """Returns pairs (dim of the input, dim of the target), for inputs [n, class] or [n, class, height, width]."""
    return {2: [(0, 0)], 4: [(0, 0), (2, 1), (3, 2)]}.get(ndim, [])


@rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(call: OpCall) -> Strategy:
    """(input [n, class, ...], target [n, ...], weight? [class]) -> (loss, total weight of the targets)."""
    reduction = call["reduction"]
    if reduction == MEAN:
        return Strategy([])  # the decomposition handles sharded inputs
    weight = (REPLICATE,) * (len(call.inputs) - 2)
    return Strategy(
        [
            PlacementRow(
                (Shard(dim), Shard(target_dim), *weight),
                (Shard(target_dim), REPLICATE) if reduction == NONE else (SUM, SUM),
            )
            for dim, target_dim in _batch_dims(call.inputs[0].ndim)
        ]
    )


@rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(call: OpCall) -> Strategy:
    """(grad, input, target, weight?, total weight) -> gradient of the input.

    Linear in `grad`. Only a mean reads the total weight.
    """
    reduced = call["reduction"] != NONE
    if reduced and call.inputs[0].ndim != 0:
        return Strategy([])
    weight = (REPLICATE,) * (len(call.inputs) - 4)
    totals: list[Placement] = sorted(
        {REPLICATE, *(call.inputs[-1].placements if call["reduction"] != MEAN else ())}, key=str
    )
    rows = [
        PlacementRow(
            (REPLICATE if reduced else Shard(target_dim), Shard(dim), Shard(target_dim), *weight, total),
            (Shard(dim),),
        )
        for dim, target_dim in _batch_dims(call.inputs[1].ndim)
        for total in totals
    ]
    return Strategy([*rows, *pending_rows(call, (0,))])


@decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, with_op=True)
def nll_mean(
    op: OpOverload,
    data: Any,
    target: Any,
    weight: Value = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
) -> Value:
    """Divides by the total weight of all ranks' targets, instead of averaging the ranks' means."""
    if reduction != MEAN or all(
        spec.is_replicated()
        for spec in [tensor._spec for tensor in (data, target, weight) if isinstance(tensor, Wrapper)]
    ):
        return NotImplemented
    loss, total = op(data, target, weight, SUM_ALL, ignore_index)
    total = replicate(total)
    return loss / total, total


def one_hot(input: Value, num_classes: int = -1) -> Value:
    """F.one_hot of a DTensor with the result and the errors of plain tensors.

    For tensor subclasses, torch would compare instead, which preserves the memory order and accepts any value.
    """
    classes = math.inf if num_classes == -1 else num_classes
    with DisableTorchFunction():
        if not isinstance(input, Wrapper) or is_fake_mode_active():
            return torch.nn.functional.one_hot(input, num_classes).contiguous()
        wrong = torch.bitwise_or(input < 0, input >= classes).any()
        if input._spec.info.device_type != "cpu":
            torch._assert_async(stored_local(replicate(wrong)) == 0)  # does not synchronize
        elif wrong.item():
            upper_bound = "" if num_classes == -1 else f" and < {num_classes}"
            raise ArgumentError(
                f"one_hot got an invalid class on some rank with num_classes={num_classes}, "
                f"expected classes >= 0{upper_bound}: correct the input or num_classes"
            )
        return torch.nn.functional.one_hot(input, num_classes).contiguous()
