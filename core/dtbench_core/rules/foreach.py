"""Ops on lists of tensors, as used by optimizers: `_foreach_*`, fused steps, loss scaling.

The i-th tensors of all lists form a column. The rule of the op on single tensors places each column. A written tensor
stays where it is, and the other tensors of its column are moved to it. Columns may be on different meshes; a column may
also consist of plain tensors, which belong to this rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from dtbench_core.errors import MixedTensorError
from dtbench_core.layout.mesh import MeshInfo
from dtbench_core.layout.placement import REPLICATE, Partial, Placements
from dtbench_core.layout.spec import DTensorSpec, TensorMeta
from dtbench_core.layout.wrapper import Wrapper, wrap
from dtbench_core.op_types import Value
from dtbench_core.redistribute.autograd import redistribute_tensor
from dtbench_core.redistribute.routes import placements_of_gradient
from dtbench_core.rules.base import (
    OpCall,
    PlacementRow,
    Rule,
    Strategy,
    aten,
    decomposition,
    placements_by_tensor,
    rule,
    rules_by_op,
)
from dtbench_core.rules.choose import choose_rows
from dtbench_core.rules.pointwise import is_pointwise, pointwise
from dtbench_core.torch_compat import any_requires_grad, increment_version, is_grad_enabled, ranks_of_mesh

# torch has `_foreach_<name>` for each of these, and in-place variants of most, with numbers, number lists or tensors.
NAMES = """
    abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp
    expm1 floor frac lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt
    sigmoid sign sin sinh sqrt sub tan tanh trunc zero
"""
# Overload of the foreach op -> candidate overloads of the single-tensor op; the first existing one is used.
OVERLOADS = {
    "Scalar": ("Scalar", "Tensor_Scalar", "default"),
    "ScalarList": ("Scalar", "Tensor_Scalar", "default"),
    "List": ("Tensor", "Tensor_Tensor", "default"),
    "Tensor": ("Tensor", "default"),
    "ScalarAndTensor": ("Scalar",),
    "default": ("default",),
}


def _overloads(names: Sequence[str]) -> list[OpOverload]:
    ops = [
        getattr(packet, overload)
        for packet in [getattr(aten, name) for name in names if hasattr(aten, name)]
        for overload in packet.overloads()
        if "out" not in overload
    ]
    # Skip overloads that take the numbers as one tensor, which must be on the CPU to be read.
    return [
        op for op in ops if ("scalars", "Tensor") not in {(a.name, str(a.type)) for a in op._schema.arguments}
    ]


def _single(op: OpOverload) -> tuple[OpOverload, Rule]:
    """Returns the functional op on one tensor, and its rule."""
    name = op._schema.name.removeprefix("aten::_foreach_").removesuffix("_")
    packet = aten.zeros_like if name == "zero" else getattr(aten, name)
    overload = next(o for o in OVERLOADS[op._overloadname or "default"] if o in packet.overloads())
    single = getattr(packet, overload)
    own_rule = rules_by_op.get(single)
    assert own_rule is not None or is_pointwise(single), single
    return single, own_rule or pointwise


class _ForeachArguments:
    """The tensor arguments of a call in schema order.

    Attributes:
        lists: argument name -> input indices of the tensors of the list, one per column.
        shared: input indices of tensors that are used for all columns.
        count: number of columns.
    """

    def __init__(self, call: OpCall) -> None:
        self.lists: dict[str, range] = {}
        self.shared: list[int] = []
        used = 0
        for name, value in [
            *((call.op._schema.arguments[i].name, a) for i, a in enumerate(call.args)),
            *((n, call.kwargs[n]) for n in sorted(call.kwargs)),
        ]:
            if isinstance(value, (list, tuple)) and value and isinstance(value[0], DTensorSpec):
                self.lists[name] = range(used, used + len(value))
                used += len(value)
            elif isinstance(value, DTensorSpec):
                self.shared.append(used)
                used += 1
        self.count = max((len(positions) for positions in self.lists.values()), default=0)


FOREACH = _overloads([f"_foreach_{name}{suffix}" for name in NAMES.split() for suffix in ("", "_")])


@rule(*FOREACH)
def foreach(call: OpCall) -> Strategy:
    columns = _ForeachArguments(call)
    in_place = call.op._schema.name.endswith("_")
    placed: list[Placements] = [(REPLICATE,) * spec.info.ndim for spec in call.inputs]
    results: list[Placements] = []
    chosen_by_key: dict[Any, tuple[tuple[Placements, ...], Placements] | None] = {}
    for index in range(columns.count):
        input_indices = [positions[index] for positions in columns.lists.values()]
        inputs = tuple(call.inputs[i] for i in input_indices)
        meta = inputs[0].tensor_meta if in_place else call.outputs[index]
        key = (inputs, meta)
        if key not in chosen_by_key:
            chosen_by_key[key] = _place_column(call, inputs, columns.shared, meta, in_place)
        if (chosen := chosen_by_key[key]) is None:
            return Strategy([])
        for i, placements in zip(input_indices, chosen[0], strict=True):
            placed[i] = placements
        results.append(chosen[1])
    # Elementwise ops run unchanged on any shards, also if these are uneven.
    return Strategy(
        [], localize=lambda _: None, exact_placements=(tuple(placed), () if in_place else tuple(results))
    )


def _place_column(
    call: OpCall, inputs: tuple[DTensorSpec, ...], shared: list[int], meta: TensorMeta | None, in_place: bool
) -> tuple[tuple[Placements, ...], Placements] | None:
    """Returns the placements of a column's inputs and of its result, or None if a written tensor would have to move."""
    single, rule_of_single = _single(call.op)
    replicated = (REPLICATE,) * inputs[0].info.ndim
    column_inputs = (*inputs, *(call.inputs[i].with_placements(replicated) for i in shared))
    takes_numbers = call.op._overloadname == "ScalarList" or not all(
        isinstance(a, (list, tuple, DTensorSpec)) for a in call.args
    )
    column = OpCall(single, (*column_inputs, *((0,) if takes_numbers else ())), {}, column_inputs, (meta,))
    # Tensors that all columns share are replicated.
    rows = [
        row for row in rule_of_single(column).rows if all(p == REPLICATE for p in row.inputs[len(inputs) :])
    ]
    if in_place:  # the result is the first input; zeros may have any placement
        rows = [r for r in rows if r.inputs[0] == r.outputs[0] or single is aten.zeros_like.default]
        rows = [PlacementRow(r.inputs, r.inputs[:1], r.even, r.nonempty) for r in rows]
    chosen = choose_rows(
        column, Strategy(rows), (0,) if in_place else (), result=inputs[0].placements if in_place else None
    )
    if chosen is None:
        return None
    placed, results = placements_by_tensor(chosen)
    return placed[: len(inputs)], results[0]


