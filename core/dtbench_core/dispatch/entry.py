"""How an op on DTensors runs, in the order of the functions below.

1. `torch_function`: every call of a user's, above autograd. Some functions have an answer of their own
   (`_direct`, `_own`).
2. If autograd or a mode must see the call, `_through_torch`: torch comes back in `torch_dispatch`.
3. Else `key_of` makes the call's key of function, specs and static arguments. A plan that was learnt
   for it (`functions`) runs at once; a call met for the first time goes through torch, recorded (`_record_call`).
4. `torch_dispatch`: one aten op, below autograd. Its plan is in `plans`, by op, specs and arguments.
5. On a miss, make_plan.py: the op's rule lists placements, the cheapest row is chosen per mesh dim, and
   the op on meta tensors tells the result's shape. No row: op by op (composites) or replicated (fallback.py).
6. `plan.run` (op_plan.py) moves the inputs that must move, runs the op on the shards, wraps what comes out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd import forward_ad

from dtbench_core import runtime
from dtbench_core.dispatch import out_and_resize
from dtbench_core.dispatch.autograd_grad import backward, backward_of, grad
from dtbench_core.dispatch.cache_key import Key, key_of, with_numbers
from dtbench_core.dispatch.learnt_calls import (
    Recorded,
    all_by_type,
    plan_of_call,
    takes_one_tensor,
    without_detach,
)
from dtbench_core.dispatch.make_plan import build, first_run
from dtbench_core.dispatch.op_info import OpInfo
from dtbench_core.dispatch.op_plan import OpPlan
from dtbench_core.dispatch.plain_tensors import mixes_plain, with_replicas
from dtbench_core.errors import CoreError, NoRuleError
from dtbench_core.layout import random
from dtbench_core.layout.wrapper import Wrapper, followed, held_by, let_follow
from dtbench_core.op_types import Args, Call, Kwargs, Value
from dtbench_core.rules import cross_entropy, linear
from dtbench_core.rules.compare import equal
from dtbench_core.rules.foreach import foreach_norm
from dtbench_core.rules.loss import one_hot
from dtbench_core.rules.view import tensor_split
from dtbench_core.runtime import PerRank, cache_put, clear_caches, on_clear
from dtbench_core.torch_compat import (
    DisableTorchFunction,
    any_autocast,
    any_requires_grad,
    disabled_torch_function,
    dispatch_modes_active,
    functorch_level,
    get_default_dtype,
    is_functional,
    is_grad_enabled,
)

# What is known of ops; the Python functions of which it is known whether the types of their numbers suffice in a key,
# and those of which they do.
ops: dict[OpOverload, OpInfo] = {}
judged: set[Call] = set()
by_type: set[Call] = set()
# The plans of ops, and of functions that are one op. None: no rule fits, replicate and run; or recorded, and not fit
# to be fast.
plans: dict[Key, OpPlan | None] = {}
functions: dict[Key, OpPlan | None] = {}
default_dtype: torch.dtype | None = None  # for which they hold
_MISSING: Any = object()
_detach = torch.ops.aten.detach.default

on_clear(lambda: plans.clear())  # by name: a StageTimer puts others in their place
on_clear(lambda: functions.clear())
for _cache in (ops, judged, by_type):
    on_clear(_cache.clear, with_rules=True)

# What torch_dispatch has run since torch_function began to record a call; None while nobody records.
_recorded: PerRank[list[Recorded] | None] = PerRank("dispatch.recorded", lambda: None)
recorded = _recorded.get


def _straight(func: Call) -> Call:
    """`func`, for which DTensors are tensors as others: above autograd nothing else sees the call."""
    return lambda *args, **kwargs: disabled_torch_function(func, (), args, kwargs)


def _is_complex(input: Value) -> bool:
    complex_: bool = input._spec.dtype.is_complex
    return complex_


def _is_same_size(input: torch.Tensor, other: torch.Tensor) -> bool:
    return input.shape == other.shape  # of plain tensors, too


def _refuse_cond(*args: Value, **kwargs: Value) -> Value:
    raise NoRuleError(
        "got DTensors in torch.cond, of whose branches torch makes one graph of plain tensors; expected Python's if, "
        "which ends a graph where values decide, or torch.where of what both branches give"
    )


# Functions that take nothing but one tensor and numbers, and are answered at once: views, which need torch's tracking,
# and getters go straight to torch. `is_complex` is called for every parameter in every step of an optimizer.
_direct: dict[Call, Call] = {torch.split: _straight(torch.Tensor.split), torch.is_complex: _is_complex}
# Functions that have a way of their own here, most of them because they are several ops to torch and one to us;
# NotImplemented sends a call the common way.
_own: dict[Call, Call] = {
    torch.nn.functional.linear: linear.linear,
    torch.nn.functional.cross_entropy: cross_entropy.cross_entropy,
    torch.nn.functional.dropout: random.dropout,
    torch.dropout: random.dropout,
    torch._foreach_norm: foreach_norm,
    torch.equal: equal,
    torch.Tensor.equal: equal,
    torch.tensor_split: tensor_split,
    torch.Tensor.tensor_split: tensor_split,
    torch.autograd.grad: grad,
    torch.autograd.backward: backward,
    torch.Tensor.backward: backward_of,
    torch.nn.functional.one_hot: one_hot,
    torch.ops.higher_order.cond: _refuse_cond,
    torch.is_same_size: _is_same_size,
    torch.Tensor.is_same_size: _is_same_size,
    # What torch makes of `1 / x`: as two calls, whose plans hold for all values of the number.
    torch.Tensor.__rdiv__: lambda self, other: self.reciprocal() * other,
}
# Those that go it also where a mode looks on, as they hide no op from it.
_under_modes = {
    torch.autograd.grad,
    torch.autograd.backward,
    torch.Tensor.backward,
    torch.nn.functional.one_hot,
    torch.is_same_size,
    torch.Tensor.is_same_size,
    torch.Tensor.__rdiv__,
    torch.ops.higher_order.cond,
}
if hasattr(torch.nn.functional, "linear_cross_entropy"):  # from torch 2.13 on
    _own[torch.nn.functional.linear_cross_entropy] = cross_entropy.linear_cross_entropy
    _under_modes.add(torch.nn.functional.linear_cross_entropy)


# ---- above autograd ----


def torch_function(
    cls: type[Wrapper], func: Call, types: Any, args: Args = (), kwargs: Value = None
) -> Value:
    """`DTensor.__torch_function__`: a user's call, above autograd."""
    direct = _direct.get(func)
    if direct is not None:
        return direct(*args, **kwargs) if kwargs else direct(*args)
    if kwargs is None:
        kwargs = {}
    own = _own.get(func)
    if own is not None and (func in _under_modes or not modes_active()):
        result = own(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if (is_grad_enabled() and _requires_grad(args, kwargs)) or modes_active():
        return _through_torch(cls, func, args, kwargs)
    key, locals_, local_kwargs = key_of(cls, func, func in by_type, args, kwargs)
    try:
        plan = functions.get(key, _MISSING)
    except TypeError:  # an argument that cannot be hashed: not a call to remember
        plan, key = _MISSING, ()
    if plan is None:
        return _through_torch(cls, func, args, kwargs)
    if plan is not _MISSING and default_dtype is get_default_dtype():
        return plan.run(cls, func, args, kwargs, locals_, local_kwargs)
    if mixes_plain(cls, func, args, kwargs):
        return with_replicas(cls, func, args, kwargs)
    return _record_call(func, key, args, kwargs)


def _requires_grad(args: Args, kwargs: Kwargs) -> bool:
    """Whether autograd must see the call. torch's own test looks into lists, but not into tuples."""
    if any_requires_grad(*args, **kwargs) if kwargs else any_requires_grad(*args):
        return True
    for a in (*args, *kwargs.values()) if kwargs else args:  # noqa: SIM110 - a generator costs 0.3 us
        if a.__class__ is tuple and _requires_grad(a, {}):
            return True
    return False


def modes_active() -> bool:
    """Whether somebody besides autograd must see the call."""
    return (
        dispatch_modes_active() > 0
        or any_autocast()
        or functorch_level() is not None
        or forward_ad._current_level >= 0
    )


def _through_torch(cls: type[Wrapper], func: Call, args: Args, kwargs: Kwargs) -> Value:
    if mixes_plain(cls, func, args, kwargs):
        return with_replicas(cls, func, args, kwargs)
    try:
        with DisableTorchFunction():
            result = (
                out_and_resize.call_with_out(func, args, kwargs) if "out" in kwargs else func(*args, **kwargs)
            )
    except RuntimeError as error:
        if "cast NotImplemented to Tensor" not in str(error):
            raise
        raise CoreError(
            f"got {getattr(func, '__name__', func)} of DTensors in torch.export, which traces above autograd, where no "
            "class of tensors defines its ops; expected torch.compile or torch.export's AOTAutograd, "
            "torch._functorch.aot_autograd.aot_export_joint_with_descriptors"
        ) from error
    if followers := followed.get():
        let_follow(followers)
    if args and result is args[0]:
        return _as_another(func, result)
    return result


def _as_another(func: Call, result: Value) -> Value:
    """What a function with nothing to do gave back (`contiguous`), as a tensor of its own in a graph that is traced, as
    torch gives out no wrapper twice."""
    if (
        not isinstance(result, Wrapper)
        or getattr(func, "__name__", "").endswith("_")
        or not is_functional(held_by(result))
    ):
        return result
    return result.view_as(result)


def _record_call(func: Call, key: Key, args: Args, kwargs: Kwargs) -> Value:
    """Runs the call through torch and remembers it, if it can. See learnt_calls.py."""
    outer = recorded()
    ran: list[Recorded] = []
    _recorded.set(ran)
    try:
        with DisableTorchFunction():
            result = (
                out_and_resize.call_with_out(func, args, kwargs) if "out" in kwargs else func(*args, **kwargs)
            )
        seen = without_detach(ran)
    finally:
        _recorded.set(outer)
    if not seen or any(plan and plan.info.aliases for plan, *_ in seen):
        if takes_one_tensor(func):
            _direct[func] = _straight(func)
        elif key:
            cache_put(functions, key, None)
        return result
    if not key:
        return result
    fit = plan_of_call(func, args, kwargs, seen, result)
    if fit is not None and func not in judged:
        judged.add(func)
        if all_by_type(func):
            by_type.add(func)
            return result  # the key at hand holds numbers by value: remember the next call
    cache_put(functions, key, fit)
    return result


# ---- below autograd ----


def torch_dispatch(
    cls: type[Wrapper], op: OpOverload, types: Any, args: Args = (), kwargs: Kwargs | None = None
) -> Value:
    """`DTensor.__torch_dispatch__`: one aten op, below autograd."""
    if kwargs is None:
        kwargs = {}
    info = ops.get(op)
    if info is None:
        info = ops[op] = OpInfo(op)
    # A call that is recorded may end with a detach, whose plan `without_detach` looks at.
    if info.handler is not None and (op is not _detach or recorded() is None):
        result = info.handler(torch_dispatch, cls, op, args, kwargs)
        if result is not NotImplemented:
            if (ran := recorded()) is not None:
                ran.append((None, args, kwargs, None))
            return result
    global default_dtype
    if default_dtype is not get_default_dtype():
        # It decides what an integer tensor times a float gives, so plans hold for one.
        default_dtype = get_default_dtype()
        clear_caches()
    key, locals_, local_kwargs = key_of(cls, info, info.by_type, args, kwargs)
    plan: OpPlan | None
    try:
        plan = plans.get(key, _MISSING)
    except TypeError:  # an argument that cannot be hashed, so no plan can be kept
        if (numbers := with_numbers(args, kwargs)) is not None:
            return torch_dispatch(cls, op, types, *numbers)
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
            plan, result = first_run(plan, cls, args, kwargs, locals_, local_kwargs)
        cache_put(plans, key, plan)
    if (ran := recorded()) is not None:
        ran.append((plan, args, kwargs, result))
    return result


def cache_info() -> dict[str, int]:
    """How many plans are held, per op and per Python function, and the bound of each."""
    return {"plans": len(plans), "fast": len(functions), "bound": runtime.MAX_PLANS}
