"""What changed: the verdict in words, case by case a table to sort and filter, and the ratios with their intervals."""

from __future__ import annotations

from dataclasses import replace

from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.reporting.html.axes import log_axis
from dtbench.reporting.html.changes import ROW, Changes, observations_of, why
from dtbench.reporting.html.figures import DotRow, Figure, Style, dots
from dtbench.reporting.html.section import Material, Part, ReportSection
from dtbench.text import columns
from dtbench.text.table import MAX_ROWS, Table, TableColumn
from dtbench.text.terminal import split_params
from dtbench.text.units import MISSING, format_factor, format_interval, significant

MOST_INTERVALS, MOST_CHANGED = 40, 300
STYLES = {
    "slower": Style("s1", "^"),
    "faster": Style("s3", "v"),
    "inconclusive": Style("s2", "D", hollow=True),
    "same": Style("s0", "o"),
    "failed": Style("s4", "X"),
}


def fill(section: ReportSection, of: Material) -> None:
    if of.changes is not None and of.changes.changes:
        section.add(_intervals(section, of.changes), _table(of.changes))


def _intervals(section: ReportSection, changes: Changes) -> Figure | None:
    """All that changed or may have, and of the others as many as there is room for; the slowest first."""
    comparable = [c for c in changes.changes if c.ratio and c.change_threshold]
    changed = sum(c.verdict != Verdict.SAME for c in comparable)
    most = max(min(changed, MOST_CHANGED), MOST_INTERVALS)
    drawn = section.capped(comparable, "cases, the gravest first", most)
    values = {name: {c.params.get(name) for c in drawn} for c in drawn for name in c.params}
    several = len({c.impl for c in drawn}) > 1
    rows = []
    for c in sorted(drawn, key=lambda c: -(c.ratio or 0)):
        assert c.ratio is not None and c.change_threshold is not None
        style = c.verdict if c.verdict in STYLES else "inconclusive"
        # Short enough for a figure: what tells the case from the others in it.
        differing = [str(value) for name, value in c.params.items() if len(values[name]) > 1]
        rows.append(
            DotRow(
                " ".join([c.name, *differing, *([f"({c.impl})"] if several else [])]),
                {style: c.ratio},
                f"{c.verdict.shape} {format_factor(c.ratio)}",
                {style: (c.low, c.high)},
                (1 / (1 + c.change_threshold), 1 + c.change_threshold),
            )
        )

    return dots(
        "forest",
        {"New over base": rows},
        STYLES,
        "Time now over time before, the slowest first, on a logarithmic axis; the line at 1 is no change, the grey "
        "band is too small to count. What lies right of it with its whole interval is slower. An arrowhead "
        f"at the end of an interval: no bound yet on that side. {changes.bounds}",
        lambda ratios: log_axis([*ratios, 0.9, 1.1], lambda ratio: f"{ratio:g}×"),
        intervals=True,
    )


def _table(of: Changes) -> Table:
    changes = of.changes[:MAX_ROWS]
    noise = [c.effect.sd if c.effect else None for c in changes]
    # What tells the cases apart; what they share is said once.
    varying, same = split_params([c.params for c in of.changes])
    details = [
        columns.percents("least that counts", [c.change_threshold for c in changes]),
        *([columns.percents("noise between pairs", noise)] if any(n is not None for n in noise) else []),
        replace(columns.text("seen in", [observations_of(c) for c in changes]), numeric=True),
        columns.text("Why", [why(c) for c in changes]),
    ]
    shared = ", ".join(f"{name}={value}" for name, value in same.items())
    note = f"Base and now: the median over launches of each launch’s estimate. {of.bounds} Open: not bounded by so few."
    return Table(
        "Every case: before and now",
        [
            columns.text("Verdict", [f"{c.verdict.shape} {c.verdict}" for c in changes]),
            columns.text("Suite", [c.suite for c in changes]),
            columns.text("Case", [c.describe(varying) for c in changes]),
            columns.text("Impl", [c.impl for c in changes]),
            *columns.times([("base", [c.base_s for c in changes]), ("now", [c.head_s for c in changes])]),
            columns.ratios("ratio", [c.ratio for c in changes]),
            TableColumn("interval", [_interval(c) for c in changes], True),
            *(replace(detail, screen=True) for detail in details),
        ],
        note=f"{note} In every case: {shared}." if shared else note,
        ids=[f"{ROW}{i}" for i in range(len(changes))],
        tags=[c.verdict for c in changes],
        filter="changes",
        total=len(of.changes),
    )


def _interval(case: ComparedCase) -> str:
    """`1.06 – 1.08`, one side open where there are too few observations."""
    if case.ratio is None:
        return MISSING
    if (case.low is None) == (case.high is None):
        return format_interval((case.low, case.high), " – ")
    return " – ".join("open" if end is None else significant(end, 3) for end in (case.low, case.high))


CHANGES = Part(
    "changes",
    "Changes, case by case",
    fill,
    (),
    "dtbench report NEW.jsonl --base EARLIER.jsonl; or name the result of dtbench gate",
)
