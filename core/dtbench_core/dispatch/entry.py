"""How an op on DTensors runs: op -> cached plan -> local op -> wrapped result.

1. `torch_function` sees every call a user makes. Where neither autograd nor a mode has a say, and the
   call is known to be one functional op, it runs that op's plan at once (Note [Fast calls]).
2. Otherwise torch runs its own machinery and comes back in `torch_dispatch`, below autograd, once per
   aten op.
3. Either way the plan is found in a dict, by op, specs (by identity) and static arguments. On a miss
   plan.py makes one: the op's rule lists the possible placements, the cheapest row is chosen per mesh
   dim, and the op runs on meta tensors to learn the result's global shape, stride and dtype.
4. `Plan.run` moves the inputs that must move, runs the op on the shards and wraps what comes out.

Note [Fast calls]: a call is learnt by watching it. If a Python-level function, called without
autograd, arrives in `torch_dispatch` as exactly one op that got just the function's tensors and
numbers, and that op neither writes nor aliases its inputs (views and writes need torch's view and
version tracking), its plan is remembered for the function too.

Note [Plain tensors]: a plain tensor that the user gives beside a DTensor is refused, because nobody
knows where it belongs. One that an op or an autograd formula makes on the way counts as replicated;
so does a single element, which torch treats as a number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

from dtbench_core.dispatch import contexts, gradients
from dtbench_core.dispatch import out_and_resize as writes
from dtbench_core.dispatch.plan import OpInfo, Plan, build, verify
from dtbench_core.errors import MixedTensorError
from dtbench_core.layout import rng as random
from dtbench_core.layout.wrapper import Wrapper
from dtbench_core.rules import cross_entropy, linear
from dtbench_core.rules.compare import equal
from dtbench_core.rules.pointwise import is_pointwise
from dtbench_core.rules.view import tensor_split
from dtbench_core.runtime import current, process
from dtbench_core.torch_compat import (
    DisableTorchFunction,
    any_autocast,
    any_requires_grad,
    dispatch_modes_active,
    functorch_level,
    get_default_dtype,
    is_grad_enabled,
)

# A plan is about 1 KB; the bound keeps a program that never repeats a shape at some megabytes.
MAX_PLANS = 8192


# ---- caches ----

# In the caches of plans. None there: no rule fits, replicate and run; or watched, and not fit to be fast.
_MISSING: Any = object()

clear_caches = process.clear_caches


def cache_info() -> dict[str, int]:
    """How many plans are held, per op and per Python function, and the bound of each."""
    return {"plans": len(process.plans), "fast": len(process.functions), "bound": MAX_PLANS}


def _store(cache: dict[tuple[Any, ...], Any], key: tuple[Any, ...], plan: Plan | None) -> None:
    while len(cache) >= MAX_PLANS:
        del cache[next(iter(cache))]  # the oldest
    cache[key] = plan


def _key_of(
    cls: type[Wrapper], head: Any, by_type: bool, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], list[Any], dict[str, Any]]:
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
            # The type too: 1, 1.0 and True are equal and hash alike.
            key.append(kind if by_type else (kind, a))
        elif kind is tuple:  # x[(i, j)] is not x[[i, j]]
            part, within, _ = _key_of(cls, tuple, by_type, a, {})
            key.append(part)
            local = tuple(within)
        elif kind is list or kind is torch.Size:
            specs = [one._spec for one in a if one.__class__ is cls] if a and a[0].__class__ is cls else ()
            if len(specs) == len(a) > 0:  # the parameters of an optimizer: without a call for each
                key.append((list, *specs))
                local = [one._local_tensor for one in a]
            else:
                part, local, _ = _key_of(cls, list, by_type, a, {})
                key.append(part)
        elif kind is slice:
            key.append((slice, a.start, a.stop, a.step))
        elif isinstance(a, Wrapper):  # of another class than the call's
            key.append(a._spec)
            local = a._local_tensor
        elif isinstance(a, torch.Tensor):
            key.append((torch.Tensor, a.shape, a.stride(), a.dtype))
        else:
            key.append(a)
        locals_.append(local)
    if not kwargs:
        return tuple(key), locals_, kwargs
    names = sorted(kwargs)
    part, values, _ = _key_of(cls, dict, by_type, [kwargs[n] for n in names], {})
    return (*key, *names, part), locals_, dict(zip(names, values, strict=True))


# ---- the two entries ----

# Functions that are several ops to torch and one to us; NotImplemented sends a call the common way.
composites: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.nn.functional.linear: linear.linear,
    torch.nn.functional.cross_entropy: cross_entropy.cross_entropy,
    torch.nn.functional.dropout: random.dropout,
    torch.dropout: random.dropout,
    torch.equal: equal,
    torch.Tensor.equal: equal,
    torch.tensor_split: tensor_split,
    torch.Tensor.tensor_split: tensor_split,
}


def torch_function(
    cls: type[Wrapper], func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
) -> Any:
    """`DTensor.__torch_function__`: a user's call, above autograd."""
    direct = _direct.get(func)
    if direct is not None:
        with DisableTorchFunction():
            return direct(*args, **kwargs) if kwargs else direct(*args)
    if kwargs is None:
        kwargs = {}
    composite = composites.get(func)
    if composite is not None and not _modes_active():
        result = composite(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if (is_grad_enabled() and _requires_grad(args, kwargs)) or _modes_active():
        return _through_torch(cls, func, args, kwargs)
    key, locals_, local_kwargs = _key_of(cls, func, func in process.elementwise, args, kwargs)
    try:
        plan = process.functions.get(key, _MISSING)
    except TypeError:  # an argument that cannot be hashed: not a call to remember
        plan, key = _MISSING, ()
    if plan is None:
        return _through_torch(cls, func, args, kwargs)
    if plan is not _MISSING and process.default_dtype is get_default_dtype():
        return plan.run(cls, func, args, kwargs, locals_, local_kwargs)
    if _mixes_plain(cls, func, args, kwargs):
        return _with_replicas(cls, func, args, kwargs)
    return _watch(func, key, args, kwargs)


def _modes_active() -> bool:
    """Whether somebody besides autograd must see the call."""
    return (
        dispatch_modes_active() > 0
        or any_autocast()
        or functorch_level() is not None
        or forward_ad._current_level >= 0
    )


def _through_torch(
    cls: type[Wrapper], func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    if _mixes_plain(cls, func, args, kwargs):
        return _with_replicas(cls, func, args, kwargs)
    with DisableTorchFunction():
        return writes.call_with_out(func, args, kwargs) if "out" in kwargs else func(*args, **kwargs)


def _requires_grad(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether autograd must see the call. torch's own test looks into lists, but not into tuples."""
    if any_requires_grad(*args, **kwargs) if kwargs else any_requires_grad(*args):
        return True
    for a in (*args, *kwargs.values()) if kwargs else args:  # noqa: SIM110 - a generator costs 0.3 us
        if a.__class__ is tuple and _requires_grad(a, {}):
            return True
    return False


def torch_dispatch(
    cls: type[Wrapper],
    op: OpOverload,
    types: Any,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """`DTensor.__torch_dispatch__`: one aten op, below autograd."""
    if kwargs is None:
        kwargs = {}
    info = process.ops.get(op)
    if info is None:
        info = process.ops[op] = OpInfo(op)
    if info.handler is not None:
        result = info.handler(torch_dispatch, cls, op, args, kwargs)
        if result is not NotImplemented:
            if (watched := current().watched) is not None:
                watched.append((None, args, kwargs, None))
            return result
    if process.default_dtype is not get_default_dtype():
        # It decides what an integer tensor times a float gives, so plans hold for one.
        process.default_dtype = get_default_dtype()
        clear_caches()
    key, locals_, local_kwargs = _key_of(cls, info, info.elementwise, args, kwargs)
    plan: Plan | None
    try:
        plan = process.plans.get(key, _MISSING)
    except TypeError:  # an argument that cannot be hashed, so no plan can be kept
        plan = None
    if plan is None:
        result = info.without_plan(torch_dispatch, cls, op, args, kwargs)
    elif plan is not _MISSING:
        result = plan.run(cls, plan.kernel, args, kwargs, locals_, local_kwargs)
    else:
        plan = build(info, args, kwargs)
        if plan is None:
            result = info.without_plan(torch_dispatch, cls, op, args, kwargs)
        else:
            result = plan.run(cls, plan.kernel, args, kwargs, locals_, local_kwargs)
            verify(plan, args, result)
        _store(process.plans, key, plan)
    if (watched := current().watched) is not None:
        watched.append((plan, args, kwargs, result))
    return result


# ---- learning fast calls ----

# Functions that go straight to torch, and take nothing but one tensor and numbers: views, which need
# torch's tracking, and getters. And autograd's, which take plain and distributed tensors together. With
# what is called for each: the function itself, mostly.
_direct: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.autograd.grad: gradients.grad,
    torch.autograd.backward: torch.autograd.backward,
    torch.Tensor.backward: torch.Tensor.backward,
    torch.split: torch.Tensor.split,
}


def _watch(
    func: Callable[..., Any], key: tuple[Any, ...], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Runs the call through torch and remembers it, if it can. See Note [Fast calls]."""
    here = current()
    outer, here.watched = here.watched, []
    try:
        with DisableTorchFunction():
            result = writes.call_with_out(func, args, kwargs) if "out" in kwargs else func(*args, **kwargs)
        seen = here.watched
    finally:
        here.watched = outer
    if not seen or any(plan and plan.info.aliases for plan, *_ in seen):
        if _takes_one_tensor(func):
            _direct[func] = func
        elif key:
            _store(process.functions, key, None)
        return result
    if not key:
        return result
    fit = _fitting(args, kwargs, seen, result)
    if fit is not None and func not in process.judged:  # an elementwise one takes numbers by type
        process.judged.add(func)
        if _all_elementwise(func):
            process.elementwise.add(func)
            return result  # the key at hand holds numbers by value: remember the next call
    _store(process.functions, key, fit)
    return result


def _fitting(args: Sequence[Any], kwargs: dict[str, Any], seen: list[Any], result: Any) -> Plan | None:
    """The plan that stands for the whole call, if the call was one functional op."""
    if len(seen) != 1 or seen[0][0] is None:
        return None
    plan, op_args, op_kwargs, op_result = seen[0]
    if isinstance(op_result, tuple):  # of layer_norm's three results the caller sees one
        shown = [index for index, one in enumerate(op_result) if one is result]
        if len(shown) != 1:
            return None
        plan = plan.showing(shown[0])
    elif result is not (op_result if plan.info.op._schema.returns else args[0]):
        return None
    writes = plan.info.mutated and (plan.returns_input is not None or plan.out is None)
    # A rule's own local op stands for the op, not for the function.
    fit = plan.functional or (writes and plan.kernel is plan.info.kernel)
    return plan.for_function() if fit and _accounts_for(args, kwargs, op_args, op_kwargs, plan) else None


def _ops_named_like(func: Callable[..., Any]) -> list[OpOverload]:
    """Every aten op of the function's name that starts with a tensor, `out=` forms aside."""
    name = getattr(func, "__name__", "").strip("_")
    packet = getattr(torch.ops.aten, name, None) if name else None
    ops = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return [op for op in ops if _takes_tensor(op) and not any(a.is_out for a in op._schema.arguments)]


def _all_elementwise(func: Callable[..., Any]) -> bool:
    """Whether all those ops are elementwise: `torch.max` also has one with a dim."""
    ops = _ops_named_like(func)
    return bool(ops) and all(is_pointwise(op) for op in ops)


def _takes_one_tensor(func: Callable[..., Any]) -> bool:
    """Whether no call of the function can hold a second tensor: getters, and ops such as `transpose`."""
    if getattr(func, "__name__", "") == "__get__":
        return True
    ops = _ops_named_like(func)
    return bool(ops) and all(sum("Tensor" in str(a.type) for a in op._schema.arguments) == 1 for op in ops)


def _takes_tensor(op: OpOverload) -> bool:
    arguments = op._schema.arguments
    return bool(arguments) and str(arguments[0].type) == "Tensor"


def _accounts_for(
    args: Sequence[Any],
    kwargs: dict[str, Any],
    op_args: Sequence[Any],
    op_kwargs: dict[str, Any],
    plan: Plan,
) -> bool:
    """Whether the op got just the function's tensors and no number but the function's own.

    A number of another origin may come from the global shape, and would be wrong for a shard. The
    order of the tensors matters where the plan moves some of them: it counts them.
    """
    given = tree_leaves((list(args), dict(sorted(kwargs.items()))))
    used = tree_leaves((list(op_args), dict(sorted(op_kwargs.items()))))
    tensors = [id(leaf) for leaf in given if isinstance(leaf, torch.Tensor)]
    op_tensors = [id(leaf) for leaf in used if isinstance(leaf, torch.Tensor)]
    if tensors != op_tensors and (plan.moves or sorted(tensors) != sorted(op_tensors)):
        return False
    numbers = [leaf for leaf in given if type(leaf) in (int, float)]
    numbers += [
        a.default_value for a in plan.info.op._schema.arguments if type(a.default_value) in (int, float)
    ]
    return all(leaf in numbers for leaf in used if type(leaf) in (int, float))


# ---- plain tensors ----


def _mixes_plain(
    cls: type[Wrapper], func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> bool:
    """Whether plain tensors must be replicated first. See Note [Plain tensors].

    Raises:
        MixedTensorError: there are some, outside `implicit_replication()`.
    """
    for a in (*args, *kwargs.values()) if kwargs else args:
        kind = a.__class__
        if kind is cls or kind is int or kind is float:
            continue
        for item in a if kind is list or kind is tuple else (a,):
            if item.__class__ is cls:
                continue
            if isinstance(item, torch.Tensor) and not isinstance(item, Wrapper) and item.numel() != 1:
                name = getattr(func, "__name__", str(func))
                if name == "__set__":  # takes both rightly
                    return False
                if contexts.replicates_plain():
                    return True
                raise MixedTensorError(
                    f"{name} got a plain torch.Tensor of shape {list(item.shape)} together with a DTensor, expected "
                    "DTensors only: place it with distribute_tensor(tensor, mesh, placements), or wrap every rank's "
                    "shard with DTensor.from_local(...), or take the DTensor's own shard with .to_local()"
                )
    return False


def _with_replicas(
    cls: type[Wrapper], func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """The call with its plain tensors as replicated DTensors, which carry gradients back to them."""
    leaves = tree_leaves((list(args), kwargs))
    mesh = next(leaf._spec.info.mesh for leaf in leaves if isinstance(leaf, Wrapper))

    def replicated(leaf: Any) -> Any:
        plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, Wrapper)
        return cls.from_local(leaf, mesh) if plain else leaf  # type: ignore[attr-defined]

    full_args, full_kwargs = tree_map(replicated, (list(args), kwargs))
    return func(*full_args, **full_kwargs)
