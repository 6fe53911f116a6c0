"""Selects the measured times of each mesh dim, per size and launch. They are the input of fits and validations.

Ranks leave the barrier before a sample at different times, so a rank's own reading includes waiting for the last rank.
The cost formulas do not model that wait. So a sample of a group lasts from the last arrival until all ranks are done.
The groups of a mesh dim run at the same time, and the slowest determines the time of the dim. A launch's time is the
lower quartile of its samples; the time of a size is the median over launches.

A curve has a single dtype, since the speed of reductions depends on it. It is float32 if that was measured, else the
dtype with the most sizes. A warning reports other dtypes that take a different time for the same number of bytes.

The layout of groups on hosts comes from the hosts that the ranks reported and from the times of the groups. It is never
inferred from the mesh's shape.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dtbench.grouping import group_by
from dtbench.records.result import Result, Run
from dtbench.records.topology import Contention, HostLayout
from dtbench.stats import bandwidth_drops, batch_quantiles
from dtbench.stats.layout import DimLayout, from_last_arrivals_s, layout_of
from dtbench.suite import ROUTING
from dtbench.suite.mesh import Groups, groups_by_dim
from dtbench_core.cost.ring import INTER_HOST, INTRA_HOST, RingLink

Array = NDArray[np.float64]
Launch = tuple[str, int]  # run_id, number of the launch in that run

COLLECTIVES, TRANSITIONS = "collectives", "redistribute"  # the suites that calibration reads
QUANTILE = 0.25  # of the samples of a launch
# Lines are fitted to at most this many sizes of a curve. More do not change the fit, which is repeated 100 times.
MAX_FITTED_SIZES = 1000
# A warning reports dtypes whose times for the same number of bytes differ by more than this factor.
DTYPES_DIFFER = 1.25


class LaunchResult(NamedTuple):
    launch: Launch
    result: Result


LaunchResults = Sequence[LaunchResult]


@dataclass(frozen=True)
class SizeTimes:
    """The times of a call at one size.

    Attributes:
        launches: launch -> samples in microseconds.
        by_launch: launch -> its estimate in microseconds.
    """

    size_bytes: int
    launches: Mapping[Launch, Array]
    by_launch: Mapping[Launch, float]

    @cached_property
    def measured_us(self) -> float:
        return median(self.by_launch.values())


@dataclass(frozen=True)
class CallTimes:
    """The times of a collective or redistribution by ascending size, to which a curve is fitted."""

    name: str
    dtype: str
    points: tuple[SizeTimes, ...]

    @property
    def sizes(self) -> Array:
        return np.array([point.size_bytes for point in self.points], dtype=float)

    @property
    def measured_us(self) -> Array:
        return np.array([point.measured_us for point in self.points])

    @property
    def launches(self) -> list[Launch]:
        return sorted({launch for point in self.points for launch in point.launches})

    @cached_property
    def steady(self) -> "CallTimes":
        """The times without sizes at which the bandwidth drops, unless these are at least half of the sizes."""
        drops = bandwidth_drops(self.sizes.tolist(), self.measured_us.tolist())
        dropped = {float(self.sizes[index]) for drop in drops for index in drop}
        return self.only({*self.sizes} - dropped) if 2 * len(dropped) < len(self.points) else self

    @property
    def thinned(self) -> "CallTimes":
        """The times at no more than `MAX_FITTED_SIZES` evenly chosen sizes, including both ends."""
        indices = np.linspace(0, len(self.points) - 1, min(MAX_FITTED_SIZES, len(self.points))).astype(int)
        return CallTimes(self.name, self.dtype, tuple(self.points[index] for index in indices))

    def only(self, sizes: Collection[float]) -> "CallTimes":
        """Returns the times at these sizes."""
        return dataclasses.replace(self, points=tuple(p for p in self.points if p.size_bytes in sizes))


def results_of(runs: Sequence[Run], suite: str) -> list[LaunchResult]:
    """Returns the suite's ok results of equal parts that have a size and a mesh dim."""
    return [
        LaunchResult((run.header.run_id, result.launch), result)
        for run in runs
        for result in run.ok(suite)
        if result.size_bytes and "mesh_dim" in result.params and ROUTING not in result.params
    ]


def preferred(results: LaunchResults, param: str, value: str, notes: list[str]) -> list[LaunchResult]:
    """Selects the results with param = value. Without any, selects the first other value and adds a note.

    Results without the param were written before it existed, when `value` was the only one.
    """
    values = {entry.result.params.get(param, value) for entry in results}
    selected = value
    if values and value not in values:
        selected = min(map(str, values))
        notes.append(f"no results with {param} {value}: used {selected} instead")
    return [entry for entry in results if str(entry.result.params.get(param, value)) == selected]


