"""Batch norm. Its statistics run over everything but the channels, so in training a sharded batch needs
sums over the ranks half way: the op is decomposed then. Sharded by channel, or with statistics given
(evaluation), each rank is on its own and the op runs on the shards.

Most of these ops write the running statistics without their schema saying so. So the op itself runs only
where those need not move, and otherwise they are updated in place as the DTensors they are.
cudnn's and MIOpen's ops keep a reserve that only their own backward can read: they are always decomposed,
forward and backward. They need a GPU; the tests here reach the CPU's ops.
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

Three = tuple[Any, Any, Any]


# ---- on the shards ----


def _channel_row(specs: Sequence[DTensorSpec], outputs: Sequence[Value]) -> PlacementRow:
    """All by channel: inputs and gradients on dim 1, whatever has one value per channel on dim 0."""
    data = next(i for i, spec in enumerate(specs) if spec.ndim > 1)
    channels = specs[data].shape[CHANNEL]

    def place(shape: Sequence[int]) -> Placement:
        if len(shape) > 1:
            return Shard(CHANNEL)
        return Shard(0) if tuple(shape) == (channels,) else REPLICATE

    inputs = tuple(place(spec.shape) for spec in specs)
    results = tuple(REPLICATE if meta is None else place(meta.shape) for meta in outputs)
    return PlacementRow(inputs, results, nonempty=((data, CHANNEL),))


def _kept_dims(data: Any) -> list[int]:
    return [d for d in range(data.ndim) if d != CHANNEL]


def _trains(op: OpOverload, named: Mapping[str, Any]) -> bool:
    for name in ("training", "train", "update"):
        if name in named:
            return bool(named[name])
    return op not in (aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default)


FORWARD = ops_named(
    """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit.no_stats
    _native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update
    """
)
BACKWARD = (aten.native_batch_norm_backward.default, aten.batch_norm_backward.default)


@rule(*FORWARD)
def batch_norm(call: OpCall) -> Strategy:
    """(input [n, c, ...], weight?, bias?, running mean?, running var?, all [c]) -> (output, saved mean, saved
    inverse deviation, reserve?); the statistics saved are empty where they were given."""
    if call.inputs[0].ndim < 2:
        return Strategy([])
    _correct_saved(call)
    by_channel = _channel_row(call.inputs, call.outputs)
    if _trains(call.op, call.named()):
        # By channel on the mesh dims where the data is: nothing that is written moves.
        placed = [by_channel if p.is_shard() else replicated_row(call) for p in call.inputs[0].placements]
        return Strategy([], exact_placements=placements_by_tensor(placed), localize=lambda _: call.op)
    rows = [by_channel]
    rest = (REPLICATE,) * (len(call.inputs) - 1)
    rows += [
        PlacementRow((Shard(d), *rest), (Shard(d), *(REPLICATE,) * (len(call.outputs) - 1)))
        for d in _kept_dims(call.inputs[0])
    ]
    # No trial on meta tensors, whose kernels say other shapes.
    return Strategy(rows, localize=lambda _: call.op)


@rule(*BACKWARD)
def batch_norm_backward(call: OpCall) -> Strategy:
    """(grad [n, c, ...], input, weight?, statistics...) -> (grad of input, of weight, of bias)."""
    if call.inputs[0].ndim < 2:
        return Strategy([])
    rows = [_channel_row(call.inputs, call.outputs), *pending_rows(call, (0,))]
    if not _trains(call.op, call.named()):
        rest = (REPLICATE,) * (len(call.inputs) - 2)
        rows += [
            # An empty shard would end the process: the CPU kernel divides by its length.
            PlacementRow((Shard(d), Shard(d), *rest), (Shard(d), SUM, SUM), nonempty=((0, d),))
            for d in _kept_dims(call.inputs[0])
        ]
    return Strategy(rows)


def _correct_saved(call: OpCall) -> None:
    """The meta kernels say one float32 per channel, where the CPU's save nothing in evaluation, and in the
    parameters' dtype otherwise."""
    data, *parameters = call.inputs
    if data.info.device_type == "cpu":
        dtype = parameters[0].dtype if parameters else data.dtype
        kept = data.shape[CHANNEL] if _trains(call.op, call.named()) else 0
        saved = TensorMeta(torch.Size([kept]), (1,), dtype)
        call.outputs = (call.outputs[0], saved, saved, *call.outputs[3:])


# ---- decomposed ----


