"""What a rule is: for one op and its global inputs, the ways it may run on one mesh dim.

A rule never sees the mesh. It lists `PlacementRow`s, each saying: if the inputs are placed so on a mesh dim,
running the op on the local shards gives outputs placed so. `choose` (choose.py) picks one row per
mesh dim. That keeps the work linear in mesh dims, and a rule a short table one can check by eye.
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
    """One way to run an op on one mesh dim: placements of all tensor inputs and outputs, in order.

    even, nonempty: tensor dims that every rank must hold equally much, or some, of. As pairs
    (input index, dim); an output counts from -1 downwards (-1 is the first).
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    even: tuple[tuple[int, int], ...] = ()
    nonempty: tuple[tuple[int, int], ...] = ()


def bound_arguments(op: OpOverload, args: Args, kwargs: Mapping[str, Any]) -> Kwargs:
    """The arguments of a call by their names in the op's schema, those not given with their default."""
    named = {a.name: a.default_value for a in op._schema.arguments}
    return {**named, **dict(zip(named, args, strict=False)), **kwargs}


def listed_dims(dims: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """`dims` of a tensor of so many as non-negative ones, in order; all of them for None or []."""
    listed = [dims] if isinstance(dims, int) else dims
    return tuple(sorted(d % ndim for d in listed)) if listed and ndim else tuple(range(ndim))


ChosenPlacements = tuple[tuple[Placements, ...], tuple[Placements, ...]]  # of all inputs, of all outputs


@dataclass(frozen=True)
class Strategy:
    """A rule's answer. The all-Replicate row is understood and need not be listed.

    local_shape_args: positions of arguments that hold the output's global shape (as `view` does),
        to be replaced by the local one.
    local_op: run on the shards instead of the op, where the local computation differs.
    localize: makes the local_op, where it depends on which part of the tensors this rank holds; None
        for the op itself.
    exact_placements: the placements of all inputs and of all outputs, chosen by the rule itself; rows are not read.
    any_lengths: local_op does not count on how torch.chunk cuts, or localize takes lengths and offsets from
        the specs, so that other cuts will do.
    """

    rows: Sequence[PlacementRow]
    local_shape_args: tuple[int, ...] = ()
    local_op: Call | None = None
    localize: Callable[[PlacedSpecs], Call | None] | None = None
    exact_placements: ChosenPlacements | None = None
    any_lengths: bool = False


class PlacedSpecs(NamedTuple):
    """What `Strategy.localize` gets: the specs of the tensor inputs, after they moved, and of the results."""

    inputs: tuple[DTensorSpec, ...]
    outputs: tuple[DTensorSpec | None, ...]


@dataclass
class OpCall:
    """An op about to be planned: its arguments with specs in the place of tensors."""

    op: OpOverload
    args: tuple[Value, ...]
    kwargs: Kwargs
    inputs: tuple[DTensorSpec, ...]  # the tensor arguments, flattened, in order
    outputs: tuple[TensorMeta | None, ...] = ()  # global metadata of the tensor results
    _bound: Kwargs = field(default_factory=dict)

    def named(self) -> Kwargs:
        """All arguments by name, those not given with their default."""
        if not self._bound:
            self._bound = bound_arguments(self.op, self.args, self.kwargs)
        return self._bound

    def __getitem__(self, name: str) -> Value:
        return self.named()[name]

    def dim(self, name: str = "dim", ndim: int | None = None) -> int:
        """The argument `name` as a non-negative tensor dim of the first input (or of `ndim` dims).

        A tensor without dims takes 0 and -1 for a dim it does not have: both come as 0.
        """
        count = max(self.inputs[0].ndim if ndim is None else ndim, 1)
        dim: int = self[name]
        return dim + count if dim < 0 else dim

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """The argument `name` as non-negative dims of the first input; all of them for None or []."""
        return listed_dims(self[name], self.inputs[0].ndim)

    def describe(self) -> str:
        """`aten.add.Tensor(float32[4] S(0) on ..., 2)` for messages."""
        parts = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"{self.op}({', '.join(parts)})"


def ops_named(names: str, suffix: str = "") -> list[OpOverload]:
    """The aten ops so called, with their overload where it is not the default one, that this torch has."""
    ops = []
    for name in names.split():
        packet, _, overload = (name + suffix).partition(".")
        op = getattr(getattr(aten, packet, None), overload or "default", None)
        ops += [] if op is None else [op]
    return ops


def by_op(table: Mapping[str, T], suffix: str = "") -> dict[OpOverload, T]:
    """A table of ops, from one of their names."""
    return {op: entry for names, entry in table.items() for op in ops_named(names, suffix)}


Rule = Callable[[OpCall], Strategy]

rules_by_op: dict[OpOverload, Rule] = {}  # an op's own


def rule(*ops: OpOverload) -> Callable[[Rule], Rule]:
    """Registers the decorated rule for `ops`."""

    def register(function: Rule) -> Rule:
        rules_by_op.update(dict.fromkeys(ops, function))
        return function

    return register


decompositions: dict[OpOverload, Call] = {}


def decomposition(*ops: OpOverload, with_op: bool = False) -> Callable[[Call], Call]:
    """Registers the decorated function, written with torch ops on DTensors, to run in the place of `ops`.

    For ops that need a global value half way, such as a mean weighted by what all ranks hold.
    Where it returns NotImplemented, the op's rule decides as if there were no decomposition.

    with_op: the function gets the op before its arguments.
    """

    def register(function: Call) -> Call:
        for op in ops:
            decompositions[op] = functools.partial(function, op) if with_op else function
        return function

    return register


overridden_ops: set[OpOverload] = set()  # for which a user has registered a rule


def override_rule(op: OpOverload, new: Rule) -> None:
    """Puts a user's rule in the place of whatever the core knows of `op`."""
    rules_by_op[op] = new
    decompositions.pop(op, None)
    overridden_ops.add(op)


def placements_by_tensor(rows: Sequence[PlacementRow]) -> ChosenPlacements:
    """What a row per mesh dim results in: the placements of all inputs, and of all outputs."""
    inputs, outputs = [row.inputs for row in rows], [row.outputs for row in rows]
    return tuple(zip(*inputs, strict=True)), tuple(zip(*outputs, strict=True))


def shard_rows(dims: Iterable[int], ins: int, outs: int) -> list[PlacementRow]:
    """Rows for ops that treat each of `dims` pointwise: all inputs and outputs are Shard(d)."""
    return [PlacementRow((Shard(d),) * ins, (Shard(d),) * outs) for d in dims]


def linear_rows(
    call: OpCall, ins: int, outs: int = 1, ops: tuple[str, ...] = ("sum", "avg")
) -> list[PlacementRow]:
    """Rows for ops that commute with the pending reductions `ops` of all their inputs."""
    return [PlacementRow((Partial(op),) * ins, (Partial(op),) * outs) for op in pending_ops(call, ops)]


def pending_rows(
    call: OpCall, *terms: tuple[int, ...], ops: Iterable[str] = ("sum", "avg"), count: int | None = None
) -> list[PlacementRow]:
    """Rows for ops through which pending reductions pass, of several inputs together: of each group of indices in
    `terms`, the others being whole. count: of the inputs that the rows are about, if not all."""
    inputs, outs = range(len(call.inputs) if count is None else count), len(call.outputs)
    return [
        PlacementRow(tuple(Partial(op) if i in group else REPLICATE for i in inputs), (Partial(op),) * outs)
        for op in pending_ops(call, ops)
        for group in terms
    ]


def shard_rows_except(call: OpCall, whole: Iterable[int], ins: int = 1, outs: int = 1) -> list[PlacementRow]:
    """`along` all dims of the first input but those that must be whole."""
    kept = set(whole)
    return shard_rows((d for d in range(call.inputs[0].ndim) if d not in kept), ins, outs)


def pending_ops(call: OpCall, ops: Iterable[str]) -> list[str]:
    """Those of `ops` that an input has pending on some mesh dim: of others the rows need not be listed."""
    pending = {p.reduce_op for spec in call.inputs for p in spec.placements if isinstance(p, Partial)}
    return [op for op in ops if op in pending] if pending else []


def replicated_row(call: OpCall) -> PlacementRow:
    return PlacementRow((REPLICATE,) * len(call.inputs), (REPLICATE,) * len(call.outputs))
