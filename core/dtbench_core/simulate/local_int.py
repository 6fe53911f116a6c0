"""Numbers that differ between simulated ranks, such as a dim of uneven shards, a mesh coordinate or `item()`.

A `torch.SymInt` (SymFloat, SymBool) carries a node of this module. So torch accepts it wherever it accepts a symbolic
number: in shapes, as a scalar, as the length of a dim. Arithmetic is done for each rank.

A comparison with the same result on every rank is a plain bool. Any other result can be passed on.
`RankDependentError` is raised if the program has to branch on it, since the program runs once and can take only one
branch.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch

from dtbench_core.errors import RankDependentError, describe_ranks
from dtbench_core.op_types import Call

Number = int | float | bool


def _has_kind(kind: type) -> Callable[[_LocalNode], bool]:
    return lambda node: node.kind is kind


class _LocalNode:
    """The node of a symbolic number that has one value per rank.

    torch calls these methods by name, from Python and from C++. An operation applies Python's own to each rank's
    number and returns a node of the results.

    Attributes:
        kind: the Python type of the numbers.
        values: rank -> number.
    """

    kind: ClassVar[type]

    def __init__(self, values: Mapping[int, Any]) -> None:
        self.values: dict[int, Any] = dict(values)

    # ---- properties ----

    is_int, is_float, is_bool = (_has_kind(kind) for kind in (int, float, bool))

    def _false(self) -> bool:
        return False

    is_nested_int = is_symbolic = has_hint = _false

    def is_constant(self) -> bool:
        """Whether all ranks have the same number; `guard_int` and similar methods then return it."""
        return len(set(self.values.values())) == 1

    def _constant(self) -> Any:
        return next(iter(self.values.values())) if self.is_constant() else None

    maybe_as_int = maybe_as_float = maybe_as_bool = constant_int = constant_bool = _constant

    constant = property(_constant)

    def clone(self) -> _LocalNode:
        return self

    def __repr__(self) -> str:
        return describe_values(self.values)

    _graph_repr = str = _str = __repr__

    # ---- arithmetic ----

    def _per_rank(self, fn: Call, *operands: object) -> _LocalNode:
        for operand in operands:
            if isinstance(operand, _LocalNode) and operand.values.keys() != self.values.keys():
                raise RankDependentError(
                    f"got numbers of different simulated ranks, {self} and {operand}, expected the same ranks: "
                    "compute with values of one mesh"
                )
        return node_of({r: fn(v, *(_on_rank(o, r) for o in operands)) for r, v in self.values.items()})

    def _wrap(self, number: Number) -> _LocalNode:
        return node_of(dict.fromkeys(self.values, number))

    wrap_int = wrap_float = wrap_bool = _wrap

    def sym_sum(self, terms: Sequence[object]) -> _LocalNode:
        return self._per_rank(lambda _, *numbers: sum(numbers), *terms)

    # ---- uses that need the same number on every rank ----

    def _decide(self, *_: object) -> Any:
        if not self.is_constant():
            self._refuse()
        return self._constant()

    guard_int = guard_float = guard_bool = int_ = float_ = bool_ = _decide
    expect_true = expect_size = evaluate = _decide

    def guard_or_false(self, *_: object) -> bool:
        """Answers checks for which "unknown" is False: true only if true on every rank."""
        return all(self.values.values())

    def guard_or_true(self, *_: object) -> bool:
        return any(self.values.values())

    statically_known_true = guard_size_oblivious = guard_or_false

    def _refuse(self) -> NoReturn:
        raise RankDependentError(
            f"got {self}, a number that differs between the simulated ranks, where the program needs a single "
            "number or has to branch on it: do this part per rank, in a function under "
            "rank_map(fn) or @maybe_run_for_local_tensor"
        )


class LocalIntNode(_LocalNode):
    """An int per rank; `torch.SymInt(LocalIntNode({0: 2, 1: 3}))` is the number (see `local_int`)."""

    kind = int


class LocalFloatNode(_LocalNode):
    """A float per rank."""

    kind = float


class LocalBoolNode(_LocalNode):
    """A bool per rank.

    Attributes:
        comparison: the name of the comparison that it results from, or "".
    """

    kind = bool
    comparison = ""

    def guard_bool(self, *_: object) -> bool:
        """Decides a branch of torch's own C++ code (a Python program calls `bool_`).

        C++ code compares a size with 0, 1 or the size of another tensor to take a shortcut. If the comparison holds
        on some ranks only, the general branch is correct for all. (The one exception is a dim that broadcasts on some
        ranks only, which local_tensor.py refuses.)
        """
        if not self.is_constant() and self.comparison in ("eq", "ne"):
            return self.comparison == "ne"
        return bool(self._decide())


_SAME_NAME = "add sub mul mod floordiv lshift rshift truediv pow eq ne lt le gt ge neg abs pos and_ or_"
_OPERATORS: dict[str, Call] = {
    **{name: getattr(operator, name) for name in _SAME_NAME.split()},
    **{name: getattr(math, name) for name in ("floor", "ceil", "trunc")},
    "int_floordiv": operator.floordiv,
    "int_truediv": operator.truediv,
    "float_truediv": operator.truediv,
    "pow_by_natural": operator.pow,
    "float_pow": operator.pow,
    "sym_max": max,
    "sym_min": min,
    "bitwise_and": operator.and_,
    "bitwise_or": operator.or_,
    "bitwise_xor": operator.xor,
    "sym_and": operator.and_,
    "sym_or": operator.or_,
    "sym_not": operator.not_,
    "sym_float": float,
    "round": round,
    "sym_int": int,
    "is_integer": lambda a: float(a).is_integer(),
}


def _operator_method(name: str, fn: Call) -> Call:
    def method(self: _LocalNode, *operands: object) -> _LocalNode:
        node = self._per_rank(fn, *operands)
        if isinstance(node, LocalBoolNode):
            node.comparison = name
        return node

    return method


for _name, _fn in _OPERATORS.items():
    setattr(_LocalNode, _name, _operator_method(_name, _fn))


# torch calls these methods on the node of a tensor's first symbolic size, to learn the tensor's memory layout.
_LAYOUT: dict[str, Callable[[torch.Tensor], bool]] = {
    "is_contiguous": torch.Tensor.is_contiguous,
    "is_non_overlapping_and_dense": lambda t: torch.ops.aten.is_non_overlapping_and_dense(t),
}
for _dims, _format in ((2, torch.channels_last), (3, torch.channels_last_3d)):
    _LAYOUT[f"is_channels_last_contiguous_{_dims}d"] = functools.partial(
        torch.Tensor.is_contiguous, memory_format=_format
    )
    _LAYOUT[f"is_channels_last_strides_{_dims}d"] = lambda t, memory_format=_format: (  # type: ignore[misc]
        torch.ops.aten.is_strides_like_format(t, memory_format)
    )


def _layout_method(fn: Callable[[torch.Tensor], bool]) -> Call:
    def method(self: _LocalNode, sizes: list[Any], strides: list[Any]) -> _LocalNode:
        layouts = {
            r: [[_on_rank(n, r) for n in numbers] for numbers in (sizes, strides)] for r in self.values
        }
        with torch._C._DisableTorchDispatch():
            return node_of(
                {r: fn(torch.empty_strided(*layout, device="meta")) for r, layout in layouts.items()}
            )

    return method


for _name, _layout_fn in _LAYOUT.items():
    setattr(_LocalNode, _name, _layout_method(_layout_fn))


def _on_rank(value: object, rank: int) -> Any:
    """Returns the plain number of `value` on `rank`. `value` is a number, a symbolic number or a node."""
    node = getattr(value, "node", value) if not isinstance(value, (int, float)) else value
    if isinstance(node, _LocalNode):
        if rank not in node.values:
            raise RankDependentError(f"got the number {node}, which has no value for rank {rank}")
        return node.values[rank]
    constant = getattr(node, "maybe_as_int", None)  # torch's own constant node
    return node if constant is None else constant()


def node_of(values: Mapping[int, Any]) -> _LocalNode:
    """Returns the node of these plain numbers, one per rank."""
    kinds = {type(v) for v in values.values()}
    if kinds == {bool}:
        return LocalBoolNode(values)
    return LocalIntNode(values) if kinds <= {int, bool} else LocalFloatNode(values)


_SYMBOLS: dict[type, Any] = {int: torch.SymInt, float: torch.SymFloat, bool: torch.SymBool}


def local_number(values: Mapping[int, Number]) -> Any:
    """Returns the number itself if all ranks have the same, otherwise a SymInt, SymFloat or SymBool of all numbers."""
    node = node_of(values)
    return next(iter(values.values())) if node.is_constant() else _SYMBOLS[node.kind](node)


def local_int(values: Mapping[int, int]) -> Any:
    """Returns an int, or a `torch.SymInt` whose value on simulated rank r is `values[r]`."""
    return local_number(values)


def values_of(number: Any) -> dict[int, Any] | None:
    """Returns rank -> number for a rank-dependent number, None for anything else."""
    node = number.node if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) else None
    return node.values if isinstance(node, _LocalNode) else None


def describe_values(values: Mapping[int, Any]) -> str:
    """Formats values per rank, e.g. `{0-2: 4, 3: 1}`; ranks with equal values are listed together."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(repr(values[rank]), []).append(rank)
    return "{" + ", ".join(f"{describe_ranks(ranks)}: {text}" for text, ranks in groups.items()) + "}"
