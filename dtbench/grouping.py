"""Items put together by what they have in common, and names in the order in which people read them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeVar

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


def group_by(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Key -> its items, both in the order of first appearance; the items need not be sorted."""
    grouped: dict[_K, list[_T]] = {}
    for item in items:
        grouped.setdefault(key(item), []).append(item)
    return grouped


def sort_by_order(names: Collection[str], order: Sequence[str]) -> list[str]:
    """Each name once: those of `order` as there, then the others by the alphabet."""
    return [name for name in order if name in names] + sorted(set(names).difference(order))