def one_impl(results: LaunchResults, notes: list[str]) -> list[LaunchResult]:
    """Selects the results of impl c10d, else of the first impl by name. A note lists the ignored impls."""
    impls = sorted({entry.result.impl for entry in results}, key=lambda impl: (impl != "c10d", impl))
    if len(impls) > 1:
        notes.append(f"used impl {impls[0]} and ignored {', '.join(impls[1:])}")
    return [entry for entry in results if entry.result.impl == impls[0]]


def times_by_name(results: LaunchResults, groups: Groups, warnings: list[str]) -> dict[str, CallTimes]:
    """Returns the times of each collective or redistribution of a mesh dim.

    Args:
        warnings: a list to which warnings about dtypes are appended.
    """
    chosen = {}
    for name, results_of_name in sorted(group_by(results, lambda entry: entry.result.name).items()):
        by_dtype = group_by(results_of_name, lambda entry: str(entry.result.params.get("dtype", "unknown")))
        calls = [CallTimes(name, dtype, _points(part, groups)) for dtype, part in sorted(by_dtype.items())]
        if calls := [call for call in calls if call.points]:
            chosen[name] = min(
                calls, key=lambda call: (call.dtype != "float32", -len(call.points), call.dtype)
            )
            warnings += _dtype_warnings(chosen[name], calls)
    return chosen


def _dtype_warnings(chosen: CallTimes, calls: Sequence[CallTimes]) -> Iterator[str]:
    by_size = {point.size_bytes: point.measured_us for point in chosen.points}
    for call in calls:
        ratios = [
            point.measured_us / by_size[point.size_bytes]
            for point in call.points
            if point.size_bytes in by_size
        ]
        ratio = float(np.median(ratios)) if ratios else 1.0
        if max(ratio, 1 / ratio) > DTYPES_DIFFER:
            yield (
                f"{chosen.name} of {call.dtype} takes {ratio:.2f}x as long as {chosen.dtype} for the same bytes: "
                f"the curve is that of {chosen.dtype}"
            )


def _points(results: LaunchResults, groups: Groups) -> tuple[SizeTimes, ...]:
    samples_of: dict[int, dict[Launch, list[Array]]] = {}
    for (launch, result), samples in zip(
        results, samples_us([entry.result for entry in results], groups), strict=True
    ):
        if samples.size and result.size_bytes:
            samples_of.setdefault(result.size_bytes, {}).setdefault(launch, []).append(samples)
    return points_of(
        {
            size: {launch: np.concatenate(parts) for launch, parts in launches.items()}
            for size, launches in samples_of.items()
        }
    )


def points_of(sizes: Mapping[int, Mapping[Launch, Array]]) -> tuple[SizeTimes, ...]:
    """Converts size -> launch -> samples (microseconds) to points by ascending size."""
    estimates = iter(quartiles([samples for launches in sizes.values() for samples in launches.values()]))
    by_size = {size: dict(zip(launches, estimates, strict=False)) for size, launches in sizes.items()}
    return tuple(SizeTimes(size, sizes[size], by_size[size]) for size in sorted(sizes))


def quartiles(samples: Sequence[Array]) -> list[float]:
    """Returns the `QUANTILE` of each array."""
    return [
        estimate for estimate in batch_quantiles(samples, [QUANTILE] * len(samples)) if estimate is not None
    ]


def samples_us(results: Sequence[Result], groups: Groups) -> list[Array]:
    """Returns the samples of each result: the time from the last arrival in a group, of the slowest group.

    If the ranks' own readings are missing or inconsistent, the file's samples are returned, which are the maximum
    over all ranks. Without samples, the lower quartile is returned.
    """
    seconds: list[Array | Sequence[float]] = [
        from_last if from_last.size else result.samples_s or (result.time_s.p25,) if result.time_s else ()
        for result, from_last in zip(results, from_last_arrivals_s(results, groups), strict=True)
    ]
    times_us = (np.asarray(samples, dtype=np.float64) * 1e6 for samples in seconds)
    return [times[np.isfinite(times) & (times > 0)] for times in times_us]


