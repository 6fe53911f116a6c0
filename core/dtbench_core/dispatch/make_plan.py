"""Making a plan: what an op on given specs does, worked out once and kept (op_plan.py says how it runs)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from dtbench_core import comm, rules
from dtbench_core.dispatch import out_and_resize, outside_mesh, rank_check, value_check
from dtbench_core.dispatch.metadata import (
    describe,
    device_of_results,
    orders_of,
    results_of,
    view_offsets,
    written_by,
)
from dtbench_core.dispatch.op_info import OpInfo
from dtbench_core.dispatch.op_plan import Move, OpPlan, plan_of_kind, with_spec_strides
from dtbench_core.dispatch.overlap import error_of_plain, refuse_overlapping_itself
from dtbench_core.errors import CoreError
from dtbench_core.layout import random
from dtbench_core.layout.local_shards import holds_shards
from dtbench_core.layout.placement import Placements, local_extents
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import Wrapper, held_by
from dtbench_core.op_types import Args, Call, Kwargs, Value
from dtbench_core.redistribute import routes
from dtbench_core.redistribute.copied_view import copied_view, is_copied, refuse_writes
from dtbench_core.rules.base import OpCall, PlacedSpecs, Strategy, placements_by_tensor
from dtbench_core.torch_compat import dispatch_modes_active


def build(info: OpInfo, args: Args, kwargs: Kwargs) -> OpPlan | None:
    """The plan of `info.op` for these arguments, or None: no rule fits, replicate and run (fallback.py).

    Every rank builds the same one, or raises.

    Raises:
        MeshError: the DTensors live on different meshes. PlacementError: a write that cannot reach the base of a
            copied view.
    """
    written = written_by(info.mutated, args, kwargs) if info.mutated else []
    refuse_writes(written)
    refuse_overlapping_itself(info.op, written, args, kwargs)
    to_copy = any(map(is_copied, written))
    call = describe(info.op, args, kwargs)
    if isinstance(info.returned, str):
        return _build_out(info, call, to_copy=to_copy)
    find = rules.find_rule(info.op)
    if find is None:
        return None
    try:
        call.outputs, structure = results_of(info.op, call.args, call.kwargs, info.elementwise)
        strategy = find(call)
        chosen = strategy.exact_placements
        if (
            chosen is None
            and (rows := rules.choose_rows(call, strategy, _written_inputs(info, call))) is not None
        ):
            chosen = placements_by_tensor(rows)
    except NotImplementedError:  # the shape depends on the values, or torch has no meta kernel
        return None
    except CoreError:
        raise
    except Exception as error:  # meta kernels say some things otherwise, or not at all
        if dispatch_modes_active():
            raise
        plain = error_of_plain(info.op, call.args, call.kwargs, otherwise=error)
        if plain is None:
            return None
        raise plain from None
    if chosen is None or not rank_check.every_rank_can(call, strategy, *chosen):
        return None
    of_copy = args[0]._spec if info.aliases and is_copied(args[0]) else None
    return _plan_for(info, call, structure, strategy, *chosen, of_copy=of_copy, to_copy=to_copy)


def _build_out(info: OpInfo, call: OpCall, *, to_copy: bool) -> OpPlan | None:
    """The plan of `op(..., out=x)` where the op's rule can leave its result just where `x` lies."""
    functional, name = out_and_resize.functional_of(info.op), info.returned
    out = call.kwargs.get(name)
    find = rules.find_rule(functional) if functional is not None else None
    if functional is None or find is None or not isinstance(out, DTensorSpec) or len(call.kwargs) > 1:
        return None
    plain = OpCall(functional, call.args, {}, call.inputs[:-1])  # keyword arguments come last
    try:
        plain.outputs, structure = results_of(
            functional, plain.args, {}, rules.pointwise.is_pointwise(functional)
        )
    except NotImplementedError:
        return None
    strategy, meta = find(plain), plain.outputs[0]
    fits = structure == "tensor" and meta is not None and (meta.shape, meta.dtype) == (out.shape, out.dtype)
    if (
        not fits
        or strategy.localize
        or strategy.local_op
        or strategy.exact_placements
        or strategy.local_shape_args
    ):
        return None
    rows = rules.choose_rows(plain, strategy, (), result=out.placements)
    if rows is None:
        return None
    inputs, _ = placements_by_tensor(rows)
    if not rank_check.all_even(plain, inputs, (out.placements,)):
        return None
    member = out.info.coordinate is not None
    if member:
        agreeing = value_check.raise_on_all_ranks(plain, inputs)
        local_op = None if agreeing is None else agreeing(info.kernel)
    else:
        local_op = outside_mesh.kernel(info.op, out.info, (None,), "tensor")
    return plan_of_kind(info, local_op, out, _moves(plain, inputs), to_copy=to_copy)