def _by_channel(data: Any, *running: Any) -> bool:
    """Whether, on every mesh dim, the data is whole or sharded by channel, and the running statistics likewise:
    then the op runs on the shards and moves none of them."""
    if not isinstance(data, Wrapper):
        return False
    present = [r for r in running if r is not None]
    if not all(isinstance(r, Wrapper) for r in present):
        return False
    for mesh_dim, placed in enumerate(data._spec.placements):
        own = {r._spec.placements[mesh_dim] for r in present}
        if placed == Shard(CHANNEL):
            # Evenly, so that the rule has no reason to move anything.
            if own - {Shard(0)} or data.shape[CHANNEL] % data._spec.info.mesh.size():
                return False
        elif not placed.is_replicate() or own - {REPLICATE}:
            return False
    return True


def _over_channels(statistic: Any, data: Any) -> Value:
    """[c] -> [1, c, 1, ...], to go with `data`."""
    return statistic.view([-1 if d == CHANNEL else 1 for d in range(data.ndim)])


def _normalised(
    data: Any, weight: Value, bias: Value, running: tuple[Any, Any], train: bool, momentum: float, eps: float
) -> Three:
    """(output, mean, inverse deviation); in training the running statistics are moved on, in place."""
    mean, inverse = _statistics(data, running, train, momentum, eps)
    output = (upcast(data) - _over_channels(mean, data)) * _over_channels(inverse, data)
    if weight is not None:
        output = output * _over_channels(upcast(weight), data)
    if bias is not None:
        output = output + _over_channels(upcast(bias), data)
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
    # Reduced once here: each of the uses below would reduce it again.
    var, mean = map(reduce_partials, torch.var_mean(upcast(data), _kept_dims(data), correction=0))
    count = data.numel() // data.shape[CHANNEL]
    for kept, new in ((running_mean, mean), (running_var, var * (count / max(count - 1, 1)))):
        if kept is not None:
            step = (new * momentum).to(kept.dtype)
            # A shard cannot become a term of the pending sum that the written tensor has to stay.
            pending = isinstance(kept, Wrapper) and kept._spec.has_partial()
            kept.mul_(1 - momentum).add_(replicate(step) if pending else step)
    return mean, (var + eps).rsqrt()


def _gradients(
    grad: Value, data: Any, weight: Value, mean: Any, inverse: Any, train: bool, mask: Sequence[bool]
) -> Three:
    """The three gradients, or None where `mask` asks for none."""
    dims = _kept_dims(data)
    grad_in, source = upcast(grad), upcast(data)
    scaled = (source - _over_channels(mean, data)) * _over_channels(inverse, data)
    of_bias, of_weight = (reduce_partials(t.sum(dims)) for t in (grad_in, grad_in * scaled))
    of_data = None
    if mask[0]:
        of_data = grad_in
        if train:
            count = data.numel() // data.shape[CHANNEL]
            common = _over_channels(of_bias, data) + scaled * _over_channels(of_weight, data)
            of_data = grad_in - common / count
        factor = inverse if weight is None else inverse * upcast(weight)
        of_data = (of_data * _over_channels(factor, data)).to(data.dtype)
    dtype = data.dtype if weight is None else weight.dtype
    return of_data, of_weight.to(dtype) if mask[1] else None, of_bias.to(dtype) if mask[2] else None


@decomposition(*FORWARD, aten.cudnn_batch_norm.default, aten.miopen_batch_norm.default, with_op=True)
def _forward(op: OpOverload, *args: object, **kwargs: object) -> Value:
    named = bound_arguments(op, args, kwargs)
    get: Any = named.get
    data, running = get("input"), (get("running_mean"), get("running_var"))
    train = _trains(op, named)
    if op in FORWARD and (not train or _by_channel(data, *running)):
        return NotImplemented
    momentum, eps = get("momentum", get("exponential_average_factor")), get("eps", get("epsilon"))
    results = _normalised(data, get("weight"), get("bias"), running, train, momentum or 0.0, eps)
    reserves = len(op._schema.returns) == 4
    return (*results, data.new_empty((0,), dtype=torch.uint8)) if reserves else results


@decomposition(*BACKWARD, aten.cudnn_batch_norm_backward.default, with_op=True)
@decomposition(aten.miopen_batch_norm_backward.default, with_op=True)
def _backward(op: OpOverload, *args: object, **kwargs: object) -> Value:
    named = bound_arguments(op, args, kwargs)
    get: Any = named.get
    grad = get("grad_output") if get("grad_output") is not None else get("grad_out")
    data, weight = get("input"), get("weight")
    train = op not in BACKWARD or _trains(op, named)
    if op in BACKWARD and (not train or (_by_channel(data) and _by_channel(grad))):
        return NotImplemented
    inverse = get("save_invstd") if get("save_invstd") is not None else get("save_var")
    mask = get("output_mask") or (True, True, True)
    return _gradients(grad, data, weight, get("save_mean"), inverse, train, mask)
