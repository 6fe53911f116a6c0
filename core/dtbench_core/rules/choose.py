"""Picks one row per mesh dim: one that fits the placements as they are, else the cheapest to reach.

Note [Other layouts]: a row says Shard(d), which is torch.chunk's cut. Where all that it shards is of one
length and nothing in the rule counts on how the dim is cut, the row holds for any cut that all of these
tensors share: so it also means the RaggedShard or StridedShard that an input has.
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
    """One row per mesh dim, outermost first, or None when no row is possible.

    written: indices of the inputs that are written, which must keep their placements. Where one of
        them is the result too, the row must say the same of both.
    result: the placements that the first output must have, if given.
    """
    others = [_other_layouts(call, mesh_dim, result) for mesh_dim in range(call.inputs[0].info.ndim)]
    if any(others):
        chosen = _choose(call, strategy, written, result, others)
        if chosen is not None and _fit(call, chosen):
            return chosen
    return _choose(call, strategy, written, result, [[] for _ in others])


def _choose(
    call: OpCall,
    strategy: Strategy,
    written: tuple[int, ...],
    result: Placements | None,
    others: Sequence[list[Shard]],
) -> list[PlacementRow] | None:
    info = call.inputs[0].info
    plain = [*strategy.rows, replicated_row(call)]
    held = _Lengths(call)
    chosen: list[PlacementRow] = []
    for mesh_dim in range(info.ndim):
        rows = [*_restated(call, strategy, others[mesh_dim]), *plain] if others[mesh_dim] else plain
        current = tuple(spec.placements[mesh_dim] for spec in call.inputs)
        candidates = rows if result is None else [r for r in rows if r.outputs[0] == result[mesh_dim]]
        row = _best(call, candidates, current, mesh_dim, held, written)
        if row is None:
            return None
        held.split(row, info.sizes[mesh_dim])
        chosen.append(row)
    return chosen


# ---- See Note [Other layouts] ----


def _other_layouts(call: OpCall, mesh_dim: int, result: Placements | None) -> list[Shard]:
    """The placements on `mesh_dim`, of the inputs or wanted of the result, that cut unlike torch.chunk."""
    placed = [spec.placements[mesh_dim] for spec in call.inputs]
    if result is not None:
        placed.append(result[mesh_dim])
    return [p for p in dict.fromkeys(placed) if isinstance(p, Shard) and type(p) is not Shard]


def _restated(call: OpCall, strategy: Strategy, layouts: Sequence[Shard]) -> list[PlacementRow]:
    """The rows with each of `layouts` in the place of their Shards, where that holds."""
    restated = []
    for layout in layouts:
        own = strategy.localize or strategy.local_op
        if own and not (strategy.any_lengths and (strategy.local_op or isinstance(layout, RaggedShard))):
            continue
        for row in strategy.rows:
            lengths = {
                shape[p.dim]
                for placements, tensors in ((row.inputs, call.inputs), (row.outputs, call.outputs))
                for p, shape in zip(placements, (t.shape if t else () for t in tensors), strict=True)
                if isinstance(p, Shard) and shape
            }
            if len(lengths) == 1 and not row.even:
                restated.append(
                    PlacementRow(_laid(row.inputs, layout), _laid(row.outputs, layout), nonempty=row.nonempty)
                )
    return restated


def _laid(placements: Placements, layout: Shard) -> Placements:
    return tuple(dataclasses.replace(layout, dim=p.dim) if isinstance(p, Shard) else p for p in placements)


def _fit(call: OpCall, rows: Sequence[PlacementRow]) -> bool:
    """Whether all tensors can have the layouts that the rows result in."""
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


def _best(
    call: OpCall,
    candidates: Sequence[PlacementRow],
    current: Placements,
    mesh_dim: int,
    held: _Lengths,
    written: tuple[int, ...],
) -> PlacementRow | None:
    info = call.inputs[0].info
    parts = info.sizes[mesh_dim]
    allowed = [
        row
        for row in candidates
        if held.allow(row, parts) and _keeps(call, row, current, written) and not _unwraps(call, row, current)
    ]
    for row in allowed:
        if row.inputs == current:
            return row
    topology = topology_of(info.mesh)
    held_gib = [local_gib(s.shape, s.dtype.itemsize, s.placements, info.sizes) for s in call.inputs]
    best, lowest = None, math.inf
    for row in allowed:
        ways = [_by_way_of(have, want, written) for have, want in zip(current, row.inputs, strict=True)]
        price = sum(
            math.inf if way is None else transition_cost(have, way, gib, topology, mesh_dim)
            for have, way, gib in zip(current, ways, held_gib, strict=True)
        )
        if price < lowest:
            best, lowest = row, price
    return best


def _keeps(call: OpCall, row: PlacementRow, current: Placements, written: tuple[int, ...]) -> bool:
    """Whether the row leaves the written inputs where they are."""
    if not written:
        return True
    returns = call.op._schema.returns
    if len(written) == len(returns) == 1 and returns[0].alias_info and row.outputs[0] != current[written[0]]:
        return False
    return all(row.inputs[i] == current[i] for i in written)


def _unwraps(call: OpCall, row: PlacementRow, current: Placements) -> bool:
    """Whether a pending sum of integers would pass into a dtype that holds more: the terms may have wrapped around,
    which adds up in their own dtype alone, or in a smaller one."""
    dtypes = [
        meta.dtype
        for p, meta in zip(row.outputs, call.outputs, strict=True)
        if p.is_partial() and meta is not None
    ]
    return any(
        have == want
        and (want.is_partial("sum") or want.is_partial("product"))
        and _holds_more(dtype, spec.dtype)
        for have, want, spec in zip(current, row.inputs, call.inputs, strict=True)
        for dtype in dtypes
    )


def _holds_more(dtype: torch.dtype, than: torch.dtype) -> bool:
    if than.is_floating_point or than.is_complex or dtype is than:
        return False
    return dtype.is_floating_point or dtype.is_complex or than is torch.bool or dtype.itemsize > than.itemsize


def _by_way_of(have: Placement, want: Placement, written: tuple[int, ...]) -> Placement | None:
    """What `have` becomes by communication; None where there is no way: into a Partial only from itself or from
    Replicate; from a Shard, which is gathered first, where what is written must stay one."""
    if have == want or not want.is_partial() or have.is_replicate():
        return want
    return REPLICATE if written and not have.is_partial() else None


class _Lengths:
    """The largest and smallest length any rank holds of each tensor dim, as outer mesh dims cut it."""

    def __init__(self, call: OpCall) -> None:
        inputs = [[(n, n) for n in spec.shape] for spec in call.inputs]
        outputs = [[(n, n) for n in meta.shape] if meta is not None else [] for meta in call.outputs]
        self._dims = (inputs, outputs)

    def _tensor(self, index: int) -> list[tuple[int, int]]:
        inputs, outputs = self._dims
        return inputs[index] if index >= 0 else outputs[-1 - index]

    def allow(self, row: PlacementRow, parts: int) -> bool:
        """Whether the row's conditions hold when `parts` ranks split its shards."""
        for index, dim in row.even:
            most, least = self._tensor(index)[dim]
            if most != least or most % parts:
                return False
        for index, dim in row.nonempty:
            placed = row.inputs[index] if index >= 0 else row.outputs[-1 - index]
            if self._cut(placed, self._tensor(index)[dim], parts)[1] == 0:
                return False
        return True

    @staticmethod
    def _cut(placement: Placement, lengths: tuple[int, int], parts: int) -> tuple[int, int]:
        """The largest and smallest length of a part of a dim that is cut so."""
        most, least = lengths
        if isinstance(placement, RaggedShard):
            return max(placement.counts), min(placement.counts)
        if isinstance(placement, StridedShard):
            return max(placement.lengths(most, parts)), min(placement.lengths(least, parts))
        return -(-most // parts), chunk_extent(least, parts, parts - 1)[0]

    def split(self, row: PlacementRow, parts: int) -> None:
        for tensors, placements in zip(self._dims, (row.inputs, row.outputs), strict=True):
            for lengths, placement in zip(tensors, placements, strict=True):
                if isinstance(placement, Shard) and lengths:  # an output may be absent
                    lengths[placement.dim] = self._cut(placement, lengths[placement.dim], parts)
