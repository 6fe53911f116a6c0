"""Where inputs land in buckets, how full buckets will be, and what a bucketful goes through. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from dtbench_core.errors import CoreError

MIB = 1024**2


class BucketError(CoreError, ValueError, AssertionError):
    """Inputs that cannot be reduced together, ranks that disagree on them, or a bucketer used out of order.

    An AssertionError too, since fairscale's bucketer raises those.
    """


class LoadState(Enum):
    """What a bucketful of inputs goes through; see `ALLOWED` for the order."""

    FILLING = "taking inputs"
    REDUCING = "in its collective"  # its buffer is the transport's
    DONE = "reduced"  # its buffer is free again, its callbacks are due
    LOST = "dropped"  # an error came in between: its callbacks are never called


# From a state, where to. FILLING to DONE: inputs without elements need no collective.
ALLOWED: dict[LoadState, frozenset[LoadState]] = {
    LoadState.FILLING: frozenset({LoadState.REDUCING, LoadState.DONE, LoadState.LOST}),
    LoadState.REDUCING: frozenset({LoadState.DONE, LoadState.LOST}),
    LoadState.DONE: frozenset(),
    LoadState.LOST: frozenset(),
}


def advance(state: LoadState, to: LoadState) -> LoadState:
    """`to`.

    Raises:
        BucketError: `ALLOWED` has no such step.
    """
    if to not in ALLOWED[state]:
        allowed = ", ".join(sorted(s.name for s in ALLOWED[state])) or "none: it has ended"
        raise BucketError(
            f"got a bucketful that is {state.name} ({state.value}) asked to become {to.name}, "
            f"expected one of {allowed}: a bucketer is for one thread at a time"
        )
    return to


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


@dataclass
class Foresight:
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

    def closed(self, total: int) -> None:
        self.this_round.append(total)

    def end_round(self) -> None:
        """A round without inputs is none."""
        if self.this_round:
            self.last_round, self.this_round = self.this_round, []


def shard_capacity(bucket_cap_mb: float, itemsize: int, world_size: int) -> int:
    """Elements per shard of a bucket of `bucket_cap_mb` MiB over all shards; 0 if the cap is <= 0."""
    return max(0, int(bucket_cap_mb * MIB / itemsize // world_size))
