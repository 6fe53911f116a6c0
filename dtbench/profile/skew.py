"""Who comes late: how far apart the ranks arrive at each collective. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtbench.profile.trace import Window


@dataclass(frozen=True)
class Skew:
    """The arrivals at the collectives of one kind. mean_us, p95_us: from the first rank's arrival to the
    last one's. late: rank -> how often it was the last; unclear: how often the clocks cannot tell."""

    kind: str
    count: int
    mean_us: float
    p95_us: float
    late: Mapping[int, int]
    unclear: int

    @property
    def latest(self) -> int | None:
        """The rank that was last most often; None where the clocks never tell."""
        return max(self.late, key=lambda rank: (self.late[rank], -rank)) if self.late else None


def skews(
    windows: Mapping[int, Sequence[Window]],
    groups: Sequence[Sequence[int]],
    uncertainty_us: Mapping[int, float],
) -> tuple[list[Skew], int]:
    """(per kind of collective how far apart the ranks arrive, iterations that could not be matched).

    windows: of each rank, the same iterations of one section in the same order. groups: the ranks that
    communicate with each other; the n-th collective of one of them is the n-th of all. uncertainty_us:
    of each rank's clock.
    """
    apart: dict[str, list[float]] = {}
    late: dict[str, Counter[int]] = {}
    unclear: Counter[str] = Counter()
    unmatched = 0
    for group in groups:
        ranks = [rank for rank in group if rank in windows]
        for iteration in zip(*(windows[rank] for rank in ranks), strict=False):
            kinds = [[c.kind for c in window.collectives] for window in iteration]
            if any(other != kinds[0] for other in kinds[1:]):
                unmatched += 1
                continue
            for together in zip(*(window.collectives for window in iteration), strict=True):
                order = sorted(zip((c.arrival_us for c in together), ranks, strict=True))
                if len(order) < 2:
                    continue
                kind, (last_us, last), (second_us, second) = together[0].kind, order[-1], order[-2]
                apart.setdefault(kind, []).append(last_us - order[0][0])
                # Known to be last only beyond what the clocks of the two may be wrong by.
                if last_us - second_us > uncertainty_us.get(last, 0) + uncertainty_us.get(second, 0):
                    late.setdefault(kind, Counter())[last] += 1
                else:
                    unclear[kind] += 1
    found = [
        Skew(kind, len(us), sum(us) / len(us), _p95(us), dict(late.get(kind, {})), unclear[kind])
        for kind, us in sorted(apart.items())
    ]
    return found, unmatched


def _p95(values: Sequence[float]) -> float:
    """The smallest value that 95 % of them do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]
