"""Bandwidth drops in public curves, and false alarms in simulated ones, for `results/reference/bandwidth-drops.md`."""

import csv
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtbench.comparison.references import read_systems
from dtbench.records.topology import BandwidthDrop
from dtbench.stats import bandwidth_drops
from dtbench.stats.drops import drops_of_curve
from dtbench_core.cost.ring import busbw_factor

RESULTS = Path(__file__).parents[2] / "results"


class PublicCurve(NamedTuple):
    """points: (bytes, microseconds)."""

    source: str
    collective: str
    of: str
    ranks: int
    points: Sequence[tuple[int, float]]


def drops_in(curve: PublicCurve) -> list[BandwidthDrop]:
    sizes, times_us = zip(*sorted(dict(curve.points).items()), strict=True)
    factor = busbw_factor("all_to_all" if curve.collective == "alltoall" else curve.collective, curve.ranks)
    return drops_of_curve(
        sizes, [us * 1e-6 / factor for us in times_us], curve.collective, curve.of, curve.source
    )


def committed() -> Iterator[PublicCurve]:
    """The curves of results/reference."""
    for system in read_systems():
        for name, published in system.collectives.items():
            yield PublicCurve("systems.json", name, system.name, system.ranks, published.points)
    points: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    launches: Counter[tuple[str, ...]] = Counter()
    with (RESULTS / "reference" / "nccl-perf" / "single-node.csv").open() as file:
        for row in csv.DictReader(file):
            key = (row["system"], row["table"], row["op"], row["n_gpus"])
            # Sizes that a table has twice belong to separate launches.
            launches[*key, row["bytes"]] += 1
            curve = points.setdefault((*key, str(launches[*key, row["bytes"]])), [])
            curve.append((int(row["bytes"]), float(row["time (us)"])))
    for (system, version, op, n, _), curve in points.items():
        yield PublicCurve("single-node.csv", op, f"{n} x {system}, {version}", int(n), curve)


# ---------------------------------------------------------------------------- simulated

Times = NDArray[np.float64]
NOISES = (0.0, 0.05, 0.1)
DEPTHS = (0.25, 0.4, 0.5, 0.6)


def _line(rng: np.random.Generator, sizes: Times) -> Times:
    """10 to 100 us and 10 to 400 GB/s."""
    return 10 ** rng.uniform(1, 2) + sizes / 10 ** rng.uniform(4, 5.6)


def _protocols(rng: np.random.Generator, sizes: Times) -> Times:
    """LL, LL128 and Simple (NVIDIA/nccl#281), changed where they need not be the fastest."""
    latency, rate = 10 ** rng.uniform(0.8, 1.8), 10 ** rng.uniform(4, 5.6)
    later, last = rng.uniform(1.2, 3), rng.uniform(2, 6.5)
    ll, ll128, simple = (a * latency + sizes / (rate * b) for a, b in ((1, 0.5), (later, 0.95), (last, 1.0)))
    first, second = 2 ** rng.uniform(14, 19), 2 ** rng.uniform(20, 24)
    return np.where(sizes < first, ll, np.where(sizes < second, ll128, simple))


def _algorithms(rng: np.random.Generator, sizes: Times) -> Times:
    """Switches to an algorithm with more bandwidth and up to five times the latency: tree to ring, ring to NVLS."""
    latency, rate = 10 ** rng.uniform(0.8, 1.8), 10 ** rng.uniform(4, 5.6)
    first, second = latency + sizes / (rate * rng.uniform(0.6, 1)), latency * rng.uniform(1, 5) + sizes / rate
    return np.where(sizes < 2 ** rng.uniform(18, 26), first, second)


def _caches(rng: np.random.Generator, sizes: Times) -> Times:
    """A CPU's: a factor of 1.3 less from 1 to 16 MiB."""
    slower = 1 + 0.3 * np.clip(np.log2(sizes / 2**20) / 4, 0, 1)
    return 10 ** rng.uniform(1.5, 2.7) + slower * sizes / 10 ** rng.uniform(3, 4.3)


HEALTHY: dict[str, Callable[[np.random.Generator, Times], Times]] = {
    "latency and bandwidth": _line,
    "LL, LL128, Simple": _protocols,
    "tree, ring, NVLS": _algorithms,
    "caches of a CPU": _caches,
}


def _sizes(rng: np.random.Generator) -> Times:
    """Sweeps by 2 and by 4, from 8 B to 8 GiB, and of three to five sizes by 4 from 16 MiB or more."""
    low = int(rng.integers(24, 27))
    few = range(low, low + 2 * int(rng.integers(3, 6)), 2)
    sweeps = (range(3, 34), range(10, 34, 2), range(10, 31), range(20, 33), few)
    return 2.0 ** np.array(sweeps[rng.integers(len(sweeps))])


def simulated(curves: int = 2000, seed: int = 1) -> dict[tuple[str, float], float]:
    """(kind of healthy curve, or depth of a drop; noise of each time) -> share of the curves with a drop found."""
    rng = np.random.default_rng(seed)
    rates = {}
    for noise, (kind, times_of) in itertools.product(NOISES, HEALTHY.items()):
        alarms = 0
        for _ in range(curves):
            sizes = _sizes(rng)
            times = times_of(rng, sizes) * np.exp(rng.normal(0, noise, sizes.size))
            alarms += bool(bandwidth_drops(sizes, times))
        rates[kind, noise] = alarms / curves
    for noise, depth in itertools.product(NOISES, DEPTHS):
        found = 0
        for _ in range(curves):
            sizes = _sizes(rng)
            first = max(2, len(sizes) - int(rng.integers(1, 3)))  # the largest size or the two largest
            times = 20 + sizes / 200e3
            times[first:] /= depth
            drops = bandwidth_drops(sizes, times * np.exp(rng.normal(0, noise, sizes.size)))
            found += any(drop.start == first for drop in drops)
        rates[f"{depth}x", noise] = found / curves
    return rates
