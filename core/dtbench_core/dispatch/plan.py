"""Making a plan: what an op on given specs does, worked out once and kept (see dispatch.py)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dtbench_core import rules
from dtbench_core.dispatch import contexts, fallback
from dtbench_core.dispatch import out_and_resize as writes
from dtbench_core.dispatch import outside_mesh as outside
from dtbench_core.dispatch import rank_check as variants
from dtbench_core.dispatch.metadata import flattened, results_of
from dtbench_core.errors import CoreError, MeshError
from dtbench_core.layout import rng as random
from dtbench_core.layout.local_shards import holds_shards
from dtbench_core.layout.placement import REPLICATE, Placements
from dtbench_core.layout.spec import DTensorSpec
from dtbench_core.layout.wrapper import Wrapper, detach_view, held_by, wrap
from dtbench_core.redistribute import route as redistribute
from dtbench_core.rules.base import OpCall, Placed, Strategy
from dtbench_core.torch_compat import (
    DisableTorchFunction,
    increment_version,
    is_composite,
    is_inference_mode_enabled,
    kernel_of,
)

Chosen = tuple[tuple[Placements, ...], tuple[Placements, ...]]  # of all inputs, of all outputs


class OpInfo:
    """What dispatch knows of an op before any call of it.

    mutated: positions of the arguments that it writes to. handler: what runs instead of a plan, for
    ops that no plan fits (`out=`, in-place views, decompositions); called with (dispatch, cls, op,
    args, kwargs).
    """

    __slots__ = (
        "aliases",
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
        written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
        self.op = op
        self.kernel = kernel_of(op)
        # The value of a number cannot change where an elementwise result is placed, so all values
        # of a type share one plan.
        self.elementwise = rules.pointwise.is_pointwise(op)
        self.mutated = tuple(written)
        self.aliases = not written and any(r.alias_info is not None for r in returns)
        self.functional = not written and not self.aliases
        # The position, or for keyword arguments the name, of the one written argument that is the result.
        self.returned: Any = None
        if len(written) == len(returns) == 1 and returns[0].alias_info is not None:
            argument = arguments[written[0]]
            self.returned = argument.name if argument.kwarg_only else written[0]
        self.random = torch.Tag.nondeterministic_seeded in op.tags
        self.handler = _handler_of(op)
        self.without_plan = _without_plan(op)


def _handler_of(op: OpOverload) -> Callable[..., Any] | None:
    decomposed = rules.decomposition_of(op)
    if decomposed is not None:
        return lambda dispatch, cls, op, args, kwargs: decomposed(*args, **kwargs)
    if torch.Tag.inplace_view in op.tags and writes.functional_of(op) is not None:
        return writes.run_restating
    return None


def _without_plan(op: OpOverload) -> Callable[..., Any]:
    if writes.out_names(op) and writes.functional_of(op) is not None:
        return writes.run_out
    if is_composite(op):  # below autograd (inference mode, decompositions) torch leaves it whole
        return lambda dispatch, cls, op, args, kwargs: op.decompose(*args, **kwargs)
    return lambda dispatch, cls, op, args, kwargs: fallback.run(cls, op, args, kwargs)


class Move(NamedTuple):
    """An input that must be placed otherwise: which of the tensors, how, what it is, what it becomes."""

    at: int
    steps: redistribute.Route
    spec: DTensorSpec
    placements: Placements


class Plan:
    """How one op runs for one combination of specs and static arguments.

    moves: of the inputs that must be placed otherwise.
    replaced: (argument position, local value) of global shapes made local.
    out: a spec, a list of specs and Nones (where the op gives none, or a number), or None for a Python value.
    returns_input: position, or name, of the written argument that is the result.
    copies: whether the op gives views and the local op, on these shards, copies.
    counts_write: whether `run` itself tells autograd of the write, as torch does on its own path.
    """

    __slots__ = (
        "aliases",
        "copies",
        "counts_write",
        "functional",
        "info",
        "kernel",
        "moves",
        "out",
        "plain_view",
        "replaced",
        "returns_input",
        "simple",
    )

    def __init__(
        self,
        info: OpInfo,
        local_op: Callable[..., Any] | None,
        moves: tuple[Move, ...],
        replaced: tuple[tuple[int, Any], ...],
        out: Any,
    ) -> None:
        self.kernel = local_op or info.kernel
        self.moves, self.replaced, self.out = moves, replaced, out
        self.returns_input = info.returned
        self.counts_write = False
        self.info = info
        self.aliases, self.copies = info.aliases, False
        self.functional = info.functional and local_op is None and not replaced
        still = not moves and not replaced and isinstance(out, DTensorSpec)
        self.simple, self.plain_view = info.functional and still, info.aliases and still

    def run(
        self,
        cls: type[Wrapper],
        call: Callable[..., Any],
        args: Sequence[Any],
        given: dict[str, Any],
        locals_: list[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """`call` (the op, or the function that became it) on the shards; the result as `cls`.

        args, given: the call's own arguments; locals_, kwargs: the same with shards for DTensors.
        """
        if self.simple:
            return wrap(cls, call(*locals_, **kwargs) if kwargs else call(*locals_), self.out)
        if self.plain_view and not (
            self.copies or getattr(args[0], "_detached_view", False) or is_inference_mode_enabled()
        ):
            return wrap(cls, call(*locals_, **kwargs) if kwargs else call(*locals_), self.out)
        if self.moves:
            locals_, kwargs = self._moved(args, given, locals_, kwargs)
        for position, value in self.replaced:
            locals_[position] = value
        if self.info.mutated:
            return self._write(cls, call, args, given, locals_, kwargs)
        result = call(*locals_, **kwargs) if kwargs else call(*locals_)
        if self.aliases and is_inference_mode_enabled():
            # A view is an inference tensor only if its base is: torch ties their versions.
            with DisableTorchFunction():
                inference = args[0].is_inference()
            with torch.inference_mode(inference):
                made = self._wrapped(cls, result)
        else:
            made = self._wrapped(cls, result)
        if self.aliases and (self.moves or self.copies or getattr(args[0], "_detached_view", False)):
            for view in made if isinstance(made, (list, tuple)) else (made,):
                detach_view(view, args[0])
        return made

    def _wrapped(self, cls: type[Wrapper], result: Any) -> Any:
        out = self.out
        if out.__class__ is DTensorSpec:
            return wrap(cls, result, out)
        if out is None:
            return result
        made = [r if spec is None else wrap(cls, r, spec) for r, spec in zip(result, out, strict=True)]
        return made if isinstance(result, list) else tuple(made)

    def _write(
        self,
        cls: type[Wrapper],
        call: Callable[..., Any],
        args: Sequence[Any],
        given: dict[str, Any],
        locals_: list[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        at = self.returns_input
        if at is not None:
            written = [given[at] if at.__class__ is str else args[at]]
            # A plain tensor, made on the way, has no such mark.
            if getattr(written[0], "_detached_view", False):
                raise fallback.lost_write(written[0])
        else:
            written = self._written(args, given)
            for one in written:
                if one._detached_view:
                    raise fallback.lost_write(one)
        result = call(*locals_, **kwargs)
        # torch leaves out the members of lists, which ops without results write; and means to leave out the
        # running statistics of batch norm, which autograd saves before.
        if self.counts_write or (at is None and not self.info.op._schema.returns):
            increment_version(written)
        if at is not None:
            return written[0]
        if self.info.op._schema.returns:
            return self._wrapped(cls, result)
        return args[0] if self.counts_write else None  # torch's functions give back the list they wrote

    def _written(self, args: Sequence[Any], given: dict[str, Any]) -> list[Any]:
        """The DTensors that an op which returns none of them writes to."""
        if self.info.mutated == (0,) and args[0].__class__ is list:
            return [one for one in args[0] if isinstance(one, Wrapper)]
        arguments = self.info.op._schema.arguments
        written: list[Any] = []
        for position in self.info.mutated:
            name = arguments[position].name
            value = args[position] if position < len(args) else given.get(name)
            written += value if value.__class__ in (list, tuple) else [value]
        return [one for one in written if isinstance(one, Wrapper)]

    def for_function(self) -> Plan:
        """This plan for calls that do not pass through torch, which would count the writes."""
        if not self.info.mutated:
            return self
        counting = copy.copy(self)
        counting.counts_write = True
        return counting

    def showing(self, index: int) -> Plan:
        """This plan for a function that gives out result `index` of the op alone."""
        shown = copy.copy(self)
        shown.out = self.out[index]
        shown.simple = not self.moves and not self.replaced
        return shown

    def _moved(
        self, args: Sequence[Any], given: dict[str, Any], locals_: list[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        if (watch := contexts.watch()) is not None:
            for move in self.moves:
                watch.observe(self.info.op, move.spec, move.placements)
        places = _places(args)
        if places is None or self.moves[-1].at >= len(places):
            return self._moved_inside(args, given, locals_, kwargs)
        locals_ = list(locals_)
        for index, route, _, placements in self.moves:
            at = places[index]
            locals_[at] = _settled(args[at], locals_[at], placements, route)
        return locals_, kwargs

    def _moved_inside(
        self, args: Sequence[Any], given: dict[str, Any], locals_: list[Any], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The same where a tensor may lie in a list, or is given by name."""
        tensors = [
            leaf for leaf in tree_leaves((list(args), _sorted(given))) if isinstance(leaf, torch.Tensor)
        ]
        leaves, tree = tree_flatten((locals_, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for index, route, _, placements in self.moves:
            at = places[index]
            leaves[at] = _settled(tensors[index], leaves[at], placements, route)
        moved: tuple[list[Any], dict[str, Any]] = tree_unflatten(leaves, tree)
        return moved


def _places(args: Sequence[Any]) -> list[int] | None:
    """Where the tensors are among the arguments; None if some may lie inside another argument."""
    places = []
    for at, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            places.append(at)
        elif isinstance(arg, (list, tuple, dict)) and not all(isinstance(x, (int, float)) for x in arg):
            return None
    return places


def _settled(
    tensor: Any, local: torch.Tensor, placements: Placements, route: redistribute.Route
) -> torch.Tensor:
    if isinstance(tensor, Wrapper):
        return redistribute.settle(tensor, placements, route)
    return redistribute.apply(local, route)


def _sorted(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in sorted(kwargs)}


# ---- building ----


def build(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> Plan | None:
    """The plan of `info.op` for these arguments, or None: no rule fits, replicate and run (fallback.py).

    Every rank builds the same one, or raises alike.

    Raises:
        MeshError: the DTensors live on different meshes.
    """
    call = _describe(info, args, kwargs)
    if isinstance(info.returned, str):
        return _build_out(info, call)
    find = rules.find(info.op)
    if find is None:
        return None
    try:
        call.outputs, structure = results_of(info.op, call.args, call.kwargs, info.elementwise)
    except NotImplementedError:  # the shape depends on the values, or torch has no meta kernel
        return None
    strategy = find(call)
    chosen = strategy.exact or _by_rows(call, strategy, _written_inputs(info, call))
    if chosen is None or not variants.every_rank_can(call, strategy, *chosen):
        return None
    return _plan_for(info, call, structure, strategy, *chosen)


def _build_out(info: OpInfo, call: OpCall) -> Plan | None:
    """The plan of `op(..., out=x)` where the op's rule can leave its result just where `x` lies."""
    functional, name = writes.functional_of(info.op), info.returned
    out = call.kwargs.get(name)
    find = rules.find(functional) if functional is not None else None
    if functional is None or find is None or not isinstance(out, DTensorSpec) or len(call.kwargs) > 1:
        return None
    plain = OpCall(functional, call.args, {}, call.inputs[:-1])  # keyword arguments come last
    try:
        plain.outputs, structure = results_of(
            functional, plain.args, {}, rules.pointwise.is_pointwise(functional)
        )
    except NotImplementedError:
        return None
    strategy, made = find(plain), plain.outputs[0]
    fits = structure == "tensor" and made is not None and (made.shape, made.dtype) == (out.shape, out.dtype)
    if not fits or strategy.localize or strategy.local_op or strategy.exact or strategy.local_shape_args:
        return None
    rows = rules.choose(plain, strategy, (), result=out.placements)
    if rows is None:
        return None
    inputs = tuple(tuple(row.inputs[i] for row in rows) for i in range(len(plain.inputs)))
    if not variants.all_even(plain, inputs, (out.placements,)):
        return None
    member = out.info.coordinate is not None
    local_op = None if member else outside.kernel(info.op, out.info, (None,), "tensor")
    return Plan(info, local_op, _moves(plain, inputs), (), out)


def _by_rows(call: OpCall, strategy: Strategy, written: tuple[int, ...]) -> Chosen | None:
    """The placements of all inputs and outputs that the strategy's rows come to."""
    rows = rules.choose(call, strategy, written)
    if rows is None:
        return None
    inputs = tuple(tuple(row.inputs[i] for row in rows) for i in range(len(call.inputs)))
    outputs = tuple(tuple(row.outputs[i] for row in rows) for i in range(len(call.outputs)))
    return inputs, outputs


def _plan_for(
    info: OpInfo,
    call: OpCall,
    structure: str,
    strategy: Strategy,
    inputs: tuple[Placements, ...],
    outputs: tuple[Placements, ...],
) -> Plan:
    mesh = call.inputs[0].info
    specs = [
        None if meta is None else DTensorSpec.of(mesh, placed, *meta)
        for meta, placed in zip(call.outputs, outputs, strict=True)
    ]
    out: Any = None
    if structure == "tensor":
        out = specs[0]
    elif structure == "list":
        out = specs
    replaced = tuple(
        (position, list(specs[0].local_shape)) for position in strategy.local_shape_args if specs[0]
    )
    if info.random:
        random.keep_in_step(mesh)
    if mesh.coordinate is None and not (info.random and strategy.localize):
        return Plan(info, outside.kernel(info.op, mesh, specs, structure), _moves(call, inputs), (), out)
    local_op = strategy.local_op
    if strategy.localize is not None:
        moved = tuple(s.with_placements(p) for s, p in zip(call.inputs, inputs, strict=True))
        local_op = strategy.localize(Placed(moved, tuple(specs)))
    # A random op runs even so: its rank would fall out of step.
    empty = all(s is None or 0 in s.local_shape for s in specs) and not info.random
    if out is not None and info.functional and empty:
        local_op = _empty_results(
            local_op or info.op, specs, several=structure == "list", device=mesh.device_type
        )
    return Plan(info, local_op, _moves(call, inputs), replaced, out)


def _moves(call: OpCall, inputs: Sequence[Placements]) -> tuple[Move, ...]:
    """What brings the inputs to these placements."""
    return tuple(
        Move(index, redistribute.plan(spec, wanted), spec, wanted)
        for index, (spec, wanted) in enumerate(zip(call.inputs, inputs, strict=True))
        if wanted != spec.placements
    )


def _empty_results(
    op: Callable[..., Any], specs: Sequence[DTensorSpec | None], *, several: bool, device: str
) -> Callable[..., Any]:
    """Stands for the op on a rank whose results are empty: many kernels raise or warn there, and a rank
    that raises alone leaves the others waiting. Shards know what they can do, empty ones alike."""

    def make(*args: Any, **kwargs: Any) -> Any:
        if any(holds_shards(one) for one in tree_leaves(args)):
            return op(*args, **kwargs)
        made = [
            None if s is None else torch.empty(s.local_shape, dtype=s.dtype, device=device) for s in specs
        ]
        return tuple(made) if several else made[0]

    return make


def _describe(info: OpInfo, args: Sequence[Any], kwargs: dict[str, Any]) -> OpCall:
    """The call with specs in the place of tensors; plain tensors count as replicated."""
    leaves, rebuilt = flattened(args, _sorted(kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    mesh = next(t._spec.info for t in tensors if isinstance(t, Wrapper))
    specs = []
    for tensor in tensors:
        if isinstance(tensor, Wrapper):
            if tensor._spec.info is not mesh:
                raise MeshError(
                    f"{info.op} got DTensors on different meshes, {mesh} and {tensor._spec.info}; expected one mesh: "
                    "move one with to_local() or full_tensor() and distribute_tensor on the other's mesh"
                )
            specs.append(tensor._spec)
        else:
            replicated = (REPLICATE,) * mesh.ndim
            specs.append(DTensorSpec.of(mesh, replicated, tensor.shape, tensor.stride(), tensor.dtype))
    remaining = iter(specs)
    described = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    spec_args, spec_kwargs = rebuilt(described)
    return OpCall(info.op, tuple(spec_args), spec_kwargs, tuple(specs))


def _written_inputs(info: OpInfo, call: OpCall) -> tuple[int, ...]:
    """Indices among the tensor inputs of those that are written, which must stay where they are."""
    written: list[DTensorSpec] = []
    for position in info.mutated:
        name = info.op._schema.arguments[position].name
        value = call.args[position] if position < len(call.args) else call.kwargs.get(name)
        written += [s for s in tree_leaves(value, is_leaf=_is_spec) if _is_spec(s)]
    indices, used = [], 0
    for spec in written:  # in schema order, as call.inputs is
        index = next(i for i in range(used, len(call.inputs)) if call.inputs[i] is spec)
        indices.append(index)
        used = index + 1
    return tuple(indices)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, DTensorSpec)


def verify(plan: Plan, args: Sequence[Any], result: Any) -> None:
    """Checks a new plan's first result: a rule that misjudges a shape must not pass silently.

    Raises:
        CoreError: a local result that is not the shard its spec says.
    """
    made = [r for r in (result if isinstance(result, (list, tuple)) else (result,)) if isinstance(r, Wrapper)]
    for one in made:
        local, spec = held_by(one), one._spec
        if tuple(local.shape) != spec.local_shape or local.dtype != spec.dtype:
            raise CoreError(
                f"the rule of {plan.info.op} is wrong: the local result is {local.dtype} {list(local.shape)}, but "
                f"{spec} has {spec.dtype} {list(spec.local_shape)} on this rank; please report it"
            )
    base = args[0] if args else None
    if plan.aliases and not plan.moves and isinstance(base, Wrapper) and not base._detached_view:
        plan.copies = not all(_shares_memory(held_by(one), held_by(base)) for one in made)
        for one in made if plan.copies else ():
            detach_view(one, base)


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether a write to the one shows in the other; True where there is nothing to write, or no memory to ask."""
    if one.numel() == 0 or one.__class__ is not torch.Tensor or one.device.type == "meta":
        return True
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
