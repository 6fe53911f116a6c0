"""Bundles many small reduce-scatters into few large ones, and reduces one bucket while the next fills.

A bucket collects inputs of one dtype, device and group. When the next input does not fit, its collective is issued and
the one before it is waited for. So one collective runs while a bucket fills, and two buffers are enough. Each
collective writes to an output of its own, which the results of the bucket are parts of.
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
from dtbench_core.bucketer.inputs import Intake, check_group, take_gradient, take_in
from dtbench_core.bucketer.packing import JOIN_BYTES, BucketCounters, BucketError, side_by_side

MIB = 1024**2
_dtype, _requires_grad = attrgetter("dtype"), attrgetter("requires_grad")


class GradientFeed(ExitStack):
    """The hooks of one module. `remove()`, or leaving it as a context, takes them off."""

    remove = ExitStack.close


class ReduceScatterBucketer:
    """Reduce-scatters lists of tensors, bundling small ones by dtype, device and group.

    Usage::

        bucketer = ReduceScatterBucketer()
        bucketer.reduce_scatter_async(small, group, lambda result: print("small"))
        bucketer.reduce_scatter_async(large, group, lambda result: print("large"))
        bucketer.flush()  # only now has every callback been called
        # prints "large", "small": what does not fit in a bucket does not wait for it

    Every rank of a group must hand over inputs of the same shapes in the same order. A bucketer is for one thread at a
    time. On CUDA, inputs may come on different streams: each bucket waits for the streams of its inputs. The tensors
    may be simulated ranks' too.

    Args:
        bucket_cap_mb: size of a bucket over all shards, in MiB (1024^2 bytes); <= 0 reduces every input
            at once. At most two buffers of this size are allocated for each (dtype, device, group).
        op: "sum"; "avg", the sum over the ranks divided by their number; "premul", the sum of the inputs
            times `factor`.
        factor: of "premul".
        reduce_dtype: what inputs are converted to before they are added up; the result is converted back.
        hold_inputs: keep inputs instead of copying them when they are handed over: twice as fast for small
            tensors, given whole. They must then not be changed before their callback; a change is an error, unless it
            was made behind torch's back.
        check_ranks: when ranks compare the shapes they are about to reduce, with one more small collective:
            in the "first" round (up to the first flush), "always" or "never".
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
                "the factor belongs to premul alone"
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
        """Hands over one input; `callback_fn` is called with what all ranks' inputs for this rank add up to.

        It is called at the latest by `flush()`; by this very call for an input larger than a bucket,
        unless inputs are held. A bucket with too little room left is reduced first, and callbacks of the
        one before it are called. The tensors may be changed as soon as this returns, unless inputs are
        held, and the result is the callback's to keep. Callbacks run without autograd.

        The results of one bucket are parts of one tensor of bucket_cap_mb / n: keeping one keeps that memory.
        Clone a small result that is to outlive the others.

        Args:
            input_list: tensors of one shape, which the result has; or a single tensor whose dim 0 is cut
                into n equal parts, of which the result is one. Of a DTensor its local part is taken; one
                that is Partial along a mesh dim whose group this is gives the DTensor sharded there.

        Raises:
            BucketError: not one tensor per rank of `group`, tensors that differ in shape, dtype or device,
                a dim 0 that n does not divide; ranks that disagree.
            Exception: what a callback that became due has raised; this input is safe in its bucket.
        """
        # The common case has the fewest checks; `take_in` handles the rest, and mistakes.
        if type(input_list) is Tensor:
            open_bucket = self.buckets.get((input_list.dtype, input_list.device, group))
            if open_bucket is not None and open_bucket.add_flat(input_list, callback_fn):
                return
        elif type(input_list) is list and self._take_small_tensors(input_list, group, callback_fn):
            return
        taken = take_in(input_list, group, self.hold_inputs)
        bucket = self._bucket_of(taken, group)
        finish = None if taken.shape is None and taken.rewrap is None else (taken.shape, taken.rewrap)
        bucket.add(taken.source, taken.numel, callback_fn, finish)

    def _take_small_tensors(
        self, inputs: list[Tensor], group: ProcessGroup, callback: Callback | None
    ) -> bool:
        """Joins tensors that are cheaper to copy as one. Returns False if they are not, or need `take_in`'s checks."""
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
        if bucket.hold_inputs:  # chunks of one tensor need no copy
            same_shape = len(set(map(Tensor.size, inputs))) == 1 and not any(map(_requires_grad, inputs))
            view = side_by_side(inputs) if same_shape and numel else None
            if view is not None:
                bucket.add(view, numel, callback, None if first.ndim == 1 else (first.shape, None))
            return view is not None
        try:
            joined = torch.stack(inputs)
        except (RuntimeError, NotImplementedError):  # of different shapes, or on different devices
            return False
        if joined.requires_grad or joined.device != first.device:
            return False
        bucket.counters.bytes_copied += joined.nbytes
        finish = None if joined.ndim == 2 else (first.shape, None)
        bucket.add(joined.view(bucket.world_size, numel), numel, callback, finish)
        return True

    def flush(self) -> None:
        """Reduces what waits in all buckets and calls the callbacks. What these hand over waits again.

        Raises:
            Exception: what a callback raised, once all buckets are flushed; an ExceptionGroup of several.
        """
        outcome = PendingCallbacks()
        buckets = list(self.buckets.values())
        for bucket in buckets:  # all are under way before the first is waited for
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
        """Hands over the gradient of each of `module`'s parameters as soon as a backward pass has it.

        The gradient is taken off the parameter. `on_shard(parameter, shard)` is called with this rank's part,
        (ceil(numel / n),), of the gradient flattened and padded with zeros. Call `flush()` after `backward()`.

        Gradients are not copied on arrival, whatever `hold_inputs` says, so the backward pass never waits for the
        collective that it has just issued. Nobody else may change a gradient until its shard is there.

        Returns:
            A handle: `remove()` takes the hooks off again.
        """
        check_group(group)

        def take(parameter: nn.Parameter) -> None:
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                with torch.no_grad():
                    taken = take_gradient(gradient, group)
                    bucket = self._bucket_of(taken, group)
                    bucket.add(taken.source, taken.numel, partial(on_shard, parameter), hold=True)

        hooks = GradientFeed()
        for parameter in module.parameters():
            if parameter.requires_grad:
                hooks.callback(parameter.register_post_accumulate_grad_hook(take).remove)
        return hooks

    def _bucket_of(self, taken: Intake, group: ProcessGroup) -> Bucket:
        """Returns the bucket for an input, new if it is the first of its dtype, device and group."""
        bucket = self.buckets.get((taken.dtype, taken.device, group))
        if bucket is not None:
            return bucket
        self.reduction.check(taken.dtype)
        itemsize = self.reduction.dtype_of(taken.dtype).itemsize
        capacity = max(0, int(self.bucket_cap_mb * MIB / itemsize // group.size()))
        bucket = Bucket(
            group,
            taken.dtype,
            taken.device,
            capacity,
            self.counters,
            self.reduction,
            self.hold_inputs,
            self.check_ranks,
        )
        self.buckets[taken.dtype, taken.device, group] = bucket
        return bucket
