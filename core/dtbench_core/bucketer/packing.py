"""Arranges inputs in the order of the collective: all shards for rank 0, then all for rank 1, and so on.

There are two ways. `Rows` copies each input on arrival into the n rows of a buffer, so the caller may reuse the input
at once. If the rows become as long as predicted, the buffer is the input of the collective; otherwise the rows are
copied once more, to close the gaps. `HeldInputs` keeps the inputs and copies all of them by one op when the bucket
closes.

Each row ends at a multiple of ALIGN_BYTES. `HeldInputs` puts shards of odd lengths last, so that a single odd bias
does not misalign all shards after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from dtbench_core.errors import CoreError
from dtbench_core.torch_compat import (
    chunk_cat,
    current_stream,
    is_stream_capturing,
    record_stream,
    stream_handle,
)


class BucketError(CoreError, ValueError, AssertionError):
    """Inputs that cannot be reduced together, ranks that disagree on them, or a bucketer used out of order.

    An AssertionError too, since fairscale's bucketer raises those.
    """


# Initial number of elements per shard of a bucket without a prediction; it is doubled when full.
FIRST_ELEMENTS = 1024
# Smaller shards are joined first and then copied by one strided copy instead of n. The first copy is cheap, since the
# data stay in the cache. Measured on a CPU with 8 shards, joined and separate: 10 and 16 us at 2 KiB, 49 and 44 us at
# 32 KiB.
JOIN_BYTES = 16 * 1024
# Below this size, checking for contiguous shards costs more than it saves.
CONTIGUOUS_ROWS_MIN_BYTES = 4 * 1024

# The widest load and store of a CUDA thread. After a shard whose size is not a multiple of it, chunk_cat copies
# single bytes. A row that does not end at a multiple slows NCCL down, too (pytorch#195450).
ALIGN_BYTES = 16
_version = attrgetter("_version")

# An input with n shards of k elements: (n, k); (up to n * k,), where missing elements are zeros; or n tensors of one
# shape.
Source = Tensor | Sequence[Tensor]


@dataclass
class BucketCounters:
    """Counters of a bucketer.

    Attributes:
        collectives: collectives issued.
        bytes_copied: bytes written by copies on this rank.
        held_bytes: bytes of the buffers allocated now, without the results passed to callbacks.
        peak_bytes: maximum of held_bytes.
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
    """Flat buffers of one dtype and device. A new one is allocated if no free buffer is large enough.

    Attributes:
        in_use: bytes of the acquired buffers.
        streams: orders the streams that use the buffers.
    """

    dtype: torch.dtype
    device: torch.device
    counters: BucketCounters
    in_use: int = 0
    _free: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.streams = StreamOrder(self.device)

    def fits(self, numel: int) -> bool:
        """Whether a free buffer has room for `numel` elements."""
        return any(b.numel() >= numel for b in self._free)

    def acquire(self, numel: int) -> Tensor:
        """Returns a buffer of at least `numel` elements for use on the current stream. Its values are undefined."""
        self.streams.enter()
        smallest = min((b.numel() for b in self._free if b.numel() >= numel), default=None)
        if smallest is None:
            self.clear()  # the free buffers are too small; the new one replaces them
            # Inference tensors could not be written later, outside this mode.
            with torch.inference_mode(False):
                buffer = torch.empty(numel, dtype=self.dtype, device=self.device)
            self.counters.hold(buffer.nbytes)
        else:
            buffer = self._free.pop([b.numel() for b in self._free].index(smallest))
        self.in_use += buffer.nbytes
        return buffer

    def release(self, buffer: Tensor) -> None:
        self.in_use -= buffer.nbytes
        self._free.append(buffer)

    def discard(self, buffer: Tensor) -> None:
        """Drops a buffer that must not be reused, since a failed collective may still use it."""
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
        input: (n * row,): for each rank its shards, then up to ALIGN_BYTES - 1 bytes of zeros.
        buffer: the pool's buffer that contains `input`, to be released after use.
        order: the inputs' indices in the order of their shards in a row; None if that is their order of arrival.
    """

    input: Tensor
    buffer: Tensor
    order: list[int] | None = None


# `Rows` and `HeldInputs` below both have `used`, the elements per shard so far, and `room`, their maximum. `needs()`
# returns the number of elements that `pack` will allocate.


class Rows:
    """Copies each input on arrival into n rows of `room` elements.

    Args:
        unit: number of elements in ALIGN_BYTES.
    """

    def __init__(self, pool: BufferPool, world_size: int, room: int, unit: int) -> None:
        self.used, self.room = 0, aligned(room, unit)
        self._pool, self._n, self._unit = pool, world_size, unit
        self._buffer = pool.acquire(world_size * self.room)

    def add(self, source: Source, numel: int) -> None:
        if not numel:
            return
        if self._pool.streams.has_streams:
            self._pool.streams.enter()
        columns = self._columns(self.used, numel)
        if isinstance(source, Tensor):
            columns.copy_(as_rows(source, self._n))
        else:
            torch.stack(source, out=columns.view(self._n, *source[0].shape))  # type: ignore[arg-type]
        self.used += numel

    def _columns(self, start: int, numel: int) -> Tensor:
        return self._buffer.as_strided((self._n, numel), (self.room, 1), start)

    def grow(self, room: int) -> None:
        """Copies the rows into a buffer with rows of `room` elements."""
        previous, columns = self._buffer, self._columns(0, self.used)
        self.room = aligned(room, self._unit)
        self._buffer = self._pool.acquire(self._n * self.room)
        self._columns(0, self.used).copy_(columns)
        self._pool.counters.bytes_copied += columns.nbytes
        self._pool.release(previous)

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
        self._pool.release(self._buffer)


class HeldInputs:
    """Keeps the inputs until the bucket closes; they must not change before.

    Args:
        unit: number of elements in ALIGN_BYTES.
    """

    def __init__(self, pool: BufferPool, world_size: int, room: int, unit: int) -> None:
        self.used, self.room = 0, room
        self._pool, self._n, self._unit = pool, world_size, unit
        self._inputs: list[Source] = []
        self._has_lists = False  # whether some input is a list of shards
        self._tensors: list[Tensor] = []  # the tensors of all inputs
        self._versions: list[int] = []  # the version of each tensor on arrival
        self._streams: dict[object, Any] = {}  # handle -> stream, for the streams on which inputs arrived

    def add(self, source: Source, numel: int) -> None:
        tensors = [source] if isinstance(source, Tensor) else source
        self._has_lists |= tensors is source
        self._versions += versions_of(tensors)
        self._tensors += tensors
        self._inputs.append(source)
        self._pool.streams.record_stream_of_input(self._streams)
        self.used += numel

    def add_flat(self, tensor: Tensor, numel: int) -> None:
        """Same as `add` for one flat tensor, without checks."""
        self._versions.append(tensor._version)
        self._tensors.append(tensor)
        self._inputs.append(tensor)
        if self._pool.streams.has_streams:
            self._pool.streams.record_stream_of_input(self._streams)
        self.used += numel

    def needs(self) -> int:
        return self._n * aligned(self.used, self._unit)

    def pack(self, numels: Sequence[int]) -> Packed:
        """Packs the inputs by one op.

        Args:
            numels: elements per shard of each input.
        """
        self._pool.streams.enter(self._streams, self._tensors)
        check_unchanged(self._tensors, self._versions)
        order = _odd_shards_last(numels, self._unit)
        inputs = self._inputs if order is None else [self._inputs[i] for i in order if numels[i]]
        row = aligned(self.used, self._unit)
        buffer = self._pool.acquire(self._n * row)
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
    """Rounds up to a multiple of `unit`."""
    return -(-numel // unit) * unit


def as_rows(source: Tensor, n: int) -> Tensor:
    """Returns a source as (n, k). A flat source is padded with zeros."""
    if source.ndim == 2:
        return source
    missing = -source.numel() % n
    return (F.pad(source, (0, missing)) if missing else source).view(n, -1)


def _odd_shards_last(numels: Sequence[int], unit: int) -> list[int] | None:
    """Returns the inputs' indices, with shards whose length is not a multiple of `unit` last.

    None if all lengths are multiples and no shard is empty.
    """
    if 0 not in numels and math.gcd(*numels) % unit == 0:
        return None
    return sorted(range(len(numels)), key=lambda index: numels[index] % unit > 0)


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Returns the version counters of the tensors; 0 for an inference tensor, which has none."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [0 if t.is_inference() else t._version for t in tensors]


def check_unchanged(inputs: Sequence[Tensor], versions: Sequence[int]) -> None:
    present = versions_of(inputs)
    are_plain = set(map(type, inputs)) <= {Tensor}  # tensor subclasses may have no address
    if present == versions and not (are_plain and 0 in map(Tensor.data_ptr, inputs)):
        return
    freed = [type(t) is Tensor and t.numel() > 0 and t.data_ptr() == 0 for t in inputs]
    if present == versions and not any(freed):
        return
    index = next(i for i in range(len(inputs)) if freed[i] or present[i] != versions[i])
    raise BucketError(
        f"got tensor {index} of {len(inputs)} in this bucket {'freed' if freed[index] else 'changed'} after it was "
        "passed to the bucketer, expected it unchanged until its callback: pass a copy, or make the bucketer with "
        "hold_inputs=False, which copies all inputs but the gradients of attach()"
    )


def as_contiguous_rows(shards: Sequence[Tensor]) -> Tensor | None:
    """Returns the n shards as one (n, k) view, if they follow each other in one storage.

    The chunks of a gradient do.
    """
    first, numel = shards[0], shards[0].numel()
    start, step = first.data_ptr(), numel * first.itemsize
    if list(map(Tensor.data_ptr, shards)) != list(range(start, start + len(shards) * step, step)):
        return None
    if not all(map(Tensor.is_contiguous, shards)):
        return None
    if first.untyped_storage().nbytes() < (first.storage_offset() + len(shards) * numel) * first.itemsize:
        return None  # the next shard is in another storage, which happens to follow
    return first.as_strided((len(shards), numel), (numel, 1))


# ---- order of the streams on which a bucket is used ----

# A gradient's hook runs on the stream of the forward op that used the parameter, and `flush()` on the caller's. So an
# input may arrive on one stream, be packed on another and be waited for on a third. Two conditions must hold:
#
# - A stream that uses the bucket's memory waits for the stream that used it before.
# - Memory returns to the allocator only after all streams that used it have finished. The allocator itself waits only
#   for the stream that allocated the memory.


class StreamOrder:
    """Orders all uses of one bucket's memory as if they were on a single stream. Does nothing on a CPU.

    Streams are identified by their handles: getting a handle costs a tenth of getting the stream object.

    Attributes:
        has_streams: whether the device has streams. On hot paths, reading this first is cheaper than a call.
    """

    def __init__(self, device: torch.device) -> None:
        self.has_streams = stream_handle(device) is not None
        self._device = device
        self._last_handle: object = None
        self._streams: dict[object, Any] = {}  # handle -> stream, for every stream that has used the bucket

    def record_stream_of_input(self, input_streams: dict[object, Any]) -> None:
        """Adds the current stream to `input_streams`: handle -> stream, for every stream on which an input arrived."""
        handle = stream_handle(self._device)
        if handle is not None and handle not in input_streams:
            input_streams[handle] = current_stream(self._device)

    def enter(self, input_streams: dict[object, Any] | None = None, inputs: Sequence[Tensor] = ()) -> None:
        """Makes the current stream wait for the stream that used the bucket's memory last.

        Args:
            input_streams: the streams of `inputs`, which the current stream waits for, too.
            inputs: their memory is kept until the current stream has read it.
        """
        handle = stream_handle(self._device)
        if handle != self._last_handle:
            self._streams[handle] = current_stream(self._device)
            if self._last_handle is not None:
                _wait_for(self._streams[handle], self._streams[self._last_handle])
            self._last_handle = handle
        if input_streams and input_streams.keys() != {handle}:
            for stream in input_streams.values():
                _wait_for(self._streams[handle], stream)
            for tensor in inputs:
                record_stream(tensor, self._streams[handle])

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Keeps memory from being reallocated before every stream that has used the bucket has finished with it."""
        if len(self._streams) > 1:
            for tensor, stream in product(tensors, self._streams.values()):
                record_stream(tensor, stream)


def _wait_for(stream: Any, earlier: Any) -> None:
    """Makes `stream` wait for all work submitted to `earlier` so far.

    A captured stream cannot wait for work outside of the capture; the capturing code must have waited for that work
    before.
    """
    if is_stream_capturing(earlier) or not is_stream_capturing(stream):
        stream.wait_event(earlier.record_event())
