"""Arithmetic of time intervals: unions, intersections, what one set leaves of another. Pure.

An interval is (start, end), half open, in any unit; a set of them is normal when its members are sorted,
disjoint, not touching and not empty. Every function takes any intervals and gives a normal set.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The normal set that covers what any of them covers."""
    merged: list[Interval] = []
    for start, end in sorted(i for i in intervals if i[0] < i[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersection(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What both cover."""
    a, b = union(some), union(others)
    found: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            found.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What `some` covers and `others` does not."""
    edges = [-math.inf, *(edge for interval in union(others) for edge in interval), math.inf]
    return intersection(some, zip(edges[::2], edges[1::2], strict=True))


def length(intervals: Iterable[Interval]) -> float:
    """How much they cover together."""
    return sum(end - start for start, end in union(intervals))
