"""Picks one row per mesh dim: one that fits the placements as they are, else the cheapest to reach."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dtbench_core import cost
from dtbench_core.placement import Placement, Placements, Shard, chunk_extent
from dtbench_core.rules.base import OpCall, Row, Strategy, replicated_row


def choose(
    call: OpCall, strategy: Strategy, written: tuple[int, ...], result: Placements | None = None
) -> list[Row] | None:
    """One row per mesh dim, outermost first, or None when no row is possible.

    written: indices of the inputs that are written, which must keep their placements. Where one of
        them is the result too, the row must say the same of both.
    result: where the first output must come to lie, if that is given.
    """
    info = call.inputs[0].info
    rows = [*strategy.rows, replicated_row(call)]
    held = _Lengths(call)
    chosen: list[Row] = []
    for mesh_dim in range(info.ndim):
        given = tuple(spec.placements[mesh_dim] for spec in call.inputs)
        candidates = rows if result is None else [r for r in rows if r.outputs[0] == result[mesh_dim]]
        row = _best(call, candidates, given, mesh_dim, held, written)
        if row is None:
            return None
        held.split(row, info.sizes[mesh_dim])
        chosen.append(row)
    return chosen


def _best(
    call: OpCall,
    candidates: Sequence[Row],
    given: Placements,
    mesh_dim: int,
    held: _Lengths,
    written: tuple[int, ...],
) -> Row | None:
    info = call.inputs[0].info
    parts = info.sizes[mesh_dim]
    allowed = [row for row in candidates if held.allow(row, parts) and _keeps(call, row, given, written)]
    for row in allowed:
        if row.inputs == given:
            return row
    topology = cost.topology_of(info.mesh)
    held_gib = [cost.local_gib(s.shape, s.dtype, s.placements, info.sizes) for s in call.inputs]
    best, lowest = None, math.inf
    for row in allowed:
        price = sum(
            cost.transition_cost(have, want, held_gib[index], topology, mesh_dim)
            if _reachable(have, want)
            else math.inf
            for index, (have, want) in enumerate(zip(given, row.inputs, strict=True))
        )
        if price < lowest:
            best, lowest = row, price
    return best


def _keeps(call: OpCall, row: Row, given: Placements, written: tuple[int, ...]) -> bool:
    """Whether the row leaves the written inputs where they are."""
    if not written:
        return True
    returns = call.op._schema.returns
    if len(written) == len(returns) == 1 and returns[0].alias_info and row.outputs[0] != given[written[0]]:
        return False
    return all(row.inputs[i] == given[i] for i in written)


def _reachable(have: Placement, want: Placement) -> bool:
    """Into a Partial only from itself or, for those that Replicate can stand for, from Replicate."""
    return have == want or not want.is_partial() or (have.is_replicate() and not want.is_partial("product"))


class _Lengths:
    """The largest and smallest length any rank holds of each tensor dim, as outer mesh dims cut it."""

    def __init__(self, call: OpCall) -> None:
        inputs = [[(n, n) for n in spec.shape] for spec in call.inputs]
        outputs = [[(n, n) for n in meta.shape] if meta is not None else [] for meta in call.outputs]
        self._dims = (inputs, outputs)

    def _tensor(self, index: int) -> list[tuple[int, int]]:
        inputs, outputs = self._dims
        return inputs[index] if index >= 0 else outputs[-1 - index]

    def allow(self, row: Row, parts: int) -> bool:
        """Whether the row's conditions hold when `parts` ranks split its shards."""
        for index, dim in row.even:
            most, least = self._tensor(index)[dim]
            if most != least or most % parts:
                return False
        return all(self._smallest(self._tensor(index)[dim][1], parts) != 0 for index, dim in row.nonempty)

    @staticmethod
    def _smallest(length: int, parts: int) -> int:
        return chunk_extent(length, parts, parts - 1)[0]

    def split(self, row: Row, parts: int) -> None:
        """Applies the row's shards."""
        for tensors, placements in zip(self._dims, (row.inputs, row.outputs), strict=True):
            for lengths, placement in zip(tensors, placements, strict=True):
                if isinstance(placement, Shard) and lengths:  # an output may be absent
                    most, least = lengths[placement.dim]
                    lengths[placement.dim] = (-(-most // parts), self._smallest(least, parts))
