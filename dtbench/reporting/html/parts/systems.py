"""Comparison of several systems: bus bandwidth of collectives over size, a line per system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dtbench.grouping import group_by
from dtbench.records.result import Run
from dtbench.reporting.html.axes import bandwidths_axis
from dtbench.reporting.html.cases import ReportCase, collect, distinct
from dtbench.reporting.html.figures import LOOKS, CurvePanel, Figure, curves, lines
from dtbench.reporting.html.parts.collectives import bandwidth_points
from dtbench.reporting.html.section import Material, Part, ReportSection
from dtbench.text.units import format_bandwidth

# More lines in a panel are not readable.
MAX_SYSTEMS = 6
# Collective -> cases of one system by size.
_Curves = Mapping[str, Sequence[ReportCase]]


def fill(section: ReportSection, material: Material) -> None:
    shown = section.capped(material.sources.systems, "systems", MAX_SYSTEMS)
    if not shown:
        return
    systems = {_label(runs, material.sources.systems): _curves(runs) for runs in shown}
    section.lead = (
        "Bus bandwidth is comparable between numbers of ranks; dtypes and modes are those of each file. "
        f"The other sections show {next(iter(systems))}."
    )
    best = {label: best for label, of_system in systems.items() if (best := _best(of_system))}
    rates = ", ".join(f"{label} {format_bandwidth(rate)}" for label, rate in best.items())
    section.outcome = f"at best {rates}"
    section.add(_figure(systems))


def _label(runs: Sequence[Run], systems: Sequence[Sequence[Run]]) -> str:
    """Returns the name of the first file, with its folder if several systems have files of that name."""
    names = [system[0].path.stem for system in systems]
    path = runs[0].path
    return path.stem if names.count(path.stem) == 1 else f"{path.parent.name}/{path.stem}"


def _curves(runs: Sequence[Run]) -> _Curves:
    """Selects the cases of each collective: largest group, all groups together, isolated calls, if available."""
    by_name: dict[str, list[ReportCase]] = {}
    cases = [c for c in collect(runs).get("collectives", []) if c.impls and c.only.busbw_Bps]
    for name, members in group_by(cases, lambda c: c.name).items():
        max_ranks = max(c.number("ranks") for c in members)
        usual = {"ranks": max_ranks, "groups": "together", "mode": "isolated", "dtype": "float32"}
        for param, value in usual.items():
            members = [c for c in members if c.get(param) == value] or members
        key = ("mesh_dim", "groups", "mode", "dtype", "in_place")
        matching = [c for c in members if all(c.get(param) == members[0].get(param) for param in key)]
        by_name[name] = sorted(matching, key=lambda c: c.only.size_bytes or 0)
    return by_name


def _best(curves_by_name: _Curves) -> float | None:
    """Returns the best bus bandwidth of all_reduce, or else of the first collective."""
    cases = curves_by_name.get("all_reduce") or next(iter(curves_by_name.values()), [])
    return max((c.only.busbw_Bps or 0.0 for c in cases), default=None)


def _figure(systems: Mapping[str, _Curves]) -> Figure | None:
    panels = []
    for name in distinct(name for system in systems.values() for name in system):
        points = {label: bandwidth_points(system.get(name, ())) for label, system in systems.items()}
        panels.append(CurvePanel(name, lines(points)))
    # Collectives of a single system are only drawn if the systems share none.
    panels = [panel for panel in panels if len(panel.series) > 1] or panels
    return curves(
        "systems",
        panels,
        dict(zip(systems, LOOKS, strict=False)),
        "Bus bandwidth over tensor size; both axes logarithmic and common to all panels.",
        y=bandwidths_axis,
    )


SYSTEMS = Part("systems", "Comparison of systems", fill)
