"""What a trace of ranks comes to: per section (an impl of a case) and rank, and per collective. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean, median

import numpy as np

from dtbench.profile.trace import RankTrace, Window, windows_of
from dtbench.records.profile import Parts, Section, Skew


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
    slowest = [max(w.end_us - w.start_us for w in turn) for turn in zip(*windows.values(), strict=False)]
    plain, profiled = median(plain_us), median(slowest) if slowest else 0.0
    return Section(
        label=label,
        iterations=len(slowest),
        parts_us={str(rank): _means(of) for rank, of in windows.items()},
        skews=tuple(found),
        unmatched=unmatched,
        plain_us=plain,
        profiled_us=profiled,
        gpu={str(t.rank): _gpu_means(t, windows[t.rank]) for t in traces if t.counters},
        overhead=profiled / plain - 1,
    )


def _means(windows: Sequence[Window]) -> Parts | None:
    parts = [window.parts_us for window in windows]
    if not parts:
        return None
    return Parts(**{name: fmean(getattr(one, name) for one in parts) for name in Parts.__struct_fields__})


def _gpu_means(trace: RankTrace, windows: Sequence[Window]) -> dict[str, float]:
    """Of each counter while the section ran; the nearest sample where none fell into it."""
    if not windows:
        return {}
    start, end = windows[0].start_us, windows[-1].end_us
    means = {}
    for name, samples in trace.counters.items():
        inside = [value for at, value in samples if start <= at <= end]
        if inside:
            means[name] = fmean(inside)
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
    return [
        _skew(kind, us, late.get(kind, Counter()), unclear[kind]) for kind, us in sorted(apart.items())
    ], unmatched


def _skew(kind: str, apart_us: Sequence[float], late: Counter[int], unclear: int) -> Skew:
    return Skew(
        kind=kind,
        count=len(apart_us),
        mean_us=fmean(apart_us),
        p95_us=float(np.quantile(apart_us, 0.95, method="inverted_cdf")),
        late={str(rank): times for rank, times in late.items()},
        unclear=unclear,
        latest=max(late, key=lambda rank: (late[rank], -rank)) if late else None,
    )
