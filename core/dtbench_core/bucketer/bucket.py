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
# When ranks compare notes before a collective: in the first round, from the start to the first flush;
# always; never.
CheckRanks = Literal["first", "always", "never"]
CHECK_RANKS: tuple[CheckRanks, ...] = ("first", "always", "never")

# What a result that is not handed out flat becomes: its shape, and what makes a DTensor of it.
Finish = tuple[tuple[int, ...] | None, Callable[[Tensor], Tensor] | None]


@dataclass
class PendingCallbacks:
    """What an operation brings about, kept until its bookkeeping is done: callbacks may use the bucketer."""

    due: list[tuple[list[Callback | None], list[Tensor]]] = field(default_factory=list)  # with their results
    errors: list[Exception] = field(default_factory=list)

    def call(self) -> None:
        """Calls every callback, whatever the others raise."""
        with torch.no_grad():
            while self.due:
                callbacks, results = self.due.pop(0)
                results.reverse()
                for callback in callbacks:
                    result = results.pop()  # to let go of it as soon as its callback has had it
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
    """How full the next bucket will be, in elements per shard.

    Training repeats itself, so a bucket is expected to hold what the same one held in the last round
    (from flush to flush). One that does is laid out for the collective from its first input on.
    """

    last_round: list[int] = field(default_factory=list)
    this_round: list[int] = field(default_factory=list)

    def next_total(self) -> int:
        """0 when nothing is known."""
        index = len(self.this_round)
        if index < len(self.last_round):
            return self.last_round[index]
        return self.this_round[-1] if self.this_round else 0

    def end_round(self) -> None:
        """A round without inputs is none."""
        if self.this_round:
            self.last_round, self.this_round = self.this_round, []


@dataclass(frozen=True)
class Reduction:
    """How a bucketer reduces. factor: of premul. dtype: of the sums, where it is not the inputs'."""

    op: Op = "sum"
    factor: float = 1.0
    dtype: torch.dtype | None = None

    def dtype_of(self, stored: torch.dtype) -> torch.dtype:
        return stored if self.dtype is None else self.dtype

    def check(self, stored: torch.dtype) -> None:
        summed = self.dtype_of(stored)
        if self.op != "sum" and not (summed.is_floating_point or summed.is_complex):
            raise BucketError(
                f"got inputs of {stored} to reduce in {summed} by {self.op!r}, expected a floating or complex "
                "dtype: use op='sum', or reduce_dtype"
            )
        if stored.is_complex and not summed.is_complex:
            raise BucketError(
                f"got inputs of {stored} to reduce in {summed}, expected a complex dtype, which keeps both parts"
            )

    def finish(self, total: Tensor, stored: torch.dtype, n: int) -> Tensor:
        """The sums, scaled in place, as they are handed out."""
        if self.op == "avg":
            total /= n
        return total if total.dtype is stored else total.to(stored)


@dataclass(eq=False)
class PendingBucket:
    """The contents of a bucket, from its first input to its callbacks.

    Attributes:
        packing: None if a single input is reduced from where it lies.
        numels: elements per shard of each input.
        callbacks: of each input.
        finishes: by the input's index, for results that are not handed out flat.
        work: the collective's handle while it runs.
        output: (row,), this rank's part of the sums, which the results share.
        buffer: the pool's buffer that the collective reads.
        order: see `Packed`.
        lent: the single input that the collective reads, if `packing` is None.
        lent_version: its version when it was handed over.
        copied: bytes of `lent` if it is a copy.
    """

    packing: Rows | HeldInputs | None
    numels: list[int] = field(default_factory=list)
    callbacks: list[Callback | None] = field(default_factory=list)
    finishes: dict[int, Finish] = field(default_factory=dict)
    work: Work | None = None
    output: Tensor | None = None
    buffer: Tensor | None = None
    order: list[int] | None = None
    lent: Tensor | None = None
    lent_version: int = 0
    copied: int = 0

    def note(self, numel: int, callback: Callback | None, finish: Finish | None) -> None:
        if finish is not None:
            self.finishes[len(self.numels)] = finish
        self.numels.append(numel)
        self.callbacks.append(callback)


