"""Where public curves drop, and how often noise is taken for a drop, for `results/reference/bandwidth-drops.md`.

    python -m dtbench.tests.bandwidth_drops LOG...

LOG: outputs of nccl-tests and others, read as `dtbench import` reads them; those that it refuses are named at the end.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtbench.comparison.references import read_systems
from dtbench.errors import DtbenchError
from dtbench.grouping import group_by
from dtbench.importers import checks
from dtbench.importers.import_logs import read_logs
from dtbench.records.run import read_run
from dtbench.records.topology import BandwidthDrop
from dtbench.stats import bandwidth_drops
from dtbench.stats.drops import drops_of, drops_of_curve
from dtbench_core.cost.ring import busbw_factor

# What logs do not say and their sources do: ranks (20 and 51 by busbw / algbw), and what was measured.
RANKS = {"20": 96, "28": 16, "30": 8, "31": 16, "33": 2, "35": 16, "51": 32, "52": 8}
COLLECTIVES = {"05": "reduce"}
RESULTS = Path(__file__).parents[2] / "results"


class PublicCurve(NamedTuple):
    """points: (bytes, microseconds)."""

    source: str
    collective: str
    of: str
    ranks: int
    points: Sequence[tuple[int, float]]


def drops_in(curve: PublicCurve) -> list[BandwidthDrop]:
    points = sorted(dict(curve.points).items())
    name = "all_to_all" if curve.collective == "alltoall" else curve.collective
    times = [us * 1e-6 / busbw_factor(name, curve.ranks) for _, us in points]
    return drops_of_curve([size for size, _ in points], times, curve.collective, curve.of, curve.source)


def committed() -> Iterator[PublicCurve]:
    """The curves of results/reference."""
    for system in read_systems():
        for name, of in system.collectives.items():
            yield PublicCurve("systems.json", name, system.name, system.ranks, of.points)
    with (RESULTS / "reference" / "nccl-perf" / "single-node.csv").open() as file:
        rows = list(csv.DictReader(file))
    # Repeated keys are separate launches.
    keys = [(r["system"], r["table"], r["op"], r["n_gpus"]) for r in rows]
    nth = {}
    launches = []
    for key, row in zip(keys, rows, strict=True):
        nth[key, row["bytes"]] = nth.get((key, row["bytes"]), -1) + 1
        launches.append((*key, nth[key, row["bytes"]]))
    for (system, version, op, n, _), of in group_by(zip(launches, rows, strict=True), lambda x: x[0]).items():
        points = [(int(row["bytes"]), float(row["time (us)"])) for _, row in of]
        yield PublicCurve("single-node.csv", op, f"{n} x {system}, {version}", int(n), points)


def reported() -> Iterator[PublicCurve]:
    """Of reported drops: all_reduce out of place, ranks by busbw over algbw, microseconds from 2**low bytes on."""
    issues = {
        "NVIDIA/nccl#1453, H100": (
            24,
            20,
            (1626.5, 2325.3, 622.6, 992.6, 1334.9, 2180.1, 24410, 49264, 125807, 193909),
        ),
        "aws/aws-ofi-nccl#65, A100": (16, 23, (1321.5, 1896.7, 1931.6, 6586.3, 8189.9, 11812)),
    }
    for source, (ranks, low, times) in issues.items():
        points = [(2 ** (low + i), us) for i, us in enumerate(times)]
        yield PublicCurve(source, "all_reduce", "the world", ranks, points)


def curves_of_log(path: Path, refused: list[str]) -> Iterator[PublicCurve]:
    try:
        [log] = read_logs([path])
    except DtbenchError as error:
        refused.append(f"{path.name}: {error}")
        return
    number = path.name.partition("-")[0]
    checks.check(log, ranks=RANKS.get(number), collective=COLLECTIVES.get(number))
    for table in log.tables:
        if table.refusal or table.collective is None or table.ranks is None:
            refused.append(f"{path.name} line {table.line}: {table.refusal}")
            continue
        rows = [
            ((row.dtype, row.redop, row.root, f.in_place), (row.size_bytes, f.time.value * 1e6))
            for row, f in table.figures
            if row.size_bytes and f.time and not f.fault
        ]
        for (dtype, *_, in_place), of in group_by(rows, lambda x: x[0]).items():
            place = "in place" if in_place else "out of place"
            yield PublicCurve(
                path.name, table.collective, f"{dtype}, {place}", table.ranks, [p for _, p in of]
            )


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
    latencies = np.array([1, rng.uniform(1.2, 3), rng.uniform(2, 6.5)]) * latency
    ll, ll128, simple = (a + sizes / (rate * b) for a, b in zip(latencies, (0.5, 0.95, 1.0), strict=True))
    first, second = 2 ** rng.uniform(14, 19), 2 ** rng.uniform(20, 24)
    return np.where(sizes < first, ll, np.where(sizes < second, ll128, simple))


def _algorithms(rng: np.random.Generator, sizes: Times) -> Times:
    """One of less bandwidth, then one of up to five times the latency: tree and ring, ring and NVLS."""
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
        said = 0
        for _ in range(curves):
            sizes = _sizes(rng)
            times = times_of(rng, sizes) * np.exp(rng.normal(0, noise, sizes.size))
            said += bool(bandwidth_drops(sizes, times))
        rates[kind, noise] = said / curves
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


# ---------------------------------------------------------------------------- the page


def _page(logs: Sequence[Path]) -> Iterator[str]:
    refused: list[str] = []
    sources = {
        "results/reference": list(committed()),
        f"{len(logs)} logs": [curve for path in logs for curve in curves_of_log(path, refused)],
        "reports of drops": list(reported()),
    }
    yield "| curves of | curves | drops found |"
    yield "|---|---|---|"
    for source, curves in sources.items():
        yield f"| {source} | {len(curves)} | {sum(len(drops_in(curve)) for curve in curves)} |"
    runs = [read_run(path).results for path in sorted(RESULTS.glob("*.jsonl"))]
    yield f"| runs in results/ | of {len(runs)} files | {sum(len(drops_of(run)) for run in runs)} |\n"
    yield from (f"- {drop}" for curves in sources.values() for curve in curves for drop in drops_in(curve))
    yield (
        "\n| simulated, 2000 curves each: share with a drop found | "
        + " | ".join(f"noise {noise:.0%}" for noise in NOISES)
        + " |"
    )
    yield "|---|" + "---|" * len(NOISES)
    rates = simulated()
    for kind in (*HEALTHY, *(f"{depth}x" for depth in DEPTHS)):
        yield f"| {kind} | " + " | ".join(f"{rates[kind, noise]:.1%}" for noise in NOISES) + " |"
    yield "\nNot read:\n"
    yield from (f"- {reason}" for reason in refused)


if __name__ == "__main__":
    sys.stdout.write("\n".join(_page([Path(arg) for arg in sys.argv[1:]])) + "\n")