def _plan_for(
    info: OpInfo,
    call: OpCall,
    structure: str,
    strategy: Strategy,
    inputs: tuple[Placements, ...],
    outputs: tuple[Placements, ...],
    *,
    of_copy: DTensorSpec | None,
    to_copy: bool,
) -> OpPlan:
    mesh = call.inputs[0].info
    orders = orders_of(info.op, call.args, call.kwargs, call.outputs)
    specs = [
        None if meta is None else DTensorSpec.of(mesh, placed, *meta, order)
        for meta, placed, order in zip(call.outputs, outputs, orders, strict=True)
    ]
    out: Value = specs[0] if structure == "tensor" else specs if structure == "list" else None
    replaced = tuple(
        (position, list(specs[0].local_shape)) for position in strategy.local_shape_args if specs[0]
    )
    moves = _moves(call, inputs)
    offsets = view_offsets(info.op, call.args, call.kwargs) if info.aliases else ()
    if info.random:
        random.keep_in_step(mesh)
    if mesh.coordinate is None and not (info.random and strategy.localize):
        nothing = outside_mesh.kernel(info.op, mesh, specs, structure)
        return plan_of_kind(info, nothing, out, moves, of_copy=of_copy, to_copy=to_copy, offsets=offsets)
    local_op = strategy.local_op
    if strategy.localize is not None:
        pairs = zip(call.inputs, inputs, strict=True)
        moved = tuple(s if p == s.placements else s.with_placements(p) for s, p in pairs)
        local_op = strategy.localize(PlacedSpecs(moved, tuple(specs)))
    agreeing = value_check.raise_on_all_ranks(call, inputs)
    if not info.aliases and not info.random:  # a random op's rank would fall out of step
        makes = out is not None and info.functional
        empty = makes and all(s is None or 0 in s.local_shape for s in specs)
        # Where something is computed for this rank, the op itself may refuse what that does not.
        ask = agreeing is None and (empty or strategy.localize is None)
        refusal = _refusal_elsewhere(info, call, strategy, inputs, outputs) if ask else None
        if empty:
            local_op = _empty_results(info, local_op or info.op, specs, refusal, several=structure == "list")
        elif refusal is not None:
            local_op = _raising(refusal)
    if (checked := value_check.check_filled(call)) is not None:
        local_op = checked(local_op or info.kernel)
    if agreeing is not None:
        local_op = agreeing(local_op or info.kernel)
    return plan_of_kind(
        info, local_op, out, moves, replaced, of_copy=of_copy, to_copy=to_copy, offsets=offsets
    )


def _moves(call: OpCall, inputs: Sequence[Placements]) -> tuple[Move, ...]:
    """What brings the inputs to these placements."""
    return tuple(
        Move(index, routes.cheapest_route(spec, wanted), spec, wanted)
        for index, (spec, wanted) in enumerate(zip(call.inputs, inputs, strict=True))
        if wanted != spec.placements
    )


def _refusal_elsewhere(
    info: OpInfo,
    call: OpCall,
    strategy: Strategy,
    inputs: Sequence[Placements],
    outputs: Sequence[Placements],
) -> Exception | None:
    """What other ranks' kernels refuse, whatever the values are, where this rank holds nothing of a tensor."""
    mesh = call.inputs[0].info
    here = mesh.my_coordinate()
    shapes = itertools.chain(*rank_check.placed_shapes(call, inputs, outputs))
    nothing = any(0 in local_extents(shape, p, mesh.sizes, here)[0] for shape, p in shapes)
    if not nothing or info.by_type:  # by_type: asked at every call
        return None
    return rank_check.refusal_of_others(call, strategy, inputs, outputs)