@dataclass(eq=False)
class Bucket:
    """Inputs of one (dtype, device, group): those that wait, and those in their collective."""

    group: ProcessGroup
    dtype: torch.dtype
    device: torch.device
    capacity: int  # elements per shard; 0: every input is reduced alone
    counters: BucketCounters
    reduction: Reduction = Reduction()
    hold_inputs: bool = False
    check_ranks: CheckRanks = "never"
    predictor: SizePredictor = field(default_factory=SizePredictor)

    def __post_init__(self) -> None:
        self.offset = 0  # elements per shard that wait for a flush
        self.world_size = self.group.size()
        summed = self.reduction.dtype_of(self.dtype)
        # Alignment in the input's dtype and in that of the sums.
        self._unit = max(1, ALIGN_BYTES // min(self.dtype.itemsize, summed.itemsize))
        self.pool = BufferPool(summed, self.device, self.counters)
        self._pending: PendingBucket | None = None
        self._flying: deque[PendingBucket] = deque()  # in order of issue
        # torch's fake group answers with nothing, and has only one rank that could disagree.
        peers = self.world_size > 1 and "fake" not in str(dist.get_backend(self.group))
        self._checking = self.check_ranks != "never" and peers

    @property
    def pending(self) -> int:
        """Inputs that wait for a flush."""
        return len(self._pending.numels) if self._pending else 0

    def teardown(self) -> None:
        """Frees the buffers; the next input allocates them again."""
        self.check_empty()
        self.pool.clear()

    def check_empty(self) -> None:
        if self._pending or self._flying:
            raise BucketError(
                f"Incorrect call of teardown: got it with {self.pending} inputs ({self.offset} elements per shard, "
                f"{self.dtype}) waiting and {len(self._flying)} collectives under way, expected none: call flush() "
                "before teardown()"
            )

    # --- filling -----------------------------------------------------------------------------------

    def add(
        self,
        source: Source,
        numel: int,
        callback: Callback | None,
        finish: Finish | None = None,
        *,
        hold: bool = False,
    ) -> None:
        """Takes an input of `numel` elements per shard, and calls the callbacks that become due on the way.

        hold: the input does not change until its callback, even if those of others may.
        """
        hold = hold or self.hold_inputs
        pending = self._pending
        if pending is None or numel > self.capacity - self.offset:
            self._add_elsewhere(source, numel, callback, finish, hold)
            return
        packing = pending.packing
        assert packing is not None
        outcome = None
        if packing.used + numel > packing.room:
            assert isinstance(packing, Rows)  # held inputs have room for a whole bucket
            outcome = PendingCallbacks()
            room = min(max(packing.used + numel, 2 * packing.room), self.capacity)
            self._make_room(aligned(room, self._unit) * self.world_size, outcome)
            packing.grow(room)
        if not hold and isinstance(packing, HeldInputs):  # attach() has begun this bucket
            copy = source.clone() if isinstance(source, Tensor) else torch.stack(source)  # type: ignore[arg-type]
            source = copy.view(self.world_size, numel)
            self.counters.bytes_copied += source.nbytes
        packing.add(source, numel)
        self.offset += numel
        pending.note(numel, callback, finish)
        if outcome is not None:
            outcome.end()

    def add_flat(self, tensor: Tensor, callback: Callback | None) -> bool:
        """Takes a flat tensor, n shards in a row. Returns False, with nothing done, if it is not one."""
        total = tensor.numel()
        numel = total // self.world_size
        if tensor.ndim != 1 or tensor.requires_grad or numel * self.world_size != total:
            return False
        if self.hold_inputs and self._hold(tensor, numel, callback):
            return True
        try:
            shards = tensor.view(self.world_size, numel)
        except RuntimeError:  # not dense
            return False
        self.add(shards, numel, callback)
        return True

    def _hold(self, tensor: Tensor, numel: int, callback: Callback | None) -> bool:
        """Adds a flat tensor to the bucket that is filling, as it is. Returns False if that cannot be done."""
        pending = self._pending
        if pending is None or not 0 < numel <= self.capacity - self.offset or not tensor.is_contiguous():
            return False
        assert isinstance(pending.packing, HeldInputs)
        try:
            pending.packing.add_flat(tensor, numel)
        except RuntimeError:  # of inference mode
            return False
        self.offset += numel
        pending.numels.append(numel)
        pending.callbacks.append(callback)
        return True

    def _add_elsewhere(
        self, source: Source, numel: int, callback: Callback | None, finish: Finish | None, hold: bool
    ) -> None:
        """Begins the next bucket with an input that the current one has no room for, or reduces it alone."""
        outcome = PendingCallbacks()
        if numel > self.capacity or not self.capacity:
            pending = PendingBucket(None)
            pending.note(numel, callback, finish)
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
            self._pending.note(numel, callback, finish)
        outcome.end()

    def _make_room(self, numel: int, outcome: PendingCallbacks) -> None:
        """Waits for collectives until a buffer of `numel` elements makes no more than two full buckets."""
        limit = 2 * aligned(self.capacity, self._unit) * self.world_size
        for pending in tuple(self._flying):
            in_use = self.pool.in_use // self.pool.dtype.itemsize
            if in_use + numel <= limit or self.pool.fits(numel):
                break
            if pending.buffer is not None:
                self.wait_for(pending, outcome)

    # --- reducing ----------------------------------------------------------------------------------

    def close(self, outcome: PendingCallbacks, *, by_flush: bool = False) -> None:
        """Issues the collective for the inputs that wait, then waits for the collective before it."""
        pending = self._pending
        if pending is not None:
            assert pending.packing is not None
            self._make_room(pending.packing.needs(), outcome)
            self.predictor.this_round.append(self.offset)
            self._pending, self.offset = None, 0
            try:
                self._agree("flush" if by_flush else "a full bucket", pending)
                self._issue(pending)
            except Exception as error:
                outcome.errors.append(self._lose(pending, error))
        if by_flush:
            self.predictor.end_round()
            self._checking = self._checking and self.check_ranks == "always"
        elif pending is not None:
            self._wait_for_earlier(pending, outcome)

    def _wait_for_earlier(self, newest: PendingBucket, outcome: PendingCallbacks) -> None:
        """Waits for the collectives before `newest`, so that at most one of buffers and one of single inputs runs.

        Those of the other kind run on: if both come at once, neither would have had anything to overlap with.
        """
        for pending in tuple(self._flying):
            if pending is not newest and (pending.lent is None) == (newest.lent is None):
                self.wait_for(pending, outcome)

    def drain(self, outcome: PendingCallbacks) -> None:
        """Ends what is under way now, in order of issue, and calls the callbacks."""
        outcome.call()
        for pending in tuple(self._flying):
            if pending in self._flying:  # else a callback has flushed in between
                self.wait_for(pending, outcome)
                outcome.call()

    def _agree(self, why: str, pending: PendingBucket) -> None:
        if self._checking:
            if is_capturing(self.device):
                raise BucketError(
                    f"got a first round of a bucketer with check_ranks={self.check_ranks!r} in the capture of a CUDA "
                    "graph, where ranks cannot compare inputs: run one round, up to flush(), before the capture, or "
                    "give check_ranks='never'"
                )
            how = f"{self.dtype} {self.reduction}"
            shapes = [
                pending.finishes.get(i, (None,))[0] or (numel,) for i, numel in enumerate(pending.numels)
            ]
            check_ranks_agree(self.group, self.device, why, shapes, how)

    def _issue(self, pending: PendingBucket) -> None:
        assert pending.packing is not None
        if not pending.packing.used:
            self._flying.append(pending)
            return
        packed, pending.buffer, pending.order = pending.packing.pack(pending.numels)
        pending.packing = None
        if self.reduction.op == "premul":
            packed *= self.reduction.factor
        # Into memory of its own, which the results are parts of: copying each out of the buffer would cost more.
        pending.output = packed.new_empty(packed.numel() // self.world_size)
        pending.work = comm.reduce_scatter(pending.output, packed, self.group, async_op=True)
        self.counters.collectives += 1
        self._flying.append(pending)

    def _lose(self, pending: PendingBucket, error: Exception) -> Exception:
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
            self.pool.give(pending.buffer)
        self.counters.hold(-pending.copied)
        pending.packing = pending.work = pending.output = pending.buffer = pending.lent = None

    def wait_for(self, pending: PendingBucket, outcome: PendingCallbacks) -> None:
        """Waits for a collective and adds its callbacks to those that are due."""
        self._flying.remove(pending)
        self.pool.streams.enter()
        self.pool.streams.keep(t for t in (pending.lent, pending.output) if t is not None)
        try:
            self._await_work(pending)
            if pending.lent is not None:
                check_unchanged([pending.lent], [pending.lent_version])
            results = self._results(pending)
        except Exception as error:
            outcome.errors.append(self._lose(pending, error))
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
                self.pool.lose(pending.buffer)
                pending.buffer = None
            raise

    def _results(self, pending: PendingBucket) -> list[Tensor]:
        """Returns one tensor per input, or none if there are no callbacks.

        The results share the collective's output, which is not used again: as long as one is kept, so is all of it.
        Each counts its own writes.
        """
        if not any(callback is not None for callback in pending.callbacks):
            return []
        if pending.output is None:
            total = torch.empty(0, dtype=self.dtype, device=self.device)
        else:
            total = self.reduction.finish(pending.output, self.dtype, self.world_size)
        numels, order = pending.numels, pending.order
        in_row = numels if order is None else [numels[index] for index in order]
        results = list(torch.unsafe_split_with_sizes(total, [*in_row, total.numel() - sum(numels)]))
        if order is not None:
            by_input = dict(zip(order, results, strict=False))
            results = [by_input[index] for index in range(len(numels))]
        for index, (shape, rewrap) in pending.finishes.items():
            shaped = results[index] if shape is None else results[index].view(shape)
            results[index] = shaped if rewrap is None else rewrap(shaped)
        return results[: len(numels)]

    def _reduce_alone(
        self, source: Source, pending: PendingBucket, outcome: PendingCallbacks, hold: bool
    ) -> None:
        """Reduces an input larger than a bucket, or any input without buckets, from where it lies if possible.

        Waits for the result, unless the input is held.
        """
        (numel,) = pending.numels
        self._agree("an input for itself", pending)
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
            pending.lent, pending.lent_version = sent, versions_of([sent])[0]
            pending.output = sent.new_empty(numel)
            pending.work = comm.reduce_scatter(pending.output, sent, self.group, async_op=True)
            self.counters.collectives += 1
            self.counters.bytes_copied += pending.copied
            self.counters.hold(pending.copied)
        self._flying.append(pending)
        if hold:
            self._wait_for_earlier(pending, outcome)
        else:
            self.wait_for(pending, outcome)


# ---- whether the ranks of a group are about to reduce the same inputs ----

SHOWN = 6  # inputs named in an error


def check_ranks_agree(
    group: ProcessGroup, device: torch.device, why: str, shapes: Sequence[Sequence[int]], how: str
) -> None:
    """One small collective, on which it waits, so that a disagreement is an error on every rank and not a
    hang or a wrong sum.

    Args:
        why: what brings the collective about, such as a full bucket.
        shapes: of what each input leaves with a rank, in order.
        how: dtype and reduction.
    """
    described = (why, how, [list(shape) for shape in shapes])
    digest = hashlib.blake2b(repr(described).encode(), digest_size=7).digest()
    mine = torch.tensor([int.from_bytes(digest, "little")], device=device)
    all_of_them = torch.empty(group.size(), dtype=mine.dtype, device=device)
    comm.all_gather(all_of_them, mine, group)
    if len(set(all_of_them.tolist())) == 1:
        return
    theirs = comm.all_gather_objects(described, group)
    lines = "; ".join(f"rank {r}: {_summary(d, theirs)}" for r, d in enumerate(theirs))
    raise BucketError(
        f"got a bucket on which the {group.size()} ranks of the group disagree ({lines}), expected the same inputs "
        "in the same order on all: hand over what every rank has, zeros where it has no gradient"
    )


def _summary(mine: tuple[str, str, list[list[int]]], theirs: list[tuple[str, str, list[list[int]]]]) -> str:
    """The inputs from the first on in which any two ranks differ."""
    why, how, shapes = mine
    common = min(len(d[2]) for d in theirs)
    start = next((i for i in range(common) if any(d[2][i] != shapes[i] for d in theirs)), common)
    shown = shapes[start : start + SHOWN]
    return f"{why}, {len(shapes)} inputs, {how}, from input {start} on {shown}"
