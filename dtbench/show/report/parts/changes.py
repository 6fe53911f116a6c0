"""What changed, case by case: a table to sort and filter, and the ratios with their intervals."""

from __future__ import annotations

from collections.abc import Sequence, Set

from dtbench.show.report import tables as t
from dtbench.show.report.cases import distinct
from dtbench.show.report.changes import WORDS, Change, Changes
from dtbench.show.report.figures import Style, legend
from dtbench.show.report.parts.verdict import anchor_of
from dtbench.show.report.section import Figure, Section
from dtbench.show.report.shapes import Interval, forest_panel

MOST_INTERVALS = 40
STYLES = {
    "slower": Style("s1", "^"),
    "faster": Style("s3", "v"),
    "inconclusive": Style("s2", "D", hollow=True),
    "same": Style("s0", "o"),
    "failed": Style("s4", "X"),
}


def changes_section(changes: Changes | None) -> list[Section]:
    """The section; none where nothing was compared."""
    if changes is None or not changes.changes:
        return []
    section = Section("changes", "Changes, case by case")
    section.lead = (
        "Ratio is the time now over the time before: above 1 is slower. A change counts where its interval and "
        "its size both say so; “over threshold” is the change over the least that counts for this case. "
        f"{changes.bounds}"
    )
    drawn = [c for c in changes.changes if c.ratio is not None and c.ratio > 0 and c.matters]
    if drawn:
        section.figures = [_forest(section, drawn)]
    section.tables = [_table(changes.changes)]
    return [section]


def _forest(section: Section, drawn: Sequence[Change]) -> Figure:
    if len(drawn) > MOST_INTERVALS:
        section.cuts.append(
            f"The figure shows the {MOST_INTERVALS} gravest of {len(drawn)} cases; the table has more."
        )
    varying = {
        name
        for name in distinct(name for c in drawn for name in c.params)
        if len({c.params.get(name) for c in drawn}) > 1
    }
    rows = [
        Interval(
            _label(c, varying),
            c.ratio,
            c.low,
            c.high,
            c.matters,
            STYLES.get(c.verdict, STYLES["inconclusive"]),
            f"{WORDS[c.verdict][0]} {c.verdict} {t.factor(c.ratio)}",
        )
        for c in drawn[:MOST_INTERVALS]
        if c.ratio is not None and c.matters is not None
    ]
    present = {w: s for w, s in STYLES.items() if any(c.verdict == w for c in drawn[:MOST_INTERVALS])}
    slower = sum(c.verdict == "slower" for c in drawn)
    desc = f"Ratios of {len(rows)} cases with their intervals; {slower} are slower."
    return Figure(
        "New over base, the gravest first, on a logarithmic axis; the line at 1 is no change, the grey band is too "
        "small to count. What lies right of the band with its whole interval has become slower. An arrowhead at "
        "the end of an interval: no bound yet on that side.",
        legend(present, prefix="forestL", lines=False),
        [forest_panel("New over base", rows, prefix="forest0", desc=desc)],
        1,
    )


def _label(change: Change, varying: Set[str]) -> str:
    """Short enough for a figure: what tells the case from the others in it."""
    told = [str(value) for name, value in change.params.items() if name in varying]
    return " ".join([change.name, *told, f"({change.impl})"])


def _table(changes: Sequence[Change]) -> t.Table:
    def bound(values: Sequence[float | None]) -> list[str]:
        return ["open" if v is None else t.factor(v) for v in values]

    def percent(values: Sequence[float | None], digits: int = 1) -> list[str]:
        return [t.MISSING if v is None else f"{v * 100:.{digits}f}" for v in values]

    has_noise = any(c.noise is not None for c in changes)
    known = [c.ratio is not None for c in changes]
    lows, highs = bound([c.low for c in changes]), bound([c.high for c in changes])
    return t.Table(
        "Every case: before and now",
        [
            t.text("Verdict", [f"{WORDS[c.verdict][0]} {c.verdict}" for c in changes]),
            t.text("Suite", [c.suite for c in changes]),
            t.text("Case", [c.words for c in changes]),
            t.text("Impl", [c.impl for c in changes]),
            *t.times([("base", [c.base_s for c in changes]), ("now", [c.now_s for c in changes])]),
            t.ratios("ratio", [c.ratio for c in changes]),
            t.Column("low", [x if k else t.MISSING for x, k in zip(lows, known, strict=True)], True),
            t.Column("high", [x if k else t.MISSING for x, k in zip(highs, known, strict=True)], True),
            t.Column("least that counts", percent([c.matters for c in changes]), True, "%"),
            t.Column(
                "over threshold",
                [t.MISSING if c.ratio is None or not c.matters else f"{c.severity:+.1f}" for c in changes],
                True,
            ),
            *(
                [t.Column("noise between pairs", percent([c.noise for c in changes]), True, "%")]
                if has_noise
                else []
            ),
            t.text("Observations", [c.observations for c in changes]),
            t.text("Estimator", [c.estimator for c in changes]),
            t.text("Why", [c.reason for c in changes]),
        ],
        note="Base and now: the median over launches of each launch’s estimate. “open”: so few observations "
        "bound it on no side.",
        ids=[anchor_of(i) for i in range(len(changes))],
        tags=[c.verdict for c in changes],
        filter="changes",
    )
