"""What runs measured on each mesh dim, chosen and sorted: the input of every fit and validation.

Where the groups of a dim lie is told by the hosts that the ranks reported and the times that the groups took, never
by the mesh's shape.
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
IMPLS = ("core", "torch")  # whose changes of placement are priced apart
# Groups of one dim that take this much longer than others, at the median over what they measured
# together, lie on other links: pairwise bandwidths of like links agree within 10 to 25 %.
GROUPS_DIFFER = 1.25
# ... and are behind in at least this share of it: two groups that are slow by turns are alike.
MOSTLY = 0.75
# From this size on: below, times are latency and the order in which the host schedules the ranks.
COMPARED_FROM_BYTES = 64 * 1024


@dataclass(frozen=True)
class MeasuredDim:
    """One mesh dim. sharing: whether its groups worked "together", as in training, or one "alone".

    calls: "collectives", or the impl that changes a placement -> name -> times. own_times: whether each rank's own
    samples are there.
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
        """("collectives" or an impl, times) of all that was measured."""
        return ((what, call) for what, of in self.calls.items() for call in of.values())

    def map(self, change: Callable[[CallTimes], CallTimes]) -> MeasuredDim:
        """The dim with the times of each call changed; calls left without points are dropped."""
        return dataclasses.replace(
            self,
            calls={
                what: {name: new for name, call in of.items() if (new := change(call)).points}
                for what, of in self.calls.items()
            },
        )


def in_words(what: str, name: str) -> str:
    """A collective, or the change of placement of an impl."""
    return name if what == COLLECTIVES else f"{what} {name}"


def measured_dims(runs: Sequence[Run], notes: list[str]) -> list[MeasuredDim]:
    """Every mesh dim of runs of one setup. notes: gets what was chosen instead of the usual, in words."""
    header, mesh = runs[0].header, runs[0].header.mesh
    collectives = preferred(results_of(runs, COLLECTIVES), "mode", "isolated", notes)
    preferred(collectives, "dtype", "float32", notes)  # for its note: the times of a call are of one dtype
    collectives = one_impl(collectives, notes) if collectives else []
    of_transitions: list[str] = []
    transitions = preferred(results_of(runs, TRANSITIONS), "mode", "isolated", of_transitions)
    notes += [f"changes of placement: {note}" for note in of_transitions]
    layouts = {layout.name: layout for layout in layout_of(header)}
    dims = []
    for name, groups in groups_by_dim(mesh.dim_names, mesh.shape).items():
        called, moved = _on_dim(collectives, name), _on_dim(transitions, name)
        if name in mesh.dim_names or called or moved:  # else all dims as one, which was not measured
            dims.append(_dim(name, groups, layouts.get(name), called, moved))
    return dims


def _dim(
    name: str, groups: Groups, layout: DimLayout | None, called: LaunchResults, moved: LaunchResults
) -> MeasuredDim:
    kept, sharing = _sharing(called)
    times = _slowest_over_fastest(kept, groups) if sharing == "together" else 1.0
    warnings: list[str] = []
    host_layout = _host_layout(layout, times, warnings)
    collectives = times_by_name(kept, groups, warnings)
    contention = {}
    if sharing == "together":
        contention = _contention(collectives, times_by_name(_where(called, "alone"), groups, []))
    return MeasuredDim(
        name,
        ranks=len(groups[0]),
        groups=len(groups),
        sharing=sharing,
        calls={COLLECTIVES: collectives, **_transitions(moved, groups, warnings)},
        contention=contention,
        layout=host_layout,
        own_times=all(r.result.rank_samples_s for r in kept),
        warnings=tuple(warnings),
    )


def _on_dim(results: LaunchResults, dim: str) -> list[LaunchResult]:
    return [r for r in results if r.result.params["mesh_dim"] == dim]


def _where(results: LaunchResults, sharing: str) -> list[LaunchResult]:
    return [r for r in results if r.result.params.get("groups", "together") == sharing]


