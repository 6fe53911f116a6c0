"""How far the cost model's predictions lie from the measured times, in percent, and what its choices cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from dtbench.cost.choices import Regret
from dtbench.cost.price import price, ring_us
from dtbench.show.report import tables as t
from dtbench.show.report.cases import distinct
from dtbench.show.report.figures import Axis, Row, Series, Style, dot_panel, legend, line_panel, size_axis
from dtbench.show.report.section import Figure
from dtbench.units import format_size
from dtbench_core.cost.ring import RING_COLLECTIVES

RESIDUAL_STYLES = {
    "fitted": ("fitted constants", Style("s0", "o", None)),
    "builtin": ("PyTorch’s built-in constants", Style("s1", "s", None, hollow=True)),
    "table": ("its own table", Style("s3", "^", None, hollow=True)),
}
# Of ratios, drawn as percent on a logarithmic axis: half and double are equally far off.
_TICKS = (1e-4, 1e-3, 0.01, 0.1, 0.5, 1.0, 2.0, 10.0, 100.0, 1e3, 1e4)


def residual_figure(topology: Mapping[str, Any]) -> Figure | None:
    """A panel per mesh dim: predicted over measured, in percent, over size."""
    found = {dim["name"]: _residuals(dim) for dim in topology["dims"] if dim["residuals"]["points"]}
    values = [y for series in found.values() for one in series for y in one.y]
    if not values:
        return None
    x = size_axis([round(v) for series in found.values() for one in series for v in one.x])
    y = _percent_axis(values)
    panels = []
    for index, dim in enumerate(d for d in topology["dims"] if d["name"] in found):
        low, high = dim["fitted_on"]["size_bytes"]
        off = dim["residuals"]["worst_ratio"]
        panels.append(
            line_panel(
                f"{dim['name']}, {dim['ranks']} ranks",
                found[dim["name"]],
                x,
                y,
                columns=2,
                prefix=f"residual{index}",
                desc=f"Predicted over measured time in percent; the fitted constants are off by {off:.2f}× at worst.",
                shade=(low / 1.1, high * 1.1),
                level=1.0,
            )
        )
    present = {one.label for series in found.values() for one in series}
    return Figure(
        "How much more (+) or less (−) time the model predicts than was measured, in percent of the measured, on a "
        "logarithmic axis: −50 % is half, +100 % is double. On the line it is right. Shaded: what it was fitted on.",
        legend(
            {w: s for k, (w, s) in RESIDUAL_STYLES.items() if k in present}, prefix="residualL", lines=False
        ),
        panels,
        2,
    )


def _residuals(dim: Mapping[str, Any]) -> list[Series]:
    points = dim["residuals"]["points"]
    pairs: dict[str, list[tuple[float, float]]] = {"builtin": [], "table": [], "fitted": []}
    for point in points:
        name, size, measured = point["collective"], point["size_bytes"], point["measured_s"]
        pairs["fitted"].append((size, point["predicted_s"] / measured))
        if dim["builtin"] is not None and name in RING_COLLECTIVES:
            pairs["builtin"].append(
                (size, 1e-6 * ring_us(name, size, dim["ranks"], dim["builtin"]) / measured)
            )
        if name in dim["collectives"]:
            pairs["table"].append((size, 1e-6 * price(dim["collectives"][name], size).time_us / measured))
    return [
        Series(key, RESIDUAL_STYLES[key][1], [p[0] for p in of], [p[1] for p in of])
        for key, of in pairs.items()
        if of
    ]


def _percent_axis(ratios: Sequence[float]) -> Axis:
    low, high = min(*ratios, 0.5), max(*ratios, 2.0)
    room = (high / low) ** 0.05
    return Axis(
        low / room, high * room, True, percent_off, [x for x in _TICKS if low / room <= x <= high * room]
    )


def percent_off(ratio: float) -> str:
    """0.5 is −50 %, 2 is +100 %."""
    off = 100 * (ratio - 1)
    if math.isclose(off, 0, abs_tol=1e-9):
        return "0 %"
    digits = 0 if abs(off) >= 1 and ratio >= 0.1 else 2
    return f"{off:+.{digits}f} %".replace("-", "−").replace(".00", "").replace(",", "\u202f")


# ------------------------------------------------------------------------------------ regret

# As `dtbench.cost.choices.CHOOSERS`, short enough for a figure.
MODELS: Mapping[str, str] = {
    "greedy": "torch’s planner (greedy)",
    "by_cost": "torch’s planner by cost",
    "guessed": "built-in, hosts guessed",
    "layout": "built-in, hosts as they are",
    "constants": "calibrated constants",
    "curves": "calibrated curves",
    "oracle": "best of the other launches",
    "worst": "the slowest way",
}
MEAN = Style("s0", "o")


def regret_figure(regret: Regret) -> Figure:
    """A panel per library: what each model's choices cost more than the best, over all kinds and sizes."""
    panels = []
    libraries = distinct(group.library for group in regret.groups)
    means = {
        library: {model: _overall(regret, library, model) for model in _models(regret) if model != "worst"}
        for library in libraries
    }
    values = [100 * v for of in means.values() for one in of.values() if one for v in one]
    top = max(values, default=1.0)
    steps = (1, 2, 5, 10, 20, 25, 50, 100, 200, 250, 500, 1000, 2500, 5000, 10_000)
    step = next((s for s in steps if top / s <= 5), top / 4)
    x = Axis(0, top * 1.06, False, lambda v: f"{v:.0f} %", [k * step for k in range(6)])
    for index, library in enumerate(libraries):
        rows = [
            Row(
                MODELS.get(model, model),
                {"mean": 100 * one[1]},
                f"{one[1]:.0%}",
                {"mean": (100 * one[0], 100 * one[2])},
            )
            for model, one in means[library].items()
            if one is not None
        ]
        if rows:
            desc = "; ".join(f"{row.label} {row.note}" for row in rows)
            title = f"choices among {library}’s ways"
            panels.append(dot_panel(title, rows, {"mean": MEAN}, x, prefix=f"regret{index}", desc=desc))
    return Figure(
        "Regret: how much more time a model’s choices took than the fastest way, mean over all decisions; the line "
        "spans the means of the kinds and sizes of tensors. No model can lie below “best of the other launches” for "
        "long: that much is noise. What the slowest ways would cost is in the table.",
        legend(
            {"mean regret, from the best kind and size to the worst": MEAN}, prefix="regretL", lines=False
        ),
        panels,
        2,
    )


