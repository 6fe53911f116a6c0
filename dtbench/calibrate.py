"""Fits the constants of DTensor's collective cost model to measured times, per mesh dim.

Two levels come out. The first has the form of torch's own formulas (`torch.distributed.tensor.
_collective_utils`: all_gather, reduce_scatter and all_reduce as rings), so that its constants can
stand in place of the built-in ones:

    time_us = 6.6 + hops * latency_us_per_hop + size_GiB * hops / n / bandwidth_GiBps * 1e6

with hops = n - 1 for all_gather and reduce_scatter and 2 (n - 1) for all_reduce. The second is a
line of its own for every collective, time_us = alpha_us + size_GiB / beta_GiBps * 1e6: one
bandwidth cannot describe a backend whose reduce_scatter costs as much as its all_reduce (gloo).

What is fitted are times, never bus bandwidths. The loss is Huber's on log(predicted / measured), so
that 10 % off counts the same at 1 KiB and at 1 GiB; plain least squares would fit the largest sizes
alone. Sizes count by octave, however densely they were swept.

The time of a point. A sample is taken after a barrier, but ranks leave a barrier one by one, and a
rank's own reading includes its wait for the last one to arrive. The formulas know no such wait. So
within a group a sample is the *shortest* reading of its ranks (the last arrival, until it is done),
and over the groups of a dim, which run together, the *longest*: a dim is as slow as its slowest
group. Over samples it is the lower quartile, over launches the median.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from dtbench.costmodel import (
    BASE_LATENCY_US,
    GIB,
    INTER_HOST,
    INTRA_HOST,
    RING_COLLECTIVES,
    Array,
    Line,
    accuracy,
    fit_line,
    hops,
    predict_us,
)
from dtbench.errors import UsageError
from dtbench.model import Result, Run
from dtbench.topology import SCHEMA, read_topology, write_topology

__all__ = ["calibrate", "check_same_setup", "read_topology", "write_topology"]


INTERVAL = 0.9
REPLICATES = 200
SEED = 20240229


@dataclass(frozen=True)
class Point:
    """One collective at one size on one mesh dim: launch -> times of its samples, microseconds."""

    collective: str
    size_bytes: int
    launches: Mapping[tuple[str, int], Array]

    @property
    def measured_us(self) -> float:
        return float(np.median([np.quantile(samples, 0.25) for samples in self.launches.values()]))


def calibrate(runs: Sequence[Run]) -> dict[str, Any]:
    """The topology that the `collectives` results of one or several launches amount to.

    Raises:
        UsageError: no usable results, or runs that are not of one machine, mesh and backend.
    """
    check_same_setup(runs)
    header = runs[0].header
    names, shape = header["mesh"]["dim_names"], header["mesh"]["shape"]
    results = [(run.header["run_id"], r) for run in runs for r in run.ok("collectives") if _usable(r)]
    if not results:
        raise UsageError(
            f"no ok results of the collectives suite in {_paths(runs)}: "
            "measure them with `dtbench run collectives`, then calibrate that file"
        )
    warnings = _version_warnings(runs)
    chosen, notes = _choose(results)
    warnings += notes
    dims, left_out = [], []
    for index, (name, ranks) in enumerate(zip(names, shape, strict=True)):
        groups = _groups(shape, index)
        mine = [(run_id, r) for run_id, r in chosen if r.params["mesh_dim"] == name]
        reason = _why_left_out(ranks, mine)
        if reason:
            left_out.append({"name": name, "ranks": ranks, "reason": reason})
        else:
            dims.append(_calibrate_dim(name, groups, _hosts(header), mine))
    if not dims:
        reasons = "; ".join(f"{dim['name']}: {dim['reason']}" for dim in left_out)
        raise UsageError(f"no mesh dim of {_paths(runs)} can be calibrated ({reasons})")
    return {
        "kind": "topology",
        "schema": SCHEMA,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "runs": [_provenance(run) for run in runs],
        "device_type": _device_type(header),
        "backend": header["versions"].get("backend") or "unknown",
        "mesh": {"dim_names": list(names), "shape": list(shape)},
        "base_latency_us": BASE_LATENCY_US,
        "units": "GiB = 1024^3 bytes; us = microseconds; sizes are the whole tensor as one group holds it",
        "formula": "time_us = base_latency_us + hops * latency_us_per_hop"
        " + size_GiB * hops / ranks / bandwidth_GiBps * 1e6;"
        " hops = ranks - 1, all_reduce 2 * (ranks - 1)",
        "formula_of_one_collective": "time_us = alpha_us + size_GiB / beta_GiBps * 1e6",
        "interval_method": f"{INTERVAL:.0%} percentile interval, {REPLICATES} hierarchical bootstrap"
        f" replicates (launches, then samples), seed {SEED}",
        "dims": dims,
        "left_out": left_out,
        "warnings": warnings,
    }


# ------------------------------------------------------------------------- which runs go together


def check_same_setup(runs: Sequence[Run]) -> None:
    """Raises UsageError unless the runs are launches of one mesh, backend and machine."""
    if not runs:
        raise UsageError("no run given: name at least one file of `dtbench run`")
    seen: dict[str, Run] = {}
    for run in runs:
        run_id = run.header["run_id"]
        if run_id in seen:
            raise UsageError(f"{run.path} and {seen[run_id].path} are the same run ({run_id}): give it once")
        seen[run_id] = run
    first = _setup(runs[0])
    for run in runs[1:]:
        for what, value in _setup(run).items():
            if value != first[what]:
                raise UsageError(
                    f"{runs[0].path} and {run.path} differ in {what} ({first[what]} and {value}): "
                    "only launches of one setup can be put together, give the others separately"
                )


def _setup(run: Run) -> dict[str, object]:
    """What must agree. Hosts by their order of appearance: a scheduler may hand out other nodes."""
    header = run.header
    mesh, machine = header["mesh"], header["machine"]
    cpu = machine.get("cpu") or {}
    order: dict[str, int] = {}
    layout = [order.setdefault(host or "?", len(order)) for host in _hosts(header)]
    return {
        "mesh": ", ".join(f"{n}={s}" for n, s in zip(mesh["dim_names"], mesh["shape"], strict=True)),
        "backend": header["versions"].get("backend") or "unknown",
        "device type": _device_type(header),
        "CPU": cpu.get("model") or cpu.get("name") or "unknown",
        "GPUs": ", ".join(str(gpu.get("name")) for gpu in machine.get("gpus") or []) or "none",
        "hosts of the ranks": layout,
    }


def _device_type(header: Mapping[str, Any]) -> str:
    devices = [rank.get("device") for rank in header["ranks"] if rank.get("device")]
    return str(header["plan"].get("device_type") or (devices[0] if devices else "unknown")).split(":")[0]


def _hosts(header: Mapping[str, Any]) -> list[str | None]:
    """Host of every rank, by rank; None where the run does not say.

    The kernel's boot id tells hosts of one name apart ("localhost" on each node of a cluster).
    """
    by_rank = {
        rank["rank"]: f"{rank['host']} {rank.get('boot_id') or ''}"
        for rank in header["ranks"]
        if rank.get("host")
    }
    return [by_rank.get(rank) for rank in range(math.prod(header["mesh"]["shape"]))]


def _version_warnings(runs: Sequence[Run]) -> list[str]:
    warnings = []
    for what in ("torch", "nccl"):
        versions = sorted({str(run.header["versions"].get(what)) for run in runs})
        if len(versions) > 1:
            warnings.append(f"the runs have different versions of {what}: {', '.join(versions)}")
    if any(not run.complete for run in runs):
        cut = ", ".join(run.path.name for run in runs if not run.complete)
        warnings.append(f"incomplete run: {cut}; sizes or collectives may be missing")
    return warnings


def _provenance(run: Run) -> dict[str, Any]:
    return {
        "run_id": run.header["run_id"],
        "path": run.path.name,
        "versions": dict(run.header["versions"]),
        "hosts": len({host for host in _hosts(run.header) if host is not None}),
    }


def _paths(runs: Sequence[Run]) -> str:
    return ", ".join(str(run.path) for run in runs)


# ------------------------------------------------------------------------- which results count

Tagged = tuple[str, Result]  # run_id, result


def _usable(result: Result) -> bool:
    return bool(result.size_bytes) and "mesh_dim" in result.params


def _choose(results: Sequence[Tagged]) -> tuple[list[Tagged], list[str]]:
    """The isolated samples of one dtype; what had to be taken instead, in words."""
    notes = []
    for param, wanted in (("mode", "isolated"), ("dtype", "float32")):
        values = {r.params.get(param) for _, r in results}
        taken = wanted if wanted in values else min(values, key=str)
        if taken != wanted and values != {None}:
            notes.append(f"no results with {param} {wanted}: {taken} was taken")
        results = [(run_id, r) for run_id, r in results if r.params.get(param) == taken]
    return list(results), notes


def _why_left_out(ranks: int, results: Sequence[Tagged]) -> str | None:
    if ranks == 1:
        return "one rank: nothing is sent over this dim"
    sizes = {
        r.size_bytes
        for _, r in results
        if r.name in RING_COLLECTIVES and min(_samples_of(r, []), default=0) > 0
    }
    if not sizes:
        return f"no ok results of {', '.join(RING_COLLECTIVES)} on it"
    if len(sizes) < 2:
        return "one size only: latency and bandwidth cannot be told apart, measure a range of sizes"
    return None


def _groups(shape: Sequence[int], dim: int) -> list[list[int]]:
    """The groups of a mesh dim: ranks that differ in that coordinate alone. Meshes are row-major."""
    ranks = np.arange(math.prod(shape)).reshape(shape)
    return [list(map(int, group)) for group in np.moveaxis(ranks, dim, -1).reshape(-1, shape[dim])]


def _samples_of(result: Result, groups: Sequence[Sequence[int]]) -> list[float]:
    """Seconds per sample: the shortest reading within a group, the longest over the groups.

    Without the ranks' own readings (or where they do not match up) it is what the file holds, the
    longest over all ranks; without any samples, the lower quartile alone.
    """
    of_rank = {int(rank): samples for rank, samples in result.rank_samples_s.items()}
    lengths = {len(samples) for samples in of_rank.values()}
    per_group = [[of_rank[rank] for rank in group if rank in of_rank] for group in groups]
    per_group = [members for members in per_group if members]
    if per_group and len(lengths) == 1 and lengths != {0}:
        return [float(x) for x in np.max([np.min(members, axis=0) for members in per_group], axis=0)]
    if result.samples_s:
        return list(result.samples_s)
    return [result.time_s.p25] if result.time_s else []


def _points(results: Sequence[Tagged], groups: Sequence[Sequence[int]]) -> list[Point]:
    found: dict[tuple[str, int], dict[tuple[str, int], Array]] = {}
    for run_id, result in results:
        samples = np.array([s for s in _samples_of(result, groups) if s > 0]) * 1e6
        if samples.size and result.size_bytes:
            found.setdefault((result.name, result.size_bytes), {})[run_id, result.launch] = samples
    return [Point(name, size, launches) for (name, size), launches in sorted(found.items())]


# ------------------------------------------------------------------------------------ one mesh dim


def _calibrate_dim(
    name: str, groups: Sequence[Sequence[int]], hosts: Sequence[str | None], results: Sequence[Tagged]
) -> dict[str, Any]:
    ranks = len(groups[0])
    modes = {r.params.get("groups") for _, r in results}
    sharing = "together" if "together" in modes else "alone"
    kept = [(run_id, r) for run_id, r in results if r.params.get("groups", sharing) == sharing]
    points = _points(kept, groups)
    ring = [point for point in points if point.collective in RING_COLLECTIVES]
    warnings = _warnings_about_data(ring, groups, sharing, kept)
    line = _fit_ring(ring, np.array([p.measured_us for p in ring]), ranks)
    constants = {"bandwidth_GiBps": 1 / line.slope, "latency_us_per_hop": line.intercept}
    launches = {launch for point in ring for launch in point.launches}
    intervals = _bootstrap(ring, sorted(launches), ranks)
    residuals = _residuals(ring, ranks, constants)
    layout, hosts_per_group, layout_warnings = _layout(groups, hosts)
    warnings += layout_warnings + _warnings_aboutfit_line(ring, ranks, line, residuals)
    return {
        "name": name,
        "ranks": ranks,
        "groups": len(groups),
        "hosts_per_group": hosts_per_group,
        "groups_sharing": sharing,
        **constants,
        "bandwidth_is_lower_bound": line.slope_is_bound,
        **intervals,
        "intervals": f"over {len(launches)} launches"
        if len(launches) > 1
        else "within one launch only: too narrow",
        "builtin": _builtin(layout, ring, ranks),
        "fitted_on": {
            "collectives": sorted({p.collective for p in ring}),
            "size_bytes": [min(p.size_bytes for p in ring), max(p.size_bytes for p in ring)],
            "points": len(ring),
            "launches": len(launches),
            "sample": "shortest rank of a group, longest group"
            if all(r.rank_samples_s for _, r in kept)
            else "longest rank: the ranks' own samples are not in the file",
            "estimator": "p25 over samples, median over launches",
        },
        "residuals": residuals,
        "collectives": {
            collective: _fit_collective([p for p in points if p.collective == collective])
            for collective in sorted({p.collective for p in points})
        },
        "warnings": warnings,
    }


def _layout(
    groups: Sequence[Sequence[int]], hosts: Sequence[str | None]
) -> tuple[str | None, int | None, list[str]]:
    """Which built-in constants apply: by the hosts that the ranks reported, never by the mesh's shape."""
    if any(hosts[rank] is None for group in groups for rank in group):
        return None, None, ["the run does not say on which host each rank was: no built-in constants beside"]
    spans = [len({hosts[rank] for rank in group}) for group in groups]
    warnings = []
    if len(set(spans)) > 1:
        warnings.append(
            f"mixed dim: its groups span {min(spans)} to {max(spans)} hosts; it is priced by the slowest"
        )
    return "inter-host" if max(spans) > 1 else "intra-host", max(spans), warnings


