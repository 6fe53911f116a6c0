"""Bringing inputs into the order of the collective: all shards for rank 0, all for rank 1, ...

Two ways. `Rows` copies each input when it comes, so that the caller may reuse it at once: into the n
rows of a buffer. Rows as long as they turn out to be filled are the collective's input as they are; if
the length was guessed wrong, they are copied once more, closer together. `HeldInputs` keeps the inputs and
copies them all in one call when the bucket closes: half the work for small inputs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter

import torch
from torch import Tensor

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

# Results share memory up to so many bytes, which is what a kept one keeps at most beside itself: an
# allocation for each small result costs 2 us, a part of a shared one 0.6.
SHARED_BYTES = 64 * 1024
_version = attrgetter("_version")

# An input: (n, k), where inputs are held (n * k,) too; or the n tensors of one shape that are its rows.
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
        """Does not take back what `take` gave: a collective that failed may still use it."""
        self.in_use -= buffer.nbytes
        self.counters.hold(-buffer.nbytes)

    def clear(self) -> None:
        """Frees what is not in use."""
        self.counters.hold(-sum(b.nbytes for b in self._free))
        self._free.clear()


# Both take inputs of k elements per shard, (n, k) each, until `used` would be more than `room`. `needs` is how many
# elements `pack` has to allocate; `pack` gives the n * used elements in the order of the collective, and the pool's
# buffer that they lie in, to be given back after use.


class Rows:
    """Copies each input on arrival, into n rows of `room` elements."""

    def __init__(self, pool: BufferPool, world_size: int, room: int) -> None:
        self.used, self.room = 0, room
        self._pool, self._n = pool, world_size
        self._buffer = pool.take(world_size * room)

    def add(self, source: Source, numel: int) -> None:
        if numel:
            place = self._buffer.as_strided((self._n, numel), (self.room, 1), self.used)
            if isinstance(source, Tensor):
                place.copy_(source)
            else:
                torch.stack(source, out=place.view(self._n, *source[0].shape))  # type: ignore[arg-type]
            self.used += numel

    def grow(self, room: int) -> None:
        old, old_room = self._buffer, self.room
        self._buffer, self.room = self._pool.take(self._n * room), room
        if self.used:
            kept = old.as_strided((self._n, self.used), (old_room, 1))
            self._buffer.as_strided((self._n, self.used), (room, 1)).copy_(kept)
            self._pool.counters.bytes_copied += kept.nbytes
        self._pool.give(old)

    def needs(self) -> int:
        return 0 if self._n == 1 or self.used in (0, self.room) else self._n * self.used

    def pack(self) -> tuple[Tensor, Tensor]:
        total = self._n * self.used
        self._pool.counters.bytes_copied += total * self._buffer.itemsize
        if self.needs():
            rows = self._buffer
            self._buffer = self._pool.take(total)
            closer = self._buffer[:total].view(self._n, self.used)
            closer.copy_(rows.as_strided((self._n, self.used), (self.room, 1)))
            self._pool.give(rows)
            self._pool.counters.bytes_copied += closer.nbytes
        return self._buffer[:total], self._buffer

    def drop(self) -> None:
        self._pool.give(self._buffer)


class HeldInputs:
    """Keeps the inputs until the bucket closes; they must not change before."""

    def __init__(self, pool: BufferPool, world_size: int, room: int) -> None:
        self.used, self.room = 0, room
        self._pool, self._n = pool, world_size
        self._tensors: list[Tensor] = []  # all that inputs consist of, and the versions of these
        self._versions: list[int] = []
        self._lists: set[int] = set()  # where the n tensors of one input begin

    def add(self, source: Source, numel: int) -> None:
        if not numel:
            return
        self.used += numel
        tensors = [source] if isinstance(source, Tensor) else source
        if tensors is source:
            self._lists.add(len(self._tensors))
        self._tensors += tensors
        self._versions += versions_of(tensors)

    def add_flat(self, tensor: Tensor, numel: int) -> None:
        """As `add` of (n * k,), k > 0, with nothing asked."""
        self._versions.append(tensor._version)
        self._tensors.append(tensor)
        self.used += numel

    def needs(self) -> int:
        return self._n * self.used

    def pack(self) -> tuple[Tensor, Tensor]:
        check_unchanged(self._tensors, self._versions)
        total = self._n * self.used
        buffer = self._pool.take(total)
        packed = buffer[:total]
        rows = packed.view(self._n, self.used)
        if not self._lists:
            chunk_cat(self._tensors, 0, self._n, out=rows)
        else:
            for row, shards in zip(rows.unbind(0), zip(*self._columns(), strict=True), strict=True):
                torch.cat(shards, out=row)
        self._pool.counters.bytes_copied += packed.nbytes
        self.drop()
        return packed, buffer

    def _columns(self) -> Iterator[Sequence[Tensor]]:
        """The n flat shards of each input."""
        start = 0
        while start < len(self._tensors):
            if start in self._lists:
                yield [shard.reshape(-1) for shard in self._tensors[start : start + self._n]]
                start += self._n
            else:
                yield self._tensors[start].view(self._n, -1).unbind(0)
                start += 1

    def drop(self) -> None:
        self._tensors.clear()


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
        "bucketer with hold_inputs=False, which copies"
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


def copies_of(total: Tensor, numels: list[int]) -> list[Tensor]:
    """`total`, cut into these lengths, in memory of their own."""
    parts: list[Tensor] = []
    most = SHARED_BYTES // total.itemsize
    ends = list(accumulate(numels))
    first = start = 0
    while first < len(ends):
        last = max(bisect_right(ends, start + most, first), first + 1)
        shared = total[start : ends[last - 1]].clone()
        # Not views of each other to autograd: each counts its own writes.
        parts += torch.unsafe_split_with_sizes(shared, numels[first:last])
        first, start = last, ends[last - 1]
    return parts
