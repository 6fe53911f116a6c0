"""Ops that take index tensors: lookups (index, gather, embedding) and writes (index_put, scatter).

A dim that no index refers to is a batch dim: it may be sharded wherever it stands. A lookup may also
shard the indices, if what they look into is whole. Where entries are added up, each rank may add those
that it holds to its term of a pending sum.
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
        "got a sparse tensor to be made of DTensors, as the gradient of an embedding with sparse=True is; DTensors are "
        "dense: set sparse=False, of which the gradient is as large as the rank's part of the table"
    )


@rule(aten.embedding.default)
def embedding(call: OpCall) -> Strategy:
    """(weight [rows, width], indices [...]) -> [..., width].

    Of sharded rows each rank looks up those it holds and gives 0 for the others: a pending sum.
    """
    lead = free_labels(call.inputs[1].ndim, skip="rw")
    rows = label_rows(f"w{lead}r", ("rw", lead), (lead + "w",), SUM)
    return Strategy([*rows, *pending_rows(call, (0,), ops=REDUCE_OPS)], localize=_lookup, any_lengths=True)


def _lookup(placed: PlacedSpecs) -> Callable[..., torch.Tensor] | None:
    weight = placed.inputs[0]
    count, held, first = weight.shape[0], weight.local_shape[0], weight.local_offset[0]
    if not any(p.is_shard(0) for p in weight.placements):
        return None

    def run(local: torch.Tensor, indices: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        valid = ((indices >= 0) & (indices < count)).all()
        if indices.device.type == "cpu" and not is_fake_mode_active() and not valid:
            raise IndexError(
                f"embedding got an index outside [0, {count}), the rows of its weight: "
                f"[{indices.min().item()}, {indices.max().item()}]"
            )
        torch._assert_async(valid)  # on an accelerator without waiting for it, and in a graph
        if held == 0:
            return local.new_zeros((*indices.shape, local.shape[1]))
        mine = (indices >= first) & (indices < first + held)
        rows: torch.Tensor = aten.embedding(local, torch.where(mine, indices - first, 0))
        return rows.masked_fill_(~mine.unsqueeze(-1), 0)

    return run


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(call: OpCall) -> Strategy:
    """(grad [..., width], indices [...]) -> grad of the weight: a sum over the indices."""
    lead = free_labels(call.inputs[1].ndim, skip="rw")
    # Frequencies are counted over all indices.
    rows = label_rows("w" if call["scale_grad_by_freq"] else "w" + lead, (lead + "w", lead), ("rw",), SUM)
    return Strategy([*rows, *pending_rows(call, (0,))])


# ---- x[i, j] and x[i, j] = y ----


def _indexed(call: OpCall) -> tuple[list[int], list[DTensorSpec], torch.Size, int]:
    """(indexed dims, their index specs, the shape they broadcast to, where it begins in the result)."""
    listed = [(dim, index) for dim, index in enumerate(call["indices"]) if index is not None]
    dims = [dim for dim, _ in listed]
    shape = torch.broadcast_shapes(*(index.shape for _, index in listed))
    adjacent = dims == list(range(dims[0], dims[-1] + 1))
    return dims, [index for _, index in listed], shape, dims[0] if adjacent else 0


def _kept_dims(call: OpCall, dims: list[int], shape: torch.Size, start: int) -> dict[int, int]:
    """Dims of self that no index refers to -> dims of what x[indices] gives."""
    kept = [d for d in range(call.inputs[0].ndim) if d not in dims]
    return {d: i + (len(shape) if i >= start else 0) for i, d in enumerate(kept)}


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: OpCall) -> Strategy:
    if not all(spec.dtype in INTEGER for spec in call.inputs[1:]) or len(call.inputs) == 1:
        return Strategy([])  # masks: the shape of the result depends on their values
    dims, indices, shape, start = _indexed(call)
    rows = [
        PlacementRow((Shard(d), *(REPLICATE,) * len(indices)), (Shard(out),))
        for d, out in _kept_dims(call, dims, shape, start).items()
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
    """(self, indices..., values): the values broadcast to what self[indices] would give."""
    values = call.inputs[-1]
    if len(call.inputs) == 2:
        return Strategy([])  # no index at all
    if any(spec.dtype not in INTEGER for spec in call.inputs[1:-1]):
        return Strategy(_mask_rows(call))
    dims, indices, shape, start = _indexed(call)
    kept = _kept_dims(call, dims, shape, start)
    self = call.inputs[0]
    result = [self.shape[d] for d in kept]
    whole = torch.Size((*result[:start], *shape, *result[start:]))
    count = len(indices)
    rows = [
        PlacementRow((Shard(d), *(REPLICATE,) * count, broadcast_placement(values, out, whole)), (Shard(d),))
        for d, out in kept.items()
    ]
    if call["accumulate"]:
        rows += pending_rows(call, (0, len(call.inputs) - 1))
        for dim in range(len(shape)):
            placed = (broadcast_placement(i, dim, shape) for i in indices)
            rows.append(PlacementRow((SUM, *placed, broadcast_placement(values, start + dim, whole)), (SUM,)))
    return Strategy(rows)


def _mask_rows(call: OpCall) -> list[PlacementRow]:
    """x[mask] = one value: elementwise, where the mask covers the leading dims of x."""
    self, mask, values = call.inputs[0], call.inputs[1], call.inputs[-1]
    if len(call.inputs) != 3 or values.shape.numel() != 1 or call["indices"][0] is None:
        return []
    return [
        PlacementRow((Shard(d), Shard(d) if d < mask.ndim else REPLICATE, REPLICATE), (Shard(d),))
        for d in range(self.ndim)
    ]


# ---- along one dim, by a list of indices ----


@rule(aten.index_select.default)
def index_select(call: OpCall) -> Strategy:
    rows = _other_dims(call)
    if call.inputs[0].ndim and call.inputs[1].ndim:
        rows.append(PlacementRow((REPLICATE, Shard(0)), (Shard(call.dim()),)))
    return Strategy([*rows, *pending_rows(call, (0,), ops=REDUCE_OPS)])


@rule(aten.index_add.default, aten.index_add_.default)
def index_add(call: OpCall) -> Strategy:
    """(self, index, source): the rows added to are whole, and the sum is linear in self and source."""
    rows = _other_dims(call, source=True)
    if call.inputs[1].ndim and call.inputs[2].ndim:
        rows.append(PlacementRow((SUM, Shard(0), Shard(call.dim())), (SUM,)))
    return Strategy([*rows, *pending_rows(call, (0, 2))])


@rule(aten.index_copy.default, aten.index_copy_.default)
@rule(aten.index_reduce.default, aten.index_reduce_.default)
def index_copy(call: OpCall) -> Strategy:
    return Strategy(_other_dims(call, source=True))


@rule(aten.index_fill.int_Scalar, aten.index_fill_.int_Scalar)
@rule(aten.index_fill.int_Tensor, aten.index_fill_.int_Tensor)
def index_fill(call: OpCall) -> Strategy:
    """(self, index, value?): a number is filled in on every rank, so a pending sum takes only 0."""
    rows = _other_dims(call)
    if len(call.inputs) == 3:
        return Strategy([*rows, *pending_rows(call, (0, 2), ops=("sum", "max", "min"))])
    ops = ("sum", "max", "min") if call["value"] == 0 else ("max", "min")
    return Strategy([*rows, *pending_rows(call, (0,), ops=ops)])


def _other_dims(call: OpCall, *, source: bool = False) -> list[PlacementRow]:
    """(self, index, source or value?): dims other than the indexed one are a batch, of a source as well."""
    whole, more = call.dim(), len(call.inputs) - 2
    return [
        PlacementRow((Shard(d), REPLICATE, *(Shard(d) if source else REPLICATE,) * more), (Shard(d),))
        for d in range(call.inputs[0].ndim)
        if d != whole
    ]


# ---- along one dim, an index per element ----


@rule(aten.gather.default)
def gather(call: OpCall) -> Strategy:
    """(self, index): element [i, j] of the result comes from row i of self, so a shard of the index needs the
    same part of self in every dim but the gathered one."""
    source, index = call.inputs
    if source.ndim != index.ndim or not source.ndim:
        return Strategy(pending_rows(call, (0,), ops=REDUCE_OPS))
    picked = call.dim()
    # One of the two for each dim: over two mesh dims, a mixture would cut self and index at different places.
    rows = []
    for d in range(source.ndim):
        aligned = d != picked and source.shape[d] == index.shape[d]
        rows.append(PlacementRow((Shard(d) if aligned else REPLICATE, Shard(d)), (Shard(d),)))

    def localize(placed: PlacedSpecs) -> Callable[..., torch.Tensor] | None:
        held, index = placed.inputs
        windows = [
            (d, index.local_offset[d] - held.local_offset[d], index.local_shape[d])
            for d in range(index.ndim)
            if d != picked
            and (index.local_offset[d], index.local_shape[d]) != (held.local_offset[d], held.local_shape[d])
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
    """(self, index, src?): a dim is a batch dim where all have it in full; indices may be fewer than rows. A sum that
    includes self is linear in self and src."""
    self, index, *sources = call.inputs
    same_dims = all(spec.ndim == self.ndim for spec in (index, *sources))
    rows, picked = [], call.dim()
    if same_dims:
        whole = [d for d in range(self.ndim) if any(s.shape[d] != self.shape[d] for s in (index, *sources))]
        rows = shard_rows_except(call, [picked, *whole], len(call.inputs))
    reduces = call.op in (aten.scatter_reduce.two, aten.scatter_reduce_.two)
    adds = call["reduce"] == "sum" and call["include_self"] if reduces else call.op in SCATTER_ADD
    if not adds:
        return Strategy(rows)
    if self.ndim and same_dims and sources[0].shape[picked] == index.shape[picked]:
        rows.append(PlacementRow((SUM, Shard(picked), Shard(picked)), (SUM,)))
    return Strategy([*rows, *pending_rows(call, (0, 2))])


# ---- by index into the flattened tensor ----


@rule(aten.take.default)
def take(call: OpCall) -> Strategy:
    rows = [PlacementRow((REPLICATE, Shard(d)), (Shard(d),)) for d in range(call.inputs[1].ndim)]
    return Strategy([*rows, *pending_rows(call, (0,), ops=REDUCE_OPS)])


@rule(aten.put.default, aten.put_.default)
def put(call: OpCall) -> Strategy:
    """(self, index, source): sums can be left pending; which of two written values stays is not defined."""
    if not call["accumulate"]:
        return Strategy([])
    _, index, source = call.inputs
    dims = range(index.ndim) if index.shape == source.shape else ()
    rows = [PlacementRow((SUM, Shard(d), Shard(d)), (SUM,)) for d in dims]
    return Strategy([*rows, *pending_rows(call, (0, 2))])


@rule(aten.histc.default)
def histc(call: OpCall) -> Strategy:
    """Counts add up, if the bins are given; else they span the values of the whole tensor."""
    if call["min"] == call["max"]:
        return Strategy([])
    return Strategy([PlacementRow((Shard(d),), (SUM,)) for d in range(call.inputs[0].ndim)])
