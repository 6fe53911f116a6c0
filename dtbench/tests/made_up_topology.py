"""Topologies with made-up numbers, for tests only: nothing here was measured."""

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import structs

from dtbench.records.result import MeshShape
from dtbench.records.topology import (
    SCHEMA,
    CalibratedTopology,
    Dim,
    FittedOn,
    FromRun,
    HostLayout,
    MeasuredCurve,
    Residuals,
    TableRow,
)
from dtbench_core.cost.ring import BASE_LATENCY_US, Ring

GIB = 1024**3
SIZES = tuple(2**k for k in range(10, 31))  # 1 KiB to 1 GiB


def a_curve(
    alpha_us: float,
    beta_GiBps: float,  # noqa: N803 - the unit, as the topology file spells it
    sizes: Sequence[int] = SIZES,
    spread: float = 1.2,
) -> MeasuredCurve:
    """Times on the line alpha + size / beta, with an interval of a factor `spread` on either side."""
    times = [alpha_us + size / GIB / beta_GiBps * 1e6 for size in sizes]
    return curve_of(sizes, times, alpha_us=alpha_us, beta_GiBps=beta_GiBps, spread=spread)


def curve_of(
    sizes: Sequence[int],
    times_us: Sequence[float],
    *,
    alpha_us: float | None = None,
    beta_GiBps: float | None = None,  # noqa: N803
    spread: float = 1.2,
) -> MeasuredCurve:
    return MeasuredCurve(
        alpha_us=alpha_us,
        beta_GiBps=beta_GiBps,
        beta_is_lower_bound=False,
        alpha_interval=None if alpha_us is None else (alpha_us / spread, alpha_us * spread),
        beta_interval=None if beta_GiBps is None else (beta_GiBps / spread, beta_GiBps * spread),
        geometric_mean_ratio=1.01,
        worst_ratio=1.1,
        size_bytes=(min(sizes), max(sizes)),
        points=len(sizes),
        launches=5,
        table=tuple(
            TableRow(
                size_bytes=size, time_us=time, low_us=time / spread, high_us=time * spread, measured_us=time
            )
            for size, time in zip(sizes, times_us, strict=True)
        ),
    )


def ring_curve(collective: str, ranks: int, bandwidth: float, latency: float) -> MeasuredCurve:
    """A collective that takes just what torch's ring formula says."""
    times = [Ring(ranks, bandwidth, latency).collective_us(collective, size) for size in SIZES]
    hops = (2 if collective == "all_reduce" else 1) * (ranks - 1)
    return curve_of(
        SIZES,
        times,
        alpha_us=BASE_LATENCY_US + hops * latency,
        beta_GiBps=bandwidth * ranks / hops,
    )


def a_dim(
    name: str,
    ranks: int,
    bandwidth: float,
    latency: float,
    *,
    collectives: Mapping[str, MeasuredCurve] | None = None,
    transitions: Mapping[str, MeasuredCurve] | None = None,
    layout: Literal["intra-host", "inter-host", "mixed"] | None = None,
    **changes: object,
) -> Dim:
    """A mesh dim. bandwidth: GiB/s; latency: us per hop; transitions: those of torch."""
    dim = Dim(
        name=name,
        ranks=ranks,
        groups=2,
        layout=HostLayout(kind=layout),
        groups_sharing="together",
        bandwidth_GiBps=bandwidth,
        latency_us_per_hop=latency,
        bandwidth_interval=(bandwidth * 0.9, bandwidth * 1.1),
        latency_interval=(latency * 0.9, latency * 1.1),
        intervals="over 5 launches",
        builtin=None,
        fitted_on=FittedOn(
            collectives=("all_gather",), size_bytes=(SIZES[0], SIZES[-1]), points=len(SIZES), launches=5
        ),
        residuals=Residuals(geometric_mean_ratio=1.01, worst_ratio=1.1, points=()),
        collectives=dict(collectives or {}),
        transitions={"core": {}, "torch": dict(transitions or {})},
        contention={},
    )
    return structs.replace(dim, **changes)


def ring_dim(
    name: str, ranks: int, bandwidth: float, latency: float, *collectives: str, **more: object
) -> Dim:
    """A mesh dim whose collectives take what the ring formula says."""
    curves = {collective: ring_curve(collective, ranks, bandwidth, latency) for collective in collectives}
    return structs.replace(a_dim(name, ranks, bandwidth, latency, collectives=curves), **more)


def a_topology(*dims: Dim, **changes: object) -> CalibratedTopology:
    topology = CalibratedTopology(
        schema=SCHEMA,
        created="2026-11-21T12:00:00+00:00",
        runs=(FromRun(run_id="made-up", path="a.jsonl", versions={"torch": "2.13.0"}, hosts=1),),
        device_type="cpu",
        backend="gloo",
        mesh=MeshShape(dim_names=tuple(dim.name for dim in dims), shape=tuple(dim.ranks for dim in dims)),
        base_latency_us=BASE_LATENCY_US,
        dims=dims,
    )
    return structs.replace(topology, **changes)
