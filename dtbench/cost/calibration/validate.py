"""How well a topology predicts runs that it was not fitted on.

The measure is exp(mean |ln(predicted / measured)|), 1 being perfect: a percentage flatters a model that
is too low, which can be 100 % off at most. A launch is one forecast's target, not their median, since
that is what a program will meet. The *noise floor* is what launches differ by among themselves: every
other launch known, of the new runs or of those the topology was fitted on, as the forecast of each new
one at the sizes both have. No model of one number per size can do much better.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from dtbench.cost.calibration.assemble import calibrate_dim, curves_of, why_left_out
from dtbench.cost.calibration.measured import Measured, called, measured_dims
from dtbench.cost.calibration.models import WORDS, CurvesOnly, Models, devices_per_host
from dtbench.cost.calibration.points import COLLECTIVES, Point, Series
from dtbench.cost.calibration.setups import backend, check_same_setup, device_type, version_warnings
from dtbench.cost.price import price
from dtbench.records.cost_model import CallGroup, Score, Validation
from dtbench.records.topology import Dim, MeasuredCurve, Topology
from dtbench.suite import Run
from dtbench.suite.errors import UsageError
from dtbench_core.cost.ring import RING_COLLECTIVES

KIB, MIB = 1024, 1024**2
REGIMES = {
    "all": (0, 2**63),
    "< 64 KiB": (0, 64 * KIB),
    "64 KiB - 1 MiB": (64 * KIB, MIB + 1),
    "> 1 MiB": (MIB + 1, 2**63),
    ">= 32 MiB": (32 * MIB, 2**63),
}
RING, OTHER = "ring collectives", "other collectives"
MIN_SIZES = 3  # of a curve, to hold one out between two ends


@dataclass
class _Errors:
    """Log errors and sizes by model, and how many values lay within their interval."""

    logs: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    inside: list[bool] = field(default_factory=list)
    beyond: int = 0
    one_launch: bool = False

    def add(self, model: str, size_bytes: int, predicted_us: float, measured_us: float) -> None:
        self.logs.setdefault(model, []).append((size_bytes, float(np.log(predicted_us / measured_us))))

    def group(self, name: str) -> CallGroup:
        return CallGroup(
            name=name,
            scores={model: _scores(self.logs[model]) for model in WORDS if model in self.logs},
            inside=float(np.mean(self.inside)) if self.inside else None,
            points=len(self.inside),
            beyond=self.beyond,
            one_launch=self.one_launch,
        )


def _scores(errors: Sequence[tuple[int, float]]) -> dict[str, Score]:
    sizes, logs = np.array([size for size, _ in errors]), np.array([log for _, log in errors])
    scores = {}
    for regime, (least, end) in REGIMES.items():
        mine = logs[(sizes >= least) & (sizes < end)]
        if mine.size:
            scores[regime] = Score(
                points=int(mine.size),
                geometric_mean_ratio=float(np.exp(np.abs(mine).mean())),
                median_error=float(np.median(np.abs(np.expm1(mine)))),
            )
    return scores


def validate(topology: Topology, runs: Sequence[Run], *, same: bool = False) -> Validation:
    """The models' errors on the runs' launches.

    same: allow runs that the topology was fitted on; the result then says so.

    Raises:
        UsageError: runs of another setup than the topology's, or that it was fitted on.
    """
    check_same_setup(runs)
    notes = [*_fitted_on(topology, runs, same), *version_warnings(runs)]
    measured, chosen = measured_dims(runs)
    dims = _common(topology, measured, runs)
    header = runs[0].header
    devices, guess = devices_per_host(header, topology.device_type)
    models = Models(topology.dims, topology.mesh, devices)
    notes += [*chosen, *_differences(models, dims), f"PyTorch's guess: {guess}"]
    launches = sorted({launch for dim in dims for _, s in dim.all_series() for launch in s.launches})
    title = f"{len(launches)} new launch{'es' * (len(launches) > 1)} of {_names(dims)}"
    return _validation(title, _scored(models, dims, use_fitted=not same), notes)


def validate_split(run: Run) -> Validation:
    """The models' errors at every second size of a run, fitted on the others and both ends.

    Raises:
        UsageError: no collective or transition measured at three sizes or more.
    """
    measured, notes = measured_dims([run])
    held, fitted, few = [], [], 0
    for dim in measured:
        kept, out = (dim.map(functools.partial(_alternate, kept=kept)) for kept in (True, False))
        few += len([*dim.all_series()]) - len([*kept.all_series()])
        if dim.ranks > 1 and [*kept.all_series()]:
            held.append(out)
            fitted.append(_fit(kept))
    if not held:
        raise UsageError(
            f"{run.path} has no collective measured at {MIN_SIZES} sizes or more: none can be held out; "
            "measure a range of sizes, 1KiB:1GiB:4x for one"
        )
    devices, guess = devices_per_host(run.header, device_type(run.header))
    models = Models(fitted, run.header.mesh, devices)
    notes += version_warnings([run])
    if few:
        notes.append(f"{few} curves with fewer than {MIN_SIZES} sizes were left out")
    title = f"every second size of {run.path.name}, fitted on the others"
    groups = _scored(models, held, use_fitted=False)
    return _validation(title, groups, [*notes, f"PyTorch's guess: {guess}"])


def _validation(title: str, groups: tuple[CallGroup, ...], notes: Sequence[str]) -> Validation:
    return Validation(models=WORDS, title=title, groups=groups, notes=tuple(notes))


def _scored(models: Models, dims: Sequence[Measured], *, use_fitted: bool) -> tuple[CallGroup, ...]:
    errors: dict[str, _Errors] = {}
    for dim in dims:
        for what, series in dim.all_series():
            curve = models.curve(dim.name, what, series.name)
            if curve is None:
                continue
            into = errors.setdefault(_group_of(what, series.name), _Errors())
            into.one_launch |= curve.launches == 1
            fitted = {row.size_bytes: row.launch_us for row in curve.table if use_fitted}
            for point in series.points:
                _score_point(into, models, dim.name, what, series.name, point, curve)
                known = [us for us in fitted.get(point.size_bytes, ()) if us is not None]
                new = list(point.by_launch.values())
                for i, value in enumerate(new):
                    for forecast in (*new[:i], *new[i + 1 :], *known):
                        into.add("floor", point.size_bytes, forecast, value)
    return tuple(
        errors[name].group(name) for name in sorted(errors, key=lambda n: (n != RING, n != OTHER, n))
    )


def _score_point(
    into: _Errors, models: Models, dim: str, what: str, name: str, point: Point, curve: MeasuredCurve
) -> None:
    predicted = models.predict_us(dim, what, name, point.size_bytes)
    expected = price(curve, point.size_bytes)
    for measured in point.by_launch.values():
        for model, time_us in predicted.items():
            into.add(model, point.size_bytes, time_us, measured)
        if expected.extrapolated:
            into.beyond += 1
        else:
            into.inside.append(expected.low_us <= measured <= expected.high_us)


def _group_of(what: str, name: str) -> str:
    if what != COLLECTIVES:
        return f"changes of placement, {what}"
    return RING if name in RING_COLLECTIVES else OTHER


def _names(dims: Sequence[Measured]) -> str:
    return ", ".join(f"{dim.name}={dim.ranks}" for dim in dims)


# ------------------------------------------------------------------------------- runs and topologies


def _fitted_on(topology: Topology, runs: Sequence[Run], same: bool) -> list[str]:
    known = {run.run_id for run in topology.runs}
    own = [str(run.path) for run in runs if run.header.run_id in known]
    if own and not same:
        raise UsageError(
            f"{', '.join(own)} is what the topology was fitted on, so its errors would flatter: "
            "give a run of another day, or --same to see them nevertheless"
        )
    return [f"FITTED ON THE SAME RUN ({', '.join(own)}): a new launch will be further off"] if own else []


def _common(topology: Topology, measured: Sequence[Measured], runs: Sequence[Run]) -> list[Measured]:
    """The dims that both have."""
    header, path = runs[0].header, runs[0].path
    for what, ours, theirs in (
        ("backend", topology.backend, backend(header)),
        ("device type", topology.device_type, device_type(header)),
    ):
        if ours != theirs:
            raise UsageError(
                f"the topology is of {what} {ours}, {path} of {theirs}: calibrate on what is used"
            )
    known = {dim.name: dim.ranks for dim in topology.dims}
    common = [dim for dim in measured if known.get(dim.name) == dim.ranks and [*dim.all_series()]]
    if not common:
        have = ", ".join(f"{name}={ranks}" for name, ranks in known.items())
        raise UsageError(
            f"no mesh dim of the topology ({have}) was measured in {path} ({_names(measured)}): "
            "give a run of `dtbench run collectives redistribute` on the same mesh"
        )
    return common


def _pair(of: tuple[int, int] | None) -> list[int] | None:
    return None if of is None else list(of)


def _differences(models: Models, dims: Sequence[Measured]) -> list[str]:
    """What is not alike between the topology and the runs, and may make the errors."""
    notes = []
    for dim in dims:
        ours = models.dims[dim.name]
        then, now = ours.layout.hosts_per_group, dim.layout.hosts_per_group
        if then != now:
            notes.append(
                f"{dim.name} spans {_pair(now)} hosts in the runs (least, most), {_pair(then)} in the topology"
            )
        if isinstance(ours, Dim) and ours.groups_sharing != dim.sharing:
            notes.append(
                f"{dim.name} was measured {dim.sharing} in the runs, {ours.groups_sharing} in the topology"
            )
        unknown = []
        for what, series in dim.all_series():
            curve = models.curve(dim.name, what, series.name)
            name = called(what, series.name)
            if curve is None:
                unknown.append(name)
            elif curve.dtype not in ("", series.dtype):
                notes.append(
                    f"{name} over {dim.name} is {series.dtype} in the runs, {curve.dtype} in the topology"
                )
        if unknown:
            notes.append(f"not scored, since the topology has no {', '.join(unknown)} over {dim.name}")
    return notes


# ------------------------------------------------------------------------------------ held-out sizes


def _alternate(series: Series, *, kept: bool) -> Series:
    """Every second size and the last, or those between; a series that is too short keeps none."""
    sizes = [p.size_bytes for p in series.points]
    if len(sizes) < MIN_SIZES:
        return series.only(())
    fitted = {*sizes[::2], sizes[-1]}
    return series.only(fitted if kept else set(sizes) - fitted)


def _fit(dim: Measured) -> Dim | CurvesOnly:
    if why_left_out(dim) is None:
        return calibrate_dim(dim)
    return CurvesOnly(dim.name, dim.ranks, dim.layout, *curves_of(dim))