def _sharing(results: LaunchResults) -> tuple[list[LaunchResult], Sharing]:
    """The results of all groups at once, or where there are none those of one group alone."""
    together = _where(results, "together")
    return (together, "together") if together or not results else (_where(results, "alone"), "alone")


def _transitions(
    results: LaunchResults, groups: Groups, warnings: list[str]
) -> dict[str, dict[str, CallTimes]]:
    results, sharing = _sharing(results)
    if sharing == "alone" and len(groups) > 1:
        warnings.append(
            "changes of placement were measured with one group alone: together they may be slower"
        )
    by_impl = {
        impl: times_by_name([r for r in results if r.result.impl == impl], groups, warnings) for impl in IMPLS
    }
    return {impl: calls for impl, calls in by_impl.items() if calls}


def _contention(together: Mapping[str, CallTimes], alone: Mapping[str, CallTimes]) -> dict[str, Contention]:
    """Time of all groups at once over that of one alone, at the largest size measured both ways."""
    ratios = {}
    for name, call in together.items():
        other = alone.get(name)
        if other is None or other.dtype != call.dtype:
            continue
        slow = {p.size_bytes: p.measured_us for p in call.points}
        fast = {p.size_bytes: p.measured_us for p in other.points}
        if common := slow.keys() & fast.keys():
            size = max(common)
            ratios[name] = Contention(together_over_alone=slow[size] / fast[size], size_bytes=size)
    return ratios


def _host_layout(of_ranks: DimLayout | None, slowest_over_fastest: float, warnings: list[str]) -> HostLayout:
    """of_ranks: what the run's ranks said, or None."""
    mixed = slowest_over_fastest > GROUPS_DIFFER
    if mixed:
        warnings.append(
            f"mixed dim: its slowest group takes {slowest_over_fastest:.2f}x the time of its fastest;"
            " it is priced by the slowest"
        )
    if of_ranks is None or of_ranks.hosts_per_group is None:
        warnings.append("the run does not say on which host each rank was: no built-in constants beside")
        return HostLayout(kind="mixed" if mixed else None)
    least, most = of_ranks.hosts_per_group
    if least < most:
        mixed = True
        warnings.append(f"mixed dim: its groups span {least} to {most} hosts; it is priced by the slowest")
    return HostLayout(
        kind="mixed" if mixed else "inter-host" if most > 1 else "intra-host",
        hosts_per_group=(least, most),
        ranks_per_host=of_ranks.ranks_per_host,
        groups_per_host_pair=of_ranks.groups_per_host_pair,
    )


def _slowest_over_fastest(results: LaunchResults, groups: Groups) -> float:
    """How much longer the slowest group takes than the fastest; 1 where groups cannot be told apart.

    Each group's time over the median of the groups, then the median over all that was measured: so one
    slow reading does not make a slow group, nor does having many groups.

    results: of one mesh dim, all groups at once.
    """
    if len(groups) < 2:
        return 1.0
    ranks = {str(rank) for group in groups for rank in group}
    large = [
        r.result
        for r in results
        if (r.result.size_bytes or 0) >= COMPARED_FROM_BYTES and ranks <= r.result.rank_samples_s.keys()
    ]
    of_groups = [samples_us(large, [group]) for group in groups]
    whole = [times for times in zip(*of_groups, strict=True) if all(t.size for t in times)]
    if not whole:
        return 1.0
    estimates = np.array(quartiles([t for times in whole for t in times])).reshape(len(whole), len(groups))
    ratios = np.log(estimates / np.median(estimates, axis=1, keepdims=True))
    of_group = np.median(ratios, axis=0)
    slowest, fastest = int(np.argmax(of_group)), int(np.argmin(of_group))
    if np.mean(ratios[:, slowest] > ratios[:, fastest]) < MOSTLY:
        return 1.0
    return float(np.exp(of_group[slowest] - of_group[fastest]))


def builtin_link(layout: HostLayout) -> RingLink | None:
    """torch's constants for where the slowest group really is; None where the run does not say."""
    hosts = layout.hosts_per_group
    return None if hosts is None else INTER_HOST if hosts[1] > 1 else INTRA_HOST
