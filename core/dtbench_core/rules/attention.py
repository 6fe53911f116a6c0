"""Scaled dot-product attention: batch and heads are independent, so both may be sharded."""

from __future__ import annotations

import torch

from dtbench_core.placement import REPLICATE, Placements, Shard
from dtbench_core.rules.base import OpCall, Row, Strategy, aten, rule

BATCH, HEAD = 0, 1  # of query, key, value [batch, head, length, width]


def _dims(call: OpCall, query: int, key: int) -> list[int]:
    """Dims that may be sharded: heads only where queries and keys have equally many. Dropout would
    draw other numbers on a shard than on the whole."""
    if call["dropout_p"] != 0.0:
        return []
    equal = call.inputs[query].shape[HEAD] == call.inputs[key].shape[HEAD]
    return [BATCH, HEAD] if equal else [BATCH]


def _mask(call: OpCall, dim: int, first: int) -> Placements:
    """The mask (whatever inputs follow the fixed ones) is sharded along where it has the dim."""
    length = call.inputs[0].shape[dim]
    return tuple(
        Shard(dim) if spec.ndim == 4 and spec.shape[dim] == length and length > 1 else REPLICATE
        for spec in call.inputs[first:]
    )


@rule(aten._scaled_dot_product_flash_attention_for_cpu.default)
def flash_for_cpu(call: OpCall) -> Strategy:
    """(q, k, v, mask?) -> (output, logsumexp [batch, head, length])."""
    output, logsumexp = call.outputs
    if call.inputs[0].dtype == torch.float64 and logsumexp is not None:
        # torch 2.11's meta kernel says float32, which the CPU kernel keeps for smaller dtypes only.
        call.outputs = (output, logsumexp._replace(dtype=torch.float64))
    rows = [Row((*(Shard(d),) * 3, *_mask(call, d, 3)), (Shard(d),) * 2) for d in _dims(call, 0, 1)]
    return Strategy(rows)


@rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default)
def flash_for_cpu_backward(call: OpCall) -> Strategy:
    """(grad, q, k, v, output, logsumexp, mask?) -> (grad_q, grad_k, grad_v)."""
    rows = [Row((*(Shard(d),) * 6, *_mask(call, d, 6)), (Shard(d),) * 3) for d in _dims(call, 1, 2)]
    return Strategy(rows)
