"""Where the bus bandwidth of a collective drops as sizes grow, in results of runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from msgspec import Struct

from dtbench.stats import bandwidth_drops
from dtbench.suite import Result
from dtbench.suite.fields import Positive, Whole
from dtbench.suite.grouping import group_by
from dtbench.text.units import format_bandwidth, format_size

SUITES = ("collectives", "collectives_other")


class BandwidthDrop(Struct, frozen=True):
    """Bus bandwidth in bytes per second at the size before the drop and at the first in it. setting: what tells the
    curve from others. recovered_bytes: the size after the last one in it; None where the sweep ends in it."""

    collective: str
    mesh_dim: str
    setting: str
    before_bytes: Whole
    before_Bps: Positive  # noqa: N815 - bytes per second
    first_bytes: Whole
    first_Bps: Positive  # noqa: N815
    last_bytes: Whole
    recovered_bytes: Whole | None

    def __str__(self) -> str:
        before, first = format_bandwidth(self.before_Bps), format_bandwidth(self.first_Bps)
        drop = f"{before} at {format_size(self.before_bytes)} to {first} at {format_size(self.first_bytes)}"
        end = f"recovered at {format_size(self.recovered_bytes)}"
        if self.recovered_bytes is None:
            stays = f"and stays low up to {format_size(self.last_bytes)}, "
            end = stays * (self.last_bytes > self.first_bytes) + "the largest size measured"
        of = f"{self.collective} over {self.mesh_dim}" + f" ({self.setting})" * bool(self.setting)
        return f"{of}: bus bandwidth drops from {drop}, {end}"


def drops_of(results: Iterable[Result]) -> list[BandwidthDrop]:
    """Those of all curves over size that ok results of collectives make, of each size the median over launches."""
    good = (r for r in results if r.suite in SUITES and r.status == "ok" and r.busbw_Bps and r.size_bytes)
    curves = group_by(good, lambda r: (r.name, r.impl, tuple(p for p in r.case_key[3] if p[0] != "size")))
    curves_with = Counter(param for *_, params in curves for param in params)
    drops = []
    for (name, _, params), of_curve in curves.items():
        by_size = sorted(group_by(of_curve, lambda r: r.size_bytes or 0).items())
        times = [size / median(r.busbw_Bps or 0.0 for r in of) for size, of in by_size]
        aside = [p for p in params if p[0] not in ("mesh_dim", "ranks")]
        setting = ", ".join(f"{k}={v}" for k, v in aside if curves_with[k, v] < len(curves))
        mesh_dim = str(dict(params).get("mesh_dim", "the mesh"))
        drops += drops_of_curve([size for size, _ in by_size], times, name, mesh_dim, setting)
    return drops


def drops_of_curve(
    sizes: Sequence[int], times_s: Sequence[float], collective: str, mesh_dim: str, setting: str
) -> list[BandwidthDrop]:
    """times_s: bytes over bus bandwidth at each size, ascending."""
    levels = [(size, size / time_s) for size, time_s in zip(sizes, times_s, strict=True)]
    drops = []
    for i in bandwidth_drops(sizes, times_s):
        around = *levels[i.start - 1], *levels[i.start], sizes[i[-1]]
        recovered = sizes[i.stop] if i.stop < len(sizes) else None
        drops.append(BandwidthDrop(collective, mesh_dim, setting, *around, recovered))
    return drops
