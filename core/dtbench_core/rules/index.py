"""Lookups by index tensors: embedding, index_select, gather."""

from __future__ import annotations

from dtbench_core.placement import REPLICATE, Partial, Shard
from dtbench_core.rules.base import OpCall, Row, Strategy, aten, rule


@rule(aten.embedding.default)
def embedding(call: OpCall) -> Strategy:
    """(weight [rows, width], indices [...]) -> [..., width]."""
    ndim = call.inputs[1].ndim
    rows = [Row((Shard(1), REPLICATE), (Shard(ndim),))]
    rows += [Row((REPLICATE, Shard(d)), (Shard(d),)) for d in range(ndim)]
    return Strategy(rows)


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(call: OpCall) -> Strategy:
    """(grad [..., width], indices [...]) -> grad of the weight: a sum over the indices."""
    grad, indices = call.inputs
    rows = [Row((Shard(grad.ndim - 1), REPLICATE), (Shard(1),))]
    if not call["scale_grad_by_freq"]:  # frequencies are counted over all indices
        rows += [Row((Shard(d), Shard(d)), (Partial(),)) for d in range(indices.ndim)]
        rows.append(Row((Partial(), REPLICATE), (Partial(),)))
    return Strategy(rows)


@rule(aten.index_select.default)
def index_select(call: OpCall) -> Strategy:
    picked = call.dim()
    rows = [Row((Shard(d), REPLICATE), (Shard(d),)) for d in range(call.inputs[0].ndim) if d != picked]
    if call.inputs[0].ndim and call.inputs[1].ndim:
        rows.append(Row((REPLICATE, Shard(0)), (Shard(picked),)))
    return Strategy(rows)


@rule(aten.index_add.default)
def index_add(call: OpCall) -> Strategy:
    """(self, index, source): the rows added to are whole, and the sum is linear in self and source."""
    whole = call.dim()
    dims = [d for d in range(call.inputs[0].ndim) if d != whole]
    rows = [Row((Shard(d), REPLICATE, Shard(d)), (Shard(d),)) for d in dims]
    return Strategy(
        [*rows, *(Row((Partial(op), REPLICATE, Partial(op)), (Partial(op),)) for op in ("sum", "avg"))]
    )


@rule(aten.gather.default)
def gather(call: OpCall) -> Strategy:
    """A dim may be sharded in both if the index covers it whole."""
    picked = call.dim()
    source, index = call.inputs
    rows = [
        Row((Shard(d), Shard(d)), (Shard(d),))
        for d in range(source.ndim)
        if d != picked and source.shape[d] == index.shape[d]
    ]
    return Strategy([*rows, *(Row((REPLICATE, Shard(d)), (Shard(d),)) for d in range(index.ndim))])
