"""The layout of a mesh dim: which hosts its groups span, and whether they are alike.

By the hosts that the ranks reported and the times that the groups took, never by the mesh's shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dtbench.cost.calibration.points import Tagged, quartiles, samples_us
from dtbench.records.layout import DimLayout
from dtbench.records.topology import Layout
from dtbench.suite.mesh import Groups
from dtbench_core.cost.ring import INTER_HOST, INTRA_HOST, RingLink

# Groups of one dim that take this much longer than others, at the median over what they measured
# together, lie on other links: pairwise bandwidths of like links agree within 10 to 25 %.
GROUPS_DIFFER = 1.25
# ... and are behind in at least this share of it: two groups that are slow by turns are alike.
MOSTLY = 0.75
# From this size on: below, times are latency and the order in which the host schedules the ranks.
COMPARED_FROM_BYTES = 64 * 1024


def layout_of_dim(found: DimLayout | None, slowest_over_fastest: float) -> tuple[Layout, list[str]]:
    """The layout, and its warnings. found: what the run's ranks said, or None."""
    warnings = []
    mixed = slowest_over_fastest > GROUPS_DIFFER
    if mixed:
        warnings.append(
            f"mixed dim: its slowest group takes {slowest_over_fastest:.2f}x the time of its fastest;"
            " it is priced by the slowest"
        )
    if found is None or found.hosts_per_group is None:
        warnings.append("the run does not say on which host each rank was: no built-in constants beside")
        return Layout(kind="mixed" if mixed else None), warnings
    least, most = found.hosts_per_group
    if least < most:
        mixed = True
        warnings.append(f"mixed dim: its groups span {least} to {most} hosts; it is priced by the slowest")
    return Layout(
        kind="mixed" if mixed else "inter-host" if most > 1 else "intra-host",
        hosts_per_group=(least, most),
        ranks_per_host=found.ranks_per_host,
        groups_per_host_pair=found.groups_per_host_pair,
    ), warnings


def slowest_over_fastest(results: Sequence[Tagged], groups: Groups) -> float:
    """How much longer the slowest group takes than the fastest; 1 where groups cannot be told apart.

    Each group's time over the median of the groups, then the median over all that was measured: so one
    slow reading does not make a slow group, nor does having many groups.

    results: of one mesh dim, all groups at once.
    """
    if len(groups) < 2:
        return 1.0
    there = {str(rank) for group in groups for rank in group}
    large = [
        r
        for _, r in results
        if (r.size_bytes or 0) >= COMPARED_FROM_BYTES and there <= r.rank_samples_s.keys()
    ]
    of_groups = [samples_us(large, [group]) for group in groups]
    whole = [times for times in zip(*of_groups, strict=True) if all(t.size for t in times)]
    if not whole:
        return 1.0
    estimates = np.array(quartiles([t for times in whole for t in times])).reshape(len(whole), len(groups))
    ratios = np.log(estimates / np.median(estimates, axis=1, keepdims=True))
    of_group = np.median(ratios, axis=0)
    slowest, fastest = int(np.argmax(of_group)), int(np.argmin(of_group))
    if np.mean(ratios[:, slowest] > ratios[:, fastest]) < MOSTLY:
        return 1.0
    return float(np.exp(of_group[slowest] - of_group[fastest]))


def builtin_link(layout: Layout) -> RingLink | None:
    """torch's constants for where the slowest group really is; None where the run does not say."""
    hosts = layout.hosts_per_group
    return None if hosts is None else INTER_HOST if hosts[1] > 1 else INTRA_HOST
