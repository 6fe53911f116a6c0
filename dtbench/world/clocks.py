"""One clock for all ranks: rank 0's host clock (`time.time_ns`).

    the profiler's clock -> this rank's host clock      by marks that are recorded between two readings
    this rank's host clock -> rank 0's host clock       the same clock on the same host; on others an
                                                        exchange over the store, as NTP does it

Both give an offset and how wrong it may be; errors add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Round trips over the store; the quickest one decides.
_EXCHANGES = 30


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


def ask(store: Store, rank: int, now_ns: Callable[[], int] = time.time_ns) -> Offset:
    """On a rank of another host: its offset to rank 0's clock; rank 0 must `answer` meanwhile."""
    offsets = []
    for number in range(_EXCHANGES):
        asked = now_ns()
        store.set(f"clock/{rank}/{number}/ask", "")
        theirs = float(store.get(f"clock/{rank}/{number}/answer"))
        answered = now_ns()
        # The other read its clock in between: RFC 5905, section 8, with one reading at the other end.
        offsets.append(Offset(theirs - (asked + answered) / 2, (answered - asked) / 2))
    return min(offsets, key=lambda offset: offset.uncertainty_ns)


def answer(store: Store, rank: int, now_ns: Callable[[], int] = time.time_ns) -> None:
    """On rank 0: answers all of `rank`'s questions."""
    for number in range(_EXCHANGES):
        store.wait([f"clock/{rank}/{number}/ask"])
        store.set(f"clock/{rank}/{number}/answer", str(now_ns()))
