"""What a trace of ranks comes to: per section (an impl of a case) and rank, and per collective. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median

import numpy as np

from dtbench.profile.trace import Iteration, RankTrace, iterations_of
from dtbench.records.profile import IterationParts, RankSection, Skew


def sections_of(
    traces: Sequence[RankTrace],
    groups: Mapping[str, Sequence[Sequence[int]]],
    plain_us: Mapping[str, Sequence[float]],
) -> list[RankSection]:
    """The sections in the order in which rank 0 ran them.

    groups: section -> the ranks that communicate with each other. plain_us: section -> the times of
    iterations without the profiler.
    """
    recorded = {trace.rank: iterations_of(trace) for trace in traces}
    uncertainty_us = {trace.rank: trace.uncertainty_us for trace in traces}
    sections = []
    for label in dict.fromkeys(one.section for one in recorded[traces[0].rank]):
        own = {rank: [one for one in of if one.section == label] for rank, of in recorded.items()}
        apart, unmatched = skews(own, groups[label], uncertainty_us)
        slowest = [
            max(one.end_us - one.start_us for one in turn) for turn in zip(*own.values(), strict=False)
        ]
        plain, profiled = median(plain_us[label]), median(slowest) if slowest else 0.0
        sections.append(
            RankSection(
                label=label,
                iterations=len(slowest),
                parts_us={str(rank): _means(of) for rank, of in own.items()},
                skews=tuple(apart),
                unmatched=unmatched,
                plain_us=plain,
                profiled_us=profiled,
                gpu={str(t.rank): _gpu_means(t, own[t.rank]) for t in traces if t.counters},
                overhead=profiled / plain - 1,
            )
        )
    return sections


def _means(iterations: Sequence[Iteration]) -> IterationParts | None:
    parts = [one.parts_us for one in iterations]
    if not parts:
        return None
    return IterationParts(
        **{name: fmean(getattr(one, name) for one in parts) for name in IterationParts.__struct_fields__}
    )


def _gpu_means(trace: RankTrace, iterations: Sequence[Iteration]) -> dict[str, float]:
    """Of each counter while the section ran; the nearest sample where none fell into it."""
    if not iterations:
        return {}
    start, end = iterations[0].start_us, iterations[-1].end_us
    means = {}
    for name, samples in trace.counters.items():
        nearest = min(samples, key=lambda sample: abs(sample[0] - (start + end) / 2))
        means[name] = fmean([v for at, v in samples if start <= at <= end] or [nearest[1]])
    return means


def skews(
    recorded: Mapping[int, Sequence[Iteration]],
    groups: Sequence[Sequence[int]],
    uncertainty_us: Mapping[int, float],
) -> tuple[list[Skew], int]:
    """(per kind of collective how far apart the ranks arrive, iterations that could not be matched).

    recorded: of each rank, the same iterations of one section in the same order. groups: the ranks that
    communicate with each other; the n-th collective of one of them is the n-th of all. uncertainty_us:
    of each rank's clock.
    """
    apart: dict[str, list[float]] = {}
    last_ranks: dict[str, list[int | None]] = {}  # None where the clocks cannot tell
    unmatched = 0
    for group in groups:
        ranks = [rank for rank in group if rank in recorded]
        for iteration in zip(*(recorded[rank] for rank in ranks), strict=False) if len(ranks) > 1 else ():
            if len({tuple(c.kind for c in one.collectives) for one in iteration}) > 1:
                unmatched += 1
                continue
            for together in zip(*(one.collectives for one in iteration), strict=True):
                *_, (second_us, second), (last_us, last) = order = sorted(
                    zip((c.arrival_us for c in together), ranks, strict=True)
                )
                kind = together[0].kind
                apart.setdefault(kind, []).append(last_us - order[0][0])
                # Known to be last only beyond what the clocks of the two may be wrong by.
                sure = last_us - second_us > uncertainty_us.get(last, 0) + uncertainty_us.get(second, 0)
                last_ranks.setdefault(kind, []).append(last if sure else None)
    return [_skew(kind, us, Counter(last_ranks[kind])) for kind, us in sorted(apart.items())], unmatched


def _skew(kind: str, apart_us: Sequence[float], last: Counter[int | None]) -> Skew:
    unclear = last.pop(None, 0)
    late = {rank: times for rank, times in last.items() if rank is not None}
    return Skew(
        kind=kind,
        count=len(apart_us),
        mean_us=fmean(apart_us),
        p95_us=float(np.quantile(apart_us, 0.95, method="inverted_cdf")),
        late={str(rank): times for rank, times in late.items()},
        unclear=unclear,
        latest=max(late, key=lambda rank: (late[rank], -rank)) if late else None,
    )
