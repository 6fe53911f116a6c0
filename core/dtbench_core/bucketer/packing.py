"""Brings inputs into the order of the collective: all shards for rank 0, then all for rank 1, and so on.

There are two ways. `Rows` copies each input on arrival into the n rows of a buffer, so the caller may reuse it at
once. If the rows turn out as long as was predicted, the buffer is the collective's input; otherwise the rows are copied
once more, closer together. `HeldInputs` keeps the inputs and copies them all by one op when the bucket closes.

Each row ends at a multiple of ALIGN_BYTES, and `HeldInputs` puts shards of other lengths last, so that one odd bias
does not shift every shard behind it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dtbench_core.bucketer.streams import StreamOrder
from dtbench_core.errors import CoreError
from dtbench_core.torch_compat import chunk_cat


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
    in_use: int = 0  # bytes
    _free: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.streams = StreamOrder(self.device)

    def fits(self, numel: int) -> bool:
        """Whether a free buffer has room for `numel` elements."""
        return any(b.numel() >= numel for b in self._free)

    def take(self, numel: int) -> Tensor:
        """Returns a buffer of at least `numel` elements for the current stream. Its values are undefined."""
        self.streams.enter()
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
        if not numel:
            return
        if self._pool.streams.needed:
            self._pool.streams.enter()
        place = self._columns(self.used, numel)
        if isinstance(source, Tensor):
            place.copy_(as_rows(source, self._n))
        else:
            torch.stack(source, out=place.view(self._n, *source[0].shape))  # type: ignore[arg-type]
        self.used += numel

    def _columns(self, start: int, numel: int) -> Tensor:
        return self._buffer.as_strided((self._n, numel), (self.room, 1), start)

    def grow(self, room: int) -> None:
        """Moves the rows to others of `room` elements."""
        old, columns = self._buffer, self._columns(0, self.used)
        self.room = aligned(room, self._unit)
        self._buffer = self._pool.take(self._n * self.room)
        self._columns(0, self.used).copy_(columns)
        self._pool.counters.bytes_copied += columns.nbytes
        self._pool.give(old)

    def needs(self) -> int:
        row = aligned(self.used, self._unit)
        return 0 if self._n == 1 or row in (0, self.room) else self._n * row

    def pack(self, numels: Sequence[int]) -> Packed:
        self._pool.streams.enter()
        self._pool.counters.bytes_copied += self._n * self.used * self._buffer.itemsize
        row = aligned(self.used, self._unit)
        if self.needs():
            self.grow(row)
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
        self._inputs: list[Source] = []
        self._has_lists = False  # whether some shards are tensors of their own
        self._tensors: list[Tensor] = []  # of all inputs
        self._versions: list[int] = []  # of these when they were handed over
        self._streams: dict[object, Any] = {}  # on which they were handed over

    def add(self, source: Source, numel: int) -> None:
        tensors = [source] if isinstance(source, Tensor) else source
        self._has_lists |= tensors is source
        self._versions += versions_of(tensors)
        self._tensors += tensors
        self._inputs.append(source)
        self._pool.streams.note_input(self._streams)
        self.used += numel

    def add_flat(self, tensor: Tensor, numel: int) -> None:
        """As `add`, without any check."""
        self._versions.append(tensor._version)
        self._tensors.append(tensor)
        self._inputs.append(tensor)
        if self._pool.streams.needed:
            self._pool.streams.note_input(self._streams)
        self.used += numel

    def needs(self) -> int:
        return self._n * aligned(self.used, self._unit)

    def pack(self, numels: Sequence[int]) -> Packed:
        """Packs the inputs by one op. numels: elements per shard of each."""
        self._pool.streams.enter(self._streams, self._tensors)
        check_unchanged(self._tensors, self._versions)
        order = _odd_shards_last(numels, self._unit)
        inputs = self._inputs if order is None else [self._inputs[i] for i in order if numels[i]]
        row = aligned(self.used, self._unit)
        buffer = self._pool.take(self._n * row)
        packed = buffer[: self._n * row]
        if row > self.used:
            inputs = [*inputs, self._tensors[0].new_zeros(self._n * (row - self.used))]
        if self._has_lists:
            shards = [
                as_rows(x, self._n) if isinstance(x, Tensor) else [t.reshape(-1) for t in x] for x in inputs
            ]
            torch.cat([rows[rank] for rank in range(self._n) for rows in shards], out=packed)
        else:
            chunk_cat(inputs, 0, self._n, out=packed.view(self._n, row))
        self._pool.counters.bytes_copied += self._n * self.used * packed.itemsize
        self.drop()
        return Packed(packed, buffer, order)

    def drop(self) -> None:
        self._inputs.clear()
        self._tensors.clear()


def aligned(numel: int, unit: int) -> int:
    """Returns the next multiple of `unit`."""
    return -(-numel // unit) * unit


def as_rows(source: Tensor, n: int) -> Tensor:
    """Returns (n, k): a source with that shape, or a flat one with zeros for its missing elements."""
    if source.ndim == 2:
        return source
    missing = -source.numel() % n
    return (F.pad(source, (0, missing)) if missing else source).view(n, -1)


def _odd_shards_last(numels: Sequence[int], unit: int) -> list[int] | None:
    """Returns the indices of the inputs, those whose shards end at a multiple of `unit` first.

    None if all do and none is empty.
    """
    if 0 not in numels and math.gcd(*numels) % unit == 0:
        return None
    return sorted(range(len(numels)), key=lambda index: numels[index] % unit > 0)


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
