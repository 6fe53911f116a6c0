"""How to shard: the best layouts and what their steps spend, and measured steps beside predicted ones."""

from __future__ import annotations

from dtbench.records.plan import PlanFile, StepsFile
from dtbench.reporting.html import tables as t
from dtbench.reporting.html.axes import seconds_tick, value_axis
from dtbench.reporting.html.figures import (
    INTERVALS_PX,
    Bar,
    Curves,
    Figure,
    Series,
    Style,
    bars,
    curves,
    shades_of,
    stacked,
)
from dtbench.reporting.html.section import Material, Part, Section
from dtbench.text.units import format_bytes, format_seconds

PARTS = {
    "compute": "computation",
    "bubble": "bubble",
    "tensor": "tensor parallel",
    "pipeline": "sends",
    "data": "data parallel",
    "once": "optimizer",
}
STYLES = {
    "equal": Style("muted", "", (4, 3), words="as measured"),
    "steps": Style("s0", "o", None, hollow=True, words="predicted"),
}


def fill(section: Section, of: Material) -> None:
    for number, plan in enumerate(of.sources.plans):
        best = plan.best[0]
        section.lead = section.lead or f"{plan.title}: the fastest layout is {best.words}."
        what = plan.title.partition(",")[0]
        section.outcome = section.outcome or f"{what}: {best.words}, {format_seconds(best.step_s)} a step"
        span = f"{format_seconds(best.low_s)} to {format_seconds(best.high_s)}"
        section.headlines += [
            (format_seconds(best.step_s), f"a step of {what} with {best.words}, predicted, {span}"),
            (f"{100 * best.mfu:.0f} %", "MFU of that, predicted"),
        ]
        section.add(_spent(plan, number), _layouts(plan))
    for number, steps in enumerate(of.sources.steps):
        section.headlines.append((f"{100 * steps.mean_error:.1f} %", f"mean error of {steps.title}"))
        section.add(_scatter(steps, number), _steps(steps))


def _spent(plan: PlanFile, number: int) -> Figure | None:
    rows = [
        Bar(
            one.words.partition(",")[0],
            stacked((PARTS[name], s) for name in PARTS if (s := one.parts_s.get(name))),
            format_seconds(one.step_s),
        )
        for one in plan.best
    ]
    return bars(
        f"plan{number}",
        {plan.title: rows},
        shades_of(list(PARTS.values())),
        "What a step spends in the fastest layout of each split of the ranks: communication is what computation does "
        "not hide, the bubble what a pipeline waits for its first and last micro batches.",
        seconds_tick,
        width=INTERVALS_PX,
    )


def _layouts(plan: PlanFile) -> t.Table:
    best = plan.best
    return t.Table(
        f"The best layouts of {plan.considered} that were considered; {plan.fitting} fit into "
        f"{format_bytes(plan.limit_bytes)} per GPU",
        [
            t.text("Layout", [one.words for one in best]),
            *t.times(
                [
                    ("Step", [one.step_s for one in best]),
                    ("at least", [one.low_s for one in best]),
                    ("at most", [one.high_s for one in best]),
                ]
            ),
            t.percents("MFU", [one.mfu for one in best]),
            t.Column("Memory", [format_bytes(sum(one.memory_bytes.values())) for one in best], True),
            t.percents("Exposed communication", [one.exposed_s / one.step_s for one in best]),
            t.text("Where the rest goes", [one.why for one in best]),
        ],
        note=" ".join([*(f"With {c}." for c in plan.changes), *(f"Assumed: {a}." for a in plan.assumptions)]),
    )


def _scatter(steps: StepsFile, number: int) -> Figure | None:
    ends = [row.measured_s for row in steps.rows]
    rows = sorted(steps.rows, key=lambda row: row.measured_s)
    series = [
        Series("equal", [min(ends), max(ends)], [min(ends), max(ends)]),
        Series("steps", [row.measured_s for row in rows], [row.predicted_s for row in rows]),
    ]
    return curves(
        f"steps{number}",
        [Curves(steps.title, series, "; ".join(steps.verdict))],
        STYLES,
        "Predicted time over measured time; on the line they are equal. " + "; ".join(steps.verdict) + ".",
        x=value_axis(ends, seconds_tick, log=True, most=4, title="measured"),
        y=lambda values: value_axis(values, seconds_tick, log=True, title="predicted"),
    )


def _steps(steps: StepsFile) -> t.Table:
    rows = steps.rows
    return t.Table(
        steps.title,
        [
            t.text("Layout", [row.label for row in rows]),
            *t.times(
                [
                    ("Measured", [row.measured_s for row in rows]),
                    ("Predicted", [row.predicted_s for row in rows]),
                ]
            ),
            t.percents("Error", [row.error for row in rows]),
        ],
        folded=True,
    )


PLAN = Part("plan", "How to shard", fill)
