"""Batch norm.

In training, its statistics are over all dims but the channels. A sharded batch needs sums over the ranks in between, so
the op is decomposed. If the tensors are sharded by channel, or in evaluation, each rank runs the op on its shards.

Most of these ops write the running statistics although their schema does not say so. Therefore the op itself runs only
if the running statistics need not be redistributed. Otherwise the decomposition updates them in place as DTensors.

The ops of cuDNN and MIOpen return a reserve that only their own backward can read. They are always decomposed, in the
forward and in the backward. They need a GPU; the tests cover the CPU ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from dtbench_core.layout.placement import REPLICATE, Placement, Shard
from dtbench_core.layout.spec import DTensorSpec, TensorMeta
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Value
from dtbench_core.rules.base import (
    OpCall,
    PlacementRow,
    Strategy,
    aten,
    bound_arguments,
    decomposition,
    ops_named,
    pending_rows,
    placements_by_tensor,
    replicated_row,
    rule,
)
from dtbench_core.rules.labels import SUM, reduce_partials, replicate, upcast

CHANNEL = 1  # of the input [n, c, ...]

ThreeTensors = tuple[Any, Any, Any]


# ---- on shards ----


def _channel_row(specs: Sequence[DTensorSpec], outputs: Sequence[Value]) -> PlacementRow:
    """Returns the row with all tensors sharded by channel: on dim 1, or on dim 0 if they have one value per channel."""
    data = next(i for i, spec in enumerate(specs) if spec.ndim > 1)
    channels = specs[data].shape[CHANNEL]

    def place(shape: Sequence[int]) -> Placement:
        if len(shape) > 1:
            return Shard(CHANNEL)
        return Shard(0) if tuple(shape) == (channels,) else REPLICATE

    return PlacementRow(
        tuple(place(spec.shape) for spec in specs),
        tuple(REPLICATE if meta is None else place(meta.shape) for meta in outputs),
        nonempty=((data, CHANNEL),),
    )


def _reduced_dims(data: Any) -> list[int]:
    return [d for d in range(data.ndim) if d != CHANNEL]


def _is_training(op: OpOverload, arguments: Mapping[str, Any]) -> bool:
    evaluating = (aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default)
    flags = [arguments[name] for name in ("training", "train", "update") if name in arguments]
    return bool(flags[0]) if flags else op not in evaluating


FORWARD = ops_named(
    """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats
    _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update
    """
)
BACKWARD = (aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)


@rule(*FORWARD)
def batch_norm(call: OpCall) -> Strategy:
    """(input [n, c, ...], weight?, bias?, running mean?, running var?, all [c]) -> (output, saved mean, saved inverse
    standard deviation, reserve?).

    In evaluation, the saved statistics are empty.
    """
    if call.inputs[0].ndim < 2:
        return Strategy([])
    _correct_saved_metadata(call)
    by_channel = _channel_row(call.inputs, call.outputs)
    if _is_training(call.op, call.arguments()):
        # Shard by channel on the mesh dims where the data is sharded by channel: then no written tensor moves.
        return Strategy(
            [],
            exact_placements=placements_by_tensor(
                [by_channel if p.is_shard() else replicated_row(call) for p in call.inputs[0].placements]
            ),
            localize=lambda _: call.op,
        )
    parameters = (REPLICATE,) * (len(call.inputs) - 1)
    rows = [
        PlacementRow((Shard(d), *parameters), (Shard(d), *(REPLICATE,) * (len(call.outputs) - 1)))
        for d in _reduced_dims(call.inputs[0])
    ]
    # localize instead of local_op: it avoids the check on meta tensors, whose kernels return other shapes.
    return Strategy([by_channel, *rows], localize=lambda _: call.op)


@rule(*BACKWARD)
def batch_norm_backward(call: OpCall) -> Strategy:
    """(grad [n, c, ...], input, weight?, statistics...) -> (grad of input, of weight, of bias)."""
    if call.inputs[0].ndim < 2:
        return Strategy([])
    rows = [_channel_row(call.inputs, call.outputs), *pending_rows(call, (0,))]
    if not _is_training(call.op, call.arguments()):
        parameters = (REPLICATE,) * (len(call.inputs) - 2)
        rows += [
            # The CPU kernel crashes on an empty shard, in a division by its length.
            PlacementRow((Shard(d), Shard(d), *parameters), (Shard(d), SUM, SUM), nonempty=((0, d),))
            for d in _reduced_dims(call.inputs[0])
        ]
    return Strategy(rows)


def _correct_saved_metadata(call: OpCall) -> None:
    """Corrects the metadata of the saved statistics: meta kernels return one float32 per channel.

    The CPU kernels save nothing in evaluation, and otherwise use the dtype of the parameters.
    """
    data, *parameters = call.inputs
    if data.info.device_type == "cpu":
        dtype = parameters[0].dtype if parameters else data.dtype
        saved_channels = data.shape[CHANNEL] if _is_training(call.op, call.arguments()) else 0
        saved = TensorMeta(torch.Size([saved_channels]), (1,), dtype)
        call.outputs = (call.outputs[0], saved, saved, *call.outputs[3:])


# ---- decomposed ----


def _is_sharded_by_channel(data: Any, *running: Any) -> bool:
    """Whether on each mesh dim the data and the running statistics are all replicated or all sharded by channel.

    Then the op can run on the shards without moving any tensor.
    """
    present = [r for r in running if r is not None]
    if not all(isinstance(tensor, Wrapper) for tensor in (data, *present)):
        return False
    for mesh_dim, placed in enumerate(data._spec.placements):
        running_placements = {r._spec.placements[mesh_dim] for r in present}
        if placed == Shard(CHANNEL):
            # Only even shards, so that the rule has no reason to move a tensor.
            if running_placements - {Shard(0)} or data.shape[CHANNEL] % data._spec.info.mesh.size():
                return False
        elif not placed.is_replicate() or running_placements - {REPLICATE}:
            return False
    return True


def _broadcast_view(statistic: Any, data: Any) -> Value:
    """Views a statistic [c] as [1, c, 1, ...], to broadcast with `data`."""
    return statistic.view([-1 if d == CHANNEL else 1 for d in range(data.ndim)])


def _normalize(
    data: Any, weight: Value, bias: Value, running: tuple[Any, Any], train: bool, momentum: float, eps: float
) -> ThreeTensors:
    """Returns (output, mean, inverse standard deviation). In training it also updates the running statistics."""
    mean, inverse = _statistics(data, running, train, momentum, eps)
    output = (upcast(data) - _broadcast_view(mean, data)) * _broadcast_view(inverse, data)
    if weight is not None:
        output = output * _broadcast_view(upcast(weight), data)
    if bias is not None:
        output = output + _broadcast_view(upcast(bias), data)
    parameters = [t for t in (weight, bias, *running) if t is not None]
    saved_dtype = mean.dtype
    if data.device.type == "cpu":
        saved_dtype = parameters[0].dtype if parameters else data.dtype
    if not train:
        empty = data.new_empty((0,), dtype=saved_dtype)
        return output.to(data.dtype), empty, empty.clone()
    return output.to(data.dtype), mean.to(saved_dtype), inverse.to(saved_dtype)


def _statistics(
    data: Any, running: tuple[Any, Any], train: bool, momentum: float, eps: float
) -> tuple[Any, Any]:
    running_mean, running_var = running
    if not train:
        return upcast(running_mean), (upcast(running_var) + eps).rsqrt()
    # Reduced here, because each of the uses below would reduce it again.
    var, mean = map(reduce_partials, torch.var_mean(upcast(data), _reduced_dims(data), correction=0))
    count = data.numel() // data.shape[CHANNEL]
    for running_statistic, batch_statistic in (
        (running_mean, mean),
        (running_var, var * (count / max(count - 1, 1))),
    ):
        if running_statistic is not None:
            step = (batch_statistic * momentum).to(running_statistic.dtype)
            # The running statistic must stay a pending sum, and a shard cannot become a term of it.
            pending = isinstance(running_statistic, Wrapper) and running_statistic._spec.has_partial()
            running_statistic.mul_(1 - momentum).add_(replicate(step) if pending else step)
    return mean, (var + eps).rsqrt()


def _gradients(
    grad: Value, data: Any, weight: Value, mean: Any, inverse: Any, train: bool, mask: Sequence[bool]
) -> ThreeTensors:
    """Returns the three gradients, with None where `mask` does not request one."""
    dims = _reduced_dims(data)
    grad_in, source = upcast(grad), upcast(data)
    scaled = (source - _broadcast_view(mean, data)) * _broadcast_view(inverse, data)
    bias_grad, weight_grad = (reduce_partials(t.sum(dims)) for t in (grad_in, grad_in * scaled))
    data_grad = None
    if mask[0]:
        data_grad = grad_in
        if train:
            count = data.numel() // data.shape[CHANNEL]
            common = _broadcast_view(bias_grad, data) + scaled * _broadcast_view(weight_grad, data)
            data_grad = grad_in - common / count
        factor = inverse if weight is None else inverse * upcast(weight)
        data_grad = (data_grad * _broadcast_view(factor, data)).to(data.dtype)
    dtype = data.dtype if weight is None else weight.dtype
    return data_grad, weight_grad.to(dtype) if mask[1] else None, bias_grad.to(dtype) if mask[2] else None


@decomposition(*FORWARD, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default, with_op=True)
def _forward(op: OpOverload, *args: object, **kwargs: object) -> Value:
    arguments = bound_arguments(op, args, kwargs)
    get: Any = arguments.get
    data, running = get("input"), (get("running_mean"), get("running_var"))
    train = _is_training(op, arguments)
    if op in FORWARD and (not train or _is_sharded_by_channel(data, *running)):
        return NotImplemented
    momentum, eps = get("momentum", get("exponential_average_factor")), get("eps", get("epsilon"))
    results = _normalize(data, get("weight"), get("bias"), running, train, momentum or 0.0, eps)
    return (*results, data.new_empty((0,), dtype=torch.uint8)) if len(op._schema.returns) == 4 else results


@decomposition(*BACKWARD, aten.cudnn_batch_norm_backward.default, with_op=True)
@decomposition(aten.miopen_batch_norm_backward.default, with_op=True)
def _backward(op: OpOverload, *args: object, **kwargs: object) -> Value:
    arguments = bound_arguments(op, args, kwargs)
    get: Any = arguments.get
    grad = get("grad_output") if get("grad_output") is not None else get("grad_out")
    data, weight = get("input"), get("weight")
    train = op not in BACKWARD or _is_training(op, arguments)
    if op in BACKWARD and (not train or (_is_sharded_by_channel(data) and _is_sharded_by_channel(grad))):
        return NotImplemented
    inverse = get("save_invstd") if get("save_invstd") is not None else get("save_var")
    return _gradients(
        grad, data, weight, get("save_mean"), inverse, train, get("output_mask") or (True, True, True)
    )
