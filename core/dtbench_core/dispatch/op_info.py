"""Properties of an op that dispatch needs at every call, computed once per op."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

from dtbench_core import rules
from dtbench_core.dispatch import fallback, out_and_resize
from dtbench_core.dispatch.metadata import written_arguments
from dtbench_core.layout.wrapper import SharedMemory, share_memory, wrap
from dtbench_core.op_types import Args, Call, Kwargs
from dtbench_core.rules import foreach
from dtbench_core.torch_compat import is_composite, is_inference_mode_enabled, kernel_of


class OpInfo:
    """The properties of one op.

    Attributes:
        kernel: the fastest way to call the op on plain tensors.
        elementwise: whether it computes each element from the elements at the same place.
        by_type: whether plans hold for all values of a number's type (`numbers_by_type`).
        mutated: (position, name) of the arguments that it writes to.
        aliases: whether it is a view op.
        functional: whether it makes new tensors and writes to none.
        returned: the one written argument that is the result: its position, or its name if keyword-only. None if there
            is no such argument.
        random: whether it draws random numbers.
        handler: runs instead of a plan, for decompositions, in-place views and a few views; called with
            (torch_dispatch, cls, op, args, kwargs). May return NotImplemented: the op then takes the usual way.
        without_plan: runs if no plan can be made, called likewise.
    """

    __slots__ = (
        "aliases",
        "by_type",
        "elementwise",
        "functional",
        "handler",
        "kernel",
        "mutated",
        "op",
        "random",
        "returned",
        "without_plan",
    )

    def __init__(self, op: OpOverload) -> None:
        arguments, returns = op._schema.arguments, op._schema.returns
        written = written_arguments(op)
        self.op = op
        self.kernel = kernel_of(op)
        self.elementwise = rules.pointwise.is_pointwise(op)
        self.by_type = numbers_by_type(op)
        self.mutated = written
        self.aliases = not written and any(r.alias_info is not None for r in returns)
        self.functional = not written and not self.aliases
        self.returned: Any = None
        if len(written) == len(returns) == 1 and returns[0].alias_info is not None:
            argument = arguments[written[0][0]]
            self.returned = argument.name if argument.kwarg_only else written[0][0]
        self.random = torch.Tag.nondeterministic_seeded in op.tags
        self.handler = _handler_of(op)
        self.without_plan = _without_plan(op)


def numbers_by_type(op: OpOverload) -> bool:
    """Whether one plan holds for all values of a number's type, since no value changes the placements of results."""
    return rules.pointwise.is_pointwise(op) or rules.find_rule(op) in (foreach.foreach, foreach.fused_step)


def _handler_of(op: OpOverload) -> Call | None:
    if (decomposed := rules.decompositions.get(op)) is not None:
        return lambda dispatch, cls, op, args, kwargs: decomposed(*args, **kwargs)
    if op is torch.ops.aten.set_.source_Tensor:
        return out_and_resize.run_set
    if torch.Tag.inplace_view in op.tags and out_and_resize.functional_of(op) is not None:
        return out_and_resize.run_in_place_view
    if op is torch.ops.aten._unsafe_view.default:
        return _run_unsafe_view
    if op is torch.ops.aten.detach.default:
        return _run_detach
    return None


def _run_unsafe_view(dispatch: Call, cls: Any, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Runs the op that AOTAutograd puts in place of a graph's result. It returns another tensor on the same memory."""
    source, shape = args[0], tuple(args[1])
    if source._read_only_reason is None or shape != tuple(source._spec.shape):
        return NotImplemented
    local = source._local_tensor
    view = wrap(type(source), local.view_as(local), source._spec)
    view._read_only_reason, view._memory, view._writes_at_return = (
        source._read_only_reason,
        source._memory,
        source._writes_at_return,
    )
    return view


def _run_detach(dispatch: Call, cls: Any, op: OpOverload, args: Args, kwargs: Kwargs) -> Any:
    """Runs detach without looking up its plan: autograd detaches every result that a backward pass saves."""
    (base,) = args
    plain = base.__class__ is cls and base._local_tensor.__class__ is torch.Tensor
    if not plain or SharedMemory.traced or is_inference_mode_enabled():
        return NotImplemented
    view = wrap(cls, base._local_tensor.detach(), base._spec)
    share_memory(base, view, 0)
    return view


def _without_plan(op: OpOverload) -> Call:
    if out_and_resize.out_names(op) and out_and_resize.functional_of(op) is not None:
        return out_and_resize.run_out
    if is_composite(op):  # in inference mode and in decompositions torch does not split it
        return lambda dispatch, cls, op, args, kwargs: op.decompose(*args, **kwargs)
    return lambda dispatch, cls, op, args, kwargs: fallback.run(cls, op, args, kwargs)
