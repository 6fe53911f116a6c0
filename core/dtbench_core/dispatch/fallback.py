"""Fallback for ops without a sharding rule for their placements: replicate the inputs and run.

Every rank gathers the inputs, runs the op on global tensors and keeps the global result. This is right for every op but
costs communication and memory, so each use is counted and the first use of each op warns. If the op
writes to a tensor, each rank then stores its own part of the new values.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from dtbench_core.dispatch import contexts
from dtbench_core.dispatch import outside_mesh as outside
from dtbench_core.dispatch.metadata import (
    describe,
    device_of_results,
    results_of,
    written_arguments,
    written_by,
)
from dtbench_core.dispatch.overlap import refuse_overlap
from dtbench_core.errors import NoRuleError
from dtbench_core.layout import random
from dtbench_core.layout.in_step import draw_in_step
from dtbench_core.layout.mesh import MeshInfo
from dtbench_core.layout.placement import REPLICATE
from dtbench_core.layout.shard_layout import empty_part
from dtbench_core.layout.spec import DTensorSpec, preserved_stride
from dtbench_core.layout.wrapper import Wrapper, count_write, wrap
from dtbench_core.op_types import Args, Kwargs, Value
from dtbench_core.redistribute.autograd import redistributed_local
from dtbench_core.redistribute.copied_view import (
    Gathered,
    copied_view,
    is_copied,
    refuse_writes,
    store_to_base,
)
from dtbench_core.redistribute.routes import cheapest_route, run_route
from dtbench_core.runtime import PerRank


class FallbackWarning(UserWarning):
    """An op ran on replicated inputs because no sharding rule covers it."""


@dataclass(slots=True, eq=False)
class FallbackLog:
    """Uses of the fallback.

    Attributes:
        counts: number of uses per op.
        warned: ops that have warned.
    """

    counts: Counter[OpOverload] = field(default_factory=Counter)
    warned: set[OpOverload] = field(default_factory=set)


logs: PerRank[FallbackLog] = PerRank("dispatch.fallbacks", FallbackLog)


def fallbacks() -> Counter[OpOverload]:
    """Returns how often each op ran on replicated inputs in this process."""
    return Counter(logs.get().counts)


def clear_fallbacks() -> None:
    """Clears the counts, so that each op warns again."""
    logs.get().counts.clear()
    logs.get().warned.clear()


def run(cls: type[Wrapper], op: OpOverload, args: Args, kwargs: Kwargs) -> Value:
    """Runs `op` on global tensors, the same on every rank. Tensor results are replicated.

    Raises:
        PlacementError: the op writes to a copied view, and the write cannot be stored in its base.
        NoRuleError: the op changes the shape of a tensor that it writes to.
    """
    written = list({id(t): t for t in written_by(written_arguments(op), args, kwargs)}.values())
    refuse_writes(written)
    if written:
        refuse_overlap(op, written, args, kwargs, {})
    _report(op)
    full_values: dict[int, torch.Tensor] = {}  # id(DTensor) -> its global values
    distributed: list[Wrapper] = []
    mesh: MeshInfo | None = None

    def unwrap(leaf: Value) -> Value:
        nonlocal mesh
        if not isinstance(leaf, Wrapper):
            return leaf
        mesh = leaf._spec.info
        if id(leaf) not in full_values:
            if (context := contexts.explicit_context()) is not None:
                context.observe(op, leaf._spec, (REPLICATE,) * mesh.ndim)
            full_values[id(leaf)] = gathered(leaf, copied=any(leaf is tensor for tensor in written))
            if _reads_gaps(op, leaf, full_values[id(leaf)]):
                raise NoRuleError(
                    f"{op} got {leaf._spec} of strides {list(leaf._spec.stride)}, whose memory has gaps with values "
                    "that no rank has; expected a dense tensor: call contiguous() on it first"
                )
            distributed.append(leaf)
        return full_values[id(leaf)]

    full_args, full_kwargs = tree_map(unwrap, (list(args), kwargs))
    assert mesh is not None  # dispatch calls this for DTensors only
    if mesh.coordinate is None:
        return _outside(cls, op, args, kwargs, mesh, written)
    draws = torch.Tag.nondeterministic_seeded in op.tags
    if draws:
        random.keep_in_step(mesh)
    if draws and kwargs.get("generator") is None:
        result = draw_in_step(mesh, None, lambda: op(*full_args, **full_kwargs))
    else:
        result = op(*full_args, **full_kwargs)
    for tensor in written:
        _write_back(op, tensor, full_values[id(tensor)])
        count_write(tensor)
        store_to_base(tensor)
    for_written = {id(full_values[id(tensor)]): tensor for tensor in written}
    views = any(r.alias_info is not None for r in op._schema.returns)
    moved = [t for t in distributed if full_values[id(t)] is not t._local_tensor or is_copied(t)]
    if not views or not moved:
        return _wrapped(cls, result, mesh, for_written)
    full = (
        None
        if moved[0]._spec.has_partial()
        else Gathered(full_values[id(moved[0])], (REPLICATE,) * mesh.ndim)
    )
    return _wrapped(cls, result, mesh, for_written, moved[0], full)


def _outside(
    cls: type[Wrapper], op: OpOverload, args: Args, kwargs: Kwargs, mesh: MeshInfo, written: list[Wrapper]
) -> Value:
    """Returns the results of `run` on a rank outside the mesh (see outside_mesh.py): empty parts with the metadata."""
    if torch.Tag.nondeterministic_seeded in op.tags:
        outside.keep_in_step(op, args, kwargs)
    call = describe(op, args, kwargs)
    try:
        metas, structure = results_of(op, call.args, call.kwargs, False)
    except NotImplementedError as error:
        raise outside.unknown_value(op, mesh) from error
    if structure == "value":
        return outside.kernel(op, mesh, (), structure)()
    if written:
        return written[0] if structure == "tensor" else tuple(written)
    specs = [
        None if meta is None else DTensorSpec.of(mesh, (REPLICATE,) * mesh.ndim, *meta) for meta in metas
    ]
    device = device_of_results(args, kwargs, mesh.device_type)
    results = [None if s is None else wrap(cls, empty_part(s, device), s) for s in specs]
    return tuple(results) if structure == "list" else results[0]


def _reads_gaps(op: OpOverload, tensor: Wrapper, full: torch.Tensor) -> bool:
    """Whether the op reads memory between the elements of `tensor`. Gathering does not keep that memory."""
    spec = tensor._spec
    dense = preserved_stride(tuple(spec.shape), spec.stride) == spec.stride
    return op._schema.name.startswith("aten::as_strided") and not dense and full is not tensor._local_tensor


def gathered(tensor: Wrapper, copied: bool = True) -> torch.Tensor:
    """Returns the global values of `tensor`, outside autograd.

    Args:
        copied: whether the caller may write to the result. Then a cached reduction of a Partial
            (`redistributed_local`) is not used. If `tensor` is replicated, the result may still be its local tensor.
    """
    spec = tensor._spec
    replicated = (REPLICATE,) * spec.info.ndim
    route = cheapest_route(spec, replicated)
    if copied:
        return run_route(tensor._local_tensor, route)
    return redistributed_local(tensor, replicated, route)


def _report(op: OpOverload) -> None:
    log = logs.get()
    log.counts[op] += 1
    if op not in log.warned:
        log.warned.add(op)
        warnings.warn(
            f"no sharding rule covers {op} with these placements: it runs on replicated inputs on every rank, which is "
            "right but costs communication and memory; register_sharding can give it a rule",
            FallbackWarning,
            stacklevel=2,
        )


def _write_back(op: OpOverload, tensor: Wrapper, full: torch.Tensor) -> None:
    """Stores this rank's part of `full` in `tensor`'s shard."""
    spec = tensor._spec
    if tuple(full.shape) != tuple(spec.shape):
        raise NoRuleError(
            f"{op} changes the shape of the tensor it writes to from {list(spec.shape)} to {list(full.shape)}: "
            "use the functional form and assign its result"
        )
    if full is not tensor._local_tensor:
        store(tensor, full)


def store(tensor: Wrapper, full: torch.Tensor) -> None:
    """Overwrites `tensor`'s shard with its part of the replicated values `full`."""
    spec = tensor._spec
    source = DTensorSpec.of(spec.info, (REPLICATE,) * spec.info.ndim, full.shape, full.stride(), full.dtype)
    local, part = tensor._local_tensor, run_route(full, cheapest_route(source, spec.placements))
    for dim, step in enumerate(local.stride()):
        if step == 0 and local.size(dim):  # all elements of an expanded dim are one in memory
            local, part = local.narrow(dim, 0, 1), part.narrow(dim, 0, 1)
    local.copy_(part)


def _wrapped(
    cls: type[Wrapper],
    result: Value,
    mesh: MeshInfo,
    written: dict[int, Wrapper],
    base: Wrapper | None = None,
    full: Gathered | None = None,
) -> Value:
    """Returns `result` with replicated DTensors in place of its tensors.

    Args:
        written: id of the global values -> the DTensor that the op wrote to, which is returned itself.
        base: tensor that had to be gathered, if the results are views of it.
        full: its gathered values.
    """
    replicated = (REPLICATE,) * mesh.ndim

    def rewrap(leaf: object) -> Value:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in written:
            return written[id(leaf)]
        spec = DTensorSpec.of(mesh, replicated, leaf.shape, leaf.stride(), leaf.dtype)
        return wrap(cls, leaf, spec) if base is None else copied_view(cls, leaf, spec, base, full)

    return tree_map(rewrap, result)