def _builtin(layout: str | None, ring: Sequence[Point], ranks: int) -> dict[str, Any] | None:
    if layout is None:
        return None
    constants = INTER_HOST if layout == "inter-host" else INTRA_HOST
    logs = np.log([_ring_us(p, ranks, constants) / p.measured_us for p in ring])
    return {
        **constants,
        "layout": layout,
        "predicted_over_measured": float(np.exp(logs.mean())),
        "geometric_mean_ratio": float(np.exp(np.abs(logs).mean())),
    }


def _ring_us(point: Point, ranks: int, constants: Mapping[str, float]) -> float:
    return predict_us(
        point.collective,
        point.size_bytes,
        ranks,
        bandwidth_GiBps=constants["bandwidth_GiBps"],
        latency_us_per_hop=constants["latency_us_per_hop"],
    )


def _residuals(ring: Sequence[Point], ranks: int, constants: Mapping[str, float]) -> dict[str, Any]:
    predicted = [_ring_us(point, ranks, constants) for point in ring]
    return {
        **accuracy(predicted, [p.measured_us for p in ring]),
        "points": [
            {
                "collective": p.collective,
                "size_bytes": p.size_bytes,
                "measured_s": p.measured_us * 1e-6,
                "predicted_s": us * 1e-6,
            }
            for p, us in zip(ring, predicted, strict=True)
        ],
    }


