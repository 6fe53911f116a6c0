"""How well a topology predicts runs that it was not fitted on.

The measure is exp(mean |ln(predicted / measured)|), 1 being perfect: a percentage flatters a model that
is too low, which can be 100 % off at most. A launch is one forecast's target, not their median, since
that is what a program will meet. The *noise floor* is what launches differ by among themselves: every
other launch known, of the new runs or of those the topology was fitted on, as the forecast of each new
one at the sizes both have. No model of one number per size can do much better.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from msgspec import Struct

from dtbench.cost.calibration.assemble import calibrate_dim, why_left_out
from dtbench.cost.calibration.dims import MeasuredDim, builtin_link, in_words, measured_dims
from dtbench.cost.calibration.setups import backend, check_same_setup, device_type, version_warnings
from dtbench.cost.calibration.times import COLLECTIVES, CallTimes
from dtbench.cost.price import price, ring_us
from dtbench.errors import UsageError
from dtbench.fields import Amount, Count
from dtbench.records.result import Header, MeshShape, Run
from dtbench.records.topology import CalibratedTopology, Dim, MeasuredCurve
from dtbench_core.cost.ring import GIB, RING_COLLECTIVES, Ring, guessed_links

# In order of what they know. The noise floor is no model: one launch's times as the forecast of another's.
WORDS = {
    "builtin": "PyTorch's constants, layout guessed from the mesh's shape",
    "builtin_layout": "PyTorch's constants, layout from the ranks' hosts",
    "builtin_scaled": "the same times one fitted number",
    "ring": "calibrated latency and bandwidth of each dim",
    "line": "each call's own latency and bandwidth",
    "table": "each call's own table (what prices are)",
    "floor": "noise floor: one launch forecasts another",
}
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


class Score(Struct, frozen=True, kw_only=True):
    """How far predictions lie from measurements. ratio: the typical factor; median_error: |p / m - 1|."""

    points: Count
    geometric_mean_ratio: Amount
    median_error: Amount


class CallGroup(Struct, frozen=True, kw_only=True):
    """The calls that are scored together. scores: model -> regime of sizes -> score, where there are points.

    inside: share of the new values within the topology's 90 % intervals, of `points` that lie inside the
    tables' sizes; beyond: the number of those outside, which the scores count too. one_launch: whether
    the intervals come from a single launch, so that they are too narrow.
    """

    name: str
    scores: dict[str, dict[str, Score]]
    inside: Amount | None
    points: Count
    beyond: Count
    one_launch: bool


class Validation(Struct, frozen=True, kw_only=True):
    """models: each in words. notes: what to know about the groups' scores."""

    kind: Literal["validation"] = "validation"
    models: dict[str, str]
    title: str
    groups: tuple[CallGroup, ...]
    notes: tuple[str, ...]


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


def validate(topology: CalibratedTopology, runs: Sequence[Run], *, same: bool = False) -> Validation:
    """The models' errors on the runs' launches.

    same: allow runs that the topology was fitted on; the result then says so.

    Raises:
        UsageError: runs of another setup than the topology's, or that it was fitted on.
    """
    check_same_setup(runs)
    notes = [*_fitted_on(topology, runs, same), *version_warnings(runs)]
    dims = _common(topology, measured_dims(runs, notes), runs)
    devices, guess = devices_per_host(runs[0].header, topology.device_type)
    models = Models(topology.dims, topology.mesh, devices)
    notes += [*_differences(models, dims), f"PyTorch's guess: {guess}"]
    launches = sorted({launch for dim in dims for _, call in dim.all_calls() for launch in call.launches})
    return Validation(
        models=WORDS,
        title=f"{len(launches)} new launch{'es' * (len(launches) > 1)} of {_names(dims)}",
        groups=_scored(models, dims, use_fitted=not same),
        notes=tuple(notes),
    )


