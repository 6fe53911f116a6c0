"""The cost model: measured times, the fitted constants and torch's built-in ones, how far each is off."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from dtbench.cost.price import RingConstants, price, ring_us
from dtbench.records.topology import Dim, Topology
from dtbench.show.report import tables as t
from dtbench.show.report.axes import ratio_axis, times_axis
from dtbench.show.report.figures import Curves, Figure, Series, Style, curves
from dtbench.show.report.parts.regret import add_regret
from dtbench.show.report.section import Material, Part, Section
from dtbench.text.units import format_size, significant
from dtbench_core.cost.ring import RING_COLLECTIVES

# Panels of the fit; the tables have all.
MAX_FITS = 6
FIT_STYLES = {
    "measured": Style("ink", "o", None, hollow=True),
    "table": Style("s3", "", (1.5, 1.5), words="its own table, with the 90 % interval of a new launch"),
    "fitted": Style("s0", "", words="fitted, one bandwidth per dim"),
    "builtin": Style("s1", "", (5, 2), words="PyTorch’s built-in constants"),
}
RESIDUAL_STYLES = {
    "fitted": Style("s0", "o", None, words="fitted constants"),
    "builtin": Style("s1", "s", None, hollow=True, words="PyTorch’s built-in constants"),
    "table": Style("s3", "^", None, hollow=True, words="its own table"),
}

# Of ratios, drawn as percent: half and double are equally far off.
PERCENT_TICKS = (1e-4, 1e-3, 0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0, 1e3, 1e4)


def ring_s(dim: Dim, name: str, size: float, constants: RingConstants | None) -> float | None:
    """Seconds by torch's formula; None where it has none for the collective, or there are no constants."""
    if constants is None or name not in RING_COLLECTIVES:
        return None
    return 1e-6 * ring_us(name, size, dim.ranks, constants)


def constants_line(
    topology: Topology | None, dim: str, name: str, sizes: Sequence[float]
) -> tuple[list[float], list[float]] | None:
    """(sizes, seconds) by the dim's fitted constants; of a collective that torch's formula lacks, by its own line."""
    of = next((d for d in (topology.dims if topology else ()) if d.name == dim), None)
    if of is None:
        return None
    at = _between(sizes)
    if name in RING_COLLECTIVES:
        return at, [s for size in at if (s := ring_s(of, name, size, of)) is not None]
    curve = of.collectives.get(name)
    if curve is None or curve.alpha_us is None or curve.beta_GiBps is None:
        return None
    times = [1e-6 * curve.alpha_us + size / 2**30 / curve.beta_GiBps for size in at]
    return (at, times) if min(times) > 0 else None


def _between(sizes: Sequence[float]) -> list[float]:
    """These sizes and more: what is linear in size is bent on a logarithmic axis and takes points to draw it."""
    more = np.geomspace(min(sizes), max(sizes), 33) if max(sizes) > min(sizes) else ()
    return sorted({*sizes, *(float(s) for s in more)})


def fill(section: Section, of: Material) -> None:
    topology = of.sources.topology
    if topology is not None:
        section.lead = (
            "DTensor chooses redistributions by a model of a ring: a base latency of "
            f"{topology.base_latency_us:g} µs, a latency per hop, and the bytes over one bandwidth per mesh "
            "dim. Here its two constants are fitted to the measured times; bandwidths are in GiB/s (1024³ "
            "bytes), the unit of PyTorch’s model. The built-in constants are those for the layout that the "
            "ranks’ hosts show. What a call is expected to take is read from a table of its own, which also has "
            "the interval that a new launch falls into nine times of ten."
        )
        section.cuts += [f"{d.name}: {w}." for d in topology.dims for w in d.warnings]
        section.add(_fit(section, topology), _residuals(topology))
        section.add(_constants(topology), _left_out(topology), _contention(topology))
        section.add(_points(topology), _lines(topology))
        _headlines(section, topology, topology.backend)
    if of.sources.regret is not None:
        add_regret(section, of.sources.regret)
    run = "" if of.cases("collectives") else "dtbench run collectives -o RUN.jsonl, "
    section.missing = (
        f"{run}dtbench calibrate RUN.jsonl -o TOPOLOGY.json, then add TOPOLOGY.json to this report"
    )


def _headlines(section: Section, topology: Topology, backend: str) -> None:
    """torch's constants are those of GPUs' links: how far they are off says nothing of another transport."""
    for dim in topology.dims if backend == "nccl" else ():
        if dim.builtin:
            off, fit = dim.builtin.geometric_mean_ratio, dim.residuals.geometric_mean_ratio
            words = f"how far PyTorch’s built-in constants are off over {dim.name}; "
            words += f"the fitted ones by {t.factor(fit)}"
            section.headlines.append((t.factor(off), words))


# ------------------------------------------------------------------------------------------ figures


