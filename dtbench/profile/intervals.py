"""Sets of intervals on a line, (n, 2) arrays of start and end: sorted and disjoint where they come from `union`."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]


def intervals(pairs: Iterable[tuple[float, float]]) -> Intervals:
    return np.array(list(pairs), dtype=np.float64).reshape(-1, 2)


def union(some: Intervals) -> Intervals:
    """What any of them covers."""
    some = some[some[:, 0] < some[:, 1]]
    if not len(some):
        return some
    some = some[np.argsort(some[:, 0], kind="stable")]
    until = np.maximum.accumulate(some[:, 1])
    first = np.concatenate([[True], some[1:, 0] > until[:-1]])
    return np.column_stack([some[first, 0], until[np.append(np.flatnonzero(first)[1:] - 1, len(some) - 1)]])


def length(united: Intervals) -> float:
    return float((united[:, 1] - united[:, 0]).sum())


def within(united: Intervals, start: float, end: float) -> Intervals:
    """The part of it between two points."""
    cut = np.clip(united, start, end)
    return cut[cut[:, 0] < cut[:, 1]]


def gaps(united: Intervals, start: float, end: float) -> Intervals:
    """What it leaves of the line between two points."""
    inside = within(united, start, end)
    edges = np.concatenate([[start], inside.ravel(), [end]]).reshape(-1, 2)
    return edges[edges[:, 0] < edges[:, 1]]


def difference(united: Intervals, others: Intervals) -> Intervals:
    """What it covers and the others, united too, do not."""
    if not len(united) or not len(others):
        return united
    outside = gaps(others, min(united[0, 0], others[0, 0]), max(united[-1, 1], others[-1, 1]))
    # Each piece with each gap that it meets: both are sorted.
    first = np.searchsorted(outside[:, 1], united[:, 0], side="right")
    last = np.searchsorted(outside[:, 0], united[:, 1], side="left")
    counts = np.maximum(last - first, 0)
    piece = np.repeat(np.arange(len(united)), counts)
    gap = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    cut = np.column_stack(
        [np.maximum(united[piece, 0], outside[gap, 0]), np.minimum(united[piece, 1], outside[gap, 1])]
    )
    return cut[cut[:, 0] < cut[:, 1]]
