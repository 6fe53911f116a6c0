"""A bucket: the inputs of one dtype, device and group that wait for their collective or are being reduced."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from dtbench_core import comm
from dtbench_core.bucketer.packing import (
    ALIGN_BYTES,
    FIRST_ELEMENTS,
    BucketCounters,
    BucketError,
    BufferPool,
    HeldInputs,
    Rows,
    Source,
    aligned,
    as_rows,
    check_unchanged,
    versions_of,
)
from dtbench_core.torch_compat import is_capturing

Callback = Callable[[Tensor], object]
Op = Literal["sum", "avg", "premul"]
# When ranks compare the shapes of their inputs before a collective. "first" means until the first flush.
CheckRanks = Literal["first", "always", "never"]
CHECK_RANKS: tuple[CheckRanks, ...] = ("first", "always", "never")

# How a result that is not flat is converted: (its shape, a function that makes a DTensor of it).
ResultForm = tuple[tuple[int, ...] | None, Callable[[Tensor], Tensor] | None]


@dataclass
class PendingCallbacks:
    """The callbacks and errors that one call to the bucketer (add or flush) has to deliver.

    They are kept until the bookkeeping of the operation is done, since callbacks may use the bucketer.

    Attributes:
        due: callbacks of a bucket, with their results.
        errors: errors of collectives and callbacks.
    """

    due: list[tuple[list[Callback | None], list[Tensor]]] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def call(self) -> None:
        """Calls every callback, even if some raise."""
        with torch.no_grad():
            while self.due:
                callbacks, results = self.due.pop(0)
                results.reverse()
                for callback in callbacks:
                    result = results.pop()  # removed, so that it is freed after its callback
                    if callback is None:
                        continue
                    try:
                        callback(result)
                    except Exception as error:
                        self.errors.append(error)
                    del result

    def end(self) -> None:
        if self.due:
            self.call()
        if len(self.errors) == 1:
            raise self.errors[0]
        if self.errors:
            raise ExceptionGroup(
                f"{len(self.errors)} callbacks or collectives of a bucketer raised", self.errors
            )


@dataclass
class SizePredictor:
    """Predicts how full the next bucket will be, in elements per shard.

    Training steps repeat, so a bucket is expected to be as full as the same bucket of the last round (from flush to
    flush). If it is, its inputs are copied to their final places at once.

    Attributes:
        last_round: size of each bucket of the last round.
        this_round: size of each bucket of this round so far.
    """

    last_round: list[int] = field(default_factory=list)
    this_round: list[int] = field(default_factory=list)

    def next_total(self) -> int:
        """Returns the expected size; 0 without a prediction."""
        index = len(self.this_round)
        if index < len(self.last_round):
            return self.last_round[index]
        return self.this_round[-1] if self.this_round else 0

    def end_round(self) -> None:
        """Starts a new round, unless this one had no inputs."""
        if self.this_round:
            self.last_round, self.this_round = self.this_round, []


@dataclass(frozen=True)
class Reduction:
    """How a bucketer reduces.

    Attributes:
        op: see `ReduceScatterBucketer`.
        factor: the factor of "premul".
        dtype: the dtype of the sums; None for that of the inputs.
    """

    op: Op = "sum"
    factor: float = 1.0
    dtype: torch.dtype | None = None

    def dtype_of(self, input_dtype: torch.dtype) -> torch.dtype:
        return input_dtype if self.dtype is None else self.dtype

    def check(self, input_dtype: torch.dtype) -> None:
        sum_dtype = self.dtype_of(input_dtype)
        if self.op != "sum" and not (sum_dtype.is_floating_point or sum_dtype.is_complex):
            raise BucketError(
                f"got inputs of {input_dtype} to reduce in {sum_dtype} by {self.op!r}, expected a floating or complex "
                "dtype: use op='sum', or reduce_dtype"
            )
        if input_dtype.is_complex and not sum_dtype.is_complex:
            raise BucketError(
                f"got inputs of {input_dtype} to reduce in {sum_dtype}, expected a complex reduce_dtype, to keep the "
                "imaginary part"
            )

    def finish(self, total: Tensor, input_dtype: torch.dtype, n: int) -> Tensor:
        """Divides the sums by n for "avg", in place, and returns them in the dtype of the inputs."""
        if self.op == "avg":
            total /= n
        return total if total.dtype is input_dtype else total.to(input_dtype)


@dataclass(eq=False)
class PendingBucket:
    """The contents of a bucket, from its first input to its callbacks.

    Attributes:
        packing: collects the inputs; None for a single input that is reduced without packing.
        numels: elements per shard of each input.
        callbacks: the callback of each input.
        result_forms: index of an input -> form of its result, for results that are not flat.
        work: the collective's Work while it runs.
        output: (row,), this rank's part of the sums, which the results share.
        buffer: the pool's buffer that the collective reads.
        order: see `Packed`.
        single_input: the single input that the collective reads, if `packing` is None.
        single_input_version: its version on arrival.
        copied: bytes of `single_input` if it is a copy.
    """

    packing: Rows | HeldInputs | None
    numels: list[int] = field(default_factory=list)
    callbacks: list[Callback | None] = field(default_factory=list)
    result_forms: dict[int, ResultForm] = field(default_factory=dict)
    work: Work | None = None
    output: Tensor | None = None
    buffer: Tensor | None = None
    order: list[int] | None = None
    single_input: Tensor | None = None
    single_input_version: int = 0
    copied: int = 0

    def append(self, numel: int, callback: Callback | None, result_form: ResultForm | None) -> None:
        if result_form is not None:
            self.result_forms[len(self.numels)] = result_form
        self.numels.append(numel)
        self.callbacks.append(callback)


@dataclass(eq=False)
class Bucket:
    """Inputs of one (dtype, device, group): those that wait, and those in a running collective.

    Attributes:
        group, dtype, device: common to all inputs.
        capacity: elements per shard; 0 to reduce every input alone.
        counters: the counters of the bucketer.
        reduction, hold_inputs, check_ranks: see `ReduceScatterBucketer`.
        predictor: predicts the size of the next bucket.
        offset: elements per shard that wait for a collective.
    """

    group: ProcessGroup
    dtype: torch.dtype
    device: torch.device
    capacity: int
    counters: BucketCounters
    reduction: Reduction = Reduction()
    hold_inputs: bool = False
    check_ranks: CheckRanks = "never"
    predictor: SizePredictor = field(default_factory=SizePredictor)

    def __post_init__(self) -> None:
        self.offset = 0
        self.world_size = self.group.size()
        sum_dtype = self.reduction.dtype_of(self.dtype)
        # Shards are aligned both in the dtype of the inputs and in that of the sums.
        self._unit = max(1, ALIGN_BYTES // min(self.dtype.itemsize, sum_dtype.itemsize))
        self.pool = BufferPool(sum_dtype, self.device, self.counters)
        self._pending: PendingBucket | None = None
        self._in_flight: deque[PendingBucket] = deque()  # in order of issue
        # torch's fake group has only one rank, and its collectives return undefined values.
        self._is_checking = (
            self.check_ranks != "never"
            and self.world_size > 1
            and "fake" not in str(dist.get_backend(self.group))
        )

    @property
    def pending(self) -> int:
        """Number of inputs that wait for a collective."""
        return len(self._pending.numels) if self._pending else 0

    def teardown(self) -> None:
        """Frees the buffers; the next input allocates them again."""
        self.check_empty()
        self.pool.clear()

    def check_empty(self) -> None:
        if self._pending or self._in_flight:
            raise BucketError(
                f"Incorrect call of teardown: got it with {self.pending} inputs ({self.offset} elements per shard, "
                f"{self.dtype}) waiting and {len(self._in_flight)} collectives in flight, expected none: call flush() "
                "before teardown()"
            )

    # --- filling -----------------------------------------------------------------------------------

    def add(
        self,
        source: Source,
        numel: int,
        callback: Callback | None,
        result_form: ResultForm | None = None,
        *,
        hold: bool = False,
    ) -> None:
        """Takes an input of `numel` elements per shard, and calls the callbacks that become due.

        Args:
            hold: the input does not change until its callback, even if `hold_inputs` is off.
        """
        hold = hold or self.hold_inputs
        pending = self._pending
        if pending is None or numel > self.capacity - self.offset:
            self._add_to_new_bucket(source, numel, callback, result_form, hold)
            return
        packing = pending.packing
        assert packing is not None
        outcome = None
        if packing.used + numel > packing.room:
            assert isinstance(packing, Rows)  # HeldInputs always has room for a whole bucket
            outcome = PendingCallbacks()
            room = min(max(packing.used + numel, 2 * packing.room), self.capacity)
            self._make_room(aligned(room, self._unit) * self.world_size, outcome)
            packing.grow(room)
        if not hold and isinstance(packing, HeldInputs):  # a gradient of attach() is the first of this bucket
            copy = source.clone() if isinstance(source, Tensor) else torch.stack(source)  # type: ignore[arg-type]
            source = copy.view(self.world_size, numel)
            self.counters.bytes_copied += source.nbytes
        packing.add(source, numel)
        self.offset += numel
        pending.append(numel, callback, result_form)
        if outcome is not None:
            outcome.end()

    def add_flat(self, tensor: Tensor, callback: Callback | None) -> bool:
        """Takes a flat tensor with n shards. Returns False, without any effect, if the tensor is not of this kind."""
        total = tensor.numel()
        numel = total // self.world_size
        if tensor.ndim != 1 or tensor.requires_grad or numel * self.world_size != total:
            return False
        if self.hold_inputs and self._add_held(tensor, numel, callback):
            return True
        try:
            shards = tensor.view(self.world_size, numel)
        except RuntimeError:  # not dense
            return False
        self.add(shards, numel, callback)
        return True

    def _add_held(self, tensor: Tensor, numel: int, callback: Callback | None) -> bool:
        """Adds a flat tensor to the filling bucket without a copy. Returns False if that is impossible."""
        pending = self._pending
        if pending is None or not 0 < numel <= self.capacity - self.offset or not tensor.is_contiguous():
            return False
        assert isinstance(pending.packing, HeldInputs)
        try:
            pending.packing.add_flat(tensor, numel)
        except RuntimeError:  # an inference tensor, which has no version counter
            return False
        self.offset += numel
        pending.numels.append(numel)
        pending.callbacks.append(callback)
        return True

    def _add_to_new_bucket(
        self,
        source: Source,
        numel: int,
        callback: Callback | None,
        result_form: ResultForm | None,
        hold: bool,
    ) -> None:
        """Starts the next bucket with an input that does not fit in the current one, or reduces the input alone."""
        outcome = PendingCallbacks()
        if numel > self.capacity or not self.capacity:
            pending = PendingBucket(None)
            pending.append(numel, callback, result_form)
            self._reduce_alone(source, pending, outcome, hold)
        else:
            self.close(outcome)
            if hold:
                packing: Rows | HeldInputs = HeldInputs(self.pool, self.world_size, self.capacity, self._unit)
            else:
                room = min(max(numel, self.predictor.next_total() or FIRST_ELEMENTS), self.capacity)
                packing = Rows(self.pool, self.world_size, room, self._unit)
            self._pending = PendingBucket(packing)
            packing.add(source, numel)
            self.offset += numel
            self._pending.append(numel, callback, result_form)
        outcome.end()

    def _make_room(self, numel: int, outcome: PendingCallbacks) -> None:
        """Waits for collectives until another buffer of `numel` elements needs no more memory than two full buckets."""
        limit = 2 * aligned(self.capacity, self._unit) * self.world_size
        for pending in tuple(self._in_flight):
            if self.pool.in_use // self.pool.dtype.itemsize + numel <= limit or self.pool.fits(numel):
                break
            if pending.buffer is not None:
                self.wait_for(pending, outcome)

    # --- reducing ----------------------------------------------------------------------------------

    def close(self, outcome: PendingCallbacks, *, by_flush: bool = False) -> None:
        """Issues the collective for the waiting inputs, then waits for the collective before it."""
        if (pending := self._pending) is not None:
            assert pending.packing is not None
            self._make_room(pending.packing.needs(), outcome)
            self.predictor.this_round.append(self.offset)
            self._pending, self.offset = None, 0
            try:
                self._check_ranks("flush" if by_flush else "a full bucket", pending)
                self._issue(pending)
            except Exception as error:
                outcome.errors.append(self._discard(pending, error))
        if by_flush:
            self.predictor.end_round()
            self._is_checking = self._is_checking and self.check_ranks == "always"
        elif pending is not None:
            self._wait_for_earlier(pending, outcome)

    def _wait_for_earlier(self, newest: PendingBucket, outcome: PendingCallbacks) -> None:
        """Waits for earlier collectives, so that at most one packed bucket and one single input are in flight.

        Collectives of the other kind may run on: if a packed bucket and a single input are issued together, they
        overlap.
        """
        for pending in tuple(self._in_flight):
            if pending is not newest and (pending.single_input is None) == (newest.single_input is None):
                self.wait_for(pending, outcome)

    def drain(self, outcome: PendingCallbacks) -> None:
        """Waits for the collectives in flight, in order of issue, and calls the callbacks."""
        outcome.call()
        for pending in tuple(self._in_flight):
            if pending in self._in_flight:  # a callback may have flushed meanwhile
                self.wait_for(pending, outcome)
                outcome.call()

    def _check_ranks(self, cause: str, pending: PendingBucket) -> None:
        if self._is_checking:
            if is_capturing(self.device):
                raise BucketError(
                    f"got a first round of a bucketer with check_ranks={self.check_ranks!r} in the capture of a CUDA "
                    "graph, where ranks cannot compare inputs: run one round, up to flush(), before the capture, or "
                    "pass check_ranks='never'"
                )
            check_ranks_agree(
                self.group,
                self.device,
                cause,
                [
                    pending.result_forms.get(i, (None,))[0] or (numel,)
                    for i, numel in enumerate(pending.numels)
                ],
                f"{self.dtype} {self.reduction}",
            )

    def _issue(self, pending: PendingBucket) -> None:
        assert pending.packing is not None
        if not pending.packing.used:
            self._in_flight.append(pending)
            return
        packed, pending.buffer, pending.order = pending.packing.pack(pending.numels)
        pending.packing = None
        if self.reduction.op == "premul":
            packed *= self.reduction.factor
        # The output is new memory, of which the results are views. Copying each result out of the buffer costs more.
        pending.output = packed.new_empty(packed.numel() // self.world_size)
        pending.work = comm.reduce_scatter(pending.output, packed, self.group, async_op=True)
        self.counters.collectives += 1
        self._in_flight.append(pending)

    def _discard(self, pending: PendingBucket, error: Exception) -> Exception:
        """Discards this bucket after a failed collective; the bucketer stays usable. Returns `error` with a note."""
        self._release(pending)
        error.add_note(
            f"The {len(pending.numels)} inputs of this bucket are dropped, their callbacks not called."
        )
        pending.callbacks.clear()
        return error

    def _release(self, pending: PendingBucket) -> None:
        if pending.packing is not None:
            pending.packing.drop()
        elif pending.buffer is not None:
            self.pool.release(pending.buffer)
        self.counters.hold(-pending.copied)
        pending.packing = pending.work = pending.output = pending.buffer = pending.single_input = None

    def wait_for(self, pending: PendingBucket, outcome: PendingCallbacks) -> None:
        """Waits for a collective, and adds its callbacks to those that are due."""
        self._in_flight.remove(pending)
        self.pool.streams.enter()
        self.pool.streams.keep(t for t in (pending.single_input, pending.output) if t is not None)
        try:
            self._await_work(pending)
            if pending.single_input is not None:
                check_unchanged([pending.single_input], [pending.single_input_version])
            results = self._results(pending)
        except Exception as error:
            outcome.errors.append(self._discard(pending, error))
            return
        if results:
            outcome.due.append((pending.callbacks, results))
        self._release(pending)

    def _await_work(self, pending: PendingBucket) -> None:
        try:
            if pending.work is not None:
                pending.work.wait()
        except Exception:
            if pending.buffer is not None:
                self.pool.discard(pending.buffer)
                pending.buffer = None
            raise

    def _results(self, pending: PendingBucket) -> list[Tensor]:
        """Returns one tensor per input; an empty list without callbacks.

        The results are views of the collective's output, so keeping one keeps all of it alive. Each has its own
        version counter.
        """
        if not any(callback is not None for callback in pending.callbacks):
            return []
        if pending.output is None:
            total = torch.empty(0, dtype=self.dtype, device=self.device)
        else:
            total = self.reduction.finish(pending.output, self.dtype, self.world_size)
        numels, order = pending.numels, pending.order
        sizes = numels if order is None else [numels[index] for index in order]
        results = list(torch.unsafe_split_with_sizes(total, [*sizes, total.numel() - sum(numels)]))
        if order is not None:
            by_input = dict(zip(order, results, strict=False))
            results = [by_input[index] for index in range(len(numels))]
        for index, (shape, rewrap) in pending.result_forms.items():
            shaped = results[index] if shape is None else results[index].view(shape)
            results[index] = shaped if rewrap is None else rewrap(shaped)
        return results[: len(numels)]

    def _reduce_alone(
        self, source: Source, pending: PendingBucket, outcome: PendingCallbacks, hold: bool
    ) -> None:
        """Reduces an input that is larger than a bucket, or any input if buckets are off. Avoids a copy if possible.

        Waits for the result, unless the input is held.
        """
        (numel,) = pending.numels
        self._check_ranks("a single input", pending)
        self.pool.streams.enter()
        if numel:
            matrix = as_rows(source, self.world_size) if isinstance(source, Tensor) else torch.stack(source)  # type: ignore[arg-type]
            sent = matrix.detach().reshape(-1).to(self.pool.dtype)
            if self.reduction.op == "premul":
                sent = sent * self.reduction.factor
            if (
                type(sent) is not Tensor
                or not isinstance(source, Tensor)
                or sent.data_ptr() != source.data_ptr()
            ):
                pending.copied = sent.nbytes
            pending.single_input, pending.single_input_version = sent, versions_of([sent])[0]
            pending.output = sent.new_empty(numel)
            pending.work = comm.reduce_scatter(pending.output, sent, self.group, async_op=True)
            self.counters.collectives += 1
            self.counters.bytes_copied += pending.copied
            self.counters.hold(pending.copied)
        self._in_flight.append(pending)
        if hold:
            self._wait_for_earlier(pending, outcome)
        else:
            self.wait_for(pending, outcome)


# ---- checking that the ranks of a group reduce the same inputs ----

_MAX_SHOWN_INPUTS = 6  # in an error message


def check_ranks_agree(
    group: ProcessGroup, device: torch.device, cause: str, shapes: Sequence[Sequence[int]], reduction: str
) -> None:
    """Compares the inputs of all ranks, and raises an error on every rank if they differ.

    Without it, a difference would cause a hang or a wrong sum. Runs a small collective and waits for it.

    Args:
        cause: the reason for the reduction, for example a full bucket.
        shapes: the shape of each input's result, in order.
        reduction: dtype and reduction.

    Raises:
        BucketError: the ranks differ.
    """
    description = (cause, reduction, [list(shape) for shape in shapes])
    digest = hashlib.blake2b(repr(description).encode(), digest_size=7).digest()
    local_digest = torch.tensor([int.from_bytes(digest, "little")], device=device)
    digests = torch.empty(group.size(), dtype=local_digest.dtype, device=device)
    comm.all_gather(digests, local_digest, group)
    if len(set(digests.tolist())) == 1:
        return
    descriptions = comm.all_gather_objects(description, group)
    lines = "; ".join(f"rank {rank}: {_summary(d, descriptions)}" for rank, d in enumerate(descriptions))
    raise BucketError(
        f"got a bucket on which the {group.size()} ranks of the group disagree ({lines}), expected the same inputs "
        "in the same order on all: pass the same inputs on every rank, with zeros for a missing gradient"
    )


def _summary(
    description: tuple[str, str, list[list[int]]], descriptions: list[tuple[str, str, list[list[int]]]]
) -> str:
    """Describes a rank's inputs, from the first one that differs between any two ranks."""
    cause, reduction, shapes = description
    common = min(len(d[2]) for d in descriptions)
    start = next((i for i in range(common) if any(d[2][i] != shapes[i] for d in descriptions)), common)
    shown = shapes[start : start + _MAX_SHOWN_INPUTS]
    return f"{cause}, {len(shapes)} inputs, {reduction}, from input {start} on {shown}"
