"""From runs to the topology: constants, curves, layout and contention of every mesh dim.

Two levels. The first has the form of torch's own formulas (ring.py), one bandwidth and one latency per
mesh dim, so that it can stand in place of the built-in constants. The second is a curve of its own for
every collective and every change of placement: one bandwidth cannot describe a backend whose
reduce_scatter costs as much as its all_reduce (gloo), nor the copies around a collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from dtbench.cost.calibration import intervals, setups
from dtbench.cost.calibration.dims import MeasuredDim, builtin_link, in_words, measured_dims
from dtbench.cost.calibration.fit import Accuracy, Array, FittedLine, fit_curve, fit_ring, rising
from dtbench.cost.calibration.times import COLLECTIVES, CallTimes, SizeTimes
from dtbench.cost.price import ring_us
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

ONE_LAUNCH = "within one launch only: too narrow"


def calibrate(runs: Sequence[Run]) -> CalibratedTopology:
    """The topology that the `collectives` and `redistribute` results of launches amount to.

    Raises:
        UsageError: no usable results, or runs that are not of one machine, mesh and backend.
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
    dims, left_out = [], []
    for dim in measured:
        if reason := why_left_out(dim):
            left_out.append(LeftOut(name=dim.name, ranks=dim.ranks, reason=reason))
        else:
            dims.append(calibrate_dim(dim))
    if not dims:
        reasons = "; ".join(f"{dim.name}: {dim.reason}" for dim in left_out)
        raise UsageError(f"no mesh dim of {setups.paths(runs)} can be calibrated ({reasons})")
    return CalibratedTopology(
        schema=SCHEMA,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        runs=tuple(map(setups.provenance, runs)),
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
    """One entry of the topology's `dims`, of a dim that `why_left_out` gives no reason against."""
    ring = _ring_points(dim)
    names, points = [name for name, _ in ring], [p for _, p in ring]
    sizes, measured = np.array([(float(p.size_bytes), p.measured_us) for p in points]).T
    line = fit_ring(names, sizes, dim.ranks, measured)
    constants = Constants(bandwidth_GiBps=1 / line.slope, latency_us_per_hop=line.intercept)
    launches = {launch for point in points for launch in point.launches}

    def refit(times_us: Array) -> tuple[float, float]:
        again = fit_ring(names, sizes, dim.ranks, times_us)
        return 1 / again.slope, again.intercept

    bandwidth_interval, latency_interval = intervals.fitted(points, refit)
    residuals = _residuals(ring, dim.ranks, constants)
    curves = {
        what: {name: curve_of(call) for name, call in of.items()} for what, of in dim.calls.items() if of
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
            sample="last arrival to last end of a group, longest group"
            if dim.own_times
            else "longest rank: the ranks' own samples are not in the file",
            estimator="p25 over samples, median over launches",
        ),
        residuals=residuals,
        collectives=curves.pop(COLLECTIVES, {}),
        transitions=curves,
        contention=dim.contention,
        drops=drops,
        warnings=(
            *(f"{drop}{_left_out(dim, drop)}" for drop in drops),
            *_warnings_about_data(dim),
            *dim.warnings,
            *_warnings_about_fit(ring, dim.ranks, line, residuals),
        ),
    )


def curve_of(call: CallTimes) -> MeasuredCurve:
    """The line and the table of a call, with what a new launch may measure."""
    sizes, measured = call.sizes, call.measured_us
    low, high = interval(intervals.new_launch(call.points), intervals.INTERVAL)
    launches = call.launches
    table = tuple(
        TableRow(
            size_bytes=p.size_bytes,
            time_us=float(time_us),
            measured_us=float(measured[i]),
            low_us=bounds and bounds[0],
            high_us=bounds and bounds[1],
            launch_us=tuple(p.by_launch.get(launch) for launch in launches),
        )
        for i, (p, time_us) in enumerate(zip(call.points, rising(measured), strict=True))
        for bounds in [interval_or_none(float(min(low[i], time_us)), float(max(high[i], time_us)))]
    )
    # A single size leaves the line open, and the slope at its end.
    fitted = _line(call.steady.thinned) | _end(call.thinned) if len(sizes) > 1 else {}
    return MeasuredCurve(
        dtype=call.dtype,
        size_bytes=(int(sizes.min()), int(sizes.max())),
        points=len(table),
        launches=len(launches),
        table=table,
        **fitted,
    )


def _end(call: CallTimes) -> dict[str, Any]:
    """The bandwidth that the table ends with, which one line through all sizes need not have: a protocol, a cache or
    a shaper's burst that serves small messages better pulls the line, not the end."""

    def slope(times_us: Array) -> tuple[float]:
        times = Curve(tuple(call.sizes), tuple(rising(times_us)))
        return (times.end_slope() * GIB / 1e6,)  # seconds per GiB

    (end,), (bounds,) = slope(call.measured_us), intervals.fitted(call.points, slope)
    low, high = bounds or (end, end)
    if min(end, low) <= 0:  # times that do not grow with size say nothing of a bandwidth
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
    measured = [(name, dim.collectives[name]) for name in RING_COLLECTIVES if name in dim.collectives]
    return [(name, point) for name, call in measured for point in call.steady.thinned.points]


