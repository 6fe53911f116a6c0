"""An Embedding sharded by rows: each rank looks up the rows it holds, and gets the gradient of these alone.

The op of torch gives the gradient of the whole table, of which every rank would keep a part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from dtbench_core.layout.placement import REPLICATE, Shard
from dtbench_core.op_types import Ctx
from dtbench_core.rules.base import OpCall, PlacedSpecs, PlacementRow, Strategy, aten, rule
from dtbench_core.torch_compat import new_op

_backward = new_op(
    "embedding_rows_backward(Tensor grad, Tensor indices, int rows, int padding_idx) -> Tensor",
    lambda grad, indices, rows, padding: aten.embedding_dense_backward(grad, indices, rows, padding, False),
)


@rule(_backward)
def embedding_rows_backward(call: OpCall) -> Strategy:
    """(grad [..., width], indices [...]) -> gradient of the weight [rows, width], by rows."""
    return Strategy([PlacementRow((REPLICATE, REPLICATE), (Shard(0),))], localize=_own_rows)


def _own_rows(placed: PlacedSpecs) -> Callable[..., Tensor]:
    (spec,) = placed.outputs
    assert spec is not None
    count, first = spec.local_shape[0], spec.local_offset[0]

    def run(grad: Tensor, indices: Tensor, rows: int, padding: int) -> Tensor:
        own = indices - first
        # What is for the rows of others goes to one row more, which is cut off.
        own = torch.where((own >= 0) & (own < count), own, count)
        mine = padding - first if first <= padding < first + count else -1
        gradient: Tensor = aten.embedding_dense_backward(grad, own, count + 1, mine, False)
        return gradient[:count]

    return run


class EmbeddingRows(torch.autograd.Function):
    """(weight [rows, width] by rows, indices [...], padding_idx or -1) -> [..., width], a pending sum."""

    @staticmethod
    def forward(ctx: Ctx, weight: Any, indices: Any, padding: int) -> Any:
        ctx.save_for_backward(indices)
        ctx.rows, ctx.padding, ctx.placements = weight._spec.shape[0], padding, weight._spec.placements
        return aten.embedding.default(weight, indices, padding)

    @staticmethod
    def backward(ctx: Ctx, grad: Any) -> tuple[Any, None, None]:
        (indices,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # to be differentiated again
            whole = aten.embedding_dense_backward(grad, indices, ctx.rows, ctx.padding, False)
            return whole.redistribute(placements=ctx.placements), None, None
        return _backward(grad, indices, ctx.rows, ctx.padding), None, None


def look_up_rows(module: nn.Embedding, index: Tensor) -> Tensor:
    """The forward of an Embedding sharded by rows: [...] -> [..., width], a pending sum.

    An index outside the whole table fails on every rank, as it would on one device.
    """
    padding = -1 if module.padding_idx is None else module.padding_idx
    return cast("Tensor", EmbeddingRows.apply(module.weight, index, padding))
