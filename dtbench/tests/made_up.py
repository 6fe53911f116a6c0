"""Run files with made-up numbers of a plausible shape, for tests only: nothing here was measured."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dtbench.records.read import convert
from dtbench.records.result import Header, Result, Run
from dtbench.records.run import RunWriter
from dtbench.stats import summarize
from dtbench.suite import Param

# The program in this process (conftest.py).
Cli = Callable[..., tuple[int, str, str]]
KIB, MIB = 1024, 1024**2
SIZES = tuple(KIB * 4**k for k in range(8))  # 1 KiB to 16 MiB
# True constants of the collectives: dim -> (GiB/s, us per hop). Calibration has to recover them.
TRUTH = {"dp": (0.4, 250.0), "tp": (1.6, 90.0)}
BUSBW_FACTOR = {"all_reduce": lambda n: 2 * (n - 1) / n, "broadcast": lambda n: 1.0}

# A result for each status except ok.
NOT_OK = (
    Result("collectives", "all_to_all", "c10d", {"mesh_dim": "tp"}, "wrong", "got 3, expected 4", rank=1),
    Result("bucketer", "reduce_scatter", "core", {"mesh_dim": "tp"}, "failed", "out of memory", rank=3),
    Result("dispatch", "foreach_add", "torch", {"mesh": "8"}, "skipped", "no rule for it"),
)


def result(
    suite: str,
    name: str,
    impl: str,
    params: Mapping[str, Param],
    samples: Sequence[float],
    *,
    rank_samples: Mapping[str, Sequence[float]] | None = None,
    size_bytes: int | None = None,
    factor: float | None = None,
    counters: Mapping[str, float] | None = None,
    launch: int = 0,
) -> Result:
    times = summarize(samples)
    host = suite == "dispatch"
    algbw = size_bytes / (times.min if host else times.p25) if size_bytes else None
    return Result(
        suite,
        name,
        impl,
        dict(params),
        "ok",
        size_bytes=size_bytes,
        time_s=times,
        samples_s=tuple(samples),
        rank_samples_s={k: tuple(v) for k, v in (rank_samples or {}).items()},
        algbw_Bps=algbw,
        busbw_Bps=algbw * factor if algbw and factor else None,
        counters=dict(counters or {}),
        launch=launch,
        clock="host" if host else "device",
    )


def header(
    mesh: Mapping[str, int] = {"dp": 2, "tp": 2},
    hosts: Sequence[str] = ("node-a", "node-a", "node-b", "node-b"),
    **changes: Any,
) -> dict[str, Any]:
    return {
        "kind": "run",
        "schema": 1,
        "run_id": "20260101-120000-abcd",
        "started": "2026-01-01T12:00:00+00:00",
        "argv": ["dtbench", "run", "--mesh", ",".join(f"{k}={v}" for k, v in mesh.items())],
        "versions": {
            "dtbench": "0.1.0",
            "torch": "2.13.0+cpu",
            "python": "3.11.7",
            "backend": "gloo",
            "nccl": None,
        },
        "git": {"commit": "0123456789abcdef0123456789abcdef01234567", "dirty": False},
        "machine": {"cpu": {"model": "Made-up CPU @ 2.00GHz", "logical_cores": 4}, "gpus": []},
        "ranks": [
            {"rank": i, "host": host, "local_rank": i % 2, "device": "cpu", "pid": 100 + i}
            for i, host in enumerate(hosts)
        ],
        "mesh": {"dim_names": list(mesh), "shape": list(mesh.values())},
        "env": {"OMP_NUM_THREADS": "1"},
        "options": {"device_type": "cpu", "dtypes": ["float32"]},
        "suites": ["dispatch", "redistribute", "collectives", "bucketer", "tensor_parallel"],
        "launches": 1,
    } | changes


def read(header: Mapping[str, Any]) -> Header:
    """The header as a reader of its file gets it."""
    return convert({"kind": "run", "schema": 1, "run_id": "r", **header}, Header)


def run(results: Sequence[Result], path: str = "made-up.jsonl", complete: bool = True, **changes: Any) -> Run:
    return Run(Path(path), read(header(**changes)), tuple(results), complete)


def write(path: Path, run: Run) -> Path:
    """The run as a file."""
    with RunWriter.create(path, run.header) as writer:
        for result in run.results:
            writer.append(result)
        writer.end()
    return path


def ring_us(name: str, size: int, ranks: int, bandwidth: float, latency: float) -> float:
    """torch's formula, written a second time on purpose: the tests compare with it."""
    steps = (2 if name == "all_reduce" else 1) * (ranks - 1)
    return 6.6 + steps * latency + size / 1024**3 * steps / ranks / bandwidth * 1e6


