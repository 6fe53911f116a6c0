"""Doing one step of a redistribution: what is sent, and how shards are packed for it and unpacked.

`mover` works out all that depends on specs alone (lengths, shapes, the group) and returns what runs on
this rank's shard. Where all ranks hold equally much, a step is one collective between at most two
copies; otherwise shards travel padded, or piece by piece.

A mover never returns its input, nor a view of it. Its result is contiguous.
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
    """Who takes part in a step, and of what.

    src, dst, sizes, coordinate: per mesh dim that moves, outermost first; the last is this rank's. shape: of the
    tensor that these ranks share. group: of the mesh dims' ranks in row-major order.
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
        """This rank's place in the group."""
        index = 0
        for size, at in zip(self.sizes, self.coordinate, strict=True):
            index = index * size + at
        return index


def make_mover(step: Exchange) -> Mover:
    """What runs the step on this rank's shard. Every rank of `group` must call it."""
    src, dst = step.src[0], step.dst[0]
    if src.is_replicate():
        return _cutter(step, dst) if isinstance(dst, Shard) else _replicate_to_partial(dst, step.index)
    if step.parts == 1:
        return _copy  # of one rank, the shard is all there is, and the term is the sum
    if 0 not in step.shape:
        return _sender(step)
    # These ranks have nothing to send. In a graph they send it: the graphs of ranks that have something are the same.
    send, shape = _sender(step), local_extents(step.shape, step.dst, step.sizes, step.coordinate)[0]
    return lambda local: send(local) if is_traced() else local.new_empty(shape)


def _sender(step: Exchange) -> Mover:
    src, dst = step.src[0], step.dst[0]
    if isinstance(src, Partial):
        reduction = _reducing_scatter if isinstance(dst, Shard) else _reducer
        return reduction(step, src.reduce_op)
    if dst.is_replicate():
        return _even_gather(step) if _even(step, step.src) else _gather(step)
    return _even_exchange(step) if _even(step, step.src) and _even(step, step.dst) else _exchange(step)


def _even(step: Exchange, placements: Placements) -> bool:
    """Whether torch.chunk's parts are equally long: they are then an axis of their own in a view."""
    lengths = list(step.shape)
    for placement, parts in zip(placements, step.sizes, strict=True):
        if type(placement) is not Shard or lengths[placement.dim] % parts:
            return False
        lengths[placement.dim] //= parts
    return True


# ---- without communication ----


def _copy(local: torch.Tensor) -> torch.Tensor:
    return local.clone(memory_format=torch.contiguous_format)


def _cutter(step: Exchange, dst: Shard) -> Mover:
    """Keeps this rank's part of a replica."""
    if type(dst) is not Shard:
        return lambda local: _copy(dst.part(local, step.parts, step.index))
    dim = dst.dim
    length, offset = dst.extent(step.shape[dim], step.parts, step.index)
    # Four times as fast as narrow and clone, and always contiguous.
    return lambda local: torch.narrow_copy(local, dim, offset, length)


def _replicate_to_partial(dst: Placement, index: int) -> Mover:
    """The term of a value that is this rank's."""
    neutral = NEUTRAL.get(dst.reduce_op) if isinstance(dst, Partial) and index > 0 else None
    if neutral is None:
        return _copy
    return lambda local: comm.full_ordered_after([local], local.shape, neutral, local.dtype)


# ---- what transports can carry ----

# Every transport moves and reduces these. Anything else is moved as bytes and reduced as another.
_CARRIED = {
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.int8, torch.uint8, torch.int32, torch.int64),
}


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    """The contiguous tensor, flat, in a dtype that every transport moves."""
    flat = tensor.view(-1)
    if flat.dtype in _CARRIED or flat.dtype is torch.bool:  # which every transport moves, though not reduces
        return flat.resolve_neg() if flat.is_neg() else flat
    flat = flat.resolve_conj().resolve_neg()
    # One element is contiguous whatever its stride, and can be seen as bytes with a stride of 1 alone.
    return (flat if flat.numel() != 1 else flat.as_strided((1,), (1,))).view(torch.uint8)


