"""The reference bucketer: fairscale's algorithm, reimplemented from its description.

A bucket is a zeroed buffer of n rows, each of the full capacity. The shards of an input are stacked and copied into
the rows. A flush makes the filled columns contiguous, reduces them in one collective and zeroes them; the next bucket
gets a new zeroed output. So each byte is copied three times and zeroed once. Callbacks receive views of the output.

Unlike fairscale's, the collective gets flat tensors, because gloo and the fake backend reject two-dimensional inputs.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dtbench_core.torch_compat import reduce_scatter_single
from dtbench_suites.data import MIB


class _ReferenceBucket:
    def __init__(self, like: Tensor, group: ProcessGroup, capacity: int) -> None:
        self.group = group
        self.rows = like.new_zeros(group.size(), capacity)
        self.output = like.new_zeros(capacity)
        self.filled = 0
        self.waiting: list[Callable[[], object]] = []

    def take(self, shards: Sequence[Tensor], callback: Callable[[Tensor], object] | None) -> None:
        numel = shards[0].numel()
        end = self.filled + numel
        self.rows[:, self.filled : end].copy_(torch.stack(list(shards)).view(len(shards), numel))
        if callback is not None:
            self.waiting.append(partial(callback, self.output[self.filled : end].view_as(shards[0])))
        self.filled = end

    def flush(self) -> None:
        packed = self.rows[:, : self.filled].contiguous()
        reduce_scatter_single(self.output[: self.filled], packed.view(-1), group=self.group)
        for call in self.waiting:
            call()
        self.waiting.clear()
        self.rows[:, : self.filled].zero_()
        self.filled = 0
        self.output = torch.zeros_like(self.output)


class ReferenceBucketer:
    """Has the interface of `dtbench_core.ReduceScatterBucketer`, for lists of one dtype, device and group."""

    def __init__(self, bucket_cap_mb: float = 25) -> None:
        self.bucket_cap_mb = bucket_cap_mb
        self.collectives = 0
        self._bucket: _ReferenceBucket | None = None

    @torch.no_grad()
    def reduce_scatter_async(
        self,
        shards: Sequence[Tensor],
        group: ProcessGroup,
        callback: Callable[[Tensor], object] | None = None,
    ) -> None:
        """Reduces the shards immediately if they exceed a bucket, otherwise when the bucket is full."""
        first, n = shards[0], len(shards)
        if n != group.size():
            raise ValueError(f"got {n} tensors, expected {group.size()}: one per rank of the group")
        capacity = int(self.bucket_cap_mb * MIB / first.element_size() // n)
        if first.numel() > capacity:
            output = torch.zeros_like(first)
            reduce_scatter_single(output.view(-1), torch.cat(list(shards)).view(-1), group=group)
            self.collectives += 1
            if callback is not None:
                callback(output)
            return
        if self._bucket is None:
            self._bucket = _ReferenceBucket(first, group, capacity)
        if first.numel() > capacity - self._bucket.filled:
            self.flush()
        self._bucket.take(shards, callback)

    @torch.no_grad()
    def flush(self) -> None:
        if self._bucket is not None and self._bucket.filled:
            self.collectives += 1
            self._bucket.flush()