def _fit(section: Section, topology: Topology) -> Figure | None:
    dims = topology.dims
    # Those that the constants are fitted to, the all_reduce of each dim first; else whatever there is.
    ring = sorted(RING_COLLECTIVES, key=lambda name: name != "all_reduce")
    wanted = [(dim, name) for name in ring for dim in dims if name in dim.collectives]
    wanted = wanted or [(dim, name) for dim in dims for name in dim.collectives]
    panels = [
        Curves(
            f"{name} over {dim.name}, {dim.ranks} ranks",
            _fitted_curves(dim, name),
            "Measured times, their table with its interval, and the fitted constants; over the dim the constants are "
            f"off by {dim.residuals.geometric_mean_ratio:.2f} times in the mean.",
            shade=_fitted_on(dim),
        )
        for dim, name in section.capped(wanted, "panels", MAX_FITS)
    ]
    return curves(
        "fit",
        panels,
        FIT_STYLES,
        "Time over tensor size, both axes logarithmic and common to all panels. A point is the lower quartile of the "
        "samples, from the last arrival of a rank on, which is why it lies below the other figures’ times; the band is "
        "what nine of ten new launches would measure, and the grey ground the sizes that the constants are fitted on. "
        "Far from the points, a line misleads DTensor’s planner.",
        y=times_axis,
    )


def _fitted_on(dim: Dim) -> tuple[float, float]:
    low, high = dim.fitted_on.size_bytes
    return low / 1.1, high * 1.1


def _fitted_curves(dim: Dim, name: str) -> list[Series]:
    """The lines first, so that the points lie on top. Nothing is drawn beyond the measured sizes."""
    table = dim.collectives[name].table
    ends = [float(row.size_bytes) for row in table]
    sizes = _between(ends)
    series = []
    for label, constants in (("builtin", dim.builtin), ("fitted", dim)):
        times = [s for size in sizes if (s := ring_s(dim, name, size, constants)) is not None]
        series += [Series(label, sizes, times)] if times else []
    prices = [price(dim.collectives[name], size) for size in sizes]
    band = [p.low_us * 1e-6 for p in prices], [p.high_us * 1e-6 for p in prices]
    series.append(Series("table", sizes, [p.time_us * 1e-6 for p in prices], band))
    return [*series, Series("measured", ends, [row.measured_us * 1e-6 for row in table])]


def _residuals(topology: Topology) -> Figure | None:
    """A panel per mesh dim: predicted over measured, in percent, over size."""
    panels = [
        Curves(
            f"{dim.name}, {dim.ranks} ranks",
            residuals_of(dim),
            "Predicted over measured time in percent; the fitted constants are off by "
            f"{dim.residuals.worst_ratio:.2f}× at worst.",
            shade=_fitted_on(dim),
            level=1.0,
        )
        for dim in topology.dims
    ]
    return curves(
        "residual",
        panels,
        RESIDUAL_STYLES,
        "How much more (+) or less (−) time the model predicts than was measured, in percent of the measured, on a "
        "logarithmic axis: −50 % is half, +100 % is double. On the line it is right. Shaded: what it was fitted on.",
        y=lambda values: ratio_axis(values, 0.5, 2.0, percent_off, PERCENT_TICKS),
        lines=False,
    )


def residuals_of(dim: Dim) -> list[Series]:
    pairs: dict[str, list[tuple[float, float]]] = {"builtin": [], "table": [], "fitted": []}
    for point in dim.residuals.points:
        name, size, measured = point.collective, point.size_bytes, point.measured_s
        pairs["fitted"].append((size, point.predicted_s / measured))
        if (built_in := ring_s(dim, name, size, dim.builtin)) is not None:
            pairs["builtin"].append((size, built_in / measured))
        if name in dim.collectives:
            pairs["table"].append((size, 1e-6 * price(dim.collectives[name], size).time_us / measured))
    return [Series(key, [p[0] for p in of], [p[1] for p in of]) for key, of in pairs.items() if of]


def percent_off(ratio: float) -> str:
    """0.5 is −50 %, 2 is +100 %."""
    off = 100 * (ratio - 1)
    if math.isclose(off, 0, abs_tol=1e-9):
        return "0 %"
    digits = 0 if abs(off) >= 1 and ratio >= 0.1 else 2
    return f"{off:+.{digits}f} %".replace("-", "−").replace(".00", "")


# ------------------------------------------------------------------------------------------ tables


def _interval(pair: Sequence[float] | None) -> str:
    return f"{significant(pair[0], 3)} – {significant(pair[1], 3)}" if pair else t.MISSING


def _basis(dim: Dim) -> str:
    """What a dim's constants were fitted on, in words."""
    on = dim.fitted_on
    low, high = (format_size(size) for size in on.size_bytes)
    groups = "all groups together" if dim.groups_sharing == "together" else "one group alone"
    return f"{dim.name} is fitted on {on.points} points from {low} to {high}, {groups}."


