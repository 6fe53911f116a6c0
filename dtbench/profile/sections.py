"""What a trace of ranks comes to: per section (an impl of a case) and rank, and per collective. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from dtbench.profile.trace import RankTrace, Window, windows_of

PARTS = ("whole", "compute", "communication", "overlap", "exposed", "host")


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


@dataclass(frozen=True)
class Section:
    """An impl of a case. parts_us: rank -> part -> mean over the iterations. plain_us, profiled_us: an
    iteration of the slowest rank without and with the profiler, medians. gpu: rank -> counter -> mean."""

    label: str
    iterations: int
    parts_us: Mapping[int, Mapping[str, float]]
    skews: tuple[Skew, ...]
    unmatched: int
    plain_us: float
    profiled_us: float
    gpu: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    @property
    def overhead(self) -> float:
        """What the profiler adds to an iteration, as a share of it."""
        return self.profiled_us / self.plain_us - 1

    def to_json(self) -> dict[str, Any]:
        made = asdict(self) | {"overhead": self.overhead}
        made["skews"] = [asdict(s) | {"latest": s.latest} for s in self.skews]
        return made


def sections_of(
    traces: Sequence[RankTrace],
    groups: Mapping[str, Sequence[Sequence[int]]],
    plain_us: Mapping[str, Sequence[float]],
) -> list[Section]:
    """The sections in the order in which rank 0 ran them.

    groups: section -> the ranks that communicate with each other. plain_us: section -> the times of
    iterations without the profiler.
    """
    windows = {trace.rank: windows_of(trace) for trace in traces}
    labels = dict.fromkeys(w.section for w in windows[traces[0].rank])
    return [
        _section(
            label,
            traces,
            {rank: [w for w in of if w.section == label] for rank, of in windows.items()},
            groups[label],
            plain_us[label],
        )
        for label in labels
    ]


def _section(
    label: str,
    traces: Sequence[RankTrace],
    windows: Mapping[int, Sequence[Window]],
    groups: Sequence[Sequence[int]],
    plain_us: Sequence[float],
) -> Section:
    found, unmatched = skews(windows, groups, {trace.rank: trace.uncertainty_us for trace in traces})
    parts: dict[int, dict[str, float]] = {}
    for rank, of in windows.items():
        times = [window.times_us() for window in of]
        parts[rank] = {part: statistics.fmean([t[part] for t in times]) for part in PARTS} if times else {}
    slowest = [max(w.end_us - w.start_us for w in turn) for turn in zip(*windows.values(), strict=False)]
    return Section(
        label,
        len(slowest),
        parts,
        tuple(found),
        unmatched,
        statistics.median(plain_us),
        statistics.median(slowest) if slowest else 0.0,
        {t.rank: _gpu_means(t, windows[t.rank]) for t in traces if t.counters},
    )


def _gpu_means(trace: RankTrace, windows: Sequence[Window]) -> dict[str, float]:
    """Of each counter while the section ran; the nearest sample where none fell into it."""
    if not windows:
        return {}
    start, end = windows[0].start_us, windows[-1].end_us
    means = {}
    for name, samples in trace.counters.items():
        inside = [value for at, value in samples if start <= at <= end]
        if inside:
            means[name] = statistics.fmean(inside)
        elif samples:
            means[name] = min(samples, key=lambda s: abs(s[0] - (start + end) / 2))[1]
    return means


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
    found = []
    for kind, us in sorted(apart.items()):
        p95_us = float(np.quantile(us, 0.95, method="inverted_cdf"))
        last_of = dict(late.get(kind, {}))
        found.append(Skew(kind, len(us), sum(us) / len(us), p95_us, last_of, unclear[kind]))
    return found, unmatched
