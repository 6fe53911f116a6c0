"""Recommends a bucket size: the smallest whose rate is within 5% of the best.

Larger buckets begin their communication later and need more memory. Launches differ from each other by more than sizes
do, so each time is divided by the geometric mean of its launch. The estimate of a size is the median over launches. The
interval of the recommended size is a bootstrap that resamples launches.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from dtbench.records.result import Run, integer_param
from dtbench.stats import interval, resample
from dtbench.text.units import format_size

TOLERANCE = 0.05
INTERVAL = 0.9
REPLICATES = 2000  # determine the 5% quantile to half a percent
MIB = 2**20
MEASURE = "measure with `dtbench run bucketer --size 1MiB:64MiB:2x --launches 5`"


class BucketGroup(NamedTuple):
    """A kind of communication for which a bucket size is recommended: a mesh dim, a dtype and a size of tensors."""

    mesh_dim: str
    ranks: int
    dtype: str
    tensor_bytes: int


class BucketChoice(msgspec.Struct, frozen=True, kw_only=True):
    """The recommended bucket size of a group.

    Attributes:
        launches: number of launches that measured all sizes.
        bucket_bytes: the smallest size within the tolerance.
        bucket_cap_mb: the same as an argument of DDP and inductor, which is in MiB despite its name (torch 2.13,
            nn/parallel/distributed.py and _inductor/fx_passes/bucketing.py multiply it by 1024 * 1024). None if the
            size is the smallest or the largest measured one.
        low_bytes: lower end of the 90% interval; None with a single launch, or if all replicates agree.
        high_bytes: upper end of the interval.
        fastest_bytes: the size with the best rate.
        loss: relative time lost compared to the fastest size.
        edge: the reason why there is no recommendation.
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
    """Chooses a bucket size for each group with results of the suite `bucketer` at two or more bucket sizes."""
    times: defaultdict[tuple[BucketGroup, int], dict[tuple[str, int], dict[int, float]]] = defaultdict(dict)
    for run in runs:
        for result in run.ok("bucketer"):
            params, time_s = result.params, result.estimate_s
            bucket_bytes, tensor_bytes, ranks, total_bytes = (
                integer_param(params, name)
                for name in ("bucket_bytes", "tensor_bytes", "ranks", "total_bytes")
            )
            if result.impl != "core" or not time_s or bucket_bytes <= 0 or tensor_bytes <= 0:
                continue
            group = BucketGroup(
                str(params.get("mesh_dim", "")), ranks, str(params.get("dtype", "")), tensor_bytes
            )
            launches = times[group, total_bytes]
            launches.setdefault((run.header.run_id, result.launch), {})[bucket_bytes] = time_s
    choices = []
    for (group, _), launches in times.items():
        sizes = sorted(set.union(*map(set, launches.values())))
        complete = [
            [by_size[size] for size in sizes] for by_size in launches.values() if len(by_size) == len(sizes)
        ]
        if len(sizes) > 1 and complete:
            choices.append(choose(group, sizes, np.asarray(complete)))
    return choices


def choose(
    group: BucketGroup, sizes: list[int], times_s: npt.NDArray[np.float64], seed: int = 0
) -> BucketChoice:
    """Chooses a bucket size.

    Args:
        sizes: bucket sizes in bytes, ascending.
        times_s: seconds, (launches, sizes).
    """
    logarithms = np.log(times_s)
    relative = np.exp(logarithms - logarithms.mean(axis=1, keepdims=True))
    typical = np.median(relative, axis=0)
    index, fastest = int(_smallest(typical[None])[0]), int(np.argmin(typical))
    low = high = None
    if len(times_s) > 1:
        chosen = _smallest(np.median(resample(relative, REPLICATES, np.random.default_rng(seed)), axis=1))
        bounds = {sizes[int(index)] for index in interval(chosen, INTERVAL, interpolated=False)}
        low, high = (min(bounds), max(bounds)) if len(bounds) > 1 else (None, None)
    edge = ""
    if index == len(sizes) - 1:
        edge = f"{format_size(sizes[-1])} is the largest measured size, and larger ones may be faster"
    elif index == 0:
        edge = f"{format_size(sizes[0])} is the smallest measured size, and smaller ones may be as fast"
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
    """Returns for each replicate the index of the first size whose rate is within 5% of the best."""
    return np.asarray(np.argmax(times_s.min(axis=1, keepdims=True) / times_s >= 1 - TOLERANCE, axis=1))
