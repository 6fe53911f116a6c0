"""Sharding rules of users: `register_sharding`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch._ops import OpOverload

from dtbench_core.errors import ArgumentError
from dtbench_core.layout.placement import REPLICATE, Placement
from dtbench_core.layout.spec import normalize_one
from dtbench_core.rules import base
from dtbench_core.rules.base import OpCall, PlacementRow, Strategy
from dtbench_core.runtime import rules_changed

PlacementList = Sequence[Placement | None]
ShardingFunction = Callable[..., Sequence[tuple[PlacementList, PlacementList]]]


def register_sharding(op: OpOverload | list[OpOverload]) -> Callable[[ShardingFunction], ShardingFunction]:
    """Gives an op, or several, a sharding rule; it takes the place of the core's own.

    The decorated function is called with the op's arguments, a tensor-like description (`shape`,
    `stride`, `ndim`, `dtype`, `placements`, all global) in the place of every tensor. It returns the
    ways the op may run on one mesh dim, as pairs (placements of the outputs, placements of the
    inputs): one entry per output and per argument, None where there is no tensor. If the inputs are
    placed so, the op run on every rank's shards must give outputs placed so. Replicated inputs and
    outputs are always possible and need not be listed.

    The function must depend on its arguments alone, so that every rank computes the same answer.

    Raises:
        ArgumentError: something that is not an op. When the op is called, also an answer of the
            function's that does not fit the op. PlacementError: a Shard of a dim that is not there.
    """
    ops = op if isinstance(op, list) else [op]
    for one in ops:
        if not isinstance(one, OpOverload):
            raise ArgumentError(
                f"register_sharding got {one!r}, expected an op overload such as torch.ops.aten.add.Tensor: name its "
                "overload (often `.default`)"
            )

    def register(function: ShardingFunction) -> ShardingFunction:
        def strategy(call: OpCall) -> Strategy:
            return Strategy([_row(call, *placed) for placed in function(*call.args, **call.kwargs)])

        for one in ops:
            base.override_rule(one, strategy)
        rules_changed()
        return function

    return register


def _row(call: OpCall, outputs: PlacementList, inputs: PlacementList) -> PlacementRow:
    placed = [p for p in inputs if p is not None]
    of_outputs = list(outputs)
    if len(placed) != len(call.inputs) or len(of_outputs) != len(call.outputs):
        raise ArgumentError(
            f"the sharding registered for {call.op} gave placements of {len(of_outputs)} outputs and "
            f"{len(placed)} input tensors, expected {len(call.outputs)} and {len(call.inputs)}: give one per tensor, "
            "and None for the other arguments"
        )
    result_ranks = [0 if meta is None else len(meta.shape) for meta in call.outputs]
    results = zip(of_outputs, result_ranks, strict=True)
    return PlacementRow(
        tuple(normalize_one(p, spec.ndim) for p, spec in zip(placed, call.inputs, strict=True)),
        tuple(REPLICATE if p is None else normalize_one(p, ndim) for p, ndim in results),
    )
