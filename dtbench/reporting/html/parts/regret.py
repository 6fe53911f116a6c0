"""What the choices of each cost model cost more than the best."""

from __future__ import annotations

import math
from collections.abc import Mapping

from dtbench.records.cost_model import Regret
from dtbench.reporting.html import tables as t
from dtbench.reporting.html.axes import value_axis
from dtbench.reporting.html.cases import distinct
from dtbench.reporting.html.figures import Row, Style, dots
from dtbench.reporting.html.section import Section
from dtbench.text.units import format_size

# As `dtbench.cost.regret.CHOOSERS`, short enough for a figure.
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
MEAN = {"mean": Style("s0", "o", words="mean regret, from the best kind and size to the worst")}


def add_regret(section: Section, regret: Regret) -> None:
    if not regret.groups:
        return
    section.lead = section.lead or "What the choices of each cost model cost more than the best."
    present = distinct(model for group in regret.groups for model in group.scores)
    models = [m for m in MODELS if m in present and m != "worst"] + sorted(set(present) - set(MODELS))
    panels: dict[str, list[Row]] = {}
    for library in distinct(group.library for group in regret.groups):
        rows = panels.setdefault(f"choices among {library}’s ways", [])
        for model in models:
            if (means := overall(regret, library, model)) is not None:
                low, mean, high = (100 * one for one in means)
                words = MODELS.get(model, model)
                rows.append(Row(words, {"mean": mean}, f"{mean:.0f}%", {"mean": (low, high)}))
    section.add(
        dots(
            "regret",
            panels,
            MEAN,
            "Regret: how much more time a model’s choices took than the fastest way, mean over all decisions; the line "
            "spans the means of the kinds and sizes of tensors. No model can lie below “best of the other launches” "
            "for long: that much is noise. What the slowest ways would cost is in the table.",
            lambda values: value_axis([max(*values, 1.0)], lambda v: f"{v:.0f} %", log=False),
        ),
        _table(regret),
    )


def overall(regret: Regret, library: str, model: str) -> tuple[float, float, float] | None:
    """(least, mean weighted by decisions, largest) of the groups' means."""
    scores = [g.scores[model] for g in regret.groups if g.library == library and model in g.scores]
    decisions = sum(s.decisions for s in scores)
    if not decisions:
        return None
    mean = math.fsum(s.mean * s.decisions for s in scores) / decisions
    return min(s.mean for s in scores), mean, max(s.mean for s in scores)


def _table(regret: Regret) -> t.Table:
    rows = [(group, model, score) for group in regret.groups for model, score in group.scores.items()]
    scores = [score for *_, score in rows]
    intervals = [f"{100 * s.interval[0]:.1f} – {100 * s.interval[1]:.1f}" for s in scores]
    return t.Table(
        f"Regret of every model, by kind and size, mesh {regret.mesh}",
        [
            t.text("Library", [g.library for g, *_ in rows]),
            t.text("Kind", [g.name for g, *_ in rows]),
            t.sizes("Size", [format_size(g.size_bytes) for g, *_ in rows]),
            t.text("Chosen by", [MODELS.get(model, model) for _, model, _ in rows]),
            t.percents("mean", [s.mean for s in scores]),
            t.Column("90 % interval", intervals, True, "%"),
            t.percents("largest", [s.worst for s in scores]),
            t.percents("within 10 % of the best", [s.near for s in scores], unit="% of choices"),
            t.counts("Decisions", [s.decisions for s in scores]),
            t.counts("Launches", [g.launches for g, *_ in rows]),
        ],
        folded=True,
        note=" ".join(f"{note[:1].upper()}{note[1:]}." for note in regret.notes),
    )
