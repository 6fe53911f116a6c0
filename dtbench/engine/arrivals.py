"""When each rank began a sample, on one clock: how much later than the first.

Ranks leave a barrier one by one, and a rank's own reading includes its wait for the others. In an all-reduce
all ranks end together, so the shortest reading is the time from the last arrival on. Not so where each ends
with what it has received (all-to-all, all-gather): there only a common clock tells when the last one ended.

Processes of one running kernel share its monotonic clock. Between kernels the offset is taken such that hosts
leave the barriers together in the median, as far as that agrees with what pings over the store have measured:
a ping bounds the offset by half its round trip, a barrier guesses it better where it is quicker than that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from dtbench.engine.clocks import Offset
from dtbench.suite.grouping import group_by


def lateness_s(
    started_ns: Mapping[int, Sequence[int]],
    kernels: Mapping[int, str | None],
    offsets: Mapping[int, Offset] | None = None,
) -> dict[int, NDArray[np.float64]]:
    """Per rank and sample the seconds after the rank that began first.

    started_ns: rank -> readings of its kernel's monotonic clock, equally many. kernels: rank -> its
    `boot_id`; None is a kernel of which nothing is known. offsets: rank -> from its clock to rank 0's, where it
    was measured.
    """
    ranks = sorted(started_ns)
    # Differences of whole numbers: the clock counts from the start of the machine.
    origin = min(started_ns[ranks[0]])
    began = {rank: np.array([t - origin for t in started_ns[rank]], dtype=np.float64) for rank in ranks}
    hosts = group_by(ranks, lambda rank: kernels.get(rank) or f"of rank {rank}")
    clocks = {host: np.mean([began[rank] for rank in members], axis=0) for host, members in hosts.items()}
    first = next(iter(clocks.values()))
    base = (offsets or {}).get(ranks[0])
    on_one: dict[int, NDArray[np.float64]] = {}
    for host, members in hosts.items():
        shift, measured = np.median(clocks[host] - first), (offsets or {}).get(members[0])
        if base is not None and measured is not None:
            ahead_ns = base.ns - measured.ns  # of this host's clock before the first one's
            error_ns = base.uncertainty_ns + measured.uncertainty_ns
            shift = np.clip(shift, ahead_ns - error_ns, ahead_ns + error_ns)
        on_one |= {rank: began[rank] - shift for rank in members}
    earliest = np.min(list(on_one.values()), axis=0)
    return {rank: (on_one[rank] - earliest) * 1e-9 for rank in ranks}
