"""Where a bandwidth drops as sizes grow, by more than noise and steps of protocols explain.

A message can be sent in parts, so what is reached at one size need not be lost at a larger one (split-robustness:
Träff, Gropp, Thakur, "Self-Consistent MPI Performance Guidelines", IEEE TPDS 2010). A library that changes to a
protocol or algorithm of more latency and more bandwidth (NCCL: LL, LL128, Simple; tree, ring) loses some all the same,
but no more time than that latency, and larger sizes make up for it. What loses more is a drop.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median

from dtbench.grouping import group_by
from dtbench.records.result import Result
from dtbench.records.topology import BandwidthDrop

SUITES = ("collectives", "collectives_other")

# The least loss. Healthy public curves lose up to 27 % (all_reduce of int8 on 8 B300 at 32 MiB), CPUs by caches 25 %.
LOSS = 0.3
RECOVERED = 0.85  # of the level before: there a drop has ended
# Latency of the slowest protocol over that of the fastest, at most: Simple over LL is 4.0 over 0.6 us on NVLink, 14.0
# over 2.7 on a network (hwLat in NCCL's src/graph/tuning.cc), and half as much again.
LATENCY_STEP = 10.0
# Times before a drop, in latencies, at least: less than that may go through buffers and token buckets faster.
LATENCIES_BEFORE = 3.0
NOISE = 4.0  # standard deviations of a single time that may be noise
UNKNOWN_SCATTER = 0.1  # of logarithms, where too few sizes tell it: the most that is seen at medium sizes
SCATTER_FROM, LEVEL_FROM = 8, 3  # the last sizes before a drop that tell the scatter, and the level


def bandwidth_drops(sizes: Sequence[float], times: Sequence[float]) -> list[range]:
    """The places of the sizes in each drop of size / time; one that lies in another is a further drop from there.

    sizes: bytes, ascending. times: above 0, in one unit.
    """
    rates = [size / time for size, time in zip(sizes, times, strict=True)]
    drops: list[range] = []
    level, fastest = [0], math.inf  # level: the sizes since the last step or drop
    outer: list[tuple[range, list[int]]] = []  # drops that have not ended, each with the level before
    for i in range(1, len(rates)):
        fastest = min(fastest, times[i - 1])
        while outer and i == outer[-1][0].stop:
            level = outer.pop()[1]
        near = max(rates[k] for k in level[-2:])
        like = [rates[k] for k in level[-SCATTER_FROM:] if rates[k] >= (1 - LOSS) * near]
        many = len(like) > LEVEL_FROM
        top = median(like[-LEVEL_FROM:]) if many else rates[level[-1]]
        loss = math.log(top / rates[i])
        # The scatter last: it costs more than all else, and most sizes lose nothing.
        if loss <= -math.log(1 - LOSS) or loss <= NOISE * (_scatter(like) if many else UNKNOWN_SCATTER):
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
    """Standard deviation of the logarithm of one about a smooth curve: second differences scatter sqrt(1 + 4 + 1) as
    much."""
    logs = [math.log(rate) for rate in rates]
    bends = [a - 2 * b + c for a, b, c in zip(logs, logs[1:], logs[2:], strict=False)]
    return math.sqrt(sum(bend * bend for bend in bends) / len(bends) / 6)


def _latency(sizes: Sequence[float], times: Sequence[float], last: int) -> float:
    """Time at size 0 of the line through the smallest size and a larger one."""
    slope = (times[last] - times[0]) / (sizes[last] - sizes[0]) if last else 0.0
    return min(max(times[0] - slope * sizes[0], 0.0), times[0])


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