def collectives(
    seed: int = 0,
    *,
    mesh: Mapping[str, int] = {"dp": 2, "tp": 2},
    truth: Mapping[str, tuple[float, float]] = TRUTH,
    names: Sequence[str] = (
        "all_gather",
        "all_reduce",
        "all_to_all",
        "broadcast",
        "reduce_scatter",
        "scatter",
    ),
    sizes: Sequence[int] = SIZES,
    modes: Sequence[str] = ("alone", "together"),
    noise: float = 0.05,
    samples: int = 40,
    launch: int = 0,
    launch_factor: float = 1.0,
) -> Iterator[Result]:
    """Collectives that follow torch's formula (twice as fast alone), with noise and late ranks.

    Every sample has one rank that arrived last and reads the true time; the others read more.
    """
    rng = np.random.default_rng(seed)
    world = math.prod(mesh.values())
    grid = np.arange(world).reshape(tuple(mesh.values()))
    for (dim, ranks), groups, name, size in itertools.product(mesh.items(), modes, names, sizes):
        bandwidth, latency = truth[dim]
        params = {
            "mesh_dim": dim,
            "ranks": ranks,
            "groups": groups,
            "mode": "isolated",
            "dtype": "float32",
            "size": size,
        }
        alone = 2.0 if groups == "alone" else 1.0
        true_s = ring_us(name, size, ranks, bandwidth * alone, latency) * 1e-6 * launch_factor
        exact = true_s * np.exp(rng.normal(0, noise, samples))
        late = rng.exponential(0.3 * true_s, (world, samples))
        for group in np.moveaxis(grid, list(mesh).index(dim), -1).reshape(-1, ranks):
            late[rng.choice(group, samples), np.arange(samples)] = 0.0
        times = exact + late
        yield result(
            "collectives",
            name,
            "c10d",
            params,
            times.max(axis=0).tolist(),
            rank_samples={str(rank): times[rank].tolist() for rank in range(world)},
            size_bytes=size,
            factor=BUSBW_FACTOR.get(name, lambda n: (n - 1) / n)(ranks),
            launch=launch,
        )


OPS = (
    ("add", "S(0),S(0)", 8.4, 5.1),
    ("add", "R,R", 8.1, 4.9),
    ("mul_scalar", "S(0)", 7.9, 4.6),
    ("view", "S(0)", 9.2, 7.0),
    ("transpose", "S(1)", 7.5, 6.8),
    ("matmul", "S(0),R", 12.3, 9.6),
    ("addmm", "R,S(0),R", 14.0, 11.8),
    ("linear_3d", "S(0),R", 31.2, 26.9),
    ("sum", "S(0)", 10.1, 9.0),
    ("softmax", "S(0)", 11.7, 9.9),
    ("layer_norm", "S(0)", 22.9, 24.8),
    ("cat", "S(0),S(0)", 16.8, 12.1),
    ("split", "S(0)", 21.0, 15.2),
    ("slice", "S(0)", 9.9, 8.2),
    ("add_", "S(0),S(0)", 8.0, 4.4),
    ("from_local", "S(0)", 19.5, 9.8),
    ("to_local", "S(0)", 1.3, 1.1),
    ("detach", "S(0)", 6.1, 4.0),
)


def slowed(results: Iterable[Result], factor: float | Callable[[Result, int], float]) -> list[Result]:
    """Each rank's samples times the factor, or factor(result, rank)."""

    def times(result: Result, rank: str, samples: Sequence[float]) -> tuple[float, ...]:
        by = factor(result, int(rank)) if callable(factor) else factor
        return tuple(by * t for t in samples)

    return [
        msgspec.structs.replace(r, rank_samples_s={k: times(r, k, v) for k, v in r.rank_samples_s.items()})
        for r in results
    ]