Sharing = Literal["together", "alone"]
IMPLS = ("core", "torch")  # impls whose redistributions get separate curves
# A dim is mixed if its slowest group takes this much longer than its fastest, at the median over all results: pairwise
# bandwidths of similar links agree within 10 to 25 %.
MIXED_FACTOR = 1.25
# Furthermore, the slowest group must be slower in at least this share of the results; otherwise they take turns.
MIXED_SHARE = 0.75
# Groups are compared from this size on: smaller messages depend on latency and on the scheduling of the ranks.
COMPARED_FROM_BYTES = 64 * 1024


@dataclass(frozen=True)
class MeasuredDim:
    """The measured times of a mesh dim.

    Attributes:
        ranks: number of ranks per group.
        groups: number of groups.
        sharing: all groups worked "together", as in training, or one worked "alone".
        calls: kind -> name -> times. The kind is "collectives", or the impl whose redistributions were measured.
        contention: collective -> slowdown if all groups work together.
        own_times: whether each rank's own samples were recorded.
    """

    name: str
    ranks: int
    groups: int
    sharing: Sharing
    calls: Mapping[str, Mapping[str, CallTimes]]
    contention: dict[str, Contention]
    layout: HostLayout
    own_times: bool
    warnings: tuple[str, ...]

    @property
    def collectives(self) -> Mapping[str, CallTimes]:
        return self.calls[COLLECTIVES]

    def all_calls(self) -> Iterator[tuple[str, CallTimes]]:
        """Yields the kind and the times of all calls."""
        return ((kind, call) for kind, calls in self.calls.items() for call in calls.values())

    def map(self, change: Callable[[CallTimes], CallTimes]) -> "MeasuredDim":
        """Returns the dim with `change` applied to each call, without the calls that have no points after it."""
        return dataclasses.replace(
            self,
            calls={
                kind: {name: changed for name, call in calls.items() if (changed := change(call)).points}
                for kind, calls in self.calls.items()
            },
        )


def call_label(kind: str, name: str) -> str:
    """Returns a label for a collective or for the redistribution of an impl."""
    return name if kind == COLLECTIVES else f"{kind} {name}"


def measured_dims(runs: Sequence[Run], notes: list[str]) -> list[MeasuredDim]:
    """Returns the mesh dims of runs with the same setup.

    Args:
        notes: a list to which unusual choices of results are appended.
    """
    header, mesh = runs[0].header, runs[0].header.mesh
    collectives = preferred(results_of(runs, COLLECTIVES), "mode", "isolated", notes)
    preferred(collectives, "dtype", "float32", notes)  # only for its note; `times_by_name` selects the dtype
    collectives = one_impl(collectives, notes) if collectives else []
    transition_notes: list[str] = []
    transitions = preferred(results_of(runs, TRANSITIONS), "mode", "isolated", transition_notes)
    notes += [f"redistributions: {note}" for note in transition_notes]
    layouts = {layout.name: layout for layout in layout_of(header)}
    dims = []
    for name, groups in groups_by_dim(mesh.dim_names, mesh.shape).items():
        dim_collectives, dim_transitions = _on_dim(collectives, name), _on_dim(transitions, name)
        # Other names, such as that of all dims flattened, are dims only if they were measured.
        if name in mesh.dim_names or dim_collectives or dim_transitions:
            dims.append(_dim(name, groups, layouts.get(name), dim_collectives, dim_transitions))
    return dims


def _dim(
    name: str, groups: Groups, layout: DimLayout | None, results: LaunchResults, transitions: LaunchResults
) -> MeasuredDim:
    selected, sharing = _sharing(results)
    is_shared = sharing == "together"
    warnings: list[str] = []
    host_layout = _host_layout(
        layout, _slowest_over_fastest(selected, groups) if is_shared else 1.0, warnings
    )
    collectives = times_by_name(selected, groups, warnings)
    alone = times_by_name(_with_sharing(results, "alone"), groups, []) if is_shared else {}
    return MeasuredDim(
        name,
        ranks=len(groups[0]),
        groups=len(groups),
        sharing=sharing,
        calls={COLLECTIVES: collectives, **_transitions(transitions, groups, warnings)},
        contention=_contention(collectives, alone),
        layout=host_layout,
        own_times=all(entry.result.rank_samples_s for entry in selected),
        warnings=tuple(warnings),
    )


def _on_dim(results: LaunchResults, dim: str) -> list[LaunchResult]:
    return [entry for entry in results if entry.result.params["mesh_dim"] == dim]


def _with_sharing(results: LaunchResults, sharing: str) -> list[LaunchResult]:
    return [entry for entry in results if entry.result.params.get("groups", "together") == sharing]