# ---- lists with columns on several meshes, or of plain tensors ----


@decomposition(*FOREACH, with_op=True)
def _run_by_mesh(op: OpOverload, *args: Value, **options: Any) -> Value:
    """Runs the op separately for the columns of each mesh and for those of plain tensors.

    Columns are independent, except in an in-place op whose written tensors share memory; then each column runs alone,
    in order. Returns NotImplemented if there is only one group of columns.
    """
    lists = [a for a in args if isinstance(a, (list, tuple)) and a]
    count = len(lists[0])
    if any(len(a) != count for a in lists):
        return NotImplemented  # torch raises an error
    meshes = [
        next((tensor._spec.info for tensor in column if isinstance(tensor, Wrapper)), None)
        for column in zip(*lists, strict=True)
    ]
    groups = [
        (mesh, [i for i, column_mesh in enumerate(meshes) if column_mesh is mesh])
        for mesh in dict.fromkeys(meshes)
    ]
    if not op._schema.returns and _share_memory(lists):
        groups = [(mesh, [i]) for i, mesh in enumerate(meshes)]
    if len(groups) < 2:
        return NotImplemented
    results: list[Value] = [None] * count
    for mesh, indices in groups:
        part = [
            [a[i] for i in indices] if any(a is tensors for tensors in lists) else _shared(a, mesh, op)
            for a in args
        ]
        group_results = op(*part, **{name: _shared(value, mesh, op) for name, value in options.items()})
        for i, result in zip(indices, group_results or (), strict=False):
            results[i] = result
    return results if op._schema.returns else None


def _share_memory(lists: Sequence[Sequence[Value]]) -> bool:
    """Whether a column writes memory that another column reads or writes."""
    written = lists[0]
    written_ids = set(map(id, written))
    views = any(isinstance(tensor, Wrapper) and tensor._memory is not None for tensor in written)
    is_disjoint = all(written_ids.isdisjoint(map(id, tensors)) for tensors in lists[1:])
    if is_disjoint and not views and len(written_ids) == len(written):
        return False
    column_of: dict[object, int] = {}
    for index, tensor in enumerate(written):
        if column_of.setdefault(_memory_of(tensor), index) != index:
            return True
    return any(
        column_of.get(_memory_of(t), index) != index
        for tensors in lists[1:]
        for index, t in enumerate(tensors)
    )


def _memory_of(tensor: object) -> object:
    return tensor._memory[0] if isinstance(tensor, Wrapper) and tensor._memory is not None else id(tensor)


