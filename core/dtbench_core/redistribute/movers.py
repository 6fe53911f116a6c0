"""Execution of one redistribution step: packing shards, communicating, and unpacking.

`make_mover` computes everything that depends on specs alone (lengths, shapes, the group), and returns the function to
run on this rank's shard. If all ranks hold equally much, a step is one collective with at most one copy before and one
after it. Otherwise shards are padded, or sent in pieces of different lengths.

A mover never returns its input or a view of it. Its result is contiguous.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dtbench_core import comm
from dtbench_core.layout.placement import (
    BITWISE,
    NEUTRAL,
    Partial,
    Placement,
    Placements,
    Shard,
    StridedShard,
    local_extents,
)
from dtbench_core.torch_compat import is_capturing, is_traced

Mover = Callable[[torch.Tensor], torch.Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Exchange:
    """One redistribution step among the ranks of a group.

    Attributes:
        src, dst: placements before and after, for each mesh dim that changes, outermost first.
        sizes: ranks of each of these mesh dims.
        shape: shape of the tensor that these ranks hold together.
        dtype: dtype of the tensor.
        group: ranks of these mesh dims in row-major order.
        coordinate: this rank's coordinate on each of these mesh dims.
    """

    src: Placements
    dst: Placements
    sizes: tuple[int, ...]
    shape: Shape
    dtype: torch.dtype
    group: comm.Group
    coordinate: tuple[int, ...]

    @property
    def parts(self) -> int:
        return math.prod(self.sizes)

    @property
    def index(self) -> int:
        """This rank's index in the group."""
        index = 0
        for size, position in zip(self.sizes, self.coordinate, strict=True):
            index = index * size + position
        return index


def make_mover(step: Exchange) -> Mover:
    """Returns the function that executes the step on this rank's shard. Every rank of `group` must call it."""
    src, dst = step.src[0], step.dst[0]
    if src.is_replicate():
        return _make_slicer(step, dst) if isinstance(dst, Shard) else _make_term(dst, step.index)
    if step.parts == 1:
        return _copy  # the only rank holds the whole tensor, or the only term of the sum
    if 0 not in step.shape:
        return _make_sender(step)
    # There is nothing to send. In a graph it is sent anyway, so that all ranks have the same graph.
    send, shape = _make_sender(step), local_extents(step.shape, step.dst, step.sizes, step.coordinate)[0]
    return lambda local: send(local) if is_traced() else local.new_empty(shape)


def _make_sender(step: Exchange) -> Mover:
    src, dst = step.src[0], step.dst[0]
    if isinstance(src, Partial):
        return (_make_reduce_scatter if isinstance(dst, Shard) else _make_all_reduce)(step, src.reduce_op)
    if dst.is_replicate():
        return _make_even_gather(step) if _is_even(step, step.src) else _make_padded_gather(step)
    return (
        _make_even_all_to_all(step)
        if _is_even(step, step.src) and _is_even(step, step.dst)
        else _make_uneven_all_to_all(step)
    )


def _is_even(step: Exchange, placements: Placements) -> bool:
    """Whether torch.chunk cuts parts of equal length, which can be viewed as an additional axis."""
    lengths = list(step.shape)
    for placement, parts in zip(placements, step.sizes, strict=True):
        if type(placement) is not Shard or lengths[placement.dim] % parts:
            return False
        lengths[placement.dim] //= parts
    return True


# ---- without communication ----


def _copy(local: torch.Tensor) -> torch.Tensor:
    return local.clone(memory_format=torch.contiguous_format)


def _make_slicer(step: Exchange, dst: Shard) -> Mover:
    """Returns a mover that keeps this rank's part of a replica."""
    if type(dst) is not Shard:
        return lambda local: _copy(dst.part(local, step.parts, step.index))
    dim = dst.dim
    length, offset = dst.extent(step.shape[dim], step.parts, step.index)
    # narrow_copy is four times as fast as narrow and clone, and its result is always contiguous.
    return lambda local: torch.narrow_copy(local, dim, offset, length)