def validate_split(run: Run) -> Validation:
    """The models' errors at every second size of a run, fitted on the others and both ends.

    Raises:
        UsageError: no ring collective measured at three sizes or more.
    """
    notes: list[str] = []
    held, fitted, few = [], [], 0
    for dim in measured_dims([run], notes):
        kept, out = (dim.map(functools.partial(_alternate, kept=kept)) for kept in (True, False))
        few += len([*dim.all_calls()]) - len([*kept.all_calls()])
        if why_left_out(kept) is None:
            held.append(out)
            fitted.append(calibrate_dim(kept))
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
    return Validation(
        models=WORDS,
        title=f"every second size of {run.path.name}, fitted on the others",
        groups=_scored(models, held, use_fitted=False),
        notes=(*notes, f"PyTorch's guess: {guess}"),
    )


def _scored(models: Models, dims: Sequence[MeasuredDim], *, use_fitted: bool) -> tuple[CallGroup, ...]:
    errors: dict[str, _Errors] = {}
    for dim in dims:
        for what, call in dim.all_calls():
            curve = models.curve(dim.name, what, call.name)
            if curve is None:
                continue
            into = errors.setdefault(_group_of(what, call.name), _Errors())
            into.one_launch |= curve.launches == 1
            fitted = {row.size_bytes: row.launch_us for row in curve.table if use_fitted}
            for point in call.points:
                size = point.size_bytes
                expected = price(curve, size)
                predicted = models.by_constants_us(dim.name, what, call.name, size) | {
                    "table": expected.time_us
                }
                if curve.alpha_us is not None and curve.beta_GiBps is not None:
                    predicted["line"] = max(curve.alpha_us + size / GIB / curve.beta_GiBps * 1e6, 1e-9)
                of_fit = [us for us in fitted.get(size, ()) if us is not None]
                new = list(point.by_launch.values())
                for i, measured in enumerate(new):
                    for model, time_us in predicted.items():
                        into.add(model, size, time_us, measured)
                    for forecast in (*new[:i], *new[i + 1 :], *of_fit):
                        into.add("floor", size, forecast, measured)
                    if expected.extrapolated:
                        into.beyond += 1
                    elif expected.low_us < expected.high_us:
                        into.inside.append(expected.low_us <= measured <= expected.high_us)
    return tuple(
        errors[name].group(name) for name in sorted(errors, key=lambda n: (n != RING, n != OTHER, n))
    )


def _group_of(what: str, name: str) -> str:
    if what != COLLECTIVES:
        return f"changes of placement, {what}"
    return RING if name in RING_COLLECTIVES else OTHER


def _names(dims: Sequence[MeasuredDim]) -> str:
    return ", ".join(f"{dim.name}={dim.ranks}" for dim in dims)


def _fitted_on(topology: CalibratedTopology, runs: Sequence[Run], same: bool) -> list[str]:
    fitted_on = {run.run_id for run in topology.runs}
    own = [str(run.path) for run in runs if run.header.run_id in fitted_on]
    if own and not same:
        raise UsageError(
            f"{', '.join(own)} is what the topology was fitted on, so its errors would be too small: "
            "give a run of another day, or --same to see them nevertheless"
        )
    return [f"FITTED ON THE SAME RUN ({', '.join(own)}): a new launch will be further off"] if own else []


def _common(
    topology: CalibratedTopology, measured: Sequence[MeasuredDim], runs: Sequence[Run]
) -> list[MeasuredDim]:
    header, path = runs[0].header, runs[0].path
    for what, ours, theirs in (
        ("backend", topology.backend, backend(header)),
        ("device type", topology.device_type, device_type(header)),
    ):
        if ours != theirs:
            raise UsageError(
                f"the topology is of {what} {ours}, {path} of {theirs}: calibrate on what is used"
            )
    fitted = {dim.name: dim.ranks for dim in topology.dims}
    common = [dim for dim in measured if fitted.get(dim.name) == dim.ranks and [*dim.all_calls()]]
    if not common:
        have = ", ".join(f"{name}={ranks}" for name, ranks in fitted.items())
        raise UsageError(
            f"no mesh dim of the topology ({have}) was measured in {path} ({_names(measured)}): "
            "give a run of `dtbench run collectives redistribute` on the same mesh"
        )
    return common


