"""Builds the plan of an op for given specs and static arguments (op_plan.py says how plans run)."""

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
from dtbench_core.layout.wrapper import Wrapper, stored_local
from dtbench_core.op_types import Args, Call, Kwargs, Value
from dtbench_core.redistribute import routes
from dtbench_core.redistribute.copied_view import copied_view, is_copied, refuse_writes
from dtbench_core.rules.base import OpCall, PlacedSpecs, Strategy, placements_by_tensor
from dtbench_core.torch_compat import dispatch_modes_active


def build(info: OpInfo, args: Args, kwargs: Kwargs) -> OpPlan | None:
    """Returns the plan of `info.op` for these arguments, or None if no rule fits and fallback.py must run it.

    Every rank builds the same plan, or raises.

    Raises:
        MeshError: the DTensors are on different meshes.
        PlacementError: a write that cannot reach the base of a copied view.
    """
    written = written_by(info.mutated, args, kwargs) if info.mutated else []
    refuse_writes(written)
    refuse_overlapping_itself(info.op, written, args, kwargs)
    writes_copied = any(map(is_copied, written))
    call = describe(info.op, args, kwargs)
    if isinstance(info.returned, str):
        return _build_out(info, call, writes_copied=writes_copied)
    rule = rules.find_rule(info.op)
    if rule is None:
        return None
    try:
        call.outputs, structure = results_of(info.op, call.args, call.kwargs, info.elementwise)
        strategy = rule(call)
        chosen = strategy.exact_placements
        if (
            chosen is None
            and (rows := rules.choose_rows(call, strategy, _written_inputs(info, call))) is not None
        ):
            chosen = placements_by_tensor(rows)
    except NotImplementedError:  # the shape depends on values, or torch has no meta kernel
        return None
    except CoreError:
        raise
    except Exception as error:  # the message of a meta kernel may differ from the kernel's
        if dispatch_modes_active():
            raise
        plain = error_of_plain(info.op, call.args, call.kwargs, otherwise=error)
        if plain is None:
            return None
        raise plain from None
    if chosen is None or not rank_check.every_rank_can(call, strategy, *chosen):
        return None
    copied_spec = args[0]._spec if info.aliases and is_copied(args[0]) else None
    return _plan_for(
        info, call, structure, strategy, *chosen, copied_spec=copied_spec, writes_copied=writes_copied
    )


def _build_out(info: OpInfo, call: OpCall, *, writes_copied: bool) -> OpPlan | None:
    """Returns the plan of `op(..., out=x)` if the op's rule can give its result the placements of `x`, else None."""
    functional, name = out_and_resize.functional_of(info.op), info.returned
    out = call.kwargs.get(name)
    rule = rules.find_rule(functional) if functional is not None else None
    if functional is None or rule is None or not isinstance(out, DTensorSpec) or len(call.kwargs) > 1:
        return None
    plain = OpCall(functional, call.args, {}, call.inputs[:-1])  # keyword arguments come last
    try:
        plain.outputs, structure = results_of(
            functional, plain.args, {}, rules.pointwise.is_pointwise(functional)
        )
    except NotImplementedError:
        return None
    strategy, meta = rule(plain), plain.outputs[0]
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
    if out.info.coordinate is not None:
        agreeing = value_check.raise_on_all_ranks(plain, inputs)
        local_op = None if agreeing is None else agreeing(info.kernel)
    else:
        local_op = outside_mesh.kernel(info.op, out.info, (None,), "tensor")
    return plan_of_kind(info, local_op, out, _moves(plain, inputs), writes_copied=writes_copied)


