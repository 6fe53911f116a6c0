"""Dispatch: how an op on DTensors runs, from the user's call to the kernels on the shards.

Torch calls a tensor subclass twice: `torch_function` above autograd, for every function that the user calls, and
`torch_dispatch` below autograd, for every aten op. Both look up a plan, which says how the op runs on the shards.

1. `torch_function` answers functions in `_immediate` and `_overrides` itself.
2. Calls that autograd must record or a mode must intercept go to `_through_torch`. Torch then calls `torch_dispatch`
   for each op.
3. Other calls need no autograd. `key_of` makes a key of the function, the specs and the static arguments. If
   `functions` has a plan for the key, the plan runs at once, without passing through torch.
4. The first call with a key goes through torch, too. `_record_call` records its ops. If the call was a single op, that
   op's plan is kept in `functions` (learnt_calls.py says when).
5. `torch_dispatch` looks up the plan of the op in `plans`, by op, specs and static arguments.
6. On a miss, make_plan.py builds the plan. The op's rule lists the placements that it supports, and the cheapest
   is chosen for each mesh dim. Running the op on meta tensors gives the shapes of the results. Without a rule,
   `OpInfo.without_plan` runs: composite ops are split into other ops, the rest run on replicated inputs (fallback.py).
7. `plan.run` (op_plan.py) redistributes inputs if necessary, runs the op on the shards and wraps the results.

For example, the first call of `x + y` without gradients takes steps 4 to 7, and each later call with the same specs
steps 3 and 7. With gradients every call takes steps 2, 5 and 7.
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
    RecordedOp,
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
from dtbench_core.layout.wrapper import Wrapper, pending_history_updates, stored_local, update_histories
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

ops: dict[OpOverload, OpInfo] = {}
# Plans by the key of an op's call. None: no rule fits, so `OpInfo.without_plan` runs.
plans: dict[Key, OpPlan | None] = {}
# Plans by the key of a Python function's call. None: the call is not a single op and must go through torch.
functions: dict[Key, OpPlan | None] = {}
default_dtype: torch.dtype | None = None  # the default dtype that the plans were made for
misses = 0  # calls and ops of this process that found no plan
# Functions for which one plan serves all values of a number argument, so that keys contain only the number's type.
by_type: set[Call] = set()
classified: set[Call] = set()  # functions already examined for this
_MISSING: Any = object()
_detach = torch.ops.aten.detach.default

# The lambdas look up `plans` and `functions` at each call, since a StageTimer replaces these dicts.
on_clear(lambda: plans.clear())
on_clear(lambda: functions.clear())
for _cache in (ops, classified, by_type):
    on_clear(_cache.clear, with_rules=True)

# The ops that torch_dispatch has run in the call that is being recorded; None if no call is.
_recorded: PerRank[list[RecordedOp] | None] = PerRank("dispatch.recorded", lambda: None)
recorded = _recorded.get


def _without_torch_function(func: Call) -> Call:
    """Returns a function that calls `func` in torch, without `torch_function` for its inner calls."""
    return lambda *args, **kwargs: disabled_torch_function(func, (), args, kwargs)


def _is_complex(input: Value) -> bool:
    complex_: bool = input._spec.dtype.is_complex
    return complex_


def _is_same_size(input: torch.Tensor, other: torch.Tensor) -> bool:
    return input.shape == other.shape  # one of them may be a plain tensor


def _refuse_cond(*args: Value, **kwargs: Value) -> Value:
    raise NoRuleError(
        "got DTensors in torch.cond, whose branches torch traces into a graph of plain tensors; expected Python's if, "
        "which ends the graph before it, or torch.where of the results of both branches"
    )


# Functions of one tensor and numbers that need neither a key nor a check of the arguments. Views go straight to torch,
# since autograd must track them. So do getters. Optimizers call `is_complex` for every parameter in every step.
_immediate: dict[Call, Call] = {
    torch.split: _without_torch_function(torch.Tensor.split),
    torch.is_complex: _is_complex,
}
# Functions that are implemented here, most of them because torch splits them into several ops. They may return
# NotImplemented: the call is then dispatched as usual.
_overrides: dict[Call, Call] = {
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
    torch.ops.aten.is_same_size: lambda self, other: _is_same_size(self, other),
    # `1 / x`, as two calls whose plans hold for all values of the number.
    torch.Tensor.__rdiv__: lambda self, other: self.reciprocal() * other,
}
# Overrides that also run under a dispatch mode, since they hide no op from it.
_overrides_under_modes = {
    torch.autograd.grad,
    torch.autograd.backward,
    torch.Tensor.backward,
    torch.nn.functional.one_hot,
    torch.is_same_size,
    torch.Tensor.is_same_size,
    torch.ops.aten.is_same_size,
    torch.Tensor.__rdiv__,
    torch.ops.higher_order.cond,
}
if hasattr(torch.nn.functional, "linear_cross_entropy"):  # from torch 2.13 on
    _overrides[torch.nn.functional.linear_cross_entropy] = cross_entropy.linear_cross_entropy
    _overrides_under_modes.add(torch.nn.functional.linear_cross_entropy)


# ---- above autograd ----


def torch_function(
    cls: type[Wrapper], func: Call, types: Any, args: Args = (), kwargs: Value = None
) -> Value:
    """Runs a user's call, above autograd: `DTensor.__torch_function__`."""
    immediate = _immediate.get(func)
    if immediate is not None:
        return immediate(*args, **kwargs) if kwargs else immediate(*args)
    if kwargs is None:
        kwargs = {}
    override = _overrides.get(func)
    if override is not None and (func in _overrides_under_modes or not modes_active()):
        result = override(*args, **kwargs)
        if result is not NotImplemented:
            return result
    if (is_grad_enabled() and _requires_grad(args, kwargs)) or modes_active():
        return _through_torch(cls, func, args, kwargs)
    key, locals_, local_kwargs = key_of(cls, func, func in by_type, args, kwargs)
    try:
        plan = functions.get(key, _MISSING)
    except TypeError:  # an argument cannot be hashed, so no plan can be kept
        plan, key = _MISSING, ()
    if plan is None:
        return _through_torch(cls, func, args, kwargs)
    if plan is not _MISSING and default_dtype is get_default_dtype():
        return plan.run(cls, func, args, kwargs, locals_, local_kwargs)
    if mixes_plain(cls, func, args, kwargs):
        return with_replicas(cls, func, args, kwargs)
    return _record_call(func, key, args, kwargs)


