"""Rank by rank: a map of the mesh per dim, and who comes late."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtbench.layout import from_last_arrival_s, mesh_groups
from dtbench.mesh import Groups
from dtbench.model import Result, Run
from dtbench.show.report import tables as t
from dtbench.show.report.figures import Row, Style, dot_panel, legend, seconds_tick, value_axis
from dtbench.show.report.section import Figure
from dtbench.show.report.shapes import mesh_panel
from dtbench.units import bandwidth_unit, format_bandwidth, format_seconds, format_size, significant

# A larger mesh is not told apart on a page; nor are more rows of ranks.
MAX_CELLS = 1024
MAX_RANKS = 48
LATE = Style("s1", "D")


@dataclass(frozen=True)
class Ranks:
    """One collective over one mesh dim, rank by rank. busbw_Bps: of the rank's group, from the arrival of its
    last rank on. late_s: (lower quartile, median, upper) of how much later than the first of its group the
    rank came. last: share of the samples in which it was the last."""

    dim: str
    name: str
    size_bytes: int
    busbw_Bps: Mapping[int, float]  # noqa: N815 - bytes per second
    late_s: Mapping[int, tuple[float, float, float]]
    last: Mapping[int, float]


def ranks_of(runs: Sequence[Run]) -> list[Ranks]:
    """Per mesh dim the all_reduce (else the first collective) of the largest size, all groups at work."""
    found = []
    groups = mesh_groups(runs[0].header) if runs else {}
    names = runs[0].header["mesh"]["dim_names"] if groups else []
    for dim in names:
        results = [
            r
            for run in runs
            for r in run.ok("collectives")
            if r.params.get("mesh_dim") == dim
            and r.params.get("groups") in ("together", None)
            and r.params.get("mode") in ("isolated", None)
            and r.rank_samples_s
            and r.size_bytes
            and r.busbw_Bps
            and r.algbw_Bps
        ]
        if results:
            chosen = max(results, key=lambda r: (r.name == "all_reduce", r.size_bytes or 0))
            same = [r for r in results if (r.name, r.size_bytes) == (chosen.name, chosen.size_bytes)]
            found.append(_ranks_of(dim, same, groups[dim]))
    return [one for one in found if one.late_s]


def _ranks_of(dim: str, results: Sequence[Result], groups: Groups) -> Ranks:
    """Over launches the median."""
    bandwidths: dict[int, list[float]] = {}
    late: dict[int, list[np.ndarray]] = {}
    for result in results:
        assert result.busbw_Bps is not None and result.algbw_Bps is not None and result.size_bytes is not None
        moved = result.size_bytes * result.busbw_Bps / result.algbw_Bps
        for group in groups:
            own = {rank: result.rank_samples_s.get(str(rank), ()) for rank in group}
            shared = min(map(len, own.values()))
            if len(group) < 2 or not shared:
                continue
            # Nothing where ranks hold unequally many samples, as a file from elsewhere may.
            from_last = float(np.median(from_last_arrival_s(result, [group]) or 0.0))
            for rank, behind in zip(group, _lateness_s(result, group, shared), strict=True):
                late.setdefault(rank, []).append(behind)
                if from_last > 0:
                    bandwidths.setdefault(rank, []).append(moved / from_last)
    together = {rank: np.concatenate(parts) for rank, parts in late.items()}
    return Ranks(
        dim,
        results[0].name,
        results[0].size_bytes or 0,
        {rank: float(np.median(values)) for rank, values in bandwidths.items()},
        {
            rank: (float(np.quantile(x, 0.25)), float(np.median(x)), float(np.quantile(x, 0.75)))
            for rank, x in together.items()
        },
        _last(groups, together),
    )


def _lateness_s(result: Result, group: Sequence[int], samples: int) -> np.ndarray:
    """How much later than the first of its group each rank came; without a common clock, how much shorter its
    reading is than the longest."""
    came = [result.rank_arrivals_s.get(str(rank), ())[:samples] for rank in group]
    if all(len(times) == samples for times in came):
        arrivals = np.array(came)
        return np.asarray(arrivals - arrivals.min(axis=0))
    readings = np.array([result.rank_samples_s[str(rank)][:samples] for rank in group])
    return np.asarray(readings.max(axis=0) - readings)


def _last(groups: Groups, late: Mapping[int, np.ndarray]) -> dict[int, float]:
    shares: dict[int, float] = {}
    for group in groups:
        there = [rank for rank in group if rank in late]
        if there:
            last = np.array([late[rank] for rank in there]).argmax(axis=0)
            shares |= {rank: float((last == place).mean()) for place, rank in enumerate(there)}
    return shares


def heat_figure(header: Mapping[str, Any], found: Sequence[Ranks]) -> Figure | None:
    """A map of the mesh per dim: which groups are slow."""
    shape, names = header["mesh"]["shape"], header["mesh"]["dim_names"]
    drawn = [one for one in found if one.busbw_Bps]
    if not drawn or math.prod(shape) > MAX_CELLS:
        return None
    columns = shape[-1]
    rows = math.prod(shape[:-1])
    axes = (" × ".join(names[:-1]) or "all", names[-1])
    panels = []
    for index, one in enumerate(drawn):
        unit = bandwidth_unit(one.busbw_Bps.values())
        cells = [
            [(f"rank {i * columns + j}", one.busbw_Bps.get(i * columns + j)) for j in range(columns)]
            for i in range(rows)
        ]
        words = {rank: significant(value / unit.scale, 3) for rank, value in one.busbw_Bps.items()}
        low, high = min(one.busbw_Bps.values()), max(one.busbw_Bps.values())
        title = f"{one.dim}: {one.name}, {format_size(one.size_bytes)}, {unit.name}"
        desc = (
            f"Bus bandwidth of each rank's group, from {format_bandwidth(low)} to {format_bandwidth(high)}."
        )
        panels.append(mesh_panel(title, cells, axes, words, prefix=f"mesh{index}", desc=desc))
    return Figure(
        "A map of the mesh per dim: bus bandwidth of the group that the rank belongs to, counted from the arrival "
        "of its last rank; the faster, the deeper. Cells of one group are alike; a pale group is a slow link.",
        (),
        panels,
        2,
    )


def skew_figure(found: Sequence[Ranks]) -> Figure | None:
    """How late each rank comes."""
    if not found:
        return None
    values = [max(high, 1e-9) for one in found for _, _, high in one.late_s.values()]
    x = value_axis(values, seconds_tick, log=False)
    panels = []
    for index, one in enumerate(found):
        latest = sorted(one.late_s, key=lambda rank: -one.late_s[rank][1])[:MAX_RANKS]
        rows = [
            Row(
                f"rank {rank}",
                {"late": one.late_s[rank][1]},
                f"last {one.last.get(rank, 0):.0%}",
                {"late": (one.late_s[rank][0], one.late_s[rank][2])},
            )
            for rank in (sorted(latest) if len(one.late_s) <= MAX_RANKS else latest)
        ]
        worst = latest[0]
        desc = f"Rank {worst} comes latest, by {format_seconds(one.late_s[worst][1])} in the median."
        title = f"{one.dim}: {one.name}, {format_size(one.size_bytes)}"
        panels.append(dot_panel(title, rows, {"late": LATE}, x, prefix=f"skew{index}", desc=desc))
    return Figure(
        "Rank skew: how much later than the first rank of its group each rank came to the collective, and in "
        "which share of the samples it was the last. A rank that is last nearly always holds the others up.",
        legend({"median, with the lower and upper quartile": LATE}, prefix="skewL", lines=False),
        panels,
        2,
    )


def skew_table(found: Sequence[Ranks], header: Mapping[str, Any]) -> list[t.Table]:
    hosts = {rank["rank"]: rank.get("host") for rank in header["ranks"]}
    rows = list(itertools.chain.from_iterable(((one, rank) for rank in sorted(one.late_s)) for one in found))
    if not rows:
        return []
    return [
        t.Table(
            "Every rank: how late it comes, and its group’s bandwidth",
            [
                t.text("Mesh dim", [one.dim for one, _ in rows]),
                t.text("Collective", [one.name for one, _ in rows]),
                t.sizes("Size", [format_size(one.size_bytes) for one, _ in rows]),
                t.counts("Rank", [rank for _, rank in rows]),
                t.text("Host", [hosts.get(rank) or "" for _, rank in rows]),
                *t.times(
                    [
                        ("late, p25", [one.late_s[rank][0] for one, rank in rows]),
                        ("median", [one.late_s[rank][1] for one, rank in rows]),
                        ("p75", [one.late_s[rank][2] for one, rank in rows]),
                    ]
                ),
                t.Column(
                    "last", [f"{100 * one.last.get(rank, 0):.0f}" for one, rank in rows], True, "% of samples"
                ),
                *t.bandwidths([("bus, group", [one.busbw_Bps.get(rank) for one, rank in rows])]),
            ],
            folded=True,
        )
    ]
