"""Ops with index tensors: lookups (index, gather, embedding) and writes (index_put, scatter).

A dim that no index refers to is a batch dim and may be sharded. A lookup may also shard the indices if the indexed
tensor is replicated. Ops that add up entries may also shard the entries; each rank then adds its own to a pending sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtbench_core.errors import NoRuleError
from dtbench_core.layout.placement import REDUCE_OPS, REPLICATE, Shard
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.op_types import Value
from dtbench_core.rules.base import (
    OpCall,
    PlacedSpecs,
    PlacementRow,
    Strategy,
    aten,
    decomposition,
    pending_rows,
    rule,
    shard_rows_except,
)
from dtbench_core.rules.labels import SUM, broadcast_placement, free_labels, label_rows
from dtbench_core.torch_compat import is_fake_mode_active

SCATTER_ADD = (aten.scatter_add.default, aten.scatter_add_.default)
INTEGER = (torch.int8, torch.int16, torch.int32, torch.int64)


@decomposition(aten._sparse_coo_tensor_with_dims_and_tensors.default)
def sparse(*_: object, **__: object) -> Value:
    raise NoRuleError(
        "got a sparse tensor of DTensors, such as the gradient of an embedding with sparse=True, expected a dense one: "
        "set sparse=False; the gradient is then as large as the rank's part of the table"
    )


@rule(aten.embedding.default)
def embedding(call: OpCall) -> Strategy:
    """(weight [rows, width], indices [...]) -> [..., width].

    If rows are sharded, each rank looks up its own rows and returns 0 for the others. The result is a pending sum.
    """
    lead = free_labels(call.inputs[1].ndim, skip="rw")
    return Strategy(
        [
            *label_rows(f"w{lead}r", ("rw", lead), (lead + "w",), SUM),
            *pending_rows(call, (0,), ops=REDUCE_OPS),
        ],
        localize=_lookup,
        any_lengths=True,
    )


def _lookup(placed: PlacedSpecs) -> Callable[..., torch.Tensor] | None:
    weight = placed.inputs[0]
    count, local_rows, first = weight.shape[0], weight.local_shape[0], weight.local_offset[0]
    if not any(p.is_shard(0) for p in weight.placements):
        return None

    def run(local: torch.Tensor, indices: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        valid = ((indices >= 0) & (indices < count)).all()
        if indices.device.type == "cpu" and not is_fake_mode_active() and not valid:
            raise IndexError(
                f"embedding got indices in [{indices.min().item()}, {indices.max().item()}], expected them in "
                f"[0, {count}), the rows of the weight: correct the indices or enlarge the embedding"
            )
        torch._assert_async(valid)  # does not synchronize on an accelerator, and works in a graph
        if local_rows == 0:
            return local.new_zeros((*indices.shape, local.shape[1]))
        is_local = (indices >= first) & (indices < first + local_rows)
        result: torch.Tensor = aten.embedding(local, torch.where(is_local, indices - first, 0))
        return result.masked_fill_(~is_local.unsqueeze(-1), 0)

    return run


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(call: OpCall) -> Strategy:
    """(grad [..., width], indices [...]) -> gradient of the weight, a sum over the indices."""
    lead = free_labels(call.inputs[1].ndim, skip="rw")
    # With scale_grad_by_freq, frequencies count all indices, so the indices must not be sharded.
    return Strategy(
        [
            *label_rows("w" if call["scale_grad_by_freq"] else "w" + lead, (lead + "w", lead), ("rw",), SUM),
            *pending_rows(call, (0,)),
        ]
    )


# ---- x[i, j] and x[i, j] = y ----


def _index_layout(call: OpCall) -> tuple[list[int], list[DTensorSpec], torch.Size, int]:
    """Returns (indexed dims, specs of their indices, broadcast shape of the indices, its first dim in the result)."""
    listed = [(dim, index) for dim, index in enumerate(call["indices"]) if index is not None]
    dims = [dim for dim, _ in listed]
    return (
        dims,
        [index for _, index in listed],
        torch.broadcast_shapes(*(index.shape for _, index in listed)),
        dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0,
    )


def _batch_dims(call: OpCall, dims: list[int], shape: torch.Size, start: int) -> dict[int, int]:
    """Returns a map from the dims of self without index to dims of x[indices]."""
    return {
        d: i + (len(shape) if i >= start else 0)
        for i, d in enumerate(d for d in range(call.inputs[0].ndim) if d not in dims)
    }


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: OpCall) -> Strategy:
    if not all(spec.dtype in INTEGER for spec in call.inputs[1:]) or len(call.inputs) == 1:
        return Strategy([])  # masks: the shape of the result depends on their values
    dims, indices, shape, start = _index_layout(call)
    rows = [
        PlacementRow((Shard(d), *(REPLICATE,) * len(indices)), (Shard(out),))
        for d, out in _batch_dims(call, dims, shape, start).items()
    ]
    rows += [
        PlacementRow(
            (REPLICATE, *(broadcast_placement(i, dim, shape) for i in indices)), (Shard(start + dim),)
        )
        for dim in range(len(shape))
    ]
    return Strategy([*rows, *pending_rows(call, (0,), ops=REDUCE_OPS)])


@rule(aten.index_put.default, aten.index_put_.default, aten._unsafe_index_put.default)
@rule(aten._index_put_impl_.default)
def index_put(call: OpCall) -> Strategy:
    """(self, indices..., values): the values broadcast to the shape of self[indices]."""
    values = call.inputs[-1]
    if len(call.inputs) == 2:
        return Strategy([])  # no indices
    if any(spec.dtype not in INTEGER for spec in call.inputs[1:-1]):
        return Strategy(_mask_rows(call))
    dims, indices, shape, start = _index_layout(call)
    batch_dims = _batch_dims(call, dims, shape, start)
    result = [call.inputs[0].shape[d] for d in batch_dims]
    values_shape = torch.Size((*result[:start], *shape, *result[start:]))
    rows = [
        PlacementRow(
            (Shard(d), *(REPLICATE,) * len(indices), broadcast_placement(values, out, values_shape)),
            (Shard(d),),
        )
        for d, out in batch_dims.items()
    ]
    if call["accumulate"]:
        rows += pending_rows(call, (0, len(call.inputs) - 1))
        for dim in range(len(shape)):
            rows.append(
                PlacementRow(
                    (
                        SUM,
                        *(broadcast_placement(i, dim, shape) for i in indices),
                        broadcast_placement(values, start + dim, values_shape),
                    ),
                    (SUM,),
                )
            )
    return Strategy(rows)


def _mask_rows(call: OpCall) -> list[PlacementRow]:
    """Rows for x[mask] = value with a single value: elementwise, where the mask covers the leading dims of x."""
    self, mask, values = call.inputs[0], call.inputs[1], call.inputs[-1]
    if len(call.inputs) != 3 or values.shape.numel() != 1 or call["indices"][0] is None:
        return []
    return [
        PlacementRow((Shard(d), Shard(d) if d < mask.ndim else REPLICATE, REPLICATE), (Shard(d),))
        for d in range(self.ndim)
    ]


# ---- along one dim, with a list of indices ----


@rule(aten.index_select.default)
def index_select(call: OpCall) -> Strategy:
    rows = _batch_dim_rows(call)
    if call.inputs[0].ndim and call.inputs[1].ndim:
        rows.append(PlacementRow((REPLICATE, Shard(0)), (Shard(call.dim()),)))
    return Strategy([*rows, *pending_rows(call, (0,), ops=REDUCE_OPS)])


@rule(aten.index_add.default, aten.index_add_.default)
def index_add(call: OpCall) -> Strategy:
    """(self, index, source). Linear in self and source; the dim that is added to must not be sharded."""
    rows = _batch_dim_rows(call, source=True)
    if call.inputs[1].ndim and call.inputs[2].ndim:
        rows.append(PlacementRow((SUM, Shard(0), Shard(call.dim())), (SUM,)))
    return Strategy([*rows, *pending_rows(call, (0, 2))])


@rule(aten.index_copy.default, aten.index_copy_.default)
@rule(aten.index_reduce.default, aten.index_reduce_.default)
def index_copy(call: OpCall) -> Strategy:
    return Strategy(_batch_dim_rows(call, source=True))


@rule(aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar)
@rule(aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor)
def index_fill(call: OpCall) -> Strategy:
    """(self, index, value?): every rank fills in the number, so it can be filled into a pending sum only if it is 0."""
    rows = _batch_dim_rows(call)
    if len(call.inputs) == 3:
        return Strategy([*rows, *pending_rows(call, (0, 2), ops=("sum", "max", "min"))])
    return Strategy(
        [
            *rows,
            *pending_rows(call, (0,), ops=("sum", "max", "min") if call["value"] == 0 else ("max", "min")),
        ]
    )


def _batch_dim_rows(call: OpCall, *, source: bool = False) -> list[PlacementRow]:
    """Rows that shard a dim of self, and of `source` if given, other than the indexed one."""
    indexed_dim, source_count = call.dim(), len(call.inputs) - 2
    return [
        PlacementRow((Shard(d), REPLICATE, *(Shard(d) if source else REPLICATE,) * source_count), (Shard(d),))
        for d in range(call.inputs[0].ndim)
        if d != indexed_dim
    ]


# ---- along one dim, with an index per element ----


@rule(aten.gather.default)
def gather(call: OpCall) -> Strategy:
    """(self, index). A shard of the index needs the same part of self in all dims other than the gathered one."""
    source, index = call.inputs
    if source.ndim != index.ndim or not source.ndim:
        return Strategy(pending_rows(call, (0,), ops=REDUCE_OPS))
    picked = call.dim()
    # Exactly one row per dim: a mixture of rows on two mesh dims would cut self and index at different places.
    aligned = [d for d in range(source.ndim) if d != picked and source.shape[d] == index.shape[d]]
    rows = [
        PlacementRow((Shard(d) if d in aligned else REPLICATE, Shard(d)), (Shard(d),))
        for d in range(source.ndim)
    ]

    def localize(placed: PlacedSpecs) -> Callable[..., torch.Tensor] | None:
        source_spec, index_spec = placed.inputs
        windows = [
            (d, index_spec.local_offset[d] - source_spec.local_offset[d], index_spec.local_shape[d])
            for d in range(index_spec.ndim)
            if d != picked
            and (index_spec.local_offset[d], index_spec.local_shape[d])
            != (source_spec.local_offset[d], source_spec.local_shape[d])
        ]
        if not windows:
            return None

        def run(local: torch.Tensor, dim: int, local_index: torch.Tensor, **kwargs: object) -> torch.Tensor:
            for d, first, length in windows:
                local = local.narrow(d, first, length)
            return aten.gather(local, dim, local_index, **kwargs)  # type: ignore[no-any-return]

        return run

    return Strategy([*rows, *pending_rows(call, (0,), ops=REDUCE_OPS)], localize=localize)


@rule(aten.scatter.src, aten.scatter_.src, aten.scatter.value, aten.scatter_.value)
@rule(aten.scatter.reduce, aten.scatter_.reduce, aten.scatter.value_reduce, aten.scatter_.value_reduce)
@rule(*SCATTER_ADD)
@rule(aten.scatter_reduce.two, aten.scatter_reduce_.two)
def scatter(call: OpCall) -> Strategy:
    """(self, index, src?): a dim may be sharded if it has the same size in all of them.

    A sum that includes self is linear in self and src.
    """
    self, index, *sources = call.inputs
    same_dims = all(spec.ndim == self.ndim for spec in (index, *sources))
    rows, picked = [], call.dim()
    if same_dims:
        partly_indexed = [
            d for d in range(self.ndim) if any(s.shape[d] != self.shape[d] for s in (index, *sources))
        ]
        rows = shard_rows_except(call, [picked, *partly_indexed], len(call.inputs))
    reduces = call.op in (aten.scatter_reduce.two, aten.scatter_reduce_.two)
    if not (call["reduce"] == "sum" and call["include_self"] if reduces else call.op in SCATTER_ADD):
        return Strategy(rows)
    if self.ndim and same_dims and sources[0].shape[picked] == index.shape[picked]:
        rows.append(PlacementRow((SUM, Shard(picked), Shard(picked)), (SUM,)))
    return Strategy([*rows, *pending_rows(call, (0, 2))])


# ---- with indices into the flattened tensor ----


@rule(aten.take.default)
def take(call: OpCall) -> Strategy:
    return Strategy(
        [
            *(PlacementRow((REPLICATE, Shard(d)), (Shard(d),)) for d in range(call.inputs[1].ndim)),
            *pending_rows(call, (0,), ops=REDUCE_OPS),
        ]
    )


@rule(aten.put.default, aten.put_.default)
def put(call: OpCall) -> Strategy:
    """(self, index, source). Only sums can be left pending: which of two values for one element wins is undefined."""
    if not call["accumulate"]:
        return Strategy([])
    _, index, source = call.inputs
    dims = range(index.ndim) if index.shape == source.shape else ()
    return Strategy(
        [*(PlacementRow((SUM, Shard(d), Shard(d)), (SUM,)) for d in dims), *pending_rows(call, (0, 2))]
    )


@rule(aten.histc.default)
def histc(call: OpCall) -> Strategy:
    """Counts add up over the ranks if the bins are given. Otherwise the bins depend on the values of all ranks."""
    dims = () if call["min"] == call["max"] else range(call.inputs[0].ndim)
    return Strategy([PlacementRow((Shard(d),), (SUM,)) for d in dims])