def _sharing(results: LaunchResults) -> tuple[list[LaunchResult], Sharing]:
    """Selects the results of all groups together; without any, those of one group alone."""
    selected = _with_sharing(results, "together")
    return (selected, "together") if selected or not results else (_with_sharing(results, "alone"), "alone")


def _transitions(
    results: LaunchResults, groups: Groups, warnings: list[str]
) -> dict[str, dict[str, CallTimes]]:
    results, sharing = _sharing(results)
    if sharing == "alone" and len(groups) > 1:
        warnings.append(
            "redistributions were measured with only one group at work: they may be slower with all groups"
        )
    by_impl = group_by(results, lambda entry: entry.result.impl)
    return {
        impl: calls for impl in IMPLS if (calls := times_by_name(by_impl.get(impl, []), groups, warnings))
    }


def _contention(
    all_groups: Mapping[str, CallTimes], one_group: Mapping[str, CallTimes]
) -> dict[str, Contention]:
    """Returns the slowdown of each collective if all groups work together, at the largest size measured both ways."""
    ratios = {}
    for name, call in all_groups.items():
        reference = one_group.get(name)
        if reference is None or reference.dtype != call.dtype:
            continue
        together_us = {point.size_bytes: point.measured_us for point in call.points}
        alone_us = {point.size_bytes: point.measured_us for point in reference.points}
        if common := together_us.keys() & alone_us.keys():
            size = max(common)
            ratios[name] = Contention(together_over_alone=together_us[size] / alone_us[size], size_bytes=size)
    return ratios


def _host_layout(reported: DimLayout | None, slowest_over_fastest: float, warnings: list[str]) -> HostLayout:
    """Returns the layout of the dim's groups on hosts.

    Args:
        reported: the layout that the run's ranks reported, or None.
    """
    if mixed := slowest_over_fastest > MIXED_FACTOR:
        warnings.append(
            f"mixed dim: its slowest group takes {slowest_over_fastest:.2f}x as long as its fastest;"
            " its times are those of the slowest"
        )
    if reported is None or reported.hosts_per_group is None:
        warnings.append("the run lacks the hosts of its ranks: no comparison with PyTorch's constants")
        return HostLayout(kind="mixed" if mixed else None)
    fewest_hosts, most_hosts = reported.hosts_per_group
    if fewest_hosts < most_hosts:
        mixed = True
        warnings.append(
            f"mixed dim: its groups span {fewest_hosts} to {most_hosts} hosts; its times are those of the slowest"
        )
    return HostLayout(
        kind="mixed" if mixed else "inter-host" if most_hosts > 1 else "intra-host",
        hosts_per_group=(fewest_hosts, most_hosts),
        ranks_per_host=reported.ranks_per_host,
        groups_per_host_pair=reported.groups_per_host_pair,
    )


def _slowest_over_fastest(results: LaunchResults, groups: Groups) -> float:
    """Returns the time of the slowest group over that of the fastest; 1 if no difference was found.

    A group's time is taken relative to the median over all groups, and then the median over all results. This is robust
    to single slow readings and independent of the number of groups.

    Args:
        results: results of one mesh dim, measured with all groups together.
    """
    if len(groups) < 2:
        return 1.0
    ranks = {str(rank) for group in groups for rank in group}
    large = [
        entry.result
        for entry in results
        if (entry.result.size_bytes or 0) >= COMPARED_FROM_BYTES
        and ranks <= entry.result.rank_samples_s.keys()
    ]
    by_group = [samples_us(large, [group]) for group in groups]
    if not (complete := [row for row in zip(*by_group, strict=True) if all(samples.size for samples in row)]):
        return 1.0
    estimates = np.reshape(quartiles([samples for row in complete for samples in row]), (-1, len(groups)))
    ratios = np.log(estimates / np.median(estimates, axis=1, keepdims=True))
    typical = np.median(ratios, axis=0)
    slowest, fastest = int(np.argmax(typical)), int(np.argmin(typical))
    if np.mean(ratios[:, slowest] > ratios[:, fastest]) < MIXED_SHARE:
        return 1.0
    return float(np.exp(typical[slowest] - typical[fastest]))


def builtin_link(layout: HostLayout) -> RingLink | None:
    """Returns torch's constants for the reported layout of the slowest group; None if no layout was reported."""
    hosts = layout.hosts_per_group
    return None if hosts is None else INTER_HOST if hosts[1] > 1 else INTRA_HOST
