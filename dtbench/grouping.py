"""Groups items by a key, and sorts names in a given order."""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeVar

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


def group_by(items: Iterable[_T], key: Callable[[_T], _K]) -> dict[_K, list[_T]]:
    """Returns key -> its items, both in the order of first appearance. The items need not be sorted."""
    grouped: dict[_K, list[_T]] = {}
    for item in items:
        grouped.setdefault(key(item), []).append(item)
    return grouped


def sort_by_order(names: Collection[str], order: Sequence[str]) -> list[str]:
    """Returns the distinct names: those in `order` in its order, then the others alphabetically."""
    return [name for name in order if name in names] + sorted(set(names).difference(order))
