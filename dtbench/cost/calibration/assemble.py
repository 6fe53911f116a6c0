"""Assembles the topology from runs: constants, curves, layout and contention of every mesh dim.

There are two levels. The first has the form of torch's own formulas (ring.py), a bandwidth and a latency per mesh dim,
and can replace the built-in constants. The second is a separate curve for every collective and redistribution. It is
needed since a single bandwidth cannot describe the copies before and after a collective, nor a backend whose
reduce_scatter costs as much as its all_reduce (gloo).
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from dtbench.cost.calibration import intervals, setups
from dtbench.cost.calibration.fit import Accuracy, Array, FittedLine, fit_curve, fit_ring, rising
from dtbench.cost.calibration.times import (
    COLLECTIVES,
    CallTimes,
    MeasuredDim,
    SizeTimes,
    builtin_link,
    call_label,
    measured_dims,
)
from dtbench.cost.estimate import ring_us
from dtbench.errors import UsageError
from dtbench.records.result import Run
from dtbench.records.topology import (
    SCHEMA,
    BandwidthDrop,
    BuiltIn,
    CalibratedTopology,
    Constants,
    Dim,
    FittedOn,
    FittedPoint,
    HostLayout,
    LeftOut,
    MeasuredCurve,
    Residuals,
    TableRow,
)
from dtbench.stats import interval
from dtbench.stats.drops import drops_of_curve
from dtbench.text.units import interval_or_none
from dtbench_core.cost.curve import Curve
from dtbench_core.cost.ring import BASE_LATENCY_US, GIB, INTER_HOST, RING_COLLECTIVES, busbw_factor, hops

ONE_LAUNCH = "from a single launch: too narrow"


def calibrate(runs: Sequence[Run]) -> CalibratedTopology:
    """Fits a topology to the `collectives` and `redistribute` results of launches.

    Raises:
        UsageError: the runs have no usable results, or differ in machine, mesh or backend.
    """
    setups.check_same_setup(runs)
    header = runs[0].header
    notes: list[str] = []
    measured = measured_dims(runs, notes)
    if not any(dim.collectives for dim in measured):
        raise UsageError(
            f"no ok results of the collectives suite in {setups.paths(runs)}: "
            "measure them with `dtbench run collectives`, then calibrate that file"
        )
    left_out = [
        LeftOut(name=dim.name, ranks=dim.ranks, reason=reason)
        for dim in measured
        if (reason := why_left_out(dim))
    ]
    dims = [calibrate_dim(dim) for dim in measured if why_left_out(dim) is None]
    if not dims:
        raise UsageError(
            f"no mesh dim of {setups.paths(runs)} can be calibrated "
            f"({'; '.join(f'{dim.name}: {dim.reason}' for dim in left_out)})"
        )
    return CalibratedTopology(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        runs=tuple(map(setups.source_of, runs)),
        device_type=setups.device_type(header),
        backend=setups.backend(header),
        mesh=header.mesh,
        base_latency_us=BASE_LATENCY_US,
        interval_method=intervals.METHOD,
        dims=tuple(dims),
        left_out=tuple(left_out),
        warnings=(*setups.version_warnings(runs), *notes),
    )


def calibrate_dim(dim: MeasuredDim) -> Dim:
    """Fits a mesh dim. `why_left_out` must be None for it."""
    ring = _ring_points(dim)
    names, points = [name for name, _ in ring], [point for _, point in ring]
    sizes, measured = np.array([(float(point.size_bytes), point.measured_us) for point in points]).T
    line = fit_ring(names, sizes, dim.ranks, measured)
    constants = Constants(bandwidth_GiBps=1 / line.slope, latency_us_per_hop=line.intercept)
    launches = {launch for point in points for launch in point.launches}

    def refit(times_us: Array) -> tuple[float, float]:
        refitted = fit_ring(names, sizes, dim.ranks, times_us)
        return 1 / refitted.slope, refitted.intercept

    bandwidth_interval, latency_interval = intervals.fitted(points, refit)
    residuals = _residuals(ring, dim.ranks, constants)
    curves = {
        kind: {name: curve_of(call) for name, call in calls.items()}
        for kind, calls in dim.calls.items()
        if calls
    }
    drops = tuple(drop for call in dim.collectives.values() for drop in _drops(dim, call))
    return Dim(
        name=dim.name,
        ranks=dim.ranks,
        groups=dim.groups,
        layout=dim.layout,
        groups_sharing=dim.sharing,
        bandwidth_GiBps=constants.bandwidth_GiBps,
        latency_us_per_hop=constants.latency_us_per_hop,
        bandwidth_is_lower_bound=line.slope_is_bound,
        bandwidth_interval=bandwidth_interval,
        latency_interval=latency_interval,
        intervals=f"over {len(launches)} launches" if len(launches) > 1 else ONE_LAUNCH,
        builtin=_builtin(dim.layout, residuals, dim.ranks),
        fitted_on=FittedOn(
            collectives=tuple(sorted(set(names))),
            size_bytes=(int(sizes.min()), int(sizes.max())),
            points=len(points),
            launches=len(launches),
            sample="last arrival to last end of a group, slowest group"
            if dim.own_times
            else "slowest rank: the file lacks the ranks' own samples",
            estimator="p25 over samples, median over launches",
        ),
        residuals=residuals,
        collectives=curves.pop(COLLECTIVES, {}),
        transitions=curves,
        contention=dim.contention,
        drops=drops,
        warnings=(
            *(f"{drop}{_exclusion_note(dim, drop)}" for drop in drops),
            *_data_warnings(dim),
            *dim.warnings,
            *_fit_warnings(ring, dim.ranks, line, residuals),
        ),
    )


def curve_of(call: CallTimes) -> MeasuredCurve:
    """Fits a call: a line and a table, with the intervals of what a new launch may measure."""
    sizes, measured = call.sizes, call.measured_us
    low, high = interval(intervals.new_launch(call.points), intervals.INTERVAL)
    launches = call.launches
    table = tuple(
        TableRow(
            size_bytes=point.size_bytes,
            time_us=float(time_us),
            measured_us=float(measured[i]),
            low_us=bounds and bounds[0],
            high_us=bounds and bounds[1],
            launch_us=tuple(point.by_launch.get(launch) for launch in launches),
        )
        for i, (point, time_us) in enumerate(zip(call.points, rising(measured), strict=True))
        for bounds in [interval_or_none(float(min(low[i], time_us)), float(max(high[i], time_us)))]
    )
    return MeasuredCurve(
        dtype=call.dtype,
        size_bytes=(int(sizes.min()), int(sizes.max())),
        points=len(table),
        launches=len(launches),
        table=table,
        # A single size determines neither a line nor a slope.
        **(_line(call.steady.thinned) | _end_bandwidth(call.thinned) if len(sizes) > 1 else {}),
    )


def _end_bandwidth(call: CallTimes) -> dict[str, Any]:
    """Returns the bandwidth at the largest sizes, with its interval.

    A line through all sizes may have another bandwidth: protocols, caches and the bursts of traffic shapers can make
    small messages faster.
    """

    def slope(times_us: Array) -> tuple[float]:
        return (Curve(tuple(call.sizes), tuple(rising(times_us))).end_slope() * GIB / 1e6,)  # seconds per GiB

    (end,), (bounds,) = slope(call.measured_us), intervals.fitted(call.points, slope)
    low, high = bounds or (end, end)
    if min(end, low) <= 0:  # times that do not grow with size determine no bandwidth
        return {}
    return {"end_GiBps": float(1 / end), "end_interval": (1 / high, 1 / low) if bounds else None}


def _line(call: CallTimes) -> dict[str, Any]:
    sizes, measured = call.sizes, call.measured_us

    def fit(times_us: Array) -> tuple[float, float]:
        line = fit_curve(sizes, times_us)
        return line.intercept, 1 / line.slope

    line = fit_curve(sizes, measured)
    alpha_interval, beta_interval = intervals.fitted(call.points, fit)
    return {
        "alpha_us": line.intercept,
        "beta_GiBps": 1 / line.slope,
        "beta_is_lower_bound": line.slope_is_bound,
        "alpha_interval": alpha_interval,
        "beta_interval": beta_interval,
        **Accuracy.of(line.intercept + line.slope * sizes / GIB * 1e6, measured)._asdict(),
    }


RingPoints = Sequence[tuple[str, SizeTimes]]  # collective, point


def _ring_points(dim: MeasuredDim) -> RingPoints:
    return [
        (name, point)
        for name in RING_COLLECTIVES
        if name in dim.collectives
        for point in dim.collectives[name].steady.thinned.points
    ]


def _drops(dim: MeasuredDim, call: CallTimes) -> list[BandwidthDrop]:
    sizes, factor = [point.size_bytes for point in call.points], busbw_factor(call.name, dim.ranks)
    return drops_of_curve(
        sizes, [1e-6 * point.measured_us / factor for point in call.points], call.name, dim.name, ""
    )


def _exclusion_note(dim: MeasuredDim, drop: BandwidthDrop) -> str:
    is_fitted = drop.first_bytes in dim.collectives[drop.collective].steady.sizes
    return "" if is_fitted else "; latency and bandwidth are fitted without these sizes"


def why_left_out(dim: MeasuredDim) -> str | None:
    """Returns the reason why latency and bandwidth cannot be fitted to a dim, or None."""
    if dim.ranks == 1:
        return "it has a single rank, which does not communicate"
    if not (sizes := {point.size_bytes for _, point in _ring_points(dim)}):
        return f"no ok results of {', '.join(RING_COLLECTIVES)}"
    if len(sizes) < 2:
        return "a single size does not determine latency and bandwidth; measure a range of sizes"
    return None


def _builtin(layout: HostLayout, residuals: Residuals, ranks: int) -> BuiltIn | None:
    """Returns torch's constants for the reported layout of the ranks, and their errors."""
    if (link := builtin_link(layout)) is None:
        return None
    constants = Constants(bandwidth_GiBps=link.bandwidth, latency_us_per_hop=link.latency_us)
    logs = np.log(
        [
            ring_us(point.collective, point.size_bytes, ranks, constants) * 1e-6 / point.measured_s
            for point in residuals.points
        ]
    )
    return BuiltIn(
        bandwidth_GiBps=link.bandwidth,
        latency_us_per_hop=link.latency_us,
        layout="inter-host" if link == INTER_HOST else "intra-host",
        predicted_over_measured=float(np.exp(logs.mean())),
        geometric_mean_ratio=float(np.exp(np.abs(logs).mean())),
    )


