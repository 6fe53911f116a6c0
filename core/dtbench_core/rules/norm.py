"""Norms over the last dims or over groups of channels, weight norms, and distances.

Batch norm is in batch_norm.py, because its statistics are over the batch itself.
"""

from __future__ import annotations

import torch

from dtbench_core.layout.placement import Shard
from dtbench_core.op_types import Call, Value
from dtbench_core.rules.base import (
    OpCall,
    PlacedSpecs,
    PlacementRow,
    Strategy,
    aten,
    linear_rows,
    pending_ops,
    pending_rows,
    rule,
    shard_rows,
)
from dtbench_core.rules.labels import (
    SUM,
    broadcast_placements,
    free_labels,
    label_rows,
    same_leading_dims,
    splits_between_groups,
)
from dtbench_core.rules.pointwise import neutral_term, pointwise


@rule(aten.linalg_cross.default)
def cross(call: OpCall) -> Strategy:
    """Cross products of vectors of 3 along `dim`; the other dims broadcast."""
    meta = call.outputs[0]
    shape = meta.shape if meta is not None else ()
    dim = call.dim("dim", len(shape))
    return Strategy(
        [
            *(
                PlacementRow(broadcast_placements(call.inputs, d, shape), (Shard(d),))
                for d in range(len(shape))
                if d != dim
            ),
            *pending_rows(call, (0,), (1,)),
        ]
    )


# ---- over the last dims ----


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def native_layer_norm(call: OpCall) -> Strategy:
    """(input, weight?, bias?) -> (output, mean?, rstd). Weight and bias are replicated."""
    _correct_statistics_dtype(call)
    batch = free_labels(call.inputs[0].ndim - len(call["normalized_shape"]))
    return Strategy(label_rows(batch, [batch, *([""] * (len(call.inputs) - 1))], [batch] * len(call.outputs)))


def _correct_statistics_dtype(call: OpCall) -> None:
    """Corrects the dtype of mean and rstd in half precision on CPU.

    torch's meta kernels return the dtype of other devices. On CPU it is the input's dtype, or float32 if the weights
    are float32.
    """
    source = call.inputs[0]
    if (
        source.info.device_type != "cpu"
        or source.dtype not in (torch.float16, torch.bfloat16)
        or call.op is aten._fused_rms_norm.default
    ):
        return
    dtype = torch.float32 if any(spec.dtype is torch.float32 for spec in call.inputs[1:]) else source.dtype
    output, *statistics = call.outputs
    call.outputs = (output, *(meta and meta._replace(dtype=dtype) for meta in statistics))


