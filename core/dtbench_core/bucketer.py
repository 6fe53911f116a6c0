"""Bundles many small reduce-scatters into few large ones.

A bucket collects inputs of one dtype, device and group. Each input is copied when it is handed over,
so the caller may reuse it at once. Note [Two copies]: inputs are staged one after the other, each as
its n shards (one contiguous torch.cat, the cheapest way to take a small input), and are put in the
order of the collective (rank by rank) when the bucket is flushed, one strided copy for each run of
inputs of equal size. Writing each input straight into n rows costs more than both together below
about 16 KiB a shard, and still needs a second copy unless the bucket is exactly full.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dtbench_core import comm
from dtbench_core.errors import CoreError

MIB = 1024**2
# The first allocation of a bucket, in elements; it then doubles. Small enough not to matter, large
# enough that a bucket of a few biases grows once or not at all.
FIRST_ELEMENTS = 4096

Callback = Callable[[Tensor], object]


class BucketError(CoreError, ValueError):
    """Inputs that cannot be reduced together, or a bucketer used out of order."""


# --- layout: pure ----------------------------------------------------------------------------------


class Slot(NamedTuple):
    """Where an input lands: which bucket in order of filling (None: reduced alone, at once), and its
    first element within each rank's shard of that bucket."""

    bucket: int | None
    offset: int


@dataclass
class BucketLayout:
    """Fills buckets of `capacity` elements per shard in order of arrival; pure bookkeeping."""

    capacity: int
    bucket: int = 0
    offset: int = 0

    def alone(self, numel: int) -> bool:
        """Whether an input of `numel` elements per shard is reduced at once: always without capacity."""
        return numel > self.capacity or self.capacity <= 0

    def too_full(self, numel: int) -> bool:
        """Whether the input belongs in a bucket, and this one must be closed to make room for it."""
        return not self.alone(numel) and numel > self.capacity - self.offset

    def place(self, numel: int) -> Slot:
        """The slot of the next input, `numel` elements per shard."""
        if self.alone(numel):
            return Slot(None, 0)
        if self.too_full(numel):
            self.close()
        slot = Slot(self.bucket, self.offset)
        self.offset += numel
        return slot

    def close(self) -> None:
        """Ends the bucket; the next input starts another."""
        self.bucket += 1
        self.offset = 0