def _shared(value: Value, mesh: MeshInfo | None, op: OpOverload) -> Value:
    """Returns an argument shared by all columns for the columns on `mesh`: a tensor of another mesh is replicated."""
    if not isinstance(value, Wrapper) or value._spec.info is mesh:
        return value
    value_mesh = value._spec.info
    if value_mesh.coordinate is None:
        raise MixedTensorError(
            f"{op} got tensors that are not all on {value_mesh} together with {value._spec}, whose values this rank "
            "lacks, since it is not in that mesh; expected tensors of that mesh only: call it on the ranks of that mesh"
        )
    return _replicated_local(value)


# ---- fused optimizer steps ----


FUSED = _overloads(["_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"])


@rule(*FUSED)
def fused_step(call: OpCall) -> Strategy:
    """(parameters, gradients, state...): all tensors of a column are placed like the parameter.

    Step counts and tensors that all columns share are replicated.
    """
    columns = _ForeachArguments(call)
    placed: list[Placements] = [(REPLICATE,) * spec.info.ndim for spec in call.inputs]
    for name, positions in columns.lists.items():
        for parameter_index, i in zip(columns.lists["self"], positions, strict=True):
            parameter, spec = call.inputs[parameter_index], call.inputs[i]
            if name != "state_steps":
                placed[i] = parameter.placements
                if spec.placements != placed[i] or spec.has_partial():
                    return Strategy([])
    return Strategy([], localize=lambda _: None, exact_placements=(tuple(placed), ()))


def _step_on_copies(
    op: OpOverload, parameters: Sequence[Value], grads: Sequence[Value], *args: Any, **options: Any
) -> Value:
    """Runs a fused step whose gradients or states are placed unlike the parameters, on redistributed copies."""
    states = args if op._schema.name == "aten::_fused_sgd_" else args[:-1]
    steps = args[len(states) :]
    if all(
        parameter._spec.placements == tensor._spec.placements
        for tensors in (grads, *states)
        for parameter, tensor in zip(parameters, tensors, strict=False)
    ):
        return NotImplemented
    scale, found_inf = options.get("grad_scale"), options.get("found_inf")
    if scale is not None:  # the op leaves unscaled gradients behind, unless it skips the step
        factor = scale if found_inf is None else torch.where(found_inf > 0, torch.ones_like(scale), scale)
        for grad in grads:
            grad.div_(factor)
        options["grad_scale"] = None
    moved = [_moved(parameters, tensors) for tensors in (grads, *states)]
    op(parameters, *moved, *steps, **options)
    for state, copies in zip(states, moved[1:], strict=True):
        for tensor, copied in zip(state, copies, strict=True):
            # A state may be placed differently: a momentum is placed like its first gradient, maybe as a pending sum.
            if tensor is not copied:
                tensor._local_tensor.copy_(redistribute_tensor(copied, tensor._spec.placements)._local_tensor)
                increment_version((tensor,))
    return None


@decomposition(*FUSED, with_op=True)
def _step(op: OpOverload, *args: Value, **options: Any) -> Value:
    result = _run_by_mesh(op, *args, **options)
    return _step_on_copies(op, *args, **options) if result is NotImplemented else result


def _moved(parameters: Sequence[Value], tensors: Sequence[Value]) -> list[Value]:
    """Returns each tensor with the placements of its parameter. Unused lists are empty."""
    return [
        t if p._spec.placements == t._spec.placements else redistribute_tensor(t, p._spec.placements)
        for p, t in zip(parameters, tensors, strict=False)
    ]


# ---- norms and finiteness of lists ----


@decomposition(aten._foreach_norm.Scalar)
def foreach_norm(tensors: Sequence[Value], ord: Any = 2, dtype: torch.dtype | None = None) -> Value:
    """Returns the norms of the tensors, replicated.

    The norms of local shards to the power of `ord` are summed over the ranks, in one collective for all tensors with
    the same placements. Plain tensors are not reduced. If the tensors are on several meshes of the same ranks, the
    norms are returned as plain tensors, so that they can be combined.
    """
    if ord <= 0 or (is_grad_enabled() and any_requires_grad(tensors)):
        return NotImplemented
    # (class, spec) of DTensors or (None, dtype, shape) of plain tensors -> their indices
    by_spec: dict[Any, list[int]] = {}
    for index, tensor in enumerate(tensors):
        placed = isinstance(tensor, Wrapper)
        by_spec.setdefault(
            (tensor.viewed, tensor._spec) if placed else (None, tensor.dtype, tensor.shape), []
        ).append(index)
    groups: dict[Any, list[int]] = {}  # (class, mesh, placements, dtype), or None for plain tensors
    for (cls, *_), positions in by_spec.items():
        first = tensors[positions[0]]
        if not first.dtype.is_floating_point or (ord == math.inf and 0 in first.shape):
            return NotImplemented  # torch raises for the max norm of an empty tensor
        spec = first._spec if cls else None
        groups.setdefault(spec and (cls, spec.info, spec.placements, spec.dtype), []).extend(positions)
    meshes = {placed[1] for placed in groups if placed}
    several_meshes = (
        len(meshes) > 1 and len({tuple(sorted(ranks_of_mesh(info.mesh))) for info in meshes}) == 1
    )
    norms: list[Value] = [None] * len(tensors)
    for placed, positions in groups.items():
        group = [tensors[index] for index in positions]
        norms_of = _norms_of_group if placed else torch._foreach_norm
        for index, norm in zip(positions, norms_of(group, ord, dtype=dtype), strict=True):
            norms[index] = norm._local_tensor if placed and several_meshes else norm
    return norms


