"""Scaled dot-product attention: batch and heads are independent, so both may be sharded.

The rules for the ops of CUDA (flash, memory-efficient, cuDNN) and of other accelerators are derived from their schemas
and meta kernels; the tests cover only the CPU op. Seeds and sequence lengths stay replicated. With dropout nothing is
sharded, because a shard would draw other random numbers than the global tensor.
"""

from __future__ import annotations

import torch

from dtbench_core.layout.placement import REPLICATE, Placement, Placements, Shard
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.op_types import Call
from dtbench_core.rules.base import OpCall, PlacedSpecs, PlacementRow, Strategy, aten, ops_named, rule
from dtbench_core.rules.labels import SUM, broadcast_placement

BATCH, HEAD = 0, 1  # of query, key, value [batch, head, length, width]


def _shardable_dims(call: OpCall, query: DTensorSpec, *keys: DTensorSpec) -> list[int]:
    """Returns the dims that may be sharded.

    With grouped heads, where several queries share a key, heads are not sharded: the shards of queries and keys would
    have to be cut at the same groups.
    """
    if (
        call["dropout_p"] != 0.0
        or any(spec.ndim != 4 for spec in (query, *keys))
        or any(key.shape[BATCH] != query.shape[BATCH] for key in keys)
    ):
        return []
    return [BATCH, HEAD] if all(key.shape[HEAD] == query.shape[HEAD] for key in keys) else [BATCH]


FOR_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
OPS = """
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention
    _scaled_dot_product_fused_attention_overrideable
"""
# Arguments of the backward ops that have batch and head dims.
BATCHED = ("grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp")


@rule(*ops_named(OPS))
def attention(call: OpCall) -> Strategy:
    """(q, k, v, mask?) -> (output, logsumexp [batch, head, ...], sequence lengths, seeds, debug mask...)."""
    for_cpu, (output, logsumexp, *replicated_outputs) = call.op is FOR_CPU, call.outputs
    if for_cpu and call.inputs[0].dtype == torch.float64 and logsumexp is not None:
        # torch 2.11's meta kernel returns float32, but the CPU kernel does so only for dtypes below float64.
        call.outputs = (output, logsumexp._replace(dtype=torch.float64))
    query, key, value, *mask = call.inputs
    return Strategy(
        [
            PlacementRow(
                (*(Shard(d),) * 3, *(broadcast_placement(m, d, query.shape) for m in mask)),
                (*(Shard(d),) * 2, *(REPLICATE,) * len(replicated_outputs)),
                nonempty=() if for_cpu else ((0, d),),
            )
            for d in (
                [] if call.arguments().get("return_debug_mask") else _shardable_dims(call, query, key, value)
            )
        ],
        localize=_skip_empty_shard if for_cpu else None,
        any_lengths=for_cpu,
    )


def _skip_empty_shard(placed: PlacedSpecs) -> Call | None:
    """Replaces the op on empty shards, where the CPU kernel crashes in a division by the batch or head size.

    The ranks still draw the same random numbers, since the op is only sharded without dropout.
    """
    output, logsumexp = placed.outputs
    assert output is not None and logsumexp is not None
    if 0 not in output.local_shape:
        return None

    def empty(query: torch.Tensor, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            query.new_empty(output.local_shape),
            query.new_empty(logsumexp.local_shape, dtype=logsumexp.dtype),
        )

    return empty


@rule(*ops_named(OPS, "_backward"))
def attention_backward(call: OpCall) -> Strategy:
    """(grad, q, k, v, mask?, output, logsumexp, lengths, seeds...) -> (grad_q, grad_k, grad_v, grad_mask?).

    Arguments are found by name because their order differs between ops. If the sharded dim of the mask is broadcast,
    its gradient is a sum over the ranks.
    """
    arguments = call.arguments()
    query, mask = arguments["query"], arguments.get("attn_bias", arguments.get("attn_mask"))
    sharded = [arguments[name] for name in BATCHED if name in arguments]
    nonempty = "for_cpu" not in call.op._schema.name
    rows = []
    for dim in _shardable_dims(call, query, arguments["key"], arguments["value"]):
        inputs: Placements = tuple(
            Shard(dim)
            if any(spec is s for s in sharded)
            else broadcast_placement(spec, dim, query.shape)
            if spec is mask
            else REPLICATE
            for spec in call.inputs
        )
        grads: list[Placement] = [Shard(dim)] * 3
        if len(call.outputs) > 3:
            along = REPLICATE if mask is None else broadcast_placement(mask, dim, query.shape)
            grads.append(along if along.is_shard() else SUM)
        rows.append(PlacementRow(inputs, tuple(grads), nonempty=((0, dim),) if nonempty else ()))
    return Strategy(rows)
