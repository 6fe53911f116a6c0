"""Finds sizes at which bandwidth drops by more than noise and protocol changes explain.

A large message can be sent in parts, so a larger size need not be slower per byte than a smaller one (split-robustness:
Träff, Gropp, Thakur, "Self-Consistent MPI Performance Guidelines", IEEE TPDS 2010). Bandwidth still falls a little
where a library switches to a protocol or algorithm with more latency and more bandwidth (NCCL: LL, LL128, Simple; tree,
ring). That costs at most the additional latency, and larger sizes recover it. A larger loss is a drop.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from dtbench.grouping import group_by
from dtbench.records.result import Result
from dtbench.records.topology import BandwidthDrop
from dtbench.suite import ROUTING

SUITES = ("collectives", "collectives_other")

# Smallest relative loss that is a drop. Healthy public curves lose up to 27% (all_reduce of int8 on 8 B300 at 32 MiB);
# CPUs lose 25% where data outgrows a cache.
LOSS = 0.3
# A drop ends at the first size that reaches this share of the level before it.
RECOVERED = 0.85
# Largest plausible ratio between the latencies of two protocols. Simple over LL is 4.0 over 0.6 us on NVLink and 14.0
# over 2.7 on a network (hwLat in NCCL's src/graph/tuning.cc); this allows half as much again.
LATENCY_STEP = 10.0
# The last size before a drop has to take at least this many latencies. Shorter transfers may be faster only because
# buffers and token buckets absorb them.
LATENCIES_BEFORE = 3.0
# A loss up to this many standard deviations of a single time counts as noise.
NOISE = 4.0
# Assumed standard deviation of the log bandwidth if there are too few sizes to estimate it: the largest that was seen
# at medium sizes.
UNKNOWN_SCATTER = 0.1
# Number of sizes before a drop that determine the scatter, and the level.
SCATTER_SIZES, LEVEL_SIZES = 8, 3


def bandwidth_drops(sizes: Sequence[float], times: Sequence[float]) -> list[range]:
    """Finds the drops of size / time. A drop within another one is a further drop from its level.

    Args:
        sizes: bytes, ascending.
        times: positive, in any one unit.

    Returns:
        Index ranges of the sizes in each drop.
    """
    rates = [size / time for size, time in zip(sizes, times, strict=True)]
    drops: list[range] = []
    level, fastest = [0], math.inf  # level: indices of the sizes since the last step or drop
    outer: list[tuple[range, list[int]]] = []  # drops that have not ended, each with the level before it
    for i in range(1, len(rates)):
        fastest = min(fastest, times[i - 1])
        while outer and i == outer[-1][0].stop:
            level = outer.pop()[1]
        near = max(rates[k] for k in level[-2:])
        similar = [rates[k] for k in level[-SCATTER_SIZES:] if rates[k] >= (1 - LOSS) * near]
        has_enough = len(similar) > LEVEL_SIZES
        top = median(similar[-LEVEL_SIZES:]) if has_enough else rates[level[-1]]
        loss = math.log(top / rates[i])
        # The scatter is computed last, since it is the most expensive part and most sizes lose nothing.
        if loss <= -math.log(1 - LOSS) or loss <= NOISE * (
            _scatter(similar) if has_enough else UNKNOWN_SCATTER
        ):
            level.append(i)
            continue
        low = range(i, next((k for k in range(i, len(rates)) if rates[k] >= RECOVERED * top), len(rates)))
        latency = min(fastest, _latency(sizes, times, i - 1))
        lost = max(times[k] - sizes[k] / top for k in low)
        if lost > LATENCY_STEP * latency and (i == 1 or times[i - 1] > LATENCIES_BEFORE * latency):
            drops.append(low)
            outer.append((low, level))
        level = [i]
    return drops


def _scatter(rates: Sequence[float]) -> float:
    """Returns the standard deviation of the log rates around a smooth curve.

    It is estimated from second differences, whose standard deviation is sqrt(1 + 4 + 1) times as large.
    """
    logs = [math.log(rate) for rate in rates]
    bends = [a - 2 * b + c for a, b, c in zip(logs, logs[1:], logs[2:], strict=False)]
    return math.sqrt(sum(bend * bend for bend in bends) / len(bends) / 6)


def _latency(sizes: Sequence[float], times: Sequence[float], last: int) -> float:
    """Returns the time at size 0, extrapolated from the smallest size and the size at index `last`."""
    slope = (times[last] - times[0]) / (sizes[last] - sizes[0]) if last else 0.0
    return min(max(times[0] - slope * sizes[0], 0.0), times[0])


def drops_of(results: Iterable[Result]) -> list[BandwidthDrop]:
    """Finds the drops in the curves of bus bandwidth over size, the median over launches at each size."""
    timed = (
        r
        for r in results
        if r.suite in SUITES and r.status == "ok" and r.busbw_Bps and r.size_bytes and ROUTING not in r.params
    )
    curves = group_by(timed, lambda r: (r.name, r.impl, tuple(p for p in r.case_key[3] if p[0] != "size")))
    curves_with = Counter(param for *_, params in curves for param in params)
    drops = []
    for (name, _, params), curve in curves.items():
        by_size = sorted(group_by(curve, lambda r: r.size_bytes or 0).items())
        times = [size / median(r.busbw_Bps or 0.0 for r in launches) for size, launches in by_size]
        setting = ", ".join(
            f"{name}={value}"
            for name, value in params
            if name not in ("mesh_dim", "ranks") and curves_with[name, value] < len(curves)
        )
        mesh_dim = str(dict(params).get("mesh_dim", "the mesh"))
        drops += drops_of_curve([size for size, _ in by_size], times, name, mesh_dim, setting)
    return drops


def drops_of_curve(
    sizes: Sequence[int], times_s: Sequence[float], collective: str, mesh_dim: str, setting: str
) -> list[BandwidthDrop]:
    """Finds the drops of one curve.

    Args:
        sizes: bytes, ascending.
        times_s: bytes / bus bandwidth at each size.
        setting: params that distinguish the curve from others.
    """
    return [
        BandwidthDrop(
            collective,
            mesh_dim,
            setting,
            before_bytes=sizes[drop.start - 1],
            before_Bps=sizes[drop.start - 1] / times_s[drop.start - 1],
            first_bytes=sizes[drop.start],
            first_Bps=sizes[drop.start] / times_s[drop.start],
            last_bytes=sizes[drop[-1]],
            recovered_bytes=sizes[drop.stop] if drop.stop < len(sizes) else None,
        )
        for drop in bandwidth_drops(sizes, times_s)
    ]