def _make_term(dst: Placement, index: int) -> Mover:
    """Returns a mover that turns a replica into terms of a Partial.

    For sums, products and xor, all ranks but the first have the neutral element. For other reductions, all ranks have
    the value.
    """
    neutral = NEUTRAL.get(dst.reduce_op) if isinstance(dst, Partial) and index > 0 else None
    return (
        _copy
        if neutral is None
        else lambda local: comm.full_ordered_after([local], local.shape, neutral, local.dtype)
    )


# ---- dtypes of backends (NCCL, gloo) ----

# All backends send and reduce these dtypes. Other dtypes are sent as bytes, and reduced in one of these.
_BACKEND_DTYPES = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}


def _to_backend(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a contiguous tensor as a flat one, in a dtype that all backends send."""
    flat = tensor.view(-1)
    # All backends send bool, but not all reduce it.
    if flat.dtype in _BACKEND_DTYPES or flat.dtype is torch.bool:
        return flat.resolve_neg() if flat.is_neg() else flat
    flat = flat.resolve_conj().resolve_neg()
    # A tensor of one element is contiguous with any stride, but can be viewed as bytes only with a stride of 1.
    return (flat if flat.numel() != 1 else flat.as_strided((1,), (1,))).view(torch.uint8)


def _from_backend(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undoes `_to_backend` for a received tensor."""
    return flat if flat.dtype is dtype else flat.view(dtype)


def _gather_any_dtype(local: torch.Tensor, shape: Shape, group: comm.Group) -> torch.Tensor:
    """Returns the ranks' contiguous tensors of any dtype, concatenated."""
    sent = _to_backend(local)
    flat = comm.gathered(sent, (sent.numel() * group.size(),), group)
    return _from_backend(flat, local.dtype).view(shape)


def _reduction_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns a dtype to reduce in, which represents the values of `dtype` and their sums at least as well."""
    if dtype in _BACKEND_DTYPES:
        return dtype
    if dtype.is_floating_point:
        return torch.float32
    return torch.int64 if dtype.itemsize >= 4 else torch.int32


# ---- views of even shards ----


class _EvenLayout:
    """Layout of evenly sharded tensors in which each mesh dim has an axis of its own.

    It converts between (n_1, ..., n_k, *local shape) and the global shape.

    Attributes:
        shape: the global shape.
        local: the shape of a shard.
        split: `shape` with an axis for each mesh dim in front of the dim that it shards, outermost first.
        to_front: permutation of `split` that puts the axes of the mesh dims first.
        back: the inverse permutation.
        stacked: shape of `split` after `to_front`.
        in_place: whether `to_front` leaves the order of elements in memory unchanged, so that no copy is needed.
        rows: whether all mesh dims shard dim 0. Then concatenated shards already have the global shape.
    """

    def __init__(self, shape: Shape, placements: Placements, sizes: Shape) -> None:
        axes_by_dim: dict[int, list[int]] = {}
        for axis, placement in enumerate(placements):
            assert isinstance(placement, Shard)
            axes_by_dim.setdefault(placement.dim, []).append(axis)
        split: list[int] = []
        mesh_axes, kept_axes = [0] * len(sizes), []
        local = []
        for dim, size in enumerate(shape):
            for axis in axes_by_dim.get(dim, ()):
                mesh_axes[axis] = len(split)
                split.append(sizes[axis])
                size //= sizes[axis]
            kept_axes.append(len(split))
            split.append(size)
            local.append(size)
        self.shape, self.local, self.split = shape, tuple(local), tuple(split)
        self.to_front = (*mesh_axes, *kept_axes)
        self.back = tuple(self.to_front.index(i) for i in range(len(split)))
        self.stacked = (*sizes, *self.local)
        moving = [i for i in self.to_front if split[i] != 1]
        self.in_place = moving == sorted(moving)
        self.rows = all(p.is_shard(0) for p in placements)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Converts a tensor of the global shape to a contiguous one with the elements of (n, *local)."""
        if self.in_place:
            return tensor.contiguous()
        return tensor.reshape(self.split).permute(self.to_front).contiguous()

    def unpack(self, stacked: torch.Tensor) -> torch.Tensor:
        """Converts a contiguous tensor with the elements of (n, *local) to the global shape."""
        if self.in_place:
            return stacked.view(self.shape)
        return stacked.view(self.stacked).permute(self.back).contiguous().view(self.shape)


# ---- gather ----


def _make_even_gather(step: Exchange) -> Mover:
    axes, group = _EvenLayout(step.shape, step.src, step.sizes), step.group
    rows, carried = axes.rows, step.dtype in _BACKEND_DTYPES
    stacked = (step.parts * axes.local[0], *axes.local[1:])  # gloo accepts no additional axis of ranks

    def gather(local: torch.Tensor) -> torch.Tensor:
        sent = local.contiguous()
        if sent.is_neg():  # a lazy negation does not travel with the memory
            sent = sent.resolve_neg()
        gathered = (comm.gathered if carried else _gather_any_dtype)(sent, stacked, group)
        return gathered if rows else axes.unpack(gathered)

    return gather


def _make_padded_gather(step: Exchange) -> Mover:
    """Gathers shards of different lengths, padded to the longest."""
    src, parts, group, shape = _single_shard(step.src), step.parts, step.group, step.shape
    dim, lengths = src.dim, src.lengths(shape[src.dim], parts)
    longest = max(lengths)
    reorder = None if type(src) is Shard else _Reordering(src, shape[dim], parts)
    rows_first = math.prod(shape[:dim]) == 1
    joined = (*shape[:dim], parts * longest, *shape[dim + 1 :])
    stacked = (parts, *shape[:dim], longest, *shape[dim + 1 :])

    def gather(local: torch.Tensor) -> torch.Tensor:
        gathered = _gather_any_dtype(padded(local, dim, longest), stacked, group)
        if reorder is None and rows_first:  # all padding follows the last element
            return gathered.view(joined).narrow(dim, 0, shape[dim])
        joined_parts = torch.cat(
            [gathered[rank].narrow(dim, 0, n) for rank, n in enumerate(lengths) if n] or [gathered[0]], dim
        )
        return joined_parts if reorder is None else reorder(joined_parts)

    return gather


class _Reordering:
    """Reorders concatenated parts of the ranks for a placement other than Shard, where parts are not consecutive.

    It caches one index tensor per device. The index is built on the CPU and copied synchronously, so that every stream
    can read it.
    """

    def __init__(self, src: Shard, length: int, parts: int) -> None:
        self.src, self.length, self.parts = src, length, parts
        self._indices: dict[torch.device, torch.Tensor] = {}

    def __call__(self, joined: torch.Tensor) -> torch.Tensor:
        index = self._indices.get(joined.device)
        if index is None:
            if is_traced() or type(joined) is not torch.Tensor or is_capturing(joined.device):
                index = self._index(joined.ndim, joined.device)  # belongs to a graph, or is used once
            else:
                with torch.inference_mode(False):
                    index = self._index(joined.ndim, torch.device("cpu")).to(joined.device)
                self._indices[joined.device] = index
        return torch.empty_like(joined).index_copy_(self.src.dim, index, joined)

    def _index(self, ndim: int, device: torch.device) -> torch.Tensor:
        """Returns the global index of each element of the joined parts, (length,)."""
        shape = [1] * ndim
        shape[self.src.dim] = -1
        places = torch.arange(self.length, device=device).view(shape)
        return torch.cat([self.src.part(places, self.parts, rank).flatten() for rank in range(self.parts)])


def _single_shard(placements: Placements) -> Shard:
    """Returns the Shard of a step on one mesh dim. The search combines several mesh dims only if they are even."""
    (shard,) = placements
    assert isinstance(shard, Shard)
    return shard


def padded(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Returns `tensor`, contiguous, padded with zeros to `length` on `dim`."""
    missing = length - tensor.size(dim)
    if missing == 0:
        return tensor.contiguous()
    shape = (*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
    if missing == length:
        return comm.full_ordered_after([tensor], shape, 0, tensor.dtype)
    return torch.cat([tensor, tensor.new_zeros(shape)], dim).contiguous()


# ---- reduce ----


def _make_all_reduce(step: Exchange, op: str) -> Mover:
    group, carrier = step.group, _reduction_dtype(step.dtype)
    if step.dtype.is_complex and op == "product":
        return lambda local: _gathered_terms(local, step.parts, group).prod(0)
    if op in BITWISE and not comm.reduces_bits(group):
        combine = getattr(torch, _BITWISE[op])
        return lambda local: functools.reduce(combine, _gathered_terms(local, step.parts, group).unbind())
    if op in ("max", "min") and step.dtype.is_floating_point:
        return lambda local: _reduce_extremum(local, op, group)
    if step.dtype in _BACKEND_DTYPES or step.dtype.is_complex:
        return lambda local: comm.reduced(local, group, op)
    return lambda local: comm.reduced(local.to(carrier), group, op).to(local.dtype)


_BITWISE = dict(zip(BITWISE, ("bitwise_and", "bitwise_or", "bitwise_xor"), strict=True))


def _gathered_terms(local: torch.Tensor, parts: int, group: comm.Group) -> torch.Tensor:
    """Returns the terms of all ranks, (n, *local shape), for reductions that backends lack."""
    return _gather_any_dtype(local.contiguous(), (parts, *local.shape), group)


def _reduce_extremum(local: torch.Tensor, op: str, group: comm.Group) -> torch.Tensor:
    """Returns the max or min over the ranks, with NaN where any rank has NaN, as torch does.

    Backends drop NaN because they compare with <. So each value is reduced together with a NaN flag, in one
    collective.
    """
    sign = 1 if op == "max" else -1
    terms = local.to(_reduction_dtype(local.dtype))
    nan = terms.isnan()
    reduced = comm.reduced(
        torch.stack([terms.masked_fill(nan, -sign * math.inf), nan.to(terms.dtype) * sign]), group, op
    )
    return reduced[0].masked_fill(reduced[1] != 0, math.nan).to(local.dtype)


def _make_reduce_scatter(step: Exchange, op: str) -> Mover:
    group = step.group
    gathers = op == "product" if step.dtype.is_complex else op in BITWISE and not comm.reduces_bits(group)
    if gathers or not (step.dtype in _BACKEND_DTYPES or step.dtype.is_complex):
        reduce = _make_all_reduce(step, op)
        return lambda local: _own_part(reduce(local), step)
    if not _is_even(step, step.dst):
        return _make_uneven_reduce_scatter(step, op)
    axes = _EvenLayout(step.shape, step.dst, step.sizes)
    local_shape, rows = axes.local, axes.rows

    def scatter(local: torch.Tensor) -> torch.Tensor:
        packed = axes.pack(local)
        if packed.is_neg():
            packed = packed.resolve_neg()
        if rows:
            return comm.reduce_scattered(packed, local_shape, group, op)
        return comm.reduce_scattered(packed.view(-1), (math.prod(local_shape),), group, op).view(local_shape)

    return scatter


def _own_part(tensor: torch.Tensor, step: Exchange) -> torch.Tensor:
    """Returns this rank's part of a tensor that the ranks share, according to `step.dst`."""
    for placement, parts, index in zip(step.dst, step.sizes, step.coordinate, strict=True):
        assert isinstance(placement, Shard)
        tensor = placement.part(tensor, parts, index)
    return _copy(tensor)


def _make_uneven_reduce_scatter(step: Exchange, op: str) -> Mover:
    dst, group, index, parts = _single_shard(step.dst), step.group, step.index, step.parts
    dim = dst.dim
    lengths = dst.lengths(step.shape[dim], parts)
    longest = max(lengths)
    shape = (*step.shape[:dim], longest, *step.shape[dim + 1 :])

    def scatter(local: torch.Tensor) -> torch.Tensor:
        packed = torch.stack([padded(dst.part(local, parts, rank), dim, longest) for rank in range(parts)])
        output = comm.reduce_scattered(packed.view(-1), (math.prod(shape),), group, op).view(shape)
        return output if lengths[index] == longest else output.narrow(dim, 0, lengths[index]).contiguous()

    return scatter


# ---- all to all ----


def _make_even_all_to_all(step: Exchange) -> Mover:
    """Exchanges pieces of equal shape, which can be viewed as axes.

    A shard is not cut along the dims that `dst` shards; the result is not cut along those that `src` sharded.
    """
    sizes, group = step.sizes, step.group
    src_shape, dst_shape = (
        local_extents(step.shape, p, sizes, step.coordinate)[0] for p in (step.src, step.dst)
    )
    sent_layout, received_layout = (
        _EvenLayout(src_shape, step.dst, sizes),
        _EvenLayout(dst_shape, step.src, sizes),
    )

    def exchange(local: torch.Tensor) -> torch.Tensor:
        sent = _to_backend(sent_layout.pack(local))
        return received_layout.unpack(
            _from_backend(comm.exchanged(sent, (sent.numel(),), group), local.dtype)
        )

    return exchange


def _make_uneven_all_to_all(step: Exchange) -> Mover:
    """Exchanges pieces of different lengths: rank r receives the r-th piece of each rank along the dim of `dst`."""
    src, dst, group, parts = _single_shard(step.src), _single_shard(step.dst), step.group, step.parts
    src_lengths = src.lengths(step.shape[src.dim], parts)
    dst_lengths = dst.lengths(step.shape[dst.dim], parts)
    # The dim of `dst` is moved to the front, so that each rank's piece is contiguous. The dim of `src` is second.
    batch_dims = [d for d in range(len(step.shape)) if d not in (src.dim, dst.dim)]
    order = (dst.dim, src.dim, *batch_dims)
    inverse_order = [order.index(d) for d in range(len(order))]
    batch_shape = tuple(step.shape[d] for d in batch_dims)
    scale = 1 if step.dtype in _BACKEND_DTYPES else step.dtype.itemsize
    batch_count, own_length = math.prod(batch_shape), dst_lengths[step.index]
    out_sizes = [n * batch_count * src_lengths[step.index] * scale for n in dst_lengths]
    sizes = [own_length * n * batch_count for n in src_lengths]
    in_sizes = [n * scale for n in sizes]
    even = len(set(src_lengths)) == 1
    received_shape = (own_length, step.shape[src.dim], *batch_shape)
    stacked = (parts, own_length, src_lengths[0], *batch_shape)
    reorder = None if type(src) is Shard else _Reordering(src, step.shape[src.dim], parts)
    in_order = not isinstance(dst, StridedShard)

    def exchange(local: torch.Tensor) -> torch.Tensor:
        if in_order:
            packed = local.permute(order).contiguous()
        else:
            packed = torch.cat([dst.part(local, parts, r).permute(order).reshape(-1) for r in range(parts)])
        flat = comm.exchanged(_to_backend(packed), (sum(in_sizes),), group, in_sizes, out_sizes)
        received = _from_backend(flat, local.dtype)
        if even:
            joined = received.view(stacked).transpose(0, 1).reshape(received_shape)
        else:
            joined = torch.cat(
                [
                    flat.view(own_length, n, *batch_shape)
                    for flat, n in zip(received.split(sizes), src_lengths, strict=True)
                ],
                1,
            )
        joined = joined.permute(inverse_order).contiguous()
        return joined if reorder is None else reorder(joined)

    return exchange