def _plan_for(
    info: OpInfo,
    call: OpCall,
    structure: str,
    strategy: Strategy,
    inputs: tuple[Placements, ...],
    outputs: tuple[Placements, ...],
    *,
    copied_spec: DTensorSpec | None,
    writes_copied: bool,
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
        return plan_of_kind(
            info, nothing, out, moves, copied_spec=copied_spec, writes_copied=writes_copied, offsets=offsets
        )
    local_op = strategy.local_op
    if strategy.localize is not None:
        pairs = zip(call.inputs, inputs, strict=True)
        moved = tuple(s if p == s.placements else s.with_placements(p) for s, p in pairs)
        local_op = strategy.localize(PlacedSpecs(moved, tuple(specs)))
    agreeing = value_check.raise_on_all_ranks(call, inputs)
    if not info.aliases and not info.random:  # all ranks must draw random numbers
        makes = out is not None and info.functional
        empty = makes and all(s is None or 0 in s.local_shape for s in specs)
        # A local op made for this rank may accept arguments that the op refuses.
        ask = agreeing is None and (empty or strategy.localize is None)
        refusal = _error_on_nonempty_ranks(info, call, strategy, inputs, outputs) if ask else None
        if empty:
            local_op = _empty_results(info, local_op or info.op, specs, refusal, several=structure == "list")
        elif refusal is not None:
            local_op = _raising(refusal)
    if (checked := value_check.check_filled(call)) is not None:
        local_op = checked(local_op or info.kernel)
    if agreeing is not None:
        local_op = agreeing(local_op or info.kernel)
    return plan_of_kind(
        info,
        local_op,
        out,
        moves,
        replaced,
        copied_spec=copied_spec,
        writes_copied=writes_copied,
        offsets=offsets,
    )


def _moves(call: OpCall, inputs: Sequence[Placements]) -> tuple[Move, ...]:
    """Returns the redistributions that give the inputs these placements."""
    return tuple(
        Move(index, routes.cheapest_route(spec, target), spec, target)
        for index, (spec, target) in enumerate(zip(call.inputs, inputs, strict=True))
        if target != spec.placements
    )


def _error_on_nonempty_ranks(
    info: OpInfo,
    call: OpCall,
    strategy: Strategy,
    inputs: Sequence[Placements],
    outputs: Sequence[Placements],
) -> Exception | None:
    """If this rank has an empty shard, returns the error that the kernels of other ranks raise for any values.

    None if no shard of this rank is empty, or if no kernel raises. This rank's kernel would not raise, and the rank
    would then wait for the others in the next collective.
    """
    mesh = call.inputs[0].info
    coordinate = mesh.my_coordinate()
    shapes = itertools.chain(*rank_check.placed_shapes(call, inputs, outputs))
    has_empty_shard = any(0 in local_extents(shape, p, mesh.sizes, coordinate)[0] for shape, p in shapes)
    if not has_empty_shard or info.by_type:  # if by_type, `refusal_of_numbers` checks this at every call
        return None
    return rank_check.refusal_of_others(call, strategy, inputs, outputs)


def _raising(refusal: Exception) -> Call:
    def refuse(*_: object, **__: object) -> Value:
        raise refusal

    return refuse


def _empty_results(
    info: OpInfo, op: Call, specs: Sequence[DTensorSpec | None], refusal: Exception | None, *, several: bool
) -> Call:
    """Returns a function that runs in place of the op on a rank whose results are empty.

    Many kernels raise or warn on empty tensors, and the other ranks would wait for a rank that raises alone. If an
    input is a `LocalShardsWrapper`, the op itself runs, since that class defines which ops it supports.

    Args:
        refusal: error that the other ranks' kernels raise after all inputs have moved.
    """
    mesh = next(s.info for s in specs if s is not None)

    def make(*args: object, **kwargs: object) -> Value:
        if refusal is not None:
            raise refusal
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(holds_shards(tensor) for tensor in tensors):
            return op(*args, **kwargs)
        if info.by_type and (refused := rank_check.refusal_of_numbers(info.op, args, kwargs)) is not None:
            raise refused
        device = torch.device(device_of_results(args, kwargs, mesh.device_type))
        near = [tensor for tensor in tensors if tensor.device.type == device.type]
        empty = [
            None
            if s is None
            else comm.full_ordered_after(near, s.local_shape, 0, s.dtype)
            if near
            else torch.empty(s.local_shape, dtype=s.dtype, device=device)
            for s in specs
        ]
        return tuple(empty) if several else empty[0]

    return make


def _written_inputs(info: OpInfo, call: OpCall) -> tuple[int, ...]:
    """Returns the indices of the tensor inputs that the op writes to. The plan cannot redistribute them."""
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
    """Runs a new plan and checks the local results against the specs of the rule.

    A local op may copy although the op gives a view of the global tensor. Its results may also have other strides than
    their specs. Both depend on the shards, so the plan is changed on this rank only.

    Returns:
        (the plan to keep, the result).

    Raises:
        CoreError: a local result has another shape or dtype than its spec says.
    """
    base = args[0] if args else None
    result = plan.run(cls, plan.kernel, args, kwargs, locals_, local_kwargs)
    several = isinstance(result, (list, tuple))
    wrapped = [r for r in (result if several else (result,)) if isinstance(r, Wrapper)]
    for tensor in wrapped:
        local, spec = stored_local(tensor), tensor._spec
        if tuple(local.shape) != spec.local_shape or local.dtype != spec.dtype:
            raise CoreError(
                f"the rule of {plan.info.op} is wrong: the local result is {local.dtype} {list(local.shape)}, but "
                f"{spec} has {spec.dtype} {list(spec.local_shape)} on this rank; please report it"
            )
    in_order = all(
        holds_shards(stored_local(tensor)) or tensor._spec.matches_strides(stored_local(tensor))
        for tensor in wrapped
    )
    if not plan.info.aliases and not plan.writes and not in_order:
        plan = plan.with_spec_strides()
        for tensor in wrapped:
            tensor._local_tensor = with_spec_strides(stored_local(tensor), tensor._spec)
    if not plan.info.aliases or any(is_copied(tensor) for tensor in wrapped) or not isinstance(base, Wrapper):
        return plan, result
    if all(_shares_memory(stored_local(tensor), stored_local(base)) for tensor in wrapped):
        return plan, result
    copies = [copied_view(cls, stored_local(tensor), tensor._spec, base) for tensor in wrapped]
    # The copies keep the memory that was recorded for the views.
    for copy, tensor in zip(copies, wrapped, strict=True):
        copy._memory = tensor._memory
    return plan.as_copied_views(), result.__class__(copies) if several else copies[0]


def _shares_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether a write to one tensor changes the other. True for tensors without elements or without memory."""
    if first.numel() == 0 or first.__class__ is not torch.Tensor or first.device.type == "meta":
        return True
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
