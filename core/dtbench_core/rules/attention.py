"""Scaled dot-product attention: batch and heads are independent, so both may be sharded.

The ops of CUDA (flash, memory-efficient, cuDNN) and of other accelerators follow their schemas and meta
kernels; the tests here reach the CPU's ops only. Their seeds and sequence lengths are replicated: with
dropout, which would draw other numbers on a shard than on the whole, nothing is sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dtbench_core.layout.placement import REPLICATE, Placement, Placements, Shard
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.rules.base import OpCall, Placed, Row, Strategy, aten, rule
from dtbench_core.rules.labels import SUM

BATCH, HEAD = 0, 1  # of query, key, value [batch, head, length, width]


def _dims(call: OpCall, query: DTensorSpec, *keys: DTensorSpec) -> list[int]:
    """Dims that may be sharded. Where several queries share a key (grouped heads), the heads are not: the
    shards of both would have to be cut at the same groups."""
    if call["dropout_p"] != 0.0 or any(spec.ndim != 4 for spec in (query, *keys)):
        return []
    if any(key.shape[BATCH] != query.shape[BATCH] for key in keys):
        return []
    return [BATCH, HEAD] if all(key.shape[HEAD] == query.shape[HEAD] for key in keys) else [BATCH]


def _along(spec: DTensorSpec, like: DTensorSpec, dim: int) -> Placement:
    """The mask's placement when `dim` of `like` is sharded: along with it, where it has the dim."""
    own = dim - (4 - spec.ndim)
    length = like.shape[dim]
    return Shard(own) if own >= 0 and spec.shape[own] == length and length > 1 else REPLICATE


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_for_cpu(call: OpCall) -> Strategy:
    """(q, k, v, mask?) -> (output, logsumexp [batch, head, length])."""
    output, logsumexp = call.outputs
    if call.inputs[0].dtype == torch.float64 and logsumexp is not None:
        # torch 2.11's meta kernel says float32, which the CPU kernel keeps for smaller dtypes only.
        call.outputs = (output, logsumexp._replace(dtype=torch.float64))
    query, key, value, *mask = call.inputs
    rows = [
        Row((*(Shard(d),) * 3, *(_along(m, query, d) for m in mask)), (Shard(d),) * 2)
        for d in _dims(call, query, key, value)
    ]
    return Strategy(rows, localize=_nothing_of_nothing, any_lengths=True)


def _nothing_of_nothing(placed: Placed) -> Callable[..., Any] | None:
    """On an empty shard the CPU kernel would end the process: it divides by the batch and the heads. (Without
    dropout the op draws nothing, so no rank falls out of step.)"""
    output, logsumexp = placed.outputs
    assert output is not None and logsumexp is not None
    if 0 not in output.local_shape:
        return None

    def empty(query: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return query.new_empty(output.local_shape), query.new_empty(
            logsumexp.local_shape, dtype=logsumexp.dtype
        )

    return empty


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_for_cpu_backward(call: OpCall) -> Strategy:
    """(grad, q, k, v, output, logsumexp, mask?) -> (grad_q, grad_k, grad_v)."""
    _, query, key, value, _, _, *mask = call.inputs
    rows = [
        Row((*(Shard(d),) * 6, *(_along(m, query, d) for m in mask)), (Shard(d),) * 3)
        for d in _dims(call, query, key, value)
    ]
    return Strategy(rows)


# ---- CUDA and other accelerators ----


@rule(
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_fused_attention_overrideable.default,
)
def on_device(call: OpCall) -> Strategy:
    """(q, k, v, bias?) -> (output, logsumexp [batch, head, ...], sequence lengths, seeds, debug mask...)."""
    query, key, value, *bias = call.inputs
    rest = (REPLICATE,) * (len(call.outputs) - 2)
    debugs = "return_debug_mask" in _names(call) and call["return_debug_mask"]
    rows = []
    for dim in [] if debugs else _dims(call, query, key, value):
        inputs = (*(Shard(dim),) * 3, *(_along(b, query, dim) for b in bias))
        rows.append(Row(inputs, (Shard(dim), Shard(dim), *rest), nonempty=((0, dim),)))
    return Strategy(rows)


@rule(
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
)
def on_device_backward(call: OpCall) -> Strategy:
    """(grad, q, k, v, bias?, output, logsumexp, lengths, seeds...) -> (grad_q, grad_k, grad_v, grad_bias?).

    The order differs from op to op, so arguments are told by name. The gradient of a bias that is not
    sharded along is a sum over the ranks.
    """
    query, bias = call["query"], None
    sharded = [call[n] for n in _names(call) if n in _BATCHED]
    if "attn_bias" in _names(call):
        bias = call["attn_bias"]
    rows = []
    for dim in _dims(call, query, call["key"], call["value"]):
        inputs: Placements = tuple(
            Shard(dim)
            if any(spec is s for s in sharded)
            else _along(spec, query, dim)
            if spec is bias
            else REPLICATE
            for spec in call.inputs
        )
        grads: list[Placement] = [Shard(dim)] * 3
        if len(call.outputs) > 3:
            along = REPLICATE if bias is None else _along(bias, query, dim)
            grads.append(along if along.is_shard() else SUM)
        rows.append(Row(inputs, tuple(grads), nonempty=((0, dim),)))
    return Strategy(rows)


_BATCHED = {"grad_out", "grad_out_", "query", "key", "value", "out", "logsumexp"}


def _names(call: OpCall) -> list[str]:
    return [argument.name for argument in call.op._schema.arguments]
