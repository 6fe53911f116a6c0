"""The key of a call in the cache of plans: op, specs and static arguments."""

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
    """(cache key, local arguments, local keyword arguments) in one walk over the arguments."""
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
            # The type too: 1, 1.0 and True are equal and have one hash.
            key.append(kind if by_type else (kind, a))
        elif kind is slice:
            key.append((slice, a.start, a.stop, a.step))
        elif kind is list or kind is tuple or kind is _Size:
            named = tuple if kind is tuple else list  # x[(i, j)] is not x[[i, j]]
            parts: Value = [named]
            within: Value = []
            for item in a:  # the parameters of an optimizer, sizes, dims: without a call for each
                if item.__class__ is cls:
                    parts.append(item._spec)
                    within.append(item._local_tensor)
                elif item.__class__ is int and not by_type:
                    parts.append(item)
                    within.append(item)
                else:
                    parts, within = _parts(cls, named, by_type, a)
                    break
            key.append(tuple(parts))
            local = within if named is list else tuple(within)
        elif isinstance(a, Wrapper):  # of another class than the call's: a copied view
            key.append((kind, a._spec))
            local = a._local_tensor
        elif isinstance(a, torch.Tensor):
            key.append((torch.Tensor, a.shape, a.stride(), a.dtype))
        elif (
            kind is torch.SymFloat
        ):  # a tracer's: its value is not read. A list has no hash: see `with_numbers`
            key.append(kind if by_type else [a])
        else:  # None, a dtype, a string; a number of NumPy's, which is equal to those of other types
            key.append((kind, a))
        locals_.append(local)
    if not kwargs:
        return tuple(key), locals_, kwargs
    names = sorted(kwargs)
    part, values, _ = key_of(cls, dict, by_type, [kwargs[n] for n in names], {})
    return (*key, *names, part), locals_, dict(zip(names, values, strict=True))


def _parts(cls: type[Wrapper], named: type, by_type: bool, items: Args) -> tuple[Value, Args]:
    """(what the key holds, local items) of a list or tuple."""
    summed_up = by_type and named is list and items[0].__class__ in (float, torch.Tensor)
    if summed_up and (summary := _summary(items)):
        return summary, items
    parts, within, _ = key_of(cls, named, by_type, items, {})
    return parts, within


def _summary(items: Args) -> tuple[Value, ...] | None:
    """What the key holds of a list of an optimizer's: its step sizes, or its counts of steps, which are tensors
    without dims. None: its members differ in type."""
    kinds = set(map(type, items))
    if len(kinds) > 1:
        return None
    if kinds == {float}:
        return (list, float, len(items))
    dtypes = set(map(_dtype_of, items))
    return None if any(map(_dim_of, items)) or len(dtypes) > 1 else (list, len(items), *dtypes)


def with_numbers(args: Args, kwargs: Kwargs) -> tuple[tuple[Value, ...], Kwargs] | None:
    """(args, kwargs) with the values of a tracer's symbols, which it guards; None where there are none."""
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