def _constants(topology: Topology) -> t.Table:
    dims = topology.dims
    builtin = [dim.builtin for dim in dims]

    def column(header: str, cells: Sequence[str], unit: str) -> t.Column:
        return t.Column(header, cells, True, unit)

    def ours(values: Iterable[float | None]) -> list[str]:
        return [t.MISSING if value is None else significant(value, 3) for value in values]

    bounds = ["≥ " if dim.bandwidth_is_lower_bound else "" for dim in dims]
    bandwidths = [b + significant(d.bandwidth_GiBps, 3) for b, d in zip(bounds, dims, strict=True)]
    latencies = [significant(dim.latency_us_per_hop, 3) for dim in dims]
    return t.Table(
        "Fitted constants beside PyTorch’s built-in ones",
        [
            t.text("Mesh dim", [dim.name for dim in dims]),
            t.counts("Ranks", [dim.ranks for dim in dims]),
            t.text("Layout", [dim.layout.kind or "unknown" for dim in dims]),
            column("Bandwidth", bandwidths, "GiB/s"),
            column("90 % interval", [_interval(dim.bandwidth_interval) for dim in dims], "GiB/s"),
            column("built-in", ours(b.bandwidth_GiBps if b else None for b in builtin), "GiB/s"),
            column("Latency per hop", latencies, "µs"),
            column("90 % interval", [_interval(dim.latency_interval) for dim in dims], "µs"),
            column("built-in", ours(b.latency_us_per_hop if b else None for b in builtin), "µs"),
            t.ratios("Fit off by, mean", [dim.residuals.geometric_mean_ratio for dim in dims]),
            t.ratios("worst", [dim.residuals.worst_ratio for dim in dims]),
            t.ratios("Built-in off by, mean", [b.geometric_mean_ratio if b else None for b in builtin]),
        ],
        note=" ".join(
            [
                *(_basis(dim) for dim in dims),
                *(f"Intervals: {i}." for i in sorted({dim.intervals for dim in dims} - {""})),
                "“Off by”: the larger of predicted and measured time over the smaller; 1 is perfect.",
            ]
        ),
    )


def _left_out(topology: Topology) -> t.Table:
    left_out = topology.left_out
    return t.Table(
        "Mesh dims without constants",
        [
            t.text("Mesh dim", [dim.name for dim in left_out]),
            t.counts("Ranks", [dim.ranks for dim in left_out]),
            t.text("Why", [dim.reason for dim in left_out]),
        ],
    )


def _contention(topology: Topology) -> t.Table:
    rows = [(dim, name, ratio) for dim in topology.dims for name, ratio in dim.contention.items()]
    return t.Table(
        "Time of all groups at once over the time of one alone: 2 where two share one link",
        [
            t.text("Mesh dim", [dim.name for dim, _, _ in rows]),
            t.text("Collective", [name for _, name, _ in rows]),
            t.sizes("Size", [format_size(ratio.size_bytes) for _, _, ratio in rows]),
            t.ratios("together / alone", [ratio.together_over_alone for _, _, ratio in rows]),
        ],
        folded=True,
    )


def _points(topology: Topology) -> t.Table:
    rows = [(dim, p) for dim in topology.dims for p in dim.residuals.points]
    predicted = [ring_s(dim, p.collective, p.size_bytes, dim.builtin) for dim, p in rows]
    times: list[tuple[str, list[float | None]]] = [
        ("measured", [p.measured_s for _, p in rows]),
        ("fitted", [p.predicted_s for _, p in rows]),
        ("built-in", predicted),
    ]
    off = [None if v is None else v / p.measured_s for v, (_, p) in zip(predicted, rows, strict=True)]
    return t.Table(
        "Every point: measured, fitted, built-in",
        [
            t.text("Mesh dim", [dim.name for dim, _ in rows]),
            t.text("Collective", [p.collective for _, p in rows]),
            t.sizes("Size", [format_size(p.size_bytes) for _, p in rows]),
            *t.times(times),
            t.ratios("fitted / measured", [p.predicted_s / p.measured_s for _, p in rows]),
            t.factors("built-in / measured", off),
        ],
        folded=True,
    )


def _lines(topology: Topology) -> t.Table:
    rows = [
        (dim, what, name, curve)
        for dim in topology.dims
        for what, of in {"c10d": dim.collectives, **dim.transitions}.items()
        for name, curve in of.items()
    ]
    lines = [curve for *_, curve in rows]
    return t.Table(
        "A line of its own for every collective and change of placement: time = α + size / β",
        [
            t.text("Mesh dim", [dim.name for dim, *_ in rows]),
            t.text("Of", [what for _, what, _, _ in rows]),
            t.text("Call", [name for _, _, name, _ in rows]),
            t.Column("α", t.aligned([curve.alpha_us for curve in lines]), True, "µs"),
            t.Column("90 % interval", [_interval(curve.alpha_interval) for curve in lines], True, "µs"),
            t.Column("β", t.aligned([curve.beta_GiBps for curve in lines]), True, "GiB/s"),
            t.Column("90 % interval", [_interval(curve.beta_interval) for curve in lines], True, "GiB/s"),
            t.ratios("off by, mean", [curve.geometric_mean_ratio for curve in lines]),
            t.counts("Points", [curve.points for curve in lines]),
            t.counts("Launches", [curve.launches for curve in lines]),
            t.Column("Sizes", [" – ".join(map(format_size, curve.size_bytes)) for curve in lines], True),
        ],
        note="Prices are read from the tables of measured times; a line sums one up.",
        folded=True,
    )


COST_MODEL = Part("calibration", "Cost model", fill)
