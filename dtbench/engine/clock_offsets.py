"""One clock for all ranks: rank 0's host clock.

    a GPU's or the profiler's clock -> this rank's host clock      by marks that are recorded between two readings
    this rank's host clock -> rank 0's host clock                  the same clock on the same host; on others an
                                                                   exchange over the store, as NTP does it

Both give an offset and how wrong it may be; errors add up. On one clock, `lateness_s` says how much later than the
first each rank began a sample.
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

    from dtbench.engine.ranks import StoreRanks

# Round trips over the store, of which the quickest decides: with every case, so few.
_EXCHANGES = 10
ReadNs = Callable[[], int]  # a reading of a clock


@dataclass(frozen=True)
class Offset:
    """What to add to one clock to read another, ns; and how far off that may be."""

    ns: float
    uncertainty_ns: float


SAME_CLOCK = Offset(0.0, 0.0)


def offset_from_marks(marks: Iterable[tuple[float, float, float, float]]) -> Offset:
    """From marks (host clock before, start, end on the profiler's clock, host clock after), ns.

    Every mark lies between its two readings, which bounds the offset from both sides. Where no offset
    satisfies all marks, because the clocks drift apart, the tightest one counts.
    """
    bounds = [(before - start, after - end) for before, start, end, after in marks]
    low, high = max(b[0] for b in bounds), min(b[1] for b in bounds)
    if low > high:
        low, high = min(bounds, key=lambda b: b[1] - b[0])
    return Offset((low + high) / 2, abs(high - low) / 2)


def mean_offset(before: Offset, after: Offset) -> Offset:
    """For the time between two measurements of one offset, which drifts meanwhile."""
    apart = abs(after.ns - before.ns) / 2
    return Offset((before.ns + after.ns) / 2, max(before.uncertainty_ns, after.uncertainty_ns) + apart)


def offset_to_rank_0(
    ranks: StoreRanks, store: Store, kernels: Sequence[str | None], now_ns: ReadNs
) -> Offset:
    """From this rank's clock to rank 0's; all ranks call it. kernels: each rank's `boot_id`, None if unknown.

    Processes of one kernel share its clocks. Of every other kernel the first rank pings rank 0, in turn, and the
    ranks beside it take over what it found.
    """
    first_of: dict[str, int] = {}
    asks = [first_of.setdefault(kernel or f"of rank {rank}", rank) for rank, kernel in enumerate(kernels)]
    askers = sorted(set(asks) - {0})
    if not askers:
        return SAME_CLOCK
    mine, prefix = None, f"clock/{ranks.votes}"
    for asker in askers:
        if ranks.rank == 0:
            answer(store, f"{prefix}/{asker}", now_ns)
        elif ranks.rank == asker:
            mine = ask(store, f"{prefix}/{asker}", now_ns)
    sent = None if mine is None else (mine.ns, mine.uncertainty_ns)
    offsets = ranks.agree(sent, lambda votes: votes)
    theirs = offsets[asks[ranks.rank]]
    return SAME_CLOCK if theirs is None else Offset(*theirs)


def ask(store: Store, prefix: str, now_ns: ReadNs) -> Offset:
    """On another kernel: its offset to rank 0's clock; rank 0 must `answer` meanwhile, under the same prefix."""
    offsets = []
    for number in range(_EXCHANGES):
        sent_ns = now_ns()
        store.set(f"{prefix}/{number}/ask", "")
        theirs = float(store.get(f"{prefix}/{number}/answer"))
        got_ns = now_ns()
        # The other read its clock in between: RFC 5905, section 8, with one reading at the other end.
        offsets.append(Offset(theirs - (sent_ns + got_ns) / 2, (got_ns - sent_ns) / 2))
        for key in ("ask", "answer"):
            store.delete_key(f"{prefix}/{number}/{key}")
    return min(offsets, key=lambda offset: offset.uncertainty_ns)


def answer(store: Store, prefix: str, now_ns: ReadNs) -> None:
    """On rank 0: answers all of a rank's questions."""
    for number in range(_EXCHANGES):
        store.wait([f"{prefix}/{number}/ask"])
        store.set(f"{prefix}/{number}/answer", str(now_ns()))


def lateness_s(
    started_ns: Mapping[int, Sequence[int]],
    kernels: Mapping[int, str | None],
    offsets: Mapping[int, Offset] | None = None,
) -> dict[int, NDArray[np.float64]]:
    """Per rank and sample the seconds after the rank that began first.

    Ranks leave a barrier one by one, and a rank's own reading includes its wait for the others. In an all-reduce
    all ranks end together, so the shortest reading is the time from the last arrival on. Not so where each ends
    with what it has received (all-to-all, all-gather): there only a common clock tells when the last one ended.

    Processes of one running kernel share its monotonic clock. Between kernels the offset is taken such that hosts
    leave the barriers together in the median, as far as that agrees with what pings over the store have measured:
    a ping bounds the offset by half its round trip, a barrier guesses it better where it is quicker than that.

    started_ns: rank -> readings of its kernel's monotonic clock, equally many. kernels: rank -> its
    `boot_id`; None is a kernel of which nothing is known. offsets: rank -> from its clock to rank 0's, where it
    was measured.
    """
    ranks = sorted(started_ns)
    # Differences of whole numbers: the clock counts from the start of the machine.
    origin = min(started_ns[ranks[0]])
    began = {rank: np.array([t - origin for t in started_ns[rank]], dtype=np.float64) for rank in ranks}
    hosts = group_by(ranks, lambda rank: kernels.get(rank) or f"of rank {rank}")
    clocks = {host: np.mean([began[rank] for rank in members], axis=0) for host, members in hosts.items()}
    first = next(iter(clocks.values()))
    base = (offsets or {}).get(ranks[0])
    on_one: dict[int, NDArray[np.float64]] = {}
    for host, members in hosts.items():
        shift, measured = np.median(clocks[host] - first), (offsets or {}).get(members[0])
        if base is not None and measured is not None:
            ahead_ns = base.ns - measured.ns  # of this host's clock before the first one's
            error_ns = base.uncertainty_ns + measured.uncertainty_ns
            shift = np.clip(shift, ahead_ns - error_ns, ahead_ns + error_ns)
        on_one |= {rank: began[rank] - shift for rank in members}
    earliest = np.min(list(on_one.values()), axis=0)
    return {rank: (on_one[rank] - earliest) * 1e-9 for rank in ranks}
