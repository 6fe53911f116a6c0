"""Choice of one row per mesh dim: the row of the current placements if possible, otherwise the cheapest one.

Note [Special layouts]: Shard(d) in a row means that dim d is cut like torch.chunk cuts it. A row is also valid for
another cut under two conditions: all dims that it shards have the same length, and the computation does not depend on
where they are cut. All sharded tensors of the row then need the same cut. Such rows are also tried with the RaggedShard
or StridedShard of an input.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from dtbench_core.cost.mesh_topology import topology_of
from dtbench_core.cost.redistribution import local_gib, transition_cost
from dtbench_core.errors import PlacementError
from dtbench_core.layout.placement import (
    REPLICATE,
    Placement,
    Placements,
    RaggedShard,
    Shard,
    StridedShard,
    chunk_extent,
)
from dtbench_core.layout.spec import normalize
from dtbench_core.rules.base import OpCall, PlacementRow, Strategy, replicated_row


def choose_rows(
    call: OpCall, strategy: Strategy, written: tuple[int, ...], result: Placements | None = None
) -> list[PlacementRow] | None:
    """Returns one row per mesh dim, outermost first, or None if no row is possible.

    Args:
        written: indices of the inputs that the op writes, whose placements must not change. If the op returns such an
            input, the row must have the same placement for both.
        result: required placements of the first output, if given.
    """
    special_layouts = [
        _special_layouts(call, mesh_dim, result) for mesh_dim in range(call.inputs[0].info.ndim)
    ]
    if any(special_layouts):
        chosen = _choose_from(call, strategy, written, result, special_layouts)
        if chosen is not None and _layouts_are_valid(call, chosen):
            return chosen
    return _choose_from(call, strategy, written, result, [[] for _ in special_layouts])


def _choose_from(
    call: OpCall,
    strategy: Strategy,
    written: tuple[int, ...],
    result: Placements | None,
    special_layouts: Sequence[list[Shard]],
) -> list[PlacementRow] | None:
    info = call.inputs[0].info
    plain = [*strategy.rows, replicated_row(call)]
    lengths = _DimLengths(call)
    chosen: list[PlacementRow] = []
    for mesh_dim, layouts in enumerate(special_layouts):
        rows = [*_restate_rows(call, strategy, layouts), *plain] if layouts else plain
        row = _cheapest_row(
            call,
            rows if result is None else [r for r in rows if r.outputs[0] == result[mesh_dim]],
            tuple(spec.placements[mesh_dim] for spec in call.inputs),
            mesh_dim,
            lengths,
            written,
        )
        if row is None:
            return None
        lengths.split(row, info.sizes[mesh_dim])
        chosen.append(row)
    return chosen


# ---- special layouts ----


def _special_layouts(call: OpCall, mesh_dim: int, result: Placements | None) -> list[Shard]:
    """Returns the placements on `mesh_dim`, of inputs or required for the result, that do not cut like torch.chunk."""
    placed = [spec.placements[mesh_dim] for spec in call.inputs]
    if result is not None:
        placed.append(result[mesh_dim])
    return [p for p in dict.fromkeys(placed) if isinstance(p, Shard) and type(p) is not Shard]


def _restate_rows(call: OpCall, strategy: Strategy, layouts: Sequence[Shard]) -> list[PlacementRow]:
    """Returns the rows with each special layout instead of Shard, where that is valid. See Note [Special layouts]."""
    restated = []
    for layout in layouts:
        if (strategy.localize or strategy.local_op) and not (
            strategy.any_lengths and (strategy.local_op or isinstance(layout, RaggedShard))
        ):
            continue
        for row in strategy.rows:
            lengths = {
                shape[p.dim]
                for placements, tensors in ((row.inputs, call.inputs), (row.outputs, call.outputs))
                for p, shape in zip(placements, (t.shape if t else () for t in tensors), strict=True)
                if isinstance(p, Shard) and shape
            }
            if len(lengths) == 1 and not row.even:
                inputs, outputs = (
                    _with_layout(placements, layout) for placements in (row.inputs, row.outputs)
                )
                restated.append(PlacementRow(inputs, outputs, nonempty=row.nonempty))
    return restated


def _with_layout(placements: Placements, layout: Shard) -> Placements:
    return tuple(dataclasses.replace(layout, dim=p.dim) if isinstance(p, Shard) else p for p in placements)


def _layouts_are_valid(call: OpCall, rows: Sequence[PlacementRow]) -> bool:
    """Whether the placements that the rows result in are valid for the shapes of all tensors."""
    info = call.inputs[0].info
    try:
        for index, spec in enumerate(call.inputs):
            normalize([row.inputs[index] for row in rows], spec.ndim, info, spec.shape)
        for index, meta in enumerate(call.outputs):
            if meta is not None:
                normalize([row.outputs[index] for row in rows], len(meta.shape), info, meta.shape)
    except PlacementError:
        return False
    return True


def _cheapest_row(
    call: OpCall,
    candidates: Sequence[PlacementRow],
    current: Placements,
    mesh_dim: int,
    lengths: _DimLengths,
    written: tuple[int, ...],
) -> PlacementRow | None:
    info = call.inputs[0].info
    parts = info.sizes[mesh_dim]
    allowed = [
        row
        for row in candidates
        if lengths.allow(row, parts)
        and _keeps_written_inputs(call, row, current, written)
        and not _widens_integer_sum(call, row, current)
    ]
    for row in allowed:
        if row.inputs == current:
            return row
    topology = topology_of(info.mesh)
    input_gib = [local_gib(s.shape, s.dtype.itemsize, s.placements, info.sizes) for s in call.inputs]
    best, lowest = None, math.inf
    for row in allowed:
        targets = [
            _communicated_placement(src, dst, written) for src, dst in zip(current, row.inputs, strict=True)
        ]
        price = sum(
            math.inf if target is None else transition_cost(src, target, gib, topology, mesh_dim)
            for src, target, gib in zip(current, targets, input_gib, strict=True)
        )
        if price < lowest:
            best, lowest = row, price
    return best


def _keeps_written_inputs(
    call: OpCall, row: PlacementRow, current: Placements, written: tuple[int, ...]
) -> bool:
    """Whether the row keeps the placements of the written inputs."""
    if not written:
        return True
    returns = call.op._schema.returns
    if len(written) == len(returns) == 1 and returns[0].alias_info and row.outputs[0] != current[written[0]]:
        return False
    return all(row.inputs[i] == current[i] for i in written)


def _widens_integer_sum(call: OpCall, row: PlacementRow, current: Placements) -> bool:
    """Whether the row passes a pending sum of integers to a wider dtype.

    The terms may have wrapped around. That cancels out only if they are added in the same or a narrower dtype.
    """
    dtypes = [
        meta.dtype
        for p, meta in zip(row.outputs, call.outputs, strict=True)
        if p.is_partial() and meta is not None
    ]
    return any(
        src == dst and (dst.is_partial("sum") or dst.is_partial("product")) and _is_wider(dtype, spec.dtype)
        for src, dst, spec in zip(current, row.inputs, call.inputs, strict=True)
        for dtype in dtypes
    )


def _is_wider(dtype: torch.dtype, other: torch.dtype) -> bool:
    if other.is_floating_point or other.is_complex or dtype is other:
        return False
    return (
        dtype.is_floating_point or dtype.is_complex or other is torch.bool or dtype.itemsize > other.itemsize
    )


def _communicated_placement(src: Placement, dst: Placement, written: tuple[int, ...]) -> Placement | None:
    """Returns the placement that communication must produce, or None if the row cannot be reached.

    A Partial can be made only from itself or from Replicate. Inputs of an op that writes may also be gathered first.
    """
    if src == dst or not dst.is_partial() or src.is_replicate():
        return dst
    return REPLICATE if written and not src.is_partial() else None


class _DimLengths:
    """The largest and smallest length of each tensor dim over the ranks, after the outer mesh dims cut it."""

    def __init__(self, call: OpCall) -> None:
        self._dims = (
            [[(n, n) for n in spec.shape] for spec in call.inputs],
            [[(n, n) for n in meta.shape] if meta is not None else [] for meta in call.outputs],
        )

    def _tensor(self, index: int) -> list[tuple[int, int]]:
        inputs, outputs = self._dims
        return inputs[index] if index >= 0 else outputs[-1 - index]

    def allow(self, row: PlacementRow, parts: int) -> bool:
        """Whether the conditions of the row hold if `parts` ranks split its shards."""
        for index, dim in row.even:
            longest, shortest = self._tensor(index)[dim]
            if longest != shortest or longest % parts:
                return False
        for index, dim in row.nonempty:
            placed = row.inputs[index] if index >= 0 else row.outputs[-1 - index]
            if self._cut(placed, self._tensor(index)[dim], parts)[1] == 0:
                return False
        return True

    @staticmethod
    def _cut(placement: Placement, lengths: tuple[int, int], parts: int) -> tuple[int, int]:
        """Returns the largest and smallest length of a part of a dim."""
        longest, shortest = lengths
        if isinstance(placement, RaggedShard):
            return max(placement.counts), min(placement.counts)
        if isinstance(placement, StridedShard):
            return max(placement.lengths(longest, parts)), min(placement.lengths(shortest, parts))
        return -(-longest // parts), chunk_extent(shortest, parts, parts - 1)[0]

    def split(self, row: PlacementRow, parts: int) -> None:
        for tensors, placements in zip(self._dims, (row.inputs, row.outputs), strict=True):
            for lengths, placement in zip(tensors, placements, strict=True):
                if isinstance(placement, Shard) and lengths:  # a result may not be a tensor
                    lengths[placement.dim] = self._cut(placement, lengths[placement.dim], parts)