def shard_capacity(bucket_cap_mb: float, itemsize: int, world_size: int) -> int:
    """Elements per shard of a bucket of `bucket_cap_mb` MiB over all shards; 0 if the cap is <= 0."""
    return max(0, int(bucket_cap_mb * MIB / itemsize // world_size))


# --- buckets ---------------------------------------------------------------------------------------


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


class _Entry(NamedTuple):
    numel: int
    shape: torch.Size
    callback: Callback | None


# A callback with the result it waits for.
_Ready = tuple[Callback, Tensor]


@dataclass(eq=False)
class Bucket:
    """Inputs of one (dtype, device, group), waiting for one reduce-scatter."""

    group: ProcessGroup
    dtype: torch.dtype
    device: torch.device
    layout: BucketLayout
    counters: BucketCounters
    _entries: list[_Entry] = field(default_factory=list)
    # Flat, in elements: what came in, what is sent, what comes back. Empty until needed.
    _staged: Tensor = field(init=False)
    _packed: Tensor = field(init=False)
    _output: Tensor = field(init=False)
    _high_water: int = 0  # elements staged at most, kept over teardown

    def __post_init__(self) -> None:
        self._staged, self._packed, self._output = (
            torch.empty(0, dtype=self.dtype, device=self.device) for _ in range(3)
        )

    @property
    def pending(self) -> int:
        """Inputs that wait for a flush."""
        return len(self._entries)

    @property
    def offset(self) -> int:
        """Elements per shard that wait for a flush."""
        return self.layout.offset

    def setup(self) -> None:
        """Allocates the room the bucket needed last time. Adding an input does the same."""
        if self._high_water > self._staged.numel():
            self._resize(self._staged, self._high_water, keep=True)

    def teardown(self) -> None:
        """Frees the buffers; the next input allocates them again.

        Raises:
            BucketError: inputs still wait for a flush.
        """
        self._check_empty()
        for buffer in (self._staged, self._packed, self._output):
            self._resize(buffer, 0, keep=False)

    def flush(self) -> None:
        """Reduces what waits, then calls the callbacks in order of arrival.

        Raises:
            Exception: what a callback raised, once all have been called; an ExceptionGroup of several.
        """
        _call_all(self._reduce())

    def _check_empty(self) -> None:
        if self._entries:
            raise BucketError(
                f"got teardown with {self.pending} inputs ({self.offset} elements per shard, {self.dtype}) "
                "waiting, expected none: call flush() before teardown()"
            )

    def _add(self, shards: Sequence[Tensor], callback: Callback | None) -> None:
        """Stages an input that fits."""
        numel, world_size = shards[0].numel(), len(shards)
        start = self.layout.offset * world_size
        end = start + numel * world_size
        if end > self._staged.numel():
            room = max(end, 2 * self._staged.numel(), self._high_water, FIRST_ELEMENTS)
            self._resize(self._staged, min(room, self.layout.capacity * world_size), keep=True)
        self._high_water = max(self._high_water, end)
        if numel:
            _concatenate(shards, self._staged[start:end])
            self.counters.bytes_copied += (end - start) * self.dtype.itemsize
        self.layout.place(numel)
        self._entries.append(_Entry(numel, shards[0].shape, callback))

    def _reduce(self) -> list[_Ready]:
        """Issues the collective and empties the bucket; returns the callbacks that are now due."""
        entries, total = self._entries, self.layout.offset
        if total:
            if total > self._output.numel():
                self._resize(self._output, self._staged.numel() // self.group.size(), keep=False)
            comm.reduce_scatter(self._output[:total], self._pack(), self.group)
            self.counters.collectives += 1
        output = self._output[:total]
        self._entries = []
        self.layout.close()
        ready: list[_Ready] = []
        for entry, result in zip(entries, torch.split(output, [e.numel for e in entries]), strict=True):
            if entry.callback is not None:
                # A copy: a view that a caller keeps would keep the whole output alive, and the next
                # flush, which a callback may cause, would overwrite it.
                ready.append((entry.callback, result.clone().view(entry.shape)))
                self.counters.bytes_copied += result.nbytes
        return ready

    def _pack(self) -> Tensor:
        """What is staged, in the order of the collective: shards of rank 0, of rank 1, ... (flat)."""
        world_size, total = self.group.size(), self.layout.offset
        staged = self._staged[: world_size * total]
        runs = [(n, len(list(run))) for n, run in itertools.groupby(e.numel for e in self._entries) if n]
        if world_size == 1 or (len(runs) == 1 and runs[0][1] == 1):
            return staged  # one rank or one input: both orders are the same
        if staged.numel() > self._packed.numel():
            self._resize(self._packed, self._staged.numel(), keep=False)
        packed = self._packed[: staged.numel()]
        rows, source, offset = packed.view(world_size, total), 0, 0
        for numel, count in runs:
            block = staged[source : source + count * world_size * numel].view(count, world_size, numel)
            part = rows[:, offset : offset + count * numel].view(world_size, count, numel)
            part.copy_(block.transpose(0, 1))
            source, offset = source + block.numel(), offset + count * numel
        self.counters.bytes_copied += packed.nbytes
        return packed

    def _resize(self, buffer: Tensor, numel: int, *, keep: bool) -> None:
        """Gives `buffer` another size in place; its content is kept, or else freed before it grows."""
        storage, before = buffer.untyped_storage(), buffer.untyped_storage().nbytes()
        if keep:
            self.counters.hold(numel * buffer.itemsize)
            self.counters.bytes_copied += before
            buffer.resize_(numel)
            self.counters.hold(-before)
        else:
            self.counters.hold(-before)
            storage.resize_(0)
            buffer.resize_(numel)
            self.counters.hold(numel * buffer.itemsize)


class ReduceScatterBucketer:
    """Reduce-scatters (sums) lists of tensors, bundling small ones by dtype, device and group.

    Usage::

        bucketer = ReduceScatterBucketer()
        bucketer.reduce_scatter_async(small, group, lambda result: print("small"))
        bucketer.reduce_scatter_async(large, group, lambda result: print("large"))
        bucketer.flush()  # only now has every callback been called
        # prints "large", "small": what does not fit in a bucket does not wait for it

    Every rank of a group must hand over inputs of the same shapes in the same order.

    Args:
        bucket_cap_mb: size of a bucket over all shards, in MiB (1024^2 bytes); <= 0 reduces every input
            at once. Buffers grow as needed, up to about 2 + 1/n times this for each bucket.
    """

    def __init__(self, bucket_cap_mb: float = 25) -> None:
        if not isinstance(bucket_cap_mb, int | float) or not math.isfinite(bucket_cap_mb):
            raise BucketError(
                f"got bucket_cap_mb={bucket_cap_mb!r}, expected a finite number of MiB: 0 disables buckets"
            )
        self.bucket_cap_mb = bucket_cap_mb
        self.buckets: dict[tuple[torch.dtype, torch.device, ProcessGroup], Bucket] = {}
        self.counters = BucketCounters()

    def reduce_scatter_async(
        self,
        input_list: Sequence[Tensor],  # n tensors, the r-th for rank r
        group: ProcessGroup,
        callback_fn: Callback | None = None,
    ) -> None:
        """Hands over one input; `callback_fn` is called with the result, shaped as this rank's input.

        It is called at the latest by `flush()`, and by this very call for an input larger than a bucket.
        A bucket with too little room left is flushed first. The tensors of the input may be changed as
        soon as this returns, and the result is the callback's to keep.

        Raises:
            BucketError: not one tensor per rank of `group`, or tensors that differ in shape, dtype or
                device.
            Exception: what a callback that became due has raised; this input is safe in its bucket.
        """
        _check(input_list, group)
        first = input_list[0]
        bucket = self._bucket_of(first, group)
        if torch.is_grad_enabled():
            with torch.no_grad():
                self._hand_over(bucket, input_list, callback_fn)
        else:  # in a backward pass; entering no_grad would cost 1.7 us of about 10
            self._hand_over(bucket, input_list, callback_fn)

    def _hand_over(self, bucket: Bucket, shards: Sequence[Tensor], callback: Callback | None) -> None:
        numel = shards[0].numel()
        if bucket.layout.alone(numel):
            _call_all(self._reduce_alone(shards, bucket.group, callback))
            return
        ready = bucket._reduce() if bucket.layout.too_full(numel) else []
        try:
            bucket._add(shards, callback)
        finally:
            _call_all(ready)

    @torch.no_grad()
    def flush(self) -> None:
        """Reduces what waits in all buckets and calls the callbacks. What these hand over waits again.

        Raises:
            Exception: what a callback raised, once all buckets are flushed; an ExceptionGroup of several.
        """
        errors: list[Exception] = []
        for bucket in list(self.buckets.values()):
            errors += _errors_of(bucket._reduce())
        _raise(errors)

    @torch.no_grad()
    def teardown(self) -> None:
        """Frees the buffers of all buckets.

        Raises:
            BucketError: inputs still wait for a flush; nothing is freed then.
        """
        for bucket in self.buckets.values():
            bucket._check_empty()
        for bucket in self.buckets.values():
            bucket.teardown()

    def _bucket_of(self, tensor: Tensor, group: ProcessGroup) -> Bucket:
        key = (tensor.dtype, tensor.device, group)
        bucket = self.buckets.get(key)
        if bucket is None:
            capacity = shard_capacity(self.bucket_cap_mb, tensor.itemsize, group.size())
            bucket = self.buckets[key] = Bucket(
                group, tensor.dtype, tensor.device, BucketLayout(capacity), self.counters
            )
        return bucket

    def _reduce_alone(
        self, shards: Sequence[Tensor], group: ProcessGroup, callback: Callback | None
    ) -> list[_Ready]:
        first = shards[0]
        output = torch.empty(first.shape, dtype=first.dtype, device=first.device)
        if first.numel():
            flat = _as_one(shards)
            copied = 0
            if flat is None:
                flat = torch.empty(len(shards) * first.numel(), dtype=first.dtype, device=first.device)
                copied = flat.nbytes
                _concatenate(shards, flat)
            self.counters.bytes_copied += copied
            self.counters.hold(copied)
            self.counters.collectives += 1
            comm.reduce_scatter(output.view(-1), flat, group)
            self.counters.hold(-copied)
        return [] if callback is None else [(callback, output)]


def _check(shards: Sequence[Tensor], group: ProcessGroup) -> None:
    if not isinstance(group, ProcessGroup):
        raise BucketError(
            f"got {group!r} as the group, expected a process group that this rank belongs to: "
            "call only on its members"
        )
    if len(shards) != group.size():
        raise BucketError(
            f"reduce_scatter received {len(shards)} inputs, expected group.size() ({group.size()}): "
            "pass one tensor for each rank of the group"
        )
    first = shards[0]
    shape, dtype, device = first.shape, first.dtype, first.device
    for rank, shard in enumerate(shards):
        if shard.shape != shape or shard.dtype is not dtype or shard.device != device:
            raise BucketError(
                f"got input {rank} of {_describe(shard)} beside input 0 of {_describe(first)}, "
                "expected the same shape, dtype and device: pad or convert the inputs first"
            )


def _concatenate(shards: Sequence[Tensor], out: Tensor) -> None:
    """Copies the shards into `out` (flat), one after the other, each in row-major order."""
    first = shards[0]
    if first.ndim == 0:
        torch.stack(list(shards), out=out)
    elif first.ndim == 1:
        torch.cat(list(shards), out=out)
    else:  # joined on dim 0 they lie as if each had been flattened, which would cost a view per shard
        torch.cat(list(shards), out=out.view(-1, *first.shape[1:]))


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} on {tensor.device}"


def _as_one(shards: Sequence[Tensor]) -> Tensor | None:
    """The shards as one flat view, where they lie one after the other in one storage (chunks of a
    gradient do), so that a large input need not be copied."""
    first, numel = shards[0], shards[0].numel()
    storage = first.untyped_storage().data_ptr()
    for rank, shard in enumerate(shards):
        if (
            not shard.is_contiguous()
            or shard.untyped_storage().data_ptr() != storage
            or shard.storage_offset() != first.storage_offset() + rank * numel
        ):
            return None
    return first.as_strided((len(shards) * numel,), (1,))


def _call_all(ready: list[_Ready]) -> None:
    _raise(_errors_of(ready))


def _errors_of(ready: list[_Ready]) -> list[Exception]:
    """Calls every callback, whatever the others raise; what was raised."""
    errors: list[Exception] = []
    ready.reverse()
    while ready:
        callback, result = ready.pop()  # lets go of each result as soon as its callback has had it
        try:
            callback(result)
        except Exception as error:
            errors.append(error)
        del result
    return errors


def _raise(errors: list[Exception]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ExceptionGroup(f"{len(errors)} callbacks of reduce_scatter_async raised", errors)
