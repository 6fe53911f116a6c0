"""Rank by rank: a map of the mesh per dim, and who comes late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from dtbench.grouping import group_by
from dtbench.records.result import Header, Result, Run
from dtbench.reporting.html.axes import value_axis
from dtbench.reporting.html.figures import DotRow, Figure, Style, dots
from dtbench.reporting.html.section import ReportSection
from dtbench.stats import estimate_s
from dtbench.stats.layout import from_last_arrival_s, mesh_groups
from dtbench.suite.mesh import Groups
from dtbench.text import columns
from dtbench.text.table import Table
from dtbench.text.units import format_size

# More rows are not told apart on a page.
MAX_RANKS = 48
LATE = {"late": Style("s1", "D", words="median, lower and upper quartile")}


@dataclass(frozen=True)
class RankSkew:
    """One collective over one mesh dim, rank by rank. busbw_Bps: of the rank's group, from the arrival of its
    last rank on. late_s: (lower quartile, median, upper) of how much later than the first of its group the rank came.
    last: share of the samples in which it was the last."""

    dim: str
    name: str
    size_bytes: int
    busbw_Bps: dict[int, float]  # noqa: N815 - bytes per second
    late_s: dict[int, tuple[float, float, float]]
    last: dict[int, float]

    @property
    def words(self) -> str:
        return f"{self.dim}: {self.name}, {format_size(self.size_bytes)}"


def add_ranks(section: ReportSection, runs: Sequence[Run]) -> None:
    header, skews = runs[0].header, ranks_of(runs)
    section.add(_skew(skews), _table(skews, header))


def ranks_of(runs: Sequence[Run]) -> list[RankSkew]:
    """Per mesh dim the all_reduce (else the first collective) of the largest size, all groups at work."""
    skews, groups = [], mesh_groups(runs[0].header)
    measured = [r for run in runs for r in run.ok("collectives") if r.rank_samples_s and r.size_bytes]
    usual = {"groups": ("together", None), "mode": ("isolated", None)}
    plain = [r for r in measured if all(r.params.get(name) in values for name, values in usual.items())]
    by_dim = group_by((r for r in plain if r.busbw_Bps and r.algbw_Bps), lambda r: r.params.get("mesh_dim"))
    for dim in runs[0].header.mesh.dim_names if groups else ():
        if results := by_dim.get(dim):
            chosen = max(results, key=lambda r: (r.name == "all_reduce", r.size_bytes or 0))
            same = [r for r in results if (r.name, r.size_bytes) == (chosen.name, chosen.size_bytes)]
            skews.append(_ranks_of(dim, same, groups[dim]))
    return [one for one in skews if one.late_s]


def _ranks_of(dim: str, results: Sequence[Result], groups: Groups) -> RankSkew:
    """Over launches the median."""
    one = RankSkew(dim, results[0].name, results[0].size_bytes or 0, {}, {}, {})
    for group in groups:
        late, bandwidths = [], []
        for result in results:
            assert result.busbw_Bps and result.algbw_Bps and result.size_bytes
            shared = min(len(result.rank_samples_s.get(str(rank), ())) for rank in group)
            if len(group) < 2 or not shared:
                continue
            late.append(_lateness_s(result, group, shared))
            # Nothing where ranks hold unequally many samples, as a file from elsewhere may.
            samples = from_last_arrival_s(result, [group])
            if samples and (from_last := estimate_s(samples, result)) > 0:
                bandwidths.append(result.size_bytes * result.busbw_Bps / result.algbw_Bps / from_last)
        if bandwidths:
            one.busbw_Bps.update(dict.fromkeys(group, float(np.median(bandwidths))))
        together = np.hstack(late) if late else ()
        for place, (rank, behind) in enumerate(zip(group, together, strict=False)):
            low, middle, high = np.quantile(behind, (0.25, 0.5, 0.75)).tolist()
            one.late_s[rank] = low, middle, high
            one.last[rank] = float(np.mean(np.argmax(together, axis=0) == place))
    return one


def _lateness_s(result: Result, group: Sequence[int], samples: int) -> np.ndarray:
    """How much later than the first of its group each rank came; without a common clock, how much shorter its
    reading is than the longest."""
    came = [result.rank_arrivals_s.get(str(rank), ())[:samples] for rank in group]
    if all(len(times) == samples for times in came):
        arrivals = np.array(came)
        return np.asarray(arrivals - arrivals.min(axis=0))
    readings = np.array([result.rank_samples_s[str(rank)][:samples] for rank in group])
    return np.asarray(readings.max(axis=0) - readings)


def _skew(skews: Sequence[RankSkew]) -> Figure | None:
    """How late each rank comes."""
    panels = {}
    for one in skews:
        latest = sorted(one.late_s, key=lambda rank: -one.late_s[rank][1])[:MAX_RANKS]
        panels[one.words] = [
            DotRow(
                f"rank {rank}",
                {"late": one.late_s[rank][1]},
                f"last {one.last.get(rank, 0):.0%}",
                {"late": (one.late_s[rank][0], one.late_s[rank][2])},
            )
            for rank in (sorted(latest) if len(one.late_s) <= MAX_RANKS else latest)
        ]

    return dots(
        "skew",
        panels,
        LATE,
        "Rank skew: each rank’s arrival at the collective after the first rank of its group, and the share of samples "
        "in which it arrived last. A rank that is nearly always last delays its group.",
        partial(value_axis, log=False),
        folded="Arrival delay, rank by rank",
    )


def _table(skews: Sequence[RankSkew], header: Header) -> Table:
    hosts = {rank.rank: rank.host for rank in header.ranks}
    rows = [(one, rank) for one in skews for rank in sorted(one.late_s)]
    late = [one.late_s[rank] for one, rank in rows]
    return Table(
        "Every rank: arrival delay and bandwidth of its group",
        [
            columns.text("Mesh dim", [one.dim for one, _ in rows]),
            columns.text("Collective", [one.name for one, _ in rows]),
            columns.sizes("Size", [format_size(one.size_bytes) for one, _ in rows]),
            columns.counts("Rank", [rank for _, rank in rows]),
            columns.text("Host", [hosts.get(rank) or "" for _, rank in rows]),
            *columns.times(
                [(word, [of[i] for of in late]) for i, word in enumerate(("late, p25", "median", "p75"))]
            ),
            columns.percents("last", [one.last.get(rank, 0) for one, rank in rows], 0, "% of samples"),
            *columns.bandwidths([("bus, group", [one.busbw_Bps.get(rank) for one, rank in rows])]),
        ],
        folded=True,
    )
