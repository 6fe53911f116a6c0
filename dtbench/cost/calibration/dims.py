"""Selects the measured times of each mesh dim, the input of fits and validations.

The layout of groups on hosts comes from the hosts that the ranks reported and from the times of the groups. It is never
inferred from the mesh's shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from dtbench.cost.calibration.times import (
    COLLECTIVES,
    TRANSITIONS,
    CallTimes,
    LaunchResult,
    LaunchResults,
    one_impl,
    preferred,
    quartiles,
    results_of,
    samples_us,
    times_by_name,
)
from dtbench.records.result import Run
from dtbench.records.topology import Contention, HostLayout
from dtbench.stats.layout import DimLayout, layout_of
from dtbench.suite.mesh import Groups, groups_by_dim
from dtbench_core.cost.ring import INTER_HOST, INTRA_HOST, RingLink

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

    def map(self, change: Callable[[CallTimes], CallTimes]) -> MeasuredDim:
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
    """Returns the mesh dims of runs with the same setup. notes: is extended by unusual choices of results."""
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
    slowest_over_fastest = _slowest_over_fastest(selected, groups) if sharing == "together" else 1.0
    warnings: list[str] = []
    host_layout = _host_layout(layout, slowest_over_fastest, warnings)
    collectives = times_by_name(selected, groups, warnings)
    contention = {}
    if sharing == "together":
        contention = _contention(collectives, times_by_name(_with_sharing(results, "alone"), groups, []))
    return MeasuredDim(
        name,
        ranks=len(groups[0]),
        groups=len(groups),
        sharing=sharing,
        calls={COLLECTIVES: collectives, **_transitions(transitions, groups, warnings)},
        contention=contention,
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
    by_impl = {
        impl: times_by_name([entry for entry in results if entry.result.impl == impl], groups, warnings)
        for impl in IMPLS
    }
    return {impl: calls for impl, calls in by_impl.items() if calls}


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
    """Returns the layout of the dim's groups on hosts. reported: from the run's ranks, or None."""
    mixed = slowest_over_fastest > MIXED_FACTOR
    if mixed:
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
    complete = [row for row in zip(*by_group, strict=True) if all(samples.size for samples in row)]
    if not complete:
        return 1.0
    estimates = np.array(quartiles([samples for row in complete for samples in row]))
    estimates = estimates.reshape(len(complete), len(groups))
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