def _residuals(ring: RingPoints, ranks: int, constants: Constants) -> Residuals:
    predicted = [ring_us(name, point.size_bytes, ranks, constants) for name, point in ring]
    return Residuals(
        **Accuracy.of(predicted, [point.measured_us for _, point in ring])._asdict(),
        points=tuple(
            FittedPoint(
                collective=name,
                size_bytes=point.size_bytes,
                measured_s=point.measured_us * 1e-6,
                predicted_s=us * 1e-6,
            )
            for (name, point), us in zip(ring, predicted, strict=True)
        ),
    )


def _data_warnings(dim: MeasuredDim) -> Iterator[str]:
    if dim.sharing == "alone" and dim.groups > 1:
        yield "measured with only one group at work; DTensor uses all groups of a dim at once, which may be slower"
    if missing := [name for name in RING_COLLECTIVES if name not in dim.collectives]:
        yield f"no results of {', '.join(missing)}: latency and bandwidth are fitted to the other collectives"
    if not dim.own_times:
        yield "the file lacks the ranks' own samples: times include waiting for the last rank"
    for count, consequence in (
        (1, "a single size: no line is fitted, and estimates are valid only near that size"),
        (2, "only two sizes: a line fits any two points, so its error is unknown"),
    ):
        sparse = [call_label(kind, call.name) for kind, call in dim.all_calls() if len(call.points) == count]
        if sparse:
            yield f"{', '.join(sparse)} measured at {consequence}"


