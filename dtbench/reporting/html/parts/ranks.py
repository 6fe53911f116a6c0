"""Arrival delay and bandwidth of each rank."""

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

# More rows are not readable on a page.
MAX_RANKS = 48
LATE = {"late": Style("s1", "D", words="median, lower and upper quartile")}


@dataclass(frozen=True)
class RankSkew:
    """Arrival delays of all ranks at one collective over one mesh dim.

    Attributes:
        dim: the mesh dim.
        name: the collective.
        size_bytes: message size.
        busbw_Bps: rank -> bus bandwidth of its group from the arrival of the last rank on, bytes per second.
        late_s: rank -> (lower quartile, median, upper quartile) of its delay after the first rank of its group.
        last: rank -> share of the samples in which it arrived last.
    """

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
    """Returns the delays of each mesh dim, at the largest all_reduce (or else the first collective) of all groups."""
    skews, groups = [], mesh_groups(runs[0].header)
    measured = [r for run in runs for r in run.ok("collectives") if r.rank_samples_s and r.size_bytes]
    usual = {"groups": ("together", None), "mode": ("isolated", None)}
    plain = [r for r in measured if all(r.params.get(name) in values for name, values in usual.items())]
    by_dim = group_by((r for r in plain if r.busbw_Bps and r.algbw_Bps), lambda r: r.params.get("mesh_dim"))
    for dim in runs[0].header.mesh.dim_names if groups else ():
        if results := by_dim.get(dim):
            chosen = max(results, key=lambda r: (r.name == "all_reduce", r.size_bytes or 0))
            matching = [r for r in results if (r.name, r.size_bytes) == (chosen.name, chosen.size_bytes)]
            skews.append(_ranks_of(dim, matching, groups[dim]))
    return [skew for skew in skews if skew.late_s]


def _ranks_of(dim: str, results: Sequence[Result], groups: Groups) -> RankSkew:
    """Merges the launches: the median for bandwidths, quartiles over all samples for delays."""
    skew = RankSkew(dim, results[0].name, results[0].size_bytes or 0, {}, {}, {})
    for group in groups:
        late, bandwidths = [], []
        for result in results:
            assert result.busbw_Bps and result.algbw_Bps and result.size_bytes
            shared = min(len(result.rank_samples_s.get(str(rank), ())) for rank in group)
            if len(group) < 2 or not shared:
                continue
            late.append(_lateness_s(result, group, shared))
            # Empty if the ranks have different numbers of samples, as in a damaged file.
            samples = from_last_arrival_s(result, [group])
            if samples and (from_last := estimate_s(samples, result)) > 0:
                bandwidths.append(result.size_bytes * result.busbw_Bps / result.algbw_Bps / from_last)
        if bandwidths:
            skew.busbw_Bps.update(dict.fromkeys(group, float(np.median(bandwidths))))
        delays = np.hstack(late) if late else ()
        for index, (rank, rank_delays) in enumerate(zip(group, delays, strict=False)):
            low, middle, high = np.quantile(rank_delays, (0.25, 0.5, 0.75)).tolist()
            skew.late_s[rank] = low, middle, high
            skew.last[rank] = float(np.mean(np.argmax(delays, axis=0) == index))
    return skew


def _lateness_s(result: Result, group: Sequence[int], samples: int) -> np.ndarray:
    """Returns the delay of each rank after the first rank of its group, shape (ranks, samples).

    Without a common clock, the delay is estimated as the longest time of all ranks minus the rank's own time.
    """
    arrivals_s = [result.rank_arrivals_s.get(str(rank), ())[:samples] for rank in group]
    if all(len(times) == samples for times in arrivals_s):
        arrivals = np.array(arrivals_s)
        return np.asarray(arrivals - arrivals.min(axis=0))
    times_s = np.array([result.rank_samples_s[str(rank)][:samples] for rank in group])
    return np.asarray(times_s.max(axis=0) - times_s)


def _skew(skews: Sequence[RankSkew]) -> Figure | None:
    """Draws the delay of each rank."""
    panels = {}
    for skew in skews:
        latest = sorted(skew.late_s, key=lambda rank: -skew.late_s[rank][1])[:MAX_RANKS]
        panels[skew.words] = [
            DotRow(
                f"rank {rank}",
                {"late": skew.late_s[rank][1]},
                f"last {skew.last.get(rank, 0):.0%}",
                {"late": (skew.late_s[rank][0], skew.late_s[rank][2])},
            )
            for rank in (sorted(latest) if len(skew.late_s) <= MAX_RANKS else latest)
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
    rows = [(skew, rank) for skew in skews for rank in sorted(skew.late_s)]
    late = [skew.late_s[rank] for skew, rank in rows]
    return Table(
        "Every rank: arrival delay and bandwidth of its group",
        [
            columns.text("Mesh dim", [skew.dim for skew, _ in rows]),
            columns.text("Collective", [skew.name for skew, _ in rows]),
            columns.sizes("Size", [format_size(skew.size_bytes) for skew, _ in rows]),
            columns.counts("Rank", [rank for _, rank in rows]),
            columns.text("Host", [hosts.get(rank) or "" for _, rank in rows]),
            *columns.times(
                [
                    (word, [quartiles[i] for quartiles in late])
                    for i, word in enumerate(("delay, p25", "median", "p75"))
                ]
            ),
            columns.percents("last", [skew.last.get(rank, 0) for skew, rank in rows], 0, "% of samples"),
            *columns.bandwidths([("group’s bus", [skew.busbw_Bps.get(rank) for skew, rank in rows])]),
        ],
        folded=True,
    )