def _models(regret: Regret) -> list[str]:
    present = {model for group in regret.groups for model in group.scores}
    return [m for m in MODELS if m in present] + sorted(present - set(MODELS))


def _overall(regret: Regret, library: str, model: str) -> tuple[float, float, float] | None:
    """(least, mean weighted by decisions, largest) of the groups' means."""
    scores = [g.scores[model] for g in regret.groups if g.library == library and model in g.scores]
    decisions = sum(s.decisions for s in scores)
    if not decisions:
        return None
    mean = math.fsum(s.mean * s.decisions for s in scores) / decisions
    return min(s.mean for s in scores), mean, max(s.mean for s in scores)


def regret_table(regret: Regret) -> t.Table:
    rows = [(group, model, group.scores[model]) for group in regret.groups for model in group.scores]

    def percent(values: Sequence[float]) -> list[str]:
        return [f"{100 * v:.1f}" for v in values]

    return t.Table(
        f"Regret of every model, by kind and size, mesh {regret.mesh}",
        [
            t.text("Library", [g.library for g, _, _ in rows]),
            t.text("Kind", [g.name for g, _, _ in rows]),
            t.sizes("Size", [format_size(g.size_bytes) for g, _, _ in rows]),
            t.text("Chosen by", [MODELS.get(model, model) for _, model, _ in rows]),
            t.Column("mean", percent([s.mean for *_, s in rows]), True, "%"),
            t.Column(
                "90 % interval",
                [f"{100 * s.interval[0]:.1f} – {100 * s.interval[1]:.1f}" for *_, s in rows],
                True,
                "%",
            ),
            t.Column("largest", percent([s.worst for *_, s in rows]), True, "%"),
            t.Column("within 10 % of the best", percent([s.near for *_, s in rows]), True, "% of choices"),
            t.counts("Decisions", [s.decisions for *_, s in rows]),
            t.counts("Launches", [g.launches for g, _, _ in rows]),
        ],
        folded=True,
        note=" ".join(f"{note[:1].upper()}{note[1:]}." for note in regret.notes),
    )
