"""Makes the key of a call in the cache of plans: op or function, specs and static arguments."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.op_types import Args, Kwargs, Value

Key = tuple[Any, ...]

_Size = torch.Size
_dtype_of, _dim_of = operator.attrgetter("dtype"), torch.Tensor.dim


def key_of(
    cls: type[Wrapper], head: Any, by_type: bool, args: Args, kwargs: Kwargs
) -> tuple[tuple[Value, ...], list[Value], Kwargs]:
    """Walks over the arguments once and replaces DTensors by their shards.

    Args:
        cls: class of DTensors that the call was dispatched for.
        head: first element of the key: the op or function.
        by_type: whether the key contains only the types of numbers, not their values.

    Returns:
        (cache key, local arguments, local keyword arguments).
    """
    key, locals_ = [head], []
    for a in args:
        kind = a.__class__
        if kind is cls:
            key.append(a._spec)
            locals_.append(a._local_tensor)
            continue
        local = a
        if kind is int:
            key.append(int if by_type else a)
        elif kind is float or kind is bool:
            # With the type, since 1, 1.0 and True are equal and have the same hash.
            key.append(kind if by_type else (kind, a))
        elif kind is slice:
            key.append((slice, a.start, a.stop, a.step))
        elif kind is list or kind is tuple or kind is _Size:
            named = tuple if kind is tuple else list  # x[(i, j)] is not x[[i, j]]
            parts: Value = [named]
            local_items: Value = []
            for item in a:  # parameters, sizes and dims need no call of `key_of`
                if item.__class__ is cls:
                    parts.append(item._spec)
                    local_items.append(item._local_tensor)
                elif item.__class__ is int and not by_type:
                    parts.append(item)
                    local_items.append(item)
                else:
                    parts, local_items = _parts(cls, named, by_type, a)
                    break
            key.append(tuple(parts))
            local = local_items if named is list else tuple(local_items)
        elif isinstance(a, Wrapper):  # a copied view
            key.append((kind, a._spec))
            local = a._local_tensor
        elif isinstance(a, torch.Tensor):
            key.append((torch.Tensor, a.shape, a.stride(), a.dtype))
        elif kind is torch.SymFloat:
            key.append(kind if by_type else [a])  # a list cannot be hashed: see `with_numbers`
        else:  # None, a dtype, a string, or a NumPy number, which equals numbers of other types
            key.append((kind, a))
        locals_.append(local)
    if not kwargs:
        return tuple(key), locals_, kwargs
    names = sorted(kwargs)
    part, values, _ = key_of(cls, dict, by_type, [kwargs[n] for n in names], {})
    return (*key, *names, part), locals_, dict(zip(names, values, strict=True))


def _parts(cls: type[Wrapper], named: type, by_type: bool, items: Args) -> tuple[Value, Args]:
    """Returns (part of the key, local items) of a list or tuple."""
    summed_up = by_type and named is list and items[0].__class__ in (float, torch.Tensor)
    if summed_up and (summary := _summary(items)):
        return summary, items
    parts, locals_, _ = key_of(cls, named, by_type, items, {})
    return parts, locals_


def _summary(items: Args) -> tuple[Value, ...] | None:
    """Returns the part of the key for a list of an optimizer: step sizes, or step counts as tensors without dims.

    None if the members are neither, or differ in type.
    """
    kinds = set(map(type, items))
    if len(kinds) > 1:
        return None
    if kinds == {float}:
        return (list, float, len(items))
    dtypes = set(map(_dtype_of, items))
    return None if any(map(_dim_of, items)) or len(dtypes) > 1 else (list, len(items), *dtypes)


def with_numbers(args: Args, kwargs: Kwargs) -> tuple[tuple[Value, ...], Kwargs] | None:
    """Returns (args, kwargs) with the values of a tracer's symbolic numbers, which the tracer then guards.

    None if the arguments contain no symbolic numbers.
    """
    if not any(isinstance(leaf, _SYMBOLS) for leaf in tree_leaves((args, kwargs))):
        return None
    numbers: tuple[tuple[Value, ...], Kwargs] = tree_map(_number, (tuple(args), kwargs))
    return numbers


_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _number(leaf: object) -> Value:
    if isinstance(leaf, torch.SymInt):
        return int(leaf)
    if isinstance(leaf, torch.SymFloat):
        return float(leaf)
    return bool(leaf) if isinstance(leaf, torch.SymBool) else leaf