def dispatch(seed: int = 1) -> Iterator[Result]:
    rng = np.random.default_rng(seed)
    meshes = (("8", 1.0), ("2x4", 1.15))
    passes = (("forward", 1.0), ("forward+requires_grad", 1.7), ("forward+backward", 3.4))
    calls = (
        ("core", "cached"),
        ("core", "first"),
        ("torch", "cached"),
        ("torch", "first"),
        ("local", "cached"),
    )
    for (mesh, slower), (direction, factor), op, (impl, call) in itertools.product(
        meshes, passes, OPS, calls
    ):
        name, placements, torch_us, core_us = op
        us = {"core": core_us * slower, "torch": torch_us * slower, "local": 0.14 * torch_us + 0.5}[impl]
        more, count = (28.0, 3) if call == "first" else (1.0, 60)
        params = {"placements": placements, "mesh": mesh, "pass": direction, "call": call}
        samples = 1e-6 * us * factor * more * np.exp(rng.normal(0, 0.04, count))
        yield result("dispatch", name, impl, params, samples.tolist())


def redistribute(seed: int = 2) -> Iterator[Result]:
    rng = np.random.default_rng(seed)
    steps = {"S(0)->R": 1.0, "S(1)->R": 1.4, "P->R": 2.0, "P->S(0)": 1.1, "S(0)->S(1)": 0.9, "R->S(0)": 0.05}
    sizes, impls = (64 * KIB, MIB, 16 * MIB), (("core", 60.0), ("torch", 104.0))
    for dim, size, (name, work), (impl, host_us) in itertools.product(TRUTH, sizes, steps.items(), impls):
        us = host_us + work * ring_us("all_gather", size, 2, *TRUTH[dim])
        samples = 1e-6 * us * np.exp(rng.normal(0, 0.05, 20))
        params = {"mesh_dim": dim, "ranks": 2, "dtype": "float32", "size": size}
        yield result("redistribute", name, impl, params, samples.tolist(), size_bytes=size)


def bucketer(seed: int = 3) -> Iterator[Result]:
    rng = np.random.default_rng(seed)
    total = 64 * MIB
    limit_s = ring_us("reduce_scatter", total, 2, 1.6, 90) * 1e-6
    for tensor, bucket in itertools.product((16 * KIB, 256 * KIB), (MIB, 4 * MIB, 16 * MIB, 64 * MIB)):
        params = {
            "mesh_dim": "dp",
            "ranks": 2,
            "dtype": "float32",
            "tensor_bytes": tensor,
            "bucket_bytes": bucket,
            "total_bytes": total,
        }
        unbucketed_s = total / tensor * ring_us("reduce_scatter", tensor, 2, 1.6, 90) * 1e-6
        for impl, seconds, calls in (
            ("core", limit_s * (1.1 + 0.02 * 64 * MIB / bucket / 4 + 40 * KIB / tensor / 8), total // bucket),
            ("unbucketed", unbucketed_s, total // tensor),
            ("limit", limit_s, 1),
        ):
            yield result(
                "bucketer",
                "reduce_scatter",
                impl,
                params,
                (seconds * np.exp(rng.normal(0, 0.05, 12))).tolist(),
                size_bytes=total,
                factor=0.5,
                counters={"collectives": calls, "bytes_copied": total, "peak_bytes": bucket * 2},
            )


def tensor_parallel(seed: int = 4) -> Iterator[Result]:
    rng = np.random.default_rng(seed)
    for (name, work), (direction, factor), (impl, ms) in itertools.product(
        (("mlp", 1.0), ("attention", 1.7)),
        (("forward", 1.0), ("forward+backward", 2.9)),
        (("core", 2.6), ("torch", 3.1), ("local", 1.9)),
    ):
        samples = 1e-3 * ms * work * factor * np.exp(rng.normal(0, 0.06, 20))
        params = {"mesh_dim": "tp", "ranks": 2, "pass": direction, "dtype": "float32", "hidden": 512}
        yield result("tensor_parallel", name, impl, params, samples.tolist())


def everything(**changes: Any) -> Run:
    """A complete run of all five suites."""
    return run([*dispatch(), *redistribute(), *collectives(), *bucketer(), *tensor_parallel()], **changes)