def _requires_grad(args: Args, kwargs: Kwargs) -> bool:
    """Whether autograd must record the call. torch's own check looks into lists, but not into tuples."""
    if any_requires_grad(*args, **kwargs) if kwargs else any_requires_grad(*args):
        return True
    for a in (*args, *kwargs.values()) if kwargs else args:  # noqa: SIM110 - a generator costs 0.3 us
        if a.__class__ is tuple and _requires_grad(a, {}):
            return True
    return False


def modes_active() -> bool:
    """Whether a dispatch mode, autocast, torch.func or forward-mode autograd must intercept the call."""
    return (
        dispatch_modes_active() > 0
        or any_autocast()
        or functorch_level() is not None
        or forward_ad._current_level >= 0
    )


def _through_torch(cls: type[Wrapper], func: Call, args: Args, kwargs: Kwargs) -> Value:
    """Calls torch's function, whose ops come back in `torch_dispatch`."""
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
            f"got {getattr(func, '__name__', func)} of DTensors in torch.export, which traces above autograd, "
            "before __torch_dispatch__ of a tensor subclass is called; expected torch.compile or torch.export's "
            "AOTAutograd, torch._functorch.aot_autograd.aot_export_joint_with_descriptors"
        ) from error
    if written := pending_history_updates.get():
        update_histories(written)
    if args and result is args[0]:
        return _as_new_result(func, result)
    return result


def _as_new_result(func: Call, result: Value) -> Value:
    """Returns another tensor object if a function such as `contiguous` returned its argument in a traced graph.

    Torch cannot return the same wrapper twice from a graph.
    """
    if (
        not isinstance(result, Wrapper)
        or getattr(func, "__name__", "").endswith("_")
        or not is_functional(stored_local(result))
    ):
        return result
    return result.view_as(result)


def _record_call(func: Call, key: Key, args: Args, kwargs: Kwargs) -> Value:
    """Runs the call through torch, and keeps the plan for later calls with this key if it was a single op."""
    global misses
    misses += 1
    outer_record = recorded()
    ran: list[RecordedOp] = []
    _recorded.set(ran)
    try:
        with DisableTorchFunction():
            result = (
                out_and_resize.call_with_out(func, args, kwargs) if "out" in kwargs else func(*args, **kwargs)
            )
        run_ops = without_detach(ran)
    finally:
        _recorded.set(outer_record)
    if not run_ops or any(plan and plan.info.aliases for plan, *_ in run_ops):
        if takes_one_tensor(func):
            _immediate[func] = _without_torch_function(func)
        elif key:
            cache_put(functions, key, None)
        return result
    if not key:
        return result
    fit = plan_of_call(func, args, kwargs, run_ops, result)
    if fit is not None and func not in classified:
        classified.add(func)
        if all_by_type(func):
            by_type.add(func)
            return result  # this key contains the values of numbers: the next call is recorded instead
    cache_put(functions, key, fit)
    return result


# ---- below autograd ----


def torch_dispatch(
    cls: type[Wrapper], op: OpOverload, types: Any, args: Args = (), kwargs: Kwargs | None = None
) -> Value:
    """Runs one aten op, below autograd: `DTensor.__torch_dispatch__`."""
    if kwargs is None:
        kwargs = {}
    info = ops.get(op)
    if info is None:
        info = ops[op] = OpInfo(op)
    # While a call is recorded, detach needs its plan: `without_detach` looks at it.
    if info.handler is not None and (op is not _detach or recorded() is None):
        result = info.handler(torch_dispatch, cls, op, args, kwargs)
        if result is not NotImplemented:
            if (ran := recorded()) is not None:
                ran.append((None, args, kwargs, None))
            return result
    global default_dtype, misses
    if default_dtype is not get_default_dtype():
        # Type promotion uses the default dtype: an integer tensor times a float gets it.
        default_dtype = get_default_dtype()
        clear_caches()
    key, locals_, local_kwargs = key_of(cls, info, info.by_type, args, kwargs)
    plan: OpPlan | None
    try:
        plan = plans.get(key, _MISSING)
    except TypeError:  # an argument cannot be hashed, so no plan can be kept
        if (numbers := with_numbers(args, kwargs)) is not None:
            return torch_dispatch(cls, op, types, *numbers)
        plan = None
        misses += 1
    if plan is None:
        result = info.without_plan(torch_dispatch, cls, op, args, kwargs)
    elif plan is not _MISSING:
        result = plan.run(cls, plan.kernel, args, kwargs, locals_, local_kwargs)
    else:
        misses += 1
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
    """Returns the number of cached plans, and how often one was missing.

    "plans" and "fast" are the numbers of plans of ops and of functions, "bound" the maximum of each. "misses" counts
    the calls and ops of this process that found no plan. Clearing the caches does not reset it.
    """
    return {"plans": len(plans), "fast": len(functions), "bound": runtime.MAX_PLANS, "misses": misses}
