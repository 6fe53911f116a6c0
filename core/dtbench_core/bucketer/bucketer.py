"""Bundles many small reduce-scatters into few large ones, and reduces one bucket while the next fills.

A bucket collects inputs of one dtype, device and group. When the next input does not fit, the bucket's collective is
issued, and the collective before it is waited for. So one collective runs while a bucket fills, and two buffers are
enough. Each collective writes to a new output tensor, and the results of the bucket are views of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dtbench_core.bucketer.bucket import (
    CHECK_RANKS,
    Bucket,
    Callback,
    CheckRanks,
    Op,
    PendingCallbacks,
    Reduction,
)
from dtbench_core.bucketer.inputs import CheckedInput, check_gradient, check_group, check_input
from dtbench_core.bucketer.packing import JOIN_BYTES, BucketCounters, BucketError, as_contiguous_rows

MIB = 1024**2
_dtype, _requires_grad = attrgetter("dtype"), attrgetter("requires_grad")


class GradientFeed(ExitStack):
    """The hooks on one module's parameters. `remove()`, or leaving it as a context, removes them."""

    remove = ExitStack.close


class ReduceScatterBucketer:
    """Reduce-scatters lists of tensors, bundling small ones by dtype, device and group.

    Usage::

        bucketer = ReduceScatterBucketer()
        bucketer.reduce_scatter_async(small, group, lambda result: print("small"))
        bucketer.reduce_scatter_async(large, group, lambda result: print("large"))
        bucketer.flush()  # only after this have all callbacks been called
        # prints "large", "small": an input larger than a bucket is reduced at once

    Every rank of a group must pass inputs of the same shapes in the same order. Only one thread at a time may use a
    bucketer. On CUDA, inputs may arrive on different streams: each bucket waits for the streams of its inputs. The
    tensors may be those of simulated ranks.

    Args:
        bucket_cap_mb: size of a bucket over all shards, in MiB (1024^2 bytes). With 0 or less, every input is reduced
            at once. At most two buffers of this size are allocated for each (dtype, device, group).
        op: "sum"; "avg", the sum over the ranks divided by their number; "premul", the sum of the inputs times
            `factor`.
        factor: the factor of "premul".
        reduce_dtype: the dtype that inputs are converted to before the sum; the result is converted back.
        hold_inputs: keep inputs instead of copying them on arrival. This is twice as fast for small tensors passed as
            one tensor. Inputs must then not be changed before their callback. A change raises an error, unless it was
            made in a way that torch cannot detect.
        check_ranks: when ranks compare the shapes that they are about to reduce, with an additional small collective:
            in the "first" round (until the first flush), "always" or "never".
    """

    def __init__(
        self,
        bucket_cap_mb: float = 25,
        *,
        op: Op = "sum",
        factor: float | None = None,
        reduce_dtype: torch.dtype | None = None,
        hold_inputs: bool = False,
        check_ranks: CheckRanks = "first",
    ) -> None:
        if not isinstance(bucket_cap_mb, int | float) or not math.isfinite(bucket_cap_mb):
            raise BucketError(
                f"got bucket_cap_mb={bucket_cap_mb!r}, expected a finite number of MiB: 0 disables buckets"
            )
        if op not in ("sum", "avg", "premul") or (op == "premul") != (factor is not None):
            raise BucketError(
                f"got op={op!r} with factor={factor!r}, expected 'sum', 'avg', or 'premul' with a factor: "
                "pass a factor with premul only"
            )
        if check_ranks not in CHECK_RANKS:
            raise BucketError(f"got check_ranks={check_ranks!r}, expected one of {', '.join(CHECK_RANKS)}")
        self.bucket_cap_mb = bucket_cap_mb
        self.reduction = Reduction(op, 1.0 if factor is None else factor, reduce_dtype)
        self.hold_inputs, self.check_ranks = hold_inputs, check_ranks
        self.buckets: dict[tuple[torch.dtype, torch.device, ProcessGroup], Bucket] = {}
        self.counters = BucketCounters()

    def reduce_scatter_async(
        self,
        input_list: Sequence[Tensor] | Tensor,  # n tensors, the r-th for rank r; or one, (n * rows, ...)
        group: ProcessGroup,
        callback_fn: Callback | None = None,
    ) -> None:
        """Adds an input. `callback_fn` is called with this rank's part of the sum over all ranks' inputs.

        The callback is called by `flush()` at the latest. For an input larger than a bucket, this method calls it,
        unless inputs are held. If a bucket has too little room left, it is reduced first, and the callbacks of the
        bucket before it are called. The tensors may be changed after this returns, unless inputs are held. The
        callback may keep the result. Callbacks run without autograd.

        The results of one bucket are views of one tensor of bucket_cap_mb / n, so keeping one keeps all that memory.
        Clone a small result that outlives the others.

        Args:
            input_list: n tensors of one shape, which is that of the result; or a single tensor whose dim 0 is split
                into n equal parts, with the shape of the result. Of a DTensor, the local part is used. If it is
                Partial along a mesh dim with this group, the result is a DTensor sharded there.
            group: the process group of n ranks.
            callback_fn: takes the result.

        Raises:
            BucketError: not one tensor per rank of `group`; tensors that differ in shape, dtype or device; a dim 0
                that n does not divide; ranks that disagree.
            Exception: raised by a callback that became due. The new input has been added nevertheless.
        """
        # The common cases need few checks; `check_input` handles all other inputs, and mistakes.
        if type(input_list) is Tensor:
            open_bucket = self.buckets.get((input_list.dtype, input_list.device, group))
            if open_bucket is not None and open_bucket.add_flat(input_list, callback_fn):
                return
        elif type(input_list) is list and self._add_small_tensors(input_list, group, callback_fn):
            return
        checked = check_input(input_list, group, self.hold_inputs)
        self._bucket_of(checked, group).add(
            checked.source,
            checked.numel,
            callback_fn,
            None if checked.shape is None and checked.rewrap is None else (checked.shape, checked.rewrap),
        )

    def _add_small_tensors(
        self, inputs: list[Tensor], group: ProcessGroup, callback: Callback | None
    ) -> bool:
        """Stacks tensors that are cheaper to copy as one, and adds the stack.

        Returns False if they are not cheaper, or need the checks of `check_input`.
        """
        if not inputs or set(map(type, inputs)) != {Tensor}:
            return False
        first = inputs[0]
        bucket = self.buckets.get((first.dtype, first.device, group))
        numel = first.numel()
        if (
            bucket is None
            or len(inputs) != bucket.world_size
            or numel * first.itemsize >= (JOIN_BYTES if first.is_cpu else 0)
            or len(set(map(_dtype, inputs))) > 1
        ):
            return False
        if bucket.hold_inputs:  # chunks of one tensor are held without a copy
            same_shape = len(set(map(Tensor.size, inputs))) == 1 and not any(map(_requires_grad, inputs))
            view = as_contiguous_rows(inputs) if same_shape and numel else None
            if view is not None:
                bucket.add(view, numel, callback, None if first.ndim == 1 else (first.shape, None))
            return view is not None
        try:
            stacked = torch.stack(inputs)
        except (RuntimeError, NotImplementedError):  # different shapes or devices
            return False
        if stacked.requires_grad or stacked.device != first.device:
            return False
        bucket.counters.bytes_copied += stacked.nbytes
        bucket.add(
            stacked.view(bucket.world_size, numel),
            numel,
            callback,
            None if stacked.ndim == 2 else (first.shape, None),
        )
        return True

    def flush(self) -> None:
        """Reduces the waiting inputs of all buckets and calls the callbacks.

        Inputs that callbacks add wait for the next flush.

        Raises:
            Exception: raised by a callback, after all buckets are flushed; an ExceptionGroup of several.
        """
        outcome = PendingCallbacks()
        buckets = list(self.buckets.values())
        for bucket in buckets:  # issue all collectives before waiting for the first
            bucket.close(outcome, by_flush=True)
        for bucket in buckets:
            bucket.drain(outcome)
        outcome.end()

    def teardown(self) -> None:
        """Frees the buffers of all buckets.

        Raises:
            BucketError: inputs still wait for a flush; nothing is freed then.
        """
        for bucket in self.buckets.values():
            bucket.check_empty()
        for bucket in self.buckets.values():
            bucket.teardown()

    def attach(
        self, module: nn.Module, group: ProcessGroup, on_shard: Callable[[nn.Parameter, Tensor], object]
    ) -> GradientFeed:
        """Reduces the gradient of each of `module`'s parameters as soon as a backward pass has computed it.

        The gradient is removed from the parameter. `on_shard(parameter, shard)` is called with this rank's part,
        (ceil(numel / n),), of the gradient flattened and padded with zeros. Call `flush()` after `backward()`.

        Gradients are not copied on arrival, even without `hold_inputs`, so the backward pass never waits for the
        collective that it has just issued. No other code may change a gradient until the callback with its shard.

        Returns:
            A handle; `remove()` removes the hooks.
        """
        check_group(group)

        def reduce_gradient(parameter: nn.Parameter) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                with torch.no_grad():
                    checked = check_gradient(gradient, group)
                    self._bucket_of(checked, group).add(
                        checked.source, checked.numel, partial(on_shard, parameter), hold=True
                    )

        hooks = GradientFeed()
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooks.callback(parameter.register_post_accumulate_grad_hook(reduce_gradient).remove)
        return hooks

    def _bucket_of(self, checked: CheckedInput, group: ProcessGroup) -> Bucket:
        """Returns the bucket for an input; creates it for the first input of its dtype, device and group."""
        if (bucket := self.buckets.get((checked.dtype, checked.device, group))) is not None:
            return bucket
        self.reduction.check(checked.dtype)
        itemsize = self.reduction.dtype_of(checked.dtype).itemsize
        bucket = self.buckets[checked.dtype, checked.device, group] = Bucket(
            group,
            checked.dtype,
            checked.device,
            max(0, int(self.bucket_cap_mb * MIB / itemsize // group.size())),
            self.counters,
            self.reduction,
            self.hold_inputs,
            self.check_ranks,
        )
        return bucket
