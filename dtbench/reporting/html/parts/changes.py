"""Changes from base to head: ratios with their intervals, and a table to sort and filter."""

from dataclasses import replace

from dtbench.records.comparison import ComparedCase, Verdict
from dtbench.reporting.html.axes import log_axis
from dtbench.reporting.html.changes import ROW, Changes, observations_of, reason_text
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


def fill(section: ReportSection, material: Material) -> None:
    if material.changes is not None and material.changes.changes:
        section.add(_intervals(section, material.changes), _table(material.changes))


def _intervals(section: ReportSection, changes: Changes) -> Figure | None:
    """Draws all cases that changed or may have changed, and others if there is room; the slowest first."""
    comparable = [c for c in changes.changes if c.ratio and c.change_threshold]
    changed = sum(c.verdict != Verdict.SAME for c in comparable)
    drawn = section.capped(
        comparable, "cases, the gravest first", max(min(changed, MOST_CHANGED), MOST_INTERVALS)
    )
    values = {name: {c.params.get(name) for c in drawn} for c in drawn for name in c.params}
    several = len({c.impl for c in drawn}) > 1
    rows = []
    for c in sorted(drawn, key=lambda c: -(c.ratio or 0)):
        assert c.ratio is not None and c.change_threshold is not None
        style = c.verdict if c.verdict in STYLES else "inconclusive"
        # A short label: only the params that differ between the drawn cases.
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
        {"Head / base": rows},
        STYLES,
        "Time of head / time of base, the slowest first, on a logarithmic axis. The line at 1 means no change; changes "
        "within the grey band are ignored. Slower: mark right of the band, interval right of the line. An arrowhead: "
        f"no bound on that side. {changes.bounds}",
        lambda ratios: log_axis([*ratios, 0.9, 1.1], lambda ratio: f"{ratio:g}×"),
        intervals=True,
    )


def _table(changes: Changes) -> Table:
    shown = changes.changes[:MAX_ROWS]
    noise = [c.effect.sd if c.effect else None for c in shown]
    # Params that all cases share are listed once, in the note.
    varying, shared_params = split_params([c.params for c in changes.changes])
    details = [
        columns.percents("threshold", [c.change_threshold for c in shown]),
        *([columns.percents("noise between pairs", noise)] if any(n is not None for n in noise) else []),
        replace(columns.text("observations", [observations_of(c) for c in shown]), numeric=True),
        columns.text("Reason", [reason_text(c) for c in shown]),
    ]
    shared = ", ".join(f"{name}={value}" for name, value in shared_params.items())
    note = (
        f"Base and head: median over launches of each launch’s estimate. {changes.bounds} “open”: too few launches for "
        "a bound. Changes below the threshold are ignored."
    )
    return Table(
        "Every case: base and head",
        [
            columns.text("Verdict", [f"{c.verdict.shape} {c.verdict}" for c in shown]),
            columns.text("Suite", [c.suite for c in shown]),
            columns.text("Case", [c.describe(varying) for c in shown]),
            columns.text("Impl", [c.impl for c in shown]),
            *columns.times([("base", [c.base_s for c in shown]), ("head", [c.head_s for c in shown])]),
            columns.ratios("ratio", [c.ratio for c in shown]),
            TableColumn("interval", [_interval(c) for c in shown], True),
            *(replace(detail, only_on_screen=True) for detail in details),
        ],
        note=f"{note} In every case: {shared}." if shared else note,
        ids=[f"{ROW}{i}" for i in range(len(shown))],
        tags=[c.verdict for c in shown],
        filter="changes",
        total=len(changes.changes),
    )


def _interval(case: ComparedCase) -> str:
    """Formats the interval of a ratio, e.g. "1.06 – 1.08"; a side without a bound is "open"."""
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
    "dtbench report HEAD.jsonl --base BASE.jsonl -o PAGE.html, or dtbench report GATE/gate.json -o PAGE.html",
)
