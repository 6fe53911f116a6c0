"""Sets of intervals on a line, (n, 2) arrays of start and end: sorted and disjoint where they come from `union`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

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
    first = np.searchsorted(united[:, 1], start, side="right")
    return np.clip(united[first : np.searchsorted(united[:, 0], end)], start, end)


def shares(sets: Sequence[Intervals]) -> list[float]:
    """The length of each united set, of which what several cover counts for each in equal parts."""
    edges = np.unique(np.concatenate([[], *(united.ravel() for united in sets)]))
    covers = [np.searchsorted(united.ravel(), edges[:-1], side="right") % 2 == 1 for united in sets]
    parts = np.diff(edges) / np.maximum(sum(covers), 1)
    return [float(parts[is_covered].sum()) for is_covered in covers]


def difference(united: Intervals, others: Intervals) -> Intervals:
    """What it covers and the others, united too, do not."""
    edges = np.unique(np.concatenate([united.ravel(), others.ravel()]))
    # Of sorted starts and ends an odd number lies before a point that is covered.
    ours, theirs = (np.searchsorted(of.ravel(), edges[:-1], side="right") % 2 == 1 for of in (united, others))
    return cast(Intervals, np.column_stack([edges[:-1], edges[1:]])[ours & ~theirs])
