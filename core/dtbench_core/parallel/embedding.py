"""An Embedding sharded by rows: each rank looks up the rows it holds, and computes the gradient of only these rows.

torch's op computes the gradient of the whole table, of which each rank would then keep a part.
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
    """(grad [..., width], indices [...]) -> gradient of the weight [rows, width], sharded by rows."""
    return Strategy([PlacementRow((REPLICATE, REPLICATE), (Shard(0),))], localize=_gradient_of_local_rows)


def _gradient_of_local_rows(placed: PlacedSpecs) -> Callable[..., Tensor]:
    (spec,) = placed.outputs
    assert spec is not None
    count, first = spec.local_shape[0], spec.local_offset[0]

    def run(grad: Tensor, indices: Tensor, rows: int, padding: int) -> Tensor:
        local_indices = indices - first
        # Gradients of rows on other ranks are added to an extra row, which is dropped.
        local_indices = torch.where((local_indices >= 0) & (local_indices < count), local_indices, count)
        local_padding = padding - first if first <= padding < first + count else -1
        gradient: Tensor = aten.embedding_dense_backward(grad, local_indices, count + 1, local_padding, False)
        return gradient[:count]

    return run


class EmbeddingRows(torch.autograd.Function):
    """(weight [rows, width] sharded by rows, indices [...], padding_idx or -1) -> [..., width], a pending sum."""

    @staticmethod
    def forward(ctx: Ctx, weight: Any, indices: Any, padding: int) -> Any:
        ctx.save_for_backward(indices)
        ctx.rows, ctx.padding, ctx.placements = weight._spec.shape[0], padding, weight._spec.placements
        return aten.embedding.default(weight, indices, padding)

    @staticmethod
    def backward(ctx: Ctx, grad: Any) -> tuple[Any, None, None]:
        (indices,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated again
            gradient = aten.embedding_dense_backward(grad, indices, ctx.rows, ctx.padding, False)
            return gradient.redistribute(placements=ctx.placements), None, None
        return _backward(grad, indices, ctx.rows, ctx.padding), None, None


def look_up_rows(module: nn.Embedding, index: Tensor) -> Tensor:
    """Replaces the forward of an Embedding sharded by rows: [...] -> [..., width], a pending sum.

    An index outside the whole table is an error on every rank, as it would be on one device.
    """
    padding = -1 if module.padding_idx is None else module.padding_idx
    return cast("Tensor", EmbeddingRows.apply(module.weight, index, padding))
