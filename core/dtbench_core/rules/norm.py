"""Ops that need one or more dims whole and treat the others as a batch: softmax, layer norm, sorts."""

from __future__ import annotations

from dtbench_core.placement import REPLICATE, Partial, Shard
from dtbench_core.rules.base import OpCall, Row, Strategy, along, aten, linear_rows, rule


def _batch_rows(call: OpCall, whole: int) -> list[Row]:
    dims = (d for d in range(call.inputs[0].ndim) if d != whole)
    return along(dims, len(call.inputs), len(call.outputs))


@rule(aten._softmax.default, aten._log_softmax.default)
@rule(aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
@rule(aten.sort.default, aten.topk.default, aten.cumprod.default)
def along_one_dim(call: OpCall) -> Strategy:
    return Strategy(_batch_rows(call, call.dim()))


@rule(aten.cumsum.default, aten.flip.default)
def linear_along(call: OpCall) -> Strategy:
    whole = call.dims("dims") if call.op is aten.flip.default else (call.dim(),)
    rows = along((d for d in range(call.inputs[0].ndim) if d not in whole), 1, 1)
    return Strategy([*rows, *linear_rows(call, 1)])


@rule(aten.native_layer_norm.default)
def native_layer_norm(call: OpCall) -> Strategy:
    """(input, weight?, bias?) -> (output, mean, rstd); weight and bias are whole."""
    batch = call.inputs[0].ndim - len(call["normalized_shape"])
    parameters = (REPLICATE,) * (len(call.inputs) - 1)
    return Strategy([Row((Shard(d), *parameters), (Shard(d),) * 3) for d in range(batch)])


@rule(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(call: OpCall) -> Strategy:
    """(grad, input, mean, rstd, weight?, bias?) -> (grad_input, grad_weight, grad_bias): the latter two
    are sums over the batch, so a sharded batch leaves them pending."""
    batch = call.inputs[0].ndim - len(call["normalized_shape"])
    parameters = (REPLICATE,) * (len(call.inputs) - 4)
    return Strategy(
        [Row((Shard(d),) * 4 + parameters, (Shard(d), Partial(), Partial())) for d in range(batch)]
    )
