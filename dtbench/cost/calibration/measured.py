"""What runs measured on each mesh dim, chosen and sorted: the input of every fit and validation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

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
from dtbench.layout import joint_dim, layout_of
from dtbench.mesh import Groups, groups_of
from dtbench.model import Header, Run

IMPLS = ("core", "torch")  # whose changes of placement are priced apart


@dataclass(frozen=True)
class Measured:
    """One mesh dim. sharing: whether its groups worked "together", as in training, or one "alone".

    collectives: name -> series. transitions: impl -> name -> series. contention: as in the topology
    file. own_times: whether each rank's own samples are there.
    """

    name: str
    ranks: int
    groups: int
    sharing: str
    collectives: Mapping[str, Series]
    transitions: Mapping[str, Mapping[str, Series]]
    contention: Mapping[str, Mapping[str, Any]]
    layout: Mapping[str, Any]
    own_times: bool
    warnings: tuple[str, ...]


def measured_dims(runs: Sequence[Run]) -> tuple[list[Measured], list[str]]:
    """Every mesh dim of runs of one setup, with what was chosen instead of the usual, in words."""
    header = runs[0].header
    notes = []
    collectives = tagged(runs, COLLECTIVES)
    collectives, note = preferred(collectives, "mode", "isolated")
    notes += [note] if note else []
    _, note = preferred(collectives, "dtype", "float32")
    notes += [note] if note else []
    collectives, note = one_impl(collectives)
    notes += [note] if note else []
    transitions, note = preferred(tagged(runs, TRANSITIONS), "mode", "isolated")
    notes += [f"changes of placement: {note}"] if note else []
    layouts = {layout.name: layout for layout in layout_of(header)}
    dims = []
    for name, groups in _groups_of(
        header, {str(r.params["mesh_dim"]) for _, r in (*collectives, *transitions)}
    ):
        of_dim = _of(collectives, name)
        kept, sharing = _sharing(of_dim)
        series, warnings = series_by_name(kept, groups)
        alone, _ = series_by_name(_where(of_dim, "alone"), groups)
        moved, dtype_warnings = _transitions(_of(transitions, name), groups)
        times = slowest_over_fastest(kept if sharing == "together" else (), groups)
        layout, layout_warnings = layout_of_dim(layouts.get(name), times)
        dims.append(
            Measured(
                name,
                len(groups[0]),
                len(groups),
                sharing,
                series,
                moved,
                _contention(series, alone) if sharing == "together" else {},
                layout,
                all(r.rank_samples_s for _, r in kept),
                (*layout_warnings, *warnings, *dtype_warnings),
            )
        )
    return dims, notes


def _groups_of(header: Header, measured: AbstractSet[str]) -> Iterator[tuple[str, Groups]]:
    """Each mesh dim, then all dims as one where that was measured."""
    names, shape = header.mesh.dim_names, header.mesh.shape
    for index, name in enumerate(names):
        yield name, groups_of(shape, index)
    joint = joint_dim(zip(names, shape, strict=True))
    if joint is not None and joint[0] in measured:
        yield joint[0], [list(range(joint[1]))]


def _of(results: Sequence[Tagged], dim: str) -> list[Tagged]:
    return [(run_id, r) for run_id, r in results if r.params["mesh_dim"] == dim]


def _where(results: Sequence[Tagged], sharing: str) -> list[Tagged]:
    return [(run_id, r) for run_id, r in results if r.params.get("groups", "together") == sharing]


def _sharing(results: Sequence[Tagged]) -> tuple[list[Tagged], str]:
    """The results of all groups at once, or where there are none those of one group alone."""
    together = _where(results, "together")
    return (together, "together") if together or not results else (_where(results, "alone"), "alone")


def _transitions(
    results: Sequence[Tagged], groups: list[list[int]]
) -> tuple[dict[str, dict[str, Series]], list[str]]:
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


def _contention(together: Mapping[str, Series], alone: Mapping[str, Series]) -> dict[str, dict[str, Any]]:
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
            ratios[name] = {"together_over_alone": slow[size] / fast[size], "size_bytes": size}
    return ratios
