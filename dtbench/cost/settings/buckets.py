"""The smallest bucket whose rate is within 5% of the best: larger ones begin later and hold more memory.

A launch as a whole is fast or slow by more than sizes differ, so a time counts against the other sizes of its launch:
over the launch's geometric mean. The estimate of a bucket is the median of that over launches; its interval is that of
the choice, by a bootstrap over launches, each drawn with all its sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dtbench.stats import drawn_again, interval
from dtbench.suite import Run
from dtbench.suite.errors import UsageError
from dtbench.text.units import format_size

WITHIN = 0.05
INTERVAL = 0.9
REPLICATES = 2000  # the 5% quantile of which is known to half a percent
HALVES = 200
MIB = 2**20
# torch 2.13, _inductor/config.py and fx_passes/fsdp.py; other versions keep their own estimate elsewhere.
INDUCTOR = (
    "Inductor takes a cap that is set as it is; its own estimate it keeps within 10 to 500 MiB (torch 2.13; 50 to "
    "2000 in other versions)."
)
MEASURE = "measure with `dtbench run bucketer --size 1MiB:64MiB:2x --launches 5`"
# What a bucket belongs to: mesh dim, ranks, dtype, bytes of one tensor and of all.
Group = tuple[str, int, str, int, int]


@dataclass(frozen=True)
class Sweep:
    """times_s: (launches, buckets), of launches that have every size. buckets: bytes, ascending."""

    group: Group
    buckets: tuple[int, ...]
    times_s: npt.NDArray[np.float64]

    @property
    def relative(self) -> npt.NDArray[np.float64]:
        """(launches, buckets): times over the geometric mean of their launch."""
        logarithms = np.log(self.times_s)
        return np.asarray(np.exp(logarithms - logarithms.mean(axis=1, keepdims=True)))


@dataclass(frozen=True)
class Choice:
    """bucket, low, high, fastest: bytes. low, high: the 90% interval; None with one launch. loss: by how much the
    choice is slower than the fastest, as a share. edge: where the bucket is the smallest or the largest measured, what
    to measure before it is set: beyond that nothing is known."""

    group: Group
    launches: int
    bucket: int
    low: int | None
    high: int | None
    fastest: int
    loss: float
    edge: str = ""

    @property
    def cap_mb(self) -> float | None:
        """As DDP's and inductor's `bucket_cap_mb` count it: both multiply by 1024 * 1024 (torch 2.13,
        nn/parallel/distributed.py and _inductor/fx_passes/bucketing.py). None at the edge of the sweep."""
        return None if self.edge else self.bucket / MIB


def sweeps_of(runs: Iterable[Run]) -> list[Sweep]:
    """The sweeps over bucket sizes that runs of the suite `bucketer` hold, of the implementation `core`.

    Raises:
        UsageError: none has two sizes in one launch.
    """
    times: defaultdict[Group, dict[tuple[str, int], dict[int, float]]] = defaultdict(dict)
    for run in runs:
        for r in run.ok("bucketer"):
            p = r.params
            if r.impl != "core" or not r.estimate_s or not {"bucket_bytes", "tensor_bytes"} <= p.keys():
                continue
            group = (
                str(p.get("mesh_dim", "")),
                int(p.get("ranks", 0)),
                str(p.get("dtype", "")),
                int(p["tensor_bytes"]),
                int(p.get("total_bytes", 0)),
            )
            times[group].setdefault((run.header.run_id, r.launch), {})[int(p["bucket_bytes"])] = r.estimate_s
    found = []
    for group, launches in times.items():
        sizes = tuple(sorted(set.union(*map(set, launches.values()))))
        whole = [[of[s] for s in sizes] for of in launches.values() if len(of) == len(sizes)]
        if len(sizes) > 1 and whole:
            found.append(Sweep(group, sizes, np.asarray(whole)))
    if not found:
        raise UsageError(f"got no results of the bucketer over two or more bucket sizes: {MEASURE}")
    return found


def choose(sweep: Sweep, seed: int = 0) -> Choice:
    """The smallest bucket within 5% of the best rate, with its interval over launches."""
    n = len(sweep.times_s)
    typical = np.median(sweep.relative, axis=0)
    low = high = None
    if n > 1:
        drawn = drawn_again(sweep.relative, REPLICATES, np.random.default_rng(seed))
        chosen = _smallest(np.median(drawn, axis=1))
        low, high = (sweep.buckets[int(i)] for i in interval(chosen, INTERVAL, interpolated=False))
    index = int(_smallest(typical[None])[0])
    fastest = int(np.argmin(typical))
    loss = float(typical[index] / typical[fastest] - 1)
    edge = ""
    if index == len(sweep.buckets) - 1:
        edge = f"{format_size(sweep.buckets[-1])} is the largest measured and larger may be faster"
    elif index == 0:
        edge = f"{format_size(sweep.buckets[0])} is the smallest measured and smaller may do"
    return Choice(sweep.group, n, sweep.buckets[index], low, high, sweep.buckets[fastest], loss, edge)


def held_out_loss(sweep: Sweep, seed: int = 0) -> float:
    """By how much the choice made on half of the launches is slower than the best of the others, as a share: the mean
    over random halves.

    Raises:
        UsageError: a single launch.
    """
    n = len(sweep.times_s)
    if n < 2:
        raise UsageError(
            "--split chooses on half of the launches, and got a single one: measure with --launches 10"
        )
    rng = np.random.default_rng(seed)
    losses = []
    for _ in range(HALVES):
        order = rng.permutation(n)
        seen, other = (np.median(sweep.relative[of], axis=0) for of in (order[: n // 2], order[n // 2 :]))
        losses.append(other[int(_smallest(seen[None])[0])] / other.min() - 1)
    return float(np.mean(losses))


def _smallest(times_s: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """(replicates, buckets) -> the index of the first whose rate is within 5% of the best, per replicate."""
    best = times_s.min(axis=1, keepdims=True)
    return np.asarray(np.argmax(best / times_s >= 1 - WITHIN, axis=1))
