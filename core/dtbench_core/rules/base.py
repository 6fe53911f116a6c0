"""Sharding rules: for an op and its global inputs, a rule lists the ways to run it on one mesh dim.

A rule is independent of the mesh. It lists `PlacementRow`s. If the inputs are placed as in a row on a mesh dim, running
the op on the local shards gives outputs placed as in that row. `choose_rows` (choose.py) picks one row per mesh dim.
Thus the work is linear in the number of mesh dims, and a rule is a short table that can be checked by eye.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch._ops import OpOverload

from dtbench_core.layout.placement import REPLICATE, Partial, Placement, Placements, Shard
from dtbench_core.layout.spec import DTensorSpec, TensorMeta
from dtbench_core.op_types import Args, Call, Kwargs, Value

aten = torch.ops.aten
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlacementRow:
    """Placements of all tensor inputs and outputs with which an op can run on one mesh dim.

    Attributes:
        inputs, outputs: placements in the order of the tensors.
        even: tensor dims that must have the same length on every rank, as pairs (input index, dim). Outputs have the
            indices -1, -2, ...
        nonempty: tensor dims that must not be empty on any rank, as the same pairs.
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    even: tuple[tuple[int, int], ...] = ()
    nonempty: tuple[tuple[int, int], ...] = ()


def bound_arguments(op: OpOverload, args: Args, kwargs: Mapping[str, Any]) -> Kwargs:
    """Returns the arguments of a call by their names in the op's schema, with defaults for the missing ones."""
    arguments = {a.name: a.default_value for a in op._schema.arguments}
    return {**arguments, **dict(zip(arguments, args, strict=False)), **kwargs}