def _differences(models: Models, dims: Sequence[MeasuredDim]) -> Iterator[str]:
    """What is not alike between the topology and the runs, and may make the errors."""
    for dim in dims:
        ours = models.dims[dim.name]
        then, now = ours.layout.hosts_per_group, dim.layout.hosts_per_group
        if then != now:
            yield f"{dim.name} spans {now} hosts in the runs (least, most), {then} in the topology"
        if ours.groups_sharing != dim.sharing:
            yield f"{dim.name} was measured {dim.sharing} in the runs, {ours.groups_sharing} in the topology"
        unknown = []
        for what, call in dim.all_calls():
            curve = models.curve(dim.name, what, call.name)
            name = in_words(what, call.name)
            if curve is None:
                unknown.append(name)
            elif curve.dtype not in ("", call.dtype):
                yield f"{name} over {dim.name} is {call.dtype} in the runs, {curve.dtype} in the topology"
        if unknown:
            yield f"not scored, since the topology has no {', '.join(unknown)} over {dim.name}"


def _alternate(call: CallTimes, *, kept: bool) -> CallTimes:
    """Every second size and the last, or those between; a call that is too short keeps none."""
    sizes = [p.size_bytes for p in call.points]
    if len(sizes) < MIN_SIZES:
        return call.only(())
    fitted = {*sizes[::2], sizes[-1]}
    return call.only(fitted if kept else set(sizes) - fitted)


class Models:
    """What each model says a call takes, for some mesh dims.

    mesh, devices_per_host: what torch guesses the layout from; None where the devices are not known.
    """

    def __init__(self, dims: Sequence[Dim], mesh: MeshShape, devices_per_host: int | None) -> None:
        self.dims = {dim.name: dim for dim in dims}
        links = [] if devices_per_host is None else guessed_links(mesh.shape, devices_per_host)
        self._guessed = dict(zip(mesh.dim_names, links, strict=False))
        self._scale = self._fitted_scale()

    def curve(self, dim: str, what: str, name: str) -> MeasuredCurve | None:
        """what: "collectives", or the impl that changes a placement."""
        of_dim = self.dims[dim]
        curves = of_dim.collectives if what == COLLECTIVES else of_dim.transitions.get(what, {})
        return curves.get(name)

    def by_constants_us(self, dim: str, what: str, name: str, size_bytes: int) -> dict[str, float]:
        """Model -> microseconds, of those models that have a latency and a bandwidth of this call's mesh dim."""
        if what != COLLECTIVES or name not in RING_COLLECTIVES:
            return {}
        of = self.dims[dim]
        predicted = {"ring": ring_us(name, size_bytes, of.ranks, of)}
        if dim in self._guessed:
            predicted["builtin"] = Ring(of.ranks, *self._guessed[dim]).collective_us(name, size_bytes)
        if (link := builtin_link(of.layout)) is not None:
            predicted["builtin_layout"] = Ring(of.ranks, *link).collective_us(name, size_bytes)
            predicted["builtin_scaled"] = predicted["builtin_layout"] * self._scale
        return predicted

    def _fitted_scale(self) -> float:
        """The number that takes torch's constants nearest to the topology's own tables.

        The median of the logs, which makes the mean of |log| least, the metric that is reported.
        """
        logs = [
            np.log(row.measured_us / Ring(dim.ranks, *link).collective_us(name, row.size_bytes))
            for dim in self.dims.values()
            if (link := builtin_link(dim.layout)) is not None
            for name in RING_COLLECTIVES
            if name in dim.collectives
            for row in dim.collectives[name].table
        ]
        return float(np.exp(np.median(logs))) if logs else 1.0


def devices_per_host(header: Header, device_type: str) -> tuple[int | None, str]:
    """How many devices torch counts on a host of a run, and how that is known, in words."""
    if device_type == "cpu":
        return 1, "on CPU it counts 1 device per host, so that every dim of two ranks or more crosses hosts"
    gpus = len(header.machine.gpus)
    ranks = max((rank.local_rank or 0 for rank in header.ranks), default=-1) + 1
    if gpus == ranks == 0:
        return None, "left out, since the run does not say how many devices its hosts have"
    if gpus >= ranks:
        return gpus, f"it counts {gpus} GPUs per host, those of the first rank's host"
    return ranks, f"it counts {ranks} GPUs per host, by the ranks' local numbers"
