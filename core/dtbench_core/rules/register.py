"""`register_sharding`: sharding rules registered by users."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch._ops import OpOverload

from dtbench_core.errors import ArgumentError
from dtbench_core.layout.placement import REPLICATE, Placement
from dtbench_core.layout.spec import normalize_one
from dtbench_core.rules.base import (
    OpCall,
    PlacementRow,
    Strategy,
    decompositions,
    overridden_ops,
    rules_by_op,
)
from dtbench_core.runtime import rules_changed

PlacementList = Sequence[Placement | None]
ShardingFunction = Callable[..., Sequence[tuple[PlacementList, PlacementList]]]


def register_sharding(op: OpOverload | list[OpOverload]) -> Callable[[ShardingFunction], ShardingFunction]:
    """Registers a sharding rule for one or several ops, which replaces the core's own rule.

    The decorated function gets the op's arguments. Each tensor is replaced by a description with the global `shape`,
    `stride`, `ndim`, `dtype` and `placements`.

    The function returns the ways to run the op on one mesh dim, as pairs (placements of the outputs, placements of the
    inputs). Each list has one entry per output or argument, and None for those that are not tensors. If the inputs are
    placed so, running the op on every rank's shards must give outputs placed so. Replicated inputs and outputs are
    always possible and need not be listed.

    The result must depend only on the arguments, so that all ranks compute the same.

    Raises:
        ArgumentError: `op` is not an op; or, when the op is called, the function's result does not match the op.
        PlacementError: when the op is called, the function returned a Shard of a dim that the tensor lacks.
    """
    ops = op if isinstance(op, list) else [op]
    for overload in ops:
        if not isinstance(overload, OpOverload):
            raise ArgumentError(
                f"register_sharding got {overload!r}, expected an op overload such as torch.ops.aten.add.Tensor: "
                "append the name of the overload (often `.default`)"
            )

    def register(function: ShardingFunction) -> ShardingFunction:
        def strategy(call: OpCall) -> Strategy:
            return Strategy([_row(call, *placed) for placed in function(*call.args, **call.kwargs)])

        for overload in ops:
            rules_by_op[overload] = strategy
            decompositions.pop(overload, None)
            overridden_ops.add(overload)
        rules_changed()
        return function

    return register


def _row(call: OpCall, outputs: PlacementList, inputs: PlacementList) -> PlacementRow:
    input_placements = [p for p in inputs if p is not None]
    if len(input_placements) != len(call.inputs) or len(outputs) != len(call.outputs):
        raise ArgumentError(
            f"the sharding registered for {call.op} returned placements of {len(outputs)} outputs and "
            f"{len(input_placements)} input tensors, expected {len(call.outputs)} and {len(call.inputs)}: return one "
            "per tensor, and None for the other arguments"
        )
    return PlacementRow(
        tuple(normalize_one(p, spec.ndim) for p, spec in zip(input_placements, call.inputs, strict=True)),
        tuple(
            REPLICATE if p is None else normalize_one(p, len(meta.shape) if meta else 0)
            for p, meta in zip(outputs, call.outputs, strict=True)
        ),
    )
