"""Collectives of several systems beside each other: bus bandwidth over size, a line per system."""

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

# More lines in a panel are not told apart.
MAX_SYSTEMS = 6
# Of a system: collective -> its cases by size.
_Curves = Mapping[str, Sequence[ReportCase]]


def fill(section: ReportSection, of: Material) -> None:
    shown = section.capped(of.sources.systems, "systems", MAX_SYSTEMS)
    if not shown:
        return
    systems = {_label(runs, of.sources.systems): _curves(runs) for runs in shown}
    section.lead = (
        "Bus bandwidth is comparable between numbers of ranks; types, places and modes are those of each file. "
        f"The other sections are of {next(iter(systems))}."
    )
    best = {label: best for label, of_system in systems.items() if (best := _best(of_system))}
    rates = ", ".join(f"{label} {format_bandwidth(rate)}" for label, rate in best.items())
    section.outcome = f"at best {rates}"
    section.add(_figure(systems))


def _label(runs: Sequence[Run], systems: Sequence[Sequence[Run]]) -> str:
    """The name of the first file; of files of one name in several folders with its folder."""
    names = [of[0].path.stem for of in systems]
    path = runs[0].path
    return path.stem if names.count(path.stem) == 1 else f"{path.parent.name}/{path.stem}"


def _curves(runs: Sequence[Run]) -> _Curves:
    """Of each collective those of the largest group, all groups at work, isolated where that was measured."""
    by_name: dict[str, list[ReportCase]] = {}
    cases = [c for c in collect(runs).get("collectives", []) if c.impls and c.only.busbw_Bps]
    for name, of in group_by(cases, lambda c: c.name).items():
        most = max(c.number("ranks") for c in of)
        usual = {"ranks": most, "groups": "together", "mode": "isolated", "dtype": "float32"}
        for param, wanted in usual.items():
            of = [c for c in of if c.get(param) == wanted] or of
        key = ("mesh_dim", "groups", "mode", "dtype", "in_place")
        same = [c for c in of if all(c.get(param) == of[0].get(param) for param in key)]
        by_name[name] = sorted(same, key=lambda c: c.only.size_bytes or 0)
    return by_name


def _best(of: _Curves) -> float | None:
    """The best bus bandwidth of an all_reduce, else of the first collective."""
    cases = of.get("all_reduce") or next(iter(of.values()), [])
    return max((c.only.busbw_Bps or 0.0 for c in cases), default=None)


def _figure(systems: Mapping[str, _Curves]) -> Figure | None:
    panels = []
    for name in distinct(name for of in systems.values() for name in of):
        points = {label: bandwidth_points(of.get(name, ())) for label, of in systems.items()}
        panels.append(CurvePanel(name, lines(points)))
    # What one system alone has is in the section of the first.
    panels = [one for one in panels if len(one.series) > 1] or panels
    return curves(
        "systems",
        panels,
        dict(zip(systems, LOOKS, strict=False)),
        "Bus bandwidth over tensor size; both axes logarithmic and common to all panels.",
        y=bandwidths_axis,
    )


SYSTEMS = Part("systems", "Comparison of systems", fill)
