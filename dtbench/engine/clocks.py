"""One clock for all ranks: rank 0's host clock.

    a GPU's or the profiler's clock -> this rank's host clock      by marks that are recorded between two readings
    this rank's host clock -> rank 0's host clock                  the same clock on the same host; on others an
                                                                   exchange over the store, as NTP does it

Both give an offset and how wrong it may be; errors add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from dtbench.engine.ranks import StoreRanks

# Round trips over the store, of which the quickest decides: with every case, so few.
_EXCHANGES = 10


@dataclass(frozen=True)
class Offset:
    """What to add to one clock to read another, ns; and how far off that may be."""

    ns: float
    uncertainty_ns: float


SAME_CLOCK = Offset(0.0, 0.0)


def from_marks(marks: Iterable[tuple[float, float, float, float]]) -> Offset:
    """From marks (host clock before, start, end on the profiler's clock, host clock after), ns.

    Every mark lies between its two readings, which bounds the offset from both sides. Where no offset
    satisfies all marks, because the clocks drift apart, the tightest one counts.
    """
    bounds = [(before - start, after - end) for before, start, end, after in marks]
    low, high = max(b[0] for b in bounds), min(b[1] for b in bounds)
    if low > high:
        low, high = min(bounds, key=lambda b: b[1] - b[0])
    return Offset((low + high) / 2, abs(high - low) / 2)


def halfway(before: Offset, after: Offset) -> Offset:
    """For the time between two measurements of one offset, which drifts meanwhile."""
    apart = abs(after.ns - before.ns) / 2
    return Offset((before.ns + after.ns) / 2, max(before.uncertainty_ns, after.uncertainty_ns) + apart)


def to_rank_0(
    ranks: StoreRanks, store: Store, kernels: Sequence[str | None], now_ns: Callable[[], int]
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
    mine, found = None, f"clock/{ranks.votes}"
    for asker in askers:
        if ranks.rank == 0:
            answer(store, f"{found}/{asker}", now_ns)
        elif ranks.rank == asker:
            mine = ask(store, f"{found}/{asker}", now_ns)
    said = None if mine is None else (mine.ns, mine.uncertainty_ns)
    all_said = ranks.agree(said, lambda votes: votes)
    heard = all_said[asks[ranks.rank]]
    return SAME_CLOCK if heard is None else Offset(*heard)


def ask(store: Store, prefix: str, now_ns: Callable[[], int]) -> Offset:
    """On another kernel: its offset to rank 0's clock; rank 0 must `answer` meanwhile, under the same prefix."""
    offsets = []
    for number in range(_EXCHANGES):
        asked = now_ns()
        store.set(f"{prefix}/{number}/ask", "")
        theirs = float(store.get(f"{prefix}/{number}/answer"))
        answered = now_ns()
        # The other read its clock in between: RFC 5905, section 8, with one reading at the other end.
        offsets.append(Offset(theirs - (asked + answered) / 2, (answered - asked) / 2))
        for key in ("ask", "answer"):
            store.delete_key(f"{prefix}/{number}/{key}")
    return min(offsets, key=lambda offset: offset.uncertainty_ns)


def answer(store: Store, prefix: str, now_ns: Callable[[], int]) -> None:
    """On rank 0: answers all of a rank's questions."""
    for number in range(_EXCHANGES):
        store.wait([f"{prefix}/{number}/ask"])
        store.set(f"{prefix}/{number}/answer", str(now_ns()))