def _fit_warnings(ring: RingPoints, ranks: int, line: FittedLine, residuals: Residuals) -> Iterator[str]:
    sizes = sorted({point.size_bytes for _, point in ring})
    ratio = sizes[-1] / sizes[0]
    if ratio < 64:
        yield (
            f"the sizes span only a factor of {ratio:g}, which hardly separates latency from bandwidth; "
            "measure from 1 KiB to the largest tensor in use"
        )
    bandwidth = max(
        _shares(name, point, ranks, line)[1] for name, point in ring if point.size_bytes == sizes[-1]
    )
    if line.slope_is_bound:
        yield (
            f"the times do not grow with size up to {sizes[-1]} bytes, so the bandwidth is only a lower bound; "
            "measure larger sizes"
        )
    elif bandwidth < 0.5:
        yield (
            f"the bandwidth is inaccurate: at the largest size the transfer takes {bandwidth:.0%} of the time; "
            "measure larger sizes"
        )
    latency = max(
        _shares(name, point, ranks, line)[0] for name, point in ring if point.size_bytes == sizes[0]
    )
    if line.intercept == 0:
        yield f"the fitted latency is 0: at small sizes the formula gives its base of {BASE_LATENCY_US} us"
    elif latency < 0.1:
        yield (
            f"the latency is inaccurate: at the smallest size it takes {latency:.0%} of the time; "
            "measure smaller sizes"
        )
    if residuals.geometric_mean_ratio > 1.5:
        yield (
            f"the ring formulas are off by {residuals.geometric_mean_ratio:.2f}x in the geometric mean: "
            "use the curves per collective"
        )


def _shares(name: str, point: SizeTimes, ranks: int, line: FittedLine) -> tuple[float, float]:
    """Returns the shares of latency and transfer in the predicted time."""
    steps = hops(name, ranks)
    latency, transfer = steps * line.intercept, point.size_bytes / GIB * steps / ranks * line.slope * 1e6
    total = BASE_LATENCY_US + latency + transfer
    return latency / total, transfer / total
