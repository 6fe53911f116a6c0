"""Decides which Python functions can use the plan of one op, without passing through torch.

dispatch/entry.py records the ops of a function's first call. The op's plan is kept for the function, too, if the call
was exactly one op with just the function's tensors and numbers, and the op is no view: views need torch's view and
version tracking.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from dtbench_core.dispatch.op_info import OpInfo, numbers_by_type
from dtbench_core.dispatch.op_plan import OpPlan, returns_list
from dtbench_core.op_types import Args, Call, Kwargs, Value

# (plan, args, kwargs, result) of an op that ran; its plan is None if it ran without one.
RecordedOp = tuple[OpPlan | None, Args, Kwargs, Value]


aten = torch.ops.aten


def plan_of_call(
    func: Call, args: Args, kwargs: Kwargs, recorded: list[RecordedOp], result: Value
) -> OpPlan | None:
    """Returns the plan for the function call, or None if the plan of an op cannot stand for it."""
    if "requires_grad" in kwargs or len(recorded) != 1:  # torch handles requires_grad outside the op
        return None
    plan, op_args, op_kwargs, op_result = recorded[0]
    if plan is None or _copies_if_it_must(func, plan.info.op, op_args, result):
        return None
    if isinstance(op_result, tuple):  # F.layer_norm returns one of the op's three results
        shown = [index for index, item in enumerate(op_result) if item is result]
        if len(shown) != 1:
            return None
        plan = plan.for_result(shown[0])
    elif isinstance(op_result, list):  # torch's function converts it to a tuple
        if not isinstance(result, tuple) or list(map(id, result)) != list(map(id, op_result)):
            return None
    elif result is not (op_result if plan.info.op._schema.returns else _returned_value(plan.info, args)):
        return None
    writes = plan.info.mutated and (plan.info.returned is not None or plan.out is None)
    # A local op of a rule replaces the op and would not run in place of the function.
    fit = plan.functional or (writes and plan.kernel is plan.info.kernel)
    return plan.for_function() if fit and _accounts_for(args, kwargs, op_args, op_kwargs, plan) else None


def _copies_if_it_must(func: Call, op: OpOverload, op_args: Args, result: Value) -> bool:
    """Whether the function returns its tensor unchanged if the strides already fit, as `contiguous` does.

    A shard's strides may fit where those of the global tensor do not.
    """
    if op is aten.clone.default:
        return getattr(func, "__name__", "") != "clone"
    return op is aten._to_copy.default and result.dtype == op_args[0].dtype


def without_detach(recorded: list[RecordedOp]) -> list[RecordedOp]:
    """Returns the recorded ops without a final detach of the first op's result, as functions named `..._like` make."""
    if len(recorded) != 2:
        return recorded
    (plan, args, kwargs, first), (second_plan, (source, *_), _, result) = recorded
    if plan is None or second_plan is None:
        return recorded
    detached = second_plan.info.op is aten.detach.default and source is first and plan.info.functional
    return [(plan, args, kwargs, result)] if detached else recorded


def _returned_value(info: OpInfo, args: Args) -> Value:
    """Returns what torch's Python function returns for an op whose schema returns nothing."""
    return args[0] if returns_list(info) else None


def _ops_named_like(func: Call) -> list[OpOverload]:
    """Returns the aten ops of the function's name whose first argument is a tensor or a list; without `out=` forms."""
    name = getattr(func, "__name__", "")
    if not name.startswith(("_foreach_", "_fused_")):
        name = name.strip("_")
    packet = getattr(aten, name, None) if name else None
    ops = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return [op for op in ops if _takes_tensor(op) and not any(a.is_out for a in op._schema.arguments)]


def all_by_type(func: Call) -> bool:
    """Whether plans of all ops of the function's name hold for all values of a number's type.

    Not for `torch.max`, for example: one of its ops takes a dim.
    """
    ops = _ops_named_like(func)
    return bool(ops) and all(numbers_by_type(op) or _takes_tensors_alone(op) for op in ops)


def takes_one_tensor(func: Call) -> bool:
    """Whether no call of the function can contain a second tensor, as for getters and `transpose`."""
    if getattr(func, "__name__", "") == "__get__":
        return True
    ops = _ops_named_like(func)
    return bool(ops) and all(sum("Tensor" in str(a.type) for a in op._schema.arguments) == 1 for op in ops)


def _takes_tensors_alone(op: OpOverload) -> bool:
    return all("Tensor" in str(argument.type) for argument in op._schema.arguments)


def _takes_tensor(op: OpOverload) -> bool:
    arguments = op._schema.arguments
    return bool(arguments) and str(arguments[0].type) in ("Tensor", "List[Tensor]")


def _accounts_for(args: Args, kwargs: Kwargs, op_args: Args, op_kwargs: Kwargs, plan: OpPlan) -> bool:
    """Whether the op got exactly the function's tensors, and no numbers but the function's.

    Any other number may come from the global shape and would be wrong for a shard. The tensors must have the same order
    if the plan moves some of them, as moves go by position.
    """
    leaves = tree_leaves((list(args), dict(sorted(kwargs.items()))))
    used = tree_leaves((list(op_args), dict(sorted(op_kwargs.items()))))
    tensors = [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    op_tensors = [id(leaf) for leaf in used if isinstance(leaf, torch.Tensor)]
    if tensors != op_tensors and (plan.moves or sorted(tensors) != sorted(op_tensors)):
        return False
    numbers = [leaf for leaf in leaves if type(leaf) in (int, float)]
    numbers += [
        a.default_value for a in plan.info.op._schema.arguments if type(a.default_value) in (int, float)
    ]
    return all(leaf in numbers for leaf in used if type(leaf) in (int, float))
