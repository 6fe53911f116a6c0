"""What a trace of ranks comes to: per section (an impl of a case) and rank, and per collective. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dtbench.profile.skew import Skew, skews
from dtbench.profile.trace import RankTrace, Window, windows_of

PARTS = ("whole", "compute", "communication", "overlap", "exposed", "host")


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
        return self.profiled_us / self.plain_us - 1 if self.plain_us > 0 else 0.0

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
    uncertainty = {trace.rank: trace.uncertainty_us for trace in traces}
    labels = dict.fromkeys(w.section for w in windows[traces[0].rank])
    return [
        _section(label, traces, _of(label, windows), groups[label], plain_us.get(label, ()), uncertainty)
        for label in labels
    ]


def _of(label: str, windows: Mapping[int, Sequence[Window]]) -> dict[int, list[Window]]:
    return {rank: [w for w in of if w.section == label] for rank, of in windows.items()}


def _section(
    label: str,
    traces: Sequence[RankTrace],
    windows: Mapping[int, Sequence[Window]],
    groups: Sequence[Sequence[int]],
    plain_us: Sequence[float],
    uncertainty_us: Mapping[int, float],
) -> Section:
    found, unmatched = skews(windows, groups, uncertainty_us)
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
        statistics.median(plain_us) if plain_us else 0.0,
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
