"""Numbers that differ between simulated ranks: what `shape`, a coordinate or `item()` gives there.

A `torch.SymInt` (SymFloat, SymBool) carries a node of this module, so torch takes it wherever it takes
a symbolic number: in shapes, as a scalar, as a dim's length. Arithmetic happens rank by rank. A
comparison that comes out the same on every rank is a plain bool. One that does not can be carried
along, but raises `RankDependentError` once the program would have to branch on it: the simulated
program is run once, and can go only one way.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NoReturn, TypeVar

import torch

from dtbench_core.errors import RankDependentError, describe_ranks
from dtbench_core.op_types import Call

Number = int | float | bool
Result = TypeVar("Result")


class _LocalNode:
    """One number per rank, as the node of a symbolic number.

    torch calls these methods by name, from Python and from C++. An operation gives the node of whatever
    Python gives rank by rank.
    """

    kind: ClassVar[type]

    def __init__(self, values: Mapping[int, Any]) -> None:
        self.values: dict[int, Any] = dict(values)

    # ---- what it is ----

    def is_int(self) -> bool:
        return self.kind is int

    def is_float(self) -> bool:
        return self.kind is float

    def is_bool(self) -> bool:
        return self.kind is bool

    def is_nested_int(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return False

    def is_constant(self) -> bool:
        """Whether all ranks agree; then `guard_int` and the like give the number."""
        return len(set(self.values.values())) == 1

    def _constant(self) -> Any:
        return next(iter(self.values.values())) if self.is_constant() else None

    maybe_as_int = maybe_as_float = maybe_as_bool = constant_int = constant_bool = _constant

    @property
    def constant(self) -> Any:
        return self._constant()

    def has_hint(self) -> bool:
        return False

    def clone(self) -> _LocalNode:
        return self

    def __repr__(self) -> str:
        return describe_values(self.values)

    _graph_repr = str = _str = __repr__

    # ---- arithmetic ----

    def _each(self, fn: Call, *others: object) -> _LocalNode:
        for other in others:
            if isinstance(other, _LocalNode) and other.values.keys() != self.values.keys():
                raise RankDependentError(
                    f"got numbers of different simulated ranks, {self} and {other}, expected the same ranks: "
                    "compute with values of one mesh"
                )
        return node_of({r: fn(v, *(_on_rank(o, r) for o in others)) for r, v in self.values.items()})

    def wrap_int(self, number: int) -> _LocalNode:
        return LocalIntNode(dict.fromkeys(self.values, number))

    def wrap_float(self, number: float) -> _LocalNode:
        return LocalFloatNode(dict.fromkeys(self.values, number))

    def wrap_bool(self, number: bool) -> _LocalNode:
        return LocalBoolNode(dict.fromkeys(self.values, number))

    def sym_sum(self, others: Iterable[Any]) -> _LocalNode:
        return self._each(lambda _, *terms: sum(terms), *others)

    def sym_ite(self, then: object, otherwise: object) -> _LocalNode:
        return self._each(lambda me, a, b: a if me else b, then, otherwise)

    # ---- where the program needs the one number ----

    def _decide(self, *_: object) -> Any:
        if not self.is_constant():
            self._refuse()
        return self._constant()

    guard_int = guard_float = guard_bool = int_ = float_ = bool_ = _decide
    expect_true = expect_size = evaluate = _decide

    def guard_or_false(self, *_: object) -> bool:
        """For checks whose "don't know" is False: true only if it is so on every rank."""
        return all(self.values.values())

    def guard_or_true(self, *_: object) -> bool:
        return any(self.values.values())

    statically_known_true = guard_size_oblivious = guard_or_false

    def _refuse(self) -> NoReturn:
        raise RankDependentError(
            f"got {self}, a number that differs between the simulated ranks, where the program needs the one "
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
    """A bool per rank. `of` is the comparison it comes from, if any."""

    kind = bool
    of = ""

    def guard_bool(self, *_: object) -> bool:
        """torch's own C++ code branches on it (a Python program asks `bool_`).

        It asks whether a size is 0 or 1, or that of another tensor, to take a shortcut: where that holds on some
        ranks only, the general way is right for all. (The one exception is a dim that broadcasts on
        some ranks only, which local_tensor.py refuses.)
        """
        if not self.is_constant() and self.of in ("eq", "ne"):
            return self.of == "ne"
        return bool(self._decide())


_SAME_NAME = "add sub mul mod floordiv lshift rshift truediv pow eq ne lt le gt ge neg abs pos"
_NUMBERS: dict[str, Call] = {
    **{name: getattr(operator, name) for name in _SAME_NAME.split()},
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
    "and_": lambda a, b: a and b,
    "or_": lambda a, b: a or b,
    "sym_and": lambda a, b: a and b,
    "sym_or": lambda a, b: a or b,
    "sym_not": operator.not_,
    "sym_float": float,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "round": round,
    "sym_int": int,
    "is_integer": lambda a: float(a).is_integer(),
}


def _install(name: str, fn: Call) -> None:
    def method(self: _LocalNode, *others: object) -> _LocalNode:
        made = self._each(fn, *others)
        if isinstance(made, LocalBoolNode):
            made.of = name
        return made

    method.__name__ = name
    setattr(_LocalNode, name, method)


for _name, _fn in _NUMBERS.items():
    _install(_name, _fn)


# torch asks the node of a tensor's first symbolic size about the tensor's memory layout.
_LAYOUT: dict[str, Callable[[torch.Tensor], bool]] = {
    "is_contiguous": torch.Tensor.is_contiguous,
    "is_channels_last_contiguous_2d": lambda t: t.is_contiguous(memory_format=torch.channels_last),
    "is_channels_last_contiguous_3d": lambda t: t.is_contiguous(memory_format=torch.channels_last_3d),
    "is_channels_last_strides_2d": lambda t: torch.ops.aten.is_strides_like_format(t, torch.channels_last),
    "is_channels_last_strides_3d": lambda t: torch.ops.aten.is_strides_like_format(t, torch.channels_last_3d),
    "is_non_overlapping_and_dense": lambda t: torch.ops.aten.is_non_overlapping_and_dense(t),
}


def _install_layout(name: str, fn: Callable[[torch.Tensor], bool]) -> None:
    def method(self: _LocalNode, sizes: list[Any], strides: list[Any]) -> _LocalNode:
        held = {r: ([_on_rank(s, r) for s in sizes], [_on_rank(s, r) for s in strides]) for r in self.values}
        with torch._C._DisableTorchDispatch():
            return node_of({r: fn(torch.empty_strided(*one, device="meta")) for r, one in held.items()})

    setattr(_LocalNode, name, method)


for _name, _layout_fn in _LAYOUT.items():
    _install_layout(_name, _layout_fn)


def _on_rank(value: object, rank: int) -> Any:
    """The plain number that `value` (a number, symbolic or not, or a node) is on `rank`."""
    node = getattr(value, "node", value) if not isinstance(value, (int, float)) else value
    if isinstance(node, _LocalNode):
        if rank not in node.values:
            raise RankDependentError(f"got the number {node}, which rank {rank} does not have")
        return node.values[rank]
    constant = getattr(node, "maybe_as_int", None)  # a constant node of torch's own
    return node if constant is None else constant()


def node_of(values: Mapping[int, Any]) -> _LocalNode:
    """The node of these plain numbers, one per rank."""
    kinds = {type(v) for v in values.values()}
    if kinds == {bool}:
        return LocalBoolNode(values)
    return LocalIntNode(values) if kinds <= {int, bool} else LocalFloatNode(values)


def local_number(values: Mapping[int, Number]) -> Any:
    """The number itself if all ranks have the same, else a SymInt, SymFloat or SymBool of all."""
    node = node_of(values)
    if node.is_constant():
        return next(iter(values.values()))
    if node.kind is int:
        return torch.SymInt(node)
    return torch.SymBool(node) if node.kind is bool else torch.SymFloat(node)


def local_int(values: Mapping[int, int]) -> Any:
    """An int, or a `torch.SymInt` that is `values[r]` on simulated rank r."""
    return local_number(values)


def values_of(number: Any) -> dict[int, Any] | None:
    """rank -> number of a rank-dependent number, None for anything else."""
    if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        node = number.node
        if isinstance(node, _LocalNode):
            return node.values
    return None


def describe_values(values: Mapping[int, Any]) -> str:
    """`{0-2: 4, 3: 1}`: equal values stand once, with their ranks."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(repr(values[rank]), []).append(rank)
    return "{" + ", ".join(f"{describe_ranks(ranks)}: {text}" for text, ranks in groups.items()) + "}"
