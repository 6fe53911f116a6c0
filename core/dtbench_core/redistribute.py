"""Moving a tensor from one placement to another: plan(src, dst) -> steps, and apply(steps).

A plan is the cheapest chain of single-mesh-dim transitions under the cost model in use. It depends
on specs alone, so that every rank computes the same one and it can be printed and cached.

Note [Nested shards]: where two mesh dims shard the same tensor dim, the inner one cuts what the
outer one left. So the outer one may be gathered, or made, only while no inner one shards that dim.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from dtbench_core import comm, cost
from dtbench_core.errors import PlacementError
from dtbench_core.mesh import MeshInfo
from dtbench_core.placement import (
    REPLICATE,
    Partial,
    Placement,
    Placements,
    Shard,
    chunk_extent,
    chunk_lengths,
    describe,
    local_extents,
)
from dtbench_core.spec import DTensorSpec, contiguous_stride, numel
from dtbench_core.wrapper import Wrapped, Wrapper, wrap


class Step(NamedTuple):
    """One transition on one mesh dim. `shape` is the tensor that the ranks of the mesh dim share."""

    mesh_dim: int
    src: Placement
    dst: Placement
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"mesh dim {self.mesh_dim}: {self.src} -> {self.dst} of {list(self.shape)}"


# ---- planning (pure) ----

# Cutting a replica sends nothing but copies, as the reshuffle of an all-to-all does: priced alike, so
# that gathering and cutting is never cheaper than exchanging.
LOCAL_COPY_US = cost.ALL_TO_ALL_PENALTY_US

_plans: dict[tuple[DTensorSpec, Placements], tuple[Step, ...]] = {}
# A plan holds a few hundred bytes; at the bound the oldest goes first.
MAX_PLANS = 4096


def plan(src: DTensorSpec, dst: Placements) -> tuple[Step, ...]:
    """The steps from `src` to the placements `dst`, cheapest first chain found; cached.

    Raises:
        PlacementError: there is no way (a Shard or another reduction to Partial).
    """
    key = (src, dst)
    steps = _plans.get(key)
    if steps is None:
        while len(_plans) >= MAX_PLANS:
            del _plans[next(iter(_plans))]
        steps = _plans[key] = _search(src, dst)
    return steps


def clear_plans() -> None:
    """Forgets every cached plan."""
    _plans.clear()


cost.on_topology_change(clear_plans)


def _search(src: DTensorSpec, dst: Placements) -> tuple[Step, ...]:
    """Uniform-cost search over placements; each mesh dim may pass through Replicate."""
    info = src.info
    coordinate = info.my_coordinate()
    topology = cost.topology_of(info.mesh)
    order = itertools.count(1)  # ties: the shorter path, then the earlier; the same on every rank
    queue: list[tuple[float, int, int, Placements, tuple[Step, ...]]] = [(0.0, 0, 0, src.placements, ())]
    settled: set[Placements] = set()
    while queue:
        spent, _, _, state, steps = heapq.heappop(queue)
        if state == dst:
            return steps
        if state in settled:
            continue
        settled.add(state)
        local_gib = cost.local_gib(src.shape, src.dtype, state, info.sizes)
        for mesh_dim, target in _moves(state, dst):
            price = cost.transition_cost(state[mesh_dim], target, local_gib, topology, mesh_dim)
            if price == math.inf:
                continue
            if state[mesh_dim].is_replicate():
                price = LOCAL_COPY_US
            shared = (*state[:mesh_dim], REPLICATE, *state[mesh_dim + 1 :])
            shape, _ = local_extents(src.shape, shared, info.sizes, coordinate)
            step = Step(mesh_dim, state[mesh_dim], target, shape)
            after = (*state[:mesh_dim], target, *state[mesh_dim + 1 :])
            heapq.heappush(queue, (spent + price, len(steps) + 1, next(order), after, (*steps, step)))
    raise PlacementError(
        f"cannot redistribute {src} to {describe(dst)}: a Partial can only come from Replicate or from the same "
        "Partial; redistribute to Replicate or Shard instead"
    )


def _moves(state: Placements, dst: Placements) -> Iterator[tuple[int, Placement]]:
    """(mesh dim, new placement) worth trying: straight to the target, or to Replicate on the way."""
    for mesh_dim, (current, target) in enumerate(zip(state, dst, strict=True)):
        if target.is_partial("product") and current != target:
            continue  # no rank could hold its term: the transport has no product-neutral split
        for new in (target, REPLICATE):
            if (
                new != current
                and _nesting_allows(state, mesh_dim, current)
                and _nesting_allows(state, mesh_dim, new)
            ):
                yield mesh_dim, new
            if target == REPLICATE:
                break


def _nesting_allows(state: Placements, mesh_dim: int, placement: Placement) -> bool:
    """See Note [Nested shards]."""
    return not isinstance(placement, Shard) or placement not in state[mesh_dim + 1 :]


# ---- applying ----


def apply(local: torch.Tensor, steps: tuple[Step, ...], info: MeshInfo) -> torch.Tensor:
    """Runs the steps on this rank's shard; every rank of the mesh must call it. Never aliases `local`
    when there is a step."""
    for step in steps:
        local = _apply_one(local, step, info)
    return local


def _apply_one(local: torch.Tensor, step: Step, info: MeshInfo) -> torch.Tensor:
    src, dst, shape = step.src, step.dst, step.shape
    group, index, parts = (
        info.groups[step.mesh_dim],
        info.my_coordinate()[step.mesh_dim],
        info.sizes[step.mesh_dim],
    )
    if isinstance(src, Shard):
        if isinstance(dst, Shard):
            return _exchange(local, src.dim, dst.dim, shape, group, index)
        return _gather(local, src.dim, shape, group)
    if isinstance(src, Partial):
        extremum = src.reduce_op in ("max", "min")
        if isinstance(dst, Shard) and not extremum:
            return _reduce_scatter(local, src.reduce_op, dst.dim, shape, group, index)
        local = (
            _extremum(local, src.reduce_op, group) if extremum else _all_reduce(local, src.reduce_op, group)
        )
        if dst.is_replicate():
            return local
    if isinstance(dst, Shard):
        length, offset = chunk_extent(shape[dst.dim], parts, index)
        return local.narrow(dst.dim, offset, length).clone(memory_format=torch.contiguous_format)
    return _replicate_to_partial(local, dst, index)


def _all_reduce(local: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    reduced = local.clone(memory_format=torch.contiguous_format)
    comm.all_reduce(reduced, group, op)
    return reduced


def _extremum(local: torch.Tensor, op: str, group: Any) -> torch.Tensor:
    """The max or min over the ranks, NaN where any rank has NaN, as in torch.

    Transports compare with < and so drop a NaN: floats travel with a flag each, in one collective.
    """
    if not local.is_floating_point():
        return _all_reduce(local, op, group)
    sign = 1 if op == "max" else -1
    nan = local.isnan()
    values = local.masked_fill(nan, -sign * math.inf)
    both = _all_reduce(torch.stack([values, nan.to(local.dtype) * sign]), op, group)
    return both[0].masked_fill(both[1] != 0, math.nan)


def _replicate_to_partial(local: torch.Tensor, dst: Placement, index: int) -> torch.Tensor:
    """Of a sum the first rank keeps the value; avg, max and min of equal terms are the value."""
    assert isinstance(dst, Partial)  # the planner yields no other step
    if dst.reduce_op == "sum" and index > 0:
        return torch.zeros_like(local)
    return local.clone()


def _padded(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """`tensor`, contiguous, lengthened to `length` on `dim` with values that nobody reads."""
    missing = length - tensor.size(dim)
    if missing == 0:
        return tensor.contiguous()
    filler = tensor.new_zeros((*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]))
    return torch.cat([tensor, filler], dim)


def _gather(local: torch.Tensor, dim: int, shape: tuple[int, ...], group: Any) -> torch.Tensor:
    lengths = chunk_lengths(shape[dim], group.size())
    if numel(shape) == 0:
        return local.new_empty(shape)
    padded = _padded(local, dim, lengths[0])
    gathered = padded.new_empty((len(lengths), *padded.shape))
    comm.all_gather(_wire(gathered), _wire(padded), group)
    if dim == 0 and shape[0] == lengths[0] * len(lengths):
        return gathered.view(shape)
    return torch.cat(
        [part.narrow(dim, 0, n) for part, n in zip(gathered.unbind(0), lengths, strict=True)], dim
    )


def _reduce_scatter(
    local: torch.Tensor, op: str, dim: int, shape: tuple[int, ...], group: Any, index: int
) -> torch.Tensor:
    lengths = chunk_lengths(shape[dim], group.size())
    mine = (*shape[:dim], lengths[index], *shape[dim + 1 :])
    if numel(shape) == 0:
        return local.new_empty(mine)
    if dim == 0 and shape[0] == lengths[0] * len(lengths):
        packed = local.contiguous()
    else:
        packed = torch.stack([_padded(part, dim, lengths[0]) for part in local.split(lengths, dim)])
    output = local.new_empty((*shape[:dim], lengths[0], *shape[dim + 1 :]))
    comm.reduce_scatter(output.view(-1), packed.view(-1), group, op)
    return output if lengths[index] == lengths[0] else output.narrow(dim, 0, lengths[index]).contiguous()


def _exchange(
    local: torch.Tensor, src_dim: int, dst_dim: int, shape: tuple[int, ...], group: Any, index: int
) -> torch.Tensor:
    """Shard(src_dim) -> Shard(dst_dim): rank r gets everybody's r-th piece along `dst_dim`."""
    parts = group.size()
    src_lengths, dst_lengths = chunk_lengths(shape[src_dim], parts), chunk_lengths(shape[dst_dim], parts)
    pieces = [piece.contiguous().view(-1) for piece in local.split(dst_lengths, dst_dim)]
    shapes = [list(shape) for _ in range(parts)]
    for rank, received in enumerate(shapes):
        received[src_dim], received[dst_dim] = src_lengths[rank], dst_lengths[index]
    sizes = [numel(s) for s in shapes]
    output = local.new_empty(sum(sizes))
    packed, scale = torch.cat(pieces), _wire_scale(local.dtype)
    comm.all_to_all(
        _wire(output), _wire(packed), group, [n * scale for n in sizes], [p.numel() * scale for p in pieces]
    )
    received_parts = [flat.view(s) for flat, s in zip(output.split(sizes), shapes, strict=True)]
    return torch.cat(received_parts, src_dim)