def _received(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What was sent as `_sent` made it."""
    return flat if flat.dtype is dtype else flat.view(dtype)


def _gathered(local: torch.Tensor, shape: Shape, group: comm.Group) -> torch.Tensor:
    """The ranks' contiguous tensors, one after the other, of any dtype."""
    sent = _sent(local)
    flat = comm.gathered(sent, (sent.numel() * group.size(),), group)
    return _received(flat, local.dtype).view(shape)


def _transport_dtype(dtype: torch.dtype) -> torch.dtype:
    """A dtype that holds every value of `dtype` and its sums, as far as `dtype` itself does."""
    if dtype in _CARRIED:
        return dtype
    if dtype.is_floating_point:
        return torch.float32
    return torch.int64 if dtype.itemsize >= 4 else torch.int32


# ---- views of even shards ----


class _Axes:
    """Even shards as axes of their own: (n_1, ..., n_k, *local shape) <-> the shape of the whole.

    whole: the shape shared. split: that shape with the axis of each mesh dim before what it cuts, the
    outermost first. to_front: the permutation of `split` that puts these axes first. in_place: they
    are there already, so that no copy is needed. rows: so they are in `whole` itself, being rows.
    """

    def __init__(self, whole: Shape, placements: Placements, sizes: Shape) -> None:
        cut: dict[int, list[int]] = {}
        for axis, placement in enumerate(placements):
            assert isinstance(placement, Shard)
            cut.setdefault(placement.dim, []).append(axis)
        split: list[int] = []
        fronts, rest = [0] * len(sizes), []
        local = []
        for dim, size in enumerate(whole):
            for axis in cut.get(dim, ()):
                fronts[axis] = len(split)
                split.append(sizes[axis])
                size //= sizes[axis]
            rest.append(len(split))
            split.append(size)
            local.append(size)
        self.whole, self.local, self.split = whole, tuple(local), tuple(split)
        self.to_front = (*fronts, *rest)
        self.back = tuple(self.to_front.index(i) for i in range(len(split)))
        self.stacked = (*sizes, *self.local)
        moving = [i for i in self.to_front if split[i] != 1]
        self.in_place = moving == sorted(moving)
        self.rows = all(p.is_shard(0) for p in placements)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """`whole` -> contiguous (n, *local), in whatever shape."""
        if self.in_place:
            return tensor.contiguous()
        return tensor.reshape(self.split).permute(self.to_front).contiguous()

    def unpack(self, stacked: torch.Tensor) -> torch.Tensor:
        """Contiguous (n, *local), in whatever shape -> `whole`."""
        if self.in_place:
            return stacked.view(self.whole)
        return stacked.view(self.stacked).permute(self.back).contiguous().view(self.whole)


# ---- gather ----


def _even_gather(step: Exchange) -> Mover:
    axes, group = _Axes(step.shape, step.src, step.sizes), step.group
    rows, carried = axes.rows, step.dtype in _CARRIED
    stacked = (math.prod(step.sizes) * axes.local[0], *axes.local[1:])  # gloo takes no axis of ranks

    def gather(local: torch.Tensor) -> torch.Tensor:
        sent = local.contiguous()
        if sent.is_neg():  # lazily negated memory would arrive as it lies
            sent = sent.resolve_neg()
        gathered = (comm.gathered if carried else _gathered)(sent, stacked, group)
        return gathered if rows else axes.unpack(gathered)

    return gather


def _gather(step: Exchange) -> Mover:
    """Shards of different lengths, padded to the longest."""
    src, dim, parts, group, whole = _one(step.src), _one(step.src).dim, step.parts, step.group, step.shape
    lengths = src.lengths(whole[dim], parts)
    longest = max(lengths)
    reorder = None if type(src) is Shard else _Reordering(src, whole[dim], parts)
    rows_first = math.prod(whole[:dim]) == 1
    joined = (*whole[:dim], parts * longest, *whole[dim + 1 :])
    stacked = (parts, *whole[:dim], longest, *whole[dim + 1 :])

    def gather(local: torch.Tensor) -> torch.Tensor:
        gathered = _gathered(padded(local, dim, longest), stacked, group)
        if reorder is None and rows_first:  # only what follows the last element is padding
            return gathered.view(joined).narrow(dim, 0, whole[dim])
        held = [gathered[rank].narrow(dim, 0, n) for rank, n in enumerate(lengths) if n] or [gathered[0]]
        joined_parts = torch.cat(held, dim)
        return joined_parts if reorder is None else reorder(joined_parts)

    return gather


class _Reordering:
    """Puts the ranks' parts, which follow each other along a dim, where a placement other than Shard has them.

    Keeps one index tensor per device. It is made on the CPU and copied, which ends before any stream can read it.
    """

    def __init__(self, src: Shard, length: int, parts: int) -> None:
        self.src, self.length, self.parts = src, length, parts
        self._indices: dict[torch.device, torch.Tensor] = {}

    def __call__(self, joined: torch.Tensor) -> torch.Tensor:
        index = self._indices.get(joined.device)
        if index is None:
            if is_traced() or type(joined) is not torch.Tensor or is_capturing(joined.device):
                index = self._index(joined.ndim, joined.device)  # of a graph, or of one use
            else:
                with torch.inference_mode(False):
                    index = self._index(joined.ndim, torch.device("cpu")).to(joined.device)
                self._indices[joined.device] = index
        return torch.empty_like(joined).index_copy_(self.src.dim, index, joined)

    def _index(self, ndim: int, device: torch.device) -> torch.Tensor:
        """Returns where each element of the joined parts belongs, (length,)."""
        shape = [1] * ndim
        shape[self.src.dim] = -1
        places = torch.arange(self.length, device=device).view(shape)
        return torch.cat([self.src.part(places, self.parts, rank).flatten() for rank in range(self.parts)])


def _one(placements: Placements) -> Shard:
    """The Shard of a step of one mesh dim: the planner lets several go together only where they are even."""
    (shard,) = placements
    assert isinstance(shard, Shard)
    return shard


def padded(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """`tensor`, contiguous, lengthened to `length` on `dim` with zeros."""
    missing = length - tensor.size(dim)
    if missing == 0:
        return tensor.contiguous()
    shape = (*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :])
    if missing == length:
        return comm.full_ordered_after([tensor], shape, 0, tensor.dtype)
    return torch.cat([tensor, tensor.new_zeros(shape)], dim).contiguous()


# ---- reduce ----


def _reducer(step: Exchange, op: str) -> Mover:
    group, carrier = step.group, _transport_dtype(step.dtype)
    if step.dtype.is_complex and op == "product":
        return lambda local: _gathered_terms(local, step.parts, group).prod(0)
    if op in BITWISE and not comm.reduces_bits(group):
        combine = getattr(torch, _BITWISE[op])
        return lambda local: functools.reduce(combine, _gathered_terms(local, step.parts, group).unbind())
    if op in ("max", "min") and step.dtype.is_floating_point:
        return lambda local: _extremum(local, op, group)
    if step.dtype in _CARRIED or step.dtype.is_complex:
        return lambda local: comm.reduced(local, group, op)
    return lambda local: comm.reduced(local.to(carrier), group, op).to(local.dtype)


_BITWISE = dict(zip(BITWISE, ("bitwise_and", "bitwise_or", "bitwise_xor"), strict=True))


def _gathered_terms(local: torch.Tensor, parts: int, group: comm.Group) -> torch.Tensor:
    """(n, *local shape): every rank's term, for what no transport computes."""
    return _gathered(local.contiguous(), (parts, *local.shape), group)


def _extremum(local: torch.Tensor, op: str, group: comm.Group) -> torch.Tensor:
    """The max or min over the ranks, NaN where any rank has NaN, as in torch.

    Transports compare with < and so drop a NaN: floats travel with a flag each, in one collective.
    """
    sign = 1 if op == "max" else -1
    terms = local.to(_transport_dtype(local.dtype))
    nan = terms.isnan()
    values = terms.masked_fill(nan, -sign * math.inf)
    both = comm.reduced(torch.stack([values, nan.to(terms.dtype) * sign]), group, op)
    return both[0].masked_fill(both[1] != 0, math.nan).to(local.dtype)


def _reducing_scatter(step: Exchange, op: str) -> Mover:
    group = step.group
    gathers = op == "product" if step.dtype.is_complex else op in BITWISE and not comm.reduces_bits(group)
    if gathers or not (step.dtype in _CARRIED or step.dtype.is_complex):
        reduce = _reducer(step, op)
        return lambda local: _part(reduce(local), step)
    if not _even(step, step.dst):
        return _uneven_reducing_scatter(step, op)
    axes = _Axes(step.shape, step.dst, step.sizes)
    mine, rows = axes.local, axes.rows

    def scatter(local: torch.Tensor) -> torch.Tensor:
        packed = axes.pack(local)
        if packed.is_neg():
            packed = packed.resolve_neg()
        if rows:
            return comm.reduce_scattered(packed, mine, group, op)
        return comm.reduce_scattered(packed.view(-1), (math.prod(mine),), group, op).view(mine)

    return scatter


def _part(whole: torch.Tensor, step: Exchange) -> torch.Tensor:
    """This rank's part of what the ranks share, as the step's `dst` says."""
    part = whole
    for placement, parts, at in zip(step.dst, step.sizes, step.coordinate, strict=True):
        assert isinstance(placement, Shard)
        part = placement.part(part, parts, at)
    return _copy(part)


def _uneven_reducing_scatter(step: Exchange, op: str) -> Mover:
    dst, group, index, parts = _one(step.dst), step.group, step.index, step.parts
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


def _even_exchange(step: Exchange) -> Mover:
    """Every rank has one piece of the same shape for every other, and they fit as axes.

    The shard is whole in the dims that `dst` cuts; what arrives is whole in those that `src` cut.
    """
    sizes, group = step.sizes, step.group
    had, gets = (local_extents(step.shape, p, sizes, step.coordinate)[0] for p in (step.src, step.dst))
    out, back = _Axes(had, step.dst, sizes), _Axes(gets, step.src, sizes)

    def exchange(local: torch.Tensor) -> torch.Tensor:
        sent = _sent(out.pack(local))
        return back.unpack(_received(comm.exchanged(sent, (sent.numel(),), group), local.dtype))

    return exchange


def _exchange(step: Exchange) -> Mover:
    """Rank r gets everybody's r-th piece along the dim that `dst` cuts, each as long as it is."""
    src, dst, group, parts = _one(step.src), _one(step.dst), step.group, step.parts
    src_lengths = src.lengths(step.shape[src.dim], parts)
    dst_lengths = dst.lengths(step.shape[dst.dim], parts)
    # Pieces travel with the dim that `dst` cuts in front, where they lie one after the other, and then
    # the one that `src` cut.
    others = [d for d in range(len(step.shape)) if d not in (src.dim, dst.dim)]
    order = (dst.dim, src.dim, *others)
    back = [order.index(d) for d in range(len(order))]
    rest = tuple(step.shape[d] for d in others)
    scale = 1 if step.dtype in _CARRIED else step.dtype.itemsize
    row, mine = math.prod(rest), dst_lengths[step.index]
    out_sizes = [n * row * src_lengths[step.index] * scale for n in dst_lengths]
    sizes = [mine * n * row for n in src_lengths]
    in_sizes = [n * scale for n in sizes]
    even = len(set(src_lengths)) == 1
    whole = (mine, step.shape[src.dim], *rest)
    stacked = (parts, mine, src_lengths[0], *rest)
    reorder = None if type(src) is Shard else _Reordering(src, step.shape[src.dim], parts)
    in_order = not isinstance(dst, StridedShard)

    def exchange(local: torch.Tensor) -> torch.Tensor:
        if in_order:
            packed = local.permute(order).contiguous()
        else:
            packed = torch.cat([dst.part(local, parts, r).permute(order).reshape(-1) for r in range(parts)])
        flat = comm.exchanged(_sent(packed), (sum(in_sizes),), group, in_sizes, out_sizes)
        received = _received(flat, local.dtype)
        if even:
            joined = received.view(stacked).transpose(0, 1).reshape(whole)
        else:
            pieces = zip(received.split(sizes), src_lengths, strict=True)
            joined = torch.cat([flat.view(mine, n, *rest) for flat, n in pieces], 1)
        joined = joined.permute(back).contiguous()
        return joined if reorder is None else reorder(joined)

    return exchange