# ----------------------------------------------------------------------------------------- fitting


def _fit_ring(points: Sequence[Point], measured_us: Array, ranks: int) -> Line:
    steps = np.array([hops(p.collective, ranks) for p in points], dtype=float)
    sizes = np.array([p.size_bytes for p in points], dtype=float)
    return fit_line(BASE_LATENCY_US, steps, steps * sizes / GIB / ranks * 1e6, sizes, measured_us)


def _fit_collective(points: Sequence[Point]) -> dict[str, Any]:
    """One collective's own line; `beta_GiBps` None where a single size leaves it open."""
    sizes = np.array([p.size_bytes for p in points], dtype=float)
    measured = np.array([p.measured_us for p in points])
    common = {
        "size_bytes": [int(sizes.min()), int(sizes.max())],
        "points": len(points),
        "measured": [{"size_bytes": p.size_bytes, "time_s": p.measured_us * 1e-6} for p in points],
    }
    if len(points) < 2:
        return {"alpha_us": None, "beta_GiBps": None, "geometric_mean_ratio": None, **common}
    gib = sizes / GIB * 1e6
    line = fit_line(0.0, np.ones_like(sizes), gib, sizes, measured)
    predicted = line.intercept + line.slope * gib
    return {
        "alpha_us": line.intercept,
        "beta_GiBps": 1 / line.slope,
        "beta_is_lower_bound": line.slope_is_bound,
        **accuracy(list(predicted), list(measured)),
        **common,
    }