# gloo moves these only as bytes; nothing is computed on the way.
_AS_BYTES = (torch.bool, torch.complex64, torch.complex128, torch.int16)


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor, flat, in a dtype that every transport moves."""
    flat = tensor.view(-1)
    return flat.view(torch.uint8) if flat.dtype in _AS_BYTES else flat


def _wire_scale(dtype: torch.dtype) -> int:
    """Elements on the wire per element of `dtype`."""
    return dtype.itemsize if dtype in _AS_BYTES else 1


# ---- on DTensors ----


def redistribute_tensor(tensor: Wrapped, dst: Placements) -> Wrapped:
    """`tensor` placed as `dst`, outside autograd; itself under another name when nothing changes."""
    spec = tensor._spec
    if spec.placements == dst:
        return wrap(type(tensor), tensor._local_tensor, spec)
    local = apply(tensor._local_tensor, plan(spec, dst), spec.info)
    # The steps leave contiguous shards, whatever the strides were before.
    moved = DTensorSpec.of(spec.info, dst, spec.shape, contiguous_stride(spec.shape), spec.dtype)
    return wrap(type(tensor), local, moved)


def placements_of_gradient(placements: Placements) -> Placements:
    """Where the gradient of a tensor so placed belongs: each term of a Partial has the whole gradient."""
    return tuple(REPLICATE if p.is_partial() else p for p in placements)


class Redistribute(torch.autograd.Function):
    """Redistribution under autograd. It leaves the global tensor unchanged, so the gradient passes
    through, brought back to the input's own placements."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Wrapper,
        dst: Placements,
        forward_dtype: torch.dtype | None,
        backward_dtype: torch.dtype | None,
    ) -> Wrapper:
        ctx.placements = placements_of_gradient(tensor._spec.placements)
        ctx.dtype, ctx.backward_dtype = tensor._spec.dtype, backward_dtype
        if forward_dtype is not None and forward_dtype != tensor._spec.dtype:
            tensor = cast_dtype(tensor, forward_dtype)
        return redistribute_tensor(tensor, dst)

    @staticmethod
    def backward(ctx: Any, grad: Wrapper) -> tuple[Wrapper, None, None, None]:
        if ctx.backward_dtype is not None and grad._spec.dtype != ctx.backward_dtype:
            grad = cast_dtype(grad, ctx.backward_dtype)
        # apply again: a backward that is itself differentiated needs its own graph
        moved: Wrapper = Redistribute.apply(grad, ctx.placements, None, None)
        if moved._spec.dtype != ctx.dtype:
            moved = cast_dtype(moved, ctx.dtype)
        return moved, None, None, None


def cast_dtype(tensor: Wrapped, dtype: torch.dtype) -> Wrapped:
    """`tensor` in another dtype, shard by shard, outside autograd."""
    spec = tensor._spec
    cast = DTensorSpec.of(spec.info, spec.placements, spec.shape, spec.stride, dtype)
    return wrap(type(tensor), tensor._local_tensor.to(dtype), cast)
