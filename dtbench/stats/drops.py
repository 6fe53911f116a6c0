"""Where a bandwidth drops as sizes grow, by more than noise and steps of protocols explain.

A message can be sent in parts, so what is reached at one size need not be lost at a larger one (split-robustness:
Träff, Gropp, Thakur, "Self-Consistent MPI Performance Guidelines", IEEE TPDS 2010). A library that changes to a
protocol or algorithm of more latency and more bandwidth (NCCL: LL, LL128, Simple; tree, ring) loses some all the same,
but no more time than that latency, and larger sizes make up for it. What loses more is a drop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

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
