"""Results of a compiled graph that share memory in plain torch, where one of them is a copy.

A graph gives out every result as a tensor of its own. Those that are windows on one local tensor still share it; a
copied view (redistribute/copied_view.py) does not: a write to it, or to a window on its base, would not show in the
other. The results of one call know of each other, and a write is refused while one is alive that it should reach.
"""

from __future__ import annotations

import threading
from typing import ClassVar, NamedTuple, TypeAlias
from weakref import ReferenceType

import torch

from dtbench_core.layout.spec import DTensorSpec


class StorageWindow(NamedTuple):
    """Where the elements of a tensor begin in the memory of which it is a window: all in bytes, but the sizes."""

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def window(spec: DTensorSpec, offset: int) -> StorageWindow:
    """Of a tensor that begins `offset` bytes behind its memory's start. The bytes of an element are its last dim."""
    size = spec.dtype.itemsize
    return StorageWindow(offset, (*spec.shape, size), (*(step * size for step in spec.stride), 1))


# As many multiples of one stride are tried; windows of which more would have to be are taken to meet.
_MOST_MULTIPLES = 16


def windows_meet(one: StorageWindow, other: StorageWindow) -> bool:
    """Whether a byte lies in both. Exact where strides nest, as those of views of one tensor mostly do."""
    if 0 in one.sizes or 0 in other.sizes:
        return False
    # A byte of `one` less a byte of `other`, counted from its end: sums of strides that must make up `distance`.
    distance, steps = other.offset - one.offset, dict[int, int]()
    for which in (one, other):
        for size, stride in zip(which.sizes, which.strides, strict=True):
            steps[stride] = steps.get(stride, 0) + size - 1
    distance += sum((n - 1) * step for n, step in zip(other.sizes, other.strides, strict=True))
    return _makes_up(distance, sorted((step, most) for step, most in steps.items() if step and most))


def _makes_up(distance: int, steps: list[tuple[int, int]]) -> bool:
    """Whether multiples of these strides, each up to its bound, add up to `distance`."""
    if not steps:
        return distance == 0
    *smaller, (stride, most) = steps
    reach = sum(step * bound for step, bound in smaller)
    first, last = max(0, -((reach - distance) // stride)), min(most, distance // stride)
    if last - first >= _MOST_MULTIPLES:
        return True
    return any(_makes_up(distance - n * stride, smaller) for n in range(first, last + 1))


class SharedResults:
    """A graph's results on one memory: (its window, whether it is a copy) of each. exist: whether there are any, made
    here or loaded with a graph."""

    __slots__ = ("_calls", "results")

    exist: ClassVar[bool] = False

    def __init__(self, results: list[tuple[StorageWindow, bool]] | None = None) -> None:
        SharedResults.exist = True
        self.results = results or []
        self._calls = threading.local()

    def __reduce__(self) -> tuple[type[SharedResults], tuple[list[tuple[StorageWindow, bool]]]]:
        return SharedResults, (self.results,)

    def of_call(self, index: int) -> dict[int, ReferenceType[torch.Tensor]]:
        """The results of the call that now makes the one at `index`: every call makes each once."""
        results: dict[int, ReferenceType[torch.Tensor]] = getattr(self._calls, "results", {})
        if not results or index in results:
            results = self._calls.results = {}
        return results

    def meeting(self, index: int) -> list[int]:
        """Which others have elements in common with the one at `index`, and do not follow a write to it."""
        mine, copied = self.results[index]
        return [
            i
            for i, (other, copy) in enumerate(self.results)
            if i != index and (copied or copy) and windows_meet(mine, other)
        ]


NOT_ALONE, OF_BASE = -1, -2
Place: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]


class Parted(NamedTuple):
    """How a graph gives out a tensor as one of its own that shares memory in plain torch.

    from_input: with an input, which would not follow a write. shared, number: with other results, and which of them it
    is; `NOT_ALONE`: of an input of a later graph, whose others were alive; `OF_BASE`: of one that is a view of another
    tensor. results: of the same call, once it was called. place: where it lies in the local tensor of an input
    that is given out beside it, sizes, strides and offset, of a window on what the graph has written to.
    """

    from_input: bool
    shared: SharedResults | None = None
    number: int = 0
    results: dict[int, ReferenceType[torch.Tensor]] | None = None
    place: Place | None = None

    def for_itself(self) -> bool:
        """Whether it shares memory with nothing else that is given out."""
        if self.from_input or self.number < 0:
            return False
        return self.shared is None or not self.shared.meeting(self.number)

    def alone(self) -> bool:
        """Whether a write reaches all that share its memory: the other results are gone."""
        if self.from_input or self.number < 0:
            return False
        if self.shared is None or self.results is None:
            return True
        alive = [i for i, ref in self.results.items() if i != self.number and ref() is not None]
        return not alive or not set(alive) & set(self.shared.meeting(self.number))