def _raising(refusal: Exception) -> Call:
    def refuse(*_: object, **__: object) -> Value:
        raise refusal

    return refuse


def _empty_results(
    info: OpInfo, op: Call, specs: Sequence[DTensorSpec | None], refusal: Exception | None, *, several: bool
) -> Call:
    """Stands for the op on a rank whose results are empty: many kernels raise or warn there, and a rank
    that raises alone leaves the others waiting. Shards, empty ones too, define which ops they support.

    refusal: what the other ranks' kernels raise, once all inputs have moved."""
    mesh = next(s.info for s in specs if s is not None)

    def make(*args: object, **kwargs: object) -> Value:
        if refusal is not None:
            raise refusal
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(holds_shards(one) for one in tensors):
            return op(*args, **kwargs)
        if info.by_type and (refused := rank_check.refusal_of_numbers(info.op, args, kwargs)) is not None:
            raise refused
        where = torch.device(device_of_results(args, kwargs, mesh.device_type))
        near = [one for one in tensors if one.device.type == where.type]
        empty = [
            None
            if s is None
            else comm.full_ordered_after(near, s.local_shape, 0, s.dtype)
            if near
            else torch.empty(s.local_shape, dtype=s.dtype, device=where)
            for s in specs
        ]
        return tuple(empty) if several else empty[0]

    return make


def _written_inputs(info: OpInfo, call: OpCall) -> tuple[int, ...]:
    """Indices among the tensor inputs of those that are written, which must stay where they are."""
    written: list[DTensorSpec] = []
    for position, name in info.mutated:
        value = call.args[position] if position < len(call.args) else call.kwargs.get(name)
        written += [leaf for leaf in tree_leaves(value) if isinstance(leaf, DTensorSpec)]
    indices, used = [], 0
    for spec in written:  # in schema order, as call.inputs is
        index = next(i for i in range(used, len(call.inputs)) if call.inputs[i] is spec)
        indices.append(index)
        used = index + 1
    return tuple(indices)


def first_run(
    plan: OpPlan, cls: type[Wrapper], args: Args, kwargs: Kwargs, locals_: list[Value], local_kwargs: Kwargs
) -> tuple[OpPlan, Any]:
    """(the plan to keep, the result): a rule that misjudges a shape must not pass silently. Nor a local op that
    copies, on these shards, where the op gives a view, or that leaves its result otherwise in memory than it does
    on the whole: that is put right on this rank, as the others need not see the same.

    Raises:
        CoreError: a local result that is not the shard its spec says.
    """
    base = args[0] if args else None
    result = plan.run(cls, plan.kernel, args, kwargs, locals_, local_kwargs)
    several = isinstance(result, (list, tuple))
    wrapped = [r for r in (result if several else (result,)) if isinstance(r, Wrapper)]
    for one in wrapped:
        local, spec = held_by(one), one._spec
        if tuple(local.shape) != spec.local_shape or local.dtype != spec.dtype:
            raise CoreError(
                f"the rule of {plan.info.op} is wrong: the local result is {local.dtype} {list(local.shape)}, but "
                f"{spec} has {spec.dtype} {list(spec.local_shape)} on this rank; please report it"
            )
    in_order = all(holds_shards(held_by(one)) or one._spec.lays_out(held_by(one)) for one in wrapped)
    if not plan.info.aliases and not plan.writes and not in_order:
        plan = plan.with_spec_strides()
        for one in wrapped:
            one._local_tensor = with_spec_strides(held_by(one), one._spec)
    if not plan.info.aliases or any(is_copied(one) for one in wrapped) or not isinstance(base, Wrapper):
        return plan, result
    if all(_shares_memory(held_by(one), held_by(base)) for one in wrapped):
        return plan, result
    copies = [copied_view(cls, held_by(one), one._spec, base) for one in wrapped]
    for copy, one in zip(copies, wrapped, strict=True):  # of the base's memory, as these
        copy._memory = one._memory
    return plan.copying(), result.__class__(copies) if several else copies[0]


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a write to the one shows in the other; True where there is nothing to write, or no memory to ask."""
    if one.numel() == 0 or one.__class__ is not torch.Tensor or one.device.type == "meta":
        return True
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
