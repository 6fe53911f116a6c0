"""Sets of intervals on a line.

A set is an array of shape (n, 2) with starts and ends. All functions except `union` require it sorted and disjoint.
"""

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]


def intervals(pairs: Iterable[tuple[float, float]]) -> Intervals:
    """Returns (start, end) pairs as an array, unsorted."""
    return np.array(list(pairs), dtype=np.float64).reshape(-1, 2)


def union(unsorted: Intervals) -> Intervals:
    """Merges overlapping intervals and drops empty ones."""
    spans = unsorted[unsorted[:, 0] < unsorted[:, 1]]
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    until = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > until[:-1]])
    return np.column_stack([spans[first, 0], until[np.append(np.flatnonzero(first)[1:] - 1, len(spans) - 1)]])


def length(united: Intervals) -> float:
    """Returns the total length."""
    return float((united[:, 1] - united[:, 0]).sum())


def within(united: Intervals, start: float, end: float) -> Intervals:
    """Clips a set to the interval between two points."""
    first = np.searchsorted(united[:, 1], start, side="right")
    return np.clip(united[first : np.searchsorted(united[:, 0], end)], start, end)


def shares(sets: Sequence[Intervals]) -> list[float]:
    """Returns a length for each set. Where n sets overlap, each gets 1/n of the overlap."""
    edges = np.unique(np.concatenate([[], *(united.ravel() for united in sets)]))
    covers = [_covers(united, edges) for united in sets]
    parts = np.diff(edges) / np.maximum(sum(covers), 1)
    return [float(parts[is_covered].sum()) for is_covered in covers]


def difference(minuend: Intervals, subtrahend: Intervals) -> Intervals:
    """Returns the part of one set that the other does not cover."""
    edges = np.unique(np.concatenate([minuend.ravel(), subtrahend.ravel()]))
    is_left = _covers(minuend, edges) & ~_covers(subtrahend, edges)
    return cast(Intervals, np.column_stack([edges[:-1], edges[1:]])[is_left])


def _covers(united: Intervals, edges: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Returns for each gap between neighboring edges whether the set covers it.

    An odd number of the set's sorted starts and ends lies before a covered point.
    """
    return cast(NDArray[np.bool_], np.searchsorted(united.ravel(), edges[:-1], side="right") % 2 == 1)