def _norms_of_group(tensors: Sequence[Value], ord: Any, dtype: torch.dtype | None) -> list[Value]:
    """Returns the norms of tensors with the same placements and dtype, computed in float64 as powers may grow large."""
    cls, spec = tensors[0].viewed, tensors[0]._spec
    info, dtype = spec.info, dtype or spec.dtype
    replicated = (REPLICATE,) * info.ndim
    norm_spec = DTensorSpec.of(info, replicated, (), (), dtype)
    if spec.has_partial():
        tensors = [redistribute_tensor(t, placements_of_gradient(spec.placements)) for t in tensors]
    locals_ = [t._local_tensor for t in tensors]
    if info.coordinate is None:
        return [wrap(cls, local.new_empty(0, dtype=dtype), norm_spec) for local in locals_]
    # An empty shard has no maximum. A 0 replaces it, which changes no norm, because norms are not negative.
    terms = torch.stack(
        torch._foreach_norm(
            [local if local.numel() else local.new_zeros(1) for local in locals_],
            ord,
            dtype=torch.promote_types(dtype, torch.float32),
        )
    ).double()
    largest = ord == math.inf
    kind = Partial("max" if largest else "sum")
    pending = DTensorSpec.of(
        info,
        tuple(kind if p.is_shard() else REPLICATE for p in spec.placements),
        (len(tensors),),
        (1,),
        torch.float64,
    )
    total = redistribute_tensor(
        wrap(cls, terms if largest else terms**ord, pending), replicated
    )._local_tensor
    return [
        wrap(cls, norm, norm_spec) for norm in (total if largest else total ** (1 / ord)).to(dtype).unbind()
    ]


@decomposition(aten._amp_foreach_non_finite_check_and_unscale_.default)
def check_and_unscale(tensors: Sequence[Value], found_inf: Any, inv_scale: Any) -> Value:
    """Multiplies the gradients by `inv_scale`, and sets `found_inf` to 1 on every rank if any element is not finite.

    Only plain tensors are checked by this rank alone. A pending sum is reduced before the check, because its terms may
    be finite although it is not.
    """
    overflow, factor = (_replicated_local(t) if isinstance(t, Wrapper) else t for t in (found_inf, inv_scale))
    by_mesh: dict[MeshInfo | None, list[Value]] = {}
    for tensor in tensors:
        by_mesh.setdefault(tensor._spec.info if isinstance(tensor, Wrapper) else None, []).append(tensor)
    for info, members in by_mesh.items():
        if info is None:
            torch._amp_foreach_non_finite_check_and_unscale_(members, overflow, factor)
            continue
        without_partial = [t for t in members if not t._spec.has_partial()]
        mesh_overflow = torch.zeros_like(overflow)
        if info.coordinate is not None and without_partial:
            torch._amp_foreach_non_finite_check_and_unscale_(
                [t._local_tensor for t in without_partial], mesh_overflow, factor
            )
            increment_version(without_partial)
        placed = tuple(
            Partial("max") if any(t._spec.placements[dim].is_shard() for t in without_partial) else REPLICATE
            for dim in range(info.ndim)
        )
        spec = DTensorSpec.of(info, placed, mesh_overflow.shape, mesh_overflow.stride(), mesh_overflow.dtype)
        total: Any = wrap(
            members[0].viewed,
            mesh_overflow if info.coordinate is not None else mesh_overflow.new_empty(0),
            spec,
        )
        for tensor in [t for t in members if t._spec.has_partial()]:
            total = total + (~torch.isfinite(tensor)).any().to(mesh_overflow.dtype)
            tensor.mul_(factor.to(tensor.dtype))
        total_overflow = _replicated_local(total)
        if info.coordinate is not None:
            overflow.masked_fill_(total_overflow.reshape(overflow.shape) > 0, 1.0)
    if isinstance(found_inf, Wrapper) and overflow is not found_inf._local_tensor:
        spec = found_inf._spec.with_placements((REPLICATE,) * found_inf._spec.info.ndim)
        found_inf.copy_(wrap(found_inf.viewed, overflow, spec))
    return None


def _replicated_local(tensor: Value) -> torch.Tensor:
    """Replicates a DTensor and returns the local tensor."""
    return redistribute_tensor(tensor, (REPLICATE,) * tensor._spec.info.ndim)._local_tensor