def _drops(dim: MeasuredDim, call: CallTimes) -> list[BandwidthDrop]:
    sizes, factor = [p.size_bytes for p in call.points], busbw_factor(call.name, dim.ranks)
    times_s = [1e-6 * p.measured_us / factor for p in call.points]
    return drops_of_curve(sizes, times_s, call.name, dim.name, "")


def _left_out(dim: MeasuredDim, drop: BandwidthDrop) -> str:
    is_fitted = drop.first_bytes in dim.collectives[drop.collective].steady.sizes
    return "" if is_fitted else ": left out of the constants"


def why_left_out(dim: MeasuredDim) -> str | None:
    """Why the ring's constants cannot be fitted to a dim, or None."""
    if dim.ranks == 1:
        return "one rank: nothing is sent over this dim"
    sizes = {point.size_bytes for _, point in _ring_points(dim)}
    if not sizes:
        return f"no ok results of {', '.join(RING_COLLECTIVES)} on it"
    if len(sizes) < 2:
        return "one size only: latency and bandwidth cannot be told apart, measure a range of sizes"
    return None


def _builtin(layout: HostLayout, residuals: Residuals, ranks: int) -> BuiltIn | None:
    """torch's constants for where the ranks really are, and how far off they are."""
    link = builtin_link(layout)
    if link is None:
        return None
    constants = Constants(bandwidth_GiBps=link.bandwidth, latency_us_per_hop=link.latency_us)
    predicted = ((ring_us(p.collective, p.size_bytes, ranks, constants), p) for p in residuals.points)
    logs = np.log([us * 1e-6 / p.measured_s for us, p in predicted])
    return BuiltIn(
        bandwidth_GiBps=link.bandwidth,
        latency_us_per_hop=link.latency_us,
        layout="inter-host" if link == INTER_HOST else "intra-host",
        predicted_over_measured=float(np.exp(logs.mean())),
        geometric_mean_ratio=float(np.exp(np.abs(logs).mean())),
    )


def _residuals(ring: RingPoints, ranks: int, constants: Constants) -> Residuals:
    predicted = [ring_us(name, p.size_bytes, ranks, constants) for name, p in ring]
    return Residuals(
        **Accuracy.of(predicted, [p.measured_us for _, p in ring])._asdict(),
        points=tuple(
            FittedPoint(
                collective=name,
                size_bytes=p.size_bytes,
                measured_s=p.measured_us * 1e-6,
                predicted_s=us * 1e-6,
            )
            for (name, p), us in zip(ring, predicted, strict=True)
        ),
    )


def _warnings_about_data(dim: MeasuredDim) -> Iterator[str]:
    if dim.sharing == "alone" and dim.groups > 1:
        yield "measured with one group alone; DTensor runs all groups of a dim at once, which may be slower"
    missing = [name for name in RING_COLLECTIVES if name not in dim.collectives]
    if missing:
        yield f"no results of {', '.join(missing)}: the constants rest on the other collectives"
    if not dim.own_times:
        yield "without the ranks' own samples the times include the wait for the last rank"
    for count, what in (
        (1, "one size only: no line is fitted, and prices hold near that size alone"),
        (2, "two sizes only: a line fits any two points, so its error is unknown"),
    ):
        few = [in_words(what, call.name) for what, call in dim.all_calls() if len(call.points) == count]
        if few:
            yield f"{', '.join(few)} measured at {what}"


def _warnings_about_fit(
    ring: RingPoints, ranks: int, line: FittedLine, residuals: Residuals
) -> Iterator[str]:
    sizes = sorted({p.size_bytes for _, p in ring})
    ratio = sizes[-1] / sizes[0]
    if ratio < 64:
        yield (
            f"the sizes span a factor of {ratio:g} only: latency and bandwidth are hard to tell apart, "
            "measure from 1 KiB to the largest tensor in use"
        )
    bandwidth = max(_shares(name, p, ranks, line)[1] for name, p in ring if p.size_bytes == sizes[-1])
    if line.slope_is_bound:
        yield (
            f"the times do not grow with size up to {sizes[-1]} bytes: the bandwidth is a lower bound only, "
            "measure larger sizes"
        )
    elif bandwidth < 0.5:
        yield (
            f"at the largest size bandwidth makes {bandwidth:.0%} of the time: it is poorly known, "
            "measure larger sizes"
        )
    latency = max(_shares(name, p, ranks, line)[0] for name, p in ring if p.size_bytes == sizes[0])
    if line.intercept == 0:
        yield (
            f"the latency fits to 0: the base of {BASE_LATENCY_US} us is all the formula has at small sizes"
        )
    elif latency < 0.1:
        yield (
            f"at the smallest size latency makes {latency:.0%} of the time: it is poorly "
            "known, measure smaller sizes"
        )
    if residuals.geometric_mean_ratio > 1.5:
        yield (
            f"the stock formulas are off by {residuals.geometric_mean_ratio:.2f}x in the geometric mean: "
            "the curves per collective describe this dim better"
        )


def _shares(name: str, point: SizeTimes, ranks: int, line: FittedLine) -> tuple[float, float]:
    """How much of the predicted time latency and bandwidth make."""
    steps = hops(name, ranks)
    latency, transfer = steps * line.intercept, point.size_bytes / GIB * steps / ranks * line.slope * 1e6
    whole = BASE_LATENCY_US + latency + transfer
    return latency / whole, transfer / whole