def _bootstrap(
    points: Sequence[Point], launches: Sequence[tuple[str, int]], ranks: int
) -> dict[str, list[float]]:
    """Intervals of both constants: launches are drawn with replacement, then samples within each."""
    rng = np.random.default_rng(SEED)
    drawn = rng.integers(len(launches), size=(REPLICATES, len(launches)))
    # Lower quartile per replicate, point and drawn launch; NaN where that launch lacks the point.
    quartiles = np.full((REPLICATES, len(points), len(launches)), np.nan)
    for i, point in enumerate(points):
        for j, launch in enumerate(launches):
            samples = point.launches.get(launch)
            if samples is None:
                continue
            replicates, slots = np.nonzero(drawn == j)
            picks = samples[rng.integers(samples.size, size=(replicates.size, samples.size))]
            quartiles[replicates, i, slots] = np.quantile(picks, 0.25, axis=1)
    bandwidths, latencies = [], []
    for replicate in quartiles:
        present = ~np.isnan(replicate).all(axis=1)
        chosen = [p for p, there in zip(points, present, strict=True) if there]
        if len({p.size_bytes for p in chosen}) < 2:
            continue
        line = _fit_ring(chosen, np.nanmedian(replicate[present], axis=1), ranks)
        bandwidths.append(1 / line.slope)
        latencies.append(line.intercept)
    tails = [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2]
    return {
        "bandwidth_interval": [float(x) for x in np.quantile(bandwidths, tails)],
        "latency_interval": [float(x) for x in np.quantile(latencies, tails)],
    }


