"""Scores the predictions of a topology on runs that it was not fitted to.

The score is exp(mean |ln(predicted / measured)|); 1 is perfect. Percentages would favour models that predict too
little, since their error cannot exceed 100 %. Predictions are compared with each launch, not with the median over
launches, because a program runs in a single launch.

The noise floor is the difference between launches: each new launch is predicted by every other launch. These include
the launches to which the topology was fitted. A model with a single time per size cannot do much better.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from msgspec import Struct

from dtbench.cost.calibration.assemble import calibrate_dim, why_left_out
from dtbench.cost.calibration.setups import backend, check_same_setup, device_type, version_warnings
from dtbench.cost.calibration.times import (
    COLLECTIVES,
    CallTimes,
    MeasuredDim,
    builtin_link,
    call_label,
    measured_dims,
)
from dtbench.cost.estimate import estimate_call, ring_us
from dtbench.errors import UsageError
from dtbench.fields import Amount, Count
from dtbench.records.result import Header, MeshShape, Run
from dtbench.records.topology import CalibratedTopology, Dim, MeasuredCurve
from dtbench_core.cost.ring import GIB, RING_COLLECTIVES, Ring, guessed_links

# Name of a model -> description. Later models use more measurements. The noise floor predicts a launch by another one.
MODELS = {
    "builtin": "PyTorch's constants, layout guessed from the mesh's shape",
    "builtin_layout": "PyTorch's constants, layout from the ranks' hosts",
    "builtin_scaled": "PyTorch's constants with that layout, times a fitted factor",
    "ring": "calibrated latency and bandwidth of each mesh dim",
    "line": "latency and bandwidth of each collective",
    "table": "table of times of each collective (used for estimates)",
    "floor": "noise floor: another launch",
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
MIN_SIZES = 3  # holding out a size between both ends of a curve needs this many


class Score(Struct, frozen=True, kw_only=True):
    """The error of predictions.

    Attributes:
        geometric_mean_ratio: the typical factor between predicted and measured times.
        median_error: median of |predicted / measured - 1|.
    """

    points: Count
    geometric_mean_ratio: Amount
    median_error: Amount


class CallGroup(Struct, frozen=True, kw_only=True):
    """Scores of similar calls.

    Attributes:
        scores: model -> range of sizes -> score.
        inside: share of the new values that lie within the topology's 90 % intervals.
        points: number of new values at sizes within the tables, to which `inside` refers.
        beyond: number of new values at other sizes; `scores` include them.
        one_launch: whether the intervals come from a single launch and are too narrow.
    """

    name: str
    scores: dict[str, dict[str, Score]]
    inside: Amount | None
    points: Count
    beyond: Count
    one_launch: bool


class Validation(Struct, frozen=True, kw_only=True):
    """Scores of all models.

    Attributes:
        models: name of a model -> description.
        notes: remarks that qualify the scores.
    """

    kind: Literal["validation"] = "validation"
    models: dict[str, str]
    title: str
    groups: tuple[CallGroup, ...]
    notes: tuple[str, ...]


@dataclass
class _Errors:
    """Collects the errors of a group of calls.

    Attributes:
        logs: model -> (size in bytes, log error) of each prediction.
        is_inside: whether each value lies within its interval.
        outside_count: number of values at sizes outside the tables.
    """

    logs: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    is_inside: list[bool] = field(default_factory=list)
    outside_count: int = 0
    one_launch: bool = False

    def add(self, model: str, size_bytes: int, predicted_us: float, measured_us: float) -> None:
        self.logs.setdefault(model, []).append((size_bytes, float(np.log(predicted_us / measured_us))))

    def group(self, name: str) -> CallGroup:
        return CallGroup(
            name=name,
            scores={model: _scores(self.logs[model]) for model in MODELS if model in self.logs},
            inside=float(np.mean(self.is_inside)) if self.is_inside else None,
            points=len(self.is_inside),
            beyond=self.outside_count,
            one_launch=self.one_launch,
        )


def _scores(errors: Sequence[tuple[int, float]]) -> dict[str, Score]:
    sizes, logs = np.array([size for size, _ in errors]), np.array([log for _, log in errors])
    return {
        regime: Score(
            points=int(selected.size),
            geometric_mean_ratio=float(np.exp(np.abs(selected).mean())),
            median_error=float(np.median(np.abs(np.expm1(selected)))),
        )
        for regime, (start, end) in REGIMES.items()
        if (selected := logs[(sizes >= start) & (sizes < end)]).size
    }


def score_runs(
    topology: CalibratedTopology, runs: Sequence[Run], *, allow_fitted: bool = False
) -> Validation:
    """Scores all models on the launches of the runs.

    Args:
        allow_fitted: allow runs that the topology was fitted to; a note then warns about them.

    Raises:
        UsageError: the runs have another setup than the topology, or it was fitted to them.
    """
    check_same_setup(runs)
    notes = [*_refuse_fitted(topology, runs, allow_fitted), *version_warnings(runs)]
    dims = _common(topology, measured_dims(runs, notes), runs)
    devices, guess = devices_per_host(runs[0].header, topology.device_type)
    models = Models(topology.dims, topology.mesh, devices)
    notes += [*_differences(models, dims), f"PyTorch's guess: {guess}"]
    launches = sorted({launch for dim in dims for _, call in dim.all_calls() for launch in call.launches})
    return Validation(
        models=MODELS,
        title=f"{len(launches)} new launch{'es' * (len(launches) > 1)} of {_names(dims)}",
        groups=_scored(models, dims, use_fitted=not allow_fitted),
        notes=tuple(notes),
    )


def score_split(run: Run) -> Validation:
    """Scores the models at every second size of a run, after fitting them to the other sizes and both ends.

    Raises:
        UsageError: no ring collective was measured at three or more sizes.
    """
    notes: list[str] = []
    held_out, fitted, short_curves = [], [], 0
    for dim in measured_dims([run], notes):
        training, test = (
            dim.map(functools.partial(_alternate, for_training=for_training))
            for for_training in (True, False)
        )
        short_curves += len([*dim.all_calls()]) - len([*training.all_calls()])
        if why_left_out(training) is None:
            held_out.append(test)
            fitted.append(calibrate_dim(training))
    if not held_out:
        raise UsageError(
            f"{run.path} has no collective measured at {MIN_SIZES} or more sizes, expected at least one; "
            "measure a range of sizes, e.g. 1KiB:1GiB:4x"
        )
    devices, guess = devices_per_host(run.header, device_type(run.header))
    notes += version_warnings([run])
    if short_curves:
        notes.append(f"{short_curves} curves with fewer than {MIN_SIZES} sizes were left out")
    return Validation(
        models=MODELS,
        title=f"every second size of {run.path.name}, predicted from the other sizes",
        groups=_scored(Models(fitted, run.header.mesh, devices), held_out, use_fitted=False),
        notes=(*notes, f"PyTorch's guess: {guess}"),
    )


def _scored(models: "Models", dims: Sequence[MeasuredDim], *, use_fitted: bool) -> tuple[CallGroup, ...]:
    errors: dict[str, _Errors] = {}
    for dim in dims:
        for kind, call in dim.all_calls():
            if (curve := models.curve(dim.name, kind, call.name)) is None:
                continue
            group = errors.setdefault(_group_name(kind, call.name), _Errors())
            group.one_launch |= curve.launches == 1
            fitted = {row.size_bytes: row.launch_us for row in curve.table if use_fitted}
            for point in call.points:
                size = point.size_bytes
                expected = estimate_call(curve, size)
                predicted = models.by_constants_us(dim.name, kind, call.name, size) | {
                    "table": expected.time_us
                }
                if curve.alpha_us is not None and curve.beta_GiBps is not None:
                    predicted["line"] = max(curve.alpha_us + size / GIB / curve.beta_GiBps * 1e6, 1e-9)
                fitted_us = [us for us in fitted.get(size, ()) if us is not None]
                new_us = list(point.by_launch.values())
                for i, measured in enumerate(new_us):
                    for model, time_us in predicted.items():
                        group.add(model, size, time_us, measured)
                    for forecast in (*new_us[:i], *new_us[i + 1 :], *fitted_us):
                        group.add("floor", size, forecast, measured)
                    if expected.extrapolated:
                        group.outside_count += 1
                    elif expected.low_us < expected.high_us:
                        group.is_inside.append(expected.low_us <= measured <= expected.high_us)
    return tuple(
        errors[name].group(name)
        for name in sorted(errors, key=lambda name: (name != RING, name != OTHER, name))
    )


def _group_name(kind: str, name: str) -> str:
    if kind != COLLECTIVES:
        return f"redistributions, {kind}"
    return RING if name in RING_COLLECTIVES else OTHER


def _names(dims: Sequence[MeasuredDim]) -> str:
    return ", ".join(f"{dim.name}={dim.ranks}" for dim in dims)


def _refuse_fitted(topology: CalibratedTopology, runs: Sequence[Run], allow_fitted: bool) -> list[str]:
    fitted_ids = {run.run_id for run in topology.runs}
    fitted = ", ".join(str(run.path) for run in runs if run.header.run_id in fitted_ids)
    if fitted and not allow_fitted:
        raise UsageError(
            f"the topology was fitted to {fitted}, so its errors would be too small: give a run of another day, or "
            "--same to show them nevertheless"
        )
    return [f"FITTED TO THE SAME RUN ({fitted}): the errors on a new launch will be larger"] if fitted else []


def _common(
    topology: CalibratedTopology, measured: Sequence[MeasuredDim], runs: Sequence[Run]
) -> list[MeasuredDim]:
    header, path = runs[0].header, runs[0].path
    for label, calibrated, measured_on in (
        ("backend", topology.backend, backend(header)),
        ("device type", topology.device_type, device_type(header)),
    ):
        if calibrated != measured_on:
            raise UsageError(
                f"the topology has the {label} {calibrated}, but {path} has {measured_on}: expected the same; "
                "calibrate with that one"
            )
    fitted = {dim.name: dim.ranks for dim in topology.dims}
    if not (common := [dim for dim in measured if fitted.get(dim.name) == dim.ranks and [*dim.all_calls()]]):
        dims = ", ".join(f"{name}={ranks}" for name, ranks in fitted.items())
        raise UsageError(
            f"{path} has measured none of the topology's mesh dims ({dims}), but {_names(measured)}: "
            "give a run of `dtbench run collectives redistribute` on the same mesh"
        )
    return common


def _differences(models: "Models", dims: Sequence[MeasuredDim]) -> Iterator[str]:
    """Describes differences between the topology and the runs that may cause errors."""
    for dim in dims:
        calibrated = models.dims[dim.name]
        run_hosts, topology_hosts = dim.layout.hosts_per_group, calibrated.layout.hosts_per_group
        if run_hosts != topology_hosts:
            yield f"{dim.name} spans {run_hosts} hosts (min, max) in the runs, {topology_hosts} in the topology"
        if calibrated.groups_sharing != dim.sharing:
            yield (
                f"groups of {dim.name} were measured {dim.sharing} in the runs, "
                f"{calibrated.groups_sharing} in the topology"
            )
        unknown = []
        for kind, call in dim.all_calls():
            curve = models.curve(dim.name, kind, call.name)
            name = call_label(kind, call.name)
            if curve is None:
                unknown.append(name)
            elif curve.dtype not in ("", call.dtype):
                yield f"{name} over {dim.name} is {call.dtype} in the runs, {curve.dtype} in the topology"
        if unknown:
            yield f"not scored, since the topology has no {', '.join(unknown)} over {dim.name}"


def _alternate(call: CallTimes, *, for_training: bool) -> CallTimes:
    """Returns the sizes for fitting (every second size and the last), or the remaining sizes.

    A call with fewer than `MIN_SIZES` sizes has none.
    """
    sizes = [point.size_bytes for point in call.points]
    if len(sizes) < MIN_SIZES:
        return call.only(())
    training = {*sizes[::2], sizes[-1]}
    return call.only(training if for_training else set(sizes) - training)


class Models:
    """Predictions of all models for the calls over some mesh dims.

    torch guesses the layout from the mesh's shape and `devices_per_host`, which is None if it is unknown.
    """

    def __init__(self, dims: Sequence[Dim], mesh: MeshShape, devices_per_host: int | None) -> None:
        self.dims = {dim.name: dim for dim in dims}
        links = [] if devices_per_host is None else guessed_links(mesh.shape, devices_per_host)
        self._guessed = dict(zip(mesh.dim_names, links, strict=False))

    def curve(self, dim: str, kind: str, name: str) -> MeasuredCurve | None:
        """Returns the curve of a collective or redistribution. kind: see `MeasuredDim.calls`."""
        calibrated = self.dims[dim]
        return ({COLLECTIVES: calibrated.collectives} | calibrated.transitions).get(kind, {}).get(name)

    def by_constants_us(self, dim: str, kind: str, name: str, size_bytes: int) -> dict[str, float]:
        """Returns model -> microseconds of the models with a latency and a bandwidth per mesh dim."""
        if kind != COLLECTIVES or name not in RING_COLLECTIVES:
            return {}
        fitted = self.dims[dim]
        predicted = {"ring": ring_us(name, size_bytes, fitted.ranks, fitted)}
        if dim in self._guessed:
            predicted["builtin"] = Ring(fitted.ranks, *self._guessed[dim]).collective_us(name, size_bytes)
        if (link := builtin_link(fitted.layout)) is not None:
            predicted["builtin_layout"] = Ring(fitted.ranks, *link).collective_us(name, size_bytes)
            predicted["builtin_scaled"] = predicted["builtin_layout"] * self._fitted_scale
        return predicted

    @functools.cached_property
    def _fitted_scale(self) -> float:
        """The factor on torch's constants that fits the topology's tables best.

        It is the median of the log ratios, which minimizes the reported metric.
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
    """Returns the number of devices that torch counts on a host of the run, and a description of its source."""
    if device_type == "cpu":
        return 1, "on CPU it assumes 1 device per host, so every dim with two or more ranks spans hosts"
    gpus = len(header.machine.gpus)
    ranks = max((rank.local_rank or 0 for rank in header.ranks), default=-1) + 1
    if gpus == ranks == 0:
        return None, "not scored, since the run lacks the number of devices per host"
    if gpus >= ranks:
        return gpus, f"it assumes {gpus} GPUs per host, the number on the first rank's host"
    return ranks, f"it assumes {ranks} GPUs per host, from the ranks' local ranks"