@rule(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def native_layer_norm_backward(call: OpCall) -> Strategy:
    """(grad, input, mean?, rstd, weight?, bias?) -> (grad_input, grad_weight, grad_bias?).

    Gradients of weight and bias are sums over the batch, so a sharded batch leaves them pending. Linear in `grad`.
    """
    batch = free_labels(call.inputs[0].ndim - len(call["normalized_shape"]))
    activations = [batch] * (len(call.outputs) + 1)  # grad, input and the statistics
    parameters = [""] * (len(call.inputs) - len(activations))
    return Strategy(
        [
            *label_rows(batch, activations + parameters, [batch, *[""] * (len(call.outputs) - 1)], SUM),
            *pending_rows(call, (0,)),
        ]
    )


@rule(aten.add_.Scalar)
def add_number_in_place(call: OpCall) -> Strategy:
    """Adds a number to a Partial: to each term of an average, but to only one term of a sum. rms_norm needs this."""
    return Strategy(
        [*pointwise(call).rows, *linear_rows(call, 1)],
        localize=_add_on_first_rank if pending_ops(call, ["sum"]) else None,
    )


def _add_on_first_rank(placed: PlacedSpecs) -> Call | None:
    return None if neutral_term(placed.inputs[0]) is None else lambda local, *_: local


# ---- over groups of channels ----


@rule(aten.native_group_norm.default)
def native_group_norm(call: OpCall) -> Strategy:
    """(input [n, c, ...], weight? [c], bias? [c]) -> (output, mean [n, group], rstd [n, group])."""
    _correct_statistics_dtype(call)
    if not _sizes_match_input(call):
        return Strategy([])
    data = "nc" + "." * (call.inputs[0].ndim - 2)
    parameters = ["c"] * (len(call.inputs) - 1)
    return Strategy(
        label_rows(_shardable_labels(call), (data, *parameters), (data, "nc", "nc")),
        local_op=_with_local_sizes(call),
    )


@rule(aten.native_group_norm_backward.default)
def native_group_norm_backward(call: OpCall) -> Strategy:
    """(grad, input, mean, rstd, weight?) -> (grad_input, grad_weight [c], grad_bias [c])."""
    if call.outputs[0] is not None:  # the meta kernel returns the dtype of the statistics
        call.outputs = (call.outputs[0]._replace(dtype=call.inputs[1].dtype), *call.outputs[1:])
    if not _sizes_match_input(call):
        return Strategy([])
    data = "nc" + "." * (call.inputs[0].ndim - 2)
    parameters = ["c"] * (len(call.inputs) - 4)
    return Strategy(
        [
            *label_rows(
                _shardable_labels(call), (data, data, "nc", "nc", *parameters), (data, "c", "c"), SUM
            ),
            *pending_rows(call, (0,)),
        ],
        local_op=_with_local_sizes(call),
    )


def _sizes_match_input(call: OpCall) -> bool:
    """Whether the size arguments equal the sizes of the input's dims."""
    shape = call.inputs[0].shape
    return not call.kwargs and len(shape) >= 2 and (call["N"], call["C"]) == tuple(shape[:2])


def _shardable_labels(call: OpCall) -> str:
    return "nc" if splits_between_groups(call, call["group"]) else "n"


def _with_local_sizes(call: OpCall) -> Call:
    """Returns the op with N, C and the number of groups of the shard."""
    names = list(call.arguments())
    n, c, group = names.index("N"), names.index("C"), names.index("group")
    channels, groups, op = call["C"], call["group"], call.op

    def local_op(*args: Value) -> Value:
        local_args = list(args)
        local_args[n], local_args[c] = args[0].shape[:2]
        local_args[group] = groups * local_args[c] // channels if channels else groups
        # The kernel requires contiguous memory.
        local_args[0] = local_args[0].contiguous()
        return op(*local_args)

    return local_op


@rule(aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default)
def weight_norm(call: OpCall) -> Strategy:
    """(direction, length) -> (weight, norms). Norms are over all dims except `dim`, which both may shard.

    (grad, direction, length, norms) -> (grad of direction, of length) backward, linear in `grad`."""
    dim = call.dim()
    shapes = [spec.shape for spec in call.inputs] + [m.shape for m in call.outputs if m is not None]
    dim_matches = all(len(s) == len(shapes[0]) and s[dim] == shapes[0][dim] for s in shapes)
    return Strategy(
        [
            *shard_rows([dim] if dim_matches else (), len(call.inputs), len(call.outputs)),
            *(pending_rows(call, (0,)) if len(call.inputs) == 4 else ()),
        ]
    )


@rule(aten._cdist_forward.default, aten._cdist_backward.default)
def cdist(call: OpCall) -> Strategy:
    """(x1 [..., p, m], x2 [..., r, m]) -> distances [..., p, r]; leading dims may be sharded unless they broadcast.

    (grad [..., p, r], x1, x2, distances) -> gradient of x1 backward: a sum over r, linear in `grad`."""
    backward, batch = len(call.inputs) == 4, call.inputs[0].ndim - 2
    inputs, output = (("pr", "p.", "r.", "pr"), "p.") if backward else (("p.", "r."), "pr")
    lead = free_labels(batch, skip="pr")
    labels = lead + "pr" if same_leading_dims(call, batch) else ""
    return Strategy(
        [
            *label_rows(labels, [lead + dims for dims in inputs], [lead + output], SUM),
            *(pending_rows(call, (0,)) if backward else ()),
        ]
    )
