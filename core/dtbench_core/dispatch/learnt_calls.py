"""Which Python functions may be answered by the plan of one op, without passing through torch.

A call is learnt by recording it. If a function, called without autograd, arrives in `torch_dispatch` as
exactly one op that got just the function's tensors and numbers, and that op does not alias its inputs
(views need torch's view and version tracking), the op's plan is remembered for the function too.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

from dtbench_core.dispatch.op_info import OpInfo, numbers_by_type
from dtbench_core.dispatch.op_plan import OpPlan, gives_list
from dtbench_core.op_types import Args, Call, Kwargs, Value

# An op that ran, as (plan, args, kwargs, result); the plan is None for one that ran without.
Recorded = tuple[OpPlan | None, Args, Kwargs, Value]


aten = torch.ops.aten


def plan_of_call(
    func: Call, args: Args, kwargs: Kwargs, seen: list[Recorded], result: Value
) -> OpPlan | None:
    """The plan of the whole call, if the call was one functional op."""
    if "requires_grad" in kwargs or len(seen) != 1:  # the op does not hear of the former
        return None
    plan, op_args, op_kwargs, op_result = seen[0]
    if plan is None or _copies_if_it_must(func, plan.info.op, op_args, result):
        return None
    if isinstance(op_result, tuple):  # of layer_norm's three results the caller sees one
        shown = [index for index, one in enumerate(op_result) if one is result]
        if len(shown) != 1:
            return None
        plan = plan.showing(shown[0])
    elif isinstance(op_result, list):  # torch's function makes a tuple of it
        if not isinstance(result, tuple) or list(map(id, result)) != list(map(id, op_result)):
            return None
    elif result is not (op_result if plan.info.op._schema.returns else _returned_value(plan.info, args)):
        return None
    writes = plan.info.mutated and (plan.info.returned is not None or plan.out is None)
    # A rule's own local op replaces the op, not the function.
    fit = plan.functional or (writes and plan.kernel is plan.info.kernel)
    return plan.for_function() if fit and _accounts_for(args, kwargs, op_args, op_kwargs, plan) else None


def _copies_if_it_must(func: Call, op: OpOverload, op_args: Args, result: Value) -> bool:
    """Whether the function gives back its tensor where that lies in memory as asked, such as `contiguous`: a shard may
    lie so where the whole does not."""
    if op is aten.clone.default:
        return getattr(func, "__name__", "") != "clone"
    return op is aten._to_copy.default and result.dtype == op_args[0].dtype


def without_detach(seen: list[Recorded]) -> list[Recorded]:
    """What was recorded; of functions that detach what an op has made, as those that end in `_like`, the op alone."""
    if len(seen) != 2:
        return seen
    (plan, args, kwargs, first), (then, (source, *_), _, result) = seen
    if plan is None or then is None:
        return seen
    detached = then.info.op is aten.detach.default and source is first and plan.info.functional
    return [(plan, args, kwargs, result)] if detached else seen


def _returned_value(info: OpInfo, args: Args) -> Value:
    """What torch's function of an op without results gives."""
    return args[0] if gives_list(info) else None


def _ops_named_like(func: Call) -> list[OpOverload]:
    """Every aten op of the function's name that starts with a tensor, or a list of them, `out=` forms aside."""
    name = getattr(func, "__name__", "")
    if not name.startswith(("_foreach_", "_fused_")):
        name = name.strip("_")
    packet = getattr(aten, name, None) if name else None
    ops = [getattr(packet, overload) for overload in packet.overloads()] if packet is not None else []
    return [op for op in ops if _takes_tensor(op) and not any(a.is_out for a in op._schema.arguments)]


def all_by_type(func: Call) -> bool:
    """Whether no value of a number matters to any of those ops: `torch.max` also has one with a dim."""
    ops = _ops_named_like(func)
    return bool(ops) and all(numbers_by_type(op) or _takes_tensors_alone(op) for op in ops)


def takes_one_tensor(func: Call) -> bool:
    """Whether no call of the function can hold a second tensor: getters, and ops such as `transpose`."""
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
    """Whether the op got just the function's tensors and no number but the function's own.

    A number of another origin may come from the global shape, and would be wrong for a shard. The
    order of the tensors matters where the plan moves some of them: it counts them.
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
