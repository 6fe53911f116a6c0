"""What runs measured on each mesh dim, chosen and sorted: the input of every fit and validation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dtbench.cost.calibration.layout import layout_of_dim, slowest_over_fastest
from dtbench.cost.calibration.points import (
    COLLECTIVES,
    TRANSITIONS,
    Series,
    Tagged,
    one_impl,
    preferred,
    series_by_name,
    tagged,
)
from dtbench.records.layout import layout_of
from dtbench.records.topology import Contention, Layout
from dtbench.suite import Run
from dtbench.suite.mesh import Groups, groups_by_dim

Sharing = Literal["together", "alone"]
IMPLS = ("core", "torch")  # whose changes of placement are priced apart


@dataclass(frozen=True)
class Measured:
    """One mesh dim. sharing: whether its groups worked "together", as in training, or one "alone".

    series: "collectives", or the impl that changes a placement -> name -> series. own_times: whether each rank's own
    samples are there.
    """

    name: str
    ranks: int
    groups: int
    sharing: Sharing
    series: Mapping[str, Mapping[str, Series]]
    contention: dict[str, Contention]
    layout: Layout
    own_times: bool
    warnings: tuple[str, ...]

    @property
    def collectives(self) -> Mapping[str, Series]:
        return self.series[COLLECTIVES]

    def all_series(self) -> Iterator[tuple[str, Series]]:
        """("collectives" or an impl, series) of all that was measured."""
        return ((what, series) for what, of in self.series.items() for series in of.values())

    def map(self, change: Callable[[Series], Series]) -> Measured:
        """The dim with each series changed; those left without points are dropped."""
        changed = {
            what: {name: new for name, series in of.items() if (new := change(series)).points}
            for what, of in self.series.items()
        }
        return dataclasses.replace(self, series=changed)


def called(what: str, name: str) -> str:
    """A collective, or the change of placement of an impl, in words."""
    return name if what == COLLECTIVES else f"{what} {name}"


def measured_dims(runs: Sequence[Run]) -> tuple[list[Measured], list[str]]:
    """Every mesh dim of runs of one setup, with what was chosen instead of the usual, in words."""
    header, mesh = runs[0].header, runs[0].header.mesh
    collectives, mode_note = preferred(tagged(runs, COLLECTIVES), "mode", "isolated")
    _, dtype_note = preferred(collectives, "dtype", "float32")
    collectives, impl_note = one_impl(collectives)
    transitions, note = preferred(tagged(runs, TRANSITIONS), "mode", "isolated")
    notes = [mode_note, dtype_note, impl_note, note and f"changes of placement: {note}"]
    layouts = {layout.name: layout for layout in layout_of(header)}
    dims = []
    for name, groups in groups_by_dim(mesh.dim_names, mesh.shape).items():
        of_dim, moved = _of(collectives, name), _of(transitions, name)
        if name not in mesh.dim_names and not (of_dim or moved):
            continue  # all dims as one, which was not measured
        kept, sharing = _sharing(of_dim)
        together = sharing == "together"
        series, warnings = series_by_name(kept, groups)
        alone, _ = series_by_name(_where(of_dim, "alone"), groups)
        changes, change_warnings = _transitions(moved, groups)
        times = slowest_over_fastest(kept if together else (), groups)
        layout, layout_warnings = layout_of_dim(layouts.get(name), times)
        dims.append(
            Measured(
                name,
                len(groups[0]),
                len(groups),
                sharing,
                {COLLECTIVES: series, **changes},
                _contention(series, alone) if together else {},
                layout,
                all(r.rank_samples_s for _, r in kept),
                (*layout_warnings, *warnings, *change_warnings),
            )
        )
    return dims, [note for note in notes if note]


def _of(results: Sequence[Tagged], dim: str) -> list[Tagged]:
    return [(run_id, r) for run_id, r in results if r.params["mesh_dim"] == dim]


def _where(results: Sequence[Tagged], sharing: str) -> list[Tagged]:
    return [(run_id, r) for run_id, r in results if r.params.get("groups", "together") == sharing]


def _sharing(results: Sequence[Tagged]) -> tuple[list[Tagged], Sharing]:
    """The results of all groups at once, or where there are none those of one group alone."""
    together = _where(results, "together")
    return (together, "together") if together or not results else (_where(results, "alone"), "alone")


def _transitions(results: Sequence[Tagged], groups: Groups) -> tuple[dict[str, dict[str, Series]], list[str]]:
    found, warnings = {}, []
    results, sharing = _sharing(results)
    if sharing == "alone" and len(groups) > 1:
        warnings.append(
            "changes of placement were measured with one group alone: together they may be slower"
        )
    for impl in IMPLS:
        series, notes = series_by_name([(run_id, r) for run_id, r in results if r.impl == impl], groups)
        if series:
            found[impl] = series
        warnings += notes
    return found, warnings


def _contention(together: Mapping[str, Series], alone: Mapping[str, Series]) -> dict[str, Contention]:
    """Time of all groups at once over that of one alone, at the largest size measured both ways."""
    ratios = {}
    for name, series in together.items():
        other = alone.get(name)
        if other is None or other.dtype != series.dtype:
            continue
        slow = {p.size_bytes: p.measured_us for p in series.points}
        fast = {p.size_bytes: p.measured_us for p in other.points}
        common = slow.keys() & fast.keys()
        if common:
            size = max(common)
            ratios[name] = Contention(together_over_alone=slow[size] / fast[size], size_bytes=size)
    return ratios
