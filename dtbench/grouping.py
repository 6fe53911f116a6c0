"""Items put together by what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


def group_by(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Key -> its items, both in the order of first appearance; the items need not be sorted."""
    grouped: dict[_K, list[_T]] = {}
    for item in items:
        grouped.setdefault(key(item), []).append(item)
    return grouped