# ---------------------------------------------------------------------------------------- warnings


def _warnings_about_data(
    ring: Sequence[Point], groups: Sequence[Sequence[int]], sharing: str, kept: Sequence[Tagged]
) -> list[str]:
    warnings = []
    if sharing == "alone" and len(groups) > 1:
        warnings.append(
            "measured with one group alone; DTensor runs all groups of a dim at once, which may be slower"
        )
    missing = sorted(set(RING_COLLECTIVES) - {p.collective for p in ring})
    if missing:
        warnings.append(f"no results of {', '.join(missing)}: the constants rest on the other collectives")
    if not all(r.rank_samples_s for _, r in kept):
        warnings.append("without the ranks' own samples the times include the wait for the last rank")
    return warnings


def _warnings_aboutfit_line(
    ring: Sequence[Point], ranks: int, line: Line, residuals: Mapping[str, Any]
) -> list[str]:
    sizes = sorted({p.size_bytes for p in ring})
    ratio = sizes[-1] / sizes[0]
    warnings = []
    if ratio < 64:
        warnings.append(
            f"the sizes span a factor of {ratio:g} only: latency and bandwidth are hard to tell apart, "
            "measure from 1 KiB to the largest tensor in use"
        )
    slope_shares = [_share(p, ranks, line, "slope") for p in ring if p.size_bytes == sizes[-1]]
    if line.slope_is_bound:
        warnings.append(
            f"the times do not grow with size up to {sizes[-1]} bytes: the bandwidth is a lower bound only, "
            "measure larger sizes"
        )
    elif max(slope_shares) < 0.5:
        warnings.append(
            f"at the largest size bandwidth makes {max(slope_shares):.0%} of the time: it is poorly known, "
            "measure larger sizes"
        )
    intercept_shares = [_share(p, ranks, line, "intercept") for p in ring if p.size_bytes == sizes[0]]
    if line.intercept == 0:
        warnings.append(
            f"the latency fits to 0: the base of {BASE_LATENCY_US} us is all the formula has at small sizes"
        )
    elif max(intercept_shares) < 0.1:
        warnings.append(
            f"at the smallest size latency makes {max(intercept_shares):.0%} of the time: it is poorly "
            "known, measure smaller sizes"
        )
    if residuals["geometric_mean_ratio"] > 1.5:
        warnings.append(
            f"the stock formulas are off by {residuals['geometric_mean_ratio']:.2f}x in the geometric mean: "
            "the lines per collective describe this dim better"
        )
    return warnings


def _share(point: Point, ranks: int, line: Line, term: str) -> float:
    """How much of the predicted time one term makes."""
    steps = hops(point.collective, ranks)
    terms = {
        "intercept": steps * line.intercept,
        "slope": point.size_bytes / GIB * steps / ranks * line.slope * 1e6,
    }
    return terms[term] / (BASE_LATENCY_US + sum(terms.values()))
