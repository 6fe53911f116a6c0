"""Time over size: the raw collective beside the core's and torch's redistributions and the fitted model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtbench.cost.price import ring_us
from dtbench.show.report.cases import Case, distinct
from dtbench.show.report.figures import (
    Panel,
    Series,
    Style,
    legend,
    line_panel,
    seconds_tick,
    size_axis,
    value_axis,
)
from dtbench.show.report.section import MAX_PANELS, Figure, Section, capped
from dtbench_core.cost.ring import RING_COLLECTIVES

# The change of placement that each collective does the work of.
TRANSITION = {
    "all_reduce": "P->R",
    "all_gather": "S(0)->R",
    "reduce_scatter": "P->S(0)",
    "all_to_all": "S(0)->S(1)",
}
LIMIT = Style("ink", "", (1, 2))
TOGETHER, ALONE = Style("s2", "o"), Style("s2", "o", (1.5, 1.5), hollow=True)
CORE, TORCH = Style("s0", "^"), Style("s1", "s", (5, 2), hollow=True)
MODEL = Style("s3", "", (6, 3))
WORDS = {
    "together": ("c10d, all groups together", TOGETHER),
    "alone": ("c10d, one group alone", ALONE),
    "core": ("core’s redistribute", CORE),
    "torch": ("torch’s redistribute", TORCH),
    "model": ("fitted model", MODEL),
    "limit": ("limit of the links", LIMIT),
}


class HasLimit(Protocol):
    @property
    def Bps(self) -> float: ...  # noqa: N802 - bytes per second


def time_figure(
    section: Section,
    cases: Sequence[Case],
    transitions: Sequence[Case],
    dtype: str,
    topology: Mapping[str, Any] | None,
    limits: Mapping[str, HasLimit],
) -> Figure | None:
    """A panel per mesh dim and collective that some change of placement needs."""
    wanted = [
        (str(dim), name)
        for dim in distinct(c.get("mesh_dim") for c in cases)
        for name in TRANSITION
        if any(c.name == name and c.get("mesh_dim") == dim for c in cases)
    ]
    lines = {
        key: _lines(key, cases, transitions, dtype, topology, limits)
        for key in capped(section, wanted, MAX_PANELS, "panels")
    }
    lines = {key: series for key, series in lines.items() if series}
    if not lines:
        return None
    everything = [one for series in lines.values() for one in series]
    x = size_axis([round(v) for one in everything for v in one.x if one.style.marker])
    y = value_axis([v for one in everything for v in one.y], seconds_tick, log=True, most=6)
    panels: list[Panel] = []
    for index, ((dim, name), series) in enumerate(lines.items()):
        largest = max(max(one.y) for one in series)
        desc = (
            f"Time of {len(series)} ways over tensor size, at most {seconds_tick(float(f'{largest:.2g}'))}."
        )
        title = f"{name} over {dim}: {TRANSITION[name]}"
        panels.append(line_panel(title, series, x, y, columns=2, prefix=f"times{index}", desc=desc))
    present = {one.label for one in everything}
    return Figure(
        f"Time over tensor size, {dtype}, median of isolated calls; both axes logarithmic and common to all panels. "
        "The distance of the core and torch from c10d is what a redistribution costs beside its collective; where "
        "the model’s dashes leave the points, its prices mislead.",
        legend({words: style for key, (words, style) in WORDS.items() if key in present}, prefix="timesL"),
        panels,
        2,
    )


def _lines(
    key: tuple[str, str],
    cases: Sequence[Case],
    transitions: Sequence[Case],
    dtype: str,
    topology: Mapping[str, Any] | None,
    limits: Mapping[str, HasLimit],
) -> list[Series]:
    dim, name = key
    mine = [c for c in cases if c.name == name and c.get("mesh_dim") == dim]
    series = []
    for groups in ("together", "alone"):
        of = [c for c in mine if c.get("groups") == groups or (groups == "together" and not c.get("groups"))]
        measured = [next(iter(c.impls.values())) for c in of]
        series.append(_series(groups, [(m.size_bytes or 0, m.estimate_s) for m in measured]))
    moved = [
        c
        for c in transitions
        if c.name == TRANSITION[name]
        and c.get("mesh_dim") == dim
        and c.get("dtype") == dtype
        and c.get("mode") in ("isolated", "")
        and c.get("groups") in ("together", "")
    ]
    for impl in ("core", "torch"):
        points = [(c.number("size"), s) for c in moved if (s := c.seconds(impl)) is not None]
        series.append(_series(impl, points))
    there = [one for one in series if one.x]
    if not there:
        return []
    sizes = [float(v) for one in there for v in one.x]
    factors = [
        m.busbw_Bps / m.algbw_Bps for c in mine for m in c.impls.values() if m.busbw_Bps and m.algbw_Bps
    ]
    if dim in limits and factors:
        ends = [min(sizes), max(sizes)]
        there.append(Series("limit", LIMIT, ends, [size * factors[0] / limits[dim].Bps for size in ends]))
    model = _model(dim, name, sizes, topology)
    return [*([model] if model else []), *there]


def _series(label: str, points: Sequence[tuple[int, float]]) -> Series:
    ordered = sorted((size, time) for size, time in points if size > 0)
    return Series(label, WORDS[label][1], [p[0] for p in ordered], [p[1] for p in ordered])


def _model(dim: str, name: str, sizes: Sequence[float], topology: Mapping[str, Any] | None) -> Series | None:
    """The fitted constants by torch's formula; a collective that has none, by its own line."""
    of = next((d for d in (topology or {"dims": []})["dims"] if d["name"] == dim), None)
    if of is None:
        return None
    at = (
        [float(s) for s in np.geomspace(min(sizes), max(sizes), 33)]
        if max(sizes) > min(sizes)
        else [sizes[0]]
    )
    if name in RING_COLLECTIVES:
        return Series("model", MODEL, at, [1e-6 * ring_us(name, size, of["ranks"], of) for size in at])
    curve = of["collectives"].get(name)
    if curve is None or curve["alpha_us"] is None or not curve["beta_GiBps"]:
        return None
    times = [1e-6 * curve["alpha_us"] + size / 2**30 / curve["beta_GiBps"] for size in at]
    return Series("model", MODEL, at, times) if min(times) > 0 else None
