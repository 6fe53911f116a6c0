"""A run file of as many results as one likes, with made-up numbers: `... large_run 200000 FILE [LAUNCHES]`.

Five launches, or as many as given, of three suites on a 4x2 mesh: half of it collectives with each rank's readings,
the others dispatch and redistribute. More results are more sizes and more ops.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dtbench.tests import made_up

MESH = {"dp": 4, "tp": 2}
LAUNCHES = 5
SAMPLES = 3  # of a case; files grow by samples, what reads them works by results
_BLOCK = 1000
_DTYPES = {"float32": 1.0, "bfloat16": 0.6, "float64": 1.9}
_NAMES = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter", "scatter")

Case = tuple[
    str, str, str, dict[str, Any], float, int | None, float | None
]  # ..., seconds, bytes, bus factor


def sizes(count: int) -> list[int]:
    """So many, from 1 KiB to 256 MiB."""
    return sorted({int(s) // 4 * 4 for s in np.geomspace(1024, 2**28, count)})


def collectives(count: int) -> Iterator[Case]:
    kinds = list(
        itertools.product(MESH, ("alone", "together"), ("isolated", "back_to_back"), _NAMES, _DTYPES)
    )
    for dim, groups, mode, name, dtype in kinds:
        ranks = MESH[dim]
        bandwidth, latency = made_up.TRUTH[dim]
        for size in sizes(-(-count // len(kinds))):
            params = {
                "mesh_dim": dim,
                "ranks": ranks,
                "groups": groups,
                "mode": mode,
                "dtype": dtype,
                "size": size,
            }
            us = made_up.ring_us(name, size, ranks, bandwidth, latency) * _DTYPES[dtype]
            us *= (0.5 if groups == "alone" else 1.0) * (0.8 if mode == "back_to_back" else 1.0)
            factor = made_up.BUSBW_FACTOR.get(name, lambda n: (n - 1) / n)(ranks)
            yield "collectives", name, "c10d", params, us * 1e-6, size, factor


def dispatch(count: int) -> Iterator[Case]:
    numbered = ((n, op) for n in itertools.count() for op in made_up.OPS)
    kinds = ("8", "2x4"), ("forward", "forward+backward"), ("cached", "first"), ("core", "torch", "local")
    for n, (name, placements, torch_us, core_us) in itertools.islice(numbered, -(-count // 24)):
        times = {"core": core_us, "torch": torch_us, "local": 0.14 * torch_us + 0.5}
        for mesh, way, call, impl in itertools.product(*kinds):
            us = times[impl] * (28 if call == "first" else 1) * (3.4 if "+" in way else 1)
            params = {"placements": placements, "mesh": mesh, "pass": way, "call": call}
            yield "dispatch", f"{name}_{n}" if n else name, impl, params, us * 1e-6, None, None


def redistribute(count: int) -> Iterator[Case]:
    steps = {"S(0)->R": 1.0, "S(1)->R": 1.4, "P->R": 2.0, "P->S(0)": 1.1, "S(0)->S(1)": 0.9, "R->S(0)": 0.05}
    for dim, (bandwidth, latency) in made_up.TRUTH.items():
        for size, (name, work) in itertools.product(sizes(-(-count // 24)), steps.items()):
            for impl, host_us in (("core", 60.0), ("torch", 104.0)):
                us = host_us + work * made_up.ring_us("all_gather", size, MESH[dim], bandwidth, latency)
                params = {"mesh_dim": dim, "ranks": MESH[dim], "dtype": "float32", "size": size}
                yield "redistribute", name, impl, params, us * 1e-6, size, None


def lines(count: int, launches: int = LAUNCHES) -> Iterator[dict[str, Any]]:
    """The results of a run, launch by launch."""
    rng = np.random.default_rng(0)
    each = count // launches
    whole = [*collectives(each // 2), *redistribute(each // 10)]
    left = max(each - len(whole), 0)  # a small run is of collectives alone
    whole += list(dispatch(left))[:left]
    for launch in range(launches):
        of_launch = rng.normal(0, 0.03)
        for at in range(0, len(whole), _BLOCK):
            block = whole[at : at + _BLOCK]
            exact = np.array([case[4] for case in block])[:, None, None]
            noise = rng.normal(of_launch, 0.05, (len(block), 8, SAMPLES))
            late = rng.exponential(0.2, noise.shape)
            late[np.arange(len(block)), rng.integers(8, size=len(block))] = 0
            yield from map(
                _line, block, np.round(exact * np.exp(noise) * (1 + late), 9), itertools.repeat(launch)
            )


def _line(case: Case, readings: Any, launch: int) -> dict[str, Any]:
    suite, name, impl, params, _, size, factor = case
    by_rank = (
        {str(r): tuple(map(float, of)) for r, of in enumerate(readings)} if suite == "collectives" else {}
    )
    samples = [float(x) for x in (readings.max(axis=0) if by_rank else readings[0])]
    result = made_up.result(
        suite,
        name,
        impl,
        params,
        samples,
        size_bytes=size,
        factor=factor,
        launch=launch,
        rank_samples=by_rank,
    )
    return msgspec.to_builtins(result)


def write(count: int, path: Path, launches: int = LAUNCHES) -> None:
    """About so many results, in a file."""
    hosts = [f"node-{rank // 4}" for rank in range(8)]
    head = made_up.header(MESH, hosts, launches=launches, run_id=f"large-{path.stem}")
    with path.open("wb") as file:
        for line in itertools.chain([head], lines(count, launches), [{"kind": "end"}]):
            file.write(msgspec.json.encode(line) + b"\n")


if __name__ == "__main__":
    write(int(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
