"""Which bucket size to set: the smallest whose rate is within 5% of the best, as larger ones begin later and hold more.

Launches as a whole differ by more than sizes do, so a time is taken over the geometric mean of its launch. The
estimate of a size is the median over launches; the interval of the choice is a bootstrap that draws whole launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dtbench.records.result import Run
from dtbench.stats import interval, resample
from dtbench.text.units import format_size

WITHIN = 0.05
INTERVAL = 0.9
REPLICATES = 2000  # the 5% quantile of which is known to half a percent
MIB = 2**20
MEASURE = "measure with `dtbench run bucketer --size 1MiB:64MiB:2x --launches 5`"


class BucketGroup(NamedTuple):
    """What is reduced and scattered: a bucket size is chosen for each."""

    mesh_dim: str
    ranks: int
    dtype: str
    tensor_bytes: int


class BucketChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket size for a group.

    bucket_cap_mb: as DDP and inductor take it, in MiB whatever its name says (torch 2.13, nn/parallel/distributed.py
    and _inductor/fx_passes/bucketing.py multiply it by 1024 * 1024); None at the edge of the sizes measured.
    low_bytes, high_bytes: the 90% interval; None with one launch, or where all agree on a size. loss: by which share it
    is slower than the fastest.
    edge: why there is no recommendation.
    """

    group: BucketGroup
    launches: int
    bucket_bytes: int
    bucket_cap_mb: float | None
    low_bytes: int | None
    high_bytes: int | None
    fastest_bytes: int
    loss: float
    edge: str = ""


def bucket_choices(runs: Iterable[Run]) -> list[BucketChoice]:
    """A choice per group of results of the suite `bucketer` over two bucket sizes or more; empty without such."""
    times: defaultdict[tuple[BucketGroup, int], dict[tuple[str, int], dict[int, float]]] = defaultdict(dict)
    for run in runs:
        for r in run.ok("bucketer"):
            p = r.params
            if r.impl != "core" or not r.estimate_s or not {"bucket_bytes", "tensor_bytes"} <= p.keys():
                continue
            mesh_dim, dtype = str(p.get("mesh_dim", "")), str(p.get("dtype", ""))
            group = BucketGroup(mesh_dim, int(p.get("ranks", 0)), dtype, int(p["tensor_bytes"]))
            launches = times[group, int(p.get("total_bytes", 0))]
            launches.setdefault((run.header.run_id, r.launch), {})[int(p["bucket_bytes"])] = r.estimate_s
    choices = []
    for (group, _), launches in times.items():
        sizes = sorted(set.union(*map(set, launches.values())))
        complete = [[of[s] for s in sizes] for of in launches.values() if len(of) == len(sizes)]
        if len(sizes) > 1 and complete:
            choices.append(choose(group, sizes, np.asarray(complete)))
    return choices


def choose(
    group: BucketGroup, sizes: list[int], times_s: npt.NDArray[np.float64], seed: int = 0
) -> BucketChoice:
    """sizes: bytes, ascending. times_s: (launches, sizes)."""
    logarithms = np.log(times_s)
    relative = np.exp(logarithms - logarithms.mean(axis=1, keepdims=True))
    typical = np.median(relative, axis=0)
    index, fastest = int(_smallest(typical[None])[0]), int(np.argmin(typical))
    low = high = None
    if len(times_s) > 1:
        drawn = resample(relative, REPLICATES, np.random.default_rng(seed))
        chosen = _smallest(np.median(drawn, axis=1))
        ends = {sizes[int(i)] for i in interval(chosen, INTERVAL, interpolated=False)}
        low, high = (min(ends), max(ends)) if len(ends) > 1 else (None, None)
    edge = ""
    if index == len(sizes) - 1:
        edge = f"{format_size(sizes[-1])} is the largest measured and larger may be faster"
    elif index == 0:
        edge = f"{format_size(sizes[0])} is the smallest measured and smaller may do"
    return BucketChoice(
        group=group,
        launches=len(times_s),
        bucket_bytes=sizes[index],
        bucket_cap_mb=None if edge else sizes[index] / MIB,
        low_bytes=low,
        high_bytes=high,
        fastest_bytes=sizes[fastest],
        loss=float(typical[index] / typical[fastest] - 1),
        edge=edge,
    )


def _smallest(times_s: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """(replicates, sizes) -> the index of the first whose rate is within 5% of the best, per replicate."""
    best = times_s.min(axis=1, keepdims=True)
    return np.asarray(np.argmax(best / times_s >= 1 - WITHIN, axis=1))