def listed_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Returns `dims` as sorted non-negative dims of a tensor of `ndim` dims; all dims for None or []."""
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(sorted(d % ndim for d in dims)) if dims and ndim else tuple(range(ndim))


ChosenPlacements = tuple[tuple[Placements, ...], tuple[Placements, ...]]  # (of each input, of each output)


@dataclass(frozen=True)
class Strategy:
    """The result of a rule. The row with Replicate everywhere is always possible and need not be listed.

    Attributes:
        rows: the possible placements on a mesh dim.
        local_shape_args: positions of arguments that are the global shape of the output (as in `view`). The local shape
            replaces them.
        local_op: function to run on the shards instead of the op, if the local computation differs.
        localize: creates the local_op if it depends on which part of the tensors this rank has. Returns None to run the
            op itself.
        exact_placements: placements that the rule chose itself; `rows` is then ignored.
        any_lengths: whether the local computation is also valid for shards that torch.chunk does not produce. That is
            so if local_op does not depend on how dims are cut, or localize takes lengths and offsets from the specs.
    """

    rows: Sequence[PlacementRow]
    local_shape_args: tuple[int, ...] = ()
    local_op: Call | None = None
    localize: Callable[[PlacedSpecs], Call | None] | None = None
    exact_placements: ChosenPlacements | None = None
    any_lengths: bool = False


class PlacedSpecs(NamedTuple):
    """The argument of `Strategy.localize`.

    Attributes:
        inputs: specs of the tensor inputs after their redistribution.
        outputs: specs of the results; None for results that are not tensors.
    """

    inputs: tuple[DTensorSpec, ...]
    outputs: tuple[DTensorSpec | None, ...]


@dataclass
class OpCall:
    """A call of an op, to be planned, with specs instead of tensors.

    Attributes:
        inputs: specs of the tensor arguments, flattened, in order.
        outputs: global metadata of the tensor results.
    """

    op: OpOverload
    args: tuple[Value, ...]
    kwargs: Kwargs
    inputs: tuple[DTensorSpec, ...]
    outputs: tuple[TensorMeta | None, ...] = ()
    _bound: Kwargs = field(default_factory=dict)

    def arguments(self) -> Kwargs:
        """Returns all arguments by name, with defaults for the missing ones."""
        if not self._bound:
            self._bound = bound_arguments(self.op, self.args, self.kwargs)
        return self._bound

    def __getitem__(self, name: str) -> Value:
        return self.arguments()[name]

    def dim(self, name: str = "dim", ndim: int | None = None) -> int:
        """Returns the argument `name` as a non-negative dim of the first input (or of a tensor of `ndim` dims).

        A tensor without dims accepts the dims 0 and -1, although it has none; both become 0.
        """
        count = max(self.inputs[0].ndim if ndim is None else ndim, 1)
        dim: int = self[name]
        return dim + count if dim < 0 else dim

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """Returns the argument `name` as sorted non-negative dims of the first input; all dims for None or []."""
        return listed_dims(self[name], self.inputs[0].ndim)

    def describe(self) -> str:
        """Formats the call for messages, like "aten.add.Tensor(float32[4] S(0) on ..., 2)"."""
        parts = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"{self.op}({', '.join(parts)})"


def ops_named(names: str, suffix: str = "") -> list[OpOverload]:
    """Returns the aten ops of these names that exist in this torch. A name may include an overload: "sort.stable"."""
    ops = []
    for name in names.split():
        packet, _, overload = (name + suffix).partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        ops += [] if op is None else [op]
    return ops


def by_op(table: Mapping[str, T], suffix: str = "") -> dict[OpOverload, T]:
    """Expands a table keyed by space-separated op names to one keyed by ops."""
    return {op: entry for names, entry in table.items() for op in ops_named(names, suffix)}


Rule = Callable[[OpCall], Strategy]

rules_by_op: dict[OpOverload, Rule] = {}  # rules of single ops; pointwise ops may lack one


def rule(*ops: OpOverload) -> Callable[[Rule], Rule]:
    """Registers the decorated rule for `ops`."""

    def register(function: Rule) -> Rule:
        rules_by_op.update(dict.fromkeys(ops, function))
        return function

    return register


decompositions: dict[OpOverload, Call] = {}


def decomposition(*ops: OpOverload, with_op: bool = False) -> Callable[[Call], Call]:
    """Registers the decorated function, written with torch ops on DTensors, to run instead of `ops`.

    It is for ops that need an intermediate global value, such as a mean over the elements of all ranks. If it returns
    NotImplemented, the op's rule applies as if there were no decomposition.

    Args:
        with_op: whether the function gets the op as its first argument.
    """

    def register(function: Call) -> Call:
        for op in ops:
            decompositions[op] = functools.partial(function, op) if with_op else function
        return function

    return register


overridden_ops: set[OpOverload] = set()  # ops with a rule registered by the user


def placements_by_tensor(rows: Sequence[PlacementRow]) -> ChosenPlacements:
    """Converts one row per mesh dim to the placements of each input and of each output."""
    inputs, outputs = [row.inputs for row in rows], [row.outputs for row in rows]
    return tuple(zip(*inputs, strict=True)), tuple(zip(*outputs, strict=True))


def shard_rows(dims: Iterable[int], ins: int, outs: int) -> list[PlacementRow]:
    """Returns rows for ops that are pointwise along each of `dims`: all inputs and outputs are Shard(d)."""
    return [PlacementRow((Shard(d),) * ins, (Shard(d),) * outs) for d in dims]


def linear_rows(
    call: OpCall, ins: int, outs: int = 1, ops: tuple[str, ...] = ("sum", "avg")
) -> list[PlacementRow]:
    """Returns rows for ops that commute with the pending reductions `ops` of all their inputs."""
    return [PlacementRow((Partial(op),) * ins, (Partial(op),) * outs) for op in pending_ops(call, ops)]


def pending_rows(
    call: OpCall, *terms: tuple[int, ...], ops: Iterable[str] = ("sum", "avg"), count: int | None = None
) -> list[PlacementRow]:
    """Returns rows for ops that commute with pending reductions of some inputs while the others are replicated.

    Args:
        terms: groups of input indices; one row per group, in which these inputs are Partial.
        ops: the reductions.
        count: number of inputs in the rows, if not all.
    """
    inputs, outs = range(len(call.inputs) if count is None else count), len(call.outputs)
    return [
        PlacementRow(tuple(Partial(op) if i in group else REPLICATE for i in inputs), (Partial(op),) * outs)
        for op in pending_ops(call, ops)
        for group in terms
    ]


def shard_rows_except(
    call: OpCall, excluded_dims: Iterable[int], ins: int = 1, outs: int = 1
) -> list[PlacementRow]:
    """Returns `shard_rows` for all dims of the first input except some, which stay replicated."""
    excluded_dims = set(excluded_dims)
    return shard_rows((d for d in range(call.inputs[0].ndim) if d not in excluded_dims), ins, outs)


def pending_ops(call: OpCall, ops: Iterable[str]) -> list[str]:
    """Returns the reductions in `ops` that are pending on some input. Rows for the others would never be chosen."""
    pending = {p.reduce_op for spec in call.inputs for p in spec.placements if isinstance(p, Partial)}
    return [op for op in ops if op in pending] if pending else []


def replicated_row(call: OpCall) -> PlacementRow:
    return PlacementRow((REPLICATE,) * len(call.inputs), (REPLICATE,) * len(call.outputs))
