"""Brings inputs into the order of the collective: all shards for rank 0, then all for rank 1, and so on.

There are two ways. `Rows` copies each input on arrival into the n rows of a buffer, so the caller may reuse it at
once. If the rows turn out as long as was predicted, the buffer is the collective's input; otherwise the rows are copied
once more, closer together. `HeldInputs` keeps the inputs and copies them all by one op when the bucket closes.

Each row ends at a multiple of ALIGN_BYTES, and `HeldInputs` puts shards of other lengths last, so that one odd bias
does not shift every shard behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dtbench_core.bucketer.streams import StreamOrder
from dtbench_core.errors import CoreError
from dtbench_core.torch_compat import chunk_cat

T = TypeVar("T")


class BucketError(CoreError, ValueError, AssertionError):
    """Inputs that cannot be reduced together, ranks that disagree on them, or a bucketer used out of order.

    An AssertionError too, since fairscale's bucketer raises those.
    """


# A bucket whose contents cannot be foreseen starts with so many elements per shard, and doubles.
FIRST_ELEMENTS = 1024
# Shards of fewer bytes are joined first and then copied as one, which costs a second copy that the
# cache hides: one strided copy costs 1 us, n of them n. Measured on CPU, 8 shards: at 2 KiB 10 against
# 16 us, at 32 KiB 49 against 44.
JOIN_BYTES = 16 * 1024
# Below this, finding out whether shards lie side by side costs what copying them as one saves.
SIDE_BY_SIDE_BYTES = 4 * 1024

# The widest load and store of a CUDA thread. Behind a shard whose bytes are no multiple of it, chunk_cat falls back to
# one byte at a time; a row that does not end at a multiple slows NCCL, too (pytorch#195450).
ALIGN_BYTES = 16
_version = attrgetter("_version")

# An input: (n, k); (up to n * k,), whose missing elements are zeros; or the n tensors of one shape that are its rows.
Source = Tensor | Sequence[Tensor]


@dataclass
class BucketCounters:
    """What a bucketer has done so far.

    collectives: issued. bytes_copied: written by copies on this rank. held_bytes: buffers now allocated
    (results handed to callbacks are the caller's). peak_bytes: the most they were.
    """

    collectives: int = 0
    bytes_copied: int = 0
    held_bytes: int = 0
    peak_bytes: int = 0

    def hold(self, nbytes: int) -> None:
        self.held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


@dataclass(eq=False)
class BufferPool:
    """Flat buffers of one dtype and device, allocated when none of the free ones is large enough."""

    dtype: torch.dtype
    device: torch.device
    counters: BucketCounters
    streams: StreamOrder | None = None  # None on a CPU
    in_use: int = 0  # bytes
    _free: list[Tensor] = field(default_factory=list)

    def fits(self, numel: int) -> bool:
        """Whether a free buffer has room for `numel` elements."""
        return any(b.numel() >= numel for b in self._free)

    def take(self, numel: int) -> Tensor:
        """A buffer of at least `numel` elements. Its values are undefined."""
        smallest = min((b.numel() for b in self._free if b.numel() >= numel), default=None)
        if smallest is None:
            self.clear()  # too small, and the new one takes its place
            with torch.inference_mode(False):  # else no later pass could write to it
                buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
            self.counters.hold(buffer.nbytes)
        else:
            buffer = self._free.pop([b.numel() for b in self._free].index(smallest))
        self.in_use += buffer.nbytes
        return buffer

    def give(self, buffer: Tensor) -> None:
        self.in_use -= buffer.nbytes
        self._free.append(buffer)

    def lose(self, buffer: Tensor) -> None:
        """Drops a buffer for good: a collective that failed may still use it."""
        self.in_use -= buffer.nbytes
        self._forget([buffer])

    def clear(self) -> None:
        """Frees the buffers that are not in use."""
        self._forget(self._free)
        self._free.clear()

    def _forget(self, buffers: list[Tensor]) -> None:
        self.counters.hold(-sum(b.nbytes for b in buffers))
        if self.streams is not None:
            self.streams.keep(buffers)


class Packed(NamedTuple):
    """Inputs in the order of the collective.

    Attributes:
        input: (n * row,), for each rank its shards and up to ALIGN_BYTES - 1 bytes of zeros.
        buffer: the pool's buffer that `input` lies in; to be given back after use.
        order: the indices of the inputs as their shards follow each other in a row; None if as they came.
    """

    input: Tensor
    buffer: Tensor
    order: list[int] | None = None


# Both kinds of packing take inputs of k elements per shard until `used`, the elements per shard so far, would be more
# than `room`. `needs` is the number of elements that `pack` will allocate.


class Rows:
    """Copies each input on arrival, into n rows of `room` elements. unit: elements in ALIGN_BYTES."""

    def __init__(self, pool: BufferPool, world_size: int, room: int, unit: int) -> None:
        self.used, self.room = 0, aligned(room, unit)
        self._pool, self._n, self._unit = pool, world_size, unit
        self._buffer = pool.take(world_size * self.room)

    def add(self, source: Source, numel: int) -> None:
        if numel:
            place = self._columns(self.used, numel)
            if isinstance(source, Tensor):
                place.copy_(as_rows(source, self._n, numel))
            else:
                torch.stack(source, out=place.view(self._n, *source[0].shape))  # type: ignore[arg-type]
            self.used += numel

    def _columns(self, start: int, numel: int) -> Tensor:
        return self._buffer.as_strided((self._n, numel), (self.room, 1), start)

    def grow(self, room: int) -> None:
        old, kept = self._buffer, self._columns(0, self.used)
        self.room = aligned(room, self._unit)
        self._buffer = self._pool.take(self._n * self.room)
        if self.used:
            self._columns(0, self.used).copy_(kept)
            self._pool.counters.bytes_copied += kept.nbytes
        self._pool.give(old)

    def needs(self) -> int:
        row = aligned(self.used, self._unit)
        return 0 if self._n == 1 or row in (0, self.room) else self._n * row

    def pack(self, numels: Sequence[int]) -> Packed:
        self._pool.counters.bytes_copied += self._n * self.used * self._buffer.itemsize
        if needs := self.needs():
            rows, kept = self._buffer, self._columns(0, self.used)
            self._buffer, self.room = self._pool.take(needs), needs // self._n
            self._columns(0, self.used).copy_(kept)
            self._pool.give(rows)
            self._pool.counters.bytes_copied += kept.nbytes
        row = aligned(self.used, self._unit)
        if row > self.used:
            self._columns(self.used, row - self.used).zero_()
        return Packed(self._buffer[: self._n * row], self._buffer)

    def drop(self) -> None:
        self._pool.give(self._buffer)


class HeldInputs:
    """Keeps the inputs until the bucket closes; they must not change before. unit: elements in ALIGN_BYTES."""

    def __init__(self, pool: BufferPool, world_size: int, room: int, unit: int) -> None:
        self.used, self.room = 0, room
        self._pool, self._n, self._unit = pool, world_size, unit
        self.tensors: list[Tensor] = []  # of all inputs with elements; an input may consist of n tensors
        self._versions: list[int] = []
        self._lists: set[int] = set()  # indices into `tensors` where the n tensors of one input begin

    def add(self, source: Source, numel: int) -> None:
        if not numel:
            return
        self.used += numel
        tensors = [source] if isinstance(source, Tensor) else source
        if tensors is source:
            self._lists.add(len(self.tensors))
        self.tensors += tensors
        self._versions += versions_of(tensors)

    def add_flat(self, tensor: Tensor, numel: int) -> None:
        """As `add` of a flat tensor with elements, without any check."""
        self._versions.append(tensor._version)
        self.tensors.append(tensor)
        self.used += numel

    def needs(self) -> int:
        return self._n * aligned(self.used, self._unit)

    def pack(self, numels: Sequence[int]) -> Packed:
        """Args: numels: elements per shard of each input, those without elements included."""
        check_unchanged(self.tensors, self._versions)
        order = _odd_shards_last(numels, self._unit)
        row = aligned(self.used, self._unit)
        buffer = self._pool.take(self._n * row)
        packed = buffer[: self._n * row]
        if self._lists:
            self._pack_shards(packed, numels, order, row - self.used)
        else:
            tensors = _in_order(self.tensors, numels, order)
            if row > self.used:
                tensors = [*tensors, self._zeros(self._n * (row - self.used))]
            chunk_cat(tensors, 0, self._n, out=packed.view(self._n, row))
        self._pool.counters.bytes_copied += self._n * self.used * packed.itemsize
        return Packed(packed, buffer, order)

    def _pack_shards(self, packed: Tensor, numels: Sequence[int], order: list[int] | None, pad: int) -> None:
        """Packs shards of which some are tensors of their own."""
        inputs = _in_order(list(self._shards_of_inputs(numels)), numels, order)
        if pad:
            inputs = [*inputs, [self._zeros(pad)] * self._n]
        torch.cat([shards[rank] for rank in range(self._n) for shards in inputs], out=packed)

    def _shards_of_inputs(self, numels: Sequence[int]) -> Iterator[Sequence[Tensor]]:
        """Yields the n flat shards of each input with elements."""
        start = 0
        for numel in filter(None, numels):
            if start in self._lists:
                yield [shard.reshape(-1) for shard in self.tensors[start : start + self._n]]
                start += self._n
            else:
                yield as_rows(self.tensors[start], self._n, numel).unbind(0)
                start += 1

    def _zeros(self, numel: int) -> Tensor:
        return self.tensors[0].new_zeros(numel)

    def drop(self) -> None:
        self.tensors.clear()


def aligned(numel: int, unit: int) -> int:
    """Returns the next multiple of `unit`."""
    return -(-numel // unit) * unit


def as_rows(source: Tensor, n: int, numel: int) -> Tensor:
    """Returns (n, numel): a source with that shape, or a flat one with zeros for its missing elements."""
    if source.ndim == 2:
        return source
    missing = n * numel - source.numel()
    return (F.pad(source, (0, missing)) if missing else source).view(n, numel)


def _odd_shards_last(numels: Sequence[int], unit: int) -> list[int] | None:
    """Returns the indices of the inputs, those whose shards end at a multiple of `unit` first; None if all do."""
    odd = [index for index, numel in enumerate(numels) if numel % unit]
    if not odd:
        return None
    return [index for index, numel in enumerate(numels) if numel % unit == 0] + odd


def _in_order(held: list[T], numels: Sequence[int], order: list[int] | None) -> list[T]:
    """Returns the entries of `held`, one for each input with elements, in the order of their shards."""
    if order is None:
        return held
    entries = iter(held)
    by_input = [next(entries) if numel else None for numel in numels]
    return [entry for index in order if (entry := by_input[index]) is not None]


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """How often each, or what it is a view of, was written to; 0 for an inference tensor, which does not say."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in tensors]


def check_unchanged(inputs: Sequence[Tensor], versions: Sequence[int]) -> None:
    now = versions_of(inputs)
    plain = set(map(type, inputs)) <= {Tensor}  # others have no address
    if now == versions and not (plain and 0 in map(Tensor.data_ptr, inputs)):
        return
    freed = [type(t) is Tensor and t.numel() > 0 and t.data_ptr() == 0 for t in inputs]
    if now == versions and not any(freed):
        return
    index = next(i for i in range(len(inputs)) if freed[i] or now[i] != versions[i])
    raise BucketError(
        f"got tensor {index} of {len(inputs)} in this bucket {'freed' if freed[index] else 'changed'} after it was "
        "handed over, expected it to stay as it was until its callback: hand over a copy, or make the "
        "bucketer with hold_inputs=False, which copies all but what attach() hands over"
    )


def side_by_side(shards: Sequence[Tensor]) -> Tensor | None:
    """The n shards as one (n, k) view, where they lie one after the other in one storage, as the chunks
    of a gradient do."""
    first, numel = shards[0], shards[0].numel()
    start, step = first.data_ptr(), numel * first.itemsize
    if list(map(Tensor.data_ptr, shards)) != list(range(start, start + len(shards) * step, step)):
        return None
    if not all(map(Tensor.is_contiguous, shards)):
        return None
    if first.untyped_storage().nbytes() < (first.storage_offset() + len(shards) * numel) * first.itemsize:
        return None  # another storage that happens to lie behind
    return first.as_strided((len(shards), numel), (numel, 1))
