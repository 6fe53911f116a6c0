"""Offsets between clocks, with their uncertainty: from a GPU or profiler to its host, and from a host to rank 0.

    GPU's or profiler's clock -> this rank's host clock     by marks recorded between two readings of the host's clock
    this rank's host clock -> rank 0's host clock           the same clock on one host; else pings over the store,
                                                            as in NTP

On a common clock, `lateness_s` returns how much later than the first each rank began a sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dtbench.grouping import group_by

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from dtbench.engine.rank_votes import StoreRanks

# Number of round trips over the store; the quickest counts. Few, since they are repeated for every case.
_PINGS = 10
ReadNs = Callable[[], int]  # a reading of a clock


@dataclass(frozen=True)
class Offset:
    """An offset between two clocks.

    Attributes:
        ns: nanoseconds to add to one clock to get the other.
        uncertainty_ns: the largest error of `ns`.
    """

    ns: float
    uncertainty_ns: float


SAME_CLOCK = Offset(0.0, 0.0)


def offset_from_marks(marks: Iterable[tuple[float, float, float, float]]) -> Offset:
    """Returns the offset from another clock to the host's.

    Every mark lies between two readings of the host's clock, which bounds the offset from both sides. If the clocks
    drift so far that no offset satisfies all marks, the tightest mark counts.

    Args:
        marks: (host's clock before the mark, its start and end on the other clock, host's clock after it), ns.
    """
    bounds = [(host_start - start, host_end - end) for host_start, start, end, host_end in marks]
    low, high = max(bound[0] for bound in bounds), min(bound[1] for bound in bounds)
    if low > high:
        low, high = min(bounds, key=lambda bound: bound[1] - bound[0])
    return Offset((low + high) / 2, abs(high - low) / 2)


def mean_offset(start: Offset, end: Offset) -> Offset:
    """Returns the offset between two measurements of it, including its drift in the uncertainty."""
    drift_ns = abs(end.ns - start.ns) / 2
    return Offset((start.ns + end.ns) / 2, max(start.uncertainty_ns, end.uncertainty_ns) + drift_ns)


def offset_to_rank_0(
    ranks: StoreRanks, store: Store, boot_ids: Sequence[str | None], now_ns: ReadNs
) -> Offset:
    """Returns the offset from this rank's clock to rank 0's. All ranks call it.

    Processes on one host (same boot_id) share its clocks. The first rank of each other host pings rank 0, in turn, and
    the other ranks of that host use its offset.

    Args:
        boot_ids: each rank's `boot_id`, None if unknown.
    """
    first_ranks: dict[str, int] = {}
    pinging_rank = [
        first_ranks.setdefault(boot_id or f"of rank {rank}", rank) for rank, boot_id in enumerate(boot_ids)
    ]
    vote, prefix = None, f"clock/{ranks.votes}"
    for rank in sorted(set(pinging_rank) - {0}):
        if ranks.rank == 0:
            _answer_pings(store, f"{prefix}/{rank}", now_ns)
        elif ranks.rank == rank:
            offset = _ping_rank_0(store, f"{prefix}/{rank}", now_ns)
            vote = (offset.ns, offset.uncertainty_ns)
    if set(pinging_rank) == {0}:
        return SAME_CLOCK
    offset_of_host = ranks.agree(vote, lambda votes: votes)[pinging_rank[ranks.rank]]
    return SAME_CLOCK if offset_of_host is None else Offset(*offset_of_host)


def _ping_rank_0(store: Store, prefix: str, now_ns: ReadNs) -> Offset:
    """Returns the offset to rank 0's clock. Rank 0 answers the pings under the same prefix."""
    offsets = []
    for number in range(_PINGS):
        sent_ns = now_ns()
        store.set(f"{prefix}/{number}/ask", "")
        rank_0_ns = float(store.get(f"{prefix}/{number}/answer"))
        received_ns = now_ns()
        # Rank 0 read its clock in between: RFC 5905, section 8, with one reading at the other end.
        offsets.append(Offset(rank_0_ns - (sent_ns + received_ns) / 2, (received_ns - sent_ns) / 2))
        for key in ("ask", "answer"):
            store.delete_key(f"{prefix}/{number}/{key}")
    return min(offsets, key=lambda offset: offset.uncertainty_ns)


def _answer_pings(store: Store, prefix: str, now_ns: ReadNs) -> None:
    """Answers all pings of a rank, on rank 0."""
    for number in range(_PINGS):
        store.wait([f"{prefix}/{number}/ask"])
        store.set(f"{prefix}/{number}/answer", str(now_ns()))


def lateness_s(
    started_ns: Mapping[int, Sequence[int]],
    boot_ids: Mapping[int, str | None],
    offsets: Mapping[int, Offset] | None = None,
) -> dict[int, NDArray[np.float64]]:
    """Returns how much later than the first rank each rank began each sample, in seconds.

    Ranks leave a barrier one after the other, and a rank's time includes its wait for the others. In an all-reduce all
    ranks end together, so the shortest time counts from the last arrival. In an all-to-all or all-gather each rank ends
    with the data it has received; only a common clock shows when the last one ended.

    Processes on one host share its monotonic clock. Between hosts, the offset is chosen such that the hosts leave
    barriers together in the median. It stays within the bounds that pings over the store have measured. A ping bounds
    the offset by half its round trip; a barrier that is quicker estimates it better.

    Args:
        started_ns: rank -> start of each sample on its host's monotonic clock.
        boot_ids: rank -> its `boot_id`; None if unknown.
        offsets: rank -> offset from its clock to rank 0's, if it was measured.
    """
    ranks = sorted(started_ns)
    # Subtract as integers: the clock counts from the start of the machine, beyond the precision of floats.
    origin = min(started_ns[ranks[0]])
    began = {rank: np.array([t - origin for t in started_ns[rank]], dtype=np.float64) for rank in ranks}
    hosts = group_by(ranks, lambda rank: boot_ids.get(rank) or f"of rank {rank}")
    host_began = {host: np.mean([began[rank] for rank in members], axis=0) for host, members in hosts.items()}
    first = next(iter(host_began.values()))
    base = (offsets or {}).get(ranks[0])
    aligned: dict[int, NDArray[np.float64]] = {}
    for host, members in hosts.items():
        shift, measured = np.median(host_began[host] - first), (offsets or {}).get(members[0])
        if base is not None and measured is not None:
            ahead_ns = base.ns - measured.ns  # how far this host's clock is ahead of the first host's
            error_ns = base.uncertainty_ns + measured.uncertainty_ns
            shift = np.clip(shift, ahead_ns - error_ns, ahead_ns + error_ns)
        aligned |= {rank: began[rank] - shift for rank in members}
    earliest = np.min(list(aligned.values()), axis=0)
    return {rank: (aligned[rank] - earliest) * 1e-9 for rank in ranks}
